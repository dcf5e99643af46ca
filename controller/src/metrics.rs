//! Numbers for Prometheus. No label has a value that a user chooses.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Which loop a plan was of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Loop {
    /// Its name.
    pub r#loop: &'static str,
}

/// What was written, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Written {
    /// Which write.
    pub write: &'static str,
    /// `done`, `conflict`, `guarded`, `failed`.
    pub outcome: &'static str,
}

/// Which kind of object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OfKind {
    /// Its name.
    pub kind: &'static str,
}

/// What was said of pods.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Verdict {
    /// `admitted`, `refused`, `failed`.
    pub verdict: &'static str,
}

/// In which form peers were told.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Form {
    /// `whole` or `delta`.
    pub form: &'static str,
}

/// All of them.
#[derive(Debug)]
pub struct Metrics {
    /// Plans that were made.
    pub plans: Family<Loop, Counter>,
    /// Writes.
    pub writes: Family<Written, Counter>,
    /// Seconds from a plan to the end of its writes.
    pub seconds: Histogram,
    /// Watches that broke.
    pub breaks: Family<OfKind, Counter>,
    /// Objects in the copy.
    pub objects: Family<OfKind, Gauge>,
    /// Keys that wait.
    pub waiting: Gauge,
    /// 1 if this replica writes.
    pub leader: Gauge,
    /// 1 if the copy is complete.
    pub synced: Gauge,
    /// When the root that signs ends, seconds since 1970.
    pub root_until: Gauge,
    /// Pods that the API server asked about.
    pub admissions: Family<Verdict, Counter>,
    /// Agents that follow where addresses are.
    pub peers_clients: Gauge,
    /// Lists that were sent to them, and changes of lists.
    pub peers_updates: Family<Form, Counter>,
    /// Agents that were left because they did not read.
    pub peers_slow: Counter,
    /// When the engine last turned, seconds since the process started.
    pub turned: Gauge<f64, AtomicU64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let new = Self {
            plans: Family::default(),
            writes: Family::default(),
            seconds: Histogram::new([0.005, 0.02, 0.1, 0.5, 2.0, 10.0]),
            breaks: Family::default(),
            objects: Family::default(),
            waiting: Gauge::default(),
            leader: Gauge::default(),
            synced: Gauge::default(),
            root_until: Gauge::default(),
            admissions: Family::default(),
            peers_clients: Gauge::default(),
            peers_updates: Family::default(),
            peers_slow: Counter::default(),
            turned: Gauge::default(),
        };
        // A rate of what never happened is zero and not unknown.
        for verdict in ["admitted", "refused", "failed"] {
            let _ = new.admissions.get_or_create(&Verdict { verdict });
        }
        for form in ["whole", "delta", "same"] {
            let _ = new.peers_updates.get_or_create(&Form { form });
        }
        new
    }
}

impl Metrics {
    /// A registry that shows them.
    #[must_use]
    pub fn registry(&self) -> Registry {
        let mut all = Registry::with_prefix("vhost_rdma_controller");
        all.register("plans", "Plans that were made", self.plans.clone());
        all.register("writes", "Writes to the API server", self.writes.clone());
        all.register(
            "write_seconds",
            "Seconds from a plan to the end of its writes",
            self.seconds.clone(),
        );
        all.register("watch_breaks", "Watches that broke and began anew", self.breaks.clone());
        all.register("objects", "Objects in the copy of the cluster", self.objects.clone());
        all.register("waiting", "Objects that wait to be looked at", self.waiting.clone());
        all.register("leader", "1 if this replica writes", self.leader.clone());
        all.register("synced", "1 if the copy of the cluster is complete", self.synced.clone());
        all.register(
            "root_expiry_timestamp_seconds",
            "When the root that signs nodes' certificates ends, since 1970; 0 if there is none",
            self.root_until.clone(),
        );
        all.register("admissions", "Pods that the API server asked about", self.admissions.clone());
        all.register(
            "peers_clients",
            "Agents that follow where addresses are",
            self.peers_clients.clone(),
        );
        all.register(
            "peers_updates",
            "Lists of peers that were sent, and changes of them",
            self.peers_updates.clone(),
        );
        all.register(
            "peers_slow",
            "Agents that were left because they did not read",
            self.peers_slow.clone(),
        );
        all.register(
            "turned_seconds",
            "When the engine last turned, since the process started",
            self.turned.clone(),
        );
        all
    }
}
