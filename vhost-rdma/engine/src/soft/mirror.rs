//! Mirrored regions: memory that its owner keeps to itself (docs/virtio-rdma-process.md §4).
//!
//! A process may register memory that it cannot share. Its region then has a shadow, which is
//! shared and twice as long: what a peer writes arrives in the first half, what a peer reads leaves
//! from the second. Between the shadow and the memory copies the owner, and nobody else: no thread
//! of ours ever touches memory that a process can make hang. So a request of a peer becomes a
//! [`Job`] of the owner. The requester waits for the answer, as long as it would for an answer of
//! the wire, and then gives its request again: every check is made once more, and what the owner
//! has done is not done again.
//!
//! An owner that does not answer keeps its peers waiting, who have a time limit, and nobody else.
//! At most so many of a context are under way ([`super::jobs::JOBS`]); a request beyond finds
//! nobody who answers.

use virtio_rdma_abi::access;

use super::Nanos;
use super::engine::Execution;
use super::mr::{Keyed, MrTable};
use super::nic::SoftNic;
use super::nics::Nics;
use super::waiter::{Requester, Waiter};
use crate::link::{Awaited, Nak, NicId, Operation, Outcome, Owner, Request, Service};
use crate::memory::Borrowed;
use crate::nic::qp::Wait;
use crate::nic::{Job, JobKind};

/// The shortest time that a requester waits for another's owner: a process that others keep from
/// running for a moment is not gone.
pub(super) const PATIENCE: Nanos = 500_000_000;

/// What a peer's access to a mirrored region names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mirrored {
    ctx: u32,
    key: u32,
    iova: u64,
    half: u64,
}

impl MrTable {
    /// The mirrored region behind a key that a peer names.
    #[inline]
    pub(super) fn mirrored(&self, key: u32) -> Option<Mirrored> {
        if self.mirrors == 0 {
            return None;
        }
        let mr = match self.by_number.get(&(key >> 8))? {
            Keyed::Region(mr) => mr,
            Keyed::Window(window) => self.get(window.region()?)?,
        };
        let half = mr.len / 2;
        let is_mirrored = mr.access & access::MIRRORED != 0;
        is_mirrored.then_some(Mirrored { ctx: mr.ctx, key: mr.key, iova: mr.iova, half })
    }
}

impl Mirrored {
    /// Whether an access that the region admits lies in the half that peers know of.
    pub(super) const fn admits(&self, memory: &Borrowed<'_>) -> bool {
        memory.offset + memory.len as u64 <= self.half
    }
}

/// A job, and the context that is to do it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    ctx: u32,
    job: Job,
}

impl SoftNic {
    /// What an owner has to do for a piece of a request to `memory`, if it has.
    #[inline]
    pub(super) fn task(
        &self,
        kind: JobKind,
        request: &Request<'_>,
        memory: &Borrowed<'_>,
    ) -> Option<Task> {
        let region = self.backing.mrs.mirrored(request.rkey)?;
        let offset = memory.offset.wrapping_add(u64::from(request.offset));
        let job = Job {
            number: 0,
            kind,
            key: region.key,
            address: region.iova.wrapping_add(offset),
            length: request.len,
            operands: request.operands,
        };
        Some(Task { ctx: region.ctx, job })
    }

    /// Whether an owner has a job still to do that it was asked for memory of this key.
    pub(super) fn is_asked(&self, key: u32, job: u64) -> bool {
        let region = self.backing.mrs.mirrored(key);
        region.is_some_and(|region| self.backing.mirror.waiter(region.ctx, job).is_some())
    }

