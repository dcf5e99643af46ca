//! Benchmarks of the whole stack without a VM.
//!
//! A figure is worth something only beside a reference that ran in the same minute on the same
//! cores, so every row is a *ratio* of two measurements that alternate within one run: RDMA and
//! memcpy, RDMA and a spin hand-off, a control command and an empty vhost-user round trip. Many
//! short samples are taken; the best of each half is the row, since on a shared machine the others
//! measure the neighbours, and the spread tells how much to believe it. Throughput is counted per
//! second of *processor time*, of the engine's worker or of the thread that copies: on a quiet
//! machine that is the time on the wall, and elsewhere it is what a core of one's own would do (the
//! worker's spinning counts against it).

mod cores;
mod data;
mod echo;
pub mod isolation;
mod latency;
mod nics;
mod null_rnic;
mod report;
mod restart;
mod scale;
mod shards;

pub use echo::serve as serve_echo;
pub use report::{Better, Row, Target};

use std::time::Duration;

use restart::How;
use scale::Cost;

use crate::world::World;

/// A world whose daemon has a core of its own, where there are two.
fn world() -> World {
    let world = World::new();
    cores::Cores::get().device_process(&world.daemon.pids());
    world
}

/// Descriptors for a thousand guests and their daemon.
const DESCRIPTORS: u64 = 1 << 17;

/// Lets this process, and the daemons that it starts, have as many descriptors as the largest rows
/// need. Who may not finds out at those rows.
pub fn allow_descriptors() {
    let limit = rustix::process::Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    let _refused = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
}

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Samples of each row.
    pub samples: usize,
    /// How long each half of a sample lasts.
    pub slice: Duration,
    /// How long an idle daemon is watched.
    pub idle: Duration,
}

impl Effort {
    /// What a report is made from.
    pub const FULL: Self =
        Self { samples: 10, slice: Duration::from_millis(150), idle: Duration::from_secs(10) };
    /// What shows that everything runs.
    pub const QUICK: Self =
        Self { samples: 3, slice: Duration::from_millis(60), idle: Duration::from_secs(3) };
}

/// A benchmark: the name of its row and what makes it.
#[derive(Debug, Clone, Copy)]
pub struct Benchmark {
    /// The row's name.
    pub name: &'static str,
    run: fn(&str, Effort) -> Row,
}

impl Benchmark {
    const fn new(name: &'static str, run: fn(&str, Effort) -> Row) -> Self {
        Self { name, run }
    }

    /// Measures. A panic in a scene (a completion that does not come, a daemon that ends) is a row
    /// that says so.
    pub fn run(&self, effort: Effort) -> Row {
        let (name, run) = (self.name, self.run);
        cores::Cores::get().guest();
        std::panic::catch_unwind(move || run(name, effort))
            .unwrap_or_else(|cause| Row::failed(name, &report::panic_text(cause.as_ref())))
    }
}

