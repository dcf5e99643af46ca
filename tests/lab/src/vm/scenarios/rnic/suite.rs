//! Every test of the virtual guest, its NICs backed by `rnic:rxe0`, over real sockets in the host
//! VM.
//!
//! Both VMs are hosts here, each on its own: they share the test programs out between them
//! (`vm::suite`), and no packet crosses the cable.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::Args;
use super::known::KNOWN;
use super::verbs::Seen;
use crate::cache::Cache;
use crate::rows::Row;
use crate::vm::guest::Guest;
use crate::vm::suite::{self, Program, Suites, witness};

/// NICs for processes are on the daemon's own engine, and so are those of tests of its processes;
/// `conformance` reads documents, which no VM has.
const NO_RNIC: [&str; 4] = ["process", "hostile_process", "processes", "conformance"];

/// What the tests are told.
const PRELUDE: &str = "export VHOST_RDMA_BACKING=rnic:rxe0 VHOST_RDMA_PATIENCE=8
export VHOST_RDMA_WITHOUT=systemd VHOST_RDMA_DISK=/host";

/// The virtual guest's programs: those of its tests if they are wanted (without unit tests, which
/// need no NIC), and those that talk to peers, optimized.
pub(super) fn virtual_guest(cache: &Cache, wanted: bool) -> Result<(Vec<Program>, Vec<PathBuf>)> {
    const TESTS: &[&str] = &["test", "-p", "virtual-guest", "--no-run"];
    const PEERS: &[&str] =
        &["build", "--release", "-p", "virtual-guest", "--bin", "pingpong", "--bin", "check"];
    let orders: &[&[&str]] = if wanted { &[TESTS, PEERS] } else { &[PEERS] };
    let (mut tests, mut peers) = (Vec::new(), Vec::new());
    for artifact in suite::build(cache, "the virtual guest", orders)? {
        // What the tests are built beside is not optimized.
        let optimized = artifact.path.parent().is_some_and(|dir| dir.ends_with("release"));
        if ["pingpong", "check"].contains(&artifact.name.as_str()) && optimized {
            peers.push(artifact.path);
        } else if artifact.kind == "test" && !NO_RNIC.contains(&artifact.name.as_str()) {
            tests.push(artifact.program()?);
        }
    }
    ensure!(
        tests.is_empty() != wanted,
        "cargo left no test programs, or some that nobody asked for"
    );
    Ok((tests, peers))
}

impl Args {
    /// The tests of all programs, one row each.
    pub(super) fn whole_stack(
        &self,
        guests: &mut [Guest],
        programs: &[Program],
        table: &mut Vec<Row>,
    ) -> Result<()> {
        let suites = Suites { prelude: PRELUDE, known: KNOWN, of: "" };
        suites.run(guests, programs, table, |test| self.wanted(test))
    }

    /// What must have happened in the tests that passed, if all were run.
    pub(super) fn witnessed(
        &self,
        guests: &[Guest],
        programs: &[Program],
        table: &mut Vec<Row>,
    ) -> Result<()> {
        if self.only.is_none() {
            let seen = seen(guests, programs, table)?;
            table.extend(seen.rows());
        }
        Ok(())
    }
}

/// What the device did in the tests that passed.
fn seen(guests: &[Guest], programs: &[Program], table: &[Row]) -> Result<Seen> {
    let known = |name: &str| KNOWN.iter().any(|(test, _)| *test == name);
    let good = table.iter().filter(|row| row.ok && !known(&row.name));
    let passed = good.map(|row| row.name.clone()).collect();
    let mut seen = Seen::default();
    for program in programs {
        for guest in guests {
            let path = guest.share().join(witness(&program.suite));
            if path.exists() {
                seen.add(&program.suite, &std::fs::read_to_string(path)?, &passed);
            }
        }
    }
    Ok(seen)
}
