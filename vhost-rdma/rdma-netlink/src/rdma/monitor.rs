//! Announcements of devices that come, go and change (Linux 6.12 and later; see
//! [`System::monitor`](super::System::monitor)).

use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::protocols::NETLINK_RDMA;

use super::client::message_type;
use super::codec::{Message, messages};
use super::constants::{GROUP_NOTIFY, command};
use crate::transport::socket::Channel;
use crate::{Netns, Result};

messages! {
    /// Something has happened to a device.
    Event {
        /// What.
        kind: EventKind = EVENT_TYPE,
        /// To which device.
        device_index: u32 = DEV_INDEX,
        ;
        /// Its name.
        device: String = DEV_NAME,
        /// The port concerned.
        port: u32 = PORT_INDEX,
        /// The network interface concerned.
        netdev_index: u32 = NDEV_INDEX,
        /// Its name.
        netdev: String = NDEV_NAME,
    }
}

pub use super::code::EventKind;

/// A socket that hears announcements.
#[derive(Debug)]
pub struct Monitor {
    channel: Channel,
}

impl Monitor {
    /// Listens in the calling thread's namespace.
    ///
    /// # Errors
    /// The kernel has no RDMA netlink, or the caller may not listen.
    pub fn open() -> Result<Self> {
        let mut channel = Channel::open(NETLINK_RDMA, "RDMA")?;
        channel.subscribe(GROUP_NOTIFY, "listen for RDMA devices")?;
        Ok(Self { channel })
    }

    /// Listens in another namespace.
    ///
    /// # Errors
    /// As [`open`](Self::open), or the namespace cannot be entered.
    pub fn open_in(netns: &Netns) -> Result<Self> {
        netns.run(Self::open)
    }

    /// Waits for the next announcements. Use [`as_fd`](Self::as_fd) to wait for other things as
    /// well.
    ///
    /// # Errors
    /// `ENOBUFS` if announcements were lost: list the devices again.
    pub fn wait(&mut self) -> Result<Vec<Event>> {
        self.channel.event("listen for RDMA devices", |kind, payload| {
            (kind == message_type(command::MONITOR)).then(|| Event::decode(payload)).transpose()
        })
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
