//! The sending side: takes work requests out of send queues, checks them against this NIC's own
//! objects, hands them to the link piece by piece, and turns outcomes into completions, waits
//! and errors.
//!
//! A QP runs for a bounded turn and goes back to the end of its NIC's run queue, so that neither a
//! large message nor a long queue keeps others waiting. The turn's end is the round's budget of
//! time, which is asked after each work request or piece of one; the counts below only share a
//! NIC's time among its own QPs.

use virtio_rdma_abi::{SqWqe, event, opcode, send_flags, wc_status};

use super::Nanos;
use super::engine::{Engine, Execution};
use super::local::{LocalOperation, Poster, local_operation};
use super::network::View;
use super::nic::SoftNic;
use super::nics::Nics;
use crate::link::{
    Fanout, Flow, Gid, Link as _, NicId, Operation, Outcome, Owner, PIECE, Payload, Request,
    Service, Ticket,
};
use crate::memory::Segment;
use crate::nic::budget::{Budget, cost};
use crate::nic::limits::MAX_FAST_REG_PAGES;
use crate::nic::qp::{Kind, Landed, SendQueue, State, Wait};
use crate::nic::shape::flags_are_known;

mod ahead;
mod arrivals;
mod fetch;
mod finish;
mod flight;
mod outcome;
mod plain;
mod plan;
mod spot;
mod turn;

use plan::Planned;
use turn::{Done, Turn};

#[cfg(test)]
pub(crate) use plain::WENT;

/// Work requests of one turn.
const TURN_REQUESTS: u32 = 64;
/// Bytes of one turn, beside others that have work too.
const TURN_BYTES: u32 = PIECE;
/// How long a turn may go on while nobody else is known to have work: what [`TURN_BYTES`] are
/// charged. A round costs as much as a few small messages, so longer turns cost less. But they take
/// from neighbours that have less to send: beside eight NICs with writes of 1 MiB (`cargo xtask
/// bench isolation -- writes_1m_by_8`), longer turns for all halve what is left to the victim.
const LONE_TURN: Nanos = cost::bytes(TURN_BYTES as u64);
/// Requests that are checked before the first of them is executed. What a long copy leaves of the
/// engine in the nearest cache is little, and comes back once for all of them.
const STREAK: usize = 8;
/// Bytes of those while nobody else is known to have work, and many wait: eight messages of 64 KiB.
/// The clock is looked at before each piece but the first, so that they end when the turn does.
const LONE_STREAK: u32 = 4 * PIECE;
/// Bytes of every atomic operation.
const ATOMIC_LEN: u32 = 8;
/// An address that nobody holds.
const NO_GID: Gid = [0; 16];
/// `rnr_retry` for "for ever" (IBTA 9.7.5.2.8).
const RNR_FOREVER: u8 = 7;

/// How a step of a turn ended.
enum Step {
    /// The work request is done, or a piece of it.
    Advanced,
    /// It is done, and nobody's state can have changed.
    Passed,
    /// It waits for a timer or an event.
    Waits,
    /// The link takes no more now.
    Later,
    /// It failed with this status.
    Failed(u8),
}

