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
//! NVMe over RDMA is `cargo xtask vm nvme`; NFS, iSER, SRP, RDS, SMC-R, rsockets and `fi_pingpong`
//! are `vm ulp`.
//! Nothing here knows how a client is run (see `client`).

mod fabric;
mod mpi;
mod qperf;
mod ucx;

use anyhow::{Result, ensure};

use super::client::{Client, drive};
use super::fixture::{Fixture, Options};
use crate::cache::Cache;
use crate::fabtests;
use crate::rows;

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options,
}

/// In the order of the table.
const FAMILIES: &[&[Client]] = &[ucx::CLIENTS, mpi::CLIENTS, fabric::CLIENTS, qperf::CLIENTS];

/// Files that clients find in `/host`.
const FILES: &[(&str, &str)] = &[
    ("lab-rsh.py", include_str!("../../../../../guest-programs/lab-rsh.py")),
    ("mpi-check.py", include_str!("../../../../../guest-programs/mpi-check.py")),
    ("ucx.batch", ucx::BATCH),
    ("mpi.sh", mpi::LAUNCH),
];

impl Args {
    fn clients(&self) -> Vec<&'static Client> {
        let all = FAMILIES.iter().flat_map(|family| family.iter());
        all.filter(|client| self.options.chosen(client.name)).collect()
    }

    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        let clients = self.clients();
        let only = self.options.only.as_deref().unwrap_or_default();
        ensure!(
            !clients.is_empty(),
            "no client's name contains {only:?}; without --only the table names them all"
        );
        let programs = fabtests::programs(cache)?;
        let mut fixture = Fixture::start(cache, self.options.wish(2))?;
        fixture.attach()?;
        fixture.lab.deliver(&programs)?;
        for guest in &fixture.lab.guests {
            for (name, text) in FILES {
                std::fs::write(guest.share().join(name), text)?;
            }
        }
        let mut table = Vec::new();
        for client in clients {
            table.push(drive(&mut fixture, client)?);
        }
        let clean = fixture.clean();
        rows::print_table(&table, "vhost-rdma", "-");
        self.options.write(&table)?;
        Ok(clean && table.iter().all(|row| row.ok))
    }
}

#[cfg(test)]
mod tests {
    use super::FAMILIES;

    #[test]
    fn every_client_has_a_name_of_its_own_and_moves_something() {
        let all: Vec<_> = FAMILIES.iter().flat_map(|family| family.iter()).collect();
        for (n, client) in all.iter().enumerate() {
            assert!(all.iter().skip(n + 1).all(|other| other.name != client.name), "{client:?}");
            assert!(client.bytes > 0, "{client:?}");
        }
    }
}
