//! What of ours runs on the node: daemon, agent, CNI plugin; and the virtual guest that stands in
//! for a VM in a pod.
//!
//! Paths are those of an installed node. The configuration files are written here, as an
//! administrator would.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cache::Cache;
use crate::exec::{run_logged, tail, tied, wait_for, workspace};
use crate::k8s::image::Image;
use crate::k8s::node::Node;
use crate::process::newest_glibc;
use crate::process::products::OLDEST_GLIBC;
use crate::products::{Profile, static_programs};

const BUILD_WAIT: Duration = Duration::from_secs(1200);
const WAIT: Duration = Duration::from_secs(60);

/// The image of the virtual guest.
pub(crate) const GUEST_IMAGE: &str = "localhost/vguest:lab";
pub(crate) const DAEMON: &str = "vhost-rdma";
pub(crate) const AGENT: &str = "vhost-rdma-agent";
const CNI: &str = "vhost-rdma-cni";
const GUEST: &str = "vguest-pod";
pub(crate) const CONTROLLER: &str = "vhost-rdma-controller";
/// Our part of the network configuration list.
pub(crate) const CHAINED: &str = r#"{"type": "vhost-rdma-cni"}"#;
const METRICS: &str = "127.0.0.1:9471";
/// Where the daemon of `manifests/node` has them.
const METRICS_SOCKET: &str = "/run/vhost-rdma/metrics.sock";

/// Three tenants' networks. The socket belongs to the user of the pods; the third has a netdev
/// beside each NIC. Then two whose NICs are for processes (`processes`).
const POOLS: &str = r#"
[[pools]]
name = "blue"
kind = "vhost-user"
count = 24
network = "blue"
vni = 7
socket = { owner = 1000, group = 1000, mode = "0660" }

[[pools]]
name = "green"
kind = "vhost-user"
count = 4
network = "green"
vni = 8
socket = { owner = 1000, group = 1000, mode = "0660" }

[[pools]]
name = "tapped"
kind = "vhost-user"
count = 4
network = "tapped"
vni = 9
socket = { owner = 1000, group = 1000, mode = "0660" }
companion = { bridge = "k8sbr0" }

[[pools]]
name = "plain"
kind = "process"
count = 4
network = "plain"
vni = 10
socket = { owner = 1000, group = 1000, mode = "0660" }

[[pools]]
name = "apart"
kind = "process"
count = 2
network = "apart"
vni = 11
socket = { owner = 1000, group = 1000, mode = "0660" }
"#;

const PROGRAMS: [&str; 5] = [DAEMON, AGENT, CONTROLLER, CNI, GUEST];

/// Programs of this workspace, as cargo left them.
#[derive(Debug, Clone)]
pub(crate) struct Ours {
    dir: PathBuf,
}

