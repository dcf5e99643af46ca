//! What one network on RNICs has outside of its own process, and may tell of it.
//!
//! ```text
//!  process ── Told ──> Branch ─┬─> Directory: addresses, queue pairs of all networks
//!                              └─> channel, CM bridge: datagrams that leave the host
//!  process <── Host ── inboxes <── channel, CM bridge
//! ```
//!
//! A process has device contexts, so one that a guest has taken over sends what it likes from this
//! host's RNICs. What it tells here must not be worth more: it is believed about its own network
//! alone. Which device a NIC is on, which of the host's addresses stands for it and which addresses
//! it may have are those that the operator gave; a datagram is carried from an address that its NIC
//! holds, in that NIC's share of each queue; of queue pairs and addresses no more are kept than the
//! network's NICs may have; a neighbour is looked for so many times a second. Nothing here waits
//! for a process: a datagram that finds its socket full is lost, as on a wire.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cm::Inbox;
use crate::dataplane::{Outside, Searches};
use crate::device::nic::gid as gid_of;
use crate::link::Gid;
use crate::network_process::{Asked, Datagram, Host, Settled, Told};
use crate::nic::limits::GID_TABLE_LEN;
use crate::node::{Backing, NicConfig};
use crate::rnic::{Claim, Directory, Far, Mac, NicQuotas};

/// Datagrams that are brought to a NIC at once, before the next NIC's.
const TURN: usize = 16;

/// A NIC of the network, as far as others meet it.
struct Post {
    device: String,
    /// The host's address that stands for its own.
    through: Option<Gid>,
    /// The addresses that it may have; none: any.
    may: Vec<Gid>,
    /// Those that it has.
    has: BTreeSet<Gid>,
    /// QPs that it may have, or might once: they are still there when limits fall.
    max_qps: u64,
    quotas: NicQuotas,
    /// Datagrams for it.
    inbox: Arc<Inbox>,
}

#[derive(Default)]
struct State {
    posts: BTreeMap<Mac, Post>,
    /// Queue pairs that its process has told of.
    told: u64,
    /// Of neighbours, for its process.
    searches: Searches,
    /// What its process still tells is nobody's.
    closed: bool,
}

/// Has what has come for a network's NICs be brought to them.
pub(super) type Ring = Arc<dyn Fn() + Send + Sync>;

/// See the module.
pub(super) struct Branch {
    outside: Arc<Outside>,
    vni: u32,
    state: Mutex<State>,
    ring: Ring,
}

