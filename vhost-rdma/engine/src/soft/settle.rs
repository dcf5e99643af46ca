//! Sends that count before a CQ moves.
//!
//! Whoever shrinks a CQ means the completions of what is already posted to count (IBTA 11.2.8.3).
//! So CQ_RESIZE has the queue pairs that complete to it executed first, in steps
//! ([`crate::nic::dispatch`]), and then goes on as on every backing. Not those of a NIC that has
//! rest from slow memory: they are executed when that is over.

use super::engine::Execution;
use super::nic::{Soft, SoftNic};
use super::nics::Nics;
use super::work::{SettleCq, SoftWork};
use crate::link::NicId;
use crate::nic::budget::{Budget, cost};
use crate::nic::verb::CqResize;
use crate::nic::work::{Begun, Work};
use crate::nic::{STEP, Status};

/// Turns of send queues before a CQ is resized.
const SETTLE_TURNS: u32 = 64;

impl<N: Nics> Execution<'_, N> {
    pub(super) fn begin_resize_cq(
        &mut self,
        id: NicId,
        resize: CqResize,
    ) -> Result<Begun<Soft>, Status> {
        // Also a peer's receives count that no round has seen yet.
        let now = self.nic_mut(id).ok_or(Status::FATAL)?.now;
        let mut budget = self.meter.budget(STEP);
        self.nics.scan(now, &mut budget, self.serving);
        let qps = self.nic_mut(id).ok_or(Status::FATAL)?.qp_numbers.walk();
        let settle = SettleCq { qps, turns: SETTLE_TURNS, resize };
        Ok(Begun::Steps(Work::Own(SoftWork::Settle(settle))))
    }

    /// Executes some of what is posted; what is left of the command.
    pub(super) fn settle_cq(
        &mut self,
        id: NicId,
        mut settle: SettleCq,
        budget: &mut Budget,
    ) -> Result<Option<Work<Soft>>, Status> {
        if self.nic_mut(id).is_some_and(|nic| nic.backing.rests) {
            settle.turns = 0;
        }
        while settle.turns > 0
            && let Some(qpn) = self.nic_mut(id).and_then(|nic| settle.qps.next(&nic.qp_numbers))
        {
            self.meter.charge(cost::VISIT);
            let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
            let (due, now) = (nic.is_due(qpn, settle.resize.cqn), nic.now);
            if due && self.settle_turn(id, qpn, budget, now) {
                settle.turns -= 1;
            }
            if budget.is_over(self.meter) {
                return Ok(Some(Work::Own(SoftWork::Settle(settle))));
            }
        }
        self.nic_mut(id).ok_or(Status::FATAL)?.begin_resize_cq(settle.resize).map(Some)
    }
}

impl SoftNic {
    /// Whether a queue pair completes its sends to that CQ and has some. Also what no round has
    /// seen yet is taken in.
    fn is_due(&mut self, qpn: u32, cqn: u32) -> bool {
        let Some(qp) = self.qps.get(&qpn).filter(|qp| qp.send_cqn == cqn) else { return false };
        let (ctx, [doorbell, _]) = (qp.ctx, qp.doorbells);
        if let Some(post) = self.contexts.look_at(ctx, doorbell) {
            self.posted(post);
        }
        self.qps.get(&qpn).is_some_and(|qp| qp.scheduled)
    }
}
