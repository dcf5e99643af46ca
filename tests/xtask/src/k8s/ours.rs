//! What of ours runs on the node: daemon, agent, CNI plugin; and the virtual guest that stands in for a VM in a pod.
//!
//! Paths are those of an installed node. The configuration files are written here, as an administrator would.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cache::Cache;
use crate::exec::{run_logged, tied, wait_for, workspace};
use crate::k8s::image::Image;
use crate::k8s::node::Node;

const BUILD_WAIT: Duration = Duration::from_secs(1200);
const WAIT: Duration = Duration::from_secs(60);

/// The image of the virtual guest.
pub(crate) const GUEST_IMAGE: &str = "localhost/vguest:lab";
const DAEMON: &str = "vhost-rdma";
const METRICS: &str = "127.0.0.1:9471";

/// Programs of this workspace, as cargo left them.
#[derive(Debug, Clone)]
pub(crate) struct Ours {
    dir: PathBuf,
}

impl Ours {
    /// Debug builds: what is tested here is behaviour, and CI has compiled them already.
    pub(crate) fn build(cache: &Cache) -> Result<Self> {
        let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cmd.current_dir(workspace()).args(["build", "--locked", "--bins"]);
        for package in ["vhost-rdma", "virtual-guest"] {
            cmd.args(["-p", package]);
        }
        run_logged(&mut cmd, "building the node's programs", &cache.log("k8s-build"), BUILD_WAIT)?;
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| workspace().join("target"), PathBuf::from);
        let dir = target.join("debug");
        Ok(Self { dir: dir.canonicalize().with_context(|| dir.display().to_string())? })
    }

    fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Puts programs and images where they belong on a node.
    pub(crate) fn install(&self, node: &Node, root: &Path) -> Result<()> {
        for name in [DAEMON] {
            fs::copy(self.program(name), node.lab().join("bin").join(name))
                .with_context(|| format!("cannot copy {name}"))?;
        }
        Image::with_busybox(root)
            .program(&self.program("vguest-pod"), "bin/vguest-pod")?
            .entry(&["/bin/vguest-pod"])
            .import(node, GUEST_IMAGE)
    }
}

/// Starts the daemon on the node and waits until it answers.
pub(crate) fn start_daemon(node: &Node) -> Result<()> {
    node.spawn(DAEMON, &["/lab/bin/vhost-rdma", "serve", "--metrics", METRICS])?;
    wait_for("the daemon", WAIT, || {
        node.check_alive(DAEMON)?;
        Ok(daemon(node, &["status"]).ok())
    })
    .map(drop)
}

/// One command of the daemon's command line, with `--json`.
pub(crate) fn daemon(node: &Node, args: &[&str]) -> Result<Value> {
    let mut all = vec!["/lab/bin/vhost-rdma", "--json"];
    all.extend_from_slice(args);
    let text = node.run(&all)?;
    serde_json::from_str(&text).with_context(|| format!("`vhost-rdma {}`:\n{text}", args.join(" ")))
}

/// The daemon's metrics page.
pub(crate) fn metrics(node: &Node) -> Result<String> {
    node.run(&["busybox", "wget", "-q", "-O", "-", &format!("http://{METRICS}/metrics")])
}
