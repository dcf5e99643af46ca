//! `cargo xtask process containers`: the example for CI runners, `examples/two-containers.sh`, with
//! podman and a root of Debian 12 that has the programs and nothing of ours. The daemon's program
//! and the libraries lie as they are installed; nothing in the environment says where.
//!
//! The engine's own network for containers needs firewall modules that not every machine has, so
//! the containers have none, or the host's: RDMA does not go by it in either case.
//!
//! Then the steps of the workflow beside it, with the action that it uses (`action`).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{action, products};
use crate::cache::Cache;
use crate::exec::{capture, tied, workspace};
use crate::host;
use crate::k8s::processes;
use crate::rows::Row;
use crate::vm::rundir::RunDir;

const WAIT: Duration = Duration::from_secs(120);
/// runc: it runs beside both versions of control groups.
const PACKAGES: [&str; 2] = ["podman", "runc"];
const ENGINE: &str = "--runtime /usr/sbin/runc --cgroup-manager=cgroupfs";
/// Less than what an engine asks for by itself, which not every root may have.
const LIMITS: &str = "--ulimit nofile=1024:1024 --ulimit nproc=1024:1024";

/// What a pair is to come to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Good,
    /// The script fails, and says so.
    Bad,
}

/// A name, the network and how many NICs there are, both programs, and what is said in the end.
type Pair = (&'static str, (&'static str, &'static str), [&'static str; 2], (End, &'static str));

const PAIRS: [Pair; 4] = [
    (
        "two containers without a network: rping",
        ("none", "2"),
        ["rping -s -C 10", "rping -c -a NIC_ADDRESS -C 10 -v"],
        (End::Good, "ping data: rdma-ping-9"),
    ),
    (
        "two containers: ib_write_bw",
        ("host", "2"),
        ["ib_write_bw -F -n 500", "ib_write_bw -F -n 500 SERVER_ADDRESS"],
        (End::Good, " 65536      500 "),
    ),
    (
        "two containers: a server that fails is heard",
        ("none", "2"),
        ["ls /its-last-words", "rping -c -a NIC_ADDRESS -C 10"],
        (End::Bad, "cannot access '/its-last-words'"),
    ),
    (
        "two containers: one NIC is not enough",
        ("none", "1"),
        ["rping -s -C 10", "rping -c -a NIC_ADDRESS -C 10"],
        (End::Bad, "one NIC is not enough"),
    ),
];

/// A row for each pair of programs.
pub(super) fn run(cache: &Cache, debug: bool) -> Result<Vec<Row>> {
    host::ensure_packages(cache, &PACKAGES)?;
    let (daemon, libraries) = (products::daemon(cache, debug)?, products::libraries(cache)?);
    let installed = RunDir::new()?;
    let (bin, lib) = (installed.path().join("bin"), installed.path().join("lib"));
    fs::create_dir(&bin)?;
    fs::create_dir(&lib)?;
    let program = bin.join("vhost-rdma");
    fs::copy(&daemon, &program)?;
    symlink(&libraries, lib.join("vhost-rdma"))?;
    let image = format!("--rootfs {}", processes::root(cache)?.display());
    let script = workspace().join("vhost-rdma/process/examples/two-containers.sh");
    let mut rows = Vec::new();
    for (name, (network, nics), [server, client], (end, wanted)) in PAIRS {
        let begin = Instant::now();
        let mut run = tied(&program);
        run.env_remove("VHOST_RDMA_LIBRARIES");
        run.env("CONTAINERS", "podman").env("ENGINE_OPTIONS", ENGINE);
        run.env("CONTAINER_OPTIONS", format!("--network {network} {LIMITS}"));
        run.args(["run", "--nics", nics, "--"]).arg(&script).args([&image, server, client]);
        let said = capture(&mut run, WAIT);
        let good = said.is_ok() == (end == End::Good);
        let said = said.unwrap_or_else(|error| format!("{error:#}"));
        let ok = good && said.contains(wanted);
        if ok {
            eprintln!("    {name}: ok");
        } else {
            eprintln!("    {name}: it said\n{said}");
        }
        rows.push(Row::timed(name.to_owned(), ok, begin.elapsed().as_secs_f64()));
    }
    rows.extend(workflow((&daemon, &libraries), &image)?);
    Ok(rows)
}

/// What the steps of the workflow print that has it.
const PRINTED: [(&str, &str); 2] =
    [("ib_write_bw", " 65536      500 "), ("rping", "ping data: rdma-ping-9")];

/// A row for each step of the workflow that is run.
fn workflow((daemon, libraries): (&Path, &Path), image: &str) -> Result<Vec<Row>> {
    let runner = RunDir::new()?;
    action::built(runner.path(), daemon, libraries)?;
    let options = format!("--network host {LIMITS}");
    let env = [
        ("CONTAINERS", "podman"),
        ("ENGINE_OPTIONS", ENGINE),
        ("CONTAINER_OPTIONS", options.as_str()),
    ];
    let mut rows = Vec::new();
    for (step, mut command) in action::commands(runner.path(), image, &env)? {
        let begin = Instant::now();
        let wanted = PRINTED.iter().find(|(name, _)| *name == step).map_or("", |(_, said)| said);
        let said = capture(&mut command, WAIT);
        let ok = said.as_ref().is_ok_and(|said| said.contains(wanted));
        let name = format!("the workflow's step {step}");
        match said {
            _ if ok => eprintln!("    {name}: ok"),
            Ok(said) => eprintln!("    {name}: it said\n{said}"),
            Err(error) => eprintln!("    {name}: {error:#}"),
        }
        rows.push(Row::timed(name, ok, begin.elapsed().as_secs_f64()));
    }
    Ok(rows)
}
