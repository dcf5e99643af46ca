//! Control commands: what an RNIC does of them, and what is found aside.

use easy_ext::ext;
use vhost_rdma_engine::nic::budget::Budget;
use vhost_rdma_engine::nic::standalone::Standalone;
use vhost_rdma_engine::nic::verb::Verb;
use vhost_rdma_engine::nic::work::{Begun, Work};
use vhost_rdma_engine::nic::{DeferredDrop, Nanos, NicSettings, NicState, Status};
use vhost_rdma_memory::Ring;

use super::addresses::Addresses as _;
use super::cq::CqVerbs as _;
use super::create::Create as _;
use super::ending::Endings as _;
use super::findings::{Finding, Found, Purpose};
use super::follow::Follow as _;
use super::gsi::GsiVerbs as _;
use super::mcast::Mcast as _;
use super::modify::Modify as _;
use super::mr::RegionVerbs as _;
use super::mw::WindowVerbs as _;
use super::nic::{Nic, Rnic};
use super::peer_check::PeerChecks as _;
use super::reach::Reach as _;
use super::refusal::Control as _;
use super::round::Upkeep as _;

impl Standalone for Rnic {
    fn update(nic: &mut Nic, settings: NicSettings) {
        nic.change(settings);
    }

    fn reset(nic: &mut Nic) {
        nic.forget_all();
    }

    fn peers_changed(nic: &mut Nic) {
        nic.check_peers();
    }

    fn run(nic: &mut Nic, now: Nanos) -> bool {
        nic.run_round(now)
    }

    fn open(nic: &mut Nic, status_page: Ring) -> Result<Begun<Self>, Status> {
        Ok(nic.open_host(status_page))
    }

    fn carry_out(nic: &mut Nic, ctx: u32, verb: Verb) -> Result<Begun<Self>, Status> {
        let reply = match verb {
            Verb::GidSet { index, gid } => return nic.begin_gid(index, gid),
            Verb::MrReg { pdn, access, iova, map } => {
                return nic.register((ctx, pdn), access, (iova, map), None);
            }
            Verb::MrDma { pdn, access } => nic.register_all(ctx, pdn, access)?,
            // libibverbs passes no fast registration on.
            Verb::MrAlloc { .. } => return Err(Status::NOTSUPP),
            Verb::MrRereg { key, change } => return nic.reregister(ctx, key, change),
            Verb::MrDereg(key) => nic.deregister(ctx, key)?,
            Verb::MwAlloc { pdn, kind } => nic.allocate_window(ctx, pdn, kind)?,
            Verb::MwDealloc(key) => nic.deallocate_window(ctx, key)?,
            Verb::CqResize(resize) => {
                // Whoever shrinks a CQ means the completions of what is done to count (IBTA
                // 11.2.8.3).
                nic.poll_host();
                return nic.begin_resize_cq(resize).map(Begun::Steps);
            }
            Verb::QpCreate(new) => nic.create_qp(ctx, new)?,
            Verb::QpDestroy(qpn) => return nic.destroy_qp(ctx, qpn),
            Verb::QpModify { qpn, attr } => return nic.modify_qp(ctx, qpn, &attr),
            Verb::QpQuery(qpn) => nic.query_qp(ctx, qpn)?,
            Verb::AhCreate { pdn, av } => return nic.create_ah(ctx, pdn, &av),
            Verb::McastAttach { qpn, mgid } => nic.attach(ctx, qpn, mgid)?,
            Verb::McastDetach { qpn, mgid } => nic.detach(ctx, qpn, mgid)?,
        };
        Ok(Begun::Done(reply))
    }

    fn work_on(
        nic: &mut Nic,
        work: super::work::Work,
        budget: &mut Budget,
    ) -> Result<Option<Work<Self>>, Status> {
        nic.carry_on(work, budget)
    }

    fn take_found(nic: &mut Nic) -> Option<Result<Begun<Self>, Status>> {
        Some(match nic.backing.findings.receiver.try_recv().ok()? {
            Finding::Opened(opened) => nic.opened(opened),
            Finding::Registered(made) => nic.registered(made),
            Finding::Peer(found) => nic.found(found),
            Finding::Address { index, gid, granted } => nic.claimed((index, gid), granted),
        })
    }
}

#[ext(FoundPeer)]
impl Nic {
    /// The rest of the command, once the peer was looked for.
    fn found(&mut self, found: Found) -> Result<Begun<Rnic>, Status> {
        let Found { ctx, purpose, may, outcome } = found;
        let ah = match outcome {
            Ok(ah) => ah,
            Err(error) => {
                tracing::debug!(device = self.backing.place.device, %error, "a peer is not found");
                return Err(self.refused(error));
            }
        };
        let state = match self.life {
            NicState::Ready | NicState::Paused if may => Ok(()),
            NicState::Ready | NicState::Paused => Err(Status::UNREACH),
            NicState::Failed => Err(Status::FATAL),
            NicState::Idle => Err(Status::STATE),
        };
        match (state, purpose) {
            (Ok(()), Purpose::Handle(pdn, av)) => self.take_in(ctx, pdn, av, ah).map(Begun::Done),
            (Ok(()), Purpose::Connection { qpn, attr, .. }) => {
                self.deferred_drops.push(DeferredDrop::new(ah));
                self.change_qp(ctx, qpn, &attr)
            }
            (Err(status), _) => {
                self.deferred_drops.push(DeferredDrop::new(ah));
                Err(status)
            }
        }
    }
}
