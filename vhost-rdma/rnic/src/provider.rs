//! What an RNIC does where a NIC asks its backing.

use vhost_rdma_engine::link::Gid;
use vhost_rdma_engine::nic::budget::{Budget, cost};
use vhost_rdma_engine::nic::doorbell::Owner;
use vhost_rdma_engine::nic::owned_numbers::OwnedNumbers;
use vhost_rdma_engine::nic::quota::Places;
use vhost_rdma_engine::nic::shape::{self, Bounds};
use vhost_rdma_engine::nic::{Nanos, NicState, Objects, Provider, Status};
use vhost_rdma_memory::AddressSpace;
use virtio_rdma_abi::{self as abi, GSI_QPN};

use super::cq::CqVerbs as _;
use super::create::Create as _;
use super::drain::Drains as _;
use super::ending::Endings as _;
use super::follow::Follow as _;
use super::gsi::GsiVerbs as _;
use super::held::Held;
use super::limits::Limits as _;
use super::mcast::Mcast as _;
use super::mr::RegionVerbs as _;
use super::mw::WindowVerbs as _;
use super::nic::{Handle, HostAddress, Nic, Qp, Rnic, Srq};
use super::quota;
use super::receiver::Receiver as _;
use super::refusal::Control as _;
use super::round::Upkeep as _;
use super::srq::{SharedReceives as _, SrqVerbs as _};
use super::verbs::HostPd;
use super::work::{END, Ending, Keys, Work};

impl Provider for Rnic {
    const PLACES: &'static Places = &quota::RNIC;
    // The hardware lets go of what is gone.
    const LETS_GO: bool = true;
    const END: Nanos = END;

    fn device(nic: &mut Nic) -> abi::QueryDeviceResp {
        nic.device_attributes()
    }

    fn port(nic: &mut Nic) -> abi::QueryPortResp {
        nic.port_attributes()
    }

    fn bounds(&self) -> Bounds {
        self.bounds()
    }

    fn begin_pd(nic: &mut Nic) -> Result<HostPd, Status> {
        nic.backing.host.alloc_pd().map_err(|error| nic.refused(error))
    }

    fn end_pd(nic: &mut Nic, pd: HostPd) {
        nic.forgo(|nic| nic.backing.host.free_pd(pd));
    }

    fn begin_srq(nic: &mut Nic, srqn: u32, req: &abi::SrqCreateReq) -> Result<Held, Status> {
        nic.begin_srq(srqn, req)
    }

    fn end_srq(nic: &mut Nic, srq: &Held) {
        nic.backing.serials.remove(&srq.serial);
        nic.backing.admitted -= srq.cost;
        nic.forgo(|nic| nic.backing.host.destroy_srq(srq.host));
    }

    fn srq_bytes(max_wr: u32) -> usize {
        quota::shared(max_wr)
    }

    fn srq_posted(srq: &Srq) -> u32 {
        srq.posted_in_all()
    }

    fn srq_used(srq: &Srq) -> u32 {
        srq.own.used
    }

    fn set_limit(nic: &mut Nic, srqn: u32, limit: u32, again: bool) -> Result<(), Status> {
        nic.set_limit(srqn, limit, again)
    }

    fn srq_moved(nic: &mut Nic, srqn: u32) {
        nic.schedule_shared(srqn);
    }

    fn qp_bytes(req: &abi::QpCreateReq) -> usize {
        let depth = (req.max_send_wr.get(), req.max_recv_wr.get());
        quota::queue_pair(depth, shape::sends(req).max_inline)
    }

    fn leave_groups(nic: &mut Nic, qpn: u32) {
        nic.leave_all(qpn);
    }

    fn end_qp(nic: &mut Nic, qp: &Qp) {
        let place = &nic.backing.place;
        place.directory.remove_qp(&place.device, qp.qpn, nic.settings.vni);
        nic.backing.serials.remove(&qp.own.serial);
        nic.backing.admitted -= qp.own.cost;
        nic.forgo(|nic| nic.backing.host.destroy_qp(qp.own.host));
    }

    fn end_ah(nic: &mut Nic, ah: Handle) {
        nic.forgo(|nic| nic.backing.host.destroy_ah(ah.host));
    }

    fn catch_up(nic: &mut Nic) {
        nic.poll_host();
    }

