//! The controller beside the API server: tenants, networks, classes and policies by `kubectl`, and
//! what becomes of them on the node.
//!
//! Controller and agent have the accounts of `manifests/controller` and no other right: what they
//! may not do would show here.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::exec::{wait_for, workspace};
use crate::k8s::kubectl::Kubectl;
use crate::k8s::node::{Life, Node};
use crate::k8s::ours;
use crate::k8s::plane;
use crate::k8s::pods::{Wanted, resource};
use crate::k8s::test::Bench;

/// Where the administrator has the files.
pub(crate) const DIR: &str = "/lab/cluster";
pub(crate) const NAMESPACE: &str = "vhost-rdma";
const KUBECONFIG: &str = "/lab/pki/controller.kubeconfig";
const WAIT: Duration = Duration::from_secs(60);
/// How long a changed class may take to hold on a NIC that runs.
pub(crate) const LIVE: Duration = Duration::from_secs(2);
pub(crate) const POOL: &str = "cyan";
const COUNT: usize = 4;
/// A pool of a network that has addresses.
pub(crate) const ADDRESSED: &str = "plum";
/// Pods of the tenant that live through these steps.
pub(crate) const USERS: [&str; 2] = ["c-one", "c-two"];

/// A directory of `manifests`, for an administrator on the node.
pub(crate) fn copy(from: &str, node: &Node) -> Result<()> {
    let to = node.path(DIR).join(from);
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(workspace().join("manifests").join(from))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn apply(kubectl: Kubectl<'_>, objects: &[Value]) -> Result<()> {
    for object in objects {
        kubectl.apply(object)?;
    }
    Ok(())
}

/// One of our objects.
pub(crate) fn ours_is(kind: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": kind,
        "metadata": {"name": name}, "spec": spec,
    })
}

fn class(qps: u32) -> Value {
    let spec = json!({
        "limits": {"maxQps": qps},
        "socket": {"owner": 1000, "group": 1000, "mode": "0660"},
    });
    ours_is("RdmaNicClass", "lab", &spec)
}

pub(crate) fn tenant(quota: Option<u32>) -> Value {
    let mut spec = json!({
        "namespaceSelector": {"matchLabels": {"team": "physics"}}, "networks": [POOL, ADDRESSED],
    });
    if let Some(nics) = quota {
        spec["quota"] = json!({ "nics": nics });
    }
    ours_is("RdmaTenant", "physics", &spec)
}

/// Definitions, accounts, the controller; the agent begins anew and follows it.
pub(crate) fn installed(bench: &mut Bench<'_>) -> Result<()> {
    let (kubectl, sessions) = (bench.pods.kubectl, bench.sessions()?);
    for dir in ["node", "cluster-no-cel"] {
        copy(dir, bench.node)?;
    }
    defined(bench.node)?;
    taken(kubectl)?;
    // The lab's agent is a user and no pod.
    let (role, user) = ("--clusterrole=vhost-rdma-agent-cluster", "--user=vhost-rdma-agent");
    kubectl.run(&["create", "clusterrolebinding", "lab-agent-cluster", role, user])?;
    start_controller(bench)?;
    bench.node.kill(ours::AGENT, "TERM")?;
    ours::start_agent_with(bench.node, &["--cluster", "--http=127.0.0.1:9746"])?;
    bench.undisturbed(sessions)
}

/// The kinds, the namespace, and the accounts with their rights.
pub(crate) fn defined(node: &Node) -> Result<()> {
    let kubectl = Kubectl::new(node);
    for dir in ["crds/no-cel", "controller"] {
        copy(dir, node)?;
    }
    // A namespace that is there already (from manifests) is as good.
    kubectl.apply(
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
    )?;
    kubectl.run(&["apply", "-k", &format!("{DIR}/crds/no-cel")])?;
    for file in ["rbac", "agent-rbac"] {
        kubectl.run(&["apply", "-f", &format!("{DIR}/controller/{file}.yaml")])?;
    }
    account(node)
}

