//! NICs that have a name: a pod gets the MAC address and the address of the `RdmaNic` that its
//! annotation names, nobody else does meanwhile, and the next one gets the same; a limit of the
//! object that changes holds on the NIC that runs. And what pods use is not deleted: whoever tries
//! is told the pods.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::exec::wait_for;
use crate::k8s::cluster::{LIVE, POOL, USERS, ours_is};
use crate::k8s::ours;
use crate::k8s::pods::{Pod, Wanted};
use crate::k8s::test::Bench;
use crate::k8s::trust;

const WAIT: Duration = Duration::from_secs(90);
const NIC: &str = "db";
const MAC: &str = "02:00:00:00:77:01";
const ADDRESS: &str = "10.66.0.7";
const QPS: u64 = 16;
/// What the class says.
const CLASS_QPS: u64 = 64;
const PODS: [&str; 2] = ["n-one", "n-two"];
/// A network that nobody uses.
const LONE: &str = "lone";

fn pause() {
    std::thread::sleep(Duration::from_millis(200));
}

fn manifest(pod: &str) -> Value {
    let mut manifest = Wanted::new(pod, POOL).manifest();
    manifest["metadata"]["annotations"] = json!({"vhost-rdma.io/nic": NIC});
    manifest
}

fn nic() -> Value {
    let mut nic = ours_is(
        "RdmaNic",
        NIC,
        &json!({"network": POOL, "mac": MAC, "address": ADDRESS, "limits": {"maxQps": QPS}}),
    );
    nic["metadata"]["namespace"] = "default".into();
    nic
}

fn status(bench: &Bench<'_>) -> Result<Value> {
    let nic = bench.pods.kubectl.get(&["rdmanic", NIC])?;
    Ok(nic.get("status").cloned().unwrap_or_default())
}

/// Waits until the object says that this pod has it, or nobody.
fn holder(bench: &Bench<'_>, pod: Option<&str>) -> Result<()> {
    let mut last = Value::Null;
    let what = format!("the NIC to be that of {pod:?}");
    let outcome = wait_for(&what, WAIT, || {
        pause();
        last = status(bench)?;
        let now = last.get("pod").and_then(Value::as_str);
        let on = last.get("node").and_then(Value::as_str);
        Ok((now == pod && on == pod.map(|_| "node1")).then_some(()))
    });
    outcome.with_context(|| format!("it says {last:#}"))
}

fn qps(nic: &Value) -> Option<u64> {
    nic.pointer("/limits/max_qps").and_then(Value::as_u64)
}

/// A changed limit of the object holds on the NIC while it runs, in time, and its guest keeps its
/// session; where the class says less, that holds.
fn followed(bench: &Bench<'_>, pod: &Pod) -> Result<()> {
    let session = bench.pods.session(pod)?.context("no session")?;
    for (said, held) in [(24, 24), (8, 8), (1 << 10, CLASS_QPS), (QPS, QPS)] {
        let patch = json!({"spec": {"limits": {"maxQps": said}}}).to_string();
        bench.pods.kubectl.run(&["patch", "rdmanic", NIC, "--type=merge", "-p", &patch])?;
        let begun = Instant::now();
        let what = format!("{held} QPs to be the limit of the NIC that says {said}");
        wait_for(&what, WAIT, || {
            Ok((qps(&ours::nic(bench.node, &pod.id)?) == Some(held)).then_some(()))
        })?;
        let took = begun.elapsed();
        eprintln!("    {said} QPs of the object held after {:.2} s", took.as_secs_f64());
        ensure!(took <= LIVE, "it took {took:?}");
    }
    let after = bench.pods.session(pod)?.context("the session is gone")?;
    ensure!(after.number == session.number, "the guest lost its session");
    Ok(())
}

/// The pod's NIC is the one that it names: for the daemon, for its guest, and in its files.
fn has_it(bench: &Bench<'_>, pod: &Pod) -> Result<()> {
    let nic = ours::nic(bench.node, &pod.id)?;
    let text = |key: &str| nic.pointer(key).and_then(Value::as_str).unwrap_or_default();
    ensure!(text("/mac") == MAC && text("/addresses/0") == ADDRESS, "{} has {nic}", pod.name);
    ensure!(qps(&nic) == Some(QPS), "the limit of the NIC does not hold: {nic}");
    let session = bench.pods.wait_session(pod, 1)?;
    ensure!(session.mac == MAC, "its guest sees {session:?}");
    let file = format!("{}/nic.json", pod.variable(POOL, "DIR")?);
    let file = bench.pods.kubectl.run(&["exec", &pod.name, "--", "/bin/cat", &file])?;
    let file: Value = serde_json::from_str(&file)?;
    ensure!(file.get("mac") == Some(&MAC.into()), "nic.json says {file}");
    holder(bench, Some(&pod.name))?;
    wait_for("the object to say the session", WAIT, || {
        pause();
        let said = status(bench)?;
        let word = said.get("session").and_then(Value::as_str);
        Ok((word == Some("driver_ready")).then_some(()))
    })
}

