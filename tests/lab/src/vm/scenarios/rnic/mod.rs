//! Guests on an RNIC of their host: a VM stands for the host, rdma_rxe for its RNIC, and a second
//! VM with plain rxe for a third-party host.
//!
//! Parts, and what is looked at:
//!
//! - `whole-stack`: every test of the virtual guest, its NICs backed by `rnic:rxe0`, over real
//!   sockets in the host VM; both VMs take their share
//! - `host`: the RNIC removed under traffic, its port down, its address gone; no memory to lock;
//!   guests on huge pages (`faults`)
//! - `pingpong`: `ibv_rc_pingpong` on plain rxe plays with a virtual guest, each as server and as
//!   client
//! - `verified`: virtual guests with flat and with mapped addresses move data to and from
//!   `vrdma-check` on plain rxe, and a mapped guest of one host to and from one of the other
//! - `cost`: with `--cost`, and then alone: bandwidth and latency of a virtual guest beside stock
//!   programs on the same rxe device
//! - `rdma_cm`: `ucmatose` on plain rxe plays with a virtual guest by rdma_cm, each as server and
//!   as client
//! - `nested`: with `--nested`, and then alone: QEMU in the host VM, our driver in its guest, stock
//!   programs with plain rxe
//!
//! Where rdma_rxe does otherwise than IBTA and our engine, `known::KNOWN` names the test, and the
//! file and function of rxe that decides it.

mod cm;
mod cost;
mod faults;
mod known;
pub(super) mod nested;
mod pingpong;
mod suite;
mod verbs;
pub(super) mod verified;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::fixture;
use crate::cache::Cache;
use crate::host;
use crate::host::RNIC_PACKAGES;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::{Lab, Nic, Plan, daemon, peers};

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Release of the VMs
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// Only the rows whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// A real guest: QEMU inside the VM that stands for the host, instead of virtual guests
    #[arg(long, conflicts_with = "cost")]
    nested: bool,
    /// What the way through the daemon costs, as ratios to stock programs on the same device
    #[arg(long)]
    cost: bool,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

const SET_UP: Duration = Duration::from_secs(300);
/// Addresses of virtual guests: 10.0.0.1 and on.
const ADDRESSES: u8 = 40;

/// What a virtual guest's programs need.
const OURS: &str = "ulimit -l unlimited; cp -u /host/products/vhost-rdma /tmp
export VHOST_RDMA_BIN=/tmp/vhost-rdma VHOST_RDMA_BACKING=@BACKING@ VHOST_RDMA_PATIENCE=4
";

/// The host's side: addresses for its guests on the netdev that carries rxe, and no limit on what
/// may be pinned.
const HOST: &str = "set -e
ip link set eth0 mtu 4200
sysctl -qw net.ipv6.conf.eth0.keep_addr_on_down=1 net.ipv6.conf.eth0.accept_dad=0
ip addr add 10.0.3.3/24 dev eth0; ip addr add 10.0.9.1/24 dev eth0
for n in $(seq 1 @ADDRESSES@); do ip addr add 10.0.0.$n/24 dev eth0; \
    ip addr add fd00:1::$(printf %x $n)/64 dev eth0 nodad; done
sleep 2
";

/// The third-party host: an address of its own.
const PEER: &str = "ip addr flush dev eth0 to 10.0.0.0/16
ip -6 addr flush dev eth0 to fd00:1::/64
ip addr add 10.0.0.200/24 dev eth0
";

/// The programs of virtual guests that third-party hosts talk to.
pub(super) fn peers(cache: &Cache) -> Result<Vec<PathBuf>> {
    Ok(suite::virtual_guest(cache, false)?.1)
}

impl Args {
    /// The form with a real guest.
    pub fn with_a_real_guest() -> Self {
        Self { nested: true, ..Self::default() }
    }

    /// The form that measures.
    pub fn of_costs() -> Self {
        Self { cost: true, ..Self::default() }
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut lab = Lab::prepare(cache)?;
        if self.keep {
            lab.run.keep();
        }
        host::ensure_packages(cache, RNIC_PACKAGES)?;
        let binary = daemon::build_with(cache, &["host-rnic"])?;
        let mut products = vec![binary];
        let host = if self.nested { Nic::Host(Vec::new()) } else { Nic::None };
        let mut tests = Vec::new();
        if !self.nested {
            let (programs, peers) = suite::virtual_guest(cache, self.wants_tests())?;
            products.extend(peers);
            products.extend(crate::products::programs(cache, self.debian)?);
            products.extend(programs.iter().map(|program| program.path.clone()));
            tests = programs;
        }
        let cpus = if self.cost { 2 } else { 1 };
        lab.boot(&Plan { image: lab.image(self.debian)?, cpus, nics: vec![host, Nic::None] })?;
        lab.deliver(&products)?;
        let mut table = Vec::new();
        {
            let (a, b) = lab.pair()?;
            for host in [&mut *a, &mut *b] {
                host.must(&HOST.replace("@ADDRESSES@", &ADDRESSES.to_string()), SET_UP)?;
            }
            let _devices = peers::attach_rxe(a, b)?;
        }
        if !tests.is_empty() {
            self.whole_stack(&mut lab.guests, &tests, &mut table)?;
            self.faults(lab.pair()?.0, &tests, &mut table)?;
            self.witnessed(&lab.guests, &tests, &mut table)?;
        }
        // From here on b is somebody else.
        lab.pair()?.1.must(PEER, SET_UP)?;
        if self.nested {
            self.nested(cache, &mut lab, &mut table)?;
        } else {
            let (a, b) = lab.pair()?;
            if self.cost {
                self.cost(a, b, &mut table);
            } else {
                self.pingpong(a, b, &mut table)?;
                self.verified(a, b, &mut table)?;
                self.rdma_cm(a, b, &mut table)?;
            }
        }
        for guest in &mut lab.guests {
            let clean = fixture::kernel_is_clean(guest);
            table.push(Row::verdict(format!("kernel of {}", guest.name), clean));
        }
        rows::print_table(&table, "rnic:rxe0", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }

    /// Whether the tests are needed, which take minutes to build: not if the rows that are asked
    /// for are all of other parts.
    fn wants_tests(&self) -> bool {
        const OTHERS: [&str; 3] = ["pingpong:", "verified:", "rdma_cm:"];
        let other = |part: &str| OTHERS.iter().any(|name| part.starts_with(name));
        !self.cost && self.only.as_ref().is_none_or(|only| !only.split(',').all(other))
    }

    fn wanted(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.split(',').any(|part| name.contains(part)))
    }
}
