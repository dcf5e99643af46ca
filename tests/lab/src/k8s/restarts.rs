//! Ends and beginnings of kubelet, agent and daemon: what runs goes on, nothing is lost, nothing is
//! given twice.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::exec::wait_for;
use crate::k8s::pods::{Pod, Wanted};
use crate::k8s::test::{Bench, COUNT, POOL};
use crate::k8s::{ours, plane};

const WAIT: Duration = Duration::from_secs(120);
/// Pods that are being given their NICs when somebody dies.
const BURST: u32 = 10;

impl Bench<'_> {
    /// Which sessions of theirs the pair has now; the daemon's ends count.
    pub(crate) fn sessions(&self) -> Result<[u64; 2]> {
        let (a, b) = self.pair()?;
        let number = |pod| anyhow::Ok(self.pods.session(pod)?.context("no session")?.number);
        Ok([number(a)?, number(b)?])
    }

    /// The pair has the sessions that it had, and they work; a new pod gets an ID that nobody has.
    pub(crate) fn undisturbed(&self, before: [u64; 2]) -> Result<()> {
        let (a, b) = self.pair()?;
        self.offered(POOL, COUNT)?;
        let now = self.sessions()?;
        ensure!(now == before, "the pair lost sessions: {now:?}, not {before:?}");
        self.counted(a, b)?;
        // A set: the node object shows what the last kubelet offered until the new one has been
        // told, and a pod that comes too early fails.
        let wanted = Wanted::new("new", POOL);
        self.pods.create_set(&wanted, 1)?;
        let new = self.pods.wait_set(&wanted, 1)?;
        self.consistent(&new)?;
        self.counted(new.first().context("no pod")?, a)?;
        self.pods.delete_set("new")?;
        self.consistent(&[])
    }

    /// Starts pods, kills a server when some of them have their NIC and others have not, and starts
    /// it again; then all of them must come to run (a pod that kubelet refused is replaced by its
    /// set), with one ID each.
    fn killed_in_an_allocation(&self, name: &str, start: impl Fn() -> Result<()>) -> Result<()> {
        let wanted = Wanted::new("burst", POOL);
        let sessions = self.sessions()?;
        let victim = self.node.outer_pid(name)?;
        // The daemon's directories, seen from outside: nothing is slower than an allocation here.
        let nics = self.node.path("/run/vhost-rdma/nics");
        let made = || -> Result<usize> {
            Ok(std::fs::read_dir(&nics)?.count().saturating_sub(self.pair.len()))
        };
        self.pods.create_set(&wanted, BURST)?;
        wait_for("the burst's first allocations", WAIT, || Ok((made()? >= 2).then_some(())))?;
        rustix::process::kill_process(victim, rustix::process::Signal::KILL)?;
        let at = made()?;
        wait_for("its end", WAIT, || Ok((!self.node.alive(name)).then_some(())))?;
        start()?;
        let burst = self.pods.wait_set(&wanted, BURST as usize)?;
        self.consistent(&burst)?;
        let (a, _) = self.pair()?;
        self.counted(burst.first().context("no pod")?, a)?;
        self.pods.delete_set("burst")?;
        self.consistent(&[])?;
        eprintln!("    {name} was killed after {at} of {BURST} allocations");
        ensure!(at < BURST as usize, "{name} was killed too late to show anything");
        self.undisturbed(sessions)
    }

    pub(crate) fn restart_kubelet(&self, signal: &str) -> Result<()> {
        self.node.kill("kubelet", signal)?;
        plane::start_kubelet(self.node)
    }
}

pub(crate) fn kubelet_term(bench: &mut Bench<'_>) -> Result<()> {
    let sessions = bench.sessions()?;
    bench.restart_kubelet("TERM")?;
    bench.undisturbed(sessions)
}

pub(crate) fn kubelet_kill(bench: &mut Bench<'_>) -> Result<()> {
    bench.killed_in_an_allocation("kubelet", || plane::start_kubelet(bench.node))
}