/// All benchmarks, in the order of the report.
pub const ALL: &[Benchmark] = &[
    Benchmark::new("write_bw_64k", |n, e| data::bandwidth(n, data::Verb::Write, 64 << 10, e)),
    Benchmark::new("write_bw_256k", |n, e| data::bandwidth(n, data::Verb::Write, 256 << 10, e)),
    Benchmark::new("write_bw_1m", |n, e| data::bandwidth(n, data::Verb::Write, 1 << 20, e)),
    Benchmark::new("read_bw_64k", |n, e| data::bandwidth(n, data::Verb::Read, 64 << 10, e)),
    Benchmark::new("read_bw_256k", |n, e| data::bandwidth(n, data::Verb::Read, 256 << 10, e)),
    Benchmark::new("read_bw_1m", |n, e| data::bandwidth(n, data::Verb::Read, 1 << 20, e)),
    Benchmark::new("send_bw_64k", |n, e| data::bandwidth(n, data::Verb::Send, 64 << 10, e)),
    Benchmark::new("send_bw_256k", |n, e| data::bandwidth(n, data::Verb::Send, 256 << 10, e)),
    Benchmark::new("send_bw_1m", |n, e| data::bandwidth(n, data::Verb::Send, 1 << 20, e)),
    Benchmark::new("write_bw_4k", |n, e| data::bandwidth(n, data::Verb::Write, 4 << 10, e)),
    Benchmark::new("read_bw_4k", |n, e| data::bandwidth(n, data::Verb::Read, 4 << 10, e)),
    Benchmark::new("send_bw_4k", |n, e| data::bandwidth(n, data::Verb::Send, 4 << 10, e)),
    Benchmark::new("write_rate_8", |n, e| data::rate(n, 8, e)),
    Benchmark::new("write_rate_64", |n, e| data::rate(n, 64, e)),
    Benchmark::new("rnic_wr_unsignaled", |n, e| null_rnic::work(n, data::BATCH, e)),
    Benchmark::new("rnic_wr_signaled", |n, e| null_rnic::work(n, 1, e)),
    Benchmark::new("polled_rtt", latency::polled),
    Benchmark::new("event_rtt", latency::event),
    Benchmark::new("event_cpu", latency::event_cpu),
    Benchmark::new("control_pd", latency::control_pd),
    Benchmark::new("control_mr_4k", latency::control_mr),
    Benchmark::new("control_qp_to_rts", latency::control_qp),
    Benchmark::new("idle_context_switches", latency::idle),
    Benchmark::new("rtt_nics_100", |n, e| scale::beside_nics(n, (100, Cost::RoundTrip), e)),
    Benchmark::new("rtt_nics_1000", |n, e| scale::beside_nics(n, (1000, Cost::RoundTrip), e)),
    Benchmark::new("wr_nics_100", |n, e| scale::beside_nics(n, (100, Cost::Request), e)),
    Benchmark::new("wr_nics_1000", |n, e| scale::beside_nics(n, (1000, Cost::Request), e)),
    Benchmark::new("rtt_nics_1000_post", |n, e| scale::beside_posts(n, 1000, e)),
    Benchmark::new("rtt_contexts_100", |n, e| scale::contexts(n, (100, Cost::RoundTrip), e)),
    Benchmark::new("wr_contexts_100", |n, e| scale::contexts(n, (100, Cost::Request), e)),
    Benchmark::new("wr_qps_100", |n, e| scale::queue_pairs(n, 100, e)),
    Benchmark::new("wr_qps_1000", |n, e| scale::queue_pairs(n, 1000, e)),
    Benchmark::new("wr_qps_10000", |n, e| scale::queue_pairs(n, 10_000, e)),
    Benchmark::new("rtt_qps_100", |n, e| scale::queue_pair_trips(n, 100, e)),
    Benchmark::new("rtt_qps_10000", |n, e| scale::queue_pair_trips(n, 10_000, e)),
    Benchmark::new("rtt_mrs_100000", |n, e| scale::region_trips(n, 100_000, e)),
    Benchmark::new("wr_mrs_100000", |n, e| scale::regions(n, 100_000, e)),
    Benchmark::new("wr_sge", scale::elements),
    Benchmark::new("shards_bw_64k", |n, e| shards::two_by_one(n, 64 << 10, e)),
    Benchmark::new("shards_rate_8", |n, e| shards::two_by_one(n, 8, e)),
    Benchmark::new("nic_memory", nics::memory),
    Benchmark::new("nic_threads", nics::threads),
    Benchmark::new("nic_descriptors", nics::descriptors),
    Benchmark::new("connect_nics_400", |n, e| nics::connect(n, 400, e)),
    Benchmark::new("nic_add_1000", |n, e| nics::add(n, 1000, e)),
    Benchmark::new("start_nics_1000", |n, e| nics::start(n, 1000, e)),
    Benchmark::new("restart_pause", |n, e| restart::pause(n, How::Restart, 1000, e)),
    Benchmark::new("upgrade_pause", |n, e| restart::pause(n, How::Upgrade, 1000, e)),
];