/// The API server takes `manifests/cluster-no-cel` as it is, and its agents follow the controller.
fn taken(kubectl: Kubectl<'_>) -> Result<()> {
    let dir = format!("{DIR}/cluster-no-cel");
    let said = kubectl.run(&["apply", "-k", &dir, "--dry-run=server"])?;
    for object in [
        "deployment.apps/vhost-rdma-controller",
        "daemonset.apps/vhost-rdma-agent",
        "daemonset.apps/vhost-rdma-daemon",
        "networkpolicy.networking.k8s.io/vhost-rdma-controller",
        "role.rbac.authorization.k8s.io/vhost-rdma-controller",
        "customresourcedefinition.apiextensions.k8s.io/rdmatenants.vhost-rdma.io",
    ] {
        let told = |line: &str| line.starts_with(object) && line.ends_with("(server dry run)");
        ensure!(said.lines().any(told), "nothing about {object}:\n{said}");
    }
    let text = kubectl.run(&["kustomize", &dir])?;
    ensure!(text.contains("- --cluster\n"), "the agent does not follow the controller:\n{text}");
    let images: Vec<&str> = text.lines().filter(|l| l.trim().starts_with("image:")).collect();
    let one = images.iter().all(|line| line.contains("registry.example.org/vhost-rdma/node:"));
    ensure!(one && images.len() >= 4, "the parts have not one image: {images:?}");
    Ok(())
}

/// A kubeconfig with the token of the controller's account.
fn account(node: &Node) -> Result<()> {
    let kubectl = Kubectl::new(node);
    let get = ["get", "serviceaccount", "vhost-rdma-controller", "-n", NAMESPACE, "-o"];
    let secret = wait_for("the account's token", WAIT, || {
        let mut args = get.to_vec();
        args.push("jsonpath={.secrets[0].name}");
        let name = kubectl.run(&args)?;
        Ok((!name.trim().is_empty()).then(|| name.trim().to_owned()))
    })?;
    let script = format!(
        "k='kubectl --kubeconfig=/lab/pki/admin.kubeconfig -n {NAMESPACE}'
token=$($k get secret {secret} -o 'jsonpath={{.data.token}}' | base64 -d)
sed -n '1,4p' /lab/pki/admin.kubeconfig > {KUBECONFIG}
cat >> {KUBECONFIG} <<END
users: [{{name: controller, user: {{token: $token}}}}]
contexts: [{{name: lab, context: {{cluster: lab, user: controller}}}}]
current-context: lab
END"
    );
    node.sh(&script).map(drop)
}

pub(crate) fn start_controller(bench: &Bench<'_>) -> Result<()> {
    start_controller_with(bench, &[])
}

/// The same with more options.
pub(crate) fn start_controller_with(bench: &Bench<'_>, options: &[&str]) -> Result<()> {
    start_controller_on(bench.node, options)
}

/// The same where there are no pods.
pub(crate) fn start_controller_on(node: &Node, options: &[&str]) -> Result<()> {
    let variable = format!("KUBECONFIG={KUBECONFIG}");
    let program = "/usr/bin/vhost-rdma-controller";
    let mut command = vec!["env", &variable, program, "serve", "--identity", "lab"];
    for usual in [["--node-grace", "5"], ["--root-grace", "3"]] {
        if !options.contains(&usual[0]) {
            command.extend(usual);
        }
    }
    command.extend(options);
    node.spawn(ours::CONTROLLER, &command)?;
    wait_for("the controller", WAIT, || {
        node.check_alive(ours::CONTROLLER)?;
        std::thread::sleep(Duration::from_millis(200));
        let get = "busybox wget -q -O - http://127.0.0.1:9747/readyz";
        Ok(node.sh(get).ok())
    })
    .map(drop)
}

/// A policy becomes a pool of the node, pods get NICs, RDMA works, and the node's object says so.
pub(crate) fn offered(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.run(&["label", "namespace", "default", "team=physics", "--overwrite"])?;
    let pool = json!({"name": POOL, "network": POOL, "class": "lab", "count": COUNT});
    let other = json!({"name": ADDRESSED, "network": ADDRESSED, "class": "lab", "count": 1});
    let ipam = json!({"cidrs": ["10.77.0.0/16"], "blockSize": 16});
    apply(
        kubectl,
        &[
            ours_is("RdmaNetwork", POOL, &json!({"soft": {}})),
            ours_is("RdmaNetwork", ADDRESSED, &json!({"soft": {}, "ipam": ipam})),
            class(64),
            tenant(None),
            ours_is("RdmaNodePolicy", "lab", &json!({"nodeSelector": {}, "pools": [pool, other]})),
        ],
    )?;
    bench.offered(POOL, COUNT)?;
    let users = [
        bench.pods.start(&Wanted::new(USERS[0], POOL))?,
        bench.pods.start(&Wanted::new(USERS[1], POOL))?,
    ];
    bench.counted(&users[0], &users[1])?;
    let (pair, _) = bench.pair()?;
    let across = bench.pods.transfer(&users[0], pair, 4096);
    ensure!(across.is_err(), "a pod of one network reached another's");
    let vni = kubectl.get(&["rdmanetwork", POOL])?;
    let vni = vni.pointer("/status/vni").and_then(Value::as_u64).context("no VNI")?;
    let nic = ours::nic(bench.node, &users[0].id)?;
    ensure!(nic.get("vni").and_then(Value::as_u64) == Some(vni), "VNI {vni}, the NIC: {nic}");
    addressed(bench)?;
    reported(bench, &users.map(|pod| pod.name))
}

