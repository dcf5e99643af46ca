//! The engine: the copy of the cluster, the keys that changes have marked, and whose turn it is.
//!
//! One task owns all of it, so nothing is locked. A plan is made at the moment of its turn, from
//! the copy as it then is; its writes are done by a task of their own, so many at once, and no two
//! of one key. What failed is tried again after a while that doubles. Nothing is planned before
//! every list is complete, since what is not yet in the copy would look as if it were gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use vhost_rdma_cluster_api::{Condition, GROUP};

use crate::admission::Question;
use crate::apply::{self, Outcome, Writer};
use crate::core::{Key, Kind, Settings, World, Write, plan};
use crate::metrics::{Loop, Metrics, OfKind, Written};
use crate::peers::Hub;
use crate::trust::wall;
use crate::watch::Change;

/// Between two writes of one sum: what changes meanwhile is written together.
const SUM_PERIOD: Duration = Duration::from_millis(500);
/// The first wait after a failure, and the longest.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// How long the API server may take for the writes of one plan.
const PATIENCE: Duration = Duration::from_secs(30);
/// The engine turns at least so often, so that a probe can tell that it does.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The API server takes notes of at most 1 KiB.
const NOTE_MAX: usize = 1000;

/// Keys in the order of their time.
#[derive(Debug, Default)]
struct Queue {
    due: BTreeMap<Key, Instant>,
    order: BTreeSet<(Instant, Key)>,
}

impl Queue {
    /// A key's turn is at `at`, or before if it was to be before.
    fn push(&mut self, key: Key, at: Instant) {
        if let Some(old) = self.due.get(&key) {
            if *old <= at {
                return;
            }
            self.order.remove(&(*old, key.clone()));
        }
        self.due.insert(key.clone(), at);
        self.order.insert((at, key));
    }

    /// Takes the first key whose time has come and that `may` have its turn.
    fn pop(&mut self, now: Instant, may: impl Fn(&Key) -> bool) -> Option<Key> {
        let first = self
            .order
            .iter()
            .take_while(|(at, _)| *at <= now)
            .find(|(_, key)| may(key))
            .cloned()?;
        self.order.remove(&first);
        self.due.remove(&first.1);
        Some(first.1)
    }

    fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    fn len(&self) -> usize {
        self.due.len()
    }
}

/// The engine's surroundings.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Does the writes.
    pub writer: Writer,
    /// Whether this replica may write.
    pub leader: watch::Receiver<bool>,
    /// What the planners need to know.
    pub settings: Settings,
    /// Whether the cluster knows attachment definitions.
    pub attachments: bool,
    /// How many plans may be written at once.
    pub workers: usize,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Who follows where addresses are.
    pub hub: Arc<Hub>,
    /// The version of the authority, for whoever has a certificate of it.
    pub authority: Arc<watch::Sender<String>>,
}

/// What the engine hears.
#[derive(Debug)]
pub struct Ears<'a> {
    /// Changes of the cluster.
    pub changes: mpsc::Receiver<Change>,
    /// Questions of admission.
    pub questions: &'a mut mpsc::Receiver<Question>,
}

/// What became of a key's writes.
struct Finished {
    key: Key,
    failed: bool,
}

/// The engine.
#[allow(missing_debug_implementations, reason = "a recorder of events has none")]
pub struct Engine {
    parts: Parts,
    recorder: Recorder,
    world: World,
    started: Instant,
    /// For each kind of which a list is under way, what the list has had so far.
    listing: BTreeMap<Kind, BTreeSet<String>>,
    missing: BTreeSet<Kind>,
    queue: Queue,
    busy: BTreeSet<Key>,
    retries: BTreeMap<Key, u32>,
    quiet: BTreeMap<Key, Instant>,
    finished: mpsc::UnboundedSender<Finished>,
    done: mpsc::UnboundedReceiver<Finished>,
}

impl Engine {
    /// An engine that knows nothing yet.
    #[must_use]
    pub fn new(parts: Parts, recorder: Recorder) -> Self {
        // Never more messages than plans under way.
        let (finished, done) = mpsc::unbounded_channel();
        let mut missing = BTreeSet::from(Kind::ALL);
        if !parts.attachments {
            missing.remove(&Kind::Attachment);
        }
        let mut world = World::new(parts.attachments);
        world.set_epoch(wall());
        parts.hub.reset();
        Self {
            world,
            parts,
            recorder,
            started: Instant::now(),
            listing: BTreeMap::new(),
            missing,
            queue: Queue::default(),
            busy: BTreeSet::new(),
            retries: BTreeMap::new(),
            quiet: BTreeMap::new(),
            finished,
            done,
        }
    }

