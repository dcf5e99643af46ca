//! What the next requests lead to is fetched into the cache, all at once.
//!
//! Behind each key is a chain: the table's bucket, its entry, the translation, the bytes. Where a
//! NIC has more regions than a cache holds, each link is a wait for memory, and one request after
//! the other waits eight times. So the chains of some requests are walked side by side, a link at a
//! time: the processor has several loads under way as long as none needs another.
//!
//! Only the plain way's requests are looked at, by the same checks: nothing is fetched that a
//! request could not reach. A request is looked at again in its turn, and what the guest has
//! changed meanwhile counts then.

use virtio_rdma_abi::{Sge, SqWqe};

use super::Turn;
use super::plain::{self, Plain};
use crate::link::Operation;
use crate::memory::Borrowed;
use crate::nic::budget::cost;
use crate::nic::qp::SendQueue;
use crate::soft::engine::Execution;
use crate::soft::mr::{Access, MrTable};
use crate::soft::nics::Nics;

/// Requests whose chains are walked side by side; twice as many were no faster.
pub(super) const GROUP: u32 = 8;
/// Regions of either side up to which it is not worth it, as measured: most of what they lead to is
/// in a cache (docs/PERFORMANCE.md). Tests go this way with two.
const CACHED: usize = if cfg!(test) { 1 } else { 16_384 };
/// Bytes from which a request takes longer than what it waits for.
const LARGE: u32 = 4096;

/// What a request accesses on either side.
type Pair = (Access, Access);

impl<N: Nics> Execution<'_, N> {
    /// Fetches for the next requests of a turn, if that is worth it.
    #[inline]
    pub(super) fn fetch(&mut self, turn: &Turn, send: &SendQueue) {
        let Some(peer) = turn.peer.filter(|_| send.is_between()) else { return };
        let Some((nic, peer)) = self.nics.both(turn.nic, peer) else { return };
        let (own, theirs) = (&nic.backing.mrs, &peer.backing.mrs);
        if own.len().max(theirs.len()) <= CACHED {
            return;
        }
        let Some(qp) = plain::receiver(turn, peer) else { return };
        let access = |(wqe, sge): &(SqWqe, Sge), plain: &Plain| {
            plain.accesses((turn, wqe, sge), (qp.pdn, qp.qpn))
        };
        let mut pairs: [Option<Pair>; GROUP as usize] = [None; GROUP as usize];
        for (before, pair) in (0..).zip(&mut pairs) {
            let Some(next) = send.peek_at(before) else { break };
            let plain = plain::plain(turn, send, &next.0, &next.1);
            let plain = plain.filter(|plain| plain.len < LARGE && plain.may_reach(qp));
            // What a send fills is named by another ring.
            let plain = plain.filter(|plain| plain.operation != Operation::Send);
            *pair = plain.map(|plain| access(&next, &plain));
        }
        let count = walk(&pairs, (own, theirs));
        nic.meter.charge_each(2 * cost::KEY, count);
    }
}

/// Walks the chains, a link at a time; how many there were.
#[inline(never)]
fn walk(pairs: &[Option<Pair>], (own, theirs): (&MrTable, &MrTable)) -> usize {
    let pairs = || pairs.iter().flatten();
    let mut count = 0;
    for (here, there) in pairs() {
        own.touch(here.key);
        theirs.touch(there.key);
        count += 1;
    }
    let mut found: [[Option<Borrowed<'_>>; 2]; GROUP as usize] = [[None; 2]; GROUP as usize];
    for (pair, found) in pairs().zip(&mut found) {
        *found = [own.segment(&pair.0).ok(), theirs.segment(&pair.1).ok()];
    }
    found.iter().flatten().flatten().for_each(Borrowed::fetch);
    count
}
