//! What the engine does where a NIC asks its backing.

use virtio_rdma_abi as abi;

use super::nic::{KERNEL, NicState, Qp, Soft, SoftNic, Srq};
use super::waiter::Waiter;
use super::work::SoftWork;
use super::{DeferredDrop, Nanos, attributes, quota};
use crate::link::Gid;
use crate::memory::AddressSpace;
use crate::nic::budget::{Budget, cost};
use crate::nic::doorbell::Owner;
use crate::nic::follow::MAPPING;
use crate::nic::owned_numbers::OwnedNumbers;
use crate::nic::qp::Wait;
use crate::nic::quota::Places;
use crate::nic::roster::Walk;
use crate::nic::shape::{self, Bounds};
use crate::nic::{Objects, Provider, Status};

impl Provider for Soft {
    const PLACES: &'static Places = &quota::ENGINE;
    const LETS_GO: bool = false;
    const END: Nanos = 0;

    fn device(nic: &mut SoftNic) -> abi::QueryDeviceResp {
        nic.device_attributes()
    }

    fn port(_nic: &mut SoftNic) -> abi::QueryPortResp {
        attributes::port()
    }

    fn bounds(&self) -> Bounds {
        shape::ENGINE
    }

    fn begin_pd(_nic: &mut SoftNic) -> Result<(), Status> {
        Ok(())
    }

    fn end_pd(_nic: &mut SoftNic, _pd: ()) {}

    fn begin_srq(
        _nic: &mut SoftNic,
        _srqn: u32,
        _req: &abi::SrqCreateReq,
    ) -> Result<Vec<Waiter>, Status> {
        Ok(Vec::new())
    }

    fn end_srq(_nic: &mut SoftNic, _srq: &Vec<Waiter>) {}

    fn srq_bytes(_max_wr: u32) -> usize {
        quota::SHARED
    }

    fn srq_posted(srq: &Srq) -> u32 {
        srq.ring.waiting()
    }

    fn srq_used(srq: &Srq) -> u32 {
        srq.ring.taken()
    }

    fn set_limit(nic: &mut SoftNic, srqn: u32, limit: u32, _again: bool) -> Result<(), Status> {
        nic.srqs.get_mut(srqn as usize).ok_or(Status::NOENT)?.limit = limit;
        Ok(())
    }

    fn srq_moved(_nic: &mut SoftNic, _srqn: u32) {}

    fn qp_bytes(req: &abi::QpCreateReq) -> usize {
        quota::queue_pair(shape::sends(req).max_inline)
    }

    fn leave_groups(nic: &mut SoftNic, qpn: u32) {
        if nic.qps.get(&qpn).is_some_and(|qp| qp.own.groups > 0) {
            nic.leave_all(|member| member == qpn);
        }
    }

    fn end_qp(nic: &mut SoftNic, qp: &Qp) {
        if qp.qpn != abi::GSI_QPN {
            nic.backing.freed.push(qp.qpn);
        }
    }

    fn end_ah(_nic: &mut SoftNic, _ah: ()) {}

    fn catch_up(_nic: &mut SoftNic) {}

    fn abandoned(_nic: &mut SoftNic, _work: SoftWork) {}

    fn begin_end(_nic: &SoftNic) {}

    fn end_before_qps(_nic: &mut SoftNic, _ctx: u32, _end: &mut (), _budget: &mut Budget) -> bool {
        true
    }

    fn end_before_qp(_nic: &mut SoftNic, _qpn: u32, _end: &mut (), _budget: &mut Budget) -> bool {
        true
    }

    fn end_after_qps(_nic: &mut SoftNic, _end: &mut (), _budget: &mut Budget) -> bool {
        true
    }

    fn keys(&self) -> &OwnedNumbers {
        &self.mrs.numbers
    }

    fn end_key(nic: &mut SoftNic, number: u32, ctx: u32) {
        if let Some((_, key)) = nic.backing.mrs.owner(number).filter(|&(owner, _)| owner == ctx) {
            nic.remove_key(key);
        }
    }

    fn context_gone(&mut self, ctx: u32) {
        self.mirror.end(ctx);
    }

    fn uses_pd(nic: &SoftNic, pdn: u32) -> bool {
        nic.backing.mrs.uses_pd(pdn)
    }

    fn has_other_qp(&self) -> bool {
        false
    }

    fn count(&self, objects: &mut Objects) {
        objects.mrs = u32::try_from(self.mrs.len()).unwrap_or(u32::MAX);
        objects.mr_bytes = self.mrs.bytes();
    }

    fn gid(address: &Gid) -> Gid {
        *address
    }

    #[inline]
    fn receive_posted(&mut self, qp: &mut Qp) -> bool {
        self.wakes.extend(qp.own.waiter.take());
        false
    }

    fn run_receives(_nic: &mut SoftNic, _qpn: u32) {}

    #[inline]
    fn shared_posted(&mut self, srq: &mut Srq) -> bool {
        self.wakes.append(&mut srq.own);
        false
    }

    fn run_shared(_nic: &mut SoftNic, _srqn: u32) {}

    fn posted_elsewhere(_nic: &mut SoftNic, _owner: Owner, _producer: u32) {}

    fn stopped(nic: &mut SoftNic, qpn: u32) {
        if let Some(qp) = nic.qps.get_mut(&qpn) {
            qp.own.waiter = None;
            qp.own.draining = false;
        }
        nic.schedule(qpn);
    }

    fn cq_died(_nic: &mut SoftNic, _cqn: u32) {}

    fn stand_still(_nic: &mut SoftNic, _begins: bool) -> bool {
        false
    }

    fn go_on(nic: &mut SoftNic) {
        let all = nic.qp_numbers.walk();
        nic.chores.resume(all);
    }

    fn is_beginning(&self) -> bool {
        false
    }

    fn succeed(&mut self, _life: NicState) -> Self {
        Self::new(self.id)
    }

    fn has_work(nic: &mut SoftNic, now: Nanos) -> bool {
        let runs = nic.life == NicState::Ready && !nic.run.is_empty();
        !nic.backing.wakes.is_empty() || runs || nic.has_other_work(now)
    }

    #[inline]
    fn has_news(&self) -> bool {
        self.mirror.has_unsent()
    }

    fn tell(nic: &mut SoftNic) {
        nic.send_jobs();
    }

    fn resumed(nic: &mut SoftNic, qpn: u32) {
        // Its answer may have come meanwhile, and was not taken.
        if let Some(send) = nic.qps.get_mut(&qpn).and_then(|qp| qp.send.as_mut())
            && matches!(send.wait, Wait::Link(_))
        {
            send.wait = Wait::None;
        }
        nic.woken(qpn);
        nic.schedule(qpn);
    }

    fn fail(nic: &mut SoftNic) {
        if matches!(nic.life, NicState::Ready | NicState::Paused) {
            nic.raise(abi::event::DEVICE_FATAL, 0, KERNEL);
            nic.deliver_events();
            nic.life = NicState::Failed;
        }
    }

    fn dropped(_nic: &mut SoftNic) {}

    fn walk_keys(nic: &SoftNic) -> Walk {
        nic.backing.mrs.numbers.all().walk()
    }

    fn follow_keys(
        nic: &mut SoftNic,
        keys: &mut Walk,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        while let Some(number) = keys.next(nic.backing.mrs.numbers.all()) {
            let (mappings, lost) = nic.backing.mrs.follow(number, space);
            nic.meter.charge(cost::VISIT + MAPPING * mappings as u64);
            nic.deferred_drops.extend(lost.map(DeferredDrop::new));
            if budget.is_over(&nic.meter) {
                return false;
            }
        }
        true
    }
}
