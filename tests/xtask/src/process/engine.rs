//! `cargo xtask process containers`: the example for CI runners, `examples/two-containers.sh`, with
//! podman and a root of Debian 12 that has the programs and nothing of ours.
//!
//! The engine's own network for containers needs firewall modules that not every machine has, so the
//! containers have none, or the host's: RDMA does not go by it in either case.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{products, row};
use crate::cache::Cache;
use crate::exec::{capture, tied, workspace};
use crate::host;
use crate::k8s::processes;
use crate::rows::Row;

const WAIT: Duration = Duration::from_secs(120);
/// runc: it runs beside both versions of control groups.
const PACKAGES: [&str; 2] = ["podman", "runc"];
const ENGINE: &str = "--runtime /usr/sbin/runc --cgroup-manager=cgroupfs";
/// Less than what an engine asks for by itself, which not every root may have.
const LIMITS: &str = "--ulimit nofile=1024:1024 --ulimit nproc=1024:1024";

/// A name, the network, both programs, and what the client says when all went well.
const PAIRS: [(&str, &str, &str, &str, &str); 2] = [
    (
        "two containers without a network: rping",
        "none",
        "rping -s -C 10",
        "rping -c -a NIC_ADDRESS -C 10 -v",
        "ping data: rdma-ping-9",
    ),
    (
        "two containers: ib_write_bw",
        "host",
        "ib_write_bw -F -n 500",
        "ib_write_bw -F -n 500 SERVER_ADDRESS",
        " 65536      500 ",
    ),
];

/// A row for each pair of programs.
pub(super) fn run(cache: &Cache, debug: bool) -> Result<Vec<Row>> {
    host::ensure_packages(cache, &PACKAGES)?;
    let (daemon, libraries) = (products::daemon(cache, debug)?, products::libraries(cache)?);
    let image = format!("--rootfs {}", processes::root(cache)?.display());
    let script = workspace().join("vhost-rdma/process/examples/two-containers.sh");
    let mut rows = Vec::new();
    for (name, network, server, client, wanted) in PAIRS {
        let begin = Instant::now();
        let mut run = tied(&daemon);
        run.env("VHOST_RDMA_LIBRARIES", &libraries);
        run.env("CONTAINERS", "podman").env("ENGINE_OPTIONS", ENGINE);
        run.env("CONTAINER_OPTIONS", format!("--network {network} {LIMITS}"));
        run.args(["run", "--nics", "2", "--"]).arg(&script).args([&image, server, client]);
        let said = capture(&mut run, WAIT);
        let ok = said.as_ref().is_ok_and(|said| said.contains(wanted));
        match &said {
            Ok(_) if ok => eprintln!("    {name}: ok"),
            Ok(said) => eprintln!("    {name}: the client said\n{said}"),
            Err(error) => eprintln!("    {name}: {error:#}"),
        }
        rows.push(row(name.to_owned(), ok, begin.elapsed().as_secs_f64()));
    }
    Ok(rows)
}
