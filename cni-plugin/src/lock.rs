//! One plugin at a time for one NIC.
//!
//! Runtimes call plugins in parallel for different containers, and a device goes from one container
//! to the next: the DEL of the old one may still run when the ADD of the new one begins. So the
//! lock is the device's, not the container's. It is a file's (`flock`), which the kernel gives back
//! when its holder is killed.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use cni_skel::{Code, Error};
use rustix::fs::{FlockOperation, flock};

/// How long another call may hold a device: the slowest thing that is done under the lock is DHCP.
const PATIENCE: Duration = Duration::from_secs(60);

/// A device's lock, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a NIC.
    ///
    /// # Errors
    /// Code 5 if the file cannot be made, 11 if someone holds the lock for too long.
    pub(crate) fn take(dir: &Path, nic: &str) -> Result<Self, Error> {
        let path = dir.join(nic.replace('/', "-"));
        let file = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .and_then(|()| {
                File::options().write(true).create(true).truncate(false).mode(0o600).open(&path)
            })
            .map_err(|error| {
                Error::new(Code::IO, format!("the lock {}: {error}", path.display()))
            })?;
        let until = Instant::now() + PATIENCE;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _file: file }),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let msg = format!("another call still works on NIC {nic}: {error}");
                    return Err(Error::new(Code::TRY_AGAIN, msg));
                }
            }
        }
    }
}
