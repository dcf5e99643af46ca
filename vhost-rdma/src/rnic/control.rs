//! Control commands: what an RNIC does of them, and what is found aside.

use std::sync::mpsc::{self, Receiver, Sender};

use super::ending::Opened;
use super::mr::Made;
use super::nic::{Nic, Rnic};
use super::reach::Found;
use super::verbs::{HostError, HostPd, Result as HostResult};
use crate::memory::Ring;
use crate::nic::budget::Budget;
use crate::nic::dispatch::{Begun, Executor, Work};
use crate::nic::on_shard::Provided;
use crate::nic::verb::Verb;
use crate::nic::{BlockingJob, Status};

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

/// What a blocking job found.
pub(super) enum Finding {
    Opened(Opened),
    Registered(Made),
    Peer(Found),
}

/// Where the blocking jobs of one life of a NIC leave what they find. A job of an earlier life
/// finds that nobody listens, and what it made ends with it.
pub(super) struct Findings {
    sender: Sender<Finding>,
    receiver: Receiver<Finding>,
}

impl Default for Findings {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel();
        Self { sender, receiver }
    }
}

impl Executor for Nic {
    type Backing = Rnic;

    fn nic(&mut self) -> Result<&mut Self, Status> {
        Ok(self)
    }

    fn reset(&mut self) {
        Provided::reset(self);
    }

    fn open(&mut self, status_page: Ring) -> Result<Begun<Rnic>, Status> {
        Ok(self.open_host(status_page))
    }

    fn carry_out(&mut self, ctx: u32, verb: Verb) -> Result<Begun<Rnic>, Status> {
        let reply = match verb {
            Verb::GidSet { index, gid } => self.set_gid(index, gid)?,
            Verb::MrReg { pdn, access, iova, map } => {
                return self.register((ctx, pdn), access, (iova, map), None);
            }
            Verb::MrDma { pdn, access } => self.register_all(ctx, pdn, access)?,
            // libibverbs passes no fast registration on.
            Verb::MrAlloc { .. } => return Err(Status::NOTSUPP),
            Verb::MrRereg { key, change } => return self.reregister(ctx, key, change),
            Verb::MrDereg(key) => self.deregister(ctx, key)?,
            Verb::MwAlloc { pdn, kind } => self.allocate_window(ctx, pdn, kind)?,
            Verb::MwDealloc(key) => self.deallocate_window(ctx, key)?,
            Verb::CqResize(resize) => {
                // Whoever shrinks a CQ means the completions of what is done to count (IBTA
                // 11.2.8.3).
                self.poll_host();
                return self.begin_resize_cq(resize).map(Begun::Steps);
            }
            Verb::QpCreate(new) => self.create_qp(ctx, new)?,
            Verb::QpDestroy(qpn) => return self.destroy_qp(ctx, qpn),
            Verb::QpModify { qpn, attr } => return self.modify_qp(ctx, qpn, &attr),
            Verb::QpQuery(qpn) => self.query_qp(ctx, qpn)?,
            Verb::AhCreate { pdn, av } => return self.create_ah(ctx, pdn, &av),
            Verb::McastAttach { qpn, mgid } => self.attach(ctx, qpn, mgid)?,
            Verb::McastDetach { qpn, mgid } => self.detach(ctx, qpn, mgid)?,
        };
        Ok(Begun::Done(reply))
    }

    fn work_on(
        &mut self,
        work: super::follow::Work,
        budget: &mut Budget,
    ) -> Result<Option<Work<Rnic>>, Status> {
        self.carry_on(work, budget)
    }

    fn take_found(&mut self) -> Option<Result<Begun<Rnic>, Status>> {
        Some(match self.backing.findings.receiver.try_recv().ok()? {
            Finding::Opened(opened) => self.opened(opened),
            Finding::Registered(made) => self.registered(made),
            Finding::Peer(found) => self.found(found),
        })
    }

    fn settle(&mut self) {}
}

impl Nic {
    /// Has something done that may block, for this life of the NIC.
    pub(super) fn aside(&self, work: impl FnOnce() -> Finding + Send + 'static) -> Begun<Rnic> {
        let sender = self.backing.findings.sender.clone();
        // An error is what was found, which ends here, where it may take its time.
        Begun::Blocking(BlockingJob::new(move || drop(sender.send(work()))))
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
}
