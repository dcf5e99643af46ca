//! A NIC as its socket knows it: who serves it, and whether a VMM sits there.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::mark::Mark;
use crate::node::{Connection, Dataplane, NicConfig, NicStatus};

/// See the module.
pub(super) struct Seat {
    name: String,
    dataplane: Arc<dyn Dataplane>,
    mark: Mark,
}

impl Seat {
    /// That of a NIC which `dataplane` has.
    pub(super) fn new(nic: &NicConfig, dataplane: Arc<dyn Dataplane>) -> Self {
        Self { name: nic.name.clone(), dataplane, mark: Mark::beside(&nic.socket) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The VMM that connected may be here.
    pub(super) fn taken(&self) {
        self.mark.set();
    }

    /// It is gone, by itself.
    pub(super) fn left(&self) {
        self.mark.clear();
    }

    /// Serves it.
    pub(super) fn connect(&self, vmm: UnixStream) -> io::Result<Box<dyn Connection>> {
        self.dataplane.connect(&self.name, vmm)
    }

    /// Takes a process in.
    pub(super) fn enter(&self, process: UnixStream) -> io::Result<()> {
        self.dataplane.enter(&self.name, process)
    }

    /// What the NIC does now.
    pub(super) fn status(&self) -> NicStatus {
        let status = self.dataplane.status(&self.name);
        NicStatus { interrupted: self.mark.interrupted(), ..status }
    }
}
