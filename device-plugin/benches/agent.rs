//! What an allocation costs beside the one `fdatasync` that it cannot do without, and what a start costs with many devices.
//!
//! `cargo bench -p vhost-rdma-agent --bench agent [-- --json FILE]`. Both are ratios of things measured in turn in one run; the daemon is a table, since
//! its time is its own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a benchmark"
)]

#[allow(dead_code, reason = "shared with tests that use more of it")]
#[path = "../tests/node/daemon.rs"]
mod daemon;

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use daemon::FakeDaemon;
use vhost_rdma_agent::agent::{Agent, Parts, Settings};
use vhost_rdma_agent::config::{Config, KubeletPaths};
use vhost_rdma_agent::events::Events;
use vhost_rdma_agent::files::Dirs;
use vhost_rdma_agent::host::{Host, Inventory};
use vhost_rdma_agent::kubelet::NodeKubelet;

/// Rounds of each measurement; the medians are compared.
const ROUNDS: usize = 200;

struct NoHardware;

impl Host for NoHardware {
    fn inventory(&self) -> Result<Inventory, String> {
        Ok(Inventory::default())
    }
}

type TheAgent = Arc<Agent<FakeDaemon, NodeKubelet>>;

fn start(dir: &Path, count: usize) -> TheAgent {
    let text = format!("[[pools]]\nname='p'\nkind='vhost-user'\ncount={count}");
    let config = Config::parse(&text, Path::new("bench")).unwrap();
    let settings = Settings {
        dirs: Dirs { cdi: dir.join("cdi"), device_info: dir.join("devinfo") },
        cni_dir: dir.join("none"),
        socket: dir.join("none"),
        settle: 0,
        reclaim: Duration::ZERO,
        reconnect: Duration::ZERO,
        auto_cdi: false,
    };
    let kubelet = NodeKubelet::new(dir, &KubeletPaths::new(dir, None));
    let daemon = FakeDaemon::new(&dir.join("nics"));
    let host = Arc::new(NoHardware);
    let parts = Parts { settings, config, daemon, kubelet, host, events: Events::default() };
    Agent::new(parts, &dir.join("state")).unwrap()
}

async fn ready(dir: &Path, count: usize) -> TheAgent {
    let text = format!("[[pools]]\nname='p'\nkind='vhost-user'\ncount={count}");
    let agent = start(dir, count);
    agent.configure(Config::parse(&text, Path::new("bench")).unwrap()).await;
    agent.reconcile().await;
    assert_eq!(agent.subscribe("p").unwrap().borrow().len(), count);
    agent
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Allocations and bare syncs of as many bytes, in turn, on one disk.
async fn allocate(dir: &Path) -> (Duration, Duration) {
    let agent = ready(dir, ROUNDS).await;
    let mut file = std::fs::File::create(dir.join("bare")).unwrap();
    let (mut allocations, mut syncs) = (Vec::new(), Vec::new());
    for n in 0..ROUNDS {
        let begin = Instant::now();
        agent.allocate("p", &[vec![format!("p-{n}")]]).await.unwrap();
        allocations.push(begin.elapsed());
        let begin = Instant::now();
        file.write_all(&[b'x'; 200]).unwrap();
        file.sync_data().unwrap();
        syncs.push(begin.elapsed());
    }
    (median(allocations), median(syncs))
}

async fn start_with(dir: &Path, count: usize) -> Duration {
    let mut times = Vec::new();
    for _ in 0..15 {
        let begin = Instant::now();
        drop(ready(dir, count).await);
        times.push(begin.elapsed());
    }
    median(times)
}

fn row(name: &str, value: Duration, reference: Duration, target: f64) -> serde_json::Value {
    let ratio = value.as_secs_f64() / reference.as_secs_f64();
    println!("{name}: {value:?} / {reference:?} = {ratio:.2} (at most {target})");
    serde_json::json!({
        "name": name, "ok": ratio <= target, "value": value.as_secs_f64(),
        "reference": reference.as_secs_f64(), "ratio": ratio, "unit": "s", "target": target,
    })
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // A disk: the ledger's cost on a memory file system would be none.
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let (allocation, sync) = runtime.block_on(allocate(&dir.path().join("a")));
    let (many, few) = runtime.block_on(async {
        (start_with(&dir.path().join("m"), 1000).await, start_with(&dir.path().join("f"), 10).await)
    });
    let rows = [
        row("allocate-per-fsync", allocation, sync, 3.0),
        // A hundred times as many IDs: proportional at worst.
        row("start-1000-per-10-devices", many, few, 100.0),
    ];
    let mut args = std::env::args().skip_while(|arg| arg != "--json").skip(1);
    if let Some(file) = args.next() {
        std::fs::write(file, serde_json::to_vec_pretty(&rows).unwrap()).unwrap();
    }
    assert!(rows.iter().all(|row| row["ok"] == true), "a ratio is beyond its target");
}
