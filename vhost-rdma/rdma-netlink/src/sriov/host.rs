//! What a manager needs of a host, and the real one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::PciAddress;
use super::inventory::{Inventory, Network, VirtualFunction};
use super::sysfs::{self, Sysfs};
use super::usage::{Sources, User};
use crate::link::{Links, VfChange};
use crate::rdma::Rdma;
use crate::{Error, Result};

/// The effects of the operations, each of which is atomic in the kernel. Tests put a simulated
/// kernel here.
pub trait Host {
    /// What there is now.
    ///
    /// # Errors
    /// The host cannot be read.
    fn inventory(&mut self) -> Result<Inventory>;

    /// Who uses a virtual function.
    ///
    /// # Errors
    /// The host cannot be read.
    fn users(&mut self, vf: &VirtualFunction) -> Result<Vec<User>>;

    /// Identifies the present run of the kernel.
    ///
    /// # Errors
    /// The host cannot be read.
    fn boot(&mut self) -> Result<String>;

    /// Makes or removes virtual functions; from a number other than 0 only to 0.
    ///
    /// # Errors
    /// The driver refuses.
    fn set_vf_count(&mut self, pf: PciAddress, count: u32) -> Result<()>;

    /// Changes what the physical function holds for a virtual one.
    ///
    /// # Errors
    /// The driver refuses.
    fn set_vf(&mut self, pf: PciAddress, vf: u32, change: &VfChange) -> Result<()>;

    /// Demands a driver by name, or none in particular.
    ///
    /// # Errors
    /// The function is gone.
    fn set_driver_override(&mut self, function: PciAddress, driver: Option<&str>) -> Result<()>;

    /// Takes the driver from a function.
    ///
    /// # Errors
    /// It has none, or is gone.
    fn unbind(&mut self, function: PciAddress, driver: &str) -> Result<()>;

    /// Lets the kernel look for a driver.
    ///
    /// # Errors
    /// The driver failed to take it.
    fn probe(&mut self, function: PciAddress) -> Result<()>;

    /// Why a function cannot be given to this driver; `None` if it can.
    fn obstacle(&mut self, function: PciAddress, driver: &str) -> Option<String>;
}

/// The host that this program runs on.
#[derive(Debug)]
pub struct System {
    sysfs: Sysfs,
    proc_root: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self::new("/sys", "/proc")
    }
}

/// After `sriov_numvfs` is written the functions are there; their drivers may still be at work
/// (asynchronous probing, auxiliary buses).
const SETTLE: Duration = Duration::from_secs(10);

impl System {
    /// With other roots than `/sys` and `/proc`, as in a container that has the host's elsewhere.
    #[must_use]
    pub fn new(sysfs: impl Into<PathBuf>, proc_root: impl Into<PathBuf>) -> Self {
        Self { sysfs: Sysfs::new(sysfs), proc_root: proc_root.into() }
    }

    fn network() -> Result<Network> {
        let links = Links::open()?.list()?;
        let devices = match Rdma::open() {
            Ok(mut rdma) => {
                let mut list = Vec::new();
                for device in rdma.devices()? {
                    // A device that goes away meanwhile has no ports.
                    let ports = rdma.ports(device.index).unwrap_or_default();
                    list.push((device, ports));
                }
                list
            }
            // No RDMA in this kernel, or not loaded.
            Err(error) if error.is_unsupported() => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(Network { links, devices })
    }

    fn write(&self, function: PciAddress, attribute: &str, value: &str, what: &str) -> Result<()> {
        self.sysfs.write(&self.sysfs.path(function).join(attribute), value, what)
    }
}

impl Host for System {
    fn inventory(&mut self) -> Result<Inventory> {
        Inventory::assemble(&self.sysfs, &Self::network()?)
    }

    fn users(&mut self, vf: &VirtualFunction) -> Result<Vec<User>> {
        let mut links = Links::open()?;
        let (list, addresses) = (links.list()?, links.addresses(None)?);
        let sources = Sources {
            sysfs: &self.sysfs,
            proc_root: &self.proc_root,
            links: &list,
            addresses: &addresses,
        };
        Ok(sources.users(vf))
    }

    fn boot(&mut self) -> Result<String> {
        let path = self.proc_root.join("sys/kernel/random/boot_id");
        sysfs::text(&path).ok_or_else(|| Error::NotFound(format!("cannot read {}", path.display())))
    }

    fn set_vf_count(&mut self, pf: PciAddress, count: u32) -> Result<()> {
        self.write(
            pf,
            "sriov_numvfs",
            &count.to_string(),
            &format!("set the number of VFs of {pf} to {count}"),
        )?;
        let deadline = Instant::now() + SETTLE;
        while u32::try_from(self.sysfs.virtual_functions(pf).len()) != Ok(count) {
            if Instant::now() > deadline {
                return Err(Error::NotFound(format!(
                    "{pf} was told to have {count} VFs, but they do not appear; the kernel's log \
                     may say why"
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn set_vf(&mut self, pf: PciAddress, vf: u32, change: &VfChange) -> Result<()> {
        let name = self.sysfs.entries(pf, "net").into_iter().next().ok_or_else(|| {
            Error::NotFound(format!(
                "the physical function {pf} has no network interface in this namespace, and its \
                 VFs are set by way of it"
            ))
        })?;
        let mut links = Links::open()?;
        let index = links.by_name(&name)?.index;
        links.set_vf(index, vf, change)
    }

    fn set_driver_override(&mut self, function: PciAddress, driver: Option<&str>) -> Result<()> {
        // A lone newline clears it.
        self.write(
            function,
            "driver_override",
            &format!("{}\n", driver.unwrap_or_default()),
            &format!("choose a driver for {function}"),
        )
    }

    fn unbind(&mut self, function: PciAddress, driver: &str) -> Result<()> {
        let path = self.sysfs.root().join("bus/pci/drivers").join(driver).join("unbind");
        self.sysfs.write(&path, &function.to_string(), &format!("take {driver} from {function}"))
    }

    fn probe(&mut self, function: PciAddress) -> Result<()> {
        let path = self.sysfs.root().join("bus/pci/drivers_probe");
        self.sysfs.write(&path, &function.to_string(), &format!("find a driver for {function}"))
    }

    fn obstacle(&mut self, function: PciAddress, driver: &str) -> Option<String> {
        let root = self.sysfs.root();
        if !root.join("bus/pci/drivers").join(driver).is_dir() {
            return Some(format!(
                "the driver {driver} is not loaded: run `modprobe {driver}` first"
            ));
        }
        let no_iommu = sysfs::text(&root.join("module/vfio/parameters/enable_unsafe_noiommu_mode"));
        let group = self.sysfs.target(function, "iommu_group");
        if driver == super::VFIO_PCI && group.is_none() && no_iommu.as_deref() != Some("Y") {
            return Some(format!(
                "{function} has no IOMMU group: switch the IOMMU on in the firmware and the kernel \
                 (intel_iommu=on or amd_iommu=on)"
            ));
        }
        None
    }
}
