//! `cargo xtask k8s test`: the rows. Each step says what it expects of kubelet, agent, daemon and
//! pods, in that order of trust: what a pod sees counts, then what kubelet and daemon say, then
//! what the agent says of itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cache::Cache;
use crate::exec::{check_interrupt, wait_for};
use crate::k8s::node::{Life, Node};
use crate::k8s::parts::Parts;
use crate::k8s::pods::{Pod, Pods, Wanted, resource};
use crate::k8s::{
    attach, channel, cluster, definitions, huge, manifests, named, ours, plane, processes,
    restarts, rollout, scale, trust, tutorial, vms, whole,
};
use crate::rows::{self, Row};

/// The pool of most pods, and how many NICs it has.
pub(crate) const POOL: &str = "blue";
pub(crate) const COUNT: usize = 24;
/// Another tenant's.
pub(crate) const OTHER: &str = "green";
const WAIT: Duration = Duration::from_secs(120);
const BYTES: u32 = 256 << 10;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Only steps whose name contains this; may be given again
    #[arg(long)]
    pub only: Vec<String>,
    /// Also two VMs in pods, with unmodified programs between them, and `manifests/node`
    #[arg(long, conflicts_with = "brief")]
    pub full: bool,
    /// Nothing is killed: pods do RDMA, one of another network does not, and nothing remains of
    /// them
    #[arg(long)]
    pub brief: bool,
    /// Write the rows here
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// What the steps share.
pub(crate) struct Bench<'a> {
    pub(crate) node: &'a Node,
    pub(crate) parts: &'a Parts,
    pub(crate) cache: &'a Cache,
    pub(crate) pods: Pods<'a>,
    /// Two pods of one network that live through all steps.
    pub(crate) pair: Vec<Pod>,
}

type Step = fn(&mut Bench<'_>) -> Result<()>;

/// How often a step is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// Always: others stand on it.
    First,
    /// Also with `--brief`.
    Brief,
    Usual,
    /// Only with `--full`.
    Full,
}

use When::{Brief, First, Full, Usual};

