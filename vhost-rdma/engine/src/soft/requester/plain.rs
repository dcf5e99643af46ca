//! The way of most requests: a send, a write or a read of one element, of one piece, between two
//! NICs of this shard, to memory that the worker reaches itself.
//!
//! Nothing is decided here but whether a request is one of these and passes every check, by the
//! same functions that the ordinary way asks. Then it is executed. If anything is in the way
//! nothing has changed, and the ordinary way, which follows, finds out what that is and what
//! becomes of it.
//!
//! Some that follow each other are checked together and then executed in their order: a queue
//! pair's peer is looked up once for all of them. They are as much as goes in one piece, and more
//! while nobody else is known to have work and many wait, until the time is up. Nothing that a
//! check looks at can change meanwhile, since only commands and other requests change it.
//!
//! Both NICs are borrowed at once, so that neither the keys nor their memory are counted: a
//! reference count is a locked operation that waits for the copy's stores.

use arrayvec::ArrayVec;
use virtio_rdma_abi::{Cqe, Sge, SqWqe, access, opcode, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::arrivals::{self, Arrival, Arrivals};
use super::finish::completion_opcode;
use super::{LONE_STREAK, STREAK, Turn};
use crate::link::{Operation, PIECE};
use crate::memory::{self, Borrowed};
use crate::nic::Nanos;
use crate::nic::budget::{Meter, cost};
use crate::nic::cq::Cq;
use crate::nic::qp::{Kind, SendQueue, State};
use crate::nic::receive::Single;
use crate::soft::engine::Execution;
use crate::soft::mr::Access;
use crate::soft::nic::{NicState, Qp, SoftNic};
use crate::soft::nics::Nics;

/// Bytes from which a copy takes longer than what comes from another processor's cache.
const LONG: u32 = 1024;

#[cfg(test)]
thread_local! {
    /// Requests that went this way, in how many streaks, and how many of these the clock ended.
    /// Nothing else tells them apart.
    pub(crate) static WENT: std::cell::Cell<(u32, u32, u32)> =
        const { std::cell::Cell::new((0, 0, 0)) };
}

/// What became of requests that went this way.
pub(super) struct Went {
    pub(super) requests: u32,
    /// Their bytes.
    pub(super) len: u32,
    /// Some completed, and the last of these may have found the CQ full.
    pub(super) told: bool,
}

/// A request that has the shape.
pub(super) struct Plain {
    pub(super) operation: Operation,
    pub(super) len: u32,
    /// The right that it takes at home, and at the peer; a send takes none there.
    rights: (u32, u32),
}

impl Plain {
    /// Whether this queue pair lets it in.
    #[inline]
    pub(super) fn may_reach(&self, qp: &Qp) -> bool {
        self.operation == Operation::Send || qp.attrs.has(self.rights.1)
    }

    /// What it accesses at home, and at the peer: there by a queue pair of this domain and number.
    #[inline]
    pub(super) const fn accesses(
        &self,
        (turn, wqe, sge): (&Turn, &SqWqe, &Sge),
        (pdn, qpn): (u32, u32),
    ) -> (Access, Access) {
        let (at_home, at_peer) = self.rights;
        let own = Access::own(turn.pdn, sge, at_home);
        let (key, addr) = (wqe.rkey.get(), wqe.remote_addr.get());
        (own, Access { pdn, qpn, key, addr, len: self.len, rights: at_peer })
    }
}

/// The queue pair at the peer that takes what this one sends.
#[inline]
pub(super) fn receiver<'a>(turn: &Turn, peer: &'a SoftNic) -> Option<&'a Qp> {
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
        (opcode::SEND | opcode::SEND_WITH_IMM, Kind::Rc | Kind::Uc) => (Operation::Send, (0, 0)),
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
    /// Executes the next work requests, if they are some of these.
    #[inline]
    pub(super) fn go_plainly(&mut self, turn: &Turn, send: &mut SendQueue) -> Option<Went> {
        let peer = turn.peer.filter(|_| send.is_between())?;
        let most = self.engine.ways.mtu();
        let (nic, peer) = self.nics.both(turn.nic, peer)?;
        let streak = move_streak(turn, send, (nic, peer), most)?;
        let Streak { requests, len, read, told, arrivals } = streak;
        const LOOKS: u64 = cost::REQUEST + cost::ELEMENT + cost::KEY;
        nic.meter.charge_each(LOOKS, requests as usize);
        nic.meter.charge_each(cost::ELEMENT, arrivals.len());
        nic.meter.charge(cost::bytes(len.into()));
        let (read, written) = (u64::from(read), u64::from(len - read));
        nic.counters.rx_bytes += read;
        peer.counters.tx_bytes += read;
        nic.counters.tx_bytes += written;
        peer.counters.rx_bytes += written;
        nic.counters.tx_messages += u64::from(requests);
        peer.counters.rx_messages += u64::from(requests);
        #[cfg(test)]
        WENT.set((WENT.get().0 + requests, WENT.get().1 + 1, WENT.get().2));
        if !arrivals.is_empty() {
            arrivals::complete(turn, peer, &arrivals);
        }
        turn.rearm_retries(send);
        let first = send.pass(requests);
        if turn.kind == Kind::Uc {
            let life = self.engine.ways.number(&mut send.ticket).life;
            peer.note_message(turn.flow.dest_qpn, (life, send.current_index()));
        }
        let tells = !told.is_empty();
        for told in &told {
            let mut cqe = Cqe {
                wr_id: told.wr_id,
                qpn: U32::new(turn.qpn),
                opcode: completion_opcode(told.operation),
                status: wc_status::SUCCESS,
                byte_len: U32::new(told.len),
                wqe_index: U32::new(first.wrapping_add(told.before)),
                ..Cqe::default()
            };
            nic.complete(turn.cqn, &mut cqe, false);
        }
        Some(Went { requests, len, told: tells })
    }
}

