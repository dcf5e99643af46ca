//! What the NICs of this process ask of the rest of the host, and tell it, where they are not all
//! there are.
//!
//! A process has the NICs of one network. Those of others are on the same RNICs: an address may be
//! theirs, and so may a queue pair. The ways to other daemons and to third-party hosts are the
//! host's as well. So who serves one network has an [`Uplink`]: it asks whoever knows all networks,
//! and believes that. Where one process has all NICs there is none, and its [`Directory`] knows.
//!
//! ```text
//!  SET_GID, connection ── BlockingJob ──> Uplink: waits for an answer, on the command's own thread
//!  a neighbour ── BlockingJob ──> Uplink: asks for it, and looks again
//!  worker ── QPs, addresses given back, datagrams ──> Uplink: a queue, and never a wait
//! ```

use std::sync::Arc;

use vhost_rdma_engine::cm::Mad;
use vhost_rdma_engine::link::Gid;

use super::directory::Directory;
use super::ways::{Agreed, Far, Mac, Uplink};

impl Directory {
    /// NICs here are not all of the host's; there is one uplink at most.
    pub fn set_uplink(&self, uplink: Arc<dyn Uplink>) {
        if self.uplink.set(uplink).is_err() {
            tracing::error!("there is an uplink already");
        }
    }

    /// The addresses that NICs here have.
    #[must_use]
    pub fn held(&self) -> Vec<(Mac, Gid)> {
        self.known().held()
    }

    pub(super) fn uplink(&self) -> Option<&Arc<dyn Uplink>> {
        self.uplink.get()
    }

    /// Asks about a queue pair that a guest wants to connect to, which is of this host or not, and
    /// keeps what was agreed with it. False: it may not. May wait.
    pub(super) fn ask_about(&self, device: &str, end: (Gid, u32), here: bool) -> bool {
        let Some(uplink) = self.uplink() else { return true };
        let Some(far) = uplink.peer(device, end.0, end.1) else { return false };
        match far.agreed {
            Some((psn, mtu)) => self.set_agreed(device, end, Agreed { psn, mtu }),
            None => self.forget_agreed(device, end),
        }
        !(here && far.is_others)
    }

    /// What was agreed with the QP of an end; what was only asked for is not kept.
    pub(super) fn take_agreed(&self, device: &str, end: (Gid, u32)) -> Option<Agreed> {
        let agreed = self.agreed(device, end);
        if agreed.is_some() && self.uplink().is_some() {
            self.forget_agreed(device, end);
        }
        agreed
    }

    /// What there is to tell a network of the queue pair `end.1` at the host's address `end.0`.
    #[must_use]
    pub fn far(&self, device: &str, end: (Gid, u32), vni: u32) -> Far {
        let agreed = self.agreed(device, end).map(|Agreed { psn, mtu }| (psn, mtu));
        Far { is_others: self.is_others(device, end.1, vni), agreed }
    }

    /// Puts a datagram into the inbox of the NIC that has its destination; false if none has, or
    /// there is no room.
    pub fn deliver(&self, device: &str, vni: u32, mad: Mad) -> bool {
        let held = (vni, mad.dest, device.to_owned());
        let inbox = self.known().holder(&held).map(|holder| holder.inbox.clone());
        inbox.is_some_and(|inbox| inbox.put(mad))
    }
}