/// A NIC of a network with addresses has one of the node's block, which the API server calls bound.
fn addressed(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    bench.offered(ADDRESSED, 1)?;
    let pod = bench.pods.start(&Wanted::new("c-addressed", ADDRESSED))?;
    let nic = ours::nic(bench.node, &pod.id)?;
    let address = nic.pointer("/addresses/0").and_then(Value::as_str).unwrap_or_default();
    ensure!(address.starts_with("10.77."), "the NIC has the addresses {nic}");
    let told = pod.variable(ADDRESSED, "ADDRESSES")?;
    ensure!(told == address, "the pod was told {told}, the daemon says {address}");
    let blocks = kubectl.get(&["rdmaipblocks"])?;
    let block = blocks.pointer("/items/0").context("there is no block")?;
    ensure!(block.pointer("/spec/node") == Some(&"node1".into()), "{block}");
    wait_for("the block to be bound", WAIT, || {
        let blocks = kubectl.get(&["rdmaipblocks"])?;
        Ok((blocks.pointer("/items/0/status/bound") == Some(&true.into())).then_some(()))
    })?;
    kubectl.delete_pods(&["c-addressed"])
}

/// Waits until the node's object and the sums made of it name exactly these pods.
pub(crate) fn reported(bench: &Bench<'_>, pods: &[String]) -> Result<()> {
    let mut last = Value::Null;
    let mut names: Vec<&str> = pods.iter().map(String::as_str).collect();
    names.sort_unstable();
    let outcome = wait_for("the node's report", WAIT, || {
        std::thread::sleep(Duration::from_millis(200));
        last = bench.pods.kubectl.get(&["rdmanode", "node1"])?;
        let nics = last.pointer("/status/nics").and_then(Value::as_array).cloned();
        let nics = nics.unwrap_or_default();
        let mut said: Vec<&str> =
            nics.iter().filter_map(|nic| nic.get("pod").and_then(Value::as_str)).collect();
        said.sort_unstable();
        let tenant = bench.pods.kubectl.get(&["rdmatenant", "physics"])?;
        let used = tenant.pointer("/status/used/nics").and_then(Value::as_u64);
        Ok((said == names && used == Some(names.len() as u64)).then_some(()))
    });
    outcome.with_context(|| format!("it says {last:#}"))
}

/// The daemon's limit of a NIC that runs follows the class, and the guest keeps its session.
pub(crate) fn limit(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let pod = bench.pods.look(USERS[0], Some(POOL))?;
    let session = bench.pods.session(&pod)?.context("no session")?;
    for qps in [48_u64, 32, 64] {
        let patch = json!({"spec": {"limits": {"maxQps": qps}}}).to_string();
        kubectl.run(&["patch", "rdmanicclass", "lab", "--type=merge", "-p", &patch])?;
        let begun = Instant::now();
        wait_for(&format!("{qps} QPs to be the limit"), WAIT, || {
            let nic = ours::nic(bench.node, &pod.id)?;
            let now = nic.pointer("/limits/max_qps").and_then(Value::as_u64);
            Ok((now == Some(qps)).then_some(()))
        })?;
        let took = begun.elapsed();
        eprintln!("    {qps} QPs held after {:.2} s", took.as_secs_f64());
        ensure!(took <= LIVE, "it took {took:?}");
    }
    let after = bench.pods.session(&pod)?.context("the session is gone")?;
    ensure!(after.number == session.number, "the guest lost its session");
    let other = bench.pods.look(USERS[1], Some(POOL))?;
    bench.counted(&pod, &other)
}