const STEPS: &[(When, &str, Step)] = &[
    (First, "kubelet registers the pools", |b| b.register()),
    (First, "two restricted pods with a NIC each", |b| b.two_pods()),
    (Brief, "WRITE, READ, SEND between pods", |b| b.rdma()),
    (Brief, "a pod of another network gets nowhere", |b| b.foreign()),
    (Brief, "plain pods with an unmodified perftest", processes::pods),
    (Usual, "kubelet restarted", restarts::kubelet_term),
    (Usual, "kubelet killed in an allocation", restarts::kubelet_kill),
    (Usual, "agent restarted", restarts::agent_term),
    (Usual, "agent killed in an allocation", restarts::agent_kill),
    (Usual, "daemon killed: the guest resumes", restarts::daemon_kill),
    (Usual, "daemon killed: a VMM that does not", restarts::stuck_vmm),
    (Usual, "CNI 0.4.0: ADD and DEL", attach::cni_040),
    (Usual, "CNI 1.0.0: ADD and DEL", attach::cni_100),
    (Usual, "20 pods at once", |b| b.crowd()),
    (Usual, "controller: installed, agent led", cluster::installed),
    (Usual, "controller: pool, NICs, status", cluster::offered),
    (Usual, "controller: a limit by kubectl on a running NIC", cluster::limit),
    (Usual, "controller: another tenant's pod is refused", cluster::foreign),
    (Usual, "controller: a pod too many for the quota", cluster::quota),
    (Usual, "controller: a pod too many is not even made", trust::admission),
    (Usual, "controller: certificates of nodes, another root", trust::certificates),
    (Usual, "controller: each metric of alerts is there", trust::metrics),
    (Usual, "controller: a class for processes", processes::led),
    (Usual, "controller: a NIC with a name", named::named),
    (Usual, "controller: what pods use is not deleted", named::kept),
    (Full, "controller: replaced under traffic", rollout::replaced),
    (Full, "controller: rollout, a node deleted and back", rollout::two_nodes),
    (Usual, "controller: a second node joins and leaves", cluster::second),
    (Usual, "controller: no control plane, agent restarted", cluster::alone),
    (Usual, "controller: a request for a certificate is refused", channel::refused),
    (Usual, "controller: two nodes' certificates and peers", channel::two_nodes),
    (Usual, "controller: the commands of the tutorial", tutorial::followed),
    (Usual, "controller: network deleted, VNI given back", cluster::removed),
    (Full, "controller: 200 nodes with played agents", scale::small),
    (Full, "controller: definitions on a server with CEL", definitions::step),
    (Full, "two pods on huge pages", huge::pods),
    (Full, "VMs in pods: daemon killed", vms::daemon_killed),
    (Full, "VMs in pods: ibv_rc_pingpong, rping", |b| vms::two_vms(b)),
    (Brief, "nothing remains of deleted pods", |b| b.nothing_left()),
    (Full, "manifests: the API server takes them", manifests::checked),
    (Full, "manifests: installed, NICs, rights", manifests::installed),
    (Full, "manifests: upgraded", manifests::upgraded),
    (Full, "manifests: uninstalled", manifests::uninstalled),
    (Full, "manifests: cluster-rnic whole, its pods run", whole::applied),
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let begun = Instant::now();
        let (node, parts) = super::start(cache, &std::process::id().to_string(), Life::Ours)?;
        let mut table = vec![row("cluster and node parts up", &Ok(()), begun.elapsed())];
        let pods = Pods::new(&node);
        let mut bench = Bench { node: &node, parts: &parts, cache, pods, pair: Vec::new() };
        let wanted = |when: When, name: &str| {
            let named = self.only.is_empty() || self.only.iter().any(|o| name.contains(o.as_str()));
            let taken = match when {
                First => return true,
                Brief => true,
                Usual => !self.brief,
                Full => self.full,
            };
            named && taken
        };
        for (_, name, step) in STEPS.iter().filter(|(when, name, _)| wanted(*when, name)) {
            let begun = Instant::now();
            let result = step(&mut bench);
            check_interrupt()?;
            let secs = begun.elapsed().as_secs_f64();
            match &result {
                Ok(()) => eprintln!("    {name}: ok ({secs:.1} s)"),
                Err(e) => {
                    eprintln!("    {name}: FAILED ({secs:.1} s)\n{e:#}\n{}", ours::tails(&node));
                }
            }
            if result.is_err() {
                bench.tidy();
            }
            let stop = result.is_err() && table.len() <= 2;
            table.push(row(name, &result, begun.elapsed()));
            if stop {
                break;
            }
        }
        let good = table.iter().all(|r| r.ok);
        if !good {
            eprintln!("    {}", super::keep_logs(&node));
        }
        let begun = Instant::now();
        let end = node.end();
        if let Err(e) = &end {
            eprintln!("error: {e:#}");
        }
        table.push(row("the cluster's end leaves nothing", &end, begun.elapsed()));
        rows::print_table(&table, "seconds", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|r| r.ok))
    }
}

fn row(name: &str, result: &Result<()>, took: Duration) -> Row {
    Row::timed(name, result.is_ok(), took.as_secs_f64())
}

