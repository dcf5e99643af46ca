//! One configured NIC, whether or not a VMM is connected: its place on a worker and what is known
//! of its connection.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use virtio_rdma_abi::Config;

use super::config;
use super::home::{Home, Pass, Place};
use super::queues::QueueLayout;
use super::saved::SavedSession;
use super::trust::Trust;
use crate::link::NicId;
use crate::memory::Account;
use crate::node::{self, NicConfig, NicLimits, NicStatus, Session as SessionState};
use crate::shard::{Counters, Limits, Nanos, NicSettings, NicSnapshot, Objects, Shard};
use crate::worker::{CallError, Progress, WatchedKick, WorkerHandle, thread_time};

/// How long a worker may be in one and the same turn before whoever waits for a job of it gives up,
/// and a guest is told that its device is gone. Drivers give up after 5 seconds by themselves, but
/// that is for them to decide: a worker that is late may still come, and a command that it has not
/// seen must not be answered for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// How long a status request may be late before the answer is given without the engine's part.
const STATUS_TIMEOUT: Duration = Duration::from_millis(500);

/// Counted by the device layer since the NIC was attached.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    pub(crate) control_commands: AtomicU64,
    /// Shared with the worker, which counts them.
    pub(crate) kicks: Arc<AtomicU64>,
    /// Moves to another worker.
    moves: AtomicU64,
}

/// A session, as far as its NIC knows it.
pub(crate) trait Serving: Send + Sync {
    /// Serves nobody any more: no message of the VMM and no request of the guest. False if one of
    /// them is not over until then.
    fn come_to_rest(&self, until: Instant) -> bool;

    /// What is to be handed on of a session that is at rest.
    fn save(&self) -> Option<SavedSession>;
}

#[derive(Debug, Default)]
struct Link {
    connected: bool,
    error: Option<String>,
    /// The session of the VMM that is or was connected last.
    session: Option<Weak<dyn Serving>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Nic {
    pub(crate) name: String,
    pub(crate) layout: QueueLayout,
    pub(crate) config_space: Config,
    pub(crate) stats: Stats,
    id: NicId,
    home: Home,
    /// Its kicks that its worker hears directly.
    heard: Mutex<Vec<Weak<Hearing>>>,
    max_mr_bytes: AtomicU64,
    max_guest_bytes: AtomicU64,
    /// What is kept for its guest.
    account: Account,
    link: Mutex<Link>,
    /// Its VMM has made an epoll set wait that others have as well.
    slow_kicks: AtomicBool,
    /// A kick that came by the connection's thread is on its way to the worker.
    kicked: Arc<AtomicBool>,
    /// Whether a worker may signal its VMM's descriptors.
    pub(super) trust: Arc<Trust>,
}

/// Processor time of this thread that a change of an epoll set takes at most (some microseconds),
/// but for one reason: somebody signals the eventfd all the time and has made that take long, by a
/// great many waiters. Others' time does not count here.
const SLOW_CHANGE: Duration = Duration::from_millis(2);

/// A kick descriptor that wakes the worker for as long as this lives.
///
/// To add it to the worker's epoll set, or take it out, waits for the lock of the eventfd's waiters
/// while it holds the set's own, which the worker needs when it wakes. The VMM decides how long
/// that takes. So each change is timed, and a NIC whose change was slow is not heard by the worker
/// directly again: its kicks come by its connection's own thread.
#[derive(Debug)]
pub(crate) struct DirectKick {
    hearing: Arc<Hearing>,
    nic: Arc<Nic>,
}

/// A kick descriptor and the worker that hears it, which changes when the NIC moves; `None`: nobody
/// any more.
#[derive(Debug)]
struct Hearing {
    kick: OwnedFd,
    watched: Mutex<Option<WatchedKick>>,
}

impl Hearing {
    fn watched(&self) -> MutexGuard<'_, Option<WatchedKick>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DirectKick {
    fn drop(&mut self) {
        let watched = self.hearing.watched().take();
        self.nic.timed(|| drop(watched));
    }
}

/// What the engine needs to know of a NIC.
pub(crate) fn settings(config: &NicConfig, layout: QueueLayout) -> NicSettings {
    let limits = &config.limits;
    NicSettings {
        number: config.number,
        vni: config.vni,
        mac: config.mac.octets(),
        gids: config.addresses.iter().map(|address| gid(*address)).collect(),
        comp_vectors: layout.comp_vectors().into(),
        kick_queues: layout.kick_queues().into(),
        limits: Limits {
            max_contexts: limits.max_contexts,
            max_pds: limits.max_pds,
            max_mrs: limits.max_mrs,
            max_mr_bytes: limits.max_mr_bytes,
            max_cqs: limits.max_cqs,
            max_srqs: limits.max_srqs,
            max_qps: limits.max_qps,
            max_ahs: limits.max_ahs,
        },
    }
}

/// The GID of an address: IPv4 is mapped to IPv6 (RoCE v2, IBTA annex A17).
pub(crate) fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn address(gid: [u8; 16]) -> IpAddr {
    IpAddr::from(gid).to_canonical()
}

impl Nic {
    /// The NIC that the worker at `place` knows as `id`.
    pub(crate) fn new(config: &NicConfig, layout: QueueLayout, place: Place, id: NicId) -> Self {
        Self {
            name: config.name.clone(),
            layout,
            config_space: config::space(config.mac.octets(), layout),
            stats: Stats::default(),
            id,
            home: Home::new(place),
            heard: Mutex::default(),
            max_mr_bytes: AtomicU64::new(config.limits.max_mr_bytes),
            max_guest_bytes: AtomicU64::new(config.limits.max_guest_bytes),
            account: Account::new(config.limits.max_kept_bytes),
            link: Mutex::new(Link::default()),
            slow_kicks: AtomicBool::new(false),
            kicked: Arc::default(),
            trust: Arc::new(Trust::new()),
        }
    }

