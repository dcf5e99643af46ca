//! Real clients, unmodified, between two VMs: a row for each, with what it shows.
//!
//! - `ucx_perftest`: tag, put, get, active messages and atomics, over `rc_verbs`, `ud_verbs` and
//!   what UCX chooses itself. UCX compares no data; the NICs' counters show the way.
//! - `open mpi`: messages and collectives over UCX and over libfabric, one-sided over UCX;
//!   `mpi-check.py` compares every byte and every sum.
//! - `fabtests`: libfabric's tests of messages, tags, RMA, atomics and completion data, with its
//!   own comparison of data where it has one (`-v`). Atomics are `ofi_rxm`'s, made of messages.
//! - `qperf`: RC, RDMA, and atomics that it verifies.
//!
//! - `others`, `block` (`--full`): sockets, multicast and the kernel's own clients.
//!
//! - `libvirt` (`--full`): guest a is a domain, by the text that users are given.
//!
//! With `--full` all of them also run on rxe, in VMs of their own before: seconds beside seconds. A
//! client that rxe cannot carry is said, and has no reference.
//!
//! Nothing here knows how a client is run (see `client`).

mod block;
mod fabric;
mod libvirt;
mod mpi;
mod others;
mod qperf;
mod ucx;

use anyhow::{Result, ensure};

use super::client::{Client, drive, seconds_on_rxe};
use super::fixture::{Fixture, Options};
use crate::cache::Cache;
use crate::fabtests;
use crate::rows;
use crate::vm::peers;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    #[command(flatten)]
    /// What every scenario with guests can be told
    pub options: Options,
    /// Also the clients that CI has no time for, and each on rxe too
    #[arg(long)]
    pub full: bool,
}

pub(crate) use ucx::BATCH as UCX_BATCH;

/// In the order of the table; those of CI first.
const FAMILIES: &[&[Client]] =
    &[ucx::CLIENTS, mpi::CLIENTS, fabric::CLIENTS, qperf::CLIENTS, others::CLIENTS, block::CLIENTS];
const OF_CI: usize = 4;

/// The names of all rows.
pub fn names() -> impl Iterator<Item = &'static str> {
    let all = FAMILIES.iter().flat_map(|family| family.iter());
    all.chain([&libvirt::CLIENT]).map(|client| client.name)
}

/// Files that clients find in `/host`.
const FILES: &[(&str, &str)] = &[
    ("lab-rsh.py", include_str!("../../../../../guest-programs/lab-rsh.py")),
    ("mpi-check.py", include_str!("../../../../../guest-programs/mpi-check.py")),
    ("mpi-train.py", include_str!("../../../../../guest-programs/mpi-train.py")),
    ("rds-echo.py", include_str!("../../../../../guest-programs/rds-echo.py")),
    ("smc-echo.py", include_str!("../../../../../guest-programs/smc-echo.py")),
    ("ucx.batch", ucx::BATCH),
    ("mpi.sh", mpi::LAUNCH),
];

impl Args {
    fn clients(&self) -> Vec<&'static Client> {
        // Who names a client gets it, of whichever family.
        let all = self.full || self.options.only.is_some();
        let families = FAMILIES.iter().take(if all { FAMILIES.len() } else { OF_CI });
        let clients = families.flat_map(|family| family.iter());
        clients.filter(|client| self.options.chosen(client.name)).collect()
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let clients = self.clients();
        let only = self.options.only.as_deref().unwrap_or_default();
        // A lab of its own: its guest is not booted by us.
        let domain =
            (self.full || self.options.only.is_some()) && self.options.chosen(libvirt::CLIENT.name);
        ensure!(
            domain || !clients.is_empty(),
            "no client's name contains {only:?}; without --only the table names them all"
        );
        let (mut table, mut clean) = (Vec::new(), true);
        if !clients.is_empty() {
            let reference = if self.full { self.on_rxe(cache, &clients)? } else { Vec::new() };
            let mut fixture = self.start(cache)?;
            fixture.attach()?;
            for (n, client) in clients.iter().enumerate() {
                table.push(drive(&mut fixture, client, reference.get(n).copied().flatten())?);
            }
            clean = fixture.clean();
        }
        if domain {
            table.push(libvirt::run(cache, &self.options)?);
        }
        rows::print_table(&table, "vhost-rdma", if self.full { "rxe" } else { "-" });
        self.options.write(&table)?;
        Ok(clean && table.iter().all(|row| row.ok))
    }

    /// Two guests with everything that clients need, and no driver yet.
    fn start(&self, cache: &Cache) -> Result<Fixture> {
        let programs = fabtests::programs(cache)?;
        let fixture = Fixture::start(cache, self.options.wish(2))?;
        fixture.lab.deliver(&programs)?;
        for guest in &fixture.lab.guests {
            for (name, text) in FILES {
                std::fs::write(guest.share().join(name), text)?;
            }
        }
        Ok(fixture)
    }

    /// The seconds that each takes on rxe.
    fn on_rxe(&self, cache: &Cache, clients: &[&'static Client]) -> Result<Vec<Option<f64>>> {
        let mut fixture = self.start(cache)?;
        let (a, b) = fixture.lab.pair()?;
        peers::attach_rxe(a, b)?;
        clients.iter().map(|client| seconds_on_rxe(&mut fixture, client)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{FAMILIES, libvirt};

    #[test]
    fn every_client_has_a_name_of_its_own_and_moves_something() {
        let all = FAMILIES.iter().flat_map(|family| family.iter());
        let all: Vec<_> = all.chain([&libvirt::CLIENT]).collect();
        for (n, client) in all.iter().enumerate() {
            assert!(all.iter().skip(n + 1).all(|other| other.name != client.name), "{client:?}");
            assert!(client.bytes > 0, "{client:?}");
        }
    }
}