impl Bench<'_> {
    /// Takes away what a failed step left, so that the next one fails by its own fault only. The
    /// pods that other steps stand on stay: the pair, and the tenant's.
    pub(crate) fn tidy(&self) {
        let [first, _] = cluster::USERS;
        let script = format!(
            "k='kubectl --kubeconfig=/lab/pki/admin.kubeconfig'
$k delete replicasets --all --wait=false
$k get pods -o name | grep -vxE 'pod/(one|two|{first})' | xargs -r $k delete --wait=false"
        );
        let left = || -> Result<()> {
            self.node.sh(&script)?;
            let user = self.pods.kubectl.pod(first)?;
            let user = user.map(|_| self.pods.look(first, Some(cluster::POOL))).transpose()?;
            self.consistent(user.as_slice())
        };
        if let Err(e) = left() {
            eprintln!("    what the step left does not go: {e:#}");
        }
    }

    /// Waits until kubelet offers `count` of a pool.
    pub(crate) fn offered(&self, pool: &str, count: usize) -> Result<()> {
        let mut last = None;
        let outcome = wait_for(&format!("{count} of {pool} to be allocatable"), WAIT, || {
            last = self.pods.kubectl.allocatable(&resource(pool))?;
            if last.as_deref() == Some(count.to_string().as_str()) {
                return Ok(Some(()));
            }
            std::thread::sleep(Duration::from_millis(200));
            Ok(None)
        });
        outcome.with_context(|| format!("the node offers {last:?}"))
    }

    fn register(&mut self) -> Result<()> {
        self.offered(POOL, COUNT)?;
        self.offered(OTHER, 4)
    }

    /// The pods that live through all steps.
    pub(crate) fn pair(&self) -> Result<(&Pod, &Pod)> {
        match self.pair.as_slice() {
            [a, b] => Ok((a, b)),
            _ => anyhow::bail!("the pair of pods is not there"),
        }
    }

    fn two_pods(&mut self) -> Result<()> {
        self.pair = vec![
            self.pods.start(&Wanted::new("one", POOL))?,
            self.pods.start(&Wanted::new("two", POOL))?,
        ];
        for pod in &self.pair {
            self.check_gift(pod)?;
        }
        self.consistent(&[])
    }

    /// Directory, file, environment and what they say of the NIC; and that the pod can do nothing
    /// else with them.
    fn check_gift(&self, pod: &Pod) -> Result<()> {
        let dir = pod.variable(POOL, "DIR")?.to_owned();
        let socket = pod.variable(POOL, "SOCKET")?;
        ensure!(socket == format!("{dir}/vhost.sock"), "the socket is {socket}");
        ensure!(socket.len() <= 107, "no VMM can open {socket}");
        let text = self.pods.kubectl.run(&[
            "exec",
            &pod.name,
            "--",
            "/bin/cat",
            &format!("{dir}/nic.json"),
        ])?;
        let file: Value = serde_json::from_str(&text).context("nic.json")?;
        let nic = ours::nic(self.node, &pod.id)?;
        let mac = nic.get("mac").and_then(Value::as_str).context("no MAC")?;
        for (what, found) in [
            ("MAC", pod.variable(POOL, "MAC")?),
            ("mac", file.get("mac").and_then(Value::as_str).unwrap_or_default()),
            ("session", &self.pods.wait_session(pod, 1)?.mac),
        ] {
            ensure!(found == mac, "{what} is {found}, the daemon says {mac}");
        }
        let says = |key: &str| file.get(key).and_then(Value::as_str);
        ensure!(
            says("socket") == Some(socket),
            "nic.json says of the socket: {:?}",
            says("socket")
        );
        ensure!(
            says("network") == Some(POOL),
            "nic.json says of the network: {:?}",
            says("network")
        );
        let denied = format!(
            "touch {dir}/x 2>/dev/null && echo writable; \
             grep -E '^(CapEff|NoNewPrivs|Uid)' /proc/self/status"
        );
        let text = self.pods.kubectl.run(&["exec", &pod.name, "--", "/bin/sh", "-c", &denied])?;
        let lines: Vec<String> = text
            .lines()
            .map(|l| l.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
            .collect();
        ensure!(
            lines == ["Uid: 1000", "CapEff: 0000000000000000", "NoNewPrivs: 1"],
            "the pod is not restricted: {text}"
        );
        let info = format!(
            "/var/run/k8s.cni.cncf.io/devinfo/dp/vhost-rdma.io-{POOL}-{}-device.json",
            pod.id
        );
        let text = self.node.run(&["cat", &info]).context("device-info file")?;
        let info: Value = serde_json::from_str(&text)?;
        ensure!(info.get("type") == Some(&"vhost-user".into()), "device-info says {info}");
        Ok(())
    }

    /// A transfer whose bytes the daemon's own metrics must confirm, on the NICs that the pods were
    /// given and no others.
    pub(crate) fn counted(&self, from: &Pod, to: &Pod) -> Result<()> {
        let before = ours::bytes(self.node)?;
        let moved = self.pods.transfer(from, to, BYTES)?;
        let after = ours::bytes(self.node)?;
        let grown: BTreeMap<&String, u64> = after
            .iter()
            .map(|(nic, b)| (nic, b.saturating_sub(before.get(nic).copied().unwrap_or_default())))
            .filter(|(_, grown)| *grown > 0)
            .collect();
        // Each byte is sent by one of the two and received by the other.
        let expected: BTreeMap<&String, u64> = [(&from.id, moved), (&to.id, moved)].into();
        ensure!(grown == expected, "the daemon's metrics grew by {grown:?}, not {expected:?}");
        Ok(())
    }

    fn rdma(&mut self) -> Result<()> {
        let (a, b) = self.pair()?;
        self.counted(a, b)?;
        self.counted(b, a)
    }

    fn foreign(&mut self) -> Result<()> {
        let stranger = self.pods.start(&Wanted::new("stranger", OTHER))?;
        let (a, b) = self.pair()?;
        let before = ours::bytes(self.node)?;
        for (from, to) in [(&stranger, a), (a, &stranger)] {
            let refused = self.pods.transfer(from, to, 4096);
            ensure!(refused.is_err(), "{} reached {} of another network", from.name, to.name);
        }
        ensure!(ours::bytes(self.node)? == before, "bytes moved between networks");
        self.counted(a, b)?;
        self.pods.kubectl.delete_pods(&["stranger"])
    }

    /// The IDs that kubelet, agent and daemon hold for pods: they must agree, and be those of the
    /// pair and of `others`, each once.
    pub(crate) fn consistent(&self, others: &[Pod]) -> Result<()> {
        let all: Vec<&Pod> = self.pair.iter().chain(others).collect();
        let ids: BTreeSet<String> = all.iter().map(|p| p.id.clone()).collect();
        ensure!(ids.len() == all.len(), "an ID was given twice: {all:?}");
        let mut last = String::new();
        let outcome = wait_for("kubelet, agent and daemon to agree", WAIT, || {
            let (agent, daemon) = (ours::granted(self.node)?, ours::nics(self.node)?);
            last = format!("pods {ids:?}\nagent {agent:?}\ndaemon {daemon:?}");
            std::thread::sleep(Duration::from_millis(100));
            Ok((agent == ids && daemon == ids).then_some(()))
        });
        outcome.with_context(|| last)?;
        let known = ours::kubelet_checkpoint(self.node)?;
        ensure!(
            ids.iter().all(|id| known.contains(id)),
            "kubelet's checkpoint has {known:?}, pods {ids:?}"
        );
        Ok(())
    }

    fn crowd(&mut self) -> Result<()> {
        let wanted = Wanted::new("crowd", POOL);
        self.pods.create_set(&wanted, 20)?;
        let crowd = self.pods.wait_set(&wanted, 20)?;
        self.consistent(&crowd)?;
        for two in crowd.chunks_exact(2) {
            if let [a, b] = two {
                self.counted(a, b)?;
            }
        }
        self.pods.delete_set("crowd")?;
        self.consistent(&[])
    }

    fn nothing_left(&mut self) -> Result<()> {
        let (a, b) = self.pair()?;
        self.pods.kubectl.delete_pods(&[&a.name, &b.name])?;
        self.pair.clear();
        self.consistent(&[])?;
        let script = "ls /run/vhost-rdma/nics /run/netns /var/run/k8s.cni.cncf.io/devinfo/dp \
            2>/dev/null | grep -v ':$' | grep . || true
ip -o link | grep -E 'veth|vr' || true
ctr -n k8s.io task ls -q";
        wait_for("directories, namespaces and interfaces to go", WAIT, || {
            let left = self.node.sh(script)?;
            std::thread::sleep(Duration::from_millis(200));
            Ok(left.trim().is_empty().then_some(()))
        })
        .with_context(|| format!("left: {}", self.node.sh(script).unwrap_or_default()))?;
        self.offered(POOL, COUNT)?;
        plane::healthy(self.node)
    }
}
