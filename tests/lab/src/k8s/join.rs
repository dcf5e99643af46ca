//! A second node of a cluster: machine, network and accounts of its own; the API server is the
//! first one's.
//!
//! The two nodes are linked by a pair of interfaces and route each other's pods, as two machines of
//! one rack would.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::exec::{capture, tied, wait_for};
use crate::k8s::image::Image;
use crate::k8s::node::Node;
use crate::k8s::parts::Parts;
use crate::k8s::plane;

const WAIT: Duration = Duration::from_secs(120);
const STEP: Duration = Duration::from_secs(20);
/// The link between the nodes.
const LINK: &str = "lab0";

/// Makes `second` a node of the cluster of `first`; returns when it is Ready.
pub(crate) fn join(first: &Node, second: &Node, parts: &Parts) -> Result<()> {
    link(first, second)?;
    plane::furnish(second, parts)?;
    accounts(first, second)?;
    second.spawn("containerd", &["containerd"])?;
    wait_for("the second containerd", WAIT, || {
        second.check_alive("containerd")?;
        Ok(second.run(&["ctr", "version"]).ok())
    })?;
    Image::with_busybox(&parts.root)
        .entry(&["/bin/sleep", "1000000000"])
        .import(second, "localhost/pause:lab")?;
    plane::start_kubelet(second)?;
    plane::wait_ready(first, &second.name(), || second.check_alive("kubelet"))
}

/// A pair of interfaces, and the routes to each other's pods.
fn link(first: &Node, second: &Node) -> Result<()> {
    let (one, two) = (first.pid().to_string(), second.pid().to_string());
    let mut cmd = tied("nsenter");
    cmd.args(["--target", &one, "--net", "ip", "link", "add", LINK, "type", "veth"]);
    capture(cmd.args(["peer", "name", LINK, "netns", &two]), STEP).context("the nodes' link")?;
    for (node, own, other) in [(first, 1, second), (second, 2, first)] {
        let (to, via) = (other.subnet(), 3 - own);
        node.sh(&format!(
            "ip addr add 10.222.255.{own}/30 dev {LINK}
ip link set {LINK} up
ip route add 10.222.{to}.0/24 via 10.222.255.{via}"
        ))?;
    }
    // What programs in pods know of the API server.
    second
        .sh("for chain in OUTPUT PREROUTING; do
  iptables -t nat -A $chain -d 10.96.0.1 -p tcp --dport 443 -j DNAT --to-destination 10.222.0.1:6443
done")
        .map(drop)
}

/// The second node's certificates, and configurations that name the API server where it is from
/// there.
fn accounts(first: &Node, second: &Node) -> Result<()> {
    let (from, to) = (first.lab().join("pki"), second.lab().join("pki"));
    fs::create_dir_all(&to)?;
    fs::copy(from.join("ca.crt"), to.join("ca.crt"))?;
    for (account, name) in [("node2", "node"), ("agent", "agent")] {
        for kind in ["crt", "key"] {
            fs::copy(from.join(format!("{account}.{kind}")), to.join(format!("{account}.{kind}")))?;
        }
        let text = fs::read_to_string(from.join(format!("{account}.kubeconfig")))?;
        let text = text.replace("https://127.0.0.1:6443", "https://10.222.0.1:6443");
        fs::write(to.join(format!("{name}.kubeconfig")), text)?;
    }
    Ok(())
}
