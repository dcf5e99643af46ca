//! Networks on RNICs across two machines, by the cluster's controller alone: two VMs with rdma_rxe
//! are two nodes, an API server and the controller run beside them.
//!
//! ```text
//!   namespace of the servers          VM a = node-a                 VM b = node-b
//!     API server, controller <──┐       agent ─> daemon ─ rxe0        rxe0 ─ daemon <─ agent
//!                               ├─────────┘        └── 10.9.0.1 ══════ 10.9.0.2 ──┘     │
//!                               └───────────────────────────────────────────────────────┘
//! ```
//!
//! Tenant, networks and node policy are applied by `kubectl`; nobody writes a peer or a
//! certificate. The controller gives each node a block of each network and signs its certificate;
//! the agents follow its lists over mTLS and give them to the daemons. The VMs have no kubelet
//! (that an agent gives NICs to pods is `cargo xtask k8s test`), so the NICs are added by the
//! daemons' command line, each with the first address of its node's block.
//!
//! Rows, and what is looked at:
//!
//! - `peers and certificates`: both nodes are Certified and follow the lists; each daemon knows the
//!   other's blocks, and no other
//! - `idle nodes`: daemon and agent take no processor while there is nothing to do
//! - `requests both ways`: virtual guests, RC with every byte looked at, QP 1 through the daemons'
//!   channel
//! - `another network`: a NIC of another VNI, on the same devices, reaches none of the first's
//! - `another root under traffic`: the signer's root is replaced while requests go both ways: none
//!   fails
//! - `a node restarts alone`: without API server and controller, from its own disk
//!
//! With `--nested` the guests are real, and alone: QEMU in each of the two VMs, our driver in its
//! guest, and an unmodified rping between the two.
//!
//! Rows, and what is looked at:
//!
//! - `real guests`: a guest of each node boots, has the device and the address of its NIC, and
//!   reaches the other by its netdev
//! - `rping, … serves`: each way, rdma_cm and data between guests of two nodes
//! - `another root, rping meanwhile`: the signer's root is replaced while one rping goes on; a
//!   connection that is made afterwards works
//!
//! The VMs reach the servers by QEMU's user-mode network: their monitors run in the servers'
//! network namespace, and nothing listens on the machine's own addresses.

mod node;
mod plane;
mod real;
mod traffic;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};

use super::fixture;
use crate::cache::Cache;
use crate::exec;
use crate::host;
use crate::host::RNIC_PACKAGES;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::guest::Guest;
use crate::vm::nested::HOST_MEMORY_MIB;
use crate::vm::{Lab, MEMORY_MIB, Nic, Plan};
use node::Host;
use plane::Plane;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Release of the VMs
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// Real guests: QEMU inside the two VMs, instead of virtual guests
    #[arg(long)]
    nested: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
}

/// All that runs. The VMs end before the servers' namespace does.
struct World {
    lab: Lab,
    hosts: [Host; 2],
    /// Real guests of the nodes, whose machines are in the VMs.
    guests: Vec<Guest>,
    plane: Plane,
}

type Step = (&'static str, fn(&mut World) -> Result<()>);

/// Each stands on those before it.
const STEPS: &[Step] = &[
    ("peers and certificates", World::introduced),
    ("idle nodes", World::idle),
    ("requests both ways", World::both_ways),
    ("another network", World::another_network),
    ("another root under traffic", World::rotated),
    ("a node restarts alone", World::restarted),
];

/// With real guests.
const NESTED: &[Step] = &[
    ("peers and certificates", World::introduced),
    ("real guests", World::real_guests),
    ("rping, a serves", World::rping_a),
    ("rping, b serves", World::rping_b),
    ("another root, rping meanwhile", World::rotated_meanwhile),
];

impl Args {
    /// The form with real guests.
    pub fn with_real_guests() -> Self {
        Self { nested: true, ..Self::default() }
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut lab = Lab::prepare(cache)?;
        if self.keep {
            lab.run.keep();
            eprintln!("    consoles and logs stay in {}", lab.run.path().display());
        }
        host::ensure_packages(cache, RNIC_PACKAGES)?;
        let products = node::build(cache)?;
        let plane = Plane::start(cache, &products)?;
        lab.network_of = Some(plane.node.pid());
        let memory = if self.nested { HOST_MEMORY_MIB } else { MEMORY_MIB };
        let options = |n| node::options(lab.run.path(), n, memory);
        let nic = if self.nested { Nic::Host } else { Nic::Options };
        let nics = vec![nic(options(0)?), nic(options(1)?)];
        lab.boot(&Plan { image: lab.image(self.debian)?, cpus: 1, nics })?;
        lab.deliver(&products.of_nodes(&lab.run.path().join("stripped"))?)?;
        let hosts = [Host::new(1), Host::new(2)];
        let mut world = World { lab, hosts, guests: Vec::new(), plane };
        if self.nested {
            let products = crate::products::for_guest(cache, self.debian)?;
            world.lab.deliver(&products)?;
        }
        let table = world.steps(if self.nested { NESTED } else { STEPS })?;
        rows::print_table(&table, "seconds", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }
}

impl World {
    fn steps(&mut self, steps: &[Step]) -> Result<Vec<Row>> {
        let mut table = Vec::new();
        for (name, step) in steps {
            let begun = Instant::now();
            let result = step(self);
            exec::check_interrupt()?;
            let seconds = begun.elapsed().as_secs_f64();
            table.push(Row::timed(*name, result.is_ok(), seconds));
            if let Err(error) = result {
                eprintln!("    {name}: FAILED\n{error:#}\n{}", self.tails());
                // The others stand on it.
                break;
            }
            eprintln!("    {name}: ok ({seconds:.1} s)");
        }
        for (name, _) in steps.iter().skip(table.len()) {
            table.push(Row::verdict(*name, false));
        }
        for guest in self.guests.iter_mut().chain(&mut self.lab.guests) {
            let clean = fixture::kernel_is_clean(guest);
            table.push(Row::verdict(format!("kernel of {}", guest.name), clean));
        }
        Ok(table)
    }

    /// The ends of the logs, for a step that failed.
    fn tails(&self) -> String {
        let mut text = exec::tail(&self.plane.node.log("vhost-rdma-controller"), 0, 15);
        for guest in &self.lab.guests {
            for file in ["agent.log", "daemon.log"] {
                let end = exec::tail(&guest.share().join(file), 0, 15);
                text.push_str(&format!("the end of {}'s {file}:\n{end}", guest.name));
            }
        }
        text
    }

    /// A host and its VM.
    fn host(&mut self, n: usize) -> Result<(&Host, &mut Guest)> {
        let guest = self.lab.guests.get_mut(n).context("no such VM")?;
        Ok((self.hosts.get(n).context("no such host")?, guest))
    }
}
