//! The CNI plugin, called by containerd behind the bridge plugin of the pod network.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::k8s::pods::Wanted;
use crate::k8s::test::Bench;
use crate::k8s::{ours, plane};

/// A pool whose NICs have a companion netdev.
const POOL: &str = "tapped";

fn version(bench: &Bench<'_>, version: &str) -> Result<()> {
    plane::write_network(bench.node, version, Some(ours::CHAINED))?;
    let (a, _) = bench.pair()?;
    let with = bench.pods.start(&Wanted::new("tapped", POOL))?;
    let tap = format!("vr-{}", with.id);
    let owner = format!("/sys/class/net/{tap}/owner");
    let owner = bench.pods.kubectl.run(&["exec", "tapped", "--", "/bin/cat", &owner])?;
    ensure!(owner.trim() == "1000", "the tap {tap} belongs to {owner}");
    let id = with.id.as_str();
    let state = |node| -> Result<String> {
        let status = ours::agent(node)?;
        let devices = status.get("devices").and_then(Value::as_array).context("no devices")?;
        let of = devices.iter().find(|d| d.get("id").and_then(Value::as_str) == Some(id));
        Ok(of.and_then(|d| d.get("state")?.as_str()).unwrap_or("unknown").to_owned())
    };
    let now = state(bench.node)?;
    ensure!(now == "attached", "the agent says that {id} is {now}");
    bench.pods.start(&Wanted { name: "plain", pool: None, args: &[], huge: false, plain: None })?;
    let links = bench.pods.kubectl.run(&["exec", "plain", "--", "/bin/ip", "-o", "link"])?;
    ensure!(links.lines().count() == 2, "a pod without a NIC has more than lo and eth0:\n{links}");
    bench.pods.kubectl.delete_pods(&["tapped", "plain"])?;
    let left = bench.node.sh("ip -o link | grep -c 'vr-' || true")?;
    ensure!(left.trim() == "0", "companions are left: {left}");
    bench.consistent(&[])?;
    let (_, b) = bench.pair()?;
    bench.counted(a, b)
}

pub(crate) fn cni_040(bench: &mut Bench<'_>) -> Result<()> {
    version(bench, "0.4.0")
}

pub(crate) fn cni_100(bench: &mut Bench<'_>) -> Result<()> {
    version(bench, "1.0.0")
}
