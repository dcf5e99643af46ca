//! The seam between what is the host's and what is a guest's.
//!
//! Above it stand the registry, the API and the sockets that VMMs connect to; they know who may
//! come, and nothing of what is said. Below it, a [`Dataplane`] speaks to VMMs and guests. It may
//! be in this process, or in one for each network: whoever is above cannot tell.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    AttachError, Heirloom, NicConfig, NicStatus, Peer, ProcessStatus, Renewed, WorkerStatus,
};

/// Serves NICs whose sockets are somebody else's.
///
/// Calls may block for a bounded time and come one at a time for each NIC.
pub trait Dataplane: Send + Sync + 'static {
    /// Makes a NIC, to which no VMM is connected.
    ///
    /// # Errors
    /// An [`AttachError`], and then nothing is left behind.
    fn add(&self, nic: &NicConfig) -> Result<(), AttachError>;

    /// [`Self::add`] of some NICs of one network, as
    /// [`Backend::attach_all`](super::Backend::attach_all).
    fn add_all(&self, nics: &[&NicConfig]) -> Vec<Result<(), AttachError>> {
        nics.iter().map(|nic| self.add(nic)).collect()
    }

    /// A NIC is about to be removed: who waits for something there need not any more.
    fn leaves(&self, _name: &str) {}

    /// Ends a NIC. Its connections have ended before. Does nothing for an unknown name.
    fn remove(&self, name: &str);

    /// Takes over changed limits and addresses of a live NIC.
    ///
    /// # Errors
    /// An [`AttachError`], and then the old ones still hold.
    fn update(&self, nic: &NicConfig) -> Result<(), AttachError>;

    /// Serves a VMM that may be here. A NIC has one at a time.
    ///
    /// # Errors
    /// The host lacks what a connection takes.
    fn connect(&self, name: &str, vmm: UnixStream) -> io::Result<Box<dyn Connection>>;

    /// Takes in a process that may be here, beside others of the same NIC. Whoever serves it sees
    /// its end. It can take long, and ends soon when nobody `waits` any more.
    ///
    /// # Errors
    /// The NIC is not for processes, has as many as it may, or the host lacks what one takes.
    fn enter(&self, name: &str, process: &UnixStream, waits: &dyn Fn() -> bool) -> io::Result<()>;

    /// Goes on with the VMM that an earlier daemon left to a NIC which was just made, if there is
    /// one that can be gone on with.
    fn take_up(&self, _nic: &NicConfig) -> Option<(UnixStream, Box<dyn Connection>)> {
        None
    }

    /// As [`Backend::complete`](super::Backend::complete).
    fn complete(&self, _vni: u32) {}

    /// As [`Backend::upgrade_pause`](super::Backend::upgrade_pause).
    fn upgrade_pause(&self) -> Duration {
        Duration::ZERO
    }

    /// As [`Backend::settled`](super::Backend::settled).
    fn settled(&self) {}

    /// All NICs are removed next: what takes its time begins, for all at once.
    fn ending(&self) {}

    /// As [`Backend::set_peers`](super::Backend::set_peers).
    fn set_peers(&self, vni: u32, peers: &[Peer]);

    /// As [`Backend::forget_network`](super::Backend::forget_network).
    ///
    /// # Errors
    /// An [`AttachError`]: something of it may still be there.
    fn forget_network(&self, vni: u32) -> Result<(), AttachError>;

    /// As [`Backend::hand_down`](super::Backend::hand_down).
    fn hand_down(&self) -> Vec<Heirloom> {
        Vec::new()
    }

    /// As [`Backend::would_lose`](super::Backend::would_lose).
    fn would_lose(&self) -> Vec<String> {
        Vec::new()
    }

    /// As [`Backend::renew`](super::Backend::renew).
    ///
    /// # Errors
    /// As there.
    fn renew(&self, _vni: u32) -> Result<Renewed, AttachError> {
        Err(AttachError::Resources(
            "this one process serves all networks; start the daemon without --one-process"
                .to_owned(),
        ))
    }

    /// What the NIC does now; the default value for an unknown name.
    fn status(&self, name: &str) -> NicStatus;

    /// How the threads that move data are.
    fn workers(&self) -> Vec<WorkerStatus>;

    /// The processes that serve networks; none where this one does.
    fn processes(&self) -> Vec<ProcessStatus> {
        Vec::new()
    }
}

/// A VMM that is served. It ends when either side shuts its stream down.
pub trait Connection: Send {
    /// Waits for the end, and until nothing is left of it: the next VMM finds a clean device.
    fn end(self: Box<Self>) -> Ending;
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// The stream was closed.
    Closed,
    /// It was broken off, and why.
    Broken(String),
}
