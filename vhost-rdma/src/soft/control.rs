//! Control commands: dispatch, and everything but the creation of rings' owners (`create`).

use virtio_rdma_abi::{self as abi, mw_type, rereg, srq_mask};
use zerocopy::little_endian::U32;

use super::engine::{Execution, Nics};
use super::mr::{Registration, Rereg};
use super::network::link_local;
use super::nic::{Ah, KERNEL, Nic, NicState};
use super::quota;
use super::window::WindowKind;
use super::{DeferredDrop, Nanos, attributes};
use crate::link::{Gid, NicId, is_multicast};
use crate::memory::{AddressSpace, Ring, Translation};
use crate::nic::budget::cost;
use crate::nic::limits::{MAX_WR, WINDOWS_PER_MR};
use crate::nic::objects::object;
use crate::nic::qp::attrs::check_av;
use crate::nic::quota::{Kept, Kind};
use crate::nic::{Command, Reply, Status};

impl<N: Nics> Execution<'_, N> {
    /// Executes one command of context `ctx`. It has taken effect, or had none, when this returns.
    ///
    /// # Errors
    /// The status to answer.
    pub(crate) fn execute(
        &mut self,
        id: NicId,
        ctx: u32,
        command: Command,
        now: Nanos,
    ) -> Result<Reply, Status> {
        self.meter.charge(cost::COMMAND);
        if let Some(nic) = self.nic_mut(id) {
            nic.now = now;
        }
        let reply = self.dispatch(id, ctx, command, now);
        if let Some(nic) = self.nic_mut(id) {
            nic.counters.commands += 1;
        }
        reply
    }

    fn dispatch(
        &mut self,
        id: NicId,
        ctx: u32,
        command: Command,
        now: Nanos,
    ) -> Result<Reply, Status> {
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        let life = nic.life;
        if !matches!(command, Command::Continue) {
            nic.work = None;
        }
        match (life, &command) {
            (NicState::Idle | NicState::Ready | NicState::Paused, Command::Init { .. }) => {}
            (NicState::Idle, _) => return Err(Status::STATE),
            // The objects of a NIC that failed go away as well.
            (NicState::Failed, Command::Shutdown) => {}
            (NicState::Failed, _) => return Err(Status::FATAL),
            _ => {}
        }
        match command {
            Command::Init { space, status_page } => return self.init(id, space, status_page),
            Command::Shutdown => {
                self.reset(id);
                return Ok(Reply::Done);
            }
            Command::Continue => return self.go_on(id, now),
            Command::ContextDestroy => return self.destroy_context(id, ctx, now),
            Command::GidSet { index, gid } => return self.set_gid(id, index, gid),
            Command::QpCreate { req, sq, rq } => return self.create_qp(id, ctx, (&req, sq, rq)),
            Command::QpDestroy(qpn) => return self.destroy_qp(id, ctx, qpn),
            Command::QpModify { qpn, attr } => return self.modify_qp(id, ctx, qpn, &attr),
            Command::MrReg { pdn, access, iova, map } => {
                let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
                // Nobody would do what its owner has to.
                if access & abi::access::MIRRORED != 0 && !nic.backing.mirror.serves(ctx) {
                    return Err(Status::INVAL);
                }
                let registration = Registration { ctx, pdn, access, iova, map };
                return self.register(id, registration);
            }
            Command::MrDma { pdn, access } => {
                let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
                if ctx != KERNEL {
                    return Err(Status::PERM);
                }
                let map = nic.backing.mrs.all.of(&nic.space);
                return self.register(id, Registration { ctx, pdn, access, iova: 0, map });
            }
            Command::McastAttach { qpn, mgid } => return self.attach_mcast(id, ctx, (qpn, mgid)),
            Command::McastDetach { qpn, mgid } => return self.detach_mcast(id, ctx, (qpn, mgid)),
            Command::MwAlloc { pdn, kind } => return self.allocate_window(id, ctx, pdn, kind),
            Command::MrAlloc { pdn, max_pages } => {
                return self.allocate_fast(id, ctx, pdn, max_pages);
            }
            Command::CqDestroy(cqn) => {
                return self.nic_mut(id).ok_or(Status::FATAL)?.destroy_cq(ctx, cqn);
            }
            Command::CqResize { cqn, entries, requested, ring } => {
                self.nic_mut(id).ok_or(Status::FATAL)?.owned_cq(ctx, cqn)?;
                return self.begin_resize_cq(id, cqn, ((entries, requested), ring), now);
            }
            _ => {}
        }
        match self.nic_mut(id).ok_or(Status::FATAL)?.execute(ctx, command) {
            // It has just begun.
            Ok(Reply::More) => self.go_on(id, now),
            reply => reply,
        }
    }

    fn init(&mut self, id: NicId, space: AddressSpace, status_page: Ring) -> Result<Reply, Status> {
        self.reset(id);
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        nic.kept = Kept::begin(&space, &quota::ENGINE);
        nic.space = space;
        Ok(nic.begin(status_page))
    }

    fn register(&mut self, id: NicId, request: Registration) -> Result<Reply, Status> {
        let (nic, _, random) = self.parts(id).ok_or(Status::FATAL)?;
        nic.owned_pd(request.ctx, request.pdn)?;
        let limits = &nic.settings.limits;
        let bytes = if request.map.is_identity() { 0 } else { request.map.len() };
        if nic.backing.mrs.len() >= limits.max_mrs as usize
            || nic.backing.mrs.bytes().saturating_add(bytes) > limits.mr_bytes(&nic.space)
        {
            return Err(Status::NOMEM);
        }
        nic.kept.place(Kind::Region, nic.backing.mrs.by_number.len())?;
        let key = nic.backing.mrs.register(request, random)?;
        Ok(Reply::Mr(abi::MrResp { lkey: U32::new(key), rkey: U32::new(key) }))
    }

    fn allocate_window(
        &mut self,
        id: NicId,
        ctx: u32,
        pdn: u32,
        kind: u32,
    ) -> Result<Reply, Status> {
        let (nic, _, random) = self.parts(id).ok_or(Status::FATAL)?;
        nic.owned_pd(ctx, pdn)?;
        let kind = match kind {
            mw_type::TYPE1 => WindowKind::One,
            mw_type::TYPE2 => WindowKind::Two,
            _ => return Err(Status::INVAL),
        };
        let most = nic.settings.limits.max_mrs.saturating_mul(WINDOWS_PER_MR);
        if nic.backing.mrs.windows() >= most as usize {
            return Err(Status::NOMEM);
        }
        nic.kept.place(Kind::Region, nic.backing.mrs.by_number.len())?;
        nic.backing.mrs.allocate_window((ctx, pdn), kind, random).map(Reply::Object)
    }

    fn allocate_fast(
        &mut self,
        id: NicId,
        ctx: u32,
        pdn: u32,
        max_pages: u32,
    ) -> Result<Reply, Status> {
        let (nic, _, random) = self.parts(id).ok_or(Status::FATAL)?;
        nic.owned_pd(ctx, pdn)?;
        // REG_MR carries guest physical addresses, which only the kernel may name.
        if ctx != KERNEL {
            return Err(Status::PERM);
        }
        if nic.backing.mrs.len() >= nic.settings.limits.max_mrs as usize {
            return Err(Status::NOMEM);
        }
        nic.kept.place(Kind::Region, nic.backing.mrs.by_number.len())?;
        nic.backing.mrs.allocate_fast((ctx, pdn), max_pages, random).map(Reply::Object)
    }

    fn set_gid(&mut self, id: NicId, index: u16, gid: Option<Gid>) -> Result<Reply, Status> {
        let (nic, networks, _) = self.parts(id).ok_or(Status::FATAL)?;
        let vni = nic.settings.vni;
        let slot = usize::from(index);
        let old = *nic.gids.get(slot).ok_or(Status::INVAL)?;
        if let Some(gid) = gid {
            // A group is nobody's address.
            if gid == [0; 16] || is_multicast(&gid) {
                return Err(Status::INVAL);
            }
            if !nic.may_use(&gid) {
                return Err(Status::PERM);
            }
            if !networks.claim(vni, gid, id) {
                return Err(Status::EXIST);
            }
        }
        nic.gids[slot] = gid;
        if let Some(old) = old.filter(|old| !nic.gids.contains(&Some(*old))) {
            networks.release(vni, old, id);
        }
        Ok(Reply::Done)
    }

    fn destroy_context(&mut self, id: NicId, ctx: u32, now: Nanos) -> Result<Reply, Status> {
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        if ctx == KERNEL {
            return Err(Status::INVAL);
        }
        if !nic.contexts.contains(ctx) {
            return Err(Status::NOENT);
        }
        self.begin_end(id, ctx, now)
    }
}