impl Ours {
    /// Debug builds: what is tested here is behaviour. The programs are those that all tests have
    /// been built with, so CI has compiled them; with features of their own it would do so again.
    pub(crate) fn build(cache: &Cache) -> Result<Self> {
        let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cmd.current_dir(workspace()).args(["test", "--no-run", "--locked", "--workspace"]);
        run_logged(&mut cmd, "building the node's programs", &cache.log("k8s-build"), BUILD_WAIT)?;
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| workspace().join("target"), PathBuf::from);
        let dir = target.join("debug");
        let ours = Self { dir: dir.canonicalize().with_context(|| dir.display().to_string())? };
        // The node's root and its images are Debian 12's.
        if ours.run_on(OLDEST_GLIBC)? { Ok(ours) } else { Self::without_libraries(cache) }
    }

    /// Whether a node with this C library can run all of them.
    fn run_on(&self, node: (u32, u32)) -> Result<bool> {
        for program in PROGRAMS {
            if newest_glibc(&self.program(program))? > Some(node) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Static programs, which any node can run: this machine's C library is newer than the node's.
    fn without_libraries(cache: &Cache) -> Result<Self> {
        let packages = [DAEMON, AGENT, CONTROLLER, CNI, "virtual-guest"];
        let built = static_programs(cache, Profile::Debug, &packages, &PROGRAMS)?;
        let dir = built.first().and_then(|path| path.parent()).context("nothing was built")?;
        Ok(Self { dir: dir.to_path_buf() })
    }

    fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Puts programs and images where they belong on a node.
    pub(crate) fn install(&self, node: &Node, root: &Path) -> Result<()> {
        for (name, dir) in [
            (DAEMON, "/usr/bin"),
            (AGENT, "/usr/bin"),
            (CONTROLLER, "/usr/bin"),
            (CNI, "/opt/cni/bin"),
        ] {
            fs::copy(self.program(name), node.path(dir).join(name))
                .with_context(|| format!("cannot copy {name}"))?;
        }
        fs::create_dir_all(node.path("/etc/vhost-rdma-agent"))?;
        fs::write(node.path("/etc/vhost-rdma-agent/config.toml"), POOLS)?;
        Image::with_busybox(root)
            .program(&self.program(GUEST), "bin/vguest-pod")?
            .entry(&["/bin/vguest-pod"])
            .import(node, GUEST_IMAGE)
    }
}

/// Gives a second node what [`Ours::install`] gave the first.
pub(crate) fn copy(first: &Node, second: &Node) -> Result<()> {
    for (name, dir) in [(DAEMON, "/usr/bin"), (AGENT, "/usr/bin"), (CNI, "/opt/cni/bin")] {
        fs::copy(first.path(dir).join(name), second.path(dir).join(name))?;
    }
    fs::create_dir_all(second.path("/etc/vhost-rdma-agent"))?;
    fs::write(second.path("/etc/vhost-rdma-agent/config.toml"), POOLS)?;
    let file = "guest.tar";
    first.run(&[
        "ctr",
        "-n",
        "k8s.io",
        "images",
        "export",
        &format!("/lab/{file}"),
        GUEST_IMAGE,
    ])?;
    fs::rename(first.lab().join(file), second.lab().join(file))?;
    second.run(&["ctr", "-n", "k8s.io", "images", "import", &format!("/lab/{file}")])?;
    fs::remove_file(second.lab().join(file)).map_err(Into::into)
}

/// Starts the daemon on the node and waits until it answers.
pub(crate) fn start_daemon(node: &Node) -> Result<()> {
    start_daemon_with(node, &[])
}

/// The same with more options.
pub(crate) fn start_daemon_with(node: &Node, options: &[&str]) -> Result<()> {
    let command = ["/usr/bin/vhost-rdma", "serve", "--metrics", METRICS];
    node.spawn(DAEMON, &[&command[..], options].concat())?;
    wait_for("the daemon", WAIT, || {
        node.check_alive(DAEMON)?;
        Ok(daemon(node, &["status"]).ok())
    })
    .map(drop)
}

/// One command of the daemon's command line, with `--json`.
pub(crate) fn daemon(node: &Node, args: &[&str]) -> Result<Value> {
    let mut all = vec!["/usr/bin/vhost-rdma", "--json"];
    all.extend_from_slice(args);
    let text = node.run(&all)?;
    serde_json::from_str(&text).with_context(|| format!("`vhost-rdma {}`:\n{text}", args.join(" ")))
}

/// Starts the agent and waits until it is ready.
pub(crate) fn start_agent(node: &Node) -> Result<()> {
    start_agent_with(node, &[])
}

/// The same with more options.
pub(crate) fn start_agent_with(node: &Node, options: &[&str]) -> Result<()> {
    start_agent_as(node, "/lab/pki/agent.kubeconfig", options)
}

/// The same with an account of its own.
pub(crate) fn start_agent_as(node: &Node, account: &str, options: &[&str]) -> Result<()> {
    let variable = format!("KUBECONFIG={account}");
    let name = node.name();
    let mut command =
        vec!["env", &variable, "/usr/bin/vhost-rdma-agent", "serve", "--node-name", &name];
    command.extend_from_slice(options);
    node.spawn(AGENT, &command)?;
    wait_for("the agent", WAIT, || {
        node.check_alive(AGENT)?;
        Ok(agent(node).ok().filter(|s| s.get("ready") == Some(&true.into())))
    })
    .map(drop)
}

/// What the agent says of itself.
pub(crate) fn agent(node: &Node) -> Result<Value> {
    let text = node.run(&["/usr/bin/vhost-rdma-agent", "status", "--json"])?;
    serde_json::from_str(&text).with_context(|| format!("`vhost-rdma-agent status`:\n{text}"))
}

/// The agent's devices that are not free.
pub(crate) fn granted(node: &Node) -> Result<BTreeSet<String>> {
    let status = agent(node)?;
    let devices = status.get("devices").and_then(Value::as_array).context("no devices")?;
    Ok(devices
        .iter()
        .filter(|d| d.get("state").and_then(Value::as_str) != Some("free"))
        .filter_map(|d| d.get("id").and_then(Value::as_str).map(ToOwned::to_owned))
        .collect())
}

/// The agent's name for a NIC in the daemon begins like this.
const PREFIX: &str = "k8s.";

/// IDs of the agent's NICs in the daemon.
pub(crate) fn nics(node: &Node) -> Result<BTreeSet<String>> {
    let list = daemon(node, &["nic", "list"])?;
    let list = list.as_array().context("no list of NICs")?;
    Ok(list
        .iter()
        .filter_map(|n| n.get("name")?.as_str()?.strip_prefix(PREFIX).map(ToOwned::to_owned))
        .collect())
}

/// A NIC as the daemon shows it.
pub(crate) fn nic(node: &Node, id: &str) -> Result<Value> {
    daemon(node, &["nic", "show", &format!("{PREFIX}{id}")])
}

/// A page of metrics is shown for a second.
const SHOWN: Duration = Duration::from_millis(1100);

/// The daemon's metrics page, by the way that it offers, as of now.
pub(crate) fn metrics(node: &Node) -> Result<String> {
    std::thread::sleep(SHOWN);
    let Ok(mut socket) = UnixStream::connect(node.path(METRICS_SOCKET)) else {
        // In the network namespace that the daemon is in: the node's, or its pod's.
        let get = format!("busybox wget -q -O - http://{METRICS}/metrics");
        return node.sh(&format!("nsenter -t $(pgrep -ox vhost-rdma) -n {get}"));
    };
    socket.set_read_timeout(Some(WAIT))?;
    socket.write_all(b"GET /metrics HTTP/1.0\r\nHost: node\r\n\r\n")?;
    let mut page = String::new();
    socket.read_to_string(&mut page)?;
    Ok(page)
}

/// Payload bytes, sent and received, by ID, from the daemon's metrics page.
pub(crate) fn bytes(node: &Node) -> Result<BTreeMap<String, u64>> {
    let page = metrics(node)?;
    let mut sums = BTreeMap::new();
    for line in page.lines() {
        let counts = ["vhost_rdma_nic_tx_bytes_total{", "vhost_rdma_nic_rx_bytes_total{"];
        if !counts.iter().any(|c| line.starts_with(c)) {
            continue;
        }
        let Some((labels, value)) = line.rsplit_once(' ') else { continue };
        let id = labels.split_once(&format!("nic=\"{PREFIX}")).and_then(|(_, r)| r.split_once('"'));
        if let Some((id, _)) = id {
            *sums.entry(id.to_owned()).or_default() += value.parse::<u64>()?;
        }
    }
    Ok(sums)
}

/// The IDs that kubelet has on disk as given to pods.
pub(crate) fn kubelet_checkpoint(node: &Node) -> Result<BTreeSet<String>> {
    let file = node.path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint");
    let value: Value = serde_json::from_str(&fs::read_to_string(file)?)?;
    let entries = value.pointer("/Data/PodDeviceEntries").and_then(Value::as_array);
    let mut ids = BTreeSet::new();
    for entry in entries.into_iter().flatten() {
        // A list by NUMA node.
        let by_node = entry.get("DeviceIDs").and_then(Value::as_object);
        for list in by_node.into_iter().flat_map(|m| m.values()) {
            let list = list.as_array().into_iter().flatten();
            ids.extend(list.filter_map(|i| i.as_str().map(ToOwned::to_owned)));
        }
    }
    Ok(ids)
}

/// The ends of the logs that tell most.
pub(crate) fn tails(node: &Node) -> String {
    [AGENT, DAEMON, "kubelet"]
        .map(|name| format!("the end of {name}'s log:\n{}", tail(&node.log(name), 0, 12)))
        .concat()
}
