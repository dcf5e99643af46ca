//! Control commands: what software does of them.

use virtio_rdma_abi::{self as abi, mw_type};
use zerocopy::little_endian::U32;

use super::engine::Execution;
use super::mr::Registration;
use super::network::link_local;
use super::nic::{KERNEL, NicState, Soft, SoftNic};
use super::nics::Nics;
use super::window::WindowKind;
use super::work::SoftWork;
use super::{DeferredDrop, Nanos};
use crate::link::{Gid, NicId, is_multicast};
use crate::memory::Ring;
use crate::nic::budget::{Budget, cost};
use crate::nic::dispatch::{self, Executor};
use crate::nic::limits::WINDOWS_PER_MR;
use crate::nic::quota::Kind;
use crate::nic::verb::{Rereg, Verb};
use crate::nic::work::{Begun, Work};
use crate::nic::{Command, Reply, Status, Step};

/// A software NIC among its peers.
struct Among<'a, 'b, N> {
    all: &'a mut Execution<'b, N>,
    id: NicId,
}

impl<N: Nics> Executor for Among<'_, '_, N> {
    type Backing = Soft;

    fn nic(&mut self) -> Result<&mut SoftNic, Status> {
        self.all.nic_mut(self.id).ok_or(Status::FATAL)
    }

    fn reset(&mut self) {
        self.all.reset(self.id);
    }

    fn open(&mut self, status_page: Ring) -> Result<Begun<Soft>, Status> {
        Ok(Begun::Done(self.nic()?.begin(status_page)))
    }

    fn carry_out(&mut self, ctx: u32, verb: Verb) -> Result<Begun<Soft>, Status> {
        let Self { all, id } = self;
        let id = *id;
        let reply = match verb {
            Verb::GidSet { index, gid } => all.set_gid(id, index, gid)?,
            Verb::MrReg { pdn, access, iova, map } => {
                // Nobody would do what its owner has to.
                if access & abi::access::MIRRORED != 0 && !self.nic()?.backing.mirror.serves(ctx) {
                    return Err(Status::INVAL);
                }
                self.all.register(id, Registration { ctx, pdn, access, iova, map })?
            }
            Verb::MrDma { access, .. } if access & abi::access::MIRRORED != 0 => {
                return Err(Status::INVAL);
            }
            Verb::MrDma { pdn, access } => {
                let nic = self.nic()?;
                let map = nic.backing.mrs.all.of(&nic.space);
                self.all.register(id, Registration { ctx, pdn, access, iova: 0, map })?
            }
            Verb::MrAlloc { pdn, max_pages } => all.allocate_fast(id, ctx, pdn, max_pages)?,
            Verb::MrRereg { key, change } => self.nic()?.reregister(ctx, key, change)?,
            Verb::MrDereg(key) => self.nic()?.deregister(ctx, key)?,
            Verb::MwAlloc { pdn, kind } => all.allocate_window(id, ctx, pdn, kind)?,
            Verb::MwDealloc(key) => self.nic()?.deallocate_window(ctx, key)?,
            Verb::CqResize(resize) => return all.begin_resize_cq(id, resize),
            Verb::QpCreate(new) => all.create_qp(id, ctx, new)?,
            Verb::QpDestroy(qpn) => {
                let nic = self.nic()?;
                nic.owned_qp(ctx, qpn)?;
                nic.remove_qp(qpn);
                Reply::Done
            }
            Verb::QpModify { qpn, attr } => return all.begin_modify_qp(id, (ctx, qpn), attr),
            Verb::QpQuery(qpn) => {
                let qp = self.nic()?.owned_qp(ctx, qpn)?;
                let attr = qp.attrs.report(qp.state, qp.own.draining);
                Reply::QpAttr(Box::new(abi::QpQueryResp { attr }))
            }
            Verb::AhCreate { pdn, av } => self.nic()?.insert_ah((ctx, pdn), av, ())?,
            Verb::McastAttach { qpn, mgid } => all.attach_mcast(id, ctx, (qpn, mgid))?,
            Verb::McastDetach { qpn, mgid } => all.detach_mcast(id, ctx, (qpn, mgid))?,
        };
        Ok(Begun::Done(reply))
    }

    fn work_on(
        &mut self,
        work: SoftWork,
        budget: &mut Budget,
    ) -> Result<Option<Work<Soft>>, Status> {
        match work {
            SoftWork::Settle(settle) => self.all.settle_cq(self.id, settle, budget),
            SoftWork::Recover(recover) => self.all.recover_qp(self.id, recover, budget),
        }
    }

    /// Nothing blocks in software.
    fn take_found(&mut self) -> Option<Result<Begun<Soft>, Status>> {
        None
    }

    fn settle(&mut self) {
        self.all.give_back(self.id);
    }
}

impl<N: Nics> Execution<'_, N> {
    /// Executes one command of context `ctx`, or a step of it.
    ///
    /// # Errors
    /// The status to answer.
    pub(crate) fn execute(
        &mut self,
        id: NicId,
        ctx: u32,
        command: Command,
        now: Nanos,
    ) -> Result<Step, Status> {
        dispatch::execute(&mut Among { all: self, id }, ctx, command, now)
    }

    /// Gives back what a NIC's objects that are gone had of the shard and the network: QPNs, and
    /// groups that they left empty. Else a guest could make the network remember groups without
    /// bound.
    pub(super) fn give_back(&mut self, id: NicId) {
        let Self { nics, engine, .. } = self;
        let Some(nic) = nics.nic(id) else { return };
        nic.backing.freed.drain(..).for_each(|qpn| engine.qpns.free(qpn));
        let vni = nic.settings.vni;
        nic.backing.left.drain(..).for_each(|mgid| engine.networks.leave(vni, mgid, id));
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

    /// The host sets an entry of the table of a NIC that is ready.
    pub(crate) fn host_sets_gid(
        &mut self,
        id: NicId,
        index: u16,
        gid: Option<Gid>,
    ) -> Result<(), Status> {
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        nic.meter.charge(cost::COMMAND);
        match nic.life {
            NicState::Ready | NicState::Paused => self.set_gid(id, index, gid).map(drop),
            NicState::Idle => Err(Status::STATE),
            NicState::Failed => Err(Status::FATAL),
        }
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
}

impl SoftNic {
    /// Whether the operator lets this NIC use an address. The link-local address of its own MAC is
    /// always its own.
    pub(super) fn may_use(&self, gid: &Gid) -> bool {
        self.settings.gids.is_empty()
            || self.settings.gids.contains(gid)
            || *gid == link_local(self.settings.mac)
    }

    fn reregister(&mut self, ctx: u32, key: u32, change: Rereg) -> Result<Reply, Status> {
        let mr = self.backing.mrs.get(key).filter(|mr| mr.ctx == ctx).ok_or(Status::NOENT)?;
        if let Some(pdn) = change.pdn {
            self.owned_pd(mr.ctx, pdn)?;
        }
        // What it has now it has no more then.
        let others = self.backing.mrs.bytes().saturating_sub(mr.charged());
        if let Some((_, map)) = &change.memory
            && others.saturating_add(map.len()) > self.settings.limits.mr_bytes(&self.space)
        {
            return Err(Status::NOMEM);
        }
        let old = self.backing.mrs.reregister(key, change)?;
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

    fn deallocate_window(&mut self, ctx: u32, key: u32) -> Result<Reply, Status> {
        let key = self.backing.mrs.present_key(key).ok_or(Status::NOENT)?;
        self.backing.mrs.window(key).filter(|window| window.ctx == ctx).ok_or(Status::NOENT)?;
        self.remove_key(key);
        Ok(Reply::Done)
    }
}
