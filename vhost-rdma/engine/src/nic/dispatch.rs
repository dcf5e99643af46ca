//! Control commands: what is the same on every backing is carried out here, the rest is handed on.
//!
//! ```text
//!  Command ──> execute ─┬─> Nic<P>: contexts, domains, CQs, SRQs, the ends of contexts
//!                       └─> Verb ──> Executor::carry_out: keys, QPs, addresses, groups
//! ```
//!
//! Some commands concern more than the NIC: on software a whole network. So a command is carried
//! out on an [`Executor`], which is the NIC together with whatever its commands may change.
//!
//! A guest chooses how many objects a context has and how much waits in a ring, and its neighbours
//! wait while a command is carried out. So what is many goes in steps of [`STEP`] each: a step
//! comes to [`Step::More`], and the command goes on when [`Command::Continue`] comes, with a round
//! for the neighbours between. What a command has still to do is kept with its NIC, and its
//! commands come one after the other; another command in its place means that nobody waits for it
//! any more. What may block is no step but a [`super::BlockingJob`], and [`Command::Continue`]
//! comes when that is done.

use super::budget::{Budget, cost};
use super::contexts::KERNEL;
use super::nic::{Nic, NicState, Provider, STEP};
use super::parts::Parts;
use super::quota::Kept;
use super::verb::{CqResize, NewQp, Rereg, Verb};
use super::work::{Begun, CommonWork, Work};
use super::{Command, DeferredDrop, Nanos, Reply, Status, Step};
use crate::memory::{AddressSpace, Ring};

/// A NIC, with whatever its commands may change beside it.
pub trait Executor {
    /// Its backing.
    type Backing: Provider;

    /// The NIC.
    fn nic(&mut self) -> Result<&mut Nic<Self::Backing>, Status>;

    /// Destroys every object and forgets every guest address.
    fn reset(&mut self);

    /// The rest of INIT: all is forgotten, and the new driver's memory is there.
    fn open(&mut self, status_page: Ring) -> Result<Begun<Self::Backing>, Status>;

    /// Carries out, or begins, what only the backing can do.
    fn carry_out(&mut self, ctx: u32, verb: Verb) -> Result<Begun<Self::Backing>, Status>;

    /// Goes on with what [`Self::carry_out`] began; what is left of it, or what comes next. It
    /// returns itself only if the budget is over.
    fn work_on(
        &mut self,
        work: <Self::Backing as Parts>::Work,
        budget: &mut Budget,
    ) -> Result<Option<Work<Self::Backing>>, Status>;

    /// Takes in what a blocking job found, if there is anything; whatever the NIC is now, what was
    /// made for it must end in order.
    fn take_found(&mut self) -> Option<Result<Begun<Self::Backing>, Status>>;

    /// Does what commands of the NIC left to be done beside it.
    fn settle(&mut self);
}

/// Executes one command of context `ctx`, or a step of it. It has taken effect, or had none, when
/// it comes to an answer.
///
/// # Errors
/// The status to answer.
pub fn execute<E: Executor>(
    executor: &mut E,
    ctx: u32,
    command: Command,
    now: Nanos,
) -> Result<Step, Status> {
    let nic = executor.nic()?;
    nic.now = now;
    nic.meter.charge(cost::COMMAND);
    // It may be refused.
    nic.deferred_drops.extend(command.memory().map(DeferredDrop::new));
    let goes_on = matches!(command, Command::Continue);
    let found = if goes_on { executor.take_found() } else { None };
    let begun = found.unwrap_or_else(|| begin(executor, ctx, command));
    let step = begun.and_then(|begun| match begun {
        Begun::Done(reply) => Ok(Step::Done(reply)),
        Begun::Steps(work) => advance(executor, work),
        Begun::Blocking(job) => Ok(Step::Blocking(job)),
    });
    executor.settle();
    if !goes_on {
        executor.nic()?.counters.commands += 1;
    }
    step
}

/// Whether a command may be carried out in this state of the NIC. The objects of one that failed
/// go away as well.
const fn admit(life: NicState, command: &Command) -> Result<(), Status> {
    match (life, command) {
        (NicState::Ready | NicState::Paused, _)
        | (NicState::Idle, Command::Init { .. })
        | (NicState::Failed, Command::Shutdown) => Ok(()),
        (NicState::Idle, _) => Err(Status::STATE),
        (NicState::Failed, _) => Err(Status::FATAL),
    }
}

