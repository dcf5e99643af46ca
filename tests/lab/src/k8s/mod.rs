//! A real Kubernetes for tests: API server, scheduler, controller manager, kubelet, containerd and
//! runc on a node in namespaces of its own, a second node beside it, our daemon and agent on them
//! as they would be on any node.
//!
//! `parts` makes what it consists of, once; `node` is the machine-in-a-machine, `cgroups` its
//! limits; `plane` starts the servers; `join` adds a node; `image` makes container images;
//! `kubectl` asks and tells; `ours` is what is tested, `pods` who uses it, `test`, `restarts`,
//! `attach`, `cluster`, `named`, `rollout`, `trust`, `channel`, `tutorial`, `vms`, `manifests` and
//! `whole` the rows; `scale` is a cluster without pods, which is large; `definitions` is an API
//! server that is newer, for our kinds alone.

mod attach;
mod cgroups;
pub(crate) mod channel;
pub(crate) mod cluster;
mod definitions;
mod huge;
pub(crate) mod image;
mod join;
pub(crate) mod kubectl;
mod manifests;
mod named;
pub(crate) mod node;
pub(crate) mod ours;
pub(crate) mod parts;
pub(crate) mod plane;
mod pods;
pub(crate) mod processes;
mod restarts;
mod rollout;
mod scale;
pub mod test;
pub(crate) mod trust;
mod tutorial;
mod vms;
mod whole;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec;
use crate::host;
use crate::process::products;
use crate::rows::{self, Row};
use image::Image;
use node::{Life, Node};
use ours::Ours;
use parts::Parts;

/// The name of the cluster that `up` makes, and of its second node.
const UP: &str = "up";
const UP_SECOND: &str = "up-2";
/// On a machine that is emulated everything takes some ten times as long.
const PATIENCE: u32 = 10;

/// See the module
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Start a cluster that stays; prints how to reach it
    Up(Json),
    /// Everything that a node must do: pods with NICs, restarts and deaths of its parts, CNI
    Test(test::Args),
    /// The controller and thousands of played agents: what a change costs, and whether that grows
    Scale(scale::Args),
    /// The definitions with their rules on an API server that knows CEL
    Definitions(definitions::Args),
    /// End the cluster that `up` made; fails if anything of it is left on the machine
    Down(Json),
}

/// Where the row goes
#[derive(Debug, clap::Args)]
pub struct Json {
    /// Write the row here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Json {
    /// A row for what was done, also where it failed.
    fn row(&self, name: &str, work: impl FnOnce() -> Result<()>) -> Result<bool> {
        let begun = Instant::now();
        let done = work();
        if let Some(path) = &self.json {
            let row = Row::timed(name, done.is_ok(), begun.elapsed().as_secs_f64());
            rows::write_json(path, &[row])?;
        }
        done.map(|()| true)
    }
}

impl Command {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        host::require_root()?;
        match self {
            Self::Up(json) => json.row("a cluster of two nodes comes up", || up(cache)),
            Self::Test(args) => args.run(cache),
            Self::Scale(args) => args.run(cache),
            Self::Definitions(args) => args.run(cache),
            Self::Down(json) => json.row("the cluster's end leaves nothing", down),
        }
    }
}

/// Builds and fetches what a cluster of a brief run is made of, so that it can be used elsewhere.
pub(crate) fn make(cache: &Cache) -> Result<()> {
    host::ensure_tools(cache)?;
    Ours::build(cache)?;
    Parts::prepare(cache)?;
    processes::root(cache)?;
    products::libraries(cache).map(drop)
}

/// Starts a cluster with the images that every pod needs.
fn start(cache: &Cache, name: &str, life: Life) -> Result<(Node, Parts)> {
    host::ensure_tools(cache)?;
    if host::is_emulated() {
        exec::be_patient(PATIENCE);
    }
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

/// Starts a second node of the cluster, with all that the first has.
fn start_second(first: &Node, name: &str, parts: &Parts, life: Life) -> Result<Node> {
    let second = Node::start_as(name, 2, &parts.root, life)?;
    let result = join::join(first, &second, parts).and_then(|()| {
        ours::copy(first, &second)?;
        ours::start_daemon(&second)?;
        ours::start_agent(&second)
    });
    match result {
        Ok(()) => Ok(second),
        Err(e) => {
            let shown = keep_logs(&second);
            let _ = second.end();
            Err(e.context(shown))
        }
    }
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

fn up(cache: &Cache) -> Result<()> {
    let begun = Instant::now();
    let (node, parts) = start(cache, UP, Life::Detached)?;
    start_second(&node, UP_SECOND, &parts, Life::Detached)?;
    for (name, program) in
        [("enter", "sh"), ("kubectl", "kubectl --kubeconfig=/lab/pki/admin.kubeconfig")]
    {
        node.write_entry(name, program)?;
    }
    let dir = node.dir().display();
    println!("the cluster of two nodes is up after {:.1} s", begun.elapsed().as_secs_f64());
    println!("  {dir}/kubectl get pods -A");
    println!("  {dir}/enter -c 'ps ax'      a shell in the node, whose /lab is {dir}/lab");
    println!("  cargo xtask k8s down");
    Ok(())
}

fn down() -> Result<()> {
    let nodes = [Node::find(UP_SECOND)?, Node::find(UP)?];
    if nodes.iter().all(Option::is_none) {
        println!("no cluster is up");
        return Ok(());
    }
    for node in nodes.into_iter().flatten() {
        node.end().context("not everything of the cluster could be removed")?;
    }
    println!("the cluster is gone: no process, mount, namespace or cgroup of it is left");
    Ok(())
}
