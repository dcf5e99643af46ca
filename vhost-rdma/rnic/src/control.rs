//! Control commands: what an RNIC does of them, and what is found aside.

use std::sync::mpsc::{self, Receiver, Sender};

use easy_ext::ext;
use vhost_rdma_engine::link::Gid;
use vhost_rdma_engine::nic::budget::Budget;
use vhost_rdma_engine::nic::dispatch::{Begun, Work};
use vhost_rdma_engine::nic::standalone::Standalone;
use vhost_rdma_engine::nic::verb::Verb;
use vhost_rdma_engine::nic::{BlockingJob, Nanos, NicSettings, Status};
use vhost_rdma_memory::Ring;

use super::addresses::Addresses as _;
use super::cq::CqVerbs as _;
use super::create::Create as _;
use super::ending::Endings as _;
use super::ending::Opened;
use super::follow::Follow as _;
use super::gsi::GsiVerbs as _;
use super::mcast::Mcast as _;
use super::modify::Modify as _;
use super::mr::Made;
use super::mr::RegionVerbs as _;
use super::mw::WindowVerbs as _;
use super::nic::{Nic, Rnic, Upkeep as _};
use super::reach::Found;
use super::reach::Reach as _;
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

/// What a blocking job found.
pub(super) enum Finding {
    Opened(Opened),
    Registered(Made),
    Peer(Found),
    /// What was said to a NIC that wants an address.
    Address {
        index: u16,
        gid: Gid,
        granted: Option<bool>,
    },
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
        work: super::follow::Work,
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
            tracing::warn!(device = self.backing.place.device, %error, "an object of the RNIC cannot be destroyed");
        }
    }

    fn host_pd(&self, ctx: u32, pdn: u32) -> Result<HostPd, Status> {
        self.owned_pd(ctx, pdn).map(|pd| pd.own)
    }
}
