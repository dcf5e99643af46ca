//! What an allocation costs beside the one `fdatasync` that it cannot do without, and what a start
//! costs with many devices.
//!
//! All are ratios of things measured in turn in one run. The daemon is a table at first, since its
//! time is its own; then it is the real one (`DAEMON`, a program), with its state on tmpfs, where a
//! node has it, and on the same disk as the ledger. The agent's other files are on tmpfs too.
//! `ROWS` is a file for the rows. By `cargo xtask node-bench`.

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
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use daemon::FakeDaemon;
use vhost_rdma_agent::agent::{Agent, Parts, Settings};
use vhost_rdma_agent::config::{Config, KubeletPaths};
use vhost_rdma_agent::daemon::{AdminApi, Daemon};
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

/// Where the ledger is, and where what a reboot may take: `/var/lib` and `/run` of a node.
type Place<'a> = (&'a Path, &'a Path);

type TheAgent<D> = Arc<Agent<D, NodeKubelet>>;

fn start<D: Daemon>((dir, run): Place<'_>, daemon: D, count: usize) -> TheAgent<D> {
    let text = format!("[[pools]]\nname='p'\nkind='vhost-user'\ncount={count}");
    let config = Config::parse(&text, Path::new("bench")).unwrap();
    let settings = Settings {
        dirs: Dirs { cdi: run.join("cdi"), device_info: run.join("devinfo") },
        cni_dir: dir.join("none"),
        socket: dir.join("run/none"),
        settle: 0,
        reclaim: Duration::ZERO,
        rest: Duration::from_secs(10),
        reconnect: Duration::ZERO,
        auto_cdi: false,
        cluster: false,
        channel: None,
        undo: vhost_rdma_agent::agent::Undo::Here,
        start: Duration::ZERO,
        patience: Duration::ZERO,
        own_pod: None,
    };
    let kubelet = NodeKubelet::new(&KubeletPaths::new(dir, None));
    let host = Arc::new(NoHardware);
    let parts = Parts { settings, config, daemon, kubelet, host, events: Events::default() };
    Agent::new(parts, &dir.join("state")).unwrap()
}

async fn ready<D: Daemon>(place: Place<'_>, daemon: D, count: usize) -> TheAgent<D> {
    let text = format!("[[pools]]\nname='p'\nkind='vhost-user'\ncount={count}");
    let agent = start(place, daemon, count);
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
async fn allocate<D: Daemon>(place: Place<'_>, daemon: D) -> (Duration, Duration) {
    let agent = ready(place, daemon, ROUNDS).await;
    let mut file = std::fs::File::create(place.0.join("bare")).unwrap();
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

async fn start_with(place: Place<'_>, count: usize) -> Duration {
    let mut times = Vec::new();
    for _ in 0..15 {
        let begin = Instant::now();
        drop(ready(place, FakeDaemon::new(&place.1.join("nics")), count).await);
        times.push(begin.elapsed());
    }
    median(times)
}

/// The real daemon, until this is dropped.
struct Running(Child);

impl Running {
    /// Starts it in `dir` and waits until it answers.
    async fn start(program: &str, dir: &Path) -> (Self, AdminApi) {
        std::fs::create_dir_all(dir).unwrap();
        let mut cmd = Command::new(program);
        cmd.arg("serve").arg("--runtime-dir").arg(dir).stderr(Stdio::null());
        let running = Self(cmd.spawn().unwrap());
        let api = AdminApi::new(&dir.join("admin.sock"));
        for _ in 0..1000 {
            if api.view().await.is_ok() {
                return (running, api);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the daemon does not answer");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A row with its bound, or without one for what is only told.
fn row(
    name: &str,
    (value, reference): (Duration, Duration),
    target: Option<f64>,
) -> serde_json::Value {
    let ratio = value.as_secs_f64() / reference.as_secs_f64();
    println!("{name}: {value:?} / {reference:?} = {ratio:.2}");
    serde_json::json!({
        "name": name, "ok": target.is_none_or(|target| ratio <= target),
        "value": value.as_secs_f64() * 1e3,
        "reference": reference.as_secs_f64() * 1e3, "ratio": ratio, "unit": "ms",
        "target": target.map_or_else(String::new, |target| format!("<={target}")),
    })
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // A disk: the ledger's cost on a memory file system would be none. A node has the rest in
    // `/run`.
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let at = |name: &str| dir.path().join(name);
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let run = memory.path();
    let mut rows = Vec::new();
    // One record is synced before the answer; files that a reboot may take are not. Three is that
    // one with a disk's bad luck.
    let table = FakeDaemon::new(&run.join("nics"));
    let times = runtime.block_on(allocate((&at("a"), run), table));
    rows.push(row("allocate-per-fsync", times, Some(3.0)));
    if let Ok(program) = std::env::var("DAEMON") {
        // On a disk the daemon replaces its state file for each change: the file and its directory
        // are synced, each with a commit of the file system's journal, and the rename waits for the
        // first of these.
        for (name, state, target) in [
            ("allocate-with-daemon-per-fsync", run.join("daemon"), Some(8.0)),
            ("allocate-with-daemon-on-disk-per-fsync", at("daemon"), None),
        ] {
            let times = runtime.block_on(async {
                let (_running, api) = Running::start(&program, &state).await;
                allocate((&at(name), run), api).await
            });
            rows.push(row(name, times, target));
        }
    }
    let times = runtime.block_on(async {
        (start_with((&at("m"), run), 1000).await, start_with((&at("f"), run), 10).await)
    });
    // A hundred times as many IDs: proportional at worst.
    rows.push(row("start-1000-per-10-devices", times, Some(100.0)));
    if let Ok(file) = std::env::var("ROWS") {
        std::fs::write(file, serde_json::to_vec_pretty(&rows).unwrap()).unwrap();
    }
    // A bound that is not kept is the caller's to judge, and shown: here only what goes wrong is an
    // error.
}
