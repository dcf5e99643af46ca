//! The seam between the registry and the device layer.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::error::AttachError;
use super::{NicConfig, NicStatus, Peer, ProcessStatus, WorkerStatus};

/// A descriptor that outlives this program, and its name.
pub type Heirloom = (String, OwnedFd);

/// The device layer, as the admin side sees it.
///
/// Calls may block for a bounded time and come one at a time for each NIC. The directory of the
/// NIC's socket exists before [`attach`](Backend::attach) and goes after
/// [`detach`](Backend::detach); the socket itself belongs to the backend.
pub trait Backend: Send + Sync + 'static {
    /// Creates the NIC's socket with the access asked for, listens on it, and serves whoever
    /// connects from then on.
    ///
    /// # Errors
    /// An [`AttachError`], and then nothing is left behind.
    fn attach(&self, nic: &NicConfig) -> Result<(), AttachError>;

    /// [`Self::attach`] of some NICs of one network, whose names and sockets differ: what becomes
    /// of each. A backend may have several under way.
    fn attach_all(&self, nics: &[&NicConfig]) -> Vec<Result<(), AttachError>> {
        nics.iter().map(|nic| self.attach(nic)).collect()
    }

    /// Ends the NIC: its VMM is cut off, its objects are gone, its socket is removed. Does nothing
    /// for an unknown name.
    fn detach(&self, name: &str);

    /// Takes over changed limits and addresses of a live NIC.
    ///
    /// # Errors
    /// An [`AttachError`], and then the old ones still hold.
    fn update(&self, nic: &NicConfig) -> Result<(), AttachError>;

    /// Replaces the peers of a network; connections to one that is not named any more end. A
    /// backend that never leaves the host has none.
    fn set_peers(&self, _vni: u32, _peers: &[Peer]) {}

    /// Lets go of everything of a network whose NICs are gone: its peers, its addresses, whatever
    /// is kept by its VNI. Afterwards a network with the same VNI or name is another one.
    ///
    /// # Errors
    /// An [`AttachError`]: something of it may still be there.
    fn forget_network(&self, _vni: u32) -> Result<(), AttachError> {
        Ok(())
    }

    /// Has another process go on with a network's NICs, so that their guests do not notice.
    ///
    /// # Errors
    /// An [`AttachError`]: no process of its own serves the network, or none comes up again.
    fn renew(&self, _vni: u32) -> Result<Renewed, AttachError> {
        Err(AttachError::Resources("no process of its own serves this network".to_owned()))
    }

    /// Everything that the next program of this process needs to go on with its VMMs. What is done
    /// afterwards is lost: the process becomes that program, or ends.
    fn hand_down(&self) -> Vec<Heirloom> {
        Vec::new()
    }

    /// NICs whose guests would lose their device by [`Self::hand_down`].
    fn would_lose(&self) -> Vec<String> {
        Vec::new()
    }

    /// The version of what it hands down; `None`: nothing of guests.
    fn saved_version(&self) -> Option<String> {
        None
    }

    /// All NICs of a network are there that the saved state and the configuration have: what an
    /// earlier daemon left of it goes on.
    fn complete(&self, _vni: u32) {}

    /// The longest that NICs of a network stood still while this program took the place of the one
    /// that handed them down; zero if none did.
    fn upgrade_pause(&self) -> Duration {
        Duration::ZERO
    }

    /// Guests that an earlier program served go on here.
    fn has_taken_up(&self) -> bool {
        false
    }

    /// All networks are: what an earlier daemon left for others is nobody's.
    fn settled(&self) {}

    /// The daemon ends: lets go of all NICs, as [`Self::detach`] of each, but at once.
    fn ending(&self) {}

    /// What the NIC does now; the default value for an unknown name.
    fn status(&self, name: &str) -> NicStatus;

    /// How the threads that move data are, one entry each; none where there are no such threads.
    fn workers(&self) -> Vec<WorkerStatus> {
        Vec::new()
    }

    /// The processes that serve networks; none where this one does.
    fn processes(&self) -> Vec<ProcessStatus> {
        Vec::new()
    }
}

/// What has become of a network's NICs when another process went on with them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Renewed {
    /// Those whose guests noticed nothing.
    pub kept: Vec<String>,
    /// Those whose guests find their device lost.
    pub lost: Vec<String>,
    /// From the first that stood still to the last that ran again.
    pub pause: Duration,
}

/// A backend that only remembers: it tests the admin side without a device.
#[derive(Debug, Default)]
pub struct NullBackend {
    nics: Mutex<BTreeMap<String, NicConfig>>,
}

impl NullBackend {
    /// The configuration that a NIC was last attached or updated with.
    #[must_use]
    pub fn config(&self, name: &str) -> Option<NicConfig> {
        self.nics.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}

impl Backend for NullBackend {
    fn attach(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.nics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(nic.name.clone(), nic.clone());
        Ok(())
    }

    fn detach(&self, name: &str) {
        self.nics.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }

    fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.attach(nic)
    }

    fn status(&self, _name: &str) -> NicStatus {
        NicStatus::default()
    }
}
