//! A session that another process is to go on with as if nothing had happened: what is saved beside
//! the NIC, how everything comes to rest before, and how it goes on.
//!
//! Memory, queues and descriptors are the supervisor's to hand on ([`super::journal`]), as after a
//! crash. What a crash loses is here: what the control queue has agreed on, and the NIC's objects.
//!
//! Whoever is to be saved must come to rest first, and nobody waits for a VMM or a guest that does
//! not let it: such a session is not saved, and its guest finds its device lost, as after a crash.

use serde::{Deserialize, Serialize};

use super::vring::Vring;
use crate::shard::SavedNic;

/// See the module.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedSession {
    /// Nonce and capabilities of the guest's driver.
    pub(super) agreed: (Option<u64>, u64),
    /// Control commands and kicks, as they are counted.
    pub(super) counted: (u64, u64),
    /// `None`: no driver has begun.
    pub(super) nic: Option<SavedNic>,
}

/// Tells the guest to look at each queue: what it was to be told in the end may not have been.
pub(super) fn tell_all(vrings: &[Vring]) {
    vrings.iter().for_each(Vring::signal);
}