/// See the module.
pub(crate) fn named(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    // The step with the quota has taken the second away, if it was made.
    kubectl.delete_pods(&[USERS[1]])?;
    kubectl.apply(&nic())?;
    kubectl.create(&manifest(PODS[0]))?;
    kubectl.wait_phase(PODS[0], "Running", WAIT)?;
    let first = bench.pods.look(PODS[0], Some(POOL))?;
    has_it(bench, &first)?;
    let user = bench.pods.look(USERS[0], Some(POOL))?;
    bench.counted(&first, &user)?;
    followed(bench, &first)?;
    bench.counted(&first, &user)?;
    kubectl.create(&manifest(PODS[1]))?;
    let said = kubectl.wait_event("NicRefused", PODS[1])?;
    ensure!(said.contains(NIC) && said.contains(PODS[0]), "the Event says: {said}");
    let second = kubectl.get(&["pod", PODS[1]])?;
    let running = second.pointer("/status/containerStatuses/0/state/running");
    ensure!(running.is_none(), "{} runs: {second:#}", PODS[1]);
    has_it(bench, &first)?;
    // An agent that begins anew has what its forerunner gave.
    bench.node.kill(ours::AGENT, "KILL")?;
    ours::start_agent_with(bench.node, &["--cluster", "--http=127.0.0.1:9746"])?;
    has_it(bench, &first)?;
    // The first goes, and the kubelet tries the second again.
    kubectl.delete_pods(&[PODS[0]])?;
    kubectl.wait_phase(PODS[1], "Running", Duration::from_secs(240))?;
    let second = bench.pods.look(PODS[1], Some(POOL))?;
    has_it(bench, &second)?;
    bench.counted(&user, &second)?;
    kubectl.delete_pods(&[PODS[1]])?;
    holder(bench, None)?;
    left_over(bench)?;
    kubectl.run(&["delete", "rdmanic", NIC])?;
    super::cluster::reported(bench, &[USERS[0].to_owned()])
}

/// A claim of a pod that there is not, as an agent leaves it that ends at the wrong moment: the
/// controller takes it back.
fn left_over(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let mut nic = kubectl.get(&["rdmanic", NIC])?;
    for (key, value) in [("node", "node1"), ("pod", "nobody"), ("podUid", "no-uid")] {
        nic["status"][key] = value.into();
    }
    std::fs::write(bench.node.lab().join("nic.json"), nic.to_string())?;
    let path = format!("/apis/vhost-rdma.io/v1alpha1/namespaces/default/rdmanics/{NIC}/status");
    kubectl.run(&["replace", "--raw", &path, "-f", "/lab/nic.json"])?;
    holder(bench, Some("nobody"))?;
    holder(bench, None)
}

/// A network that pods use is not deleted, and whoever tries is told which; no more is a NIC that a
/// pod has. One that nobody uses is.
pub(crate) fn kept(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.apply(&nic())?;
    kubectl.apply(&ours_is("RdmaNetwork", LONE, &json!({"soft": {}})))?;
    kubectl.create(&manifest(PODS[0]))?;
    kubectl.wait_phase(PODS[0], "Running", WAIT)?;
    holder(bench, Some(PODS[0]))?;
    let asked = trust::hooked(bench).and_then(|()| refused(bench));
    let restored = trust::unhooked(bench);
    asked?;
    restored?;
    super::cluster::reported(bench, &[USERS[0].to_owned()])
}

fn refused(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    super::cluster::reported(bench, &[USERS[0].to_owned(), PODS[0].to_owned()])?;
    for (kind, name, users) in
        [("rdmanetwork", POOL, &[USERS[0], PODS[0]][..]), ("rdmanic", NIC, &[PODS[0]][..])]
    {
        let said = kubectl.run(&["delete", kind, name, "--wait=false"]);
        let said = format!("{:#}", said.err().with_context(|| format!("{name} was deleted"))?);
        let named = users.iter().all(|user| said.contains(&format!("default/{user}")));
        ensure!(named && said.contains("is used by pods"), "the refusal says: {said}");
        eprintln!("    {}", said.lines().last().unwrap_or_default());
        let there = kubectl.get(&[kind, name])?;
        ensure!(there.pointer("/metadata/deletionTimestamp").is_none(), "{there}");
    }
    kubectl.run(&["delete", "rdmanetwork", LONE, "--wait=false"])?;
    kubectl.wait_gone(&["rdmanetwork", LONE])?;
    kubectl.delete_pods(&[PODS[0]])?;
    holder(bench, None)?;
    kubectl.run(&["delete", "rdmanic", NIC]).map(drop)
}