    pub(crate) fn max_mr_bytes(&self) -> u64 {
        self.max_mr_bytes.load(Ordering::Relaxed)
    }

    /// How much memory its VMM may share.
    pub(crate) fn max_guest_bytes(&self) -> u64 {
        self.max_guest_bytes.load(Ordering::Relaxed)
    }

    /// What pays for all that is kept for its guest.
    pub(crate) const fn account(&self) -> &Account {
        &self.account
    }

    /// Takes over limits that the engine does not see.
    pub(crate) fn set_limits(&self, limits: &NicLimits) {
        self.max_mr_bytes.store(limits.max_mr_bytes, Ordering::Relaxed);
        self.max_guest_bytes.store(limits.max_guest_bytes, Ordering::Relaxed);
        self.account.allow(limits.max_kept_bytes);
    }

    /// Runs a job on the worker and waits for it.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        patience: Duration,
        job: impl FnOnce(&mut Shard, NicId, Nanos) -> R + Send + 'static,
    ) -> Result<R, CallError> {
        let mut job = Some(job);
        self.call_in_steps(patience, move |shard, id, now| match job.take() {
            Some(job) => Progress::Done(job(shard, id, now)),
            None => Progress::More,
        })
    }

    /// Runs a job on the worker, once in each of its turns until it is done, and waits for it.
    pub(crate) fn call_in_steps<R: Send + 'static>(
        &self,
        patience: Duration,
        mut job: impl FnMut(&mut Shard, NicId, Nanos) -> Progress<R> + Send + 'static,
    ) -> Result<R, CallError> {
        let id = self.id;
        let mut dropped = Vec::new();
        let (worker, pass) = self.home.enter(patience).ok_or(CallError::Timeout)?;
        let result = worker.call_in_steps(Some(id), patience, move |shard, now| {
            let _finds_it: &Pass = &pass;
            let progress = job(shard, id, now);
            dropped.append(&mut shard.take_deferred_drops(id));
            match progress {
                Progress::Done(result) => Progress::Done((result, std::mem::take(&mut dropped))),
                Progress::More => Progress::More,
            }
        })?;
        // What was dropped late ends on this thread, which serves this NIC only.
        let (result, _dropped) = result;
        Ok(result)
    }

    /// For how long the worker has been in its present turn.
    pub(crate) fn worker_stalled(&self) -> Duration {
        Duration::from_nanos(self.home.place().1.beat().stalled)
    }

    /// Has a job run on the worker, soon; false if nobody will.
    pub(crate) fn post(&self, job: impl FnOnce(&mut Shard, NicId, Nanos) + Send + 'static) -> bool {
        let id = self.id;
        let Some((worker, pass)) = self.home.enter(PATIENCE) else {
            tracing::error!(nic = self.name, "its worker does not let it move; a job is lost");
            return false;
        };
        worker.post(Some(id), move |shard, now| {
            let _finds_it = pass;
            job(shard, id, now);
        })
    }

    /// Moves it to another worker: what it has and what its guest does goes on there. False: it
    /// stays, for now or for good.
    pub(crate) fn move_to(&self, place: Place) -> bool {
        // Its VMM could make another worker's epoll set wait, too.
        if self.slow_kicks.load(Ordering::Relaxed) || !self.home.begin_move() {
            return false;
        }
        let moved = self.carry_over(&place).is_some();
        self.home.end_move(moved.then_some(place));
        moved
    }

    fn carry_over(&self, (number, worker): &Place) -> Option<()> {
        let (id, number) = (self.id, *number);
        let (_, from) = self.home.place();
        // First: a host that has no descriptor left refuses here, and nothing has changed.
        let mut hears = Vec::new();
        let refused = self.hearings().into_iter().try_for_each(|hearing| {
            let watched = self.watch(worker, &hearing.kick)?;
            hears.push((hearing, watched));
            Ok::<(), io::Error>(())
        });
        let (reply, taken) = sync_channel(1);
        let asked = refused.is_ok()
            && from.post(Some(id), move |shard, _| _ = reply.try_send(shard.take_nic(id, number)));
        // However long: a worker that is late will have taken it, and then it is nowhere but here.
        let moved = asked.then(|| taken.recv().ok().flatten()).flatten();
        let Some(moved) = moved else {
            self.timed(|| drop(hears));
            return None;
        };
        worker.post(Some(id), move |shard, _| shard.put_nic(moved));
        for (hearing, watched) in hears {
            let mut present = hearing.watched();
            let ours = present.is_some();
            let old = if ours { present.replace(watched) } else { Some(watched) };
            drop(present);
            self.timed(|| drop(old));
        }
        // A kick may have come to the old worker only, after which no other need come.
        worker.post(Some(id), move |shard, _| shard.kicked(id));
        self.stats.moves.fetch_add(1, Ordering::Relaxed);
        Some(())
    }

    fn hearings(&self) -> Vec<Arc<Hearing>> {
        self.heard_now().iter().filter_map(Weak::upgrade).collect()
    }

    fn watch(&self, worker: &WorkerHandle, kick: &OwnedFd) -> io::Result<WatchedKick> {
        let (kick, counter) = (kick.try_clone()?, self.stats.kicks.clone());
        self.timed(|| worker.watch(Some(self.id), kick, counter))
    }

    /// The kicks that are heard, and none that was: a VMM makes and ends them as often as it likes.
    fn heard_now(&self) -> MutexGuard<'_, Vec<Weak<Hearing>>> {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.retain(|hearing| hearing.strong_count() > 0);
        heard
    }

    /// Has the worker hear a kick queue's kicks; `None` if they must come by the connection's
    /// thread.
    pub(crate) fn watch_kick(self: &Arc<Self>, kick: &File) -> Option<DirectKick> {
        if self.has_slow_kicks() {
            return None;
        }
        let kick = OwnedFd::from(kick.try_clone().ok()?);
        let (worker, _pass) = self.home.enter(PATIENCE)?;
        let watched = Mutex::new(Some(self.watch(&worker, &kick).ok()?));
        let hearing = Arc::new(Hearing { kick, watched });
        self.heard_now().push(Arc::downgrade(&hearing));
        Some(DirectKick { hearing, nic: self.clone() })
    }

    /// Whether its VMM has made an epoll set wait.
    pub(super) fn has_slow_kicks(&self) -> bool {
        self.slow_kicks.load(Ordering::Relaxed)
    }

    /// Changes an epoll set that others have as well.
    pub(super) fn timed<R>(&self, change: impl FnOnce() -> R) -> R {
        let before = thread_time();
        let result = change();
        if thread_time().saturating_sub(before) > SLOW_CHANGE
            && !self.slow_kicks.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                nic = self.name,
                "the VMM's kick descriptor is slow to wait for; its kicks take another way from \
                 now on"
            );
        }
        result
    }

    /// How many turns the worker has ended.
    pub(crate) fn turns(&self) -> u64 {
        self.home.place().1.beat().turns.iter().sum()
    }

    /// Has the worker look at the doorbells. However often the guest kicks, one job of it waits.
    pub(crate) fn kick(&self) {
        self.stats.kicks.fetch_add(1, Ordering::Relaxed);
        if !self.kicked.swap(true, Ordering::AcqRel) {
            let kicked = self.kicked.clone();
            let posted = self.post(move |shard, id, _| {
                // A later kick makes another job; what an earlier one is for is seen from here on.
                kicked.swap(false, Ordering::AcqRel);
                shard.kicked(id);
            });
            if !posted {
                self.kicked.store(false, Ordering::Release);
            }
        }
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A VMM connected; what was wrong with the last one is forgotten.
    pub(crate) fn connected(&self) {
        let mut link = self.link();
        (link.connected, link.error) = (true, None);
    }

    /// Its VMM's session is this one.
    pub(super) fn serves(&self, session: Weak<dyn Serving>) {
        self.link().session = Some(session);
    }

    /// The session of its VMM, if one is connected.
    pub(crate) fn session(&self) -> Option<Arc<dyn Serving>> {
        let link = self.link();
        link.session.as_ref()?.upgrade().filter(|_| link.connected)
    }

    /// Whether this worker serves it.
    pub(crate) fn is_on(&self, worker: &WorkerHandle) -> bool {
        self.home.place().1.is_same(worker)
    }

    /// The number of its worker.
    pub(crate) fn worker(&self) -> usize {
        self.home.place().0
    }

    /// What the worker knows it by.
    pub(crate) const fn id(&self) -> NicId {
        self.id
    }

    /// The VMM is gone.
    pub(crate) fn disconnected(&self) {
        self.link().connected = false;
    }

    /// The connection cannot go on.
    pub(crate) fn failed(&self, error: String) {
        tracing::error!(nic = self.name, error, "the NIC stops");
        self.link().error = Some(error);
    }

    /// What the NIC does now.
    pub(crate) fn status(&self) -> NicStatus {
        let engine = self.call(STATUS_TIMEOUT, |shard, id, _| shard.status(id)).ok().flatten();
        let link = self.link();
        let session = match &engine {
            _ if link.error.is_some() => SessionState::Failed,
            _ if !link.connected => SessionState::Absent,
            Some(snapshot) if snapshot.failed => SessionState::Failed,
            Some(snapshot) if snapshot.ready => SessionState::DriverReady,
            _ => SessionState::Connected,
        };
        let error = link.error.clone().or_else(|| {
            (session == SessionState::Failed).then(|| {
                "the guest's memory that the device needs went away, or the engine had a fault"
                    .to_owned()
            })
        });
        drop(link);
        let worker = u32::try_from(self.worker()).unwrap_or(u32::MAX);
        let mut status = NicStatus { session, error, worker, ..NicStatus::default() };
        let NicSnapshot { counters, objects, gids, .. } = match engine {
            Some(snapshot) => snapshot,
            None => NicSnapshot {
                ready: false,
                failed: false,
                counters: Counters::default(),
                objects: Objects::default(),
                gids: Vec::new(),
            },
        };
        status.counters = self.counters(&counters);
        status.objects = held(&objects, self.account.used());
        status.gids = gids.iter().map(|gid| address(*gid)).collect();
        status
    }

    fn counters(&self, engine: &Counters) -> node::Counters {
        node::Counters {
            tx_bytes: engine.tx_bytes,
            rx_bytes: engine.rx_bytes,
            tx_messages: engine.tx_messages,
            rx_messages: engine.rx_messages,
            rnr_naks: engine.rnr_naks_sent,
            retries: engine.rnr_naks_received + engine.ack_timeouts,
            access_errors: engine.access_errors,
            control_commands: self.stats.control_commands.load(Ordering::Relaxed),
            kicks: self.stats.kicks.load(Ordering::Relaxed),
            events: engine.events,
            completions: engine.completions,
            page_faults: engine.page_faults,
            moves: self.stats.moves.load(Ordering::Relaxed),
        }
    }
}

