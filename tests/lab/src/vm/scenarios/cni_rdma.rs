//! The CNI plugin with an RDMA device that can change its namespace: ours, in a guest.
//!
//! Guest a is the node: the plugin moves its RDMA device and network interface into a pod's
//! namespace and back, in exclusive and shared mode, is killed at each of its netlink requests, and
//! DEL or GC must put everything back. From inside the pod ibv_rc_pingpong talks to guest b. What
//! the netlink crate says there is laid beside the output of `rdma -j` and `ip -j`.
//!
//! The programs are those that ship: static, release build. There is no kubelet in the guest, hence
//! nobody who grants; the agent's side of the conversation is the one of the plugin's own tests.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::fixture::{Fixture, Wish};
use super::verbs::part;
use crate::cache::Cache;
use crate::products::{Profile, static_programs};
use crate::roots::Debian;
use crate::rows;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Release of the guests
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

const SCRIPT: &str = include_str!("../../../../guest-programs/cni-rdma.sh");
const COMPARE: &str = include_str!("../../../../guest-programs/rdma-compare.py");
const PROGRAMS: [&str; 3] = ["vhost-rdma-cni", "examples/test-agent", "examples/rdma-json"];
/// Some sixty calls of the plugin, half of them under strace, in an emulated guest.
const WAIT: Duration = Duration::from_secs(900);

/// Serves one pingpong after the other; the device and its GID index stay the same here.
const PEER: &str = "ulimit -l unlimited
while :; do ibv_rc_pingpong -d {dev} -g {gid} -n 100 -c -p 18600 >/tmp/peer 2>&1; done
";

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let programs = static_programs(
            cache,
            Profile::Release,
            &["vhost-rdma-cni", "rdma-netlink"],
            &PROGRAMS,
        )?;
        let (debian, keep) = (self.debian, self.keep);
        let wish = Wish { debian, guests: 2, cpus: 1, keep, ..Wish::default() };
        let mut fixture = Fixture::start(cache, wish)?;
        let devices = fixture.attach()?;
        let [(device, _), (peer, gid)] = &devices[..] else {
            anyhow::bail!("two guests have two devices")
        };
        let [node, other] = &mut fixture.lab.guests[..] else {
            anyhow::bail!("there are two guests")
        };
        let bin = node.share().join("cni");
        std::fs::create_dir_all(&bin)?;
        for program in &programs {
            let name = program.file_name().context("a program has a name")?;
            std::fs::copy(program, bin.join(name))?;
        }
        std::fs::write(node.share().join("cni-rdma.sh"), SCRIPT)?;
        std::fs::write(node.share().join("rdma-compare.py"), COMPARE)?;
        other.spawn(&PEER.replace("{dev}", peer).replace("{gid}", gid))?;
        let mut table = Vec::new();
        let command = format!("exec sh /host/cni-rdma.sh {device} 10.9.0.2");
        part(node, ("cni", &command), WAIT, &mut table)?;
        let clean = fixture.clean();
        rows::print_table(&table, "vhost-rdma", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(clean && !table.is_empty() && table.iter().all(|r| r.ok))
    }
}
