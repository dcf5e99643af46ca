//! Metrics for Prometheus: read from the counters of NICs and workers at each scrape, nothing is
//! counted twice or kept.
//!
//! Labels are NIC, network and the number of a worker only, so there are as many series as the
//! operator made NICs; nothing that a guest chooses (QPN, GID, process) ever becomes a label.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::daemon::{Daemon, NicView};
use crate::node::{Backend, MemoryStatus, ProcessStatus, Session, WorkerStatus};

/// Where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// TCP.
    Inet(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        text.parse().map(Self::Inet).map_err(|_| {
            format!(
                "{text:?} is not a metrics address: write IP:PORT such as 127.0.0.1:9745, or \
                 unix:PATH"
            )
        })
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inet(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Reads every NIC at a scrape.
struct NicCollector<B>(Arc<Daemon<B>>);

impl<B> fmt::Debug for NicCollector<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NicCollector")
    }
}

type Read = fn(&NicView) -> u64;

const COUNTERS: [(&str, &str, Read); 13] = [
    ("tx_bytes", "Payload bytes sent", |nic| nic.status.counters.tx_bytes),
    ("rx_bytes", "Payload bytes received", |nic| nic.status.counters.rx_bytes),
    ("tx_messages", "Messages sent", |nic| nic.status.counters.tx_messages),
    ("rx_messages", "Messages received", |nic| nic.status.counters.rx_messages),
    ("rnr_naks", "Receiver-not-ready NAKs sent", |nic| nic.status.counters.rnr_naks),
    ("retries", "Requests tried again", |nic| nic.status.counters.retries),
    ("access_errors", "Requests refused for a key, range or access flag", |nic| {
        nic.status.counters.access_errors
    }),
    ("control_commands", "Commands on the control queue", |nic| {
        nic.status.counters.control_commands
    }),
    ("kicks", "Kicks received from the guest", |nic| nic.status.counters.kicks),
    ("events", "Events put into the guest's buffers", |nic| nic.status.counters.events),
    ("completions", "Completions written", |nic| nic.status.counters.completions),
    ("page_faults", "Pages missing when the worker touched them for the NIC, by samples", |nic| {
        nic.status.counters.page_faults
    }),
    ("moves", "Moves to another worker of its network", |nic| nic.status.counters.moves),
];

const GAUGES: [(&str, &str, Read); 16] = [
    ("contexts", "Contexts that the guest holds", |nic| nic.status.objects.contexts.into()),
    ("pds", "Protection domains that the guest holds", |nic| nic.status.objects.pds.into()),
    ("mrs", "Memory regions that the guest holds", |nic| nic.status.objects.mrs.into()),
    ("mr_bytes", "Bytes that the guest has registered", |nic| nic.status.objects.mr_bytes),
    ("cqs", "Completion queues that the guest holds", |nic| nic.status.objects.cqs.into()),
    ("srqs", "Shared receive queues that the guest holds", |nic| nic.status.objects.srqs.into()),
    ("qps", "Queue pairs that the guest holds", |nic| nic.status.objects.qps.into()),
    ("ahs", "Address handles that the guest holds", |nic| nic.status.objects.ahs.into()),
    ("qps_limit", "Queue pairs that the guest may hold", |nic| nic.config.limits.max_qps.into()),
    ("mr_bytes_limit", "Bytes that the guest may register", |nic| nic.config.limits.max_mr_bytes),
    ("kept_bytes", "Bytes of its own memory that the daemon keeps for the guest", |nic| {
        nic.status.objects.kept_bytes
    }),
    ("kept_bytes_limit", "Bytes that the daemon may keep for the guest", |nic| {
        nic.config.limits.max_kept_bytes
    }),
    ("connected", "1 while a VMM is connected", |nic| {
        u64::from(matches!(nic.status.session, Session::Connected | Session::DriverReady))
    }),
    ("driver_ready", "1 while the guest driver is ready", |nic| {
        u64::from(nic.status.session == Session::DriverReady)
    }),
    ("failed", "1 if the device stopped after a fault", |nic| {
        u64::from(nic.status.session == Session::Failed)
    }),
    ("worker", "Number of the worker that serves the NIC, of those of its process", |nic| {
        nic.status.worker.into()
    }),
];

impl<B: Backend> Collector for NicCollector<B> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let nics = self.0.nics(None).unwrap_or_default();
        let label = |nic: &NicView| {
            [("nic", nic.config.name.clone()), ("network", nic.config.network.clone())]
        };
        for (name, help, read) in COUNTERS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for nic in &nics {
                ConstCounter::new(read(nic)).encode(metric.encode_family(&label(nic))?)?;
            }
        }
        for (name, help, read) in GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for nic in &nics {
                // OpenMetrics gauges are signed here; no count comes near 2^63.
                let value = i64::try_from(read(nic)).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(metric.encode_family(&label(nic))?)?;
            }
        }
        Ok(())
    }
}

