//! What a cluster does on a usual day: another controller takes over under traffic; a class changes
//! in what is fixed when a NIC is made, and pods are moved for it, one node at a time; a quota
//! shrinks, and nobody is moved for that; a node's object is deleted and comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::exec::wait_for;
use crate::k8s::cluster::{self, ADDRESSED, POOL, USERS, ours_is};
use crate::k8s::node::{Life, Node};
use crate::k8s::ours;
use crate::k8s::plane;
use crate::k8s::pods::{Pod, Pods, Wanted, resource};
use crate::k8s::test::Bench;

const WAIT: Duration = Duration::from_secs(120);
const ROSE: &str = "rose";
/// Pods of each node, in a set of its own.
const SETS: [(&str, &str); 2] = [("r-one", "node1"), ("r-two", "node2")];
const REPLICAS: u32 = 2;
const EACH: usize = REPLICAS as usize;
/// How often the controller is replaced.
const TIMES: u32 = 4;

fn pause() {
    std::thread::sleep(Duration::from_millis(200));
}

/// Does something while two pods transfer to each other without a pause; what it gave, and how many
/// transfers there were, none of which failed.
pub(crate) fn under_traffic<T>(
    pods: Pods<'_>,
    [here, there]: [&Pod; 2],
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, u32)> {
    let stop = AtomicBool::new(false);
    let over = &stop;
    std::thread::scope(|scope| {
        let traffic = scope.spawn(move || -> Result<u32> {
            let mut times = 0;
            while !over.load(Ordering::Relaxed) {
                let (from, to) = if times % 2 == 0 { (here, there) } else { (there, here) };
                pods.transfer(from, to, 64 << 10)
                    .with_context(|| format!("transfer {times} failed"))?;
                times += 1;
            }
            Ok(times)
        });
        let done = work();
        over.store(true, Ordering::Relaxed);
        let times = traffic.join().unwrap_or_else(|_| bail!("the traffic's thread ended"))?;
        Ok((done?, times))
    })
}

/// Controllers come and go, by a signal and by a kill, while two pods transfer without a pause; no
/// request fails, no session is lost, and the one that is there works.
pub(crate) fn replaced(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let here = bench.pods.look(USERS[0], Some(POOL))?;
    let there = bench.pods.start(&Wanted::new(USERS[1], POOL))?;
    // Each transfer has a QP of its own.
    let number = |pod: &Pod| -> Result<Option<u64>> {
        Ok(bench.pods.session(pod)?.map(|session| session.number))
    };
    let before = [number(&here)?, number(&there)?];
    let ((), outcome) = under_traffic(bench.pods, [&here, &there], || {
        (0..TIMES).try_for_each(|time| {
            let signal = if time % 2 == 0 { "TERM" } else { "KILL" };
            bench.node.kill(ours::CONTROLLER, signal)?;
            cluster::start_controller(bench)?;
            // It leads, which after a kill takes until the lease is old.
            let qps = 40 + u64::from(time);
            let patch = json!({"spec": {"limits": {"maxQps": qps}}}).to_string();
            kubectl.run(&["patch", "rdmanicclass", "lab", "--type=merge", "-p", &patch])?;
            wait_for("the new controller's word on the NIC", WAIT, || {
                pause();
                let nic = ours::nic(bench.node, &here.id)?;
                let now = nic.pointer("/limits/max_qps").and_then(Value::as_u64);
                Ok((now == Some(qps)).then_some(()))
            })
        })
    })?;
    eprintln!("    {TIMES} controllers in turn, {outcome} transfers, none failed");
    ensure!(outcome > TIMES, "{outcome} transfers are no traffic");
    let after = [number(&here)?, number(&there)?];
    ensure!(before == after, "sessions were lost: {before:?} {after:?}");
    kubectl.delete_pods(&[USERS[1]])?;
    cluster::reported(bench, &[USERS[0].to_owned()])
}

fn set(name: &str, node: &str) -> Value {
    let mut set = Wanted::new(name, ROSE).replica_set(REPLICAS);
    set["spec"]["template"]["spec"]["nodeName"] = node.into();
    set
}

