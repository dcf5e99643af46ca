//! How the daemon is: what it takes of the host, and what it says of itself.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::daemon::Daemon;

/// What the process takes of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Memory of its own in bytes: without what it shares with guests and with its file.
    pub memory: u64,
    /// Open descriptors.
    pub files: usize,
    /// Threads.
    pub threads: usize,
    /// Mappings of files, of guests' memory among them.
    pub mappings: usize,
    /// Mappings of no file: memory of the C library's allocator, stacks, and what guards them.
    pub anonymous: usize,
}

impl Vitals {
    /// The lesser of two, each quantity by itself.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        Self {
            memory: self.memory.min(other.memory),
            files: self.files.min(other.files),
            threads: self.threads.min(other.threads),
            mappings: self.mappings.min(other.mappings),
            anonymous: self.anonymous.min(other.anonymous),
        }
    }
}

/// How the engine's workers have been since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Turns {
    /// How many.
    pub count: f64,
    /// The longest of any worker, in seconds of the worker's own time.
    pub longest: f64,
    /// How many were longer than a millisecond.
    pub long: f64,
    /// The most that a turn of any worker was charged by the engine's cost model, in seconds: no
    /// machine's load changes it.
    pub charged: f64,
    /// For how long a worker has been in its present turn, in seconds.
    pub stalled: f64,
}

/// Kinds of objects that the daemon counts for each NIC.
pub const OBJECTS: [&str; 8] = ["contexts", "pds", "mrs", "mr_bytes", "cqs", "srqs", "qps", "ahs"];

impl Daemon {
    /// What its processes take of the host now.
    pub fn vitals(&self) -> Vitals {
        let read = |pid| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let all: Vec<String> = self.pids().into_iter().map(read).collect();
        let kib = |key: &str| {
            let lines = all.iter().flat_map(|text| text.lines());
            let values = lines.filter_map(|line| line.strip_prefix(key));
            values
                .filter_map(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
                .sum::<u64>()
        };
        let mappings = self.mappings();
        let anonymous = mappings.get(Self::ANONYMOUS).copied().unwrap_or_default();
        Vitals {
            memory: (kib("RssAnon:") + kib("VmPTE:")) * 1024,
            files: self.open_files(),
            threads: self.threads(),
            mappings: mappings.values().sum::<usize>() - anonymous,
            anonymous,
        }
    }

    /// The metrics, by name and labels as they are written.
    pub fn metrics(&self) -> std::io::Result<BTreeMap<String, f64>> {
        let mut stream = UnixStream::connect(self.dir().join("metrics.sock"))?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: daemon\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let rows = body.lines().filter(|line| !line.starts_with('#'));
        let parsed = rows.filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Ok(parsed.collect())
    }

    /// How the workers have been.
    #[track_caller]
    pub fn turns(&self) -> Turns {
        self.turns_where(|_| true)
    }

    /// How the workers of a network's own process have been.
    #[track_caller]
    pub fn turns_of(&self, network: &str) -> Turns {
        let label = format!("network=\"{network}\"");
        self.turns_where(|key| key.contains(&label))
    }

    #[track_caller]
    fn turns_where(&self, wanted: impl Fn(&str) -> bool) -> Turns {
        let mut metrics = self.metrics().expect("the daemon's metrics");
        metrics.retain(|key, _| wanted(key));
        let of = |name: &str| {
            let prefix = format!("vhost_rdma_worker_{name}{{");
            let values = metrics.iter().filter(move |(key, _)| key.starts_with(&prefix));
            values.map(|(_, value)| *value).collect::<Vec<_>>()
        };
        let longest = of("turn_max_seconds");
        assert!(!longest.is_empty(), "the daemon tells nothing of its workers");
        let count = of("turn_seconds_count").iter().sum();
        let is_short = |key: &str| {
            key.starts_with("vhost_rdma_worker_turn_seconds_bucket{")
                && key.contains("le=\"0.001\"")
        };
        let short: f64 = metrics.iter().filter(|(key, _)| is_short(key)).map(|(_, n)| n).sum();
        Turns {
            count,
            long: count - short,
            longest: longest.into_iter().fold(0.0, f64::max),
            charged: of("turn_charged_max_seconds").into_iter().fold(0.0, f64::max),
            stalled: of("stalled_seconds").into_iter().fold(0.0, f64::max),
        }
    }

    /// Objects of all NICs together, by kind.
    #[track_caller]
    pub fn objects(&self) -> BTreeMap<&'static str, u64> {
        let metrics = self.metrics().expect("the daemon's metrics");
        let sum = |kind: &str| {
            let prefix = format!("vhost_rdma_nic_{kind}{{");
            let values = metrics.iter().filter(|(key, _)| key.starts_with(&prefix));
            values.map(|(_, value)| *value as u64).sum()
        };
        OBJECTS.iter().map(|kind| (*kind, sum(kind))).collect()
    }
}
