//! Two nodes whose daemons know and believe each other, by the controller alone: certificates,
//! peers, another root while they speak, and a node that begins without a control plane.
//!
//! The network is one of a fabric that the lab's nodes have no device of, with addresses of the
//! fabric: nobody gets a NIC, but each node has its block, and daemons are told where the others'
//! are. That QPs follow is shown where there are RNICs (`vm rnic`).

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::exec::wait_for;
use crate::k8s::cluster::{self, NAMESPACE, ours_is};
use crate::k8s::kubectl::Kubectl;
use crate::k8s::node::{Life, Node};
use crate::k8s::ours;
use crate::k8s::plane;
use crate::k8s::pods::Wanted;
use crate::k8s::test::{Bench, POOL};
use crate::k8s::trust;

const WAIT: Duration = Duration::from_secs(90);
const NETWORK: &str = "amber";
const PORT: &str = "4790";
/// Where the agent puts what the daemon reads.
const FILES: &str = "/run/vhost-rdma/channel/current";
const ACCOUNT: &str = "channel-agent.kubeconfig";
/// A node of the cluster that is nowhere: its name and its address.
const ELSEWHERE: [&str; 2] = ["nowhere", "10.98.0.2"];
/// What lets the account write Events.
const EVENTS: &str = "channel-agent";
const SECRET: &str = "vhost-rdma-channel-ca";

fn pause() {
    std::thread::sleep(Duration::from_millis(200));
}

/// Where a node is for the others.
fn address(node: &Node) -> String {
    format!("10.222.{}.1", node.subnet())
}

/// The agents' account on a node: a pod of it, and a token that names the pod.
fn account(bench: &Bench<'_>, node: &Node) -> Result<()> {
    account_of(bench, node, &node.name())
}

/// The same with the account of an agent on another node of the cluster.
fn account_of(bench: &Bench<'_>, node: &Node, of: &str) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let name = format!("channel-{of}");
    let mut pod = Wanted { pool: None, ..Wanted::new(&name, POOL) }.manifest();
    pod["metadata"]["namespace"] = NAMESPACE.into();
    pod["spec"]["serviceAccountName"] = "vhost-rdma-agent".into();
    pod["spec"]["nodeName"] = of.into();
    // One that is there stays as it is.
    kubectl.apply(&pod)?;
    // What manifests/node/rbac.yaml gives the account; the lab's other agents are users.
    kubectl.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": EVENTS},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
            "name": "vhost-rdma-agent"},
        "subjects": [
            {"kind": "ServiceAccount", "name": "vhost-rdma-agent", "namespace": NAMESPACE}
        ],
    }))?;
    bench.node.run(&["sh", "-ec", trust::TOKEN, "sh", &name])?;
    let made = bench.node.path("/lab/trust/agent.kubeconfig");
    let text = fs::read_to_string(&made).with_context(|| made.display().to_string())?;
    let text = text.replace("https://127.0.0.1:6443", "https://10.222.0.1:6443");
    Ok(fs::write(node.lab().join("pki").join(ACCOUNT), text)?)
}

fn start_agent(bench: &Bench<'_>, node: &Node) -> Result<()> {
    start_agent_at(bench, node, &address(node))
}

fn start_agent_at(bench: &Bench<'_>, node: &Node, at: &str) -> Result<()> {
    let controller = format!("{}:9748", address(bench.node));
    let options = ["--cluster", "--channel-address", at, "--controller", &controller];
    ours::start_agent_as(node, &format!("/lab/pki/{ACCOUNT}"), &options)
}

/// The daemon begins before there is a certificate; the agent follows.
fn take_part(bench: &Bench<'_>, node: &Node) -> Result<()> {
    account(bench, node)?;
    let file = |name: &str| format!("{FILES}/{name}.pem");
    let listen = format!("0.0.0.0:{PORT}");
    let (cert, key, ca) = (file("cert"), file("key"), file("ca"));
    node.kill(ours::AGENT, "TERM")?;
    node.kill(ours::DAEMON, "TERM")?;
    let options =
        ["--cm-listen", &listen, "--cm-wait", "--cm-cert", &cert, "--cm-key", &key, "--cm-ca", &ca];
    ours::start_daemon_with(node, &options)?;
    start_agent(bench, node)
}