pub(crate) fn agent_term(bench: &mut Bench<'_>) -> Result<()> {
    let sessions = bench.sessions()?;
    bench.node.kill(ours::AGENT, "TERM")?;
    ours::start_agent(bench.node)?;
    bench.undisturbed(sessions)
}

pub(crate) fn agent_kill(bench: &mut Bench<'_>) -> Result<()> {
    bench.killed_in_an_allocation(ours::AGENT, || ours::start_agent(bench.node))
}

/// What must be the same before and after the daemon's death.
pub(crate) fn identity(bench: &Bench<'_>, pod: &Pod) -> Result<Vec<String>> {
    let nic = ours::nic(bench.node, &pod.id)?;
    let container = bench.pods.kubectl.run(&[
        "get",
        "pod",
        &pod.name,
        "-o",
        "jsonpath={.status.containerStatuses[0].containerID} \
         {.status.containerStatuses[0].restartCount}",
    ])?;
    let said = ["name", "mac", "addresses", "socket", "network"]
        .map(|key| nic.get(key).map(ToString::to_string).unwrap_or_default());
    Ok(said.into_iter().chain([container, pod.id.clone()]).collect())
}

pub(crate) fn daemon_kill(bench: &mut Bench<'_>) -> Result<()> {
    let (a, b) = bench.pair()?;
    let before = [identity(bench, a)?, identity(bench, b)?];
    bench.counted(a, b)?;
    let old = [bench.pods.wait_session(a, 1)?, bench.pods.wait_session(b, 1)?];
    bench.node.kill(ours::DAEMON, "KILL")?;
    ours::start_daemon(bench.node)?;
    let new = [bench.pods.wait_session(a, 2)?, bench.pods.wait_session(b, 2)?];
    ensure!([identity(bench, a)?, identity(bench, b)?] == before, "identities changed: {before:?}");
    bench.counted(a, b)?;
    let newer = bench.pods.wait_session(a, 2)?;
    for (old, new) in old.iter().zip(&new) {
        ensure!(old.mac == new.mac, "the MAC address changed: {old:?}, {new:?}");
    }
    ensure!(old[0].qpn != newer.qpn, "the guest goes on with its old QP {}", newer.qpn);
    bench.consistent(&[])?;
    bench.offered(POOL, COUNT)
}

/// QEMU's generic vhost-user device never connects again: its pod's ID goes Unhealthy, an Event
/// says so, and a recreated pod works.
pub(crate) fn stuck_vmm(bench: &mut Bench<'_>) -> Result<()> {
    let wanted = Wanted { args: &["--no-reconnect"], ..Wanted::new("stuck", POOL) };
    let stuck = bench.pods.start(&wanted)?;
    let (a, b) = bench.pair()?;
    // At once: the agent, which looks every two seconds, need not have seen the session.
    let numbers =
        [bench.pods.session(a)?, bench.pods.session(b)?].map(|s| s.map_or(0, |s| s.number));
    bench.node.kill(ours::DAEMON, "KILL")?;
    ours::start_daemon(bench.node)?;
    bench.pods.wait_session(a, numbers[0] + 1)?;
    bench.pods.wait_session(b, numbers[1] + 1)?;
    bench.offered(POOL, COUNT - 1)?;
    let event = bench.pods.kubectl.wait_event("NicUnhealthy", "stuck")?;
    ensure!(event.contains(&stuck.id), "the Event does not name {}: {event}", stuck.id);
    bench.pods.kubectl.delete_pods(&["stuck"])?;
    bench.offered(POOL, COUNT)?;
    let again = bench.pods.start(&wanted)?;
    bench.counted(&again, a)?;
    bench.consistent(std::slice::from_ref(&again))?;
    bench.pods.kubectl.delete_pods(&["stuck"])?;
    bench.consistent(&[])
}