impl Nic {
    fn execute(&mut self, ctx: u32, command: Command) -> Result<Reply, Status> {
        match command {
            Command::Keepalive => Ok(Reply::Done),
            Command::QueryDevice => Ok(Reply::Device(Box::new(self.device_attributes()))),
            Command::QueryPort => Ok(Reply::Port(attributes::port())),
            Command::QueryCounters => Ok(Reply::Counters(Box::new(self.counters_response()))),
            Command::ContextCreate { db_page } => {
                let shape = (self.settings.limits.max_contexts, self.settings.kick_queues);
                self.contexts.create(db_page, shape, &mut self.kept)
            }
            Command::DbPageAdd { db_page } => self.contexts.add_page(ctx, db_page, &mut self.kept),
            Command::PdCreate => self.create_pd(ctx),
            Command::PdDestroy(pdn) => self.destroy_pd(ctx, pdn),
            Command::MrRereg { req, map } => self.reregister(ctx, &req, map),
            Command::MrDereg(key) => self.deregister(ctx, key),
            Command::MwDealloc(key) => {
                let key = self.backing.mrs.present_key(key).ok_or(Status::NOENT)?;
                self.backing
                    .mrs
                    .window(key)
                    .filter(|window| window.ctx == ctx)
                    .ok_or(Status::NOENT)?;
                self.remove_key(key);
                Ok(Reply::Done)
            }
            Command::CqCreate { entries, vector, ring } => {
                self.create_cq(ctx, entries, vector, ring)
            }
            Command::CqModerate { cqn, count, period_us } => {
                self.moderate(ctx, cqn, (count, period_us))
            }
            Command::SrqCreate { req, ring } => self.create_srq(ctx, &req, ring),
            Command::SrqDestroy(srqn) => self.destroy_srq(ctx, srqn),
            Command::SrqModify { req, ring } => self.modify_srq(ctx, &req, ring),
            Command::SrqQuery(srqn) => self.query_srq(ctx, srqn),
            Command::QpQuery(qpn) => {
                let qp = self.owned_qp(ctx, qpn)?;
                let attr = qp.attrs.report(qp.state, qp.own.draining);
                Ok(Reply::QpAttr(Box::new(abi::QpQueryResp { attr })))
            }
            Command::AhCreate { pdn, av } => self.create_ah(ctx, pdn, av),
            Command::AhDestroy(number) => {
                self.owned_ah(ctx, number)?;
                let ah = self.ahs.remove(number as usize);
                self.leave_pd(ah.pdn);
                Ok(Reply::Done)
            }
            _ => Err(Status::NOTSUPP),
        }
    }

