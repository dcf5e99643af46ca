//! NICs whose verbs something else executes: the seam between a shard and a backing that is not the engine.
//!
//! A [`Hosted`] NIC has a place and a number on a shard like any other and is driven by the same calls, but its objects,
//! keys and QPNs come from somewhere else, such as an RNIC of this host. The shard knows no more of it than this trait; a slot of
//! [`Shard`] holds a NIC of the engine or a hosted one, never both.

use std::fmt;

use super::budget::Meter;
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
    fn follow_memory(&mut self) -> bool;
    fn memory_vanished(&mut self);
    fn fail(&mut self);
    fn events_wanted(&mut self);
    fn peers_changed(&mut self);
    fn status(&self) -> NicSnapshot;

    /// The shard's meter, to which all its work is charged.
    fn set_meter(&mut self, meter: Meter);

    /// What takes its time to end.
    fn take_remains(&mut self) -> Option<Remains>;

    /// Executes one command of context `ctx`.
    ///
    /// # Errors
    /// The status to answer.
    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Reply, Status>;

    /// Looks at doorbells; true if anything was posted.
    fn scan(&mut self) -> bool;

    /// Begins the last look before sleep.
    fn begin_look(&mut self);

    /// Goes on with it: whether anything was posted, or `None` if there are doorbells left.
    fn look_on(&mut self) -> Option<bool>;

    /// Moves work requests and completions by one bounded round; true if there was anything to do.
    fn run(&mut self, now: Nanos) -> bool;

    /// Whether there are completions or events that the guest has not been told of.
    fn has_news(&self) -> bool;

    /// Looks at the arm words of some CQs with new completions, and delivers some events.
    fn publish(&mut self, visible: Visible, now: Nanos);

    /// When [`run`](Self::run) must be called again though nothing happens.
    fn deadline(&self) -> Option<Nanos>;

    /// Whether posts need a kick.
    fn set_need_kick(&self, need: bool);

    /// Arranges to be woken by what comes from outside; true: something has come already.
    fn prepare_sleep(&mut self) -> bool;
}

impl Shard {
    /// Adds a NIC that brings its own verbs; it waits for INIT.
    pub fn add_hosted(&mut self, mut nic: Box<dyn Hosted>) -> NicId {
        nic.set_meter(self.meter.clone());
        let (id, index) = self.free_slot();
        if self.hosted.len() <= index {
            self.hosted.resize_with(index + 1, || None);
        }
        self.hosted[index] = Some(nic);
        self.strains.forget(index);
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
}