/// The first node's condition `Certified`.
fn condition(kubectl: Kubectl<'_>) -> Result<Value> {
    let object = kubectl.get(&["rdmanode", "node1"])?;
    let all = object.pointer("/status/conditions").and_then(Value::as_array).cloned();
    let mut all = all.into_iter().flatten();
    Ok(all.find(|c| c.get("type") == Some(&"Certified".into())).unwrap_or_default())
}

/// Waits until the first node's agent says that it has no certificate, and why; so does an event.
fn not_certified(bench: &Bench<'_>, words: &str) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let mut last = Value::Null;
    let found = wait_for("the node to say why it has no certificate", WAIT, || {
        pause();
        last = condition(kubectl)?;
        let text = |key: &str| last.get(key).and_then(Value::as_str).unwrap_or_default();
        let refused = text("status") == "False" && text("reason") == "Refused";
        Ok((refused && text("message").contains(words)).then(|| text("message").to_owned()))
    });
    let message = found.with_context(|| format!("not {words:?}: {last}"))?;
    eprintln!("    {message}");
    wait_for("an event that says so", WAIT, || {
        pause();
        let events = kubectl.get(&["events", "-A", "--field-selector", "reason=NotCertified"])?;
        Ok(events.to_string().contains(&words.replace('"', "\\\"")).then_some(()))
    })
}

/// A node whose agent's request is refused says so: for an address that is not the node's, then by
/// the account of another node's agent. With its own of both it has a certificate.
pub(crate) fn refused(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    for name in ["vhost-rdma-agent", "default"] {
        // Others may have made it.
        kubectl.run(&["create", "serviceaccount", name, "-n", NAMESPACE]).ok();
    }
    let done = refusals(bench);
    let gone = kubectl.run(&["delete", "node", ELSEWHERE[0], "--ignore-not-found"]);
    let restored = restore(bench);
    done?;
    gone?;
    restored
}

fn refusals(bench: &Bench<'_>) -> Result<()> {
    let node = bench.node;
    account(bench, node)?;
    node.kill(ours::AGENT, "TERM")?;
    start_agent_at(bench, node, "10.99.0.1")?;
    not_certified(bench, "NotOfNode: the node \"node1\" does not have 10.99.0.1")?;
    let [elsewhere, there] = ELSEWHERE;
    node.run(&["sh", "-ec", trust::NODE, "sh", elsewhere, there])?;
    account_of(bench, node, elsewhere)?;
    node.kill(ours::AGENT, "TERM")?;
    start_agent(bench, node)?;
    not_certified(bench, "AnotherNode: ")?;
    account(bench, node)?;
    node.kill(ours::AGENT, "TERM")?;
    start_agent(bench, node)?;
    wait_for("the node to be certified", WAIT, || {
        pause();
        let now = condition(bench.pods.kubectl)?;
        Ok((now.get("status") == Some(&"True".into())).then_some(()))
    })
}

/// The channel's part of a node's status, if both of its conditions hold.
fn certified(kubectl: Kubectl<'_>, node: &str) -> Result<Option<String>> {
    let object = kubectl.get(&["rdmanode", node])?;
    let all = object.pointer("/status/conditions").and_then(Value::as_array);
    let holds = |kind: &str| {
        let mut of = all.into_iter().flatten();
        of.any(|c| c.get("type") == Some(&kind.into()) && c.get("status") == Some(&"True".into()))
    };
    let issuer = object.pointer("/status/channel/certificate/issuer").and_then(Value::as_str);
    Ok(issuer.filter(|_| holds("Certified") && holds("PeersFollowed")).map(str::to_owned))
}

