//! An API server, the controller and the played agents on a node, and what is measured of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::Size;
use super::player::{PLAYER, Player, number};
use crate::cache::Cache;
use crate::exec::{Progress, check_interrupt, run_logged, tied, wait_for, workspace};
use crate::k8s::cluster::{self, NAMESPACE};
use crate::k8s::kubectl::Kubectl;
use crate::k8s::node::Node;
use crate::k8s::ours::CONTROLLER;
use crate::k8s::parts::Parts;
use crate::k8s::plane;

const BUILD_WAIT: Duration = Duration::from_secs(1800);
const WAIT: Duration = Duration::from_secs(120);
/// The controller is at rest when it has looked at nothing for so long.
const REST: Duration = Duration::from_secs(3);
const DIR: &str = "/lab/cluster";

/// What happens when nothing changes: writes, and seconds of processor in a second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steady {
    pub(super) writes: f64,
    pub(super) cpu: f64,
}

/// What a change costs: seconds until all have it, writes, seconds of processor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cost {
    pub(super) seconds: f64,
    pub(super) writes: f64,
    pub(super) cpu: f64,
}

/// What a new start costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Restart {
    pub(super) planned: f64,
    pub(super) told: f64,
    pub(super) writes: f64,
    pub(super) cpu: f64,
    /// Lists of peers that were sent as a whole, although nothing had changed in them, and lists
    /// that were known by their digest.
    pub(super) whole: f64,
    pub(super) same: f64,
    /// The most memory that it had, MiB.
    pub(super) most: f64,
}

/// Where the programs are, built.
pub(super) fn build(cache: &Cache, release: bool) -> Result<PathBuf> {
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace()).args(["build", "--locked", "-p", CONTROLLER, "-p", PLAYER]);
    if release {
        cmd.arg("--release");
    }
    let log = cache.log("k8s-scale-build");
    run_logged(&mut cmd, "building controller and played agents", &log, BUILD_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    let dir = target.join(if release { "release" } else { "debug" });
    dir.canonicalize().with_context(|| dir.display().to_string())
}

/// The sums of a page of metrics over the lines that are wanted.
fn sum(page: &str, name: &str, wanted: impl Fn(&str) -> bool) -> f64 {
    let lines = page.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(['{', ' '])) && wanted(line)
    });
    let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
    values.sum()
}

/// A request that the controller may have made, and that changes something; agents write the status
/// of `rdmanodes`, and nobody else does. Renewals of the lease are no writes of this kind.
fn is_write(line: &str) -> bool {
    let has = |key: &str, value: &str| line.contains(&format!("{key}=\"{value}\""));
    let verb = ["POST", "PUT", "PATCH", "APPLY", "DELETE"].iter().any(|verb| has("verb", verb));
    let agents = has("resource", "rdmanodes") && has("subresource", "status");
    let kind = has("group", "vhost-rdma.io")
        || has("resource", "events")
        || ["secrets", "configmaps"].iter().any(|kind| has("resource", kind))
        || (has("resource", "leases") && !has("verb", "PUT"));
    verb && kind && !agents
}

#[derive(Debug)]
pub(super) struct Lab<'a> {
    node: &'a Node,
    player: Player,
}

impl<'a> Lab<'a> {
    pub(super) fn start(
        node: &'a Node,
        parts: &Parts,
        programs: &Path,
        size: Size,
    ) -> Result<Self> {
        plane::start_api(node, parts)?;
        for name in [CONTROLLER, PLAYER] {
            fs::copy(programs.join(name), node.path("/usr/bin").join(name))
                .with_context(|| format!("cannot copy {name}"))?;
        }
        for dir in ["crds/no-cel", "controller"] {
            cluster::copy(dir, node)?;
        }
        let kubectl = Kubectl::new(node);
        let namespace = json!({"name": NAMESPACE});
        kubectl.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": namespace}))?;
        kubectl.run(&["apply", "-k", &format!("{DIR}/crds/no-cel")])?;
        for file in ["rbac", "agent-rbac"] {
            kubectl.run(&["apply", "-f", &format!("{DIR}/controller/{file}.yaml")])?;
        }
        start_controller(node)?;
        let nics = (size.nics / size.nodes).to_string();
        let (group, peers) = (size.group.to_string(), size.peers.to_string());
        let player = Player::start(
            node,
            &[
                "--admin=/lab/pki/admin.kubeconfig",
                "--account=/lab/pki/of-agents.kubeconfig",
                &format!("--nics={nics}"),
                &format!("--group={group}"),
                &format!("--peers={peers}"),
            ],
        )?;
        Ok(Self { node, player })
    }

