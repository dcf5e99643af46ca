//! NICs whose verbs something else executes: the seam between a shard and a backing that is not the engine.
//!
//! A [`Hosted`] NIC has a place and a number on a shard like any other and is driven by the same calls, but its objects,
//! keys and QPNs come from somewhere else, such as an RNIC of this host. The shard knows no more of it than this trait; a slot of
//! [`Shard`] holds a NIC of the engine or a hosted one, never both.

use std::fmt;

use super::command::{Command, Reply, Status};
use super::port::Port;
use super::{Nanos, NicSettings, NicSnapshot, Remains, Shard};
use crate::memory::AddressSpace;
use crate::protocol::Visible;
use crate::transport::NicId;

/// A NIC that lives on a shard and brings its own verbs. Each call means what the shard's method of that name does.
#[allow(missing_docs, reason = "see the methods of `Shard`")]
pub trait Hosted: Send + fmt::Debug {
    fn set_port(&mut self, port: Box<dyn Port>);
    fn update(&mut self, settings: NicSettings);
    fn reset(&mut self);
    fn pause(&mut self) -> bool;
    fn resume(&mut self);
    fn memory_changed(&mut self, space: AddressSpace);
    fn memory_vanished(&mut self);
    fn fail(&mut self);
    fn events_wanted(&mut self);
    fn peers_changed(&mut self);
    fn status(&self) -> NicSnapshot;

    /// What takes its time to end.
    fn take_remains(&mut self) -> Option<Remains>;

    /// Executes one command of context `ctx`.
    ///
    /// # Errors
    /// The status to answer.
    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Reply, Status>;

    /// Looks at the doorbells; true if anything was posted.
    fn scan(&mut self) -> bool;

    /// Moves work requests and completions by one bounded round; true if there was anything to do.
    fn run(&mut self, now: Nanos) -> bool;

    /// Whether completions were written since [`publish`](Self::publish).
    fn is_dirty(&self) -> bool;

    /// Looks at the arm words of CQs with new completions (`visible` is there if any NIC has such), and delivers events.
    fn publish(&mut self, visible: Option<Visible>, now: Nanos);

    /// When [`run`](Self::run) must be called again though nothing happens.
    fn deadline(&self) -> Option<Nanos>;

    /// Whether posts need a kick.
    fn set_need_kick(&self, need: bool);

    /// Arranges to be woken by what comes from outside; true: something has come already.
    fn prepare_sleep(&mut self) -> bool;
}

impl Shard {
    /// Adds a NIC that brings its own verbs; it waits for INIT.
    pub fn add_hosted(&mut self, nic: Box<dyn Hosted>) -> NicId {
        let (id, index) = self.free_slot();
        if self.hosted.len() <= index {
            self.hosted.resize_with(index + 1, || None);
        }
        self.hosted[index] = Some(nic);
        id
    }

    /// Ends connections of a hosted NIC to peers that it may not reach any more.
    pub fn peers_changed(&mut self, id: NicId) {
        if let Some(nic) = self.hosted_mut(id) {
            nic.peers_changed();
        }
    }

    pub(super) fn hosted_mut(&mut self, id: NicId) -> Option<&mut (dyn Hosted + 'static)> {
        self.hosted.get_mut(id.0 as usize)?.as_deref_mut()
    }

    /// Whether a slot is a hosted NIC's.
    pub(super) fn is_hosted(&self, index: usize) -> bool {
        self.hosted.get(index).is_some_and(Option::is_some)
    }

    /// One round of the hosted NICs.
    pub(super) fn run_hosted(&mut self, now: Nanos) -> bool {
        let mut busy = false;
        for (nic, number) in self.hosted.iter_mut().zip(0u32..) {
            if let Some(nic) = nic {
                self.serving = Some(NicId(number));
                busy |= nic.run(now);
            }
        }
        busy
    }
}