    fn abandoned(nic: &mut Nic, work: Work) {
        nic.abandon(&work);
    }

    fn begin_end(_nic: &Nic) -> Ending {
        Ending { drain: None }
    }

    fn end_before_qps(nic: &mut Nic, ctx: u32, _end: &mut Ending, budget: &mut Budget) -> bool {
        nic.end_windows(ctx, budget)
    }

    /// Windows that it has bound, if any are left.
    fn end_before_qp(nic: &mut Nic, qpn: u32, end: &mut Ending, budget: &mut Budget) -> bool {
        end.drain = Some(nic.drain());
        nic.end_windows_of(qpn, budget)
    }

    fn end_after_qps(nic: &mut Nic, end: &mut Ending, budget: &mut Budget) -> bool {
        let done = end.drain.as_mut().is_none_or(|drain| nic.drain_host(drain, budget));
        if done {
            end.drain = None;
        }
        done
    }

    fn keys(&self) -> &OwnedNumbers {
        &self.mr_keys
    }

    fn end_key(nic: &mut Nic, key: u32, ctx: u32) {
        if nic.backing.mrs.get(&key).is_some_and(|mr| mr.ctx == ctx) {
            // Its end is not the worker's.
            nic.meter.charge(cost::OBJECT);
            nic.remove_mr(key);
        }
    }

    fn context_gone(&mut self, _ctx: u32) {}

    fn uses_pd(nic: &Nic, pdn: u32) -> bool {
        nic.backing.services.uses_pd(pdn)
    }

    fn has_other_qp(&self) -> bool {
        self.services.exists()
    }

    fn count(&self, objects: &mut Objects) {
        let regions = self.mrs.len() + self.services.keys();
        objects.mrs = u32::try_from(regions).unwrap_or(u32::MAX);
        objects.mr_bytes = self.mr_bytes;
    }

    fn gid(address: &HostAddress) -> Gid {
        address.guest
    }

    /// At once: a guest that rang for a receive and then had its peer send, both on this worker,
    /// must not see the message overtake the receive on its way to the hardware. All doorbells are
    /// looked at before any send is posted. What takes longer (`receiver::AT_ONCE`) has to wait for
    /// its turn.
    fn receive_posted(&mut self, _qp: &mut Qp) -> bool {
        true
    }

    fn run_receives(nic: &mut Nic, qpn: u32) {
        nic.post_receives_at_once(qpn);
    }

    fn shared_posted(&mut self, _srq: &mut Srq) -> bool {
        true
    }

    fn run_shared(nic: &mut Nic, srqn: u32) {
        nic.post_shared_at_once(srqn);
    }

    fn posted_elsewhere(nic: &mut Nic, owner: Owner, producer: u32) {
        if matches!(owner, Owner::Send(GSI_QPN) | Owner::Receive(GSI_QPN)) {
            nic.gsi_posted(owner, producer);
        }
    }

    fn stopped(nic: &mut Nic, qpn: u32) {
        nic.stop_soon(qpn);
    }

    fn cq_died(nic: &mut Nic, cqn: u32) {
        if nic.backing.services.uses_cq(cqn) {
            nic.gsi_fatal();
        }
    }

    fn stand_still(nic: &mut Nic, begins: bool) -> bool {
        nic.stand_still(begins)
    }

    fn go_on(nic: &mut Nic) {
        nic.go_on();
    }

    // Its QPs have ended with the pause.
    fn resumed(_nic: &mut Nic, _qpn: u32) {}

    fn is_beginning(&self) -> bool {
        self.opening
    }

    fn succeed(&mut self, life: NicState) -> Self {
        self.successor(life)
    }

    fn has_work(nic: &mut Nic, _now: Nanos) -> bool {
        nic.has_own_work()
    }

    fn has_news(&self) -> bool {
        false
    }

    fn tell(_nic: &mut Nic) {}

    fn fail(nic: &mut Nic) {
        nic.fail_now();
    }

    fn dropped(nic: &mut Nic) {
        nic.close();
    }

    fn walk_keys(nic: &Nic) -> Keys {
        nic.walk_keys()
    }

    fn follow_keys(
        nic: &mut Nic,
        keys: &mut Keys,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        nic.follow_keys(keys, space, budget)
    }
}
