//! PCI functions as sysfs shows them, and how one is made as new.
//!
//! What a pod did to a function outlives the pod: contexts of a descriptor that it passed on (in
//! shared mode), interfaces on top of the function's in another namespace, programs (XDP), filters
//! and rules of the NIC, names. All of it is the driver's, and ends when the driver lets the
//! function go. So a function that comes back is taken from its driver and given to it again;
//! netdev and RDMA device are new then, in the host's namespace, wherever the old ones were.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cni_skel::{Code, Error};
use rdma_netlink::link::Link;

use crate::host::Host;

/// How long a driver may take to let go of a function, or to take it.
pub(crate) const SETTLE: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);
/// The one that gives a function to user space.
const VFIO_PCI: &str = "vfio-pci";

/// The PCI functions of this host.
#[derive(Debug, Clone)]
pub(crate) struct Functions {
    sysfs: PathBuf,
}

/// What became of a function that was to be made as new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Renewal {
    /// It is new.
    Done,
    /// There is nothing to renew: no such function, or no driver that takes it.
    Nothing,
    /// It cannot be done here, and nothing was done; why not.
    Impossible(String),
}

impl Functions {
    pub(crate) fn of(host: &Host) -> Self {
        Self { sysfs: host.sysfs.clone() }
    }

    /// Whether an interface of the host belongs to a function, directly or by way of whatever
    /// device is between (virtio).
    pub(crate) fn has_netdev(&self, link: &Link, pci: &str) -> bool {
        link.parent.as_deref() == Some(pci) || self.has("net", &link.name, pci)
    }

    /// Whether an RDMA device of the host belongs to a function.
    pub(crate) fn has_rdma(&self, name: &str, pci: &str) -> bool {
        self.has("infiniband", name, pci)
    }

    fn has(&self, class: &str, name: &str, pci: &str) -> bool {
        let device = self.sysfs.join("class").join(class).join(name).join("device");
        !name.contains('/')
            && device
                .canonicalize()
                .is_ok_and(|path| path.components().any(|part| part.as_os_str() == pci))
    }

    /// Whether there is such a function with a driver: without, it has no device that could be
    /// anywhere.
    pub(crate) fn is_driven(&self, pci: &str) -> bool {
        self.dir(pci).is_some_and(|dir| dir.join("driver").exists())
    }

    /// The driver of a function.
    pub(crate) fn driver(&self, pci: &str) -> Option<String> {
        let target = self.dir(pci)?.join("driver").read_link().ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }

    fn dir(&self, pci: &str) -> Option<PathBuf> {
        let named = !pci.is_empty() && !pci.contains('/');
        named.then(|| self.sysfs.join("bus/pci/devices").join(pci)).filter(|dir| dir.exists())
    }

    /// Takes a function from its driver and gives it to it again. One without a driver, as a crash
    /// in between leaves it, is given to the one that takes it.
    ///
    /// # Errors
    /// Code 11 if no driver takes it again.
    pub(crate) fn renew(&self, pci: &str) -> Result<Renewal, Error> {
        let Some(dir) = self.dir(pci) else { return Ok(Renewal::Nothing) };
        let driver = self.driver(pci);
        // Somebody gave it to user space meanwhile, whose it is now.
        if driver.as_deref() == Some(VFIO_PCI) {
            return Ok(Renewal::Nothing);
        }
        if number(&dir.join("sriov_numvfs")).is_some_and(|count| count != 0) {
            return Ok(Renewal::Impossible("it has virtual functions of its own".to_owned()));
        }
        // The kernel probes no VF then (`pci_device_can_probe`), whoever asks.
        if number(&dir.join("physfn/sriov_drivers_autoprobe")) == Some(0) {
            return Ok(Renewal::Impossible("sriov_drivers_autoprobe is 0".to_owned()));
        }
        // Both are opened first: a function that is taken from its driver must not be left so.
        let open = |path: PathBuf| {
            File::options()
                .write(true)
                .open(&path)
                .map_err(|error| format!("{}: {error}", path.display()))
        };
        let probe = open(self.sysfs.join("bus/pci/drivers_probe"));
        let unbind = driver.as_ref().map(|_| open(dir.join("driver/unbind"))).transpose();
        let (mut probe, unbind) = match (probe, unbind) {
            (Ok(probe), Ok(unbind)) => (probe, unbind),
            (Err(why), _) | (_, Err(why)) => return Ok(Renewal::Impossible(why)),
        };
        if let Some(mut unbind) = unbind {
            match unbind.write_all(pci.as_bytes()) {
                Err(error) if error.raw_os_error() != Some(NODEV) => {
                    return Ok(Renewal::Impossible(format!("its driver keeps it: {error}")));
                }
                _ => {}
            }
            if !until(|| self.driver(pci).is_none()) {
                return Ok(Renewal::Impossible("its driver keeps it".to_owned()));
            }
        }
        let probed = probe.write_all(pci.as_bytes());
        if until(|| self.driver(pci).is_some()) {
            return Ok(Renewal::Done);
        }
        let Some(driver) = driver else { return Ok(Renewal::Nothing) };
        let why = probed.err().map_or_else(String::new, |error| format!(": {error}"));
        let msg = format!("{driver} does not take {pci} again{why}");
        Err(Error::new(Code::TRY_AGAIN, msg).details("the kernel's log may say why"))
    }
}

/// `ENODEV`: it is no longer bound to that driver.
const NODEV: i32 = rustix::io::Errno::NODEV.raw_os_error();

fn number(path: &Path) -> Option<u32> {
    let read: io::Result<String> = std::fs::read_to_string(path);
    read.ok()?.trim().parse().ok()
}

fn until(there: impl Fn() -> bool) -> bool {
    let end = Instant::now() + SETTLE;
    while !there() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}
