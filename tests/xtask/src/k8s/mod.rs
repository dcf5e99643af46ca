//! A real Kubernetes for tests: API server, scheduler, controller manager, kubelet, containerd and runc on one node in namespaces of its
//! own, our daemon and agent on it as they would be on any node.
//!
//! `parts` makes what it consists of, once; `node` is the machine-in-a-machine; `plane` starts the servers; `image` makes
//! container images; `kubectl` asks and tells; `ours` is what is tested, `pods` who uses
//! it, `test`, `restarts`, `attach`, `cluster`, `vms` and `manifests` the rows.

mod attach;
mod cluster;
mod huge;
pub(crate) mod image;
mod kubectl;
mod manifests;
mod node;
mod ours;
pub(crate) mod parts;
mod plane;
mod pods;
mod restarts;
pub(crate) mod test;
mod vms;

use std::time::Instant;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::host;
use image::Image;
use node::{Life, Node};
use ours::Ours;
use parts::Parts;

/// The name of the cluster that `up` makes.
const UP: &str = "up";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Start a cluster that stays; prints how to reach it
    Up,
    /// Everything that a node must do: pods with NICs, restarts and deaths of its parts, CNI
    Test(test::Args),
    /// End the cluster that `up` made; fails if anything of it is left on the machine
    Down,
}

impl Command {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        host::require_root()?;
        match self {
            Self::Up => up(cache),
            Self::Test(args) => args.run(cache),
            Self::Down => down(),
        }
    }
}

/// Starts a cluster with the images that every pod needs.
fn start(cache: &Cache, name: &str, life: Life) -> Result<(Node, Parts)> {
    host::ensure_tools(cache)?;
    let ours = Ours::build(cache)?;
    let parts = Parts::prepare(cache)?;
    let node = Node::start(name, &parts.root, life)?;
    let result = plane::start_all(&node, &parts).and_then(|()| {
        Image::with_busybox(&parts.root)
            .entry(&["/bin/sleep", "1000000000"])
            .import(&node, "localhost/pause:lab")?;
        ours.install(&node, &parts.root)?;
        ours::start_daemon(&node)?;
        ours::start_agent(&node)
    });
    if let Err(e) = result {
        let shown = keep_logs(&node);
        let _ = node.end();
        return Err(e.context(shown));
    }
    Ok((node, parts))
}

/// Copies a node's logs to where they survive it; where that is.
fn keep_logs(node: &Node) -> String {
    let to = std::env::temp_dir().join("vhost-rdma-k8s-logs");
    let _ = std::fs::remove_dir_all(&to);
    let copied = std::fs::create_dir_all(&to).and_then(|()| {
        for entry in std::fs::read_dir(node.lab().join("log"))? {
            let entry = entry?;
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
        Ok(())
    });
    match copied {
        Ok(()) => format!("the cluster's logs are in {}", to.display()),
        Err(e) => format!("the cluster's logs could not be kept: {e}"),
    }
}

fn up(cache: &Cache) -> Result<bool> {
    let begun = Instant::now();
    let (node, _) = start(cache, UP, Life::Detached)?;
    for (name, program) in
        [("enter", "sh"), ("kubectl", "kubectl --kubeconfig=/lab/pki/admin.kubeconfig")]
    {
        node.write_entry(name, program)?;
    }
    let dir = node.dir().display();
    println!("the cluster is up after {:.1} s", begun.elapsed().as_secs_f64());
    println!("  {dir}/kubectl get pods -A");
    println!("  {dir}/enter -c 'ps ax'      a shell in the node, whose /lab is {dir}/lab");
    println!("  cargo xtask k8s down");
    Ok(true)
}

fn down() -> Result<bool> {
    match Node::find(UP)? {
        None => println!("no cluster is up"),
        Some(node) => {
            node.end().context("not everything of the cluster could be removed")?;
            println!("the cluster is gone: no process, mount, namespace or cgroup of it is left");
        }
    }
    Ok(true)
}
