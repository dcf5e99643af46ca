//! Events on their way from the worker to the processes that they are for.
//!
//! A worker may not signal a descriptor that a process has: how long that takes is the process's to
//! decide (`device::trust`). So it notes the event in a list, and wakes the session's thread by a
//! descriptor that nobody else has. The list never grows beyond what the process has: of each CQ it
//! holds how many events came, of each object its kinds of asynchronous events.
//!
//! The lock is held for as long as an entry takes, and a worker does not wait for it.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, eventfd};
use virtio_rdma_abi::{AsyncEvent, CompEvent, event};

use crate::cm::{Inbox, MAD_LEN, Mad};
use crate::link::Flow;
use crate::nic::{Job, MEMORY_LOST, Port};

/// What wakes one session's thread; nobody else has the descriptor.
#[derive(Debug, Clone)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub(super) fn ring(&self) {
        // A counter that is full has been rung.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Whoever rings from now on is heard again.
    pub(super) fn heard(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What waits for one session.
#[derive(Debug)]
struct Waiting {
    bell: Bell,
    /// Its CQs, and how many events of each wait.
    cqs: FxHashMap<u32, u32>,
    /// CQs of which events wait.
    fired: Vec<u32>,
    /// Kind and object.
    events: BTreeSet<(u32, u32)>,
    /// Jobs of the owner of mirrored regions: as many as the engine has under way.
    jobs: Vec<Job>,
}

/// What a session finds.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// CQs, and how many events of each.
    pub(super) completions: Vec<(u32, u32)>,
    /// Kind and object.
    pub(super) events: BTreeSet<(u32, u32)>,
    /// Jobs of the process.
    pub(super) jobs: Vec<Job>,
}

#[derive(Debug, Default)]
struct Lists {
    /// By context.
    sessions: FxHashMap<u32, Waiting>,
    /// Whose a CQ is.
    owners: FxHashMap<u32, u32>,
}

/// Where the events of one NIC go.
#[derive(Debug, Default)]
pub(super) struct Routes(Mutex<Lists>);

impl Routes {
    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A context begins.
    pub(super) fn begin(&self, ctx: u32, bell: Bell) {
        let waiting = Waiting {
            bell,
            cqs: FxHashMap::default(),
            fired: Vec::new(),
            events: BTreeSet::new(),
            jobs: Vec::new(),
        };
        self.lists().sessions.insert(ctx, waiting);
    }

    /// It ends, and whatever waited for it.
    pub(super) fn end(&self, ctx: u32) {
        let mut lists = self.lists();
        lists.owners.retain(|_, owner| *owner != ctx);
        lists.sessions.remove(&ctx);
    }

    /// A CQ that has a completion channel begins.
    pub(super) fn begin_cq(&self, ctx: u32, cqn: u32) {
        let mut lists = self.lists();
        lists.owners.insert(cqn, ctx);
        if let Some(waiting) = lists.sessions.get_mut(&ctx) {
            waiting.cqs.insert(cqn, 0);
            let cqs = waiting.cqs.len();
            waiting.fired.reserve(cqs);
        }
    }

    /// It ends.
    pub(super) fn end_cq(&self, ctx: u32, cqn: u32) {
        let mut lists = self.lists();
        if lists.owners.get(&cqn) == Some(&ctx) {
            lists.owners.remove(&cqn);
        }
        if let Some(waiting) = lists.sessions.get_mut(&ctx) {
            waiting.cqs.remove(&cqn);
            waiting.fired.retain(|fired| *fired != cqn);
        }
    }

    /// What has come for a context.
    pub(super) fn take(&self, ctx: u32) -> Found {
        let mut lists = self.lists();
        let Some(waiting) = lists.sessions.get_mut(&ctx) else { return Found::default() };
        let Waiting { cqs, fired, events, jobs, .. } = waiting;
        let completions =
            fired.drain(..).filter_map(|cqn| Some((cqn, std::mem::take(cqs.get_mut(&cqn)?))));
        Found {
            completions: completions.collect(),
            events: std::mem::take(events),
            jobs: std::mem::take(jobs),
        }
    }
}

/// The worker's end.
#[derive(Debug)]
pub(super) struct ProcessPort {
    routes: Arc<Routes>,
    /// Datagrams for the connection manager.
    inbox: Arc<Inbox>,
    busy: bool,
}

impl ProcessPort {
    pub(super) const fn new(routes: Arc<Routes>, inbox: Arc<Inbox>) -> Self {
        Self { routes, inbox, busy: false }
    }

    /// Does something with the lists, unless a session has them at this moment.
    fn with(&mut self, note: impl FnOnce(&mut Lists)) -> bool {
        match self.routes.0.try_lock() {
            Ok(mut lists) => note(&mut lists),
            Err(TryLockError::Poisoned(lists)) => note(&mut lists.into_inner()),
            Err(TryLockError::WouldBlock) => {
                self.busy = true;
                return false;
            }
        }
        true
    }
}