/// Reads every worker at a scrape. Whoever watches these knows whether a guest holds others up.
struct WorkerCollector<B>(Arc<Daemon<B>>);

impl<B> fmt::Debug for WorkerCollector<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerCollector")
    }
}

type Measure = fn(&WorkerStatus) -> f64;

const WORKER_GAUGES: [(&str, &str, Measure); 3] = [
    (
        "turn_max_seconds",
        "The longest turn since the start, without the wait for a processor",
        |worker| worker.longest,
    ),
    (
        "turn_charged_max_seconds",
        "The most that a turn since the start was charged, by the engine's cost model",
        |worker| worker.charged,
    ),
    ("stalled_seconds", "For how long the present turn has lasted", |worker| worker.stalled),
];

impl<B: Backend> Collector for WorkerCollector<B> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let workers = self.0.workers();
        // Numbers begin anew in each process, so that no network's series moves when another comes.
        let number = |index: usize, network: &str| {
            workers[..index].iter().filter(|before| before.network == network).count()
        };
        let label = |index: usize| {
            let network = &workers[index].network;
            [("network", network.clone()), ("worker", number(index, network).to_string())]
        };
        let mut turns = encoder.encode_descriptor(
            "turn_seconds",
            "Turns of a worker, without the wait for a processor: what one guest can make another \
             wait",
            None,
            MetricType::Histogram,
        )?;
        for (index, worker) in workers.iter().enumerate() {
            let count = worker.turns.iter().map(|(_, turns)| turns).sum();
            let finite = |&(bound, turns): &(f64, u64)| (bound.min(f64::MAX), turns);
            let buckets: Vec<_> = worker.turns.iter().map(finite).collect();
            turns.encode_family(&label(index))?.encode_histogram::<NoLabelSet>(
                worker.busy,
                count,
                &buckets,
                None,
            )?;
        }
        for (name, help, read) in WORKER_GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (index, worker) in workers.iter().enumerate() {
                ConstGauge::new(read(worker)).encode(metric.encode_family(&label(index))?)?;
            }
        }
        Ok(())
    }
}

/// Reads the process of every network at a scrape.
struct ProcessCollector<B>(Arc<Daemon<B>>);

impl<B> fmt::Debug for ProcessCollector<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProcessCollector")
    }
}

type Glance = fn(&ProcessStatus) -> i64;

const PROCESS_GAUGES: [(&str, &str, Glance); 2] = [
    ("up", "1 while a process serves the network", |process| i64::from(process.pid.is_some())),
    ("failing", "1 while the network's processes die again and again", |process| {
        i64::from(process.failing)
    }),
];

type Figure = fn(&MemoryStatus) -> Option<u64>;

/// Of processes that have a cgroup.
const MEMORY: [(&str, &str, MetricType, Figure); 3] = [
    ("memory_bytes", "Memory of the network's process", MetricType::Gauge, |memory| {
        Some(memory.now)
    }),
    ("memory_max_bytes", "What the network's process may have", MetricType::Gauge, |memory| {
        memory.max
    }),
    (
        "memory_kills",
        "Processes of the network that the memory killer has ended",
        MetricType::Counter,
        |memory| Some(memory.kills),
    ),
];

impl<B: Backend> Collector for ProcessCollector<B> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let processes = self.0.processes();
        let label = |process: &ProcessStatus| [("network", process.network.clone())];
        let help = "Processes of the network that have died, without being asked to";
        let mut deaths = encoder.encode_descriptor("deaths", help, None, MetricType::Counter)?;
        for process in &processes {
            let counter = ConstCounter::new(process.deaths);
            counter.encode(deaths.encode_family(&label(process))?)?;
        }
        for (name, help, read) in PROCESS_GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for process in &processes {
                ConstGauge::new(read(process)).encode(metric.encode_family(&label(process))?)?;
            }
        }
        for (name, help, kind, read) in MEMORY {
            let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
            for process in &processes {
                let Some(value) = process.memory.as_ref().and_then(read) else { continue };
                let labels = label(process);
                let family = metric.encode_family(&labels)?;
                match kind {
                    MetricType::Counter => ConstCounter::new(value).encode(family)?,
                    _ => {
                        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(family)?;
                    }
                }
            }
        }
        Ok(())
    }
}

pub(super) fn registry<B: Backend>(daemon: Arc<Daemon<B>>) -> Arc<Registry> {
    let mut registry = Registry::with_prefix("vhost_rdma");
    registry
        .sub_registry_with_prefix("nic")
        .register_collector(Box::new(NicCollector(Arc::clone(&daemon))));
    registry
        .sub_registry_with_prefix("worker")
        .register_collector(Box::new(WorkerCollector(Arc::clone(&daemon))));
    registry
        .sub_registry_with_prefix("process")
        .register_collector(Box::new(ProcessCollector(daemon)));
    Arc::new(registry)
}
