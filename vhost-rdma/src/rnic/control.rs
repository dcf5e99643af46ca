//! Control commands: dispatch, domains, and the end of single objects.

use std::any::Any;

use super::ending::Opened;
use super::follow::Work;
use super::mr::Made;
use super::nic::Nic;
use super::reach::Found;
use super::verbs::{HostError, HostPd, Result as HostResult};
use crate::nic::nic::NicState;
use crate::nic::on_shard::Provided;
use crate::nic::{Command, DeferredDrop, Reply, Status};

/// The status of a host's refusal.
pub(super) const fn status(error: HostError) -> Status {
    match error.0 {
        libc::EINVAL | libc::ERANGE => Status::INVAL,
        libc::EOPNOTSUPP | libc::ENOSYS => Status::NOTSUPP,
        libc::EPERM | libc::EACCES => Status::PERM,
        libc::EBUSY => Status::BUSY,
        libc::EFAULT => Status::FAULT,
        libc::EIO | libc::ENODEV => Status::FATAL,
        // No route, no neighbour, no such address.
        libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ETIMEDOUT | libc::EADDRNOTAVAIL => {
            Status::UNREACH
        }
        // ENOMEM, EAGAIN, ENOSPC, and what nobody foresaw: the host has no more of it.
        _ => Status::NOMEM,
    }
}

impl Nic {
    pub(super) fn command(&mut self, ctx: u32, command: Command) -> Result<Reply, Status> {
        // Whatever the NIC is now, what was made for it must end in order.
        let command = match command {
            Command::Finish(found) => return self.finish(found),
            command => command,
        };
        if !matches!(command, Command::Continue) {
            self.abandon_work();
        }
        match (self.life, &command) {
            (NicState::Idle | NicState::Ready | NicState::Paused, Command::Init { .. }) => {}
            (NicState::Idle, _) => return Err(Status::STATE),
            (NicState::Failed, Command::Shutdown) => {}
            (NicState::Failed, _) => return Err(Status::FATAL),
            _ => {}
        }
        match command {
            Command::Init { space, status_page } => self.init(space, status_page),
            Command::Shutdown => {
                Provided::reset(self);
                Ok(Reply::Done)
            }
            Command::Keepalive => Ok(Reply::Done),
            Command::QueryDevice => Ok(Reply::Device(Box::new(self.device_attributes()))),
            Command::QueryPort => Ok(Reply::Port(self.port_attributes())),
            Command::QueryCounters => Ok(Reply::Counters(Box::new(self.counters_response()))),
            Command::GidSet { index, gid } => self.set_gid(index, gid),
            Command::ContextCreate { db_page } => {
                let shape = (self.settings.limits.max_contexts, self.settings.kick_queues);
                self.contexts.create(db_page, shape, &mut self.kept)
            }
            Command::ContextDestroy => self.destroy_context(ctx),
            Command::Continue => self.carry_on(),
            Command::DbPageAdd { db_page } => self.contexts.add_page(ctx, db_page, &mut self.kept),
            other => self.object_command(ctx, other),
        }
    }

    /// The rest of a command whose blocking job is done.
    fn finish(&mut self, found: Box<dyn Any + Send>) -> Result<Reply, Status> {
        let found = match found.downcast::<Made>() {
            Ok(made) => return self.registered(*made),
            Err(found) => found,
        };
        let found = match found.downcast::<Found>() {
            Ok(found) => return self.found(*found),
            Err(found) => found,
        };
        let opened = found.downcast::<Opened>().map_err(|_| Status::INVAL)?;
        self.opened(*opened)
    }

