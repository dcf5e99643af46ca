//! Rings that move: CQ_RESIZE and SRQ_MODIFY with another ring.
//!
//! A guest chooses how much waits in a ring, so it moves in steps.

use super::budget::{Budget, cost};
use super::cq::Succession;
use super::nic::Nic;
use super::provider::Provider;
use super::receive::Moving;
use super::{DeferredDrop, Status};

impl<P: Provider> Nic<P> {
    /// Copies entries to the other ring; true: it has everything.
    pub(crate) fn carry_cq(
        &self,
        cqn: u32,
        to: &mut Succession,
        budget: &mut Budget,
    ) -> Result<bool, Status> {
        let cq = self.cqs.get(cqn as usize).ok_or(Status::NOENT)?;
        while cq.carry(to) {
            self.meter.charge(cost::ENTRY);
            if budget.is_over(&self.meter) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Goes over to the other ring.
    pub(crate) fn take_over_cq(&mut self, cqn: u32, to: Succession) -> Result<(), Status> {
        let cq = self.cqs.get_mut(cqn as usize).ok_or(Status::NOENT)?;
        let old = cq.take_over(to)?;
        self.deferred_drops.push(DeferredDrop::new(old));
        self.look_at(cqn);
        Ok(())
    }

    /// Copies receives to the other ring; true: it has everything.
    pub(crate) fn carry_srq(
        &mut self,
        srqn: u32,
        to: &mut Moving,
        budget: &mut Budget,
    ) -> Result<bool, Status> {
        let srq = self.srqs.get(srqn as usize).ok_or(Status::NOENT)?;
        // What was posted moves with the ring, also what no round has seen yet.
        if let Some(post) = self.contexts.look_at(srq.ctx, srq.doorbell) {
            self.posted(post);
        }
        let srq = self.srqs.get(srqn as usize).ok_or(Status::NOENT)?;
        while let Some(len) = srq.ring.carry(to) {
            self.meter.charge(cost::ENTRY + cost::bytes(2 * len));
            if budget.is_over(&self.meter) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
