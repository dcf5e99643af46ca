//! The rtnetlink client: interfaces.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;

use netlink_packet_core::{DefaultNla, Emitable, NLA_F_NESTED, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkFlags, LinkHeader, LinkMessage,
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::attributes::{IFLA_ALT_IFNAME, IFLA_PROP_LIST, Link};
use super::vf::{VfChange, VfSettings, vf_info};
use crate::transport::attr;
use crate::transport::socket::{Channel, Request};
use crate::{Error, HardwareAddress, Netns, Result};

pub(super) const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_NEWLINKPROP: u16 = 108;
const RTM_DELLINKPROP: u16 = 109;

/// Interfaces of one network namespace.
#[derive(Debug)]
pub struct Links {
    channel: Channel,
}

impl Links {
    /// Opens the namespace of the calling thread.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn open() -> Result<Self> {
        let mut channel = Channel::open(NETLINK_ROUTE, "route")?;
        channel.strict();
        Ok(Self { channel })
    }

    /// Opens another namespace.
    ///
    /// # Errors
    /// It cannot be entered, or the socket cannot be made.
    pub fn open_in(netns: &Netns) -> Result<Self> {
        netns.run(Self::open)
    }

    /// All interfaces; `vfs` of each is filled.
    ///
    /// # Errors
    /// The kernel refuses, or its answer makes no sense.
    pub fn list(&mut self) -> Result<Vec<Link>> {
        let what = "list the network interfaces";
        let message = question(LinkHeader::default(), Vec::new());
        let payload = emit(&message);
        let request = Request { message_type: RTM_GETLINK, flags: 0, payload: &payload, what };
        self.channel.dump(request, |payload| {
            Link::decode(payload).map(Some).map_err(|reason| Error::decode(what, reason))
        })
    }

    /// The interface that is found by this name: its own, or another that it has
    /// ([`Link::altnames`]).
    ///
    /// # Errors
    /// [`Error::is_not_found`] if there is none.
    pub fn by_name(&mut self, name: &str) -> Result<Link> {
        check_name(name)?;
        let message = question(LinkHeader::default(), vec![LinkAttribute::IfName(name.to_owned())]);
        self.get(&message, &format!("find network interface {name}"))
    }

    /// The interface of this index.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if there is none.
    pub fn by_index(&mut self, index: u32) -> Result<Link> {
        self.get(&question(header(index), Vec::new()), &format!("find network interface {index}"))
    }

    fn get(&mut self, message: &LinkMessage, what: &str) -> Result<Link> {
        let payload = emit(message);
        let mut found = None;
        let request = Request { message_type: RTM_GETLINK, flags: 0, payload: &payload, what };
        self.channel.call(request, |_, payload| {
            found = Some(Link::decode(payload).map_err(|reason| Error::decode(what, reason))?);
            Ok(())
        })?;
        found.ok_or_else(|| Error::NotFound(format!("cannot {what}: there is none")))
    }

    /// Brings it up or down.
    ///
    /// # Errors
    /// The kernel or the driver refuses.
    pub fn set_up(&mut self, index: u32, up: bool) -> Result<()> {
        let mut header = header(index);
        header.change_mask = LinkFlags::Up;
        header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
        let what = format!("bring network interface {index} {}", if up { "up" } else { "down" });
        self.change(header, Vec::new(), &what)
    }

    /// Gives it another name. Kernels before 6.2 want it down first.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the name is taken.
    pub fn rename(&mut self, index: u32, name: &str) -> Result<()> {
        check_name(name)?;
        let what = format!("rename network interface {index} to {name}");
        self.change(header(index), vec![LinkAttribute::IfName(name.to_owned())], &what)
    }

    /// Gives it one more name, by which it can be found as by its own. Nobody else can have it.
    ///
    /// # Errors
    /// [`Error::is_exists`] if an interface has it already.
    pub fn add_altname(&mut self, index: u32, name: &OsStr) -> Result<()> {
        self.altname(RTM_NEWLINKPROP, NLM_F_CREATE | NLM_F_EXCL, index, name, "name")
    }

    /// Takes one of its other names away.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if it has no such name.
    pub fn delete_altname(&mut self, index: u32, name: &OsStr) -> Result<()> {
        self.altname(RTM_DELLINKPROP, 0, index, name, "no longer name")
    }

    fn altname(
        &mut self,
        message_type: u16,
        flags: u16,
        index: u32,
        name: &OsStr,
        verb: &str,
    ) -> Result<()> {
        let what = format!("{verb} network interface {index} {name:?} as well");
        let bytes = name.as_bytes();
        // `ALTIFNAMSIZ` is 128 with the zero.
        if bytes.is_empty() || bytes.len() > 127 || bytes.contains(&0) {
            return Err(Error::Invalid(format!(
                "cannot {what}: 1 to 127 bytes, none of them zero"
            )));
        }
        let mut list = Vec::new();
        attr::put(&mut list, IFLA_ALT_IFNAME, bytes);
        let list = DefaultNla::new(IFLA_PROP_LIST | NLA_F_NESTED, list);
        let message = message(header(index), vec![LinkAttribute::Other(list)]);
        self.send(message_type, flags, &message, &what)
    }

    /// Moves it to another namespace, and names it there if `name` is given; it is down then and
    /// has no addresses. Its index may change. Its other names go along, and one that is taken
    /// there is in the way like its own.
    ///
    /// The kernel moves first and renames then (`do_setlink`): a name that is taken is found before
    /// the move, unless somebody takes it in that moment.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the name is taken there. If the interface has moved nevertheless,
    /// the message says so.
    pub fn move_to(&mut self, index: u32, netns: &Netns, name: Option<&str>) -> Result<()> {
        let what = format!("move network interface {index} to another namespace");
        let mut attributes = vec![LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd())];
        if let Some(name) = name {
            check_name(name)?;
            if Self::open_in(netns)?.by_name(name).is_ok() {
                let message = Some(format!("the name {name} is taken there"));
                let errno = rustix::io::Errno::EXIST.raw_os_error();
                return Err(Error::Kernel { what, errno, message });
            }
            attributes.push(LinkAttribute::IfName(name.to_owned()));
        }
        self.change(header(index), attributes, &what).map_err(|error| match error {
            Error::Kernel { what, errno, .. }
                if name.is_some() && self.by_index(index).is_err() =>
            {
                let message = Some("it has moved, under its old name".to_owned());
                Error::Kernel { what, errno, message }
            }
            other => other,
        })
    }

    /// Sets the link-layer address. Some drivers want the interface down.
    ///
    /// # Errors
    /// The driver refuses it.
    pub fn set_address(&mut self, index: u32, address: &HardwareAddress) -> Result<()> {
        let what = format!("set the address of network interface {index} to {address}");
        self.change(header(index), vec![LinkAttribute::Address(address.as_bytes().to_vec())], &what)
    }

    /// Sets the MTU.
    ///
    /// # Errors
    /// The driver refuses it.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<()> {
        let what = format!("set the MTU of network interface {index} to {mtu}");
        self.change(header(index), vec![LinkAttribute::Mtu(mtu)], &what)
    }

    /// Sets the description (`ip link … alias`), up to 255 bytes: a place to note whose it is.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn set_alias(&mut self, index: u32, text: &str) -> Result<()> {
        let what = format!("describe network interface {index}");
        // Without the terminating zero: the kernel would keep it, and an empty text removes the
        // alias.
        let raw = DefaultNla::new(IFLA_IFALIAS, text.as_bytes().to_vec());
        self.change(header(index), vec![LinkAttribute::Other(raw)], &what)
    }

    /// Makes it a port of a bridge (or bond), or of none.
    ///
    /// # Errors
    /// The master takes no such port.
    pub fn set_master(&mut self, index: u32, master: Option<u32>) -> Result<()> {
        let what = match master {
            Some(master) => format!("attach network interface {index} to {master}"),
            None => format!("detach network interface {index}"),
        };
        self.change(header(index), vec![LinkAttribute::Controller(master.unwrap_or(0))], &what)
    }

    /// Changes settings of a virtual function of this physical one, one request for each field.
    ///
    /// # Errors
    /// The driver refuses a field; the fields before it are changed. [`VfChange::inverse`] says how
    /// to put them back.
    pub fn set_vf(&mut self, index: u32, vf: u32, change: &VfChange) -> Result<()> {
        let before = if change.is_empty() { return Ok(()) } else { self.vf(index, vf)? };
        for (what, info) in change.requests(vf, &before) {
            let list = LinkAttribute::VfInfoList(vf_info(info));
            self.change(header(index), vec![list], &format!("set the {what}"))?;
        }
        Ok(())
    }

    /// The settings of one virtual function.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if there is none of this number.
    pub fn vf(&mut self, index: u32, vf: u32) -> Result<VfSettings> {
        let link = self.by_index(index)?;
        link.vfs.into_iter().find(|settings| settings.index == vf).ok_or_else(|| {
            Error::NotFound(format!("network interface {} has no VF {vf}", link.name))
        })
    }

    /// Deletes a virtual interface (bridge, veth, …).
    ///
    /// # Errors
    /// [`Error::is_not_found`] if it is gone; hardware cannot be deleted.
    pub fn delete(&mut self, index: u32) -> Result<()> {
        let message = message(header(index), Vec::new());
        self.send(RTM_DELLINK, 0, &message, &format!("delete network interface {index}"))
    }

    fn change(
        &mut self,
        header: LinkHeader,
        attributes: Vec<LinkAttribute>,
        what: &str,
    ) -> Result<()> {
        self.send(RTM_SETLINK, 0, &message(header, attributes), what)
    }

    pub(super) fn create(&mut self, attributes: Vec<LinkAttribute>, what: &str) -> Result<()> {
        self.send(
            RTM_NEWLINK,
            NLM_F_CREATE | NLM_F_EXCL,
            &message(LinkHeader::default(), attributes),
            what,
        )
    }

    pub(super) fn send(
        &mut self,
        message_type: u16,
        flags: u16,
        message: &impl Emitable,
        what: &str,
    ) -> Result<()> {
        let payload = emit(message);
        self.channel.call(Request { message_type, flags, payload: &payload, what }, |_, _| Ok(()))
    }

    pub(super) fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }
}

const IFLA_IFALIAS: u16 = 20;

/// `IFNAMSIZ` less the zero; what the kernel's `dev_valid_name` takes.
pub(super) fn check_name(name: &str) -> Result<()> {
    let good = (1..16).contains(&name.len())
        && name != "."
        && name != ".."
        && !name.bytes().any(|byte| matches!(byte, b'/' | b':' | 0) || byte.is_ascii_whitespace());
    if good {
        Ok(())
    } else {
        Err(Error::Invalid(format!(
            "{name:?} is no name for a network interface: 1 to 15 characters, no '/', ':' or space"
        )))
    }
}

fn header(index: u32) -> LinkHeader {
    LinkHeader { index, ..LinkHeader::default() }
}

fn message(header: LinkHeader, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header = header;
    message.attributes = attributes;
    message
}

/// Virtual functions are told only on request, and statistics would double the answer.
fn question(header: LinkHeader, mut attributes: Vec<LinkAttribute>) -> LinkMessage {
    attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats]));
    message(header, attributes)
}

pub(super) fn emit(message: &impl Emitable) -> Vec<u8> {
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    bytes
}