    fn object_command(&mut self, ctx: u32, command: Command) -> Result<Reply, Status> {
        match command {
            Command::PdCreate => self.create_pd(ctx),
            Command::PdDestroy(pdn) => self.destroy_pd(ctx, pdn),
            Command::MrReg { pdn, access, iova, map } => {
                self.register((ctx, pdn), access, iova, map)
            }
            Command::MrDma { pdn, access } => self.register_all(ctx, pdn, access),
            Command::MrRereg { req, map } => self.reregister(ctx, &req, map),
            Command::MrDereg(key) => self.deregister(ctx, key),
            Command::MwAlloc { pdn, kind } => self.allocate_window(ctx, pdn, kind),
            Command::MwDealloc(key) => self.deallocate_window(ctx, key),
            Command::CqCreate { entries, vector, ring } => {
                self.create_cq(ctx, entries, vector, ring)
            }
            Command::CqDestroy(cqn) => self.destroy_cq(ctx, cqn),
            Command::CqResize { cqn, entries, requested, ring } => {
                self.owned_cq(ctx, cqn)?;
                // Whoever shrinks a CQ means the completions of what is done to count (IBTA
                // 11.2.8.3).
                self.poll_host();
                let cq = self.cqs.get_mut(cqn as usize).ok_or(Status::NOENT)?;
                let to = cq.succeed(entries, requested, ring)?;
                self.work_on(Work::ResizeCq(cqn, to))
            }
            Command::CqModerate { cqn, count, period_us } => {
                self.moderate(ctx, cqn, (count, period_us))
            }
            Command::SrqCreate { req, ring } => self.create_srq(ctx, &req, ring),
            Command::SrqDestroy(srqn) => self.destroy_srq(ctx, srqn),
            Command::SrqModify { req, ring } => self.modify_srq(ctx, &req, ring),
            Command::SrqQuery(srqn) => self.query_srq(ctx, srqn),
            Command::QpCreate { req, sq, rq } => self.create_qp(ctx, (req, sq, rq)),
            Command::QpDestroy(qpn) => self.destroy_qp(ctx, qpn),
            Command::QpModify { qpn, attr } => self.modify_qp(ctx, qpn, &attr),
            Command::QpQuery(qpn) => self.query_qp(ctx, qpn),
            Command::McastAttach { qpn, mgid } => self.attach(ctx, qpn, mgid),
            Command::McastDetach { qpn, mgid } => self.detach(ctx, qpn, mgid),
            Command::AhCreate { pdn, av } => self.create_ah(ctx, pdn, &av),
            Command::AhDestroy(number) => {
                self.owned_ah(ctx, number)?;
                self.remove_ah(number);
                Ok(Reply::Done)
            }
            _ => Err(Status::NOTSUPP),
        }
    }

    /// A refusal, and what it may say of the device as a whole.
    pub(super) fn refused(&mut self, error: HostError) -> Status {
        if matches!(error.0, libc::EIO | libc::ENODEV) {
            self.lost();
        }
        status(error)
    }

    /// Takes back a host object that could not be used. A device that refuses that as well is gone.
    pub(super) fn forgo(&mut self, undo: impl FnOnce(&mut Self) -> HostResult<()>) {
        if let Err(error) = undo(self) {
            tracing::warn!(device = self.backing.place.device, %error, "an object of the RNIC cannot be destroyed");
        }
    }

    pub(super) fn host_pd(&self, ctx: u32, pdn: u32) -> Result<HostPd, Status> {
        self.owned_pd(ctx, pdn).map(|pd| pd.own)
    }

    pub(super) fn remove_ah(&mut self, number: u32) {
        if let Some(ah) = self.ahs.try_remove(number as usize) {
            self.leave_pd(ah.pdn);
            self.forgo(|nic| nic.backing.host.destroy_ah(ah.own.host));
        }
    }

    fn destroy_srq(&mut self, ctx: u32, srqn: u32) -> Result<Reply, Status> {
        if self.owned_srq(ctx, srqn)?.users > 0 {
            return Err(Status::BUSY);
        }
        self.remove_srq(srqn);
        Ok(Reply::Done)
    }

    pub(super) fn remove_srq(&mut self, srqn: u32) {
        if let Some(srq) = self.unlink_srq(srqn) {
            self.backing.serials.remove(&srq.own.serial);
            self.backing.admitted -= srq.own.cost;
            self.forgo(|nic| nic.backing.host.destroy_srq(srq.own.host));
            self.deferred_drops.push(DeferredDrop::new(srq));
        }
    }
}
