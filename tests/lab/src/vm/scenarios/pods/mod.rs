//! Pods on a node that has RDMA and SR-IOV of its own: a VM, in which containerd, runc and a
//! kubelet without an API server run real pods on NICs of the kinds that need hardware.
//!
//! What a kind is in this VM, and what its pods do:
//!
//! - `shared`, rdma_rxe on the VM's network card: `ibv_devinfo`, and `ibv_rc_pingpong -c` from pod
//!   to pod.
//! - `vf`, rdma_rxe on VFs of an emulated igb: the same, through both VFs and the NIC's cable with
//!   plain rxe in another VM.
//! - `vf-vfio`, such VFs with vfio-pci, behind an emulated IOMMU: open group and function, map a
//!   page for DMA.
//! - any, NUMA, a second igb behind a root complex of the VM's second node: get functions of one
//!   node, the one that fits.
//! - any, CDI, `injection = "cdi"`: containerd 1.7 gets CDI names by CRI; kubelet 1.20 has no such
//!   field, so an example of the agent's package stands for a newer one.
//!
//! RDMA is in shared mode. An rxe device cannot follow its interface into a pod's namespace: before
//! Linux 7 it has no namespaces at all, and in 7.3 it is deleted when its interface moves (tried);
//! what the CNI plugin does for `vf` is shown with our own device by `vm cni-rdma`.

mod kinds;
mod node;
mod parts;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::guest;
use crate::vm::{Lab, NAMES, Nic, Plan};
use node::Node;
use parts::Parts;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Release of the guest
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// Only the steps whose name contains this; may be given more than once
    #[arg(long)]
    only: Vec<String>,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
}

type Step = (&'static str, fn(&mut Node) -> Result<()>);

const STEPS: &[Step] = &[
    ("shared: the pod sees its device alone", kinds::shared_devinfo),
    ("shared: pod to pod", kinds::shared_pingpong),
    ("vf: the pod sees its device alone", kinds::vf_devinfo),
    ("vf: pod to another machine", kinds::vf_pingpong),
    ("vf-vfio: the pod opens its function", kinds::vfio),
    ("numa: near ones together", kinds::numa),
    ("cdi: by the runtime's own field", kinds::cdi),
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut lab = Lab::prepare(cache)?;
        if self.keep {
            lab.run.keep();
            eprintln!("    consoles and logs stay in {}", lab.run.path().display());
        }
        let parts = Parts::prepare(cache)?;
        let [here, there] = [0, 1].map(|n| guest::cable(lab.run.path(), NAMES[n]));
        let options = options(&here, &there);
        lab.boot(&Plan {
            image: lab.image(self.debian)?,
            cpus: 2,
            nics: vec![Nic::Options(options), Nic::None],
        })?;
        parts.deliver(lab.guests.first().context("no guest")?.share())?;
        let mut node = Node::set_up(lab)?;
        let pools = kinds::hardware(&mut node)?;
        node.start(pools)?;
        let mut table = Vec::new();
        let chosen = |name: &str| self.only.iter().any(|only| name.contains(only.as_str()));
        for (name, step) in STEPS.iter().filter(|(name, _)| self.only.is_empty() || chosen(name)) {
            let start = Instant::now();
            let result = step(&mut node);
            exec::check_interrupt()?;
            let seconds = start.elapsed().as_secs_f64();
            match &result {
                Ok(()) => eprintln!("    {name}: ok ({seconds:.1} s)"),
                Err(error) => {
                    eprintln!("    {name}: FAILED\n{error:#}");
                    node.clear()?;
                }
            }
            table.push(Row::timed(*name, result.is_ok(), seconds));
        }
        let clean = super::fixture::kernel_is_clean(node.guest()?);
        rows::print_table(&table, "seconds", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(clean && table.iter().all(|row| row.ok))
    }
}

/// Two NICs with SR-IOV, one behind a root complex of each NUMA node; the cable to the other VM is
/// the first one's. The IOMMU is as in the scenario `sriov`.
fn options(here: &Path, there: &Path) -> Vec<String> {
    let (here, there) = (here.display(), there.display());
    let cable = |n: u8, local: &str, remote: &str| {
        format!(
            "dgram,id=n{n},local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"
        )
    };
    let nowhere = |n: u8| cable(n, &format!("{here}{n}"), &format!("{here}{n}.none"));
    let to_peer = cable(1, &here.to_string(), &there.to_string());
    [
        "-M",
        "q35",
        "-m",
        "2560M",
        "-object",
        "memory-backend-ram,id=m0,size=2048M",
        "-object",
        "memory-backend-ram,id=m1,size=512M",
        "-numa",
        "node,nodeid=0,cpus=0-1,memdev=m0",
        "-numa",
        "node,nodeid=1,memdev=m1",
        "-device",
        "intel-iommu,intremap=off",
        "-netdev",
        &nowhere(0),
        "-device",
        &format!("virtio-net-pci,netdev=n0,mac={}", guest::mac(1)),
        "-device",
        "pxb-pcie,id=pxb0,bus=pcie.0,bus_nr=64,numa_node=0",
        "-device",
        "pxb-pcie,id=pxb1,bus=pcie.0,bus_nr=128,numa_node=1",
        "-device",
        "pcie-root-port,id=rp0,bus=pxb0,chassis=1,slot=1",
        "-netdev",
        &to_peer,
        "-device",
        "igb,bus=rp0,netdev=n1,mac=52:54:00:00:01:01",
        "-device",
        "pcie-root-port,id=rp1,bus=pxb1,chassis=2,slot=2",
        "-netdev",
        &nowhere(2),
        "-device",
        "igb,bus=rp1,netdev=n2,mac=52:54:00:00:01:02",
    ]
    .map(str::to_owned)
    .to_vec()
}