    /// Where what a peer reads leaves from, once the owner has put it there.
    pub(super) fn remote_source(
        &self,
        qpn: u32,
        request: &Request<'_>,
    ) -> Result<Borrowed<'_>, Nak> {
        let memory = self.remote(qpn, request, access::REMOTE_READ)?;
        let half = self.backing.mrs.mirrored(request.rkey).map_or(0, |region| region.half);
        Ok(Borrowed { offset: memory.offset + half, ..memory })
    }

    /// What the owner found when it did its part of a request, or how the request ends for now.
    pub(super) fn owner_did(
        &mut self,
        qpn: u32,
        request: &Request<'_>,
        task: Task,
    ) -> Result<u64, Outcome> {
        let requester = Waiter::of(request.flow);
        let jobs = &mut self.backing.mirror;
        match request.owner {
            Owner::Did(value) => Ok(value),
            Owner::Failed => Err(self.refuse(qpn, request, Nak::RemoteOperation)),
            Owner::Asked(job) if jobs.waiter(task.ctx, job) == Some(requester) => {
                Err(Outcome::Later(Awaited::Owner(job)))
            }
            Owner::Unasked | Owner::Asked(_) => {
                let begun = jobs.begin(task.ctx, requester, task.job);
                if begun.is_none() && request.service != Service::Reliable {
                    self.drop_message(qpn, request);
                }
                Err(begun.map_or(Outcome::NoAnswer, |job| Outcome::Later(Awaited::Owner(job))))
            }
        }
    }

    /// Executes the part of a piece that comes before its owner's, ahead of its turn, and asks the
    /// owner. A piece that cannot be executed changes nothing.
    pub(super) fn ask_owner_ahead(&mut self, request: &Request<'_>) -> Option<u64> {
        let qp = self.qps.get(&request.flow.dest_qpn)?;
        let qpn = qp.qpn;
        if !qp.state.receives() || !self.is_addressed(qp, request) {
            return None;
        }
        let (rights, kind) = match request.operation {
            Operation::Write => (access::REMOTE_WRITE, JobKind::Arrived),
            Operation::Read => (access::REMOTE_READ, JobKind::Wanted),
            _ => return None,
        };
        let target = self.remote(qpn, request, rights).ok()?;
        let task = self.task(kind, request, &target)?;
        if !self.backing.mirror.has_room_ahead(task.ctx) {
            return None;
        }
        if kind == JobKind::Arrived {
            self.place(request, target).ok()?;
        }
        let requester = Waiter::of(request.flow);
        self.backing.mirror.begin(task.ctx, requester, task.job)
    }

    /// The answer that one of this NIC's queue pairs waits for, unless it does no longer.
    fn owner_answered(&mut self, qpn: u32, number: u64, answer: Owner) {
        let Some(send) = self.qps.get_mut(&qpn).and_then(|qp| qp.send.as_mut()) else { return };
        if send.owner != Owner::Asked(number) {
            send.ahead.answered(number, answer);
            return;
        }
        // Whatever the wait: one that a timer has ended takes the answer in its next turn.
        send.owner = answer;
        if matches!(send.wait, Wait::Owner(_)) {
            send.wait = Wait::None;
            self.schedule(qpn);
        }
    }

    /// Gives jobs to the port, as far as it takes them now.
    pub(super) fn send_jobs(&mut self) {
        while let Some(&(ctx, job)) = self.backing.mirror.unsent.front() {
            let awaited = self.backing.mirror.waiter(ctx, job.number).is_some();
            if awaited && !self.outbox.port().owner_job(ctx, job) {
                return;
            }
            self.backing.mirror.unsent.pop_front();
        }
    }
}

impl<N: Nics> Execution<'_, N> {
    /// A context's owner takes jobs from now on: it may register mirrored regions.
    pub(crate) fn serve_mirrors(&mut self, id: NicId, ctx: u32) {
        if let Some(nic) = self.nic_mut(id) {
            nic.backing.mirror.owners.entry(ctx).or_default();
            self.engine.owners.insert(id);
        }
    }

    /// The owner has done its jobs: their numbers, and what stood where an atomic changed a word;
    /// `None`: the memory is not there.
    pub(crate) fn owner_answered(&mut self, id: NicId, ctx: u32, done: &[(u64, Option<u64>)]) {
        for &(number, value) in done {
            let Some(nic) = self.nic_mut(id) else { return };
            let answer = value.map_or(Owner::Failed, Owner::Did);
            let Some(waiter) = nic.backing.mirror.answered(ctx, number) else { continue };
            match waiter.who {
                Requester::Here(id) => {
                    if let Some(requester) = self.nic_mut(id) {
                        requester.owner_answered(waiter.qpn, number, answer);
                    }
                }
                Requester::Elsewhere(_) => self.owner_answered_elsewhere(number, answer),
            }
        }
    }
}
