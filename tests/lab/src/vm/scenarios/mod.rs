//! What can be done with the lab. A scenario is one file here, with its options and a `run`; it is
//! listed once in [`Scenario`].

pub mod ages;
mod client;
pub mod clients;
pub mod cluster;
pub mod cni_rdma;
pub mod drivers;
pub mod figures;
pub mod fixture;
pub mod iommu;
pub mod life;
pub mod neighbour;
pub mod nvme;
pub mod pair;
pub mod pods;
mod prepare;
pub mod pyverbs;
pub mod rnic;
mod run;
mod rxe;
mod shell;
pub mod sriov;
pub mod stock;
pub mod stranger;
pub mod verbs;
mod vfs;

use anyhow::Result;
use clap::Subcommand;

use crate::cache::Cache;

/// Scenarios of the VM lab.
#[derive(Debug, Subcommand)]
pub enum Scenario {
    /// Two VMs on one daemon: every program of the demo, beside rxe
    Pair(pair::Args),
    /// A Linux guest and a driver written from the specification alone: ibv_rc_pingpong, each
    /// calling the other
    Stranger(stranger::Args),
    /// A process of the host and a Linux guest in one network, connected by rdma_cm both ways
    Neighbour(neighbour::Args),
    /// Guests on an RNIC of their host: rdma_rxe in a VM, with plain rxe as a third-party host
    Rnic(rnic::Args),
    /// The rxe baseline alone
    Rxe(rxe::Args),
    /// Kernel driver and device of different ages: each with one feature more than the other
    Ages(ages::Args),
    /// Machines in which a DMA address is no guest physical address: the device is refused there
    Iommu(iommu::Args),
    /// rdma-core's own Python suite in a guest with one of our NICs
    Pyverbs(pyverbs::Args),
    /// What no suite of others looks at: events, states, resources, statistics, network namespaces
    Verbs(verbs::Args),
    /// The CNI plugin moves an RDMA device into a pod's namespace and back, also when it is killed
    CniRdma(cni_rdma::Args),
    /// Kernel storage over our device: nvme-rdma and nvmet-rdma, fio with verification
    Nvme(nvme::Args),
    /// Programs, drivers, NICs, memory, guests, VMs and the daemon come and go under load: nothing
    /// leaks, nobody else is harmed
    Life(life::Args),
    /// Real clients, unmodified, verified: UCX, Open MPI, libfabric's tests, qperf
    Clients(clients::Args),
    /// Virtual functions of an emulated SR-IOV NIC: made, set, passed through, killed at every
    /// step; RDMA netlink beside iproute2
    Sriov(sriov::Args),
    /// Networks on RNICs of two rxe VMs by the cluster's controller alone: peers, certificates,
    /// another root under traffic, a node that restarts without a control plane
    Cluster(cluster::Args),
    /// Pods on a node with RDMA and SR-IOV of its own: kubelet, containerd and runc in a VM, the
    /// kinds of NIC that need hardware
    Pods(pods::Args),
    /// The daemon on stock Debian 12 and 13, their kernels and cgroups of version 2: what of the
    /// tests depends on the host
    Stock(stock::Args),
    /// Compile the kernel driver for every supported kernel, warnings as errors
    Drivers(drivers::Args),
    /// Make the roots and images and stop
    Prepare(prepare::Args),
    /// Boot guests, run a script in each, print what it writes, end with its exit status
    Run(run::Args),
    /// Boot guests and take commands from standard input
    Shell(shell::Args),
}

impl Scenario {
    /// True if every check of the scenario held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        match self {
            Self::Pair(args) => args.run(cache),
            Self::Stranger(args) => args.run(cache),
            Self::Neighbour(args) => args.run(cache),
            Self::Rnic(args) => args.run(cache),
            Self::Rxe(args) => args.run(cache),
            Self::Ages(args) => args.run(cache),
            Self::Iommu(args) => args.run(cache),
            Self::Pyverbs(args) => args.run(cache),
            Self::Verbs(args) => args.run(cache),
            Self::CniRdma(args) => args.run(cache),
            Self::Nvme(args) => args.run(cache),
            Self::Life(args) => args.run(cache),
            Self::Clients(args) => args.run(cache),
            Self::Sriov(args) => args.run(cache),
            Self::Cluster(args) => args.run(cache),
            Self::Pods(args) => args.run(cache),
            Self::Stock(args) => args.run(cache),
            Self::Drivers(args) => args.run(cache),
            Self::Prepare(args) => args.run(cache),
            Self::Run(args) => args.run(cache),
            Self::Shell(args) => args.run(cache),
        }
    }
}