    /// Turns until the watches end.
    pub async fn run(mut self, ears: Ears<'_>) {
        let Ears { mut changes, questions } = ears;
        loop {
            let wake = self.queue.next().filter(|_| self.may_write() && !self.is_full());
            let beat = Instant::now() + HEARTBEAT;
            tokio::select! {
                change = changes.recv() => match change {
                    Some(change) => {
                        self.take(change);
                        // What waits already belongs to the same moment.
                        for _ in 0..256 {
                            let Ok(change) = changes.try_recv() else { break };
                            self.take(change);
                        }
                    }
                    None => return,
                },
                // What is not in the copy yet would look as if it were not there.
                Some(question) = questions.recv(), if self.missing.is_empty() => {
                    // Whoever asked may have gone.
                    match question {
                        Question::Pod(asks, answer) => drop(answer.send(self.world.admits(&asks))),
                        Question::Users(of, answer) => drop(answer.send(self.world.users_of(&of))),
                    }
                }
                Some(finished) = self.done.recv() => self.finish(finished),
                () = tokio::time::sleep_until(wake.unwrap_or(beat).min(beat)) => {}
                _ = self.parts.leader.changed() => {}
            }
            let now = Instant::now();
            for key in self.world.take_dirty() {
                let at = self.quiet.get(&key).copied().unwrap_or(now).max(now);
                self.queue.push(key, at);
            }
            self.tell();
            self.dispatch(now);
            self.count();
        }
    }