    /// Whether the operator lets this NIC use an address. The link-local address of its own MAC is
    /// always its own.
    pub(super) fn may_use(&self, gid: &Gid) -> bool {
        self.settings.gids.is_empty()
            || self.settings.gids.contains(gid)
            || *gid == link_local(self.settings.mac)
    }

    fn reregister(
        &mut self,
        ctx: u32,
        req: &abi::MrReregReq,
        map: Option<std::sync::Arc<Translation>>,
    ) -> Result<Reply, Status> {
        let key = req.lkey.get();
        let flags = req.flags.get();
        let mr = self.backing.mrs.get(key).filter(|mr| mr.ctx == ctx).ok_or(Status::NOENT)?;
        if flags == 0 || flags & !(rereg::TRANSLATION | rereg::PD | rereg::ACCESS) != 0 {
            return Err(Status::INVAL);
        }
        let pdn = (flags & rereg::PD != 0).then(|| req.pdn.get());
        if let Some(pdn) = pdn {
            self.owned_pd(mr.ctx, pdn)?;
        }
        let memory = match (flags & rereg::TRANSLATION != 0, map) {
            (true, Some(map)) => Some((req.iova.get(), map)),
            (true, None) => return Err(Status::INVAL),
            (false, _) => None,
        };
        if let Some((_, map)) = &memory
            && self.backing.mrs.bytes().saturating_add(map.len())
                > self.settings.limits.mr_bytes(&self.space)
        {
            return Err(Status::NOMEM);
        }
        let access = (flags & rereg::ACCESS != 0).then(|| req.access.get());
        let old = self.backing.mrs.reregister(key, Rereg { access, pdn, memory })?;
        self.deferred_drops.extend(old.map(DeferredDrop::new));
        Ok(Reply::Mr(abi::MrResp { lkey: U32::new(key), rkey: U32::new(key) }))
    }

