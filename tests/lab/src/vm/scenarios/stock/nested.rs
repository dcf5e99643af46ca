//! Two VMs on a stock Debian: QEMU, the daemon and both guests in the VM that stands for the host,
//! the release's own programs between the guests. It is what `cargo xtask demo` does at its core,
//! on the release's kernel and its cgroups of version 2.
//!
//! `readme` types the command itself, which takes ten times as long.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Args;
use crate::rows::Row;
use crate::vm::guest::Guest;
use crate::vm::nested::{self, Inner};
use crate::vm::peers;
use crate::vm::programs::PROGRAMS;
use crate::vm::scenarios::fixture::kernel_is_clean;
use crate::vm::scenarios::rnic::nested::{CLI, End, cli, play, serve};

/// Name of each guest and of its NIC, and the last octet of its 10.9.0.x.
const GUESTS: [(&str, u8); 2] = [("p", 11), ("q", 12)];
/// Small commands in an inner guest.
const STEP: Duration = Duration::from_secs(300);

/// Programs of the demo, and how often each does what it does.
const CHOSEN: &[(&str, u32)] = &[
    ("ibv_rc_pingpong -c", 100),
    ("ib_write_bw", 100),
    ("ib_send_lat", 100),
    ("vrdma-check write", 1),
    ("rping -v", 20),
];

/// As an init of the release does it.
pub(super) const CGROUPS: &str =
    "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup";

/// The network's process has no capability and its list of system calls; cgroups are of version 2.
const WALLS: &str = "set -e
stat -fc %T /sys/fs/cgroup
[ \"$(stat -fc %T /sys/fs/cgroup)\" = cgroup2fs ]
n=0
# A pattern that the one who looks has not on its own command line.
for p in $(grep -la '[n]etwork-process' /proc/[0-9]*/cmdline); do
  grep -E '^(Cap|NoNew|Seccomp:)' ${p%/*}/status
  grep -q '^CapEff:\t0000000000000000$' ${p%/*}/status
  grep -q '^Seccomp:\t2$' ${p%/*}/status
  n=$((n+1))
done
[ $n -eq 1 ]
";

impl Args {
    /// Whether a row of this part is asked for.
    fn wants(&self, of: &str, what: &str) -> bool {
        self.wanted(&format!("{of}two VMs: {what}"))
    }

    /// The rows of one release: `host` is a [`Nic::Host`](crate::vm::Nic::Host), `products` what
    /// its guests get.
    pub(super) fn two_vms(
        &self,
        host: &mut Guest,
        products: &[PathBuf],
        of: &str,
        table: &mut Vec<Row>,
    ) -> Result<()> {
        host.must(CGROUPS, STEP)?;
        serve(host, "")?;
        nested::prepare(host)?;
        let mut guests = Vec::new();
        for (name, number) in GUESTS {
            let inner = Inner { name, number, cli: CLI }.start(host, "--network net")?;
            inner.deliver(products)?;
            guests.push(inner);
        }
        for guest in &mut guests {
            guest.wait_ready_for(nested::BOOT)?;
            peers::load_ours(guest)?;
        }
        if self.wants(of, "sandbox") {
            let walls = host.run(WALLS, STEP)?;
            if !walls.ok() {
                eprintln!("{}", walls.text.trim_end());
            }
            table.push(Row::verdict(format!("{of}two VMs: sandbox"), walls.ok()));
        }
        if let [a, b] = guests.as_mut_slice() {
            self.programs_between((a, b), of, table)?;
        }
        eprintln!("{}", cli(host, "nic list")?);
        for guest in &mut guests {
            let clean = kernel_is_clean(guest);
            table.push(Row::verdict(format!("{of}two VMs: kernel of {}", guest.name), clean));
        }
        Ok(())
    }

    fn programs_between(
        &self,
        (a, b): (&mut Guest, &mut Guest),
        of: &str,
        table: &mut Vec<Row>,
    ) -> Result<()> {
        let [at_a, at_b] = GUESTS.map(|(_, number)| format!("10.9.0.{number}"));
        let (mut client, mut server) = (End::find(a, &at_a, &at_a)?, End::find(b, &at_b, &at_b)?);
        client.guest.must(&format!("ping -q -c 2 -W 20 {at_b}"), STEP)?;
        for (name, n) in CHOSEN {
            if self.wants(of, name) {
                let program =
                    PROGRAMS.iter().find(|p| p.name == *name).context("no such program")?;
                let name = format!("{of}two VMs: {name}");
                table.push(play(&name, &mut server, &mut client, (program, *n))?.0);
            }
        }
        Ok(())
    }
}