    /// Tells the other parts of the process what they need of the copy.
    fn tell(&mut self) {
        if self.missing.is_empty() {
            self.parts.hub.update(&mut self.world);
        }
        let version = self.world.authority_version();
        self.parts.authority.send_if_modified(|known| {
            let changed = known != version;
            if changed {
                version.clone_into(known);
            }
            changed
        });
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn may_write(&self) -> bool {
        self.missing.is_empty() && *self.parts.leader.borrow()
    }

    fn is_full(&self) -> bool {
        self.busy.len() >= self.parts.workers
    }

    fn take(&mut self, change: Change) {
        let now = self.now();
        match change {
            Change::Begin(kind) => drop(self.listing.insert(kind, BTreeSet::new())),
            Change::Listed(object) => {
                if let Some(names) = self.listing.get_mut(&object.kind()) {
                    names.insert(object.name());
                }
                self.world.apply(*object, now);
            }
            Change::Complete(kind) => {
                let there = self.listing.remove(&kind).unwrap_or_default();
                for name in self.world.names(kind) {
                    if !there.contains(&name) {
                        self.world.remove(kind, &name, now);
                    }
                }
                if self.missing.remove(&kind) && self.missing.is_empty() {
                    tracing::info!("ready: the copy of the cluster is complete");
                }
            }
            Change::Applied(object) => self.world.apply(*object, now),
            Change::Deleted(kind, name) => self.world.remove(kind, &name, now),
            Change::Broke(kind, error) => {
                tracing::warn!(?kind, error, "a watch broke and begins anew");
                self.parts.metrics.breaks.get_or_create(&of(kind)).inc();
            }
        }
    }

    fn dispatch(&mut self, now: Instant) {
        self.quiet.retain(|_, until| *until > now);
        while self.may_write() && !self.is_full() {
            let busy = &self.busy;
            let Some(key) = self.queue.pop(now, |key| !busy.contains(key)) else { return };
            self.turn(key, now);
        }
    }

    /// A key's turn.
    fn turn(&mut self, key: Key, now: Instant) {
        let plan = plan(&self.world, &key, self.now(), &self.parts.settings);
        self.parts.metrics.plans.get_or_create(&Loop { r#loop: key.loop_name() }).inc();
        if let Some(again) = plan.again {
            self.queue.push(key.clone(), now + again);
        }
        if plan.writes.is_empty() {
            self.retries.remove(&key);
            return;
        }
        if self.world.is_sum(&key) {
            self.quiet.insert(key.clone(), now + SUM_PERIOD);
        }
        let news = plan.writes.iter().flat_map(|write| self.news(write)).collect();
        self.busy.insert(key.clone());
        let writes = Writes {
            writer: self.parts.writer.clone(),
            metrics: Arc::clone(&self.parts.metrics),
            recorder: self.recorder.clone(),
            news,
        };
        let finished = self.finished.clone();
        tokio::spawn(async move {
            let begun = Instant::now();
            let failed = match tokio::time::timeout(PATIENCE, writes.all(&key, plan.writes)).await {
                Ok(failed) => failed,
                Err(_) => {
                    tracing::warn!(?key, "the API server does not answer");
                    true
                }
            };
            writes.metrics.seconds.observe(begun.elapsed().as_secs_f64());
            // The engine that ended needs no news.
            let _ = finished.send(Finished { key, failed });
        });
    }

    fn finish(&mut self, Finished { key, failed }: Finished) {
        self.busy.remove(&key);
        if !failed {
            self.retries.remove(&key);
            return;
        }
        let tries = self.retries.entry(key.clone()).or_default();
        *tries = tries.saturating_add(1);
        let wait = RETRY.saturating_mul(1 << (*tries - 1).min(10)).min(RETRY_MAX);
        self.queue.push(key, Instant::now() + wait);
    }

    /// Conditions that a write turns, as events.
    fn news(&self, write: &Write) -> Vec<(ObjectReference, Event)> {
        macro_rules! of {
            ($kind:expr, $object:expr) => {{
                let name = $object.metadata.name.clone().unwrap_or_default();
                let new = $object.status.as_ref().map(|s| s.conditions.as_slice());
                let old = self.world.conditions($kind, &name);
                let reference = $object.object_ref(&());
                turned(&old, new.unwrap_or_default()).map(|e| (reference.clone(), e)).collect()
            }};
        }
        match write {
            Write::NetworkStatus(o) => of!(Kind::Network, o),
            Write::TenantStatus(o) => of!(Kind::Tenant, o),
            Write::PolicyStatus(o) => of!(Kind::Policy, o),
            Write::ClassStatus(o) => of!(Kind::Class, o),
            _ => Vec::new(),
        }
    }

    fn count(&self) {
        let metrics = &self.parts.metrics;
        metrics.waiting.set(i64::try_from(self.queue.len()).unwrap_or(i64::MAX));
        metrics.leader.set((*self.parts.leader.borrow()).into());
        metrics.synced.set(self.missing.is_empty().into());
        let until = self.world.root_until().unwrap_or(0);
        metrics.root_until.set(i64::try_from(until).unwrap_or(i64::MAX));
        metrics.turned.set(self.now().as_secs_f64());
        for kind in Kind::ALL {
            let count = i64::try_from(self.world.count(kind)).unwrap_or(i64::MAX);
            metrics.objects.get_or_create(&of(kind)).set(count);
        }
    }
}

fn of(kind: Kind) -> OfKind {
    OfKind { kind: kind.name() }
}

/// Conditions whose status is another than it was. What was never said and is well is no news.
fn turned<'a>(old: &'a [Condition], new: &'a [Condition]) -> impl Iterator<Item = Event> + 'a {
    let bad_when_true = ["Conflicted", "OverQuota"];
    new.iter().filter_map(move |new| {
        let warning = new.holds() == bad_when_true.contains(&new.type_.as_str());
        let before = old.iter().find(|old| old.type_ == new.type_);
        let is_news = before.map_or(warning, |before| before.status != new.status);
        is_news.then(|| Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: new.reason.clone(),
            note: Some(new.message.chars().take(NOTE_MAX / 4).collect()),
            action: new.type_.clone(),
            secondary: None,
        })
    })
}

/// The writes of a plan.
struct Writes {
    writer: Writer,
    metrics: Arc<Metrics>,
    recorder: Recorder,
    news: Vec<(ObjectReference, Event)>,
}

impl Writes {
    /// Does them in their order; whether one failed. After a conflict the rest was decided on a
    /// copy that is known to be old.
    async fn all(&self, key: &Key, writes: Vec<Write>) -> bool {
        for write in writes {
            let name = apply::name(&write);
            let result = self.writer.write(write).await;
            let outcome = result.as_ref().map_or("failed", |outcome| outcome.name());
            self.metrics.writes.get_or_create(&Written { write: name, outcome }).inc();
            if !was_done(key, name, result) {
                return true;
            }
        }
        for (reference, event) in &self.news {
            if let Err(error) = self.recorder.publish(event, reference).await {
                tracing::debug!(%error, group = GROUP, "an event is lost");
            }
        }
        false
    }
}

/// Whether a write was done; says what became of it.
///
/// The watch may have brought the change already: after a conflict the key is looked at again
/// rather than waited for.
fn was_done<E: std::fmt::Display>(key: &Key, write: &str, result: Result<Outcome, E>) -> bool {
    match result {
        Ok(Outcome::Done) => {
            tracing::debug!(?key, write, "written");
            true
        }
        Ok(outcome) => {
            tracing::debug!(?key, write, ?outcome, "not written");
            false
        }
        Err(error) => {
            tracing::warn!(?key, write, %error, "a write failed; it is tried again");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use vhost_rdma_cluster_api::{
        NicStatus, NodeNetworkStatus, RdmaNetwork, RdmaNetworkSpec, RdmaNetworkStatus, RdmaNode,
        RdmaNodeSpec, RdmaNodeStatus,
    };

    use super::*;
    use crate::core::{Claim, Object};

    fn key(name: &str) -> Key {
        Key::Node(name.to_owned())
    }

    #[test]
    fn a_key_waits_once_and_for_the_earliest_time() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.push(key("a"), now + Duration::from_secs(5));
        queue.push(key("a"), now + Duration::from_secs(1));
        queue.push(key("a"), now + Duration::from_secs(9));
        queue.push(key("b"), now + Duration::from_secs(2));
        assert_eq!(queue.len(), 2);
        assert_eq!(queue.next(), Some(now + Duration::from_secs(1)));
        assert_eq!(queue.pop(now, |_| true), None);
        let later = now + Duration::from_secs(3);
        assert_eq!(queue.pop(later, |k| *k != key("a")), Some(key("b")));
        assert_eq!(queue.pop(later, |_| true), Some(key("a")));
        assert_eq!(queue.pop(later, |_| true), None);
    }

    #[test]
    fn a_network_that_waits_for_its_number_is_no_sum() {
        let key = Key::Network("blue".to_owned());
        let mut world = World::new(false);
        let mut network = RdmaNetwork::new("blue", RdmaNetworkSpec::default());
        world.apply(Object::Network(network.clone()), Duration::ZERO);
        assert!(!world.is_sum(&key));
        network.status = Some(RdmaNetworkStatus { vni: Some(7), ..RdmaNetworkStatus::default() });
        world.apply(Object::Network(network), Duration::ZERO);
        assert!(world.is_sum(&key));
    }

    /// A report repeats all of a node's networks; only what is new in it concerns their sums, and
    /// whoever waits for their numbers.
    #[test]
    fn a_report_concerns_networks_of_which_it_says_something_new() {
        let mut world = World::new(false);
        let uid = |name: &str| format!("uid-of-{name}");
        for (vni, name) in [(7, "blue"), (8, "red")] {
            let claim = Claim::new(vni, name, &uid(name));
            world.apply(Object::Claim(claim), Duration::ZERO);
        }
        let nic = |pod: &str| NicStatus {
            network: "red".to_owned(),
            pod: pod.to_owned(),
            ..NicStatus::default()
        };
        let mut concerned = |networks: &[&str], nics: &[&str]| -> Vec<Key> {
            let held = |name: &&str| NodeNetworkStatus { uid: uid(name), ..Default::default() };
            let status = RdmaNodeStatus {
                networks: networks.iter().map(held).collect(),
                nics: nics.iter().map(|pod| nic(pod)).collect(),
                ..RdmaNodeStatus::default()
            };
            let mut node = RdmaNode::new("one", RdmaNodeSpec::default());
            node.status = Some(status);
            world.apply(Object::RdmaNode(node), Duration::ZERO);
            let marked = world.take_dirty().into_iter();
            marked.filter(|key| matches!(key, Key::Claim(_) | Key::Network(_))).collect()
        };
        let red = [Key::Network("red".to_owned())];
        concerned(&["blue"], &[]);
        assert_eq!(concerned(&["blue"], &[]), []);
        assert_eq!(concerned(&["blue", "red"], &[]), [Key::Claim(8)]);
        assert_eq!(concerned(&["blue", "red"], &["a"]), red);
        assert_eq!(concerned(&["blue", "red"], &["b"]), red);
        assert_eq!(concerned(&["red"], &["b"]), [Key::Claim(7)]);
        assert_eq!(concerned(&["red"], &[]), red);
    }

    #[test]
    fn only_what_turns_is_news() {
        let ready = Condition::new("Ready", true, "Allocated", "");
        let broken = Condition::new("Ready", false, "VniTaken", "by blue");
        let over = Condition::new("OverQuota", true, "Exceeded", "");
        let events = |old: &[Condition], new: &[Condition]| -> Vec<(bool, String)> {
            turned(old, new).map(|e| (e.type_ == EventType::Warning, e.reason)).collect()
        };
        let one = std::slice::from_ref;
        assert!(events(&[], one(&ready)).is_empty());
        assert!(events(one(&ready), one(&ready)).is_empty());
        assert_eq!(events(one(&ready), one(&broken)), [(true, "VniTaken".to_owned())]);
        assert_eq!(events(one(&broken), one(&ready)), [(false, "Allocated".to_owned())]);
        assert_eq!(events(&[], one(&over)), [(true, "Exceeded".to_owned())]);
    }
}