/// A pod of a namespace that no tenant has the network for does not start, and an Event says why.
pub(crate) fn foreign(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.apply(&json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "rival", "labels": {"team": "chemistry"}},
    }))?;
    kubectl.run(&["create", "serviceaccount", "default", "-n", "rival"]).ok();
    // Both ways by which a pod gets its NIC: with the CNI plugin in the chain, and without.
    for (name, chained) in [("thief", None), ("thief-cni", Some(ours::CHAINED))] {
        plane::write_network(bench.node, "0.4.0", chained)?;
        let mut pod = Wanted::new(name, POOL).manifest();
        pod["metadata"]["namespace"] = "rival".into();
        kubectl.create(&pod)?;
        let said = kubectl.wait_event("NicRefused", name)?;
        ensure!(said.contains("rival") && said.contains(POOL), "the Event says: {said}");
        let pod = kubectl.get(&["pod", name, "-n", "rival"])?;
        let running = pod.pointer("/status/containerStatuses/0/state/running");
        ensure!(running.is_none(), "{name} runs: {pod:#}");
        kubectl.run(&["delete", "pod", name, "-n", "rival", "--wait=false"])?;
        kubectl.wait_gone(&["pod", name, "-n", "rival"])?;
    }
    plane::write_network(bench.node, "0.4.0", None)?;
    reported(bench, &USERS.map(str::to_owned))
}

/// The pod too many waits, and starts when another one goes.
pub(crate) fn quota(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.apply(&tenant(Some(2)))?;
    let full = || -> Result<bool> {
        let node = kubectl.get(&["rdmanode", "node1"])?;
        Ok(node.pointer("/spec/networks/0/tenants/0/full") == Some(&true.into()))
    };
    wait_for("the node to hear that the tenant is full", WAIT, || Ok(full()?.then_some(())))?;
    // The agent has it a moment after the object.
    std::thread::sleep(Duration::from_secs(1));
    kubectl.create(&Wanted::new("c-three", POOL).manifest())?;
    let said = kubectl.wait_event("NicRefused", "c-three")?;
    ensure!(said.contains("quota"), "the Event says: {said}");
    kubectl.delete_pods(&[USERS[1]])?;
    // The kubelet tries again after a pause that grows to ten seconds at first.
    kubectl.wait_phase("c-three", "Running", Duration::from_secs(180))?;
    kubectl.delete_pods(&["c-three"])?;
    kubectl.apply(&tenant(None))?;
    reported(bench, &[USERS[0].to_owned()])
}

/// A second node gets an object of its own and serves pods; the tenant's sum is over both. When it
/// leaves, nothing of it stays.
pub(crate) fn second(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let name = format!("{}-2", std::process::id());
    let second = super::start_second(bench.node, &name, bench.parts, Life::Ours)?;
    second.kill(ours::AGENT, "TERM")?;
    ours::start_agent_with(&second, &["--cluster"])?;
    wait_for("the second node to offer the pool", WAIT, || {
        std::thread::sleep(Duration::from_millis(200));
        let offered = kubectl.allocatable_on("node2", &resource(POOL))?;
        Ok((offered == Some(COUNT.to_string())).then_some(()))
    })?;
    let mut there = Vec::new();
    for name in ["s-one", "s-two"] {
        let mut pod = Wanted::new(name, POOL).manifest();
        pod["spec"]["nodeName"] = "node2".into();
        kubectl.create(&pod)?;
        kubectl.wait_phase(name, "Running", WAIT)?;
        let pod = bench.pods.look(name, Some(POOL))?;
        bench.pods.wait_session(&pod, 1)?;
        there.push(pod);
    }
    let [a, b] = &there[..] else { bail!("two pods were wanted") };
    bench.pods.transfer(a, b, 64 << 10)?;
    wait_for("the tenant's sum over both nodes", WAIT, || {
        std::thread::sleep(Duration::from_millis(200));
        let tenant = kubectl.get(&["rdmatenant", "physics"])?;
        let used = tenant.pointer("/status/used/nics").and_then(Value::as_u64);
        Ok((used == Some(3)).then_some(()))
    })?;
    kubectl.delete_pods(&["s-one", "s-two"])?;
    reported(bench, &[USERS[0].to_owned()])?;
    second.end()?;
    kubectl.run(&["delete", "node", "node2"]).map(drop)
}

