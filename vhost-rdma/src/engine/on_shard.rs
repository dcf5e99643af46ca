//! NICs whose verbs something else executes: the seam between a shard and a backing that is not the engine.
//!
//! An [`OnShard`] NIC has a place and a number on a shard like any other and is driven by the same calls, but its objects,
//! keys and QPNs come from somewhere else, such as an RNIC of this host. The shard knows no more of it than this trait; a slot of
//! [`Shard`] holds a NIC of the engine or a provider's, never both.

use std::fmt;

use super::{DeferredDrop, Nanos, NicSettings, NicSnapshot, Shard};
use crate::memory::AddressSpace;
use crate::nic::Port;
use crate::nic::budget::{Budget, Meter};
use crate::nic::doorbell::Post;
use crate::nic::{Command, Reply, Status};
use crate::ordering::Visible;
use crate::transport::NicId;

/// A NIC that lives on a shard and brings its own verbs. Each call means what the shard's method of that name does.
#[allow(missing_docs, reason = "see the methods of `Shard`")]
pub(crate) trait OnShard: Send + fmt::Debug {
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
    fn take_deferred_drops(&mut self) -> Option<DeferredDrop>;

    /// Executes one command of context `ctx`.
    ///
    /// # Errors
    /// The status to answer.
    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Reply, Status>;

    /// Looks at doorbells; true if anything was posted.
    fn scan(&mut self, posts: &mut Vec<Post>) -> bool;

    /// Begins the last look before sleep.
    fn begin_look(&mut self);

    /// Goes on with it: whether anything was posted, or `None` if there are doorbells left.
    fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool>;

    /// Moves work requests and completions by one bounded round; true if there was anything to do.
    fn run(&mut self, now: Nanos) -> bool;

    /// Whether there are completions or events that the guest has not been told of.
    fn has_news(&self) -> bool;

    /// Looks at the arm words of some CQs with new completions, and delivers some events.
    fn publish(&mut self, visible: Visible, now: Nanos, budget: &mut Budget);

    /// When [`run`](Self::run) must be called again though nothing happens.
    fn deadline(&self) -> Option<Nanos>;

    /// Whether posts need a kick.
    fn set_need_kick(&self, need: bool);

    /// Arranges to be woken by what comes from outside; true: something has come already.
    fn prepare_sleep(&mut self) -> bool;
}

impl Shard {
    /// Adds a NIC that brings its own verbs; it waits for INIT.
    pub(crate) fn add_provided(&mut self, mut nic: Box<dyn OnShard>) -> NicId {
        nic.set_meter(self.meter.clone());
        let (id, index) = self.free_slot();
        if self.provided.len() <= index {
            self.provided.resize_with(index + 1, || None);
        }
        self.provided[index] = Some(nic);
        self.strains.forget(index);
        id
    }

    /// Ends connections of a provider's NIC to peers that it may not reach any more.
    pub fn peers_changed(&mut self, id: NicId) {
        if let Some(nic) = self.provided_mut(id) {
            nic.peers_changed();
        }
    }

    pub(super) fn provided_mut(&mut self, id: NicId) -> Option<&mut (dyn OnShard + 'static)> {
        self.provided.get_mut(id.0 as usize)?.as_deref_mut()
    }

    /// Whether a slot is a provider's NIC's.
    pub(super) fn is_provided(&self, index: usize) -> bool {
        self.provided.get(index).is_some_and(Option::is_some)
    }
}
