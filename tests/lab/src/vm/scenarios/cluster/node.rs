//! A node of the cluster: a VM with rxe0, our daemon and the agent.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::plane::{PEERS_PORT, SERVERS};
use crate::cache::Cache;
use crate::exec::{capture, run_logged, tied, workspace};
use crate::k8s::ours::CONTROLLER;
use crate::vm::NAMES;
use crate::vm::guest::{self, Guest};

const BUILD_WAIT: Duration = Duration::from_secs(1800);
const STRIP_WAIT: Duration = Duration::from_secs(60);
pub(super) const STEP: Duration = Duration::from_secs(180);
/// What runs in the VMs.
const OF_NODES: [&str; 3] = ["vhost-rdma", "vhost-rdma-agent", "vguest-pod"];

/// The second network card leads to the servers, by QEMU's user-mode network. The first one's MTU
/// has room for RoCE's largest.
const CARDS: &str = "set -e
ip link set eth0 mtu 4200
ip addr add 10.0.2.15/24 dev eth1
ip link set eth1 up
ip route add 10.222.0.0/24 via 10.0.2.2
";

/// The daemon, which begins before there is a certificate.
const DAEMON: &str = "set -e
for p in vhost-rdma vhost-rdma-agent vguest-pod; do cp -u /host/products/$p /usr/bin/; done
files=/run/vhost-rdma/channel/current
ulimit -l unlimited
setsid vhost-rdma serve --cm-listen 0.0.0.0:4790 --cm-wait --cm-cert $files/cert.pem \
  --cm-key $files/key.pem --cm-ca $files/ca.pem < /dev/null >> /host/daemon.log 2>&1 &
n=0; until vhost-rdma status > /dev/null 2>&1; do
  sleep 0.2; n=$((n+1)); [ $n -lt 300 ] || { tail -20 /host/daemon.log; exit 1; }
done
";

/// The agent; its file has no pools, those are the controller's.
const AGENT: &str = "set -e
mkdir -p /var/lib/kubelet/device-plugins /etc/vhost-rdma-agent
: > /etc/vhost-rdma-agent/config.toml
KUBECONFIG=/host/agent.kubeconfig setsid vhost-rdma-agent serve --node-name @NODE@ --cluster \
  --channel-address @ADDRESS@ --controller @CONTROLLER@ < /dev/null >> /host/agent.log 2>&1 &
n=0; until vhost-rdma-agent status > /dev/null 2>&1; do
  sleep 0.2; n=$((n+1)); [ $n -lt 300 ] || { tail -20 /host/agent.log; exit 1; }
done
";