fn begin<E: Executor>(
    executor: &mut E,
    ctx: u32,
    command: Command,
) -> Result<Begun<E::Backing>, Status> {
    let nic = executor.nic()?;
    if !matches!(command, Command::Continue) {
        match nic.work.take() {
            Some(Work::Own(work)) => E::Backing::abandoned(nic, work),
            // A resize has changed nothing yet, and a context that has ended in part can be ended
            // again.
            Some(Work::Common(_)) | None => {}
        }
    }
    admit(nic.life, &command)?;
    let done = |reply| Ok(Begun::Done(reply));
    let verb = match command {
        Command::Init { space, status_page } => return init(executor, space, status_page),
        Command::Shutdown => {
            executor.reset();
            return done(Reply::Done);
        }
        Command::Continue => return nic.work.take().map(Begun::Steps).ok_or(Status::STATE),
        Command::Keepalive => return done(Reply::Done),
        Command::QueryDevice => return done(Reply::Device(Box::new(E::Backing::device(nic)))),
        Command::QueryPort => return done(Reply::Port(E::Backing::port(nic))),
        Command::QueryCounters => return done(Reply::Counters(Box::new(nic.counters_response()))),
        Command::ContextCreate { db_page } => return done(nic.create_context(db_page)?),
        Command::ContextDestroy => return nic.begin_end(ctx),
        Command::DbPageAdd { db_page } => return done(nic.add_page(ctx, db_page)?),
        Command::PdCreate => return done(nic.create_pd(ctx)?),
        Command::PdDestroy(pdn) => return done(nic.destroy_pd(ctx, pdn)?),
        Command::CqCreate { entries, vector, ring } => {
            return done(nic.create_cq(ctx, entries, vector, ring)?);
        }
        Command::CqDestroy(cqn) => return done(nic.destroy_cq(ctx, cqn)?),
        Command::CqModerate { cqn, count, period_us } => {
            return done(nic.moderate(ctx, cqn, (count, period_us))?);
        }
        Command::SrqCreate { req, ring } => return done(nic.create_srq(ctx, &req, ring)?),
        Command::SrqDestroy(srqn) => return done(nic.destroy_srq(ctx, srqn)?),
        Command::SrqModify { req, ring } => return nic.modify_srq(ctx, &req, ring),
        Command::SrqQuery(srqn) => return done(nic.query_srq(ctx, srqn)?),
        Command::AhDestroy(number) => return done(nic.destroy_ah(ctx, number)?),

        Command::GidSet { index, gid } => Verb::GidSet { index, gid },
        Command::MrReg { pdn, access, iova, map } => Verb::MrReg { pdn, access, iova, map },
        // It opens all of the guest's memory.
        Command::MrDma { .. } if ctx != KERNEL => return Err(Status::PERM),
        Command::MrDma { pdn, access } => Verb::MrDma { pdn, access },
        Command::MrAlloc { pdn, max_pages } => Verb::MrAlloc { pdn, max_pages },
        Command::MrRereg { req, map } => {
            Verb::MrRereg { key: req.lkey.get(), change: Rereg::of(&req, map)? }
        }
        Command::MrDereg(key) => Verb::MrDereg(key),
        Command::MwAlloc { pdn, kind } => Verb::MwAlloc { pdn, kind },
        Command::MwDealloc(key) => Verb::MwDealloc(key),
        Command::CqResize { cqn, entries, requested, ring } => {
            nic.owned_cq(ctx, cqn)?;
            Verb::CqResize(CqResize { cqn, entries, requested, ring })
        }
        Command::QpCreate { req, sq, rq } => {
            let kind = nic.check_qp(ctx, &req, (sq.is_some(), rq.is_some()))?;
            Verb::QpCreate(NewQp { kind, req, sq, rq })
        }
        Command::QpDestroy(qpn) => Verb::QpDestroy(qpn),
        Command::QpModify { qpn, attr } => Verb::QpModify { qpn, attr },
        Command::QpQuery(qpn) => Verb::QpQuery(qpn),
        Command::AhCreate { pdn, av } => {
            nic.check_ah(ctx, pdn, &av)?;
            Verb::AhCreate { pdn, av }
        }
        Command::McastAttach { qpn, mgid } => Verb::McastAttach { qpn, mgid },
        Command::McastDetach { qpn, mgid } => Verb::McastDetach { qpn, mgid },
    };
    executor.carry_out(ctx, verb)
}

fn init<E: Executor>(
    executor: &mut E,
    space: AddressSpace,
    status_page: Ring,
) -> Result<Begun<E::Backing>, Status> {
    executor.reset();
    let nic = executor.nic()?;
    nic.kept = Kept::begin(&space, E::Backing::PLACES);
    nic.space = space;
    executor.open(status_page)
}

/// Goes on with a command for a step.
fn advance<E: Executor>(executor: &mut E, work: Work<E::Backing>) -> Result<Step, Status> {
    let mut budget = executor.nic()?.meter.budget(STEP);
    let mut work = work;
    loop {
        let left = match work {
            Work::Own(work) => executor.work_on(work, &mut budget)?,
            Work::Common(work) => executor.nic()?.work_on(work, &mut budget)?.map(Work::Common),
        };
        let Some(left) = left else { return Ok(Step::Done(Reply::Done)) };
        let nic = executor.nic()?;
        if budget.is_over(&nic.meter) {
            nic.work = Some(left);
            return Ok(Step::More);
        }
        work = left;
    }
}

impl<P: Provider> Nic<P> {
    /// Goes on with a command that is the same on every backing; what is left of it.
    fn work_on(
        &mut self,
        mut work: CommonWork<P>,
        budget: &mut Budget,
    ) -> Result<Option<CommonWork<P>>, Status> {
        let done = match &mut work {
            CommonWork::EndContext(end) => self.end_some(end, budget),
            CommonWork::ResizeCq(cqn, to) => self.carry_cq(*cqn, to, budget)?,
            CommonWork::ResizeSrq(req, to) => self.carry_srq(req.srqn.get(), to, budget)?,
        };
        if !done {
            return Ok(Some(work));
        }
        match work {
            CommonWork::EndContext(_) => {}
            CommonWork::ResizeCq(cqn, to) => self.take_over_cq(cqn, to)?,
            CommonWork::ResizeSrq(req, to) => self.take_over_srq(&req, to)?,
        }
        Ok(None)
    }
}
