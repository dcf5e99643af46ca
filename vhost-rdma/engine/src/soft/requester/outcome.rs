//! What becomes of a request: done, refused, or a wait that a timer, an event or an answer ends.

use super::finish::completion_opcode;
use super::{Planned, RNR_FOREVER, Step, Turn};
use crate::link::{Awaited, Nak, NicId, Outcome, Owner, Token};
use crate::nic::qp::{Kind, SendQueue, Wait};
use crate::nic::timer::{self, Waiting};
use crate::soft::engine::Execution;
use crate::soft::nic::SoftNic;
use crate::soft::nics::Nics;
use crate::soft::{Nanos, mirror};
use virtio_rdma_abi::wc_status;

impl<N: Nics> Execution<'_, N> {
    #[inline(always)]
    pub(super) fn settle(
        &mut self,
        turn: &Turn,
        send: &mut SendQueue,
        planned: &Planned,
        outcome: Outcome,
        len: u32,
    ) -> Step {
        let Some(nic) = self.nic_mut(turn.nic) else { return Step::Waits };
        send.owner = match (outcome, send.owner) {
            (Outcome::Later(Awaited::Owner(job)), _) => Owner::Asked(job),
            // What an owner does, it does once: it is not asked again.
            (Outcome::NotReady(_) | Outcome::NoAnswer, asked) => asked,
            _ => Owner::Unasked,
        };
        let goes_on = matches!(
            outcome,
            Outcome::Done
                | Outcome::NotReady(_)
                | Outcome::NoAnswer
                | Outcome::Later(Awaited::Owner(_))
        );
        if !goes_on {
            send.ahead.forget_pieces();
        }
        match outcome {
            Outcome::Done => {
                send.crosses = false;
                turn.rearm_retries(send);
                nic.count_sent(planned, len);
                send.done += len;
                if send.done >= planned.total {
                    nic.send_done(
                        turn,
                        send,
                        (completion_opcode(planned.operation), planned.total),
                    );
                    nic.counters.tx_messages += 1;
                }
                Step::Advanced
            }
            Outcome::NotReady(code) => {
                nic.counters.rnr_naks_received += 1;
                // Tries without an answer are counted in a row, and this is an answer: who waits
                // for ever may be lost a request now and then.
                send.retries_left = turn.retries.1;
                let forever =
                    nic.qps.get(&turn.qpn).is_some_and(|qp| qp.attrs.rnr_retry() == RNR_FOREVER);
                if !forever {
                    match send.rnr_left.checked_sub(1) {
                        Some(left) => send.rnr_left = left,
                        None => return Step::Failed(wc_status::RNR_RETRY_EXC_ERR),
                    }
                }
                let until = turn.now.saturating_add(timer::rnr_delay(code));
                send.wait = Wait::Receiver(until);
                nic.timers.set(until, Waiting::Send(turn.qpn));
                Step::Waits
            }
            Outcome::NoAnswer => {
                let timeout = nic.qps.get(&turn.qpn).map_or(0, |qp| qp.attrs.timeout());
                let until =
                    timer::ack_timeout(timeout).map_or(Nanos::MAX, |t| turn.now.saturating_add(t));
                send.wait = Wait::Answer(until);
                nic.timers.set(until, Waiting::Send(turn.qpn));
                Step::Waits
            }
            Outcome::Refused(Nak::InvalidRequest) => Step::Failed(wc_status::REM_INV_REQ_ERR),
            Outcome::Refused(Nak::RemoteAccess) => Step::Failed(wc_status::REM_ACCESS_ERR),
            Outcome::Refused(Nak::RemoteOperation) => Step::Failed(wc_status::REM_OP_ERR),
            Outcome::LocalFault => Step::Failed(wc_status::LOC_PROT_ERR),
            Outcome::Partly(fanout) => {
                send.fanout = fanout;
                Step::Advanced
            }
            Outcome::Later(awaited) => {
                let timeout = nic.qps.get(&turn.qpn).map_or(0, |qp| qp.attrs.timeout());
                let patience = match turn.kind {
                    Kind::Rc => timer::ack_timeout(timeout).map(|time| time.max(mirror::PATIENCE)),
                    _ => Some(mirror::PATIENCE),
                };
                let until = patience.map_or(Nanos::MAX, |time| turn.now.saturating_add(time));
                send.wait = match awaited {
                    Awaited::Owner(_) => Wait::Owner(until),
                    Awaited::Answer => Wait::Link(until),
                };
                send.crosses |= awaited == Awaited::Answer;
                nic.timers.set(until, Waiting::Send(turn.qpn));
                Step::Waits
            }
            Outcome::Full => Step::Later,
        }
    }

    /// The answer to a request that crossed to another shard.
    pub(in crate::soft) fn answered(
        &mut self,
        token: &Token,
        outcome: Outcome,
        bytes: &[u8],
        now: Nanos,
    ) {
        let Some(outcome) = self.awaits(token, (outcome, bytes)) else { return };
        let Some(nic) = self.nic_mut(token.nic) else { return };
        let Some((turn, mut send)) = nic.begin_turn(token.qpn, now) else { return };
        // To whoever has stopped waiting, what is to be tried again says nothing: the request may
        // be on its way again. What is done is done, and a refusal is the last that its peer says:
        // a link may have brought after it what was said of a repetition.
        let last = matches!(outcome, Outcome::Done | Outcome::Refused(_));
        let counts = last || matches!(send.wait, Wait::Link(_));
        if let (true, Some(wqe)) = (counts, send.current) {
            send.wait = Wait::None;
            let step = match nic.plan(&turn, &mut send, &wqe) {
                Ok(planned) if outcome == Outcome::Done && planned.operation.fetches() => {
                    match nic.bring_home(&turn, &mut send, &planned, bytes) {
                        true => self.settle_crossed(&turn, &mut send, &planned, outcome),
                        false => Step::Failed(wc_status::LOC_PROT_ERR),
                    }
                }
                Ok(planned) => self.settle_crossed(&turn, &mut send, &planned, outcome),
                Err(status) => Step::Failed(status),
            };
            if let (Step::Failed(status), Some(nic)) = (step, self.nic_mut(token.nic)) {
                nic.send_failed(&turn, &mut send, status);
            }
        }
        let goes_on = send.wait == Wait::None && send.has_work();
        if let Some(nic) = self.nic_mut(token.nic) {
            nic.end_turn(token.qpn, send, goes_on);
        }
    }

    pub(super) fn settle_crossed(
        &mut self,
        turn: &Turn,
        send: &mut SendQueue,
        planned: &Planned,
        outcome: Outcome,
    ) -> Step {
        let len = send.piece;
        send.judge(outcome);
        match outcome {
            Outcome::Done => {
                // Also what came out while the NIC stood still was this piece's.
                send.landed = None;
                send.ticket.advance();
            }
            Outcome::Later(_) => {}
            _ => send.ahead.recall(),
        }
        self.settle(turn, send, planned, outcome, len)
    }

    /// A piece of an unreliable message went nowhere, which nobody is told of: that is the end of
    /// the message.
    fn give_up(&mut self, id: NicId, qpn: u32, now: Nanos) {
        let Some(nic) = self.nic_mut(id) else { return };
        let Some((turn, mut send)) = nic.begin_turn(qpn, now) else { return };
        if let Some(wqe) = send.current {
            send.wait = Wait::None;
            let step = match nic.plan(&turn, &mut send, &wqe) {
                Ok(planned) => {
                    let len = send.piece;
                    let rest = planned.total.saturating_sub(send.done.saturating_add(len));
                    send.ahead.forget_bytes(rest);
                    send.done += rest;
                    self.settle(&turn, &mut send, &planned, Outcome::Done, len)
                }
                Err(status) => Step::Failed(status),
            };
            if let (Step::Failed(status), Some(nic)) = (step, self.nic_mut(id)) {
                nic.send_failed(&turn, &mut send, status);
            }
        }
        if let Some(nic) = self.nic_mut(id) {
            nic.end_turn(qpn, send, true);
        }
    }

    /// A wait of the QP is over: its timer fired.
    pub(crate) fn timer_fired(&mut self, id: NicId, qpn: u32, deadline: Nanos) {
        let Some(nic) = self.nic_mut(id) else { return };
        let Some(qp) = nic.qps.get_mut(&qpn) else { return };
        let Some(send) = &mut qp.send else { return };
        match send.wait {
            Wait::Receiver(until) if until == deadline => {
                send.wait = Wait::None;
                nic.schedule(qpn);
            }
            // Nobody is told of an unreliable message that went nowhere.
            Wait::Owner(until) if until == deadline && qp.kind != Kind::Rc => {
                self.give_up(id, qpn, deadline);
            }
            Wait::Answer(until) | Wait::Owner(until) | Wait::Link(until) if until == deadline => {
                nic.counters.ack_timeouts += 1;
                send.wait = Wait::None;
                match send.retries_left.checked_sub(1) {
                    Some(left) => {
                        send.retries_left = left;
                        nic.schedule(qpn);
                    }
                    None => nic.retries_exceeded(qpn),
                }
            }
            _ => {}
        }
    }
}

impl SoftNic {
    fn retries_exceeded(&mut self, qpn: u32) {
        if let Some((turn, mut send)) = self.begin_turn(qpn, 0) {
            self.send_failed(&turn, &mut send, wc_status::RETRY_EXC_ERR);
            self.end_turn(qpn, send, false);
        }
    }

    /// An event ended a wait early: the peer posted a receive, or appeared.
    pub(in crate::soft) fn woken(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let forever = qp.attrs.rnr_retry();
        let Some(send) = &mut qp.send else { return };
        match send.wait {
            // The wait that was cut short does not count against the retries.
            Wait::Receiver(_) => send.rnr_left = send.rnr_left.saturating_add(1).min(forever),
            Wait::Answer(_) => {}
            Wait::None | Wait::Owner(_) | Wait::Link(_) => return,
        }
        send.wait = Wait::None;
        self.schedule(qpn);
    }
}
