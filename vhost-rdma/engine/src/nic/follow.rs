//! After a change of the guest's memory map: whatever lies in memory that is gone fails.
//!
//! A guest chooses how many objects it has and in how many pieces of memory each lies, and its
//! neighbours wait meanwhile; so this goes in steps. Memory that was unplugged stays mapped until
//! the last object over it is gone, and whoever unplugs it waits for the last step.

use super::budget::{Budget, cost};
use super::change::Change;
use super::nic::{Nic, NicState, Provider, STEP};
use super::parts::{ReceiveSide, SendSide};
use super::roster::Slots;
use super::table::InSlots;
use super::{DeferredDrop, Nanos};
use crate::memory::{AddressSpace, Ring};

/// Looking a mapping up in the new map.
pub(crate) const MAPPING: Nanos = cost::VISIT;

impl<P: Provider> Nic<P> {
    /// Takes the new map over. The NIC itself fails if the page that everything rests on is gone.
    /// [`Self::follow_memory`] looks at the rest.
    pub(crate) fn memory_changed(&mut self, space: AddressSpace) {
        if !matches!(self.life, NicState::Ready | NicState::Paused) {
            return;
        }
        let gone = self.status_page.as_ref().is_some_and(|page| !page.lives_in(&space));
        self.space = space;
        self.change = Change {
            pages: self.contexts.walk(),
            keys: P::walk_keys(self),
            cqs: Slots::of(&self.cqs),
            srqs: Slots::of(&self.srqs),
            qps: self.qp_numbers.walk(),
        };
        if gone {
            P::fail(self);
        }
    }

    /// Looks at some objects; true if there are more. Objects that were made meanwhile lie in the
    /// new map.
    pub(crate) fn follow_memory(&mut self) -> bool {
        if !P::follows(self.life) {
            self.change = Change::default();
            return false;
        }
        let mut change = std::mem::take(&mut self.change);
        let space = self.space.clone();
        let mut budget = self.meter.budget(STEP);
        let done = self.follow(&mut change, &space, &mut budget);
        self.change = change;
        !done
    }

    /// True: that was all.
    fn follow(
        &mut self,
        change: &mut Change<P::Keys>,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        self.follow_pages(change, space, budget)
            && P::follow_keys(self, &mut change.keys, space, budget)
            && self.follow_queues(change, space, budget)
            && self.follow_qps(change, space, budget)
    }

    fn follow_pages(
        &mut self,
        change: &mut Change<P::Keys>,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        while let Some(page) = self.contexts.next_page(&mut change.pages) {
            let lost = !page.lives_in(space);
            self.meter.charge(cost::VISIT + MAPPING);
            if lost {
                // A doorbell page: nothing of this NIC can be trusted to be heard any more.
                P::fail(self);
                if !P::LETS_GO {
                    *change = Change::default();
                    return true;
                }
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }

    fn follow_queues(
        &mut self,
        change: &mut Change<P::Keys>,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        let gone = |ring: &Ring| !ring.lives_in(space);
        while let Some(slot) = change.cqs.next() {
            self.meter.charge(cost::VISIT + MAPPING);
            if let Some((cqn, _)) = self.cqs.at(slot).filter(|(_, cq)| gone(cq.ring())) {
                self.cq_failed(cqn);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(slot) = change.srqs.next() {
            self.meter.charge(cost::VISIT + MAPPING);
            let lost = self.srqs.at(slot).filter(|(_, srq)| gone(srq.ring.ring()));
            if let Some((srqn, _)) = lost {
                self.srq_failed(srqn);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }

    fn follow_qps(
        &mut self,
        change: &mut Change<P::Keys>,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        let gone = |ring: &Ring| !ring.lives_in(space);
        while let Some(qpn) = change.qps.next(&self.qp_numbers) {
            self.meter.charge(cost::VISIT + 2 * MAPPING);
            let lost = self.qps.get(&qpn).is_some_and(|qp| {
                qp.send.as_ref().is_some_and(|send| gone(send.queue().ring()))
                    || qp.receive.as_ref().is_some_and(|receive| gone(receive.ring().ring()))
            });
            if lost {
                self.lose_rings(qpn);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }

    fn lose_rings(&mut self, qpn: u32) {
        self.qp_fatal(qpn);
        // Its rings cannot even be flushed.
        if let Some(qp) = self.qps.get_mut(&qpn) {
            self.deferred_drops.push(DeferredDrop::new((qp.send.take(), qp.receive.take())));
        }
    }
}