fn class(mode: &str) -> Value {
    let spec = json!({"socket": {"owner": 1000, "group": 1000, "mode": mode}});
    ours_is("RdmaNicClass", ROSE, &spec)
}

fn tenant(quota: Option<u32>) -> Value {
    let mut tenant = cluster::tenant(quota);
    tenant["spec"]["networks"] = json!([POOL, ADDRESSED, ROSE]);
    tenant
}

/// UIDs of a set's pods that run and that nobody deletes.
fn running(bench: &Bench<'_>, set: &str) -> Result<BTreeSet<String>> {
    let list = bench.pods.kubectl.get(&["pods", "-l", &format!("app={set}")])?;
    let items = list.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
    let good = |pod: &&Value| {
        pod.pointer("/status/phase") == Some(&"Running".into())
            && pod.pointer("/metadata/deletionTimestamp").is_none()
    };
    let uid = |pod: &Value| pod.pointer("/metadata/uid")?.as_str().map(str::to_owned);
    Ok(items.iter().filter(good).filter_map(uid).collect())
}

fn both_running(bench: &Bench<'_>) -> Result<[BTreeSet<String>; 2]> {
    Ok([running(bench, SETS[0].0)?, running(bench, SETS[1].0)?])
}

fn policy(bench: &Bench<'_>) -> Result<Value> {
    let policy = bench.pods.kubectl.get(&["rdmanodepolicy", ROSE])?;
    Ok(policy.get("status").cloned().unwrap_or_default())
}

/// A rollout on two nodes, a quota that shrinks, and the second node's object.
pub(crate) fn two_nodes(bench: &mut Bench<'_>) -> Result<()> {
    let name = format!("{}-4", std::process::id());
    bench.node.kill(ours::CONTROLLER, "TERM")?;
    cluster::start_controller_with(bench, &["--node-grace", "120"])?;
    let second = super::start_second(bench.node, &name, bench.parts, Life::Ours)?;
    let done = (|| {
        second.kill(ours::AGENT, "TERM")?;
        ours::start_agent_with(&second, &["--cluster"])?;
        offered(bench)?;
        rolled(bench, &second)?;
        shrunk(bench)?;
        away(bench, &second)
    })();
    if done.is_err() {
        eprintln!("    the second node:\n{}", ours::tails(&second));
    }
    let gone = clear(bench);
    let ended = second.end();
    let restored = restore(bench);
    done?;
    gone?;
    ended?;
    restored
}