const fn held(engine: &Objects, kept_bytes: u64) -> node::Objects {
    node::Objects {
        contexts: engine.contexts,
        pds: engine.pds,
        mrs: engine.mrs,
        mr_bytes: engine.mr_bytes,
        cqs: engine.cqs,
        srqs: engine.srqs,
        qps: engine.qps,
        ahs: engine.ahs,
        kept_bytes,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Instant;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::node::{NicSpec, Registry};
    use crate::worker::{WorkerConfig, Workers};

    #[test]
    fn a_nic_with_the_limits_that_nobody_changed_fits_into_its_account() {
        let mut registry = Registry::new(PathBuf::from("/nowhere"));
        let spec = NicSpec { name: "n".to_owned(), ..NicSpec::default() };
        let config = registry.add_nic(spec, || [2; 6]).unwrap();
        let most = settings(config, QueueLayout::default()).limits.most_kept();
        // And there is as much again for tables: a quarter of a gibibyte names 128 GiB in pages.
        assert!(most <= config.limits.max_kept_bytes / 2, "{most} bytes: tell docs/OPERATIONS.md");
        assert!(most >= 64 << 20, "{most} bytes");
    }

    fn nic(workers: &Workers) -> Arc<Nic> {
        let mut registry = Registry::new(PathBuf::from("/nowhere"));
        let spec = NicSpec { name: "n".to_owned(), ..NicSpec::default() };
        let config = registry.add_nic(spec, || [2; 6]).unwrap();
        let place = (0, workers.handles()[0].clone());
        Arc::new(Nic::new(config, QueueLayout::default(), place, NicId(0)))
    }

    /// A VMM enables and disables its queues as often as it likes.
    #[test]
    fn what_is_not_heard_any_more_is_not_kept() {
        let workers = Workers::start(WorkerConfig::default()).unwrap();
        let nic = nic(&workers);
        let kick = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let heard = nic.watch_kick(&kick);
        for _ in 0..1000 {
            drop(nic.watch_kick(&kick));
        }
        let kept = nic.heard.lock().unwrap().len();
        assert!(kept <= 2, "{kept} are kept");
        drop(heard);
    }

    #[test]
    fn a_descriptor_that_was_slow_to_wait_for_is_not_heard_by_the_worker_again() {
        let workers = Workers::start(WorkerConfig::default()).unwrap();
        let nic = nic(&workers);
        let kick = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let heard = nic.watch_kick(&kick);
        assert!(heard.is_some());
        // Time in which this thread does not run is no fault of the VMM's.
        nic.timed(|| std::thread::sleep(10 * SLOW_CHANGE));
        assert!(nic.watch_kick(&kick).is_some());
        let busy = || {
            let begin = Instant::now();
            while begin.elapsed() < 50 * SLOW_CHANGE {
                std::hint::spin_loop();
            }
        };
        nic.timed(busy);
        assert!(nic.watch_kick(&kick).is_none(), "it is heard by its connection's thread");
        drop(heard);
    }
}
