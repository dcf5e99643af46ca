//! The end of a work request: its completion, the state in which a failure leaves the QP, and the
//! flush of what comes behind it.

use virtio_rdma_abi::{Cqe, wc_opcode, wc_status};
use zerocopy::little_endian::U32;

use super::{TURN_REQUESTS, Turn};
use crate::link::Operation;
use crate::nic::budget::{Budget, cost};
use crate::nic::qp::{Kind, SendQueue, State};
use crate::nic::shape::failed_send;
use crate::soft::nic::SoftNic;

impl SoftNic {
    /// The current work request succeeded: `what` is its completion's opcode and length.
    pub(super) fn send_done(&mut self, turn: &Turn, send: &mut SendQueue, what: (u8, u32)) {
        let Some(wqe) = send.current else { return };
        let index = send.current_index();
        send.retire();
        if !turn.tells(wqe.flags) {
            return;
        }
        let mut cqe = Cqe {
            wr_id: wqe.wr_id,
            qpn: U32::new(turn.qpn),
            opcode: what.0,
            status: wc_status::SUCCESS,
            byte_len: U32::new(what.1),
            wqe_index: U32::new(index),
            ..Cqe::default()
        };
        self.complete(turn.cqn, &mut cqe, false);
    }

    /// The current work request failed: it completes, and the QP stops sending.
    pub(super) fn send_failed(&mut self, turn: &Turn, send: &mut SendQueue, status: u8) {
        if let Some(wqe) = send.current {
            let request = (wqe.wr_id.get(), send.current_index());
            self.complete(turn.cqn, &mut failed_send(turn.qpn, request, status), true);
        }
        send.retire();
        send.ahead.forget_all();
        if turn.kind == Kind::Rc {
            self.enter_error(turn.qpn);
        } else if let Some(qp) = self.qps.get_mut(&turn.qpn)
            && matches!(qp.state, State::Rts | State::Sqd)
        {
            // IBTA 10.3.1.5: an unreliable QP goes on receiving, if its CQ has a place for the
            // completion.
            qp.state = State::Sqe;
            qp.own.draining = false;
        }
    }

    /// Flushes a bounded number of what is posted on a QP in ERR or SQE.
    pub(super) fn flush_turn(&mut self, qpn: u32, time: &mut Budget) {
        self.flush_posted(
            qpn,
            TURN_REQUESTS,
            |nic, budget| nic.flush_sends(qpn, budget, time),
            |nic, budget| nic.flush_receives(qpn, budget),
        );
    }

    /// Flushes up to `budget` sends, as long as there is time; true if some are left.
    pub(in crate::soft) fn flush_sends(
        &mut self,
        qpn: u32,
        budget: &mut u32,
        time: &mut Budget,
    ) -> bool {
        loop {
            let Some(qp) = self.qps.get_mut(&qpn) else { return false };
            let cqn = qp.send_cqn;
            let Some(send) = &mut qp.send else { return false };
            if !send.has_work() {
                return false;
            }
            if *budget == 0 || time.is_over(&self.meter) {
                return true;
            }
            *budget -= 1;
            self.meter.charge(cost::FLUSH);
            let Some(qp) = self.qps.get_mut(&qpn) else { return false };
            let Some(send) = &mut qp.send else { return false };
            send.ahead.forget_all();
            let Some(wqe) = send.current.or_else(|| send.take()) else { return false };
            let index = send.current_index();
            send.retire();
            let request = (wqe.wr_id.get(), index);
            self.complete(cqn, &mut failed_send(qpn, request, wc_status::WR_FLUSH_ERR), true);
        }
    }
}

pub(super) const fn completion_opcode(operation: Operation) -> u8 {
    match operation {
        Operation::Send => wc_opcode::SEND,
        Operation::Write => wc_opcode::RDMA_WRITE,
        Operation::Read => wc_opcode::RDMA_READ,
        Operation::CompareSwap => wc_opcode::COMP_SWAP,
        Operation::FetchAdd => wc_opcode::FETCH_ADD,
        Operation::AtomicWrite => wc_opcode::ATOMIC_WRITE,
        Operation::Flush => wc_opcode::FLUSH,
    }
}