impl<N: Nics> Execution<'_, N> {
    /// Runs one QP of a NIC for a turn.
    pub(super) fn run_qp(&mut self, id: NicId, qpn: u32, budget: &mut Budget, now: Nanos) {
        let Some(nic) = self.nic_mut(id) else { return };
        let Some(qp) = nic.qps.get_mut(&qpn) else { return };
        qp.scheduled = false;
        match qp.state {
            State::Rts => self.send_turn(id, qpn, budget, now),
            State::Sqd if qp.send.as_ref().is_some_and(|send| send.has_begun()) => {
                self.send_turn(id, qpn, budget, now);
            }
            State::Err | State::Sqe => nic.flush_turn(qpn, budget),
            _ => {}
        }
    }

    /// Runs a QP that is in the run queue, and leaves it there; true if it had anything to send.
    pub(super) fn settle_turn(
        &mut self,
        id: NicId,
        qpn: u32,
        budget: &mut Budget,
        now: Nanos,
    ) -> bool {
        let qp = self.nic_mut(id).and_then(|nic| nic.qps.get(&qpn));
        let sends = qp.is_some_and(|qp| {
            qp.state == State::Rts && qp.send.as_ref().is_some_and(|send| send.has_work())
        });
        if sends {
            self.send_turn(id, qpn, budget, now);
        }
        sends
    }

    fn send_turn(&mut self, id: NicId, qpn: u32, budget: &mut Budget, now: Nanos) {
        let Some(nic) = self.nic_mut(id) else { return };
        let lone = nic.run.is_empty() && self.nics.is_lone();
        let Some(nic) = self.nic_mut(id) else { return };
        let vni = nic.settings.vni;
        let Some((mut turn, mut send)) = nic.begin_turn(qpn, now) else { return };
        turn.peer = self.engine.networks.neighbour(vni, (turn.kind, &turn.flow));
        let before = self.meter.charged();
        let mut done = Done::default();
        let mut fetched = 0;
        let mut more = false;
        let mut segments = std::mem::take(&mut self.engine.segments);
        // What the last look found is of another's time.
        budget.looked();
        turn.lone_until = lone.then(|| budget.seen().saturating_add(LONE_TURN).min(budget.until()));
        loop {
            if send.wait != Wait::None || !send.has_work() {
                break;
            }
            // One at least: what came before in this round may have used it up.
            let over = done.requests > 0 && self.is_over(id, budget);
            let goes_on = turn.lone_until.is_some_and(|until| budget.seen() < until);
            if done.requests >= TURN_REQUESTS || over || (done.bytes >= TURN_BYTES && !goes_on) {
                more = true;
                break;
            }
            if done.requests >= fetched {
                fetched = done.requests + fetch::GROUP;
                self.fetch(&turn, &send);
            }
            match self.step(&turn, &mut send, &mut done, &mut segments) {
                Step::Passed => continue,
                Step::Advanced => {}
                Step::Waits => break,
                Step::Later => {
                    more = true;
                    break;
                }
                Step::Failed(status) => {
                    if let Some(nic) = self.nic_mut(id) {
                        nic.send_failed(&turn, &mut send, status);
                    }
                    break;
                }
            }
            // The peer may be ourselves, and may have moved us to ERR.
            let state = self.nic_mut(id).and_then(|nic| nic.qps.get(&qpn)).map(|qp| qp.state);
            match state {
                Some(State::Rts) => {}
                Some(State::Sqd) if send.has_begun() => {}
                _ => break,
            }
        }
        // Now: they keep mappings alive, and whoever unplugs one waits for its end.
        segments.clear();
        self.engine.segments = segments;
        // What went before the wait may have taken long: it is judged whether or not more is asked.
        if send.wait != Wait::None {
            let over = self.is_over(id, budget);
            more = match send.wait {
                Wait::Owner(_) if !over => self.ask_ahead(&turn, &mut send, budget),
                Wait::Link(_) => self.fly_ahead(&turn, &mut send, (budget, done.bytes)),
                _ => false,
            };
        }
        let crosses = self.engine.ways.bus_ref().is_some();
        let spent = self.meter.charged().wrapping_sub(before);
        if let Some(nic) = self.nic_mut(id) {
            if crosses && turn.kind.is_connected() {
                nic.backing.talks.note(&turn.flow.dest_gid, spent);
            }
            nic.end_turn(qpn, send, more);
        }
    }

    /// Whether the time is up; if the clock was looked at, how long the NIC's pieces took tells how
    /// large the next may be.
    #[inline]
    fn is_over(&mut self, id: NicId, budget: &mut Budget) -> bool {
        if !budget.is_due(self.meter) {
            return false;
        }
        let over = budget.is_over(self.meter);
        if let Some(looked) = budget.looked()
            && let Some(nic) = self.nic_mut(id)
        {
            nic.backing.pace.judge(looked);
        }
        over
    }

    /// Executes one piece of one work request, or several that are plain.
    #[inline]
    fn step(
        &mut self,
        turn: &Turn,
        send: &mut SendQueue,
        done: &mut Done,
        segments: &mut Vec<Segment>,
    ) -> Step {
        if let Some(went) = self.go_plainly(turn, send) {
            done.add(went.requests, went.len);
            return if went.told { Step::Advanced } else { Step::Passed };
        }
        done.add(1, 0);
        let mtu = self.engine.ways.mtu();
        let Some(nic) = self.nic_mut(turn.nic) else { return Step::Waits };
        let wqe = match send.current {
            Some(wqe) => wqe,
            None => match send.take() {
                Some(wqe) => {
                    turn.rearm_retries(send);
                    wqe
                }
                None => return Step::Waits,
            },
        };
        send.catch_up();
        // Whether it was sent before its turn.
        let flown = if send.crosses { None } else { send.ahead.next_flight() };
        if let Some(flight) = flown {
            (send.piece, send.crosses) = (flight.len, true);
        }
        nic.meter.charge(cost::REQUEST);
        if !flags_are_known(&wqe) {
            return Step::Failed(wc_status::LOC_QP_OP_ERR);
        }
        if let Some(local) = local_operation(turn.kind, wqe.opcode) {
            if local == LocalOperation::FastRegister {
                // Each page is looked up in the guest's memory map.
                let pages = wqe.aux.get().min(MAX_FAST_REG_PAGES);
                nic.meter.charge_each(cost::PAGE, pages as usize);
            }
            return nic.execute_locally(turn, send, &wqe, local);
        }
        let planned = match nic.plan(turn, send, &wqe) {
            Ok(planned) => planned,
            Err(status) => return Step::Failed(status),
        };
        let mut addressed;
        let flow = if turn.kind.is_connected() {
            &turn.flow
        } else {
            addressed = turn.flow;
            if !nic.address(&wqe, turn.pdn, &mut addressed) {
                return Step::Failed(wc_status::LOC_QP_OP_ERR);
            }
            &addressed
        };
        nic.meter.charge_each(cost::ELEMENT, send.sges.len());
        // What the owner was asked about is what it did, and what crossed may have been executed:
        // the piece that it was, however large the next may be.
        let len = match send.owner {
            Owner::Unasked if !send.crosses => nic.piece(turn.kind, send, &planned).min(mtu),
            _ => send.piece,
        };
        match send.landed.take() {
            // What was read did not come home. It is read again.
            Some(Landed::Done(word)) if planned.operation != Operation::Read => {
                let fetches = planned.operation.fetches();
                if fetches && !nic.bring_home(turn, send, &planned, &word) {
                    return Step::Failed(wc_status::LOC_PROT_ERR);
                }
                return self.settle_crossed(turn, send, &planned, Outcome::Done);
            }
            Some(Landed::Refused(nak)) => {
                return self.settle_crossed(turn, send, &planned, Outcome::Refused(nak));
            }
            Some(Landed::Done(_)) | None => {}
        }
        if send.crosses
            && let Some(outcome) = flight::known(send, flown)
        {
            return self.settle_crossed(turn, send, &planned, outcome);
        }
        let same = planned.inline || nic.opens_the_same(send, (planned.total, len));
        if !same || (!planned.inline && !nic.gather(turn, &send.sges, &planned, segments)) {
            return Step::Failed(wc_status::LOC_PROT_ERR);
        }
        let payload =
            if planned.inline { Payload::Inline(&send.inline) } else { Payload::Memory(segments) };
        send.piece = len;
        nic.meter.charge(cost::bytes(len.into()));
        let mut request = request(turn, flow, &wqe, nic, payload, (&planned, send.done, len));
        request.fanout = send.fanout;
        request.message = send.current_index();
        request.owner = send.owner;
        request.crossed = send.crosses;
        let Self { nics, engine: Engine { networks, ways, .. }, .. } = self;
        request.ticket = ways.number(&mut send.ticket);
        // Under an address that was withdrawn nothing leaves: its port is down, or was given
        // another.
        let outcome = match (flow.source_gid == NO_GID, turn.kind) {
            (false, _) => ways.submit(&mut View { nics, networks }, &request),
            (true, Kind::Rc) => Outcome::NoAnswer,
            (true, _) => Outcome::Done,
        };
        done.add(0, len);
        self.settle(turn, send, &planned, outcome, len)
    }
}

