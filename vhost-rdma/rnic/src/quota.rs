//! What a NIC on an RNIC keeps for its guest, in bytes of the daemon's memory: see
//! [`vhost_rdma_engine::nic::quota`]. What the host's kernel and the hardware keep is theirs to
//! count: pinned pages by RLIMIT_MEMLOCK, objects by the device's own limits.

use slab::Slab;
use vhost_rdma_engine::cm::{Mad, ROOM};
use vhost_rdma_engine::nic::contexts::DOORBELLS;
use vhost_rdma_engine::nic::cq::Cq;
use vhost_rdma_engine::nic::owned_numbers::LINKS;
use vhost_rdma_engine::nic::quota::{ALWAYS, CONTEXT, Places, WAITING, entry};

use super::nic::{Ah, Nic, Pd, Qp, Srq};
use super::receives::Receives;
use super::region::Mr;
use super::sends::{SENT, Sends};
use super::windows::{LIST, WINDOW};

/// What a host object is found by.
const HOST: usize = entry(32);

pub(super) static RNIC: Places = Places {
    each: [
        CONTEXT,
        DOORBELLS,
        entry(size_of::<Pd>()) + HOST,
        entry(size_of::<Mr>()) + 3 * entry(8) + entry(LINKS) + HOST,
        entry(WINDOW) + entry(8) + HOST,
        entry(size_of::<Cq>()) + 3 * WAITING,
        entry(size_of::<Srq>()) + entry(8) + 2 * WAITING + HOST,
        3 * entry(16) + entry(LIST) + 7 * WAITING + HOST,
        entry(size_of::<Ah>()) + HOST,
    ],
    // With QP 1 and what waits for it.
    always: size_of::<Nic>() + ALWAYS + ROOM * size_of::<Mad>() + (8 << 10),
};

/// What a QP takes beside its place: what is under way in each direction, and the inline bytes of a
/// request. A request may be the change of a window.
pub(super) fn queue_pair((sends, receives): (u32, u32), max_inline: u32) -> usize {
    let sends = (sends as usize + 1).next_power_of_two() * SENT;
    let receives = (receives as usize).next_power_of_two() * 8;
    size_of::<Qp>() + size_of::<(Sends, Receives)>() + max_inline as usize + sends + receives
}

/// What an SRQ of so many work requests takes beside its place.
pub(super) fn shared(max_wr: u32) -> usize {
    size_of::<Slab<()>>() + (max_wr as usize).next_power_of_two() * 32
}