fn offered(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let ipam = json!({"cidrs": ["10.71.0.0/16"], "blockSize": 16});
    let pool = json!({"name": ROSE, "network": ROSE, "class": ROSE, "count": 2 * EACH});
    let rollout = json!({"evict": true, "maxUnavailable": 1});
    for object in [
        ours_is("RdmaNetwork", ROSE, &json!({"soft": {}, "ipam": ipam})),
        class("0660"),
        tenant(None),
        ours_is(
            "RdmaNodePolicy",
            ROSE,
            &json!({"nodeSelector": {}, "pools": [pool], "rollout": rollout}),
        ),
    ] {
        kubectl.apply(&object)?;
    }
    let count = Some((2 * EACH).to_string());
    for (_, node) in SETS {
        wait_for("both nodes to offer the pool", WAIT, || {
            pause();
            Ok((kubectl.allocatable_on(node, &resource(ROSE))? == count).then_some(()))
        })?;
    }
    for (name, node) in SETS {
        kubectl.create(&set(name, node))?;
        bench.pods.wait_set(&Wanted::new(name, ROSE), EACH)?;
    }
    let nodes = [bench.node.name(), "node2".to_owned()];
    wait_for("both nodes to report their pods", WAIT, || {
        pause();
        for node in &nodes {
            let object = kubectl.get(&["rdmanode", node])?;
            let nics = object.pointer("/status/nics").and_then(Value::as_array).cloned();
            let of_pool =
                nics.into_iter().flatten().filter(|n| n.get("pool") == Some(&ROSE.into()));
            if of_pool.count() != EACH {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
}

/// The mode of the socket of each NIC of the pool on a node.
fn modes(bench: &Bench<'_>, node: &Node, set: &str) -> Result<BTreeSet<String>> {
    let mut modes = BTreeSet::new();
    for pod in bench.pods.running(set)? {
        let pod = bench.pods.look(&pod, Some(ROSE))?;
        let nic = ours::nic(node, &pod.id)?;
        let socket = nic.get("socket").and_then(Value::as_str).context("no socket")?;
        modes.insert(node.sh(&format!("stat -c %a {socket}"))?.trim().to_owned());
    }
    Ok(modes)
}

/// Another mode of the socket: every pod is moved, and at no time pods of both nodes.
fn rolled(bench: &Bench<'_>, second: &Node) -> Result<()> {
    let before = both_running(bench)?;
    ensure!(before.iter().all(|set| set.len() == EACH), "pods: {before:?}");
    bench.pods.kubectl.apply(&class("0600"))?;
    let mut looks = 0;
    let mut order: Vec<&str> = Vec::new();
    let mut last = Value::Null;
    let outcome = wait_for("every pod to be moved", Duration::from_secs(240), || {
        last = policy(bench)?;
        let rolling = last.get("rolling").and_then(Value::as_array).map_or(0, Vec::len);
        ensure!(rolling <= 1, "{rolling} nodes at a time: {last}");
        let now = both_running(bench)?;
        let left: Vec<usize> =
            before.iter().zip(&now).map(|(old, now)| old.intersection(now).count()).collect();
        for (n, (set, _)) in SETS.iter().enumerate() {
            if left[n] < EACH && !order.contains(set) {
                order.push(set);
            }
        }
        // A node begins when the one before has none left.
        let half = left.iter().filter(|left| (1..EACH).contains(*left)).count();
        ensure!(half <= 1, "pods of both nodes are being moved: {left:?}");
        looks += 1;
        let whole = now.iter().all(|set| set.len() == EACH) && left.iter().all(|left| *left == 0);
        let over = whole && last.get("outdated").is_none_or(|n| n.as_u64() == Some(0));
        Ok(over.then_some(()))
    });
    outcome.with_context(|| format!("the policy says {last:#}"))?;
    eprintln!("    moved in the order {order:?}, {looks} looks");
    ensure!(order.len() == 2, "not both nodes: {order:?}");
    for (n, node) in [bench.node, second].into_iter().enumerate() {
        let modes = modes(bench, node, SETS[n].0)?;
        ensure!(modes == BTreeSet::from(["600".to_owned()]), "sockets have {modes:?}");
    }
    Ok(())
}

/// A quota below what is used moves nobody.
fn shrunk(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let before = both_running(bench)?;
    kubectl.apply(&tenant(Some(1)))?;
    wait_for("the tenant to be over its quota", WAIT, || {
        pause();
        let tenant = kubectl.get(&["rdmatenant", "physics"])?;
        let all = tenant.pointer("/status/conditions").and_then(Value::as_array).cloned();
        let over = all.into_iter().flatten().any(|c| {
            c.get("type") == Some(&"OverQuota".into()) && c.get("status") == Some(&"True".into())
        });
        Ok(over.then_some(()))
    })?;
    for _ in 0..25 {
        ensure!(both_running(bench)? == before, "a quota moved pods");
        pause();
    }
    kubectl.apply(&tenant(None))
}

/// What the cluster says of the second node.
fn said(bench: &Bench<'_>) -> Result<BTreeMap<String, String>> {
    let object = bench.pods.kubectl.get(&["rdmanode", "node2"])?;
    let of = |key: &str| object.pointer(key).map(Value::to_string).unwrap_or_default();
    let keys = ["/metadata/uid", "/spec/blocks", "/status/blocks"];
    Ok(keys.into_iter().map(|key| (key.to_owned(), of(key))).collect())
}

/// What must be the same after the node's object was away.
fn identity(bench: &Bench<'_>, node: &Node) -> Result<BTreeMap<String, String>> {
    let mut all = said(bench)?;
    for pod in bench.pods.running(SETS[1].0)? {
        let pod: Pod = bench.pods.look(&pod, Some(ROSE))?;
        let nic = ours::nic(node, &pod.id)?;
        // Its QP is another after each transfer.
        let session = bench.pods.session(&pod)?.context("no session")?.number;
        let said = ["mac", "addresses", "socket"].map(|key| nic[key].to_string());
        all.insert(pod.name, format!("{said:?} {session:?}"));
    }
    Ok(all)
}

/// The second node's object is deleted and comes back: its pods have their NICs, it has its blocks.
fn away(bench: &Bench<'_>, second: &Node) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let before = identity(bench, second)?;
    ensure!(before.len() == 3 + EACH, "{before:?}");
    kubectl.run(&["delete", "node", "node2", "--wait=false"])?;
    kubectl.wait_gone(&["node", "node2"])?;
    // Long enough for the controller to hear of it.
    std::thread::sleep(Duration::from_secs(3));
    // Nobody asks pods of a node that has no object.
    let now = said(bench)?;
    let kept = now.iter().all(|(key, value)| before.get(key) == Some(value));
    ensure!(kept, "something went with the node's object: {before:#?}\n{now:#?}");
    // A kubelet registers its node when it starts.
    second.kill("kubelet", "TERM")?;
    plane::start_kubelet(second)?;
    plane::wait_ready(bench.node, "node2", || second.check_alive("kubelet"))?;
    let count = Some((2 * EACH).to_string());
    wait_for("the node to offer its pool again", WAIT, || {
        pause();
        Ok((kubectl.allocatable_on("node2", &resource(ROSE))? == count).then_some(()))
    })?;
    let after = identity(bench, second)?;
    ensure!(after == before, "not as before: {before:#?}\n{after:#?}");
    let pods = bench.pods.running(SETS[1].0)?;
    let [one, two] = &pods[..] else { bail!("pods: {pods:?}") };
    let (one, two) = (bench.pods.look(one, Some(ROSE))?, bench.pods.look(two, Some(ROSE))?);
    bench.pods.transfer(&one, &two, 64 << 10)?;
    let mut new = Wanted::new("r-new", ROSE).manifest();
    new["spec"]["nodeName"] = "node2".into();
    kubectl.create(&new)?;
    kubectl.wait_phase("r-new", "Running", WAIT)?;
    let new = bench.pods.look("r-new", Some(ROSE))?;
    bench.pods.wait_session(&new, 1)?;
    ensure!(![&one.id, &two.id].contains(&&new.id), "{} was given twice", new.id);
    bench.pods.transfer(&new, &one, 64 << 10)?;
    kubectl.delete_pods(&["r-new"])
}

fn clear(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    for (set, _) in SETS {
        kubectl.run(&["delete", "replicaset", set, "--wait=false", "--ignore-not-found"])?;
    }
    kubectl.run(&["delete", "pod", "r-new", "--wait=false", "--ignore-not-found"])?;
    for (set, _) in SETS {
        kubectl.wait_gone(&["pods", "-l", &format!("app={set}")])?;
    }
    for kind in ["rdmanodepolicy", "rdmanetwork", "rdmanicclass"] {
        kubectl.run(&["delete", kind, ROSE, "--wait=false", "--ignore-not-found"])?;
    }
    kubectl.apply(&cluster::tenant(None))
}

/// The first node as it was.
fn restore(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.run(&["delete", "node", "node2", "--ignore-not-found"])?;
    bench.node.kill(ours::CONTROLLER, "TERM")?;
    cluster::start_controller(bench)?;
    kubectl.wait_gone(&["rdmanode", "node2"])?;
    kubectl.wait_gone(&["rdmanetwork", ROSE])?;
    cluster::reported(bench, &[USERS[0].to_owned()])
}
