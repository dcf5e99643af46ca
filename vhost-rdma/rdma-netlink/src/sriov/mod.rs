//! SR-IOV: which functions there are, who drives and uses them, and changes that survive a crash.
//!
//! ```no_run
//! use rdma_netlink::sriov::{Manager, System};
//! # fn main() -> rdma_netlink::Result<()> {
//! let mut manager = Manager::new(System::default(), "/var/lib/vhost-rdma/sriov");
//! manager.recover()?; // what a crash has left half done
//! manager.create("ens3f0", 8, false)?;
//! let vf = manager.inventory()?.vf("ens3f0/2")?.clone();
//! manager.bind(&vf.address, false)?; // to vfio-pci, for a VM
//! manager.unbind(&vf.address, false)?; // back to the driver that it came from
//! # Ok(())
//! # }
//! ```
//!
//! The inventory is a function of three sources: sysfs under a root that is a parameter, the
//! interfaces and the RDMA devices of netlink. It keeps no state. Whatever changes a function goes
//! through [`Manager`]: it locks the physical function (between processes too), writes what it is
//! about to do into a file, does it, and writes that it is done. Every operation is a drive towards
//! a described state, not a list of steps: it can be started again wherever it was interrupted, or
//! driven back. So after a crash at any moment [`Manager::recover`] ends with the state after or
//! the state before, and never with a function that nobody drives.

mod address;
mod host;
mod inventory;
mod journal;
mod manager;
mod operation;
mod sysfs;
mod usage;

#[cfg(test)]
mod fake;

pub use address::PciAddress;
pub use host::{Host, System};
pub use inventory::{
    Function, Inventory, Netdev, PhysicalFunction, RdmaDevice, VFIO_PCI, VirtualFunction,
};
pub use journal::{Claim, STATE_DIR};
pub use manager::{Manager, Outcome, Recovered};
pub use operation::Operation;
pub use usage::User;