/// The piece of `wqe`'s message that begins at `part.1`.
#[inline(always)]
fn request<'a>(
    turn: &Turn,
    flow: &'a Flow,
    wqe: &SqWqe,
    nic: &SoftNic,
    payload: Payload<'a>,
    part: (&Planned, u32, u32),
) -> Request<'a> {
    let (planned, offset, len) = part;
    let with_immediate = matches!(wqe.opcode, opcode::SEND_WITH_IMM | opcode::RDMA_WRITE_WITH_IMM);
    let own_qkey = || nic.qps.get(&turn.qpn).map_or(0, |qp| qp.attrs.qkey(turn.kind));
    // IBTA 10.2.5: the high bit asks for the QP's own Q_Key, which a user may not choose freely.
    let qkey = if wqe.aux.get() >> 31 == 1 { own_qkey() } else { wqe.aux.get() };
    Request {
        flow,
        service: match turn.kind {
            Kind::Rc => Service::Reliable,
            Kind::Uc => Service::Unreliable,
            Kind::Ud | Kind::Gsi => Service::Datagram,
        },
        operation: planned.operation,
        payload,
        total: planned.total,
        offset,
        message: 0,
        len,
        remote_addr: wqe.remote_addr.get(),
        rkey: wqe.rkey.get(),
        immediate: with_immediate.then(|| wqe.imm.to_bytes()),
        invalidate: (wqe.opcode == opcode::SEND_WITH_INV).then(|| wqe.imm.get()),
        solicited: wqe.flags & send_flags::SOLICITED != 0,
        operands: match planned.operation {
            Operation::Flush => [wqe.arg0.get(), u64::from(wqe.aux.get())],
            _ => [wqe.arg0.get(), wqe.arg1.get()],
        },
        qkey,
        fanout: Fanout::default(),
        owner: Owner::Unasked,
        ticket: Ticket::default(),
        crossed: false,
        ahead: false,
    }
}

