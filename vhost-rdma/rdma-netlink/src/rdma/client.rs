//! The NLDEV client.

use std::os::fd::{AsFd as _, AsRawFd as _};

use netlink_sys::protocols::NETLINK_RDMA;

use super::code::NetnsMode;
use super::codec::{self, Message};
use super::constants::{CLIENT, attribute, command};
use super::device::{CharDevice, Device, Port, System};
use super::resource::{Resource, ResourceCount};
use super::statistics::Counter;
use crate::transport::socket::{Channel, Request};
use crate::{Error, Netns, Result};

/// RDMA devices as one network namespace sees them.
#[derive(Debug)]
pub struct Rdma {
    channel: Channel,
    /// Where it was opened, if not where its user is.
    netns: Option<Netns>,
}

/// `RDMA_NL_GET_TYPE`.
pub(super) const fn message_type(command: u16) -> u16 {
    (CLIENT << 10) + command
}

impl Rdma {
    /// Opens the namespace of the calling thread.
    ///
    /// # Errors
    /// [`Error::is_unsupported`] if the kernel has no RDMA (module `ib_core` is not loaded).
    pub fn open() -> Result<Self> {
        Ok(Self { channel: Channel::open(NETLINK_RDMA, "RDMA")?, netns: None })
    }

    /// Opens another namespace.
    ///
    /// # Errors
    /// As [`open`](Self::open), or the namespace cannot be entered.
    pub fn open_in(netns: &Netns) -> Result<Self> {
        let opened = netns.run(Self::open)?;
        Ok(Self { netns: Some(netns.try_clone()?), ..opened })
    }

    /// All devices.
    ///
    /// # Errors
    /// The kernel refuses, or its answer makes no sense.
    pub fn devices(&mut self) -> Result<Vec<Device>> {
        self.dump(command::GET, &[], "list the RDMA devices")
    }

    /// The device of this name.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if there is none in this namespace.
    pub fn by_name(&mut self, name: &str) -> Result<Device> {
        // The kernel finds by index only.
        let mut devices = self.devices()?;
        let at = devices.iter().position(|device| device.name == name);
        at.map(|at| devices.swap_remove(at)).ok_or_else(|| {
            Error::NotFound(format!("there is no RDMA device {name} in this namespace"))
        })
    }

    /// The device of this index.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if there is none in this namespace.
    pub fn by_index(&mut self, index: u32) -> Result<Device> {
        self.get(command::GET, &of_device(index), &format!("find RDMA device {index}"))
    }

    /// The ports of a device.
    ///
    /// # Errors
    /// The device is gone.
    pub fn ports(&mut self, index: u32) -> Result<Vec<Port>> {
        self.dump(
            command::PORT_GET,
            &of_device(index),
            &format!("list the ports of RDMA device {index}"),
        )
    }

    /// Gives a device another name.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the name is taken on this host.
    pub fn rename(&mut self, index: u32, name: &str) -> Result<()> {
        let mut payload = of_device(index);
        codec::put(&mut payload, attribute::DEV_NAME, &check_name(name)?);
        self.set(command::SET, &payload, &format!("rename RDMA device {index} to {name}"))
    }

    /// Moves a device to another namespace; needs [`NetnsMode::Exclusive`]. Its users are
    /// disconnected, its GIDs follow the addresses of its interface there.
    ///
    /// The kernel demands not only the socket but also the calling *thread* in the device's
    /// namespace (`rdma_dev_change_netns` is told `current`'s); a client of
    /// [`open_in`](Self::open_in) sees to that itself.
    ///
    /// With `name` it is renamed in the same step on kernels that can; older ones take the name as
    /// a request to rename and nothing more, so the move follows, and if that fails the old name
    /// comes back.
    ///
    /// # Errors
    /// [`Error::is_unsupported`] in shared mode or if the driver cannot; [`Error::is_exists`] if
    /// the name is taken.
    pub fn move_to(&mut self, index: u32, netns: &Netns, name: Option<&str>) -> Result<()> {
        let what = format!("move RDMA device {index} to another namespace");
        let fd = u32::try_from(netns.as_fd().as_raw_fd())
            .map_err(|error| Error::Invalid(error.to_string()))?;
        let mut plain = of_device(index);
        codec::put(&mut plain, attribute::NET_NS_FD, &fd);
        let Some(name) = name else { return self.set_at_home(&plain, &what) };
        if self.system()?.netns_mode == Some(NetnsMode::Shared) {
            // Refused, in the kernel's words; with a name an older kernel would rename it.
            return self.set_at_home(&plain, &what);
        }
        let old = self.by_index(index)?.name;
        let mut renamed = plain.clone();
        codec::put(&mut renamed, attribute::DEV_NAME, &check_name(name)?);
        self.set_at_home(&renamed, &what)?;
        if Self::open_in(netns)?.by_index(index).is_ok() {
            return Ok(());
        }
        self.set_at_home(&plain, &what).inspect_err(|_| {
            let _ = self.rename(index, &old);
        })
    }

    /// Makes a software device (`rxe` or `siw`) on a network interface.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the name is taken or the interface has one; the driver's module is
    /// not loaded.
    pub fn add_link(&mut self, name: &str, kind: &str, netdev: &str) -> Result<()> {
        let mut payload = Vec::new();
        codec::put(&mut payload, attribute::DEV_NAME, &check_name(name)?);
        codec::put(&mut payload, attribute::LINK_TYPE, &kind.to_owned());
        codec::put(&mut payload, attribute::NDEV_NAME, &netdev.to_owned());
        self.set(command::NEWLINK, &payload, &format!("make the {kind} device {name} on {netdev}"))
    }

