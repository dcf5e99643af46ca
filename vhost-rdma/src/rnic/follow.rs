//! What is many, in steps: objects over guest memory that is gone, queue pairs of a CQ that died,
//! and rings that move.
//!
//! The engine's `follow`, `chores` and `steps` do the same for its own objects and say why. Here
//! the end of some objects is a command to the RNIC besides, or a system call at least, so each
//! counts as much as [`HOST_CALL`].

use super::addresses::PeerCheck;
use super::ending::End;
use super::modify::Drain;
use super::nic::Nic;
use super::verbs::HostMr;
use crate::memory::{AddressSpace, Ring};
use crate::nic::budget::{Budget, cost};
use crate::nic::cq::Succession;
use crate::nic::receive::Moving;
use crate::nic::roster::{Slots, Walk};
use crate::nic::table::InSlots;
use crate::nic::{DeferredDrop, Nanos, Reply, Status};

/// Time for one step.
pub(super) const STEP: Nanos = 40_000;
/// A call of the host's verbs: a system call at least.
pub(super) const HOST_CALL: Nanos = 1_000;

/// What is left to be looked at after a change of the guest's memory map.
#[derive(Debug, Default)]
pub(super) struct Change {
    pages: Walk,
    /// Regions are looked at first, then windows, and only then the regions go: hardware keeps a
    /// region that a window shows.
    lost: Walk,
    windows: Walk,
    keys: Walk,
    cqs: Slots,
    srqs: Slots,
    qps: Walk,
    gsi: bool,
}

/// What is to be done with objects, soon: QPs told that a CQ of theirs died, and connections ended
/// to peers that may not be reached any more.
#[derive(Debug, Default)]
pub(super) struct Chores {
    peers: PeerCheck,
    dead: Vec<u32>,
    telling: Vec<u32>,
    tell: Walk,
}

impl Chores {
    pub(super) const fn is_empty(&self) -> bool {
        self.dead.is_empty() && self.tell.is_over() && self.peers.is_over()
    }

    /// From the beginning, if it had begun already.
    pub(super) fn peers_changed(&mut self, check: PeerCheck) {
        self.peers = check;
    }

    pub(super) fn cq_died(&mut self, cqn: u32) {
        self.dead.push(cqn);
    }
}

/// A command that has begun.
#[derive(Debug)]
pub(super) enum Work {
    EndContext(End),
    /// A QP, once its windows are gone; then what the host CQ has of it.
    EndQp(u32),
    Drain(Drain),
    /// A QP that is in RESET, when the host CQ has nothing of it; then its changes of windows.
    BeginAnew(u32, Drain),
    ForgetChanges((u32, u32), Walk),
    ResizeCq(u32, Succession),
    ResizeSrq(Box<virtio_rdma_abi::SrqModifyReq>, Moving),
}

impl Nic {
    /// Tells some queue pairs that a CQ of theirs died, and looks at some connections.
    pub(super) fn do_chores(&mut self, budget: &mut Budget) {
        let mut peers = std::mem::take(&mut self.chores.peers);
        if !peers.is_over() {
            self.check_some_peers(&mut peers, budget);
        }
        self.chores.peers = peers;
        if self.chores.tell.is_over() && !self.chores.dead.is_empty() {
            self.chores.telling = std::mem::take(&mut self.chores.dead);
            self.chores.telling.sort_unstable();
            self.chores.tell = self.qp_numbers.walk();
        }
        while let Some(qpn) = self.chores.tell.next(&self.qp_numbers) {
            self.meter.charge(cost::VISIT);
            let among = |cqn| self.chores.telling.binary_search(&cqn).is_ok();
            if self.qps.get(&qpn).is_some_and(|qp| among(qp.send_cqn) || among(qp.recv_cqn)) {
                self.meter.charge(cost::OBJECT);
                self.qp_fatal(qpn);
            }
            if budget.is_over(&self.meter) {
                return;
            }
        }
    }

    /// Takes a new memory map over.
    pub(super) fn begin_to_follow(&mut self, space: AddressSpace) {
        let gone = self.status_page.as_ref().is_some_and(|page| !page.lives_in(&space));
        self.change = Change {
            pages: self.contexts.walk(),
            lost: self.mr_keys.walk(),
            windows: self.windows.walk(),
            keys: self.mr_keys.walk(),
            cqs: Slots::of(&self.cqs),
            srqs: Slots::of(&self.srqs),
            qps: self.qp_numbers.walk(),
            gsi: self.services.lost_rings(&space),
        };
        self.space = space;
        if gone {
            self.fail_now();
        }
    }

    /// Looks at some objects; true if there are more. The keys of regions that are gone open
    /// nothing when this is over.
    pub(super) fn follow_some(&mut self) -> bool {
        let mut change = std::mem::take(&mut self.change);
        let space = self.space.clone();
        let mut budget = self.meter.budget(STEP);
        let done = self.follow(&mut change, &space, &mut budget);
        self.change = change;
        !done
    }

