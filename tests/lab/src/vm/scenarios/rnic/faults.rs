//! What the host can do to its guests: the RNIC removed under traffic, its port down, its address
//! gone, no memory to lock, huge pages.
//!
//! The steps are tests of the virtual guest (`tests/virtual-guest/tests/host.rs`) that change the
//! host that they run on, so everywhere else they are ignored. Here each has the VM to itself:
//! `rxe0` on its cable, and `rxe1` on a netdev of its own for the guests that must not notice.

use std::time::Duration;

use anyhow::{Context, Result};

use super::{Args, SET_UP};
use crate::rows::Row;
use crate::vm::guest::Guest;
use crate::vm::suite::{self, Program};

/// The program of these tests.
const PROGRAM: &str = "host";
const TEST_END: Duration = Duration::from_secs(480);

/// A second RNIC, and huge pages.
const HOST: &str = "set -e
modprobe dummy
ip link add dummy0 type dummy
ip link set dummy0 mtu 4200 up
for n in 1 2 3; do ip addr add 10.0.1.$n/32 dev dummy0; done
rdma link add rxe1 type rxe netdev dummy0
echo 64 > /proc/sys/vm/nr_hugepages
test $(cat /proc/sys/vm/nr_hugepages) = 64
cp /host/products/vhost-rdma /tmp/vhost-rdma
n=0; until grep -q ffff:0a00:0103 /sys/class/infiniband/rxe1/ports/1/gids/*; do sleep 0.2; \
    n=$((n+1)); [ $n -lt 100 ]; done
";
const AFTERWARDS: &str =
    "rdma link delete rxe1; ip link delete dummy0; echo 0 > /proc/sys/vm/nr_hugepages
rdma link show rxe0/1";

const TEST: &str = "ulimit -l unlimited
ip link set dummy0 up; for n in 1 2 3; do ip addr replace 10.0.1.$n/32 dev dummy0; done
export VHOST_RDMA_BIN=/tmp/vhost-rdma VHOST_RDMA_BACKING=rnic:rxe0 VHOST_RDMA_PATIENCE=8 \
    RUST_BACKTRACE=0
export VHOST_RDMA_WITNESS=/host/@WITNESS@ VHOST_RDMA_DISK=/host
exec /host/products/@BINARY@ --ignored --exact --nocapture @TEST@ 2>&1";

impl Args {
    /// The tests that take the host's RNIC, port, address or memory away, one row each.
    pub(super) fn faults(
        &self,
        host: &mut Guest,
        programs: &[Program],
        table: &mut Vec<Row>,
    ) -> Result<()> {
        let program = programs.iter().find(|program| program.suite == PROGRAM);
        let program = program.context("the virtual guest has no tests of the host")?;
        let mut tests = program.tests()?;
        tests.retain(|test| self.wanted(&format!("{PROGRAM}::{test}")));
        if tests.is_empty() {
            return Ok(());
        }
        host.must(HOST, SET_UP)?;
        for test in tests {
            let script = TEST
                .replace("@BINARY@", &program.file)
                .replace("@WITNESS@", &suite::witness(PROGRAM))
                .replace("@TEST@", &test);
            let run = host.run(&script, TEST_END)?;
            // A test that is not there passes as well.
            let ok = run.ok() && run.text.contains("1 passed");
            eprintln!("    {} {PROGRAM}::{test}: {}", host.name, if ok { "ok" } else { "FAILED" });
            if !ok {
                eprintln!("{}", run.text.trim_end());
            }
            table.push(Row::verdict(format!("{PROGRAM}::{test}"), ok));
        }
        host.must(AFTERWARDS, SET_UP).map(|_| ())
    }
}