    /// Removes a software device.
    ///
    /// # Errors
    /// It is hardware, or gone.
    pub fn delete_link(&mut self, index: u32) -> Result<()> {
        self.set(command::DELLINK, &of_device(index), &format!("delete RDMA device {index}"))
    }

    /// What holds for all devices.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn system(&mut self) -> Result<System> {
        self.get(command::SYS_GET, &[], "read the RDMA system settings")
    }

    /// Changes who may see a device. Only while no other network namespace exists.
    ///
    /// # Errors
    /// `EBUSY` if there are other namespaces: set it at boot (`options ib_core netns_mode=0`).
    pub fn set_netns_mode(&mut self, mode: NetnsMode) -> Result<()> {
        let mut payload = Vec::new();
        codec::put(&mut payload, attribute::SYS_NETNS_MODE, &mode);
        self.set(command::SYS_SET, &payload, &format!("set the RDMA namespace mode to {mode}"))
    }

    /// The character device of a kind (`uverbs`, `umad`, `issm`, `rdma_cm`) for a device, or for
    /// all.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if there is none; the module may not be loaded.
    pub fn char_device(
        &mut self,
        kind: &str,
        device: Option<u32>,
        port: Option<u32>,
    ) -> Result<CharDevice> {
        let mut payload = device.map(of_device).unwrap_or_default();
        if let Some(port) = port {
            codec::put(&mut payload, attribute::PORT_INDEX, &port);
        }
        codec::put(&mut payload, attribute::CHARDEV_TYPE, &kind.to_owned());
        self.get(command::GET_CHARDEV, &payload, &format!("find the {kind} character device"))
    }

    /// How many objects of each kind a device has.
    ///
    /// # Errors
    /// The device is gone.
    pub fn resource_counts(&mut self, index: u32) -> Result<Vec<ResourceCount>> {
        let what = format!("count the objects of RDMA device {index}");
        self.table(command::RES_GET, attribute::RES_SUMMARY, &of_device(index), &what)
    }

    /// The objects of a kind on a device: `rdma.resources::<QueuePair>(index)`.
    ///
    /// # Errors
    /// The device is gone, or the kernel is too old for this kind.
    pub fn resources<R: Resource>(&mut self, index: u32) -> Result<Vec<R>> {
        let what = format!("list the {} of RDMA device {index}", R::NAME);
        let payload = of_device(index);
        let request = Request {
            message_type: message_type(R::COMMAND),
            flags: 0,
            payload: &payload,
            what: &what,
        };
        let parts =
            self.channel.dump(request, |payload| Ok(Some(codec::list::<R>(payload, R::TABLE))))?;
        Ok(parts.into_iter().flatten().collect())
    }

    /// The hardware counters of a port.
    ///
    /// # Errors
    /// The device has none, or is gone.
    pub fn counters(&mut self, index: u32, port: u32) -> Result<Vec<Counter>> {
        let mut payload = of_device(index);
        codec::put(&mut payload, attribute::PORT_INDEX, &port);
        let what = format!("read the counters of port {port} of RDMA device {index}");
        self.table(command::STAT_GET, attribute::STAT_HWCOUNTERS, &payload, &what)
    }

    /// Sends a move from a thread that is where the socket is.
    fn set_at_home(&mut self, payload: &[u8], what: &str) -> Result<()> {
        match self.netns.as_ref().map(Netns::try_clone).transpose()? {
            Some(netns) => netns.run(|| self.set(command::SET, payload, what)),
            None => self.set(command::SET, payload, what),
        }
    }

    fn dump<T: Message>(&mut self, command: u16, payload: &[u8], what: &str) -> Result<Vec<T>> {
        let request = Request { message_type: message_type(command), flags: 0, payload, what };
        self.channel.dump(request, |payload| T::decode(payload).map(Some))
    }

    fn get<T: Message>(&mut self, command: u16, payload: &[u8], what: &str) -> Result<T> {
        let mut found = None;
        let request = Request { message_type: message_type(command), flags: 0, payload, what };
        self.channel.call(request, |_, payload| {
            found = Some(T::decode(payload)?);
            Ok(())
        })?;
        found.ok_or_else(|| Error::decode(what, "there is none"))
    }

    fn table<T: codec::Element>(
        &mut self,
        command: u16,
        table: u16,
        payload: &[u8],
        what: &str,
    ) -> Result<Vec<T>> {
        let mut list = Vec::new();
        let request = Request { message_type: message_type(command), flags: 0, payload, what };
        self.channel.call(request, |_, payload| {
            list.extend(codec::list::<T>(payload, table));
            Ok(())
        })?;
        Ok(list)
    }

    fn set(&mut self, command: u16, payload: &[u8], what: &str) -> Result<()> {
        let request = Request { message_type: message_type(command), flags: 0, payload, what };
        self.channel.call(request, |_, _| Ok(()))
    }
}

fn of_device(index: u32) -> Vec<u8> {
    let mut payload = Vec::new();
    codec::put(&mut payload, attribute::DEV_INDEX, &index);
    payload
}

/// `IB_DEVICE_NAME_MAX` is 64 with the terminating zero; '%' would ask for a number.
fn check_name(name: &str) -> Result<String> {
    let good = (1..64).contains(&name.len())
        && !name.bytes().any(|byte| matches!(byte, b'/' | b'%' | 0) || byte.is_ascii_whitespace());
    if good {
        Ok(name.to_owned())
    } else {
        Err(Error::Invalid(format!(
            "{name:?} is no name for an RDMA device: 1 to 63 characters, no '/', '%' or space"
        )))
    }
}