    /// A page of the controller's metrics.
    fn page(&self) -> Result<String> {
        self.node.check_alive(CONTROLLER)?;
        self.node.sh("busybox wget -q -O - http://127.0.0.1:9747/metrics")
    }

    /// Writes that the API server has counted.
    fn writes(&self) -> Result<f64> {
        let page = Kubectl::new(self.node).run(&["get", "--raw", "/metrics"])?;
        Ok(sum(&page, "apiserver_request_total", is_write))
    }

    /// Seconds of processor that the controller has had, of all its threads.
    fn cpu(&self) -> Result<f64> {
        let pid = self.node.outer_pid(CONTROLLER)?.as_raw_nonzero();
        let mut nanoseconds = 0_u64;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            // One that ends meanwhile had next to nothing: the runtime's threads stay.
            let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
            let first = text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
            nanoseconds += first.context("the kernel counts no time of threads (schedstat)")?;
        }
        Ok(Duration::from_nanos(nanoseconds).as_secs_f64())
    }

    /// The controller's memory, MiB.
    pub(super) fn memory(&self, what: &str) -> Result<f64> {
        let pid = self.node.outer_pid(CONTROLLER)?.as_raw_nonzero();
        let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        Ok(kib.with_context(|| format!("no {what}"))? / 1024.0)
    }

    /// Waits until the controller looks at nothing any more; when that was.
    fn rest(&self) -> Result<Instant> {
        let mut progress = Progress::new("waiting until the controller has nothing to do");
        let begun = Instant::now();
        let (mut since, mut last) = (begun, -1.0);
        while begun.elapsed() < WAIT * 5 {
            check_interrupt()?;
            progress.tick();
            if let Ok(page) = self.page() {
                let plans = sum(&page, "vhost_rdma_controller_plans_total", |_| true);
                let of =
                    |name: &str| sum(&page, &format!("vhost_rdma_controller_{name}"), |_| true);
                let works = of("leader") > 0.0 && of("synced") > 0.0;
                if !works || (plans - last).abs() > 0.5 {
                    (since, last) = (Instant::now(), plans);
                } else if since.elapsed() > REST {
                    progress.done("it has nothing");
                    return Ok(since);
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("the controller finds no rest: see its log")
    }

    /// As many nodes as this: seconds, writes per second.
    pub(super) fn fill(&mut self, nodes: u32) -> Result<(f64, f64)> {
        let mut progress = Progress::new(format!("making it {nodes} nodes"));
        let (begun, before) = (Instant::now(), self.writes()?);
        self.player.ask(&format!("fill {nodes}"))?;
        progress.tick();
        progress.done("all are led");
        let took = self.rest()?.duration_since(begun).as_secs_f64();
        Ok((took, (self.writes()? - before) / took))
    }

    /// What changes left is taken away, so that they find the same at the next size.
    pub(super) fn tidy(&mut self) -> Result<()> {
        let gone = number(&self.player.ask("tidy")?, "gone")?;
        ensure!(gone > 0.0, "no network was there to go");
        self.rest().map(drop)
    }

    /// NICs that agents report.
    pub(super) fn nics(&mut self) -> Result<u64> {
        let counted = self.player.ask("count")?;
        counted.get("nics").and_then(Value::as_u64).context("no count")
    }

    pub(super) fn steady(&self, time: Duration) -> Result<Steady> {
        let (writes, cpu, begun) = (self.writes()?, self.cpu()?, Instant::now());
        while begun.elapsed() < time {
            check_interrupt()?;
            std::thread::sleep(Duration::from_millis(100));
        }
        let took = begun.elapsed().as_secs_f64();
        Ok(Steady { writes: self.writes()? - writes, cpu: (self.cpu()? - cpu) / took })
    }

    pub(super) fn change(&mut self, kind: &str, times: u32, steady: &Steady) -> Result<Cost> {
        let writes = self.writes()?;
        let (cpu, begun) = (self.cpu()?, Instant::now());
        let answer = self.player.ask(&format!("change {kind} {times}"))?;
        let cpu = self.cpu()? - cpu - steady.cpu * begun.elapsed().as_secs_f64();
        let writes = self.writes()? - writes - number(&answer, "own")?;
        let took = answer.get("seconds").and_then(Value::as_array).cloned().unwrap_or_default();
        let mut took: Vec<f64> = took.iter().filter_map(Value::as_f64).collect();
        took.sort_by(f64::total_cmp);
        ensure!(took.len() == times as usize, "{answer}");
        let times = f64::from(times);
        let seconds = took.get(took.len() / 2).copied().context("nothing was changed")?;
        Ok(Cost { seconds, writes: writes / times, cpu: cpu / times })
    }

    /// The controller ends and begins with everything there.
    pub(super) fn restart(&mut self) -> Result<Restart> {
        self.node.kill(CONTROLLER, "TERM")?;
        let (writes, begun) = (self.writes()?, Instant::now());
        start_controller(self.node)?;
        self.player.say("told")?;
        let planned = self.rest()?.duration_since(begun).as_secs_f64();
        let told = number(&self.player.hear()?, "seconds")?;
        let page = self.page()?;
        let updates = |form: &str| {
            let form = format!("form=\"{form}\"");
            sum(&page, "vhost_rdma_controller_peers_updates_total", |line| line.contains(&form))
        };
        Ok(Restart {
            whole: updates("whole"),
            same: updates("same"),
            planned,
            told,
            writes: self.writes()? - writes,
            cpu: self.cpu()?,
            most: self.memory("VmHWM")?,
        })
    }
}

/// With the account and rights of `manifests/controller`. Tokens of an account on a server without
/// the controller manager would name no pod, so its word for the agents' nodes is not asked for.
fn start_controller(node: &Node) -> Result<()> {
    let command = [
        "env",
        "KUBECONFIG=/lab/pki/of-controller.kubeconfig",
        "/usr/bin/vhost-rdma-controller",
        "serve",
        "--identity=lab",
        "--unproven-agents",
    ];
    node.spawn(CONTROLLER, &command)?;
    wait_for("the controller", WAIT, || {
        node.check_alive(CONTROLLER)?;
        std::thread::sleep(Duration::from_millis(50));
        Ok(node.sh("busybox wget -q -O - http://127.0.0.1:9747/readyz").ok())
    })
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::{is_write, sum};

    #[test]
    fn writes_are_those_of_the_controller() {
        let page = "\
apiserver_request_total{code=\"200\",group=\"vhost-rdma.io\",resource=\"rdmanodes\",subresource=\"\",verb=\"PUT\"} 3
apiserver_request_total{code=\"200\",group=\"vhost-rdma.io\",resource=\"rdmanodes\",subresource=\"status\",verb=\"PATCH\"} 50
apiserver_request_total{code=\"200\",group=\"vhost-rdma.io\",resource=\"rdmanetworks\",subresource=\"status\",verb=\"PUT\"} 4
apiserver_request_total{code=\"200\",group=\"vhost-rdma.io\",resource=\"rdmanetworks\",subresource=\"\",verb=\"LIST\"} 60
apiserver_request_total{code=\"201\",group=\"coordination.k8s.io\",resource=\"leases\",subresource=\"\",verb=\"POST\"} 5
apiserver_request_total{code=\"200\",group=\"coordination.k8s.io\",resource=\"leases\",subresource=\"\",verb=\"PUT\"} 70
apiserver_request_total{code=\"201\",group=\"\",resource=\"nodes\",subresource=\"\",verb=\"POST\"} 80
apiserver_request_total_more{group=\"vhost-rdma.io\",resource=\"rdmanodes\",verb=\"PUT\"} 90
";
        assert!((sum(page, "apiserver_request_total", is_write) - 12.0).abs() < 1e-9);
    }
}