/// Controller and API server are gone and the agent begins anew: it offers what it offered, and the
/// pod has its NIC.
pub(crate) fn alone(bench: &mut Bench<'_>) -> Result<()> {
    let pod = bench.pods.look(USERS[0], Some(POOL))?;
    let nic = ours::nic(bench.node, &pod.id)?;
    for server in [ours::CONTROLLER, "kube-apiserver", ours::AGENT] {
        bench.node.kill(server, "KILL")?;
    }
    let started = ours::start_agent_with(bench.node, &["--cluster"]).and_then(|()| {
        let status = ours::agent(bench.node)?;
        let pools = status.get("pools").and_then(Value::as_array).context("no pools")?;
        let cyan = pools.iter().find(|pool| pool.get("name") == Some(&POOL.into()));
        let cyan = cyan.context("the pool of the controller is not offered")?;
        ensure!(cyan.get("total").and_then(Value::as_u64) == Some(COUNT as u64), "{cyan}");
        ensure!(cyan.get("granted").and_then(Value::as_u64) == Some(1), "{cyan}");
        bench.pods.session(&pod)?.context("the guest lost its session").map(drop)
    });
    plane::start_apiserver(bench.node)?;
    start_controller(bench)?;
    started?;
    let after = ours::nic(bench.node, &pod.id)?;
    for key in ["mac", "vni", "socket"] {
        ensure!(nic.get(key) == after.get(key), "{key} changed: {nic} {after}");
    }
    bench.offered(POOL, COUNT)?;
    reported(bench, &[USERS[0].to_owned()])
}

/// A network with users stays; without, it goes with its VNI, from the node too.
pub(crate) fn removed(bench: &mut Bench<'_>) -> Result<()> {
    let (kubectl, sessions) = (bench.pods.kubectl, bench.sessions()?);
    kubectl.run(&["delete", "rdmanetwork", POOL, ADDRESSED, "--wait=false"])?;
    let named = wait_for("the users to be named", WAIT, || {
        std::thread::sleep(Duration::from_millis(200));
        let network = kubectl.get(&["rdmanetwork", POOL])?;
        let conditions = network.pointer("/status/conditions").and_then(Value::as_array).cloned();
        let of = conditions.into_iter().flatten().find(|c| {
            c.get("type") == Some(&"Deletable".into()) && c.get("status") == Some(&"False".into())
        });
        Ok(of.and_then(|c| c.get("message")?.as_str().map(str::to_owned)))
    })?;
    ensure!(named.contains(USERS[0]), "the condition does not name the pod: {named}");
    kubectl.delete_pods(&[USERS[0]])?;
    kubectl.wait_gone(&["rdmanetwork", POOL])?;
    wait_for("the network to leave the daemon", WAIT, || {
        std::thread::sleep(Duration::from_millis(200));
        let networks = ours::daemon(bench.node, &["network", "list"])?;
        Ok((!networks.to_string().contains(POOL)).then_some(()))
    })?;
    kubectl.wait_gone(&["rdmaipblocks"])?;
    let claims = ["lease", "-n", NAMESPACE, "-l", "vhost-rdma.io/claim=vni"];
    kubectl.wait_gone(&claims)?;
    for kind in ["rdmanodepolicy/lab", "rdmatenant/physics", "rdmanicclass/lab"] {
        kubectl.run(&["delete", kind])?;
    }
    kubectl.wait_gone(&["rdmanodes"])?;
    // As before, for the steps that follow.
    bench.node.kill(ours::CONTROLLER, "TERM")?;
    bench.node.kill(ours::AGENT, "TERM")?;
    ours::start_agent(bench.node)?;
    kubectl.run(&[
        "delete",
        "namespace",
        NAMESPACE,
        "rival",
        "--wait=false",
        "--ignore-not-found",
    ])?;
    kubectl.wait_gone(&["namespace", NAMESPACE])?;
    let roles = ["vhost-rdma-controller", "vhost-rdma-agent-cluster"];
    for role in roles {
        kubectl.run(&[
            "delete",
            &format!("clusterrole/{role}"),
            &format!("clusterrolebinding/{role}"),
        ])?;
    }
    kubectl.run(&["delete", "clusterrolebinding/lab-agent-cluster"])?;
    kubectl.run(&["delete", "-k", &format!("{DIR}/crds/no-cel")])?;
    ensure!(kubectl.allocatable(&resource(POOL))? != Some(COUNT.to_string()), "{POOL} is offered");
    bench.undisturbed(sessions)
}
