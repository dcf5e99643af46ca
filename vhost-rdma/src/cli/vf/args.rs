//! The grammar of `vf`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rdma_netlink::link::{VfChange, VfLinkState};
use rdma_netlink::sriov::STATE_DIR;
use rdma_netlink::{Guid, HardwareAddress};

/// `vf`
#[derive(Debug, Args)]
pub struct VfArgs {
    /// Where changes are journaled; the same for all programs of a host
    #[arg(long, global = true, value_name = "DIR", default_value = STATE_DIR)]
    pub state_dir: PathBuf,
    #[command(subcommand)]
    pub command: VfCommand,
}

/// `vf …`
#[derive(Debug, Subcommand)]
pub enum VfCommand {
    /// Show the physical functions with their virtual ones
    List {
        /// Only this physical function
        pf: Option<String>,
    },
    /// Show a virtual function, with who uses it
    Show {
        /// Which one
        vf: String,
    },
    /// Give a physical function this number of virtual ones
    ///
    /// The kernel goes from one number to another only through none: all present functions are
    /// removed first, unless one is in use.
    Create {
        /// Which physical function
        pf: String,
        /// How many virtual functions it shall have; 0 removes all
        count: u32,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Change what the physical function holds for a virtual one
    Set {
        /// Which one
        vf: String,
        #[command(flatten)]
        change: Change,
    },
    /// Give a virtual function to vfio-pci, for a VM, and print the options for the VMM
    Bind {
        /// Which one
        vf: String,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Give a virtual function back to the driver that it had
    Unbind {
        /// Which one
        vf: String,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Print the QEMU options that give a VM this virtual function
    QemuArgs(VmmArgs),
    /// Print the cloud-hypervisor options that give a VM this virtual function
    CloudHypervisorArgs(VmmArgs),
    /// Complete or undo what a crash has interrupted; the other commands do so for the physical
    /// function that they change
    Recover,
}

/// `vf qemu-args`, `vf cloud-hypervisor-args`
#[derive(Debug, Args)]
pub struct VmmArgs {
    /// Which one
    pub vf: String,
    /// Number of this function in its VM: makes the id in the options unique
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub index: u32,
}

/// Consent to what cannot be undone.
#[derive(Debug, Args, Clone, Copy)]
pub struct Confirm {
    /// Do not ask
    #[arg(long, short)]
    pub yes: bool,
    /// Even if it is in use: whoever uses it loses it
    #[arg(long)]
    pub force: bool,
}

/// New settings.
#[derive(Debug, Args, Clone)]
pub struct Change {
    /// MAC address; 00:00:00:00:00:00 lets the virtual function choose
    #[arg(long)]
    pub mac: Option<HardwareAddress>,
    /// VLAN that the NIC adds and strips; 0 for none
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u32).range(0..4095))]
    pub vlan: Option<u32>,
    /// Priority in that VLAN
    #[arg(long, value_name = "PRIORITY", value_parser = clap::value_parser!(u32).range(0..8))]
    pub vlan_qos: Option<u32>,
    /// Guaranteed transmit rate; 0 for none
    #[arg(long, value_name = "MBIT/S")]
    pub min_tx_rate: Option<u32>,
    /// Greatest transmit rate; 0 for no bound
    #[arg(long, value_name = "MBIT/S")]
    pub max_tx_rate: Option<u32>,
    /// Drop frames with another source address
    #[arg(long, value_name = "ON|OFF", value_parser = switch)]
    pub spoof_check: Option<bool>,
    /// Allow promiscuous mode and another MAC address
    #[arg(long, value_name = "ON|OFF", value_parser = switch)]
    pub trust: Option<bool>,
    /// What the virtual function is told about the link: auto, enable or disable
    #[arg(long, value_name = "STATE")]
    pub link_state: Option<VfLinkState>,
    /// InfiniBand node GUID
    #[arg(long, value_name = "GUID")]
    pub node_guid: Option<Guid>,
    /// InfiniBand port GUID
    #[arg(long, value_name = "GUID")]
    pub port_guid: Option<Guid>,
}

impl From<Change> for VfChange {
    fn from(change: Change) -> Self {
        let Change {
            mac,
            vlan,
            vlan_qos,
            min_tx_rate,
            max_tx_rate,
            spoof_check,
            trust,
            link_state,
            node_guid,
            port_guid,
        } = change;
        Self {
            mac,
            vlan,
            vlan_qos,
            min_tx_rate,
            max_tx_rate,
            spoof_check,
            trust,
            link_state,
            node_guid,
            port_guid,
        }
    }
}

fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("write on or off".to_owned()),
    }
}