    fn follow(&mut self, change: &mut Change, space: &AddressSpace, budget: &mut Budget) -> bool {
        let gone = |ring: &Ring| !ring.lives_in(space);
        while let Some(page) = self.contexts.next_page(&mut change.pages) {
            let lost = gone(page);
            self.meter.charge(2 * cost::VISIT);
            if lost {
                self.fail_now();
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        if std::mem::take(&mut change.gsi) {
            self.gsi_fatal();
            self.services.drop_rings();
        }
        while let Some(key) = change.lost.next(&self.mr_keys) {
            let mappings = self.mrs.get_mut(&key).map_or(0, |mr| mr.follow(space));
            self.meter.charge_each(cost::VISIT, 1 + mappings);
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(number) = self.windows.next(&mut change.windows) {
            self.meter.charge(cost::VISIT);
            if self.windows.shows_lost(number, &self.mrs) {
                self.meter.charge(HOST_CALL);
                self.free_window(number);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(key) = change.keys.next(&self.mr_keys) {
            self.meter.charge(cost::VISIT);
            let lost: Option<HostMr> = self.mrs.get_mut(&key).and_then(super::mr::Mr::take_lost);
            if let Some(host) = lost {
                self.meter.charge(cost::OBJECT);
                self.let_go(host);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(slot) = change.cqs.next() {
            self.meter.charge(2 * cost::VISIT);
            if let Some((cqn, _)) = self.cqs.at(slot).filter(|(_, cq)| gone(cq.ring())) {
                self.cq_failed(cqn);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(slot) = change.srqs.next() {
            self.meter.charge(2 * cost::VISIT);
            let lost = self.srqs.at(slot).filter(|(_, srq)| gone(srq.ring.ring()));
            if let Some((srqn, _)) = lost {
                self.srq_failed(srqn);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(qpn) = change.qps.next(&self.qp_numbers) {
            self.meter.charge(3 * cost::VISIT);
            let lost = self.qps.get(&qpn).is_some_and(|qp| {
                qp.send.as_ref().is_some_and(|send| gone(send.queue.ring()))
                    || qp.receive.as_ref().is_some_and(|receive| gone(receive.ring.ring()))
            });
            if lost {
                self.qp_fatal(qpn);
                // Its rings cannot even be flushed.
                if let Some(qp) = self.qps.get_mut(&qpn) {
                    let rings = (qp.send.take(), qp.receive.take());
                    self.deferred_drops.push(DeferredDrop::new(rings));
                }
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }

    /// What has begun ends without an answer: its queue was stopped. A QP that the hardware has in
    /// RESET begins anew all the same.
    pub(super) fn abandon_work(&mut self) {
        if let Some(Work::BeginAnew(qpn, _)) = self.work.take() {
            self.begin_anew(qpn);
        }
    }

    /// Goes on with the command that has begun.
    pub(super) fn carry_on(&mut self) -> Result<Reply, Status> {
        let work = self.work.take().ok_or(Status::STATE)?;
        self.work_on(work)
    }

    pub(super) fn work_on(&mut self, mut work: Work) -> Result<Reply, Status> {
        let mut budget = self.meter.budget(STEP);
        let done = match &mut work {
            Work::EndContext(end) => self.end_some(end, &mut budget),
            Work::EndQp(qpn) => self.end_windows_of(*qpn, &mut budget),
            Work::Drain(drain) | Work::BeginAnew(_, drain) => self.drain_host(drain, &mut budget),
            Work::ForgetChanges(life, walk) => self.forget_changes(*life, walk, &mut budget),
            Work::ResizeCq(cqn, to) => self.carry_cq(*cqn, to, &mut budget)?,
            Work::ResizeSrq(req, to) => self.carry_srq(req.srqn.get(), to, &mut budget)?,
        };
        match (done, work) {
            (false, work) => {
                self.work = Some(work);
                Ok(Reply::More)
            }
            (true, Work::EndContext(_) | Work::Drain(_) | Work::ForgetChanges(..)) => {
                Ok(Reply::Done)
            }
            (true, Work::EndQp(qpn)) => {
                self.remove_qp(qpn);
                // Before the number can come back: completions of a shared queue carry only that.
                self.work_on(Work::Drain(self.drain()))
            }
            (true, Work::BeginAnew(qpn, _)) => {
                let walk = self.windows.walk_of(qpn);
                let Some(serial) = self.begin_anew(qpn) else { return Err(Status::NOENT) };
                self.work_on(Work::ForgetChanges((qpn, serial), walk))
            }
            (true, Work::ResizeCq(cqn, to)) => {
                let cq = self.cqs.get_mut(cqn as usize).ok_or(Status::NOENT)?;
                let old = cq.take_over(to)?;
                self.deferred_drops.push(DeferredDrop::new(old));
                self.dirty.push(cqn);
                Ok(Reply::Done)
            }
            (true, Work::ResizeSrq(req, to)) => self.finish_resize_srq(&req, to),
        }
    }

    fn carry_cq(&self, cqn: u32, to: &mut Succession, budget: &mut Budget) -> Result<bool, Status> {
        let cq = self.cqs.get(cqn as usize).ok_or(Status::NOENT)?;
        while cq.carry(to) {
            self.meter.charge(cost::ENTRY);
            if budget.is_over(&self.meter) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn carry_srq(
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