/// Requests whose bytes were moved.
struct Streak {
    requests: u32,
    len: u32,
    /// How much of it was read.
    read: u32,
    /// Those that complete.
    told: ArrayVec<Told, STREAK>,
    /// The receives that sends fill.
    arrivals: Arrivals,
}

impl Streak {
    /// Moves the bytes, as far as there is time: never more than a piece, or one request, without a
    /// look at the clock.
    #[inline]
    fn execute(
        &mut self,
        moves: &[Move<'_>],
        (until, meter): (Option<Nanos>, &Meter),
    ) -> Option<()> {
        let mut since = 0;
        for (moved, Move { sides: (to, from), len, .. }) in moves.iter().enumerate() {
            if moved > 0 && since + len > PIECE {
                since = 0;
                if until.is_some_and(|until| meter.now() >= until) {
                    self.cut(&moves[..moved]);
                    break;
                }
            }
            // Their ranges are within what is mapped: it cannot fail.
            memory::copy(&[*to], 0, &[*from], 0, u64::from(*len)).ok()?;
            since += len;
        }
        Some(())
    }

    /// Only these were moved.
    #[cold]
    fn cut(&mut self, moved: &[Move<'_>]) {
        #[cfg(test)]
        WENT.set((WENT.get().0, WENT.get().1, WENT.get().2 + 1));
        let bytes = |of: Option<Operation>| {
            let those = moved.iter().filter(|it| of.is_none_or(|of| it.operation == of));
            those.map(|it| it.len).sum()
        };
        let sends = moved.iter().filter(|it| it.operation == Operation::Send).count();
        (self.len, self.read) = (bytes(None), bytes(Some(Operation::Read)));
        self.requests = u32::try_from(moved.len()).unwrap_or(u32::MAX);
        self.arrivals.truncate(sends);
        self.told.retain(|told| told.before < self.requests);
    }
}

/// A request that completes.
struct Told {
    wr_id: U64,
    operation: Operation,
    len: u32,
    /// Requests of the streak before it.
    before: u32,
}

/// Moves the bytes of the next requests, as far as they pass every check on either side and there
/// is time. None follows one whose completion may find no place.
#[inline]
fn move_streak(
    turn: &Turn,
    send: &SendQueue,
    (nic, peer): (&SoftNic, &SoftNic),
    most: u32,
) -> Option<Streak> {
    let qp = receiver(turn, peer)?;
    let (piece, elements) = nic.backing.pace.whole();
    let bytes = if may_be_long(turn, send, piece) { LONE_STREAK } else { piece };
    let mut moves: ArrayVec<Move<'_>, STREAK> = ArrayVec::new();
    let (told, arrivals) = (ArrayVec::new(), Arrivals::new());
    let mut streak = Streak { requests: 0, len: 0, read: 0, told, arrivals };
    while moves.len() < elements.min(STREAK) {
        let before = streak.requests;
        let Some((wqe, sge)) = send.peek_at(before) else { break };
        let plain = plain(turn, send, &wqe, &sge);
        let plain = plain.filter(|plain| plain.len <= most && plain.may_reach(qp));
        let Some(plain) = plain.filter(|plain| streak.len + plain.len <= bytes) else { break };
        let Plain { operation, len, .. } = plain;
        let sides = if operation == Operation::Send {
            let Some((sides, receive)) = fills(turn, (nic, peer, qp), &sge, (&streak, len)) else {
                break;
            };
            streak.arrivals.push(Arrival::new(receive, &wqe, len));
            sides
        } else {
            let Some(sides) = sides(turn, (nic, peer, qp), (&wqe, &sge), &plain) else { break };
            sides
        };
        moves.push(Move { sides, operation, len });
        streak.requests += 1;
        streak.len += len;
        streak.read += if operation == Operation::Read { len } else { 0 };
        if turn.tells(wqe.flags) {
            streak.told.push(Told { wr_id: wqe.wr_id, operation, len, before });
            let room = nic.cqs.get(turn.cqn as usize).map_or(0, Cq::room);
            if streak.told.len() >= room as usize {
                break;
            }
        }
        if operation == Operation::Send && !arrivals::have_room(&streak.arrivals, peer, qp) {
            break;
        }
    }
    if streak.requests == 0 {
        return None;
    }
    if streak.len >= LONG {
        send.fetch(streak.requests..2 * streak.requests);
        arrivals::fetch(&streak.arrivals, peer, qp);
    }
    streak.execute(&moves, (turn.lone_until, &nic.meter))?;
    Some(streak)
}

/// Whether a streak may be longer than a piece: not where memory is slow. A program that has few
/// requests under way posts the next when it is told of these, and should be told soon.
#[inline]
fn may_be_long(turn: &Turn, send: &SendQueue, piece: u32) -> bool {
    let waiting = send.waiting() as usize;
    turn.lone_until.is_some() && piece == PIECE && waiting >= 2 * STREAK
}

/// What a request moves.
struct Move<'a> {
    sides: Sides<'a>,
    operation: Operation,
    len: u32,
}

/// Where bytes go, and whence they come.
type Sides<'a> = (Borrowed<'a>, Borrowed<'a>);

/// What the next send of a streak moves to the receive that is its own, if every check passes.
#[inline]
fn fills<'a>(
    turn: &Turn,
    (nic, peer, qp): (&'a SoftNic, &'a SoftNic, &'a Qp),
    sge: &Sge,
    (streak, len): (&Streak, u32),
) -> Option<(Sides<'a>, Single)> {
    let from = nic.backing.mrs.segment(&Access::own(turn.pdn, sge, 0)).ok()?;
    let (receive, to) = arrivals::open(peer, qp, (&streak.arrivals, len))?;
    Some(((to, from), receive))
}

/// Where the bytes go and whence they come, if every check passes.
#[inline]
fn sides<'a>(
    turn: &Turn,
    (nic, peer, qp): (&'a SoftNic, &'a SoftNic, &Qp),
    (wqe, sge): (&SqWqe, &Sge),
    plain: &Plain,
) -> Option<Sides<'a>> {
    // What its owner copies is no memory of the worker's.
    if peer.backing.mrs.mirrored(wqe.rkey.get()).is_some() {
        return None;
    }
    let (own, theirs) = plain.accesses((turn, wqe, sge), (qp.pdn, qp.qpn));
    let (own, theirs) = (nic.backing.mrs.segment(&own), peer.backing.mrs.segment(&theirs));
    let (own, theirs) = (own.ok()?, theirs.ok()?);
    Some(if plain.operation == Operation::Read { (own, theirs) } else { (theirs, own) })
}
