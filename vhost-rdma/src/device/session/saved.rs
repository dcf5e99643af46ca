//! How a session comes to rest and is saved, and how it goes on in another process.
//!
//! What is saved is in [`crate::device::saved`].

use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Session;
use crate::device::ctrl::Controller;
use crate::device::nic::{Nic, PATIENCE, Serving};
use crate::device::saved::SavedSession;
use crate::nic::saved::BadState;

/// How often a message that is being dealt with is waited for.
const LOOK: Duration = Duration::from_micros(50);

impl Serving for Session {
    fn come_to_rest(&self, until: Instant) -> bool {
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

    fn save(&self) -> Option<SavedSession> {
        if self.is_lost() {
            return None;
        }
        let nic = &self.nic;
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
}

impl Session {
    /// Goes on with what an earlier process saved, in memory that is there by now. The NIC stands
    /// still until all of its network are there.
    pub(in crate::device) fn go_on_with(
        &self,
        nic: &Nic,
        saved: SavedSession,
    ) -> Result<(), BadState> {
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