/// Ticks of processor time (10 ms) that our programs took in ten seconds, a line each.
const BUSY: &str = "ticks() { for p in $(pidof vhost-rdma vhost-rdma-agent); do
  t=$(sed 's/.*) //' /proc/$p/stat | cut -d' ' -f12,13)
  echo $p $(cat /proc/$p/comm) $((${t% *} + ${t#* }))
done; }
ticks > /tmp/before; sleep 10; ticks | while read -r p name after; do
  before=$(sed -n \"s/^$p .* //p\" /tmp/before); echo $name $p $((after - ${before:-0}))
done
";

/// A NIC of a network, and the virtual guest on it, which has the address.
const GUEST: &str = "set -e
vhost-rdma nic add @NIC@ --network @NETWORK@ --backing rnic:rxe0@@HOST@ --address @ADDRESS@
socket=$(vhost-rdma --json nic show @NIC@ | sed -n 's/.*\"socket\": *\"\\([^\"]*\\)\".*/\\1/p' | \
    head -n 1)
ulimit -l unlimited
VHOST_RDMA_PATIENCE=4 setsid vguest-pod --socket $socket --address @ADDRESS@ \
  --listen 0.0.0.0:@PORT@ < /dev/null >> /host/@NIC@.log 2>&1 &
n=0; until grep -q 'session 1' /host/@NIC@.log; do
  sleep 0.2; n=$((n+1)); [ $n -lt 300 ] || { cat /host/@NIC@.log; exit 1; }
done
";

/// The programs of this workspace.
pub(super) struct Products {
    dir: PathBuf,
}

/// Debug builds: what is looked at here is behaviour.
pub(super) fn build(cache: &Cache) -> Result<Products> {
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace()).args(["build", "--locked", "--bins"]);
    for package in ["vhost-rdma", "vhost-rdma-agent", CONTROLLER, "virtual-guest"] {
        cmd.args(["-p", package]);
    }
    cmd.args(["--features", "vhost-rdma/host-rnic"]);
    let log = cache.log("vm-cluster-build");
    run_logged(&mut cmd, "building the nodes' programs", &log, BUILD_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    let dir = target.join("debug");
    Ok(Products { dir: dir.canonicalize().with_context(|| dir.display().to_string())? })
}

impl Products {
    pub(super) fn controller(&self) -> PathBuf {
        self.dir.join(CONTROLLER)
    }

    /// What the VMs get, in `to`, without what debuggers want: an emulated machine reads it.
    pub(super) fn of_nodes(&self, to: &Path) -> Result<Vec<PathBuf>> {
        fs::create_dir_all(to)?;
        let strip = |name: &str| {
            let stripped = to.join(name);
            let mut cmd = tied("objcopy");
            cmd.arg("--strip-debug").arg(self.dir.join(name)).arg(&stripped);
            capture(&mut cmd, STRIP_WAIT).map(|_| stripped)
        };
        OF_NODES.into_iter().map(strip).collect()
    }
}

/// Machine, memory and two network cards: the cable between the VMs, and the way to the servers.
pub(super) fn options(run: &Path, n: usize, memory: u32) -> Result<Vec<String>> {
    let name = |n: usize| NAMES.get(n).copied().context("too many VMs");
    let (here, there) = (guest::cable(run, name(n)?), guest::cable(run, name(n ^ 1)?));
    let (here, there) = (here.display(), there.display());
    let number = u8::try_from(n + 1)?;
    let words = [
        "-M".to_owned(),
        "q35,memory-backend=mem".to_owned(),
        "-m".to_owned(),
        format!("{memory}M"),
        "-object".to_owned(),
        format!("memory-backend-memfd,id=mem,size={memory}M,share=on"),
        "-netdev".to_owned(),
        format!(
            "dgram,id=n0,local.type=unix,local.path={here},remote.type=unix,remote.path={there}"
        ),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=n0,mac={}", guest::mac(number)),
        "-netdev".to_owned(),
        "user,id=n1,ipv6=off".to_owned(),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=n1,mac=52:54:00:00:02:{number:02x}"),
    ];
    Ok(words.into())
}

/// What a node is called, and where it is.
pub(super) struct Host {
    pub(super) node: String,
    pub(super) address: String,
}

impl Host {
    /// VM `number`, counted from 1.
    pub(super) fn new(number: usize) -> Self {
        let name = NAMES.get(number - 1).copied().unwrap_or_default();
        Self { node: format!("node-{name}"), address: format!("10.9.0.{number}") }
    }

    /// Where other nodes' daemons reach this one's.
    pub(super) fn endpoint(&self) -> String {
        format!("{}:4790", self.address)
    }

    /// Where this node's virtual guest of the port takes requests.
    pub(super) fn guest(&self, port: u16) -> String {
        format!("{}:{port}", self.address)
    }

    /// The network cards, before rxe is on one of them.
    pub(super) fn cards(guest: &mut Guest) -> Result<()> {
        guest.must(CARDS, STEP).map(drop)
    }

    pub(super) fn start_daemon(guest: &mut Guest) -> Result<()> {
        guest.must(DAEMON, STEP).map(drop)
    }

    pub(super) fn start_agent(&self, guest: &mut Guest) -> Result<()> {
        let script = AGENT
            .replace("@NODE@", &self.node)
            .replace("@ADDRESS@", &self.address)
            .replace("@CONTROLLER@", &format!("{SERVERS}:{PEERS_PORT}"));
        guest.must(&script, STEP).map(drop)
    }

    /// A NIC of a network with this address, behind the host's, and a virtual guest that listens at
    /// the port.
    pub(super) fn add_guest(&self, guest: &mut Guest, nic: &NicPlan<'_>) -> Result<()> {
        let script = GUEST
            .replace("@NETWORK@", nic.network)
            .replace("@HOST@", &self.address)
            .replace("@ADDRESS@", nic.address)
            .replace("@PORT@", &nic.port.to_string())
            .replace("@NIC@", nic.network);
        guest.must(&script, STEP).map(drop)
    }
}

/// What our programs took of a processor in ten seconds: name and seconds of each.
pub(super) fn busy(guest: &mut Guest) -> Result<Vec<(String, f64)>> {
    let text = guest.must(BUSY, STEP)?;
    let of_line = |line: &str| {
        let (name, ticks) = line.rsplit_once(' ')?;
        Some((name.to_owned(), ticks.parse::<f64>().ok()? / 100.0))
    };
    Ok(text.lines().filter_map(of_line).collect())
}

/// A NIC to be. It is called as its network is.
pub(super) struct NicPlan<'a> {
    pub(super) network: &'a str,
    pub(super) address: &'a str,
    pub(super) port: u16,
}

/// What a daemon has of the controller: blocks, where they are, and whose daemons are there.
pub(super) fn peers(guest: &mut Guest, network: &str) -> Result<Vec<[String; 3]>> {
    let out = guest.run(&format!("vhost-rdma --json peer list --network {network}"), STEP)?;
    let list: Value = serde_json::from_str(&out.text).unwrap_or_default();
    let text = |peer: &Value, key: &str| {
        peer.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let all = list.as_array().into_iter().flatten();
    let given = all.filter(|peer| peer.get("source") == Some(&"controller".into()));
    Ok(given.map(|peer| ["address", "through", "daemon"].map(|key| text(peer, key))).collect())
}
