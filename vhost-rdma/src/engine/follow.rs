//! After a change of the guest's memory map: whatever lies in memory that is gone fails.
//!
//! A guest chooses how many objects it has and in how many pieces of memory each lies, and its neighbours wait meanwhile; so this goes in
//! steps. Memory that was unplugged stays mapped until the last object over it is gone, and whoever unplugs it waits for the last step.

use super::nic::Nic;
use super::steps::STEP;
use super::{DeferredDrop, Nanos};
use crate::memory::{AddressSpace, Ring};
use crate::nic::budget::{Budget, cost};
use crate::nic::roster::{Slots, Walk};
use crate::nic::table::InSlots;

/// What is left to be looked at after a change.
#[derive(Debug, Default)]
pub struct MemoryChange {
    pages: Walk,
    keys: Walk,
    cqs: Slots,
    srqs: Slots,
    qps: Walk,
}

/// Looking a mapping up in the new map.
const MAPPING: Nanos = cost::VISIT;

impl Nic {
    /// Takes the new map over. The NIC itself fails if the page that everything rests on is gone.
    pub(super) fn memory_changed(&mut self, space: AddressSpace) -> MemoryChange {
        let gone = self.status_page.as_ref().is_some_and(|page| !page.lives_in(&space));
        self.space = space;
        if gone {
            self.fail();
            return MemoryChange::default();
        }
        MemoryChange {
            pages: self.contexts.walk(),
            keys: self.mrs.numbers.walk(),
            cqs: Slots::of(&self.cqs),
            srqs: Slots::of(&self.srqs),
            qps: self.qp_numbers.walk(),
        }
    }

    /// Looks at some objects; true if there are more. Objects that were made meanwhile lie in the new map.
    pub(super) fn follow_memory(&mut self, change: &mut MemoryChange) -> bool {
        let space = self.space.clone();
        let mut budget = self.meter.budget(STEP);
        !self.follow(change, &space, &mut budget)
    }

    /// True: that was all.
    fn follow(
        &mut self,
        change: &mut MemoryChange,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        let gone = |ring: &Ring| !ring.lives_in(space);
        while let Some(page) = self.contexts.next_page(&mut change.pages) {
            let lost = gone(page);
            self.meter.charge(cost::VISIT + MAPPING);
            if lost {
                // A doorbell page: nothing of this NIC can be trusted to be heard any more.
                self.fail();
                *change = MemoryChange::default();
                return true;
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(number) = change.keys.next(&self.mrs.numbers) {
            let (mappings, lost) = self.mrs.follow(number, space);
            self.meter.charge(cost::VISIT + MAPPING * mappings as u64);
            self.deferred_drops.extend(lost.map(DeferredDrop::new));
            if budget.is_over(&self.meter) {
                return false;
            }
        }
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
        while let Some(qpn) = change.qps.next(&self.qp_numbers) {
            self.meter.charge(cost::VISIT + 2 * MAPPING);
            let lost = self.qps.get(&qpn).is_some_and(|qp| {
                qp.send.as_ref().is_some_and(|send| gone(send.ring()))
                    || qp.receive.as_ref().is_some_and(|receive| gone(receive.ring()))
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
