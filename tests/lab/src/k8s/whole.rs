//! `manifests/cluster-rnic` applied whole: controller, daemon, agent and CNI plugin from an image,
//! on a node that had nothing of ours. There is no RNIC; that the parts of this overlay start, are
//! where it says, find each other and serve pods is what is seen here, and what they do with RNICs
//! in `cargo xtask vm cluster`.
//!
//! What is changed is what an administrator of such an old server changes: the image, definitions
//! without CEL, and a controller that believes agents whose tokens name no pod. The lab has neither
//! DNS nor kube-proxy; a line of `/etc/hosts` and one of iptables stand for the Service.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::exec::wait_for;
use crate::k8s::cluster::{self, NAMESPACE, ours_is};
use crate::k8s::manifests;
use crate::k8s::ours;
use crate::k8s::plane;
use crate::k8s::pods::Wanted;
use crate::k8s::test::Bench;

const WAIT: Duration = Duration::from_secs(240);
const POOL: &str = "whole";
const FABRIC: &str = "over";
const TAG: &str = "whole";
const USERS: [&str; 2] = ["w-one", "w-two"];
/// Where agents find the controller, in the place of the Service's address.
const SERVICE: [&str; 2] = ["10.96.77.77", "vhost-rdma-controller.vhost-rdma.svc"];
const KINDS: [&str; 4] =
    ["rdmanodepolicy/whole", "rdmatenant/whole", "rdmanicclass/whole", "rdmanetwork/over"];

fn pause() {
    std::thread::sleep(Duration::from_millis(300));
}

/// The files, with this image and for this server.
fn customise(bench: &Bench<'_>) -> Result<String> {
    for dir in manifests::kustomizations()? {
        cluster::copy(&dir, bench.node)?;
    }
    let change = |file: &str, changes: &[(&str, &str)]| -> Result<()> {
        let path = bench.node.path(cluster::DIR).join(file);
        let mut text = fs::read_to_string(&path)?;
        for (from, to) in changes {
            ensure!(text.contains(from), "{file} has no {from:?}");
            text = text.replace(from, to);
        }
        Ok(fs::write(&path, text)?)
    };
    let image = [
        (
            "newName: registry.example.org/vhost-rdma/node",
            &*format!("newName: {}", manifests::IMAGE),
        ),
        ("newTag: 0.1.0", &*format!("newTag: {TAG}")),
    ];
    change("node/kustomization.yaml", &image)?;
    change("controller/kustomization.yaml", &image)?;
    change("cluster-rnic/kustomization.yaml", &[("../crds/base", "../crds/no-cel")])?;
    let option = [("\"--json\",", "\"--json\", \"--unproven-agents\", \"--node-grace=5\",")];
    change("controller/controller.yaml", &option)?;
    Ok(format!("{}/cluster-rnic", cluster::DIR))
}

/// Every part of the overlay runs and is ready.
fn ready(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let mut last = Value::Null;
    let outcome = wait_for("all parts to be ready", WAIT, || {
        pause();
        last = kubectl.get(&["daemonsets,deployments", "-n", NAMESPACE])?;
        let all = last.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
        let good = all.iter().filter(|set| {
            let number = |at: &str| set.pointer(at).and_then(Value::as_u64).unwrap_or(0);
            let wanted = number("/status/desiredNumberScheduled").max(number("/spec/replicas"));
            wanted > 0
                && number("/status/numberReady").max(number("/status/readyReplicas")) == wanted
        });
        Ok((good.count() == 4).then_some(()))
    });
    outcome.with_context(|| manifests::tell(bench))
}

/// Whoever asks for the Service reaches a pod of the controller.
fn served(bench: &Bench<'_>) -> Result<String> {
    let select = "app.kubernetes.io/name=vhost-rdma-controller";
    let path = "jsonpath={.items[0].status.podIP}";
    let get = ["get", "pods", "-n", NAMESPACE, "-l", select, "-o", path];
    let pod = wait_for("the controller's address", WAIT, || {
        pause();
        let address = bench.pods.kubectl.run(&get)?;
        Ok((!address.trim().is_empty()).then(|| address.trim().to_owned()))
    })?;
    route(bench, &pod, true)?;
    Ok(pod)
}

/// Makes the Service's address lead to a pod, or no longer.
fn route(bench: &Bench<'_>, pod: &str, there: bool) -> Result<()> {
    let [address, _] = SERVICE;
    let (route, rule) = if there { ("add", "-A") } else { ("del", "-D") };
    // Where it leads before the rule does not matter, but there must be a way.
    let script = format!(
        "ip route {route} {address}/32 dev k8sbr0
iptables -t nat {rule} OUTPUT -d {address} -p tcp --dport 9748 -j DNAT --to-destination {pod}:9748"
    );
    bench.node.sh(&script).map(drop)
}