/// What a daemon has of the controller: blocks, and the daemons there.
fn peers(node: &Node) -> Vec<(String, String)> {
    let Ok(list) = ours::daemon(node, &["peer", "list", "--network", NETWORK]) else {
        return Vec::new();
    };
    let text = |peer: &Value, key: &str| {
        peer.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let all = list.as_array().into_iter().flatten();
    let given = all.filter(|peer| peer.get("source") == Some(&"controller".into()));
    given.map(|peer| (text(peer, "address"), text(peer, "daemon"))).collect()
}

/// Waits until a node's daemon knows the block of the other, and no other.
fn knows(node: &Node, other: &Node) -> Result<String> {
    let there = format!("{}:{PORT}", address(other));
    let mut last = Vec::new();
    let found = wait_for("a daemon to know where the other's addresses are", WAIT, || {
        pause();
        last = peers(node);
        let [(block, daemon)] = &last[..] else { return Ok(None) };
        Ok((block.starts_with("10.78.") && *daemon == there).then(|| block.clone()))
    });
    found.with_context(|| format!("{} knows {last:?}, not {there}", node.name()))
}

/// One daemon's certificate and roots against another daemon.
fn speaks(from: &Node, to: &Node) -> Result<()> {
    let host = address(to);
    let said = from.sh(&format!(
        "cd {FILES}; sleep 1 | timeout 10 openssl s_client -connect {host}:{PORT} -tls1_3 \
         -alpn vhost-rdma-cm/1 -cert cert.pem -key key.pem -CAfile ca.pem -verify_return_error \
         -verify_ip {host} 2>&1 || :"
    ))?;
    let good = ["Verify return code: 0 (ok)", "ALPN protocol: vhost-rdma-cm/1"];
    ensure!(
        good.iter().all(|words| said.contains(words)) && !said.contains("alert"),
        "{} does not get through to {}:\n{said}",
        from.name(),
        to.name()
    );
    Ok(())
}

fn current(kubectl: Kubectl<'_>) -> Result<(usize, String)> {
    let map = kubectl.get(&["configmap", "vhost-rdma-channel-roots", "-n", NAMESPACE])?;
    let text = |key: &str| map.pointer(&format!("/data/{key}")).and_then(Value::as_str);
    let all = text("ca.crt").context("no roots")?.matches("BEGIN CERTIFICATE").count();
    Ok((all, text("current").context("nothing says which root signs")?.to_owned()))
}

/// Both nodes have certificates of this root.
fn both_of(kubectl: Kubectl<'_>, nodes: [&Node; 2], root: &str) -> Result<bool> {
    for node in nodes {
        if certified(kubectl, &node.name())?.as_deref() != Some(root) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// See the module.
pub(crate) fn two_nodes(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    for name in ["vhost-rdma-agent", "default"] {
        // Others may have made it.
        kubectl.run(&["create", "serviceaccount", name, "-n", NAMESPACE]).ok();
    }
    bench.node.kill(ours::CONTROLLER, "TERM")?;
    let open = format!("{}:9748", address(bench.node));
    cluster::start_controller_with(bench, &["--peers", &open])?;
    let name = format!("{}-3", std::process::id());
    let second = super::start_second(bench.node, &name, bench.parts, Life::Ours)?;
    let done = follow(bench, &second);
    let ended = second.end();
    let restored = restore(bench);
    done?;
    ended?;
    restored
}

fn follow(bench: &Bench<'_>, second: &Node) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let nodes = [bench.node, second];
    let rnic = json!({"fabric": "east", "addressing": "Flat"});
    let ipam = json!({"cidrs": ["10.78.0.0/16"], "blockSize": 16});
    kubectl.apply(&ours_is("RdmaNetwork", NETWORK, &json!({"rnic": rnic, "ipam": ipam})))?;
    let pool = json!({"name": NETWORK, "network": NETWORK, "count": 1});
    let policy = json!({"nodeSelector": {}, "pools": [pool]});
    kubectl.apply(&ours_is("RdmaNodePolicy", "amber", &policy))?;
    for node in nodes {
        take_part(bench, node)?;
    }
    let (_, root) = current(kubectl)?;
    wait_for("both nodes to be certified and to follow the lists", WAIT, || {
        pause();
        Ok(both_of(kubectl, nodes, &root)?.then_some(()))
    })?;
    let (there, here) = (knows(bench.node, second)?, knows(second, bench.node)?);
    ensure!(there != here, "both nodes have the block {here}");
    speaks(bench.node, second)?;
    speaks(second, bench.node)?;
    rotated(bench, second, &root)?;
    alone(bench, second, &here)
}

/// Another root takes the place of the first, and at no time do the two not believe each other.
fn rotated(bench: &Bench<'_>, second: &Node, before: &str) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let now = "vhost-rdma.io/rotate=now";
    kubectl.run(&["annotate", "secret", SECRET, "-n", NAMESPACE, now, "--overwrite"])?;
    let begun = Instant::now();
    let mut times = 0;
    wait_for("another root, of which both have certificates", WAIT, || {
        speaks(bench.node, second)?;
        speaks(second, bench.node)?;
        times += 1;
        let (all, root) = current(kubectl)?;
        let over = all == 1 && root != before && both_of(kubectl, [bench.node, second], &root)?;
        Ok(over.then_some(()))
    })?;
    eprintln!(
        "    another root after {:.1} s; they spoke {times} times meanwhile",
        begun.elapsed().as_secs_f64()
    );
    speaks(bench.node, second)?;
    speaks(second, bench.node)
}

/// An agent that begins without API server and controller gives its daemon the peers.
fn alone(bench: &Bench<'_>, second: &Node, block: &str) -> Result<()> {
    second.kill(ours::AGENT, "KILL")?;
    for server in [ours::CONTROLLER, "kube-apiserver"] {
        bench.node.kill(server, "KILL")?;
    }
    let found = (|| {
        second.sh(&format!(
            "echo '[]' | vhost-rdma peer replace --network {NETWORK} --file - && rm -r {FILES}"
        ))?;
        ensure!(peers(second).is_empty(), "the daemon has peers still: {:?}", peers(second));
        start_agent(bench, second)?;
        let again = knows(second, bench.node)?;
        ensure!(again == block, "the block is {again}, not {block}");
        second.sh(&format!("test -s {FILES}/key.pem"))?;
        speaks(second, bench.node)
    })();
    plane::start_apiserver(bench.node)?;
    cluster::start_controller(bench)?;
    found
}

/// The first node as it was, and nothing of the second.
fn restore(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    if bench.node.alive(ours::CONTROLLER) {
        bench.node.kill(ours::CONTROLLER, "TERM")?;
        cluster::start_controller(bench)?;
    }
    kubectl.run(&["delete", "rdmanodepolicy", "amber", "--ignore-not-found"])?;
    kubectl.run(&["delete", "rdmanetwork", NETWORK, "--ignore-not-found", "--wait=false"])?;
    kubectl.run(&["delete", "node", "node2", "--ignore-not-found"])?;
    kubectl.run(&["delete", "clusterrolebinding", EVENTS, "--ignore-not-found"])?;
    for name in ["node1", "node2", ELSEWHERE[0]] {
        let name = &format!("channel-{name}");
        let pod = ["delete", "pod", name, "-n", NAMESPACE, "--ignore-not-found"];
        kubectl.run(&[&pod[..], &["--force", "--grace-period=0", "--wait=false"]].concat())?;
    }
    bench.node.kill(ours::AGENT, "TERM")?;
    ours::start_agent_with(bench.node, &["--cluster"])?;
    wait_for("the network to be gone from the node", WAIT, || {
        pause();
        let list = ours::daemon(bench.node, &["network", "list"])?;
        let Some(list) = list.as_array() else { bail!("no list of networks: {list}") };
        let there = list.iter().any(|network| network.get("name") == Some(&NETWORK.into()));
        Ok((!there).then_some(()))
    })
}