/// The address that a NIC makes of its MAC address (RFC 4291, appendix A).
const fn link_local([a, b, c, d, e, f]: Mac) -> Gid {
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

impl Branch {
    pub(super) fn new(outside: Arc<Outside>, vni: u32, ring: Ring) -> Self {
        outside.wanted();
        Self { outside, vni, state: Mutex::default(), ring }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self) -> &Directory {
        self.outside.directory()
    }

    /// A NIC has come, or has changed.
    pub(super) fn put(&self, nic: &NicConfig) {
        let Backing::Rnic { device, through } = &nic.backing else { return };
        let mac = nic.mac.octets();
        let may: Vec<Gid> = nic.addresses.iter().map(|address| gid_of(*address)).collect();
        let max_qps = u64::from(nic.limits.max_qps);
        let mut state = self.state();
        if let Some(post) = state.posts.get_mut(&mac) {
            post.may = may;
            post.max_qps = post.max_qps.max(max_qps);
            return;
        }
        let inbox = Arc::new(Inbox::new(self.ring.clone()));
        let (device, through) = (device.clone(), through.map(gid_of));
        let (has, quotas) = (BTreeSet::new(), NicQuotas::default());
        let post = Post { device, through, may, has, max_qps, quotas, inbox };
        state.posts.insert(mac, post);
    }

    /// A NIC is gone.
    pub(super) fn take_away(&self, nic: &NicConfig) {
        let mac = nic.mac.octets();
        let post = self.state().posts.remove(&mac);
        let Some(post) = post else { return };
        for gid in post.has {
            self.directory().release_of((&post.device, self.vni, gid), mac);
        }
    }

    /// The process is gone, and its queue pairs and addresses with it.
    pub(super) fn mourn(&self) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        state.told = 0;
        for post in state.posts.values_mut() {
            post.has.clear();
            post.inbox.clear();
        }
        drop(state);
        self.directory().forget_nics(self.vni);
    }

    /// The network is gone, and its process may not have ended: another network may have its number
    /// now, and what that one has is not forgotten with this one.
    pub(super) fn close(&self) {
        self.mourn();
        let mut state = self.state();
        state.closed = true;
        state.posts.clear();
    }

    /// Takes what the process tells; what there is to answer.
    pub(super) fn take(&self, told: Told) -> Option<Host> {
        if self.state().closed {
            return None;
        }
        match told {
            Told::Asked(number, asked) => {
                let settled = match asked {
                    Asked::Address(nic, gid) => Settled::Address(self.claim(nic, gid)),
                    Asked::Peer { device, gid, qpn } => {
                        Settled::Peer(self.far(&device, (gid, qpn)))
                    }
                };
                return number.map(|number| Host::Settled(number, settled));
            }
            Told::Release { nic, gid } => self.release(nic, gid),
            Told::Queues { device, new, gone } => self.queues(&device, &new, &gone),
            Told::Wanted(gid) => self.find(gid),
            Told::Datagram(nic, datagram) => self.carry(nic, &datagram),
        }
        None
    }

    fn claim(&self, nic: Mac, gid: Gid) -> bool {
        let mut state = self.state();
        let Some(post) = state.posts.get_mut(&nic) else { return false };
        let may = post.may.is_empty() || post.may.contains(&gid) || gid == link_local(nic);
        let room = post.has.len() < usize::from(GID_TABLE_LEN) || post.has.contains(&gid);
        if !may || !room {
            return false;
        }
        let host = post.through.unwrap_or(gid);
        let claim = Claim { nic, host, inbox: post.inbox.clone() };
        let granted = self.directory().claim_for((&post.device, self.vni, gid), claim);
        if granted {
            post.has.insert(gid);
        }
        granted
    }

    fn release(&self, nic: Mac, gid: Gid) {
        let mut state = self.state();
        let Some(post) = state.posts.get_mut(&nic) else { return };
        if post.has.remove(&gid) {
            self.directory().release_of((&post.device, self.vni, gid), nic);
        }
    }

    /// What another network has on a device that none of this one's NICs is on is not told.
    fn far(&self, device: &str, end: (Gid, u32)) -> Far {
        let is_on = self.state().posts.values().any(|post| post.device == device);
        if is_on { self.directory().far(device, end, self.vni) } else { Far::default() }
    }

    fn queues(&self, device: &str, new: &[u32], gone: &[u32]) {
        let mut state = self.state();
        if !state.posts.values().any(|post| post.device == device) {
            return;
        }
        for qpn in gone {
            if self.directory().remove_qp(device, *qpn, self.vni) {
                state.told = state.told.saturating_sub(1);
            }
        }
        let most: u64 = state.posts.values().map(|post| post.max_qps).sum();
        for qpn in new {
            if state.told >= most {
                return;
            }
            if self.directory().add_qp(device, *qpn, self.vni) {
                state.told += 1;
            }
        }
    }

    /// No more often than a network's share: each costs a datagram on the host's network.
    fn find(&self, gid: Gid) {
        if self.state().searches.may() {
            self.outside.neighbours().look_for(gid);
        }
    }

    fn carry(&self, nic: Mac, datagram: &Datagram) {
        let Some(mad) = datagram.mad() else { return };
        let state = self.state();
        let Some(post) = state.posts.get(&nic) else { return };
        if post.has.contains(&mad.source) {
            self.directory().carry(&post.device, self.vni, (nic, &post.quotas), mad);
        }
    }

    /// Hands out what has come for the network's NICs, a part of it at a time; false if there may
    /// be more. What `send` does not take is lost.
    pub(super) fn deliver(&self, mut send: impl FnMut(Host)) -> bool {
        let state = self.state();
        for post in state.posts.values() {
            for mad in std::iter::from_fn(|| post.inbox.take()).take(TURN) {
                let device = post.device.clone();
                send(Host::Datagram { device, vni: self.vni, datagram: Datagram::of(&mad) });
            }
        }
        state.posts.values().all(|post| post.inbox.is_empty())
    }
}

#[cfg(test)]
mod tests;
