//! The ways out of a process: to other daemons, to third-party hosts, and to whoever knows the
//! host's other networks. Who carries is not decided here, nor what.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vhost_rdma_engine::cm::{Inbox, Mad};
use vhost_rdma_engine::link::Gid;

use super::nic_quota::NicQuota;

/// The MAC address of a NIC, which names it in its network.
pub type Mac = [u8; 6];

/// Brings datagrams to other daemons.
pub trait Carrier: Send + Sync {
    /// Sends one to `daemon`, without ever waiting, in a place of the sending NIC's `quota`; false
    /// if it is lost.
    fn carry(&self, quota: &NicQuota, daemon: &Arc<str>, network: &str, mad: Mad) -> bool;
}

impl fmt::Debug for dyn Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier").finish_non_exhaustive()
    }
}

/// A guest's QP 1: where it is, the address that is meant, and where datagrams for it go in.
#[derive(Debug, Clone)]
pub(super) struct Station {
    pub(super) device: String,
    pub(super) vni: u32,
    pub(super) gid: Gid,
    pub(super) inbox: Arc<Inbox>,
}

/// What the host's connection manager agreed on with a peer, in a guest's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Agreed {
    /// The PSN that the peer begins with.
    pub(super) psn: u32,
    /// The path MTU, in verbs' encoding.
    pub(super) mtu: u8,
}

/// A datagram that a guest sent to a third-party host.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) station: Station,
    /// The host's address that stands for the guest's.
    pub(super) host: Gid,
    /// The peer's address, as the host knows it.
    pub(super) to: Gid,
    pub(super) mad: Mad,
}

/// Speaks to third-party hosts, for guests.
pub(super) trait HostCm: Send + Sync {
    /// Takes a datagram, without ever waiting, in a place of the sending NIC's `quota`; false if it
    /// is lost.
    fn carry(&self, quota: &NicQuota, sent: Sent) -> bool;
}

impl fmt::Debug for dyn HostCm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostCm").finish_non_exhaustive()
    }
}

/// What the host knows of a queue pair that a guest wants to connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Far {
    /// It is one of another network.
    pub is_others: bool,
    /// The PSN and the MTU (in verbs' encoding) that the host's connection manager agreed on with
    /// it, in the guest's place.
    pub agreed: Option<(u32, u8)>,
}

/// See `uplink`. Whoever asks and gets no answer may not.
pub trait Uplink: Send + Sync {
    /// Whether a NIC may have an address. May wait for a while.
    fn claim(&self, nic: Mac, gid: Gid) -> Option<bool>;
    /// As [`Self::claim`], for one that it has already, and without an answer.
    fn repeat_claim(&self, nic: Mac, gid: Gid);
    /// A NIC has an address no longer.
    fn release(&self, nic: Mac, gid: Gid);
    /// A queue pair is there, or is gone.
    fn queue_pair(&self, device: &str, qpn: u32, is_there: bool);
    /// Has the host look for the neighbour at an address, which this process may not do itself.
    /// Never waits, and is told nothing: the kernel's table of neighbours has it once it is found.
    fn find(&self, gid: Gid);
    /// What there is to know of a peer's queue pair, at the host's address `gid`. May wait.
    fn peer(&self, device: &str, gid: Gid, qpn: u32) -> Option<Far>;
    /// Sends a datagram to who is not here, without ever waiting, in a place of the sending NIC's
    /// `quota`; false if it is lost.
    fn carry(&self, quota: &NicQuota, nic: Mac, mad: Mad) -> bool;
}

impl fmt::Debug for dyn Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uplink").finish_non_exhaustive()
    }
}