/// The daemon is on the node's network and may open its devices; the agent is there and may
/// nothing.
fn placed(bench: &Bench<'_>) -> Result<()> {
    let host = bench.node.sh("readlink /proc/self/ns/net")?;
    for (name, all) in [("vhost-rdma serve", true), ("vhost-rdma-agent serve", false)] {
        let said = bench.node.sh(&format!(
            "p=$(pgrep -of '{name}'); readlink /proc/$p/ns/net; \
             sed -n 's/^CapEff:.//p' /proc/$p/status"
        ))?;
        let (namespace, capabilities) = said.split_once('\n').context("two lines")?;
        ensure!(namespace == host.trim(), "{name} is not on the node's network");
        let has = u64::from_str_radix(capabilities.trim(), 16)?;
        ensure!((has != 0) == all, "{name} has the capabilities {has:x}");
    }
    Ok(())
}

/// The node has a certificate by the controller and follows its lists.
fn certified(bench: &Bench<'_>) -> Result<()> {
    let mut last = Value::Null;
    let outcome = wait_for("the node to be certified and to follow the lists", WAIT, || {
        pause();
        last = bench.pods.kubectl.get(&["rdmanode", "node1"])?;
        let all = last.pointer("/status/conditions").and_then(Value::as_array);
        let holds = |kind: &str| {
            all.into_iter().flatten().any(|c| {
                c.get("type") == Some(&kind.into()) && c.get("status") == Some(&"True".into())
            })
        };
        Ok((holds("Certified") && holds("PeersFollowed")).then_some(()))
    });
    outcome.with_context(|| format!("it says {last:#}"))
}

/// See the module.
pub(crate) fn applied(bench: &mut Bench<'_>) -> Result<()> {
    manifests::import(bench, TAG)?;
    if bench.node.alive(ours::AGENT) {
        manifests::clear(bench)?;
    }
    let (kubectl, overlay) = (bench.pods.kubectl, customise(bench)?);
    let [address, name] = SERVICE;
    bench.node.sh(&format!("echo '{address} {name}' >> /etc/hosts"))?;
    kubectl.run(&["apply", "-f", &format!("{}/node/namespace.yaml", cluster::DIR)])?;
    kubectl.run(&["apply", "-k", &overlay])?;
    let controller = served(bench)?;
    ready(bench)?;
    placed(bench)?;
    objects(bench)?;
    certified(bench)?;
    bench.offered(POOL, 2)?;
    let users = [
        bench.pods.start(&Wanted::new(USERS[0], POOL))?,
        bench.pods.start(&Wanted::new(USERS[1], POOL))?,
    ];
    bench.counted(&users[0], &users[1])?;
    kubectl.delete_pods(&USERS)?;
    removed(bench, &overlay)?;
    route(bench, &controller, false)
}

fn objects(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.run(&["label", "namespace", "default", "team=whole", "--overwrite"])?;
    let socket = json!({"owner": 1000, "group": 1000, "mode": "0660"});
    let selector = json!({"matchLabels": {"team": "whole"}});
    let pool = |name: &str| json!({"name": name, "network": name, "class": "whole", "count": 2});
    let rnic = json!({"rnic": {"fabric": "east"}, "ipam": {"cidrs": ["10.79.0.0/16"]}});
    for object in [
        ours_is("RdmaNetwork", POOL, &json!({"soft": {}})),
        ours_is("RdmaNetwork", FABRIC, &rnic),
        ours_is("RdmaNicClass", "whole", &json!({ "socket": socket })),
        ours_is("RdmaTenant", "whole", &json!({"namespaceSelector": selector, "networks": [POOL]})),
        ours_is(
            "RdmaNodePolicy",
            "whole",
            &json!({"nodeSelector": {}, "pools": [pool(POOL), pool(FABRIC)]}),
        ),
    ] {
        kubectl.apply(&object)?;
    }
    Ok(())
}

/// Objects first, while there is a controller, then the overlay; nothing of it is left.
fn removed(bench: &Bench<'_>, overlay: &str) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    for kind in KINDS {
        kubectl.run(&["delete", kind, "--wait=false"])?;
    }
    kubectl.run(&["delete", "rdmanetwork", POOL, "--wait=false"])?;
    kubectl.wait_gone(&["rdmanetworks"])?;
    kubectl.run(&["delete", "-k", overlay, "--wait=false"])?;
    kubectl.wait_gone(&["namespace", NAMESPACE])?;
    let kinds = ["crd,clusterroles,clusterrolebindings", "-o", "name"];
    wait_for("definitions and roles to go", WAIT, || {
        pause();
        let left = kubectl.run(&[&["get"], &kinds[..]].concat())?;
        let ours = left.lines().any(|line| line.contains("vhost-rdma"));
        Ok((!ours).then_some(()))
    })?;
    let [_, name] = SERVICE;
    bench
        .node
        .sh(&format!("sed '/{name}/d' /etc/hosts > /tmp/hosts; cat /tmp/hosts > /etc/hosts"))?;
    bench.node.sh(&format!("rm -rf {}", manifests::LEFT_BY_HAND))?;
    let _ = fs::remove_dir("/dev/infiniband");
    plane::healthy(bench.node)
}
