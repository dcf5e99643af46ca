//! Opening an RNIC of this host by the name of its RDMA device.

use super::faults::Faults;
use super::null::Null;
use super::open_error::OpenError;
use super::verbs::{HostGid, HostVerbs};

/// The device that needs no hardware: see `null`.
const NULL: &str = "null";

/// Its address: 192.0.2.1, which is nobody's (RFC 5737).
const NULL_GID: HostGid =
    HostGid { index: 0, gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1] };

/// Loads what opening a device takes from the disk, for the last time: the drivers of the devices
/// that there are. Who may load no code afterwards calls this before.
pub fn prepare() {
    #[cfg(feature = "host-rnic")]
    super::ibverbs::prepare();
}

/// The same for the host's connection manager, if there is one.
pub fn prepare_cm() {
    #[cfg(feature = "host-rnic")]
    {
        super::ibverbs::load();
        super::cm::prepare();
    }
}

/// Opens a device.
///
/// # Errors
/// See [`OpenError`].
pub fn open(device: &str) -> Result<Box<dyn HostVerbs>, OpenError> {
    if device == NULL {
        let faults = Faults::default();
        faults.set_gids(vec![NULL_GID]);
        let opened = Null::new(faults);
        return opened.map(|null| Box::new(null) as Box<dyn HostVerbs>).map_err(|source| {
            OpenError::Host { device: device.to_owned(), action: "make an eventfd", source }
        });
    }
    #[cfg(feature = "host-rnic")]
    return super::ibverbs::open(device);
    #[cfg(not(feature = "host-rnic"))]
    Err(OpenError::NotBuilt)
}
