//! Opening RNICs for NICs that are backed by one.
//!
//! An RNIC's descriptors, for completions and for events, join those that the NIC's worker sleeps
//! on, for as long as the device is open.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::cm::Wake;
use crate::device::nic;
use crate::node::{AttachError, Backing};
use crate::rnic::{self, Directory, HostError, HostVerbs, OpenError, Opener, Place};
use crate::worker::WorkerHandle;

/// An RNIC that a NIC uses.
#[derive(Clone)]
pub(super) struct Carrier {
    device: String,
    worker: WorkerHandle,
}

impl Carrier {
    /// Opens the device and lets the worker sleep on it.
    fn open(&self) -> Result<Box<dyn HostVerbs>, OpenError> {
        let refused = |action| {
            let device = self.device.clone();
            move |source| OpenError::Host { device, action, source }
        };
        let mut host = rnic::open(&self.device)?;
        let fds = host.wake_fds().map_err(refused("duplicate its descriptors"))?;
        let watch = |fd| self.worker.watch(None, fd, Arc::<AtomicU64>::default());
        let watched: Result<Vec<_>, _> = fds.into_iter().map(watch).collect();
        let watched = watched.map_err(refused("wait for its events"))?;
        host.keep(Box::new(watched));
        Ok(host)
    }
}

/// What a NIC on an RNIC is made of.
pub(super) type Carried = (Place, Box<dyn HostVerbs>);

/// The place of a NIC on an RNIC and the opened device; `None` for one that is not backed so.
pub(super) fn place(
    backing: &Backing,
    worker: &WorkerHandle,
    directory: &Arc<Directory>,
) -> Result<Option<Carried>, AttachError> {
    let Backing::Rnic { device, through } = backing else { return Ok(None) };
    let carrier = Carrier { device: device.clone(), worker: worker.clone() };
    let host = carrier.open().map_err(|error| AttachError::Backing(error.to_string()))?;
    let opener: Opener = Arc::new(move || {
        carrier.open().map_err(|error| {
            tracing::warn!(%error, "the RNIC cannot be used");
            HostError(libc::ENODEV)
        })
    });
    let through = through.map(nic::gid);
    let (device, directory) = (device.clone(), directory.clone());
    let worker = worker.clone();
    let wake: Wake = Arc::new(move || worker.kick());
    let place = Place { device, through, directory, opener, wake };
    Ok(Some((place, host)))
}