impl SoftNic {
    /// Borrows the send queue out of a QP for a turn.
    fn begin_turn(&mut self, qpn: u32, now: Nanos) -> Option<(Turn, Box<SendQueue>)> {
        let qp = self.qps.get_mut(&qpn)?;
        let send = qp.send.take()?;
        let (pdn, kind, signal_all, cqn) = (qp.pdn, qp.kind, qp.signal_all, qp.send_cqn);
        let av = *qp.attrs.av();
        let retries = (qp.attrs.rnr_retry(), qp.attrs.retry_cnt());
        let dest_qpn = qp.attrs.dest_qpn();
        let flow = Flow {
            source: self.backing.id,
            source_qpn: qpn,
            source_gid: self.gid(av.sgid_index.get()).unwrap_or(NO_GID),
            source_mac: self.settings.mac,
            dest_gid: av.dgid,
            dest_qpn,
            traffic_class: av.traffic_class,
            hop_limit: av.hop_limit,
            sl: av.sl,
        };
        Some((
            Turn {
                nic: self.backing.id,
                qpn,
                pdn,
                kind,
                signal_all,
                cqn,
                retries,
                flow,
                peer: None,
                now,
                lone_until: None,
            },
            send,
        ))
    }

    fn end_turn(&mut self, qpn: u32, send: Box<SendQueue>, more: bool) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let idle = !send.has_begun();
        qp.send = Some(send);
        match qp.state {
            State::Err | State::Sqe => self.schedule(qpn),
            State::Sqd if idle => self.drained(qpn),
            _ if more => self.schedule(qpn),
            _ => {}
        }
    }

    /// The sends that had begun before SQD are over (IBTA 10.3.1.4).
    pub(super) fn drained(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if std::mem::take(&mut qp.own.draining) && qp.attrs.wants_drain_event() {
            let ctx = qp.ctx;
            self.raise(event::SQ_DRAINED, qpn, ctx);
        }
    }

    fn execute_locally(
        &mut self,
        turn: &Turn,
        send: &mut SendQueue,
        wqe: &SqWqe,
        operation: LocalOperation,
    ) -> Step {
        let poster = Poster { qpn: turn.qpn, pdn: turn.pdn };
        match self.local_request(poster, wqe, operation) {
            Ok(code) => {
                self.send_done(turn, send, (code, 0));
                Step::Advanced
            }
            Err(status) => Step::Failed(status),
        }
    }

    fn count_sent(&mut self, planned: &Planned, len: u32) {
        let len = u64::from(len);
        match planned.operation {
            Operation::Send | Operation::Write | Operation::AtomicWrite | Operation::Flush => {
                self.counters.tx_bytes += len;
            }
            Operation::Read => self.counters.rx_bytes += len,
            Operation::CompareSwap | Operation::FetchAdd => {
                self.counters.tx_bytes += len;
                self.counters.rx_bytes += len;
            }
        }
    }
}
