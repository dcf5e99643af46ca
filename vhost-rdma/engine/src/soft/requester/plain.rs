//! The way of most requests: a write or a read of one element, of one piece, between two NICs of
//! this shard, to memory that the worker reaches itself.
//!
//! Nothing is decided here but whether a request is one of these and passes every check, by the
//! same functions that the ordinary way asks. Then it is executed. If anything is in the way
//! nothing has changed, and the ordinary way, which follows, finds out what that is and what
//! becomes of it.
//!
//! Both NICs are borrowed at once, so that neither the keys nor their memory are counted: a
//! reference count is a locked operation that waits for the copy's stores.

use virtio_rdma_abi::{Cqe, Sge, SqWqe, access, opcode, send_flags, wc_status};
use zerocopy::little_endian::U32;

use super::Turn;
use super::finish::completion_opcode;
use crate::link::{Operation, PIECE};
use crate::memory;
use crate::nic::budget::cost;
use crate::nic::qp::{Kind, SendQueue, State};
use crate::soft::engine::{Execution, Nics};
use crate::soft::mr::Access;
use crate::soft::nic::{Nic, NicState};
use crate::soft::qp::Qp;

/// Bytes from which a copy takes longer than what comes from another processor's cache.
const LONG: u32 = 1024;

#[cfg(test)]
thread_local! {
    /// Requests that went this way. Nothing else tells them apart.
    pub(crate) static WENT: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// What became of a request that went this way.
pub(super) struct Went {
    pub(super) len: u32,
    /// It completed, and may have found the CQ full.
    pub(super) told: bool,
}

/// A request that has the shape.
pub(super) struct Plain {
    operation: Operation,
    pub(super) len: u32,
    /// The right that it takes at home, and at the peer.
    rights: (u32, u32),
}

impl Plain {
    /// Whether this queue pair lets it in.
    #[inline]
    pub(super) fn may_reach(&self, qp: &Qp) -> bool {
        qp.attrs.has(self.rights.1)
    }

    /// What it accesses at home, and at the peer: there by a queue pair of this domain and number.
    #[inline]
    pub(super) const fn accesses(
        &self,
        (turn, wqe, sge): (&Turn, &SqWqe, &Sge),
        (pdn, qpn): (u32, u32),
    ) -> (Access, Access) {
        let (at_home, at_peer) = self.rights;
        let own = Access {
            pdn: turn.pdn,
            qpn: 0,
            key: sge.lkey.get(),
            addr: sge.addr.get(),
            len: self.len,
            rights: at_home,
        };
        let (key, addr) = (wqe.rkey.get(), wqe.remote_addr.get());
        (own, Access { pdn, qpn, key, addr, len: self.len, rights: at_peer })
    }
}

/// The queue pair at the peer that takes what this one sends.
#[inline]
pub(super) fn receiver<'a>(turn: &Turn, peer: &'a Nic) -> Option<&'a Qp> {
    if peer.life != NicState::Ready {
        return None;
    }
    let qp = peer.qps.get(&turn.flow.dest_qpn)?;
    // The first that arrives in RTR is told of. Who only answers may stay there.
    let told = qp.state != State::Rtr || qp.own.established;
    let takes = qp.kind == turn.kind && qp.state.receives() && told;
    (takes && peer.is_from_peer(qp, &turn.flow)).then_some(qp)
}

/// Whether a work request has the shape.
#[inline]
pub(super) fn plain(turn: &Turn, send: &SendQueue, wqe: &SqWqe, sge: &Sge) -> Option<Plain> {
    const HARMLESS: u8 = send_flags::SIGNALED | send_flags::FENCE | send_flags::SOLICITED;
    let (operation, rights) = match (wqe.opcode, turn.kind) {
        (opcode::RDMA_WRITE, Kind::Rc | Kind::Uc) => (Operation::Write, (0, access::REMOTE_WRITE)),
        (opcode::RDMA_READ, Kind::Rc) => {
            (Operation::Read, (access::LOCAL_WRITE, access::REMOTE_READ))
        }
        _ => return None,
    };
    let len = sge.length.get();
    let one = wqe.num_sge.get() == 1 && send.max_sge > 0 && (1..=PIECE).contains(&len);
    (one && wqe.flags & !HARMLESS == 0).then_some(Plain { operation, len, rights })
}

impl<N: Nics> Execution<'_, N> {
    /// Executes the next work request, if it is one of these.
    #[inline]
    pub(super) fn go_plainly(&mut self, turn: &Turn, send: &mut SendQueue) -> Option<Went> {
        let peer = turn.peer.filter(|_| send.is_between())?;
        let (wqe, sge) = send.peek()?;
        let most = self.engine.ways.mtu();
        let plain = plain(turn, send, &wqe, &sge).filter(|plain| plain.len <= most)?;
        let (nic, peer) = self.nics.both(turn.nic, peer)?;
        if nic.backing.pace.piece(std::iter::once(plain.len), 0, plain.len) != plain.len {
            return None;
        }
        if plain.len >= LONG {
            send.fetch_second();
        }
        move_bytes(turn, (nic, peer), (&wqe, &sge), &plain)?;
        const LOOKS: u64 = cost::REQUEST + cost::ELEMENT + cost::KEY;
        nic.meter.charge(LOOKS + cost::bytes(plain.len.into()));
        let bytes = u64::from(plain.len);
        match plain.operation {
            Operation::Read => {
                nic.counters.rx_bytes += bytes;
                peer.counters.tx_bytes += bytes;
            }
            _ => {
                nic.counters.tx_bytes += bytes;
                peer.counters.rx_bytes += bytes;
            }
        }
        nic.counters.tx_messages += 1;
        peer.counters.rx_messages += 1;
        #[cfg(test)]
        WENT.set(WENT.get() + 1);
        turn.rearm_retries(send);
        let index = send.pass();
        let told = turn.tells(wqe.flags);
        if told {
            let mut cqe = Cqe {
                wr_id: wqe.wr_id,
                qpn: U32::new(turn.qpn),
                opcode: completion_opcode(plain.operation),
                status: wc_status::SUCCESS,
                byte_len: U32::new(plain.len),
                wqe_index: U32::new(index),
                ..Cqe::default()
            };
            nic.complete(turn.cqn, &mut cqe, false);
        }
        Some(Went { len: plain.len, told })
    }
}

/// Moves the bytes, if every check passes on either side.
#[inline]
fn move_bytes(
    turn: &Turn,
    (nic, peer): (&Nic, &Nic),
    (wqe, sge): (&SqWqe, &Sge),
    plain: &Plain,
) -> Option<()> {
    let qp = receiver(turn, peer).filter(|qp| plain.may_reach(qp))?;
    // What its owner copies is no memory of the worker's.
    if peer.backing.mrs.mirrored(wqe.rkey.get()).is_some() {
        return None;
    }
    let (own, theirs) = plain.accesses((turn, wqe, sge), (qp.pdn, qp.qpn));
    let (own, theirs) = (nic.backing.mrs.segment(&own), peer.backing.mrs.segment(&theirs));
    let (own, theirs) = (own.ok()?, theirs.ok()?);
    let (to, from) = if plain.operation == Operation::Read { (own, theirs) } else { (theirs, own) };
    memory::copy(&[to], 0, &[from], 0, plain.len.into()).ok()
}