impl Port for ProcessPort {
    /// One of a CQ without a channel is nobody's.
    fn completion_event(&mut self, _vector: u32, fired: CompEvent) -> bool {
        let cqn = fired.cqn.get();
        self.with(|lists| {
            let owner = lists.owners.get(&cqn);
            let Some(waiting) = owner.and_then(|ctx| lists.sessions.get_mut(ctx)) else { return };
            let Some(count) = waiting.cqs.get_mut(&cqn) else { return };
            if *count == 0 {
                waiting.fired.push(cqn);
                waiting.bell.ring();
            }
            *count = count.saturating_add(1);
        })
    }

    fn async_event(&mut self, happened: AsyncEvent) -> bool {
        let (kind, object) = (happened.r#type.get(), happened.object.get());
        let everyone = matches!(
            kind,
            event::DEVICE_FATAL
                | event::GID_CHANGE
                | event::PORT_ACTIVE
                | event::PORT_ERR
                | MEMORY_LOST
        );
        self.with(|lists| {
            let tell = |waiting: &mut Waiting| {
                waiting.events.insert((kind, object));
                waiting.bell.ring();
            };
            match everyone {
                true => lists.sessions.values_mut().for_each(tell),
                false => lists.sessions.get_mut(&happened.ctx.get()).into_iter().for_each(tell),
            }
        })
    }

    fn owner_job(&mut self, ctx: u32, job: Job) -> bool {
        self.with(|lists| {
            let Some(waiting) = lists.sessions.get_mut(&ctx) else { return };
            if waiting.jobs.is_empty() {
                waiting.bell.ring();
            }
            waiting.jobs.push(job);
        })
    }

    fn management(&mut self, flow: &Flow, bytes: &[u8; MAD_LEN]) -> bool {
        let mad = Mad {
            source: flow.source_gid,
            dest: flow.dest_gid,
            traffic_class: flow.traffic_class,
            sl: flow.sl,
            bytes: *bytes,
        };
        // A NIC's MAC address is its own, however many other addresses it has.
        let [a, b, c, d, e, f] = flow.source_mac;
        self.inbox.put_of(u64::from_be_bytes([0, 0, a, b, c, d, e, f]), mad)
    }

    fn flush(&mut self) {}

    fn was_busy(&mut self) -> bool {
        std::mem::take(&mut self.busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comp(cqn: u32) -> CompEvent {
        CompEvent { cqn: cqn.into(), arm_seq: 1.into() }
    }

    fn asynchronous(kind: u32, object: u32, ctx: u32) -> AsyncEvent {
        AsyncEvent {
            r#type: kind.into(),
            object: object.into(),
            ctx: ctx.into(),
            reserved: 0.into(),
        }
    }

    fn inbox() -> Arc<Inbox> {
        Arc::new(Inbox::new(Arc::new(|| {})))
    }

    fn is_rung(bell: &Bell) -> bool {
        crate::eventfd::take(bell.as_fd()).unwrap()
    }

    #[test]
    fn events_reach_the_context_that_they_are_for() {
        let routes = Arc::new(Routes::default());
        let mut port = ProcessPort::new(routes.clone(), inbox());
        let (one, two) = (Bell::new().unwrap(), Bell::new().unwrap());
        routes.begin(1, one.clone());
        routes.begin(2, two.clone());
        routes.begin_cq(1, 10);
        routes.begin_cq(2, 20);
        for cqn in [10, 10, 30] {
            assert!(port.completion_event(0, comp(cqn)));
        }
        assert!(port.async_event(asynchronous(event::QP_FATAL, 7, 1)));
        assert!(port.async_event(asynchronous(event::QP_FATAL, 7, 9)), "nobody's");
        assert!(is_rung(&one) && !is_rung(&two));
        let found = routes.take(1);
        assert_eq!(found.completions, [(10, 2)]);
        assert_eq!(Vec::from_iter(found.events), [(event::QP_FATAL, 7)]);
        assert!(routes.take(1).completions.is_empty() && routes.take(2).events.is_empty());
        assert!(port.async_event(asynchronous(event::GID_CHANGE, 1, 0)));
        assert!(is_rung(&one) && is_rung(&two), "everyone's");
    }

    #[test]
    fn what_ended_gets_no_event_and_keeps_nothing() {
        let routes = Arc::new(Routes::default());
        let mut port = ProcessPort::new(routes.clone(), inbox());
        routes.begin(1, Bell::new().unwrap());
        routes.begin_cq(1, 10);
        routes.begin_cq(1, 11);
        assert!(port.completion_event(0, comp(10)) && port.completion_event(0, comp(11)));
        routes.end_cq(2, 10);
        routes.end_cq(1, 10);
        assert_eq!(routes.take(1).completions, [(11, 1)]);
        routes.end(1);
        assert!(port.completion_event(0, comp(11)), "nobody's");
        let lists = routes.lists();
        assert!(lists.sessions.is_empty() && lists.owners.is_empty());
    }

    #[test]
    fn a_worker_does_not_wait_for_a_session() {
        let routes = Arc::new(Routes::default());
        let mut port = ProcessPort::new(routes.clone(), inbox());
        let held = routes.lists();
        assert!(!port.completion_event(0, comp(1)) && port.was_busy());
        drop(held);
        assert!(port.completion_event(0, comp(1)) && !port.was_busy());
    }
}
