//! After a change of the guest's memory map: whatever lies in memory that is gone fails.
//!
//! A guest chooses how many objects it has and in how many pieces of memory each lies, and its neighbours wait meanwhile; so this goes in
//! steps. Memory that was unplugged stays mapped until the last object over it is gone, and whoever unplugs it waits for the last step.

use super::budget::cost;
use super::control::numbers;
use super::nic::Nic;
use crate::memory::{AddressSpace, Ring};

/// Objects of one step.
const STEP: usize = 128;

/// What is left to be looked at after a change.
#[derive(Debug, Default)]
pub struct MemoryChange {
    mrs: Vec<u32>,
    cqs: Vec<u32>,
    srqs: Vec<u32>,
    qps: Vec<u32>,
}

impl Nic {
    /// Takes the new map over. The NIC itself fails if the pages that everything rests on are gone.
    pub(super) fn memory_changed(&mut self, space: AddressSpace) -> MemoryChange {
        let gone = |ring: &Ring| !ring.lives_in(&space);
        let base_gone =
            self.status_page.as_ref().is_some_and(gone) || self.contexts.pages().any(gone);
        self.space = space;
        if base_gone {
            self.fail();
            return MemoryChange::default();
        }
        MemoryChange {
            mrs: self.mrs.by_number.keys().copied().collect(),
            cqs: numbers(self.cqs.iter().map(|(n, _)| n)),
            srqs: numbers(self.srqs.iter().map(|(n, _)| n)),
            qps: self.qps.keys().copied().collect(),
        }
    }

    /// Looks at some objects; true if there are more. Objects that were made meanwhile lie in the new map.
    pub(super) fn follow_memory(&mut self, change: &mut MemoryChange) -> bool {
        let space = self.space.clone();
        let gone = |ring: &Ring| !ring.lives_in(&space);
        let mut left = STEP;
        self.meter.charge_each(cost::VISIT, STEP);
        for mr in last(&mut change.mrs, &mut left) {
            self.mrs.follow(mr, &space);
        }
        for cqn in last(&mut change.cqs, &mut left) {
            if self.cqs.get(cqn as usize).is_some_and(|cq| gone(cq.ring())) {
                self.cq_failed(cqn);
            }
        }
        for srqn in last(&mut change.srqs, &mut left) {
            if self.srqs.get(srqn as usize).is_some_and(|srq| gone(srq.ring.ring())) {
                self.srq_failed(srqn);
            }
        }
        for qpn in last(&mut change.qps, &mut left) {
            let Some(qp) = self.qps.get(&qpn) else { continue };
            let lost = qp.send.as_ref().is_some_and(|send| gone(send.ring()))
                || qp.receive.as_ref().is_some_and(|receive| gone(receive.ring()));
            if lost {
                self.qp_fatal(qpn);
                // Its rings cannot even be flushed.
                if let Some(qp) = self.qps.get_mut(&qpn) {
                    qp.send = None;
                    qp.receive = None;
                }
            }
        }
        left == 0
    }
}

/// Takes the last ones out, as many as are left of a step.
fn last(list: &mut Vec<u32>, left: &mut usize) -> Vec<u32> {
    let keep = list.len().saturating_sub(*left);
    let taken = list.split_off(keep);
    *left -= taken.len();
    taken
}
