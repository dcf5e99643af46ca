//! A session that another process is to go on with as if nothing had happened: what is saved beside
//! the NIC, how everything comes to rest before, and how it goes on.
//!
//! Memory, queues and descriptors are the supervisor's to hand on ([`super::journal`]), as after a
//! crash. What a crash loses is here: what the control queue has agreed on, and the NIC's objects.
//!
//! Whoever is to be saved must come to rest first, and nobody waits for a VMM or a guest that does
//! not let it: such a session is not saved, and its guest finds its device lost, as after a crash.

use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::ctrl::Controller;
use super::nic::{Nic, PATIENCE};
use super::session::Session;
use super::vring::Vring;
use crate::nic::saved::BadState;
use crate::shard::SavedNic;

/// How often a message that is being dealt with is waited for.
const LOOK: Duration = Duration::from_micros(50);

/// See the module.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedSession {
    /// Nonce and capabilities of the guest's driver.
    agreed: (Option<u64>, u64),
    /// Control commands and kicks, as they are counted.
    counted: (u64, u64),
    /// `None`: no driver has begun.
    nic: Option<SavedNic>,
}

impl Session {
    /// Serves nobody any more: no message of the VMM and no request of the guest. False if one of
    /// them is not over until then.
    pub(crate) fn come_to_rest(&self, until: Instant) -> bool {
        loop {
            match self.try_messages() {
                Ok(held) => {
                    // For ever: what the VMM says from now on is for the next process.
                    std::mem::forget(held);
                    break;
                }
                Err(TryLockError::Poisoned(_)) => return false,
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(LOOK);
                }
                Err(TryLockError::WouldBlock) => return false,
            }
        }
        self.rest(until)
    }

    /// What is to be handed on of a session that is at rest.
    pub(crate) fn save(&self, nic: &Nic) -> Option<SavedSession> {
        if self.is_lost() {
            return None;
        }
        let saved = nic.call(PATIENCE, |shard, id, _| shard.save(id)).ok()?;
        let counted = &nic.stats;
        Some(SavedSession {
            agreed: self.agreed(),
            counted: (
                counted.control_commands.load(Ordering::Relaxed),
                counted.kicks.load(Ordering::Relaxed),
            ),
            nic: saved,
        })
    }

    /// Goes on with what an earlier process saved, in memory that is there by now. The NIC stands
    /// still until all of its network are there.
    pub(super) fn go_on_with(&self, nic: &Nic, saved: SavedSession) -> Result<(), BadState> {
        let SavedSession { agreed, counted, nic: objects } = saved;
        if let Some(objects) = objects {
            let space = self.memory();
            // A limit that was lowered since takes nothing away.
            let most = nic.account().most();
            nic.account().allow(u64::MAX);
            let loaded = nic.call(PATIENCE, move |shard, id, _| shard.load(id, objects, space));
            nic.account().allow(most);
            loaded.unwrap_or(Err(BadState::Content("a worker that does not answer")))?;
        } else if agreed.0.is_some() {
            // A driver without objects: its NIC has failed, and the guest knows.
            return Err(BadState::Content("a driver without a device"));
        }
        nic.stats.control_commands.store(counted.0, Ordering::Relaxed);
        nic.stats.kicks.store(counted.1, Ordering::Relaxed);
        self.continue_as(Controller::of(agreed, nic.layout.kick_base()));
        Ok(())
    }
}

/// Tells the guest to look at each queue: what it was to be told in the end may not have been.
pub(super) fn tell_all(vrings: &[Vring]) {
    vrings.iter().for_each(Vring::signal);
}
