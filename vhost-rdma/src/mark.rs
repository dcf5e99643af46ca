//! A file beside a NIC's socket as long as a VMM is connected.
//!
//! A VMM that cannot connect again (QEMU's generic vhost-user device) is of no use to its guest
//! once the daemon ended, and to the next daemon its NIC looks like one that nobody used yet. The
//! file outlives a daemon, however it ends, so the next one knows whose VMM it must see again. It
//! lies in the runtime directory: a reboot, which ends every VMM, takes it along.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// The file's name in the NIC's directory.
const NAME: &str = "connected";

/// The file of one NIC.
#[derive(Debug)]
pub(crate) struct Mark {
    path: PathBuf,
    interrupted: AtomicBool,
}

impl Mark {
    /// The file beside `socket`; the one that an earlier daemon left is noticed.
    #[must_use]
    pub(crate) fn beside(socket: &Path) -> Self {
        let path = socket.with_file_name(NAME);
        let interrupted = AtomicBool::new(path.symlink_metadata().is_ok());
        Self { path, interrupted }
    }

    /// Was a VMM connected when an earlier daemon ended, and has none been since?
    #[must_use]
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// A VMM is connected.
    pub(crate) fn set(&self) {
        self.interrupted.store(false, Ordering::Relaxed);
        match File::create_new(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                // The session works without; only the next daemon would not know of it.
                tracing::warn!(
                    path = %self.path.display(),
                    %error,
                    "cannot note that a VMM is connected"
                );
            }
            _ => {}
        }
    }

    /// A VMM went by itself. If it was refused, another one is waited for still.
    pub(crate) fn clear(&self) {
        if !self.interrupted() {
            forget(&self.path);
        }
    }
}

/// The NIC of this socket is gone, and with it what was known of its VMM.
pub(crate) fn remove(socket: &Path) {
    forget(&socket.with_file_name(NAME));
}

fn forget(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(
                path = %path.display(),
                %error,
                "cannot remove the note that a VMM is connected"
            );
        }
        _ => {}
    }
}