    fn deregister(&mut self, ctx: u32, key: u32) -> Result<Reply, Status> {
        let key = self.backing.mrs.present_key(key).ok_or(Status::NOENT)?;
        let mr = self.backing.mrs.get(key).filter(|mr| mr.ctx == ctx).ok_or(Status::NOENT)?;
        if mr.windows > 0 {
            return Err(Status::BUSY);
        }
        self.remove_key(key);
        Ok(Reply::Done)
    }

    /// Removes a region or window. Its translation may be the last to hold a mapping, whose end
    /// takes its time.
    pub(super) fn remove_key(&mut self, key: u32) {
        self.meter.charge(cost::OBJECT);
        self.deferred_drops.extend(self.backing.mrs.remove(key).map(DeferredDrop::new));
    }

    fn destroy_srq(&mut self, ctx: u32, srqn: u32) -> Result<Reply, Status> {
        if self.owned_srq(ctx, srqn)?.users > 0 {
            return Err(Status::BUSY);
        }
        self.remove_srq(srqn);
        Ok(Reply::Done)
    }

    pub(super) fn remove_srq(&mut self, srqn: u32) {
        let srq = self.unlink_srq(srqn);
        self.deferred_drops.extend(srq.map(DeferredDrop::new));
    }

    fn modify_srq(
        &mut self,
        ctx: u32,
        req: &abi::SrqModifyReq,
        ring: Option<Ring>,
    ) -> Result<Reply, Status> {
        let srqn = req.srqn.get();
        let mask = req.mask.get();
        let present = self.owned_srq(ctx, srqn)?.max_wr;
        let resize = mask & srq_mask::MAX_WR != 0;
        let max_wr = if resize { req.max_wr.get() } else { present };
        let known = mask != 0 && mask & !(srq_mask::MAX_WR | srq_mask::LIMIT) == 0;
        if !known || (mask & srq_mask::LIMIT != 0 && req.limit.get() > max_wr) {
            return Err(Status::INVAL);
        }
        let entries = req.entries.get();
        let shape_ok =
            entries.is_power_of_two() && entries <= MAX_WR && (1..=entries).contains(&max_wr);
        let srq = self.srqs.get_mut(srqn as usize).ok_or(Status::NOENT)?;
        if resize {
            let ring = ring.filter(|_| shape_ok).ok_or(Status::INVAL)?;
            let to = srq.ring.succeed(entries, max_wr, ring)?;
            return self.begin_resize_srq(*req, to);
        }
        if mask & srq_mask::LIMIT != 0 {
            srq.limit = req.limit.get();
        }
        Ok(Reply::Done)
    }

    fn create_ah(&mut self, ctx: u32, pdn: u32, av: abi::Av) -> Result<Reply, Status> {
        self.owned_pd(ctx, pdn)?;
        if self.ahs.len() >= self.settings.limits.max_ahs as usize {
            return Err(Status::NOMEM);
        }
        check_av(&av, |index| self.gid(index).is_some())?;
        self.kept.place(Kind::Ah, self.ahs.len())?;
        self.join_pd(pdn);
        object(self.ahs.insert(Ah { ctx, pdn, av, own: () }))
    }
}
