//! What the host refuses, what of it may block, and a host whose device is gone.

use std::mem;
use std::thread;

use easy_ext::ext;
use vhost_rdma_engine::nic::contexts::KERNEL;
use vhost_rdma_engine::nic::roster::Walk;
use vhost_rdma_engine::nic::work::Begun;
use vhost_rdma_engine::nic::{BlockingJob, NicState, Status};
use virtio_rdma_abi::event;

use super::findings::Finding;
use super::gone::Gone;
use super::nic::{Nic, Rnic};
use super::verbs::{HostError, HostPd, Result as HostResult};

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

/// Ends what may block, while the worker goes on.
fn end_aside(parts: impl Send + 'static) {
    let ended = thread::Builder::new().name("vrdma-end".to_owned()).spawn(move || drop(parts));
    if let Err(error) = ended {
        tracing::debug!(%error, "no thread; it ended here");
    }
}

#[ext(Control)]
pub(super) impl Nic {
    /// Has something done that may block, for this life of the NIC.
    fn aside(&self, work: impl FnOnce() -> Finding + Send + 'static) -> Begun<Rnic> {
        let sender = self.backing.findings.sender.clone();
        // An error is what was found, which ends here, where it may take its time.
        Begun::Blocking(BlockingJob::new(move || drop(sender.send(work()))))
    }

    /// A refusal, and what it may say of the device as a whole.
    fn refused(&mut self, error: HostError) -> Status {
        if matches!(error.0, libc::EIO | libc::ENODEV) {
            self.lost();
        }
        let status = status(error);
        // A guest causes as many as it likes.
        tracing::debug!(device = self.backing.place.device, %error, ?status, "the RNIC refuses");
        status
    }

    /// Takes back a host object that could not be used. A device that refuses that as well is gone.
    fn forgo(&mut self, undo: impl FnOnce(&mut Self) -> HostResult<()>) {
        if let Err(error) = undo(self) {
            tracing::warn!(
                device = self.backing.place.device,
                %error,
                "an object of the RNIC cannot be destroyed"
            );
        }
    }

    fn host_pd(&self, ctx: u32, pdn: u32) -> Result<HostPd, Status> {
        self.owned_pd(ctx, pdn).map(|pd| pd.own)
    }

    fn tell_fatal(&mut self) {
        self.raise(event::DEVICE_FATAL, 0, KERNEL);
        self.outbox.deliver(&mut self.cqs, &mut self.counters);
    }

    /// The device context is of no use any more: the guest is told, and an INIT opens the device
    /// anew.
    fn lost(&mut self) {
        if mem::replace(&mut self.backing.host_gone, true) {
            return;
        }
        tracing::warn!(device = self.backing.place.device, "the RNIC is gone or failed");
        // Its QPs end with it.
        self.backing.stopping.waiting.clear();
        self.backing.stopping.all = Walk::default();
        let alive = matches!(self.life, NicState::Ready | NicState::Paused);
        if alive {
            self.life = NicState::Failed;
        }
        if mem::take(&mut self.backing.stopping.fatal) || alive {
            self.tell_fatal();
        }
        // A removal may wait until the last one closes the device.
        let gone = Box::new(Gone::after(self.backing.host.as_ref()));
        let context = mem::replace(&mut self.backing.host, gone);
        end_aside((context, mem::take(&mut self.deferred_drops)));
    }
}
