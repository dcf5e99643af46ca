//! What a shard asks of a NIC, whoever executes its verbs.
//!
//! A NIC has a place and a number on a shard, and rounds drive it by the calls of [`OnShard`]. The
//! engine's own NICs are run by the shard itself, which knows their networks and peers. A
//! [`Provided`] NIC brings its verbs: its objects, keys and QPNs come from somewhere else, such as
//! an RNIC of this host, and the shard knows no more of it than that trait.

use std::fmt;

use super::nic::{Nic, NicState, Soft};
use super::{DeferredDrop, Nanos, NicSettings, NicSnapshot, Shard};
use crate::link::NicId;
use crate::memory::AddressSpace;
use crate::nic::Port;
use crate::nic::budget::{Budget, Meter, cost};
use crate::nic::doorbell::Post;
use crate::nic::provider::Provider as _;
use crate::nic::{Command, Reply, Status};
use crate::ordering::Visible;

/// A NIC on a shard. Each call means what the shard's method of that name does.
#[allow(missing_docs, reason = "see the methods of `Shard`")]
pub(crate) trait OnShard: Send + fmt::Debug {
    fn set_port(&mut self, port: Box<dyn Port>);
    fn pause(&mut self) -> bool;
    fn resume(&mut self);
    fn memory_changed(&mut self, space: AddressSpace);
    fn follow_memory(&mut self) -> bool;
    fn memory_vanished(&mut self);
    fn fail(&mut self);
    fn events_wanted(&mut self);
    fn status(&self) -> NicSnapshot;

    /// What takes its time to end.
    fn take_deferred_drops(&mut self) -> Option<DeferredDrop>;

    /// Looks at doorbells; true if anything was posted.
    fn scan(&mut self, posts: &mut Vec<Post>) -> bool;

    /// Begins the last look before nobody looks any more.
    fn begin_look(&mut self);

    /// Goes on with it: whether anything was posted, or `None` if there are doorbells left.
    fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool>;

    /// Whether there is something to do, as far as is known without a look at the guest's memory.
    /// It arranges to be woken by what comes from outside, if there is not.
    fn has_work(&mut self, now: Nanos) -> bool;

    /// Whether there are completions or events that the guest has not been told of.
    fn has_news(&self) -> bool;

    /// Looks at the arm words of some CQs with new completions, and delivers some events.
    fn publish(&mut self, visible: Visible, now: Nanos, budget: &mut Budget);

    /// When it must be served again though nothing happens.
    fn deadline(&self) -> Option<Nanos>;

    /// Whether posts need a kick.
    fn set_need_kick(&self, need: bool);
}

/// A NIC that brings its own verbs.
#[allow(missing_docs, reason = "see the methods of `Shard`")]
pub(crate) trait Provided: OnShard {
    fn update(&mut self, settings: NicSettings);
    fn reset(&mut self);
    fn peers_changed(&mut self);

    /// The shard's meter, to which all its work is charged.
    fn set_meter(&mut self, meter: Meter);

    /// Executes one command of context `ctx`.
    ///
    /// # Errors
    /// The status to answer.
    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Reply, Status>;

    /// Moves work requests and completions by one bounded round; true if there was anything to do.
    fn run(&mut self, now: Nanos) -> bool;
}

/// A NIC of a shard.
#[derive(Debug)]
pub(super) enum AnyNic {
    /// The engine's own.
    Own(Box<Nic>),
    /// One that brings its verbs.
    Provided(Box<dyn Provided>),
}

impl AnyNic {
    /// What both can.
    #[inline]
    pub(super) fn on_shard(&mut self) -> &mut dyn OnShard {
        match self {
            Self::Own(nic) => nic.as_mut(),
            Self::Provided(nic) => nic.as_mut(),
        }
    }

    /// One of the engine's own, to look at.
    pub(super) fn own(&self) -> Option<&Nic> {
        match self {
            Self::Own(nic) => Some(nic),
            Self::Provided(_) => None,
        }
    }

    /// The same, to look at.
    #[inline]
    pub(super) fn on_shard_ref(&self) -> &dyn OnShard {
        match self {
            Self::Own(nic) => nic.as_ref(),
            Self::Provided(nic) => nic.as_ref(),
        }
    }

    /// Looks at doorbells; true if anything was posted.
    #[inline]
    pub(super) fn scan(&mut self, posts: &mut Vec<Post>) -> bool {
        match self {
            Self::Own(nic) => nic.scan(posts),
            Self::Provided(nic) => nic.scan(posts),
        }
    }

    /// Whether there are completions or events that the guest has not been told of.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        match self {
            Self::Own(nic) => OnShard::has_news(nic.as_ref()),
            Self::Provided(nic) => nic.has_news(),
        }
    }
}

impl OnShard for Nic {
    fn set_port(&mut self, port: Box<dyn Port>) {
        self.outbox.set_port(port);
    }

    fn pause(&mut self) -> bool {
        if self.life == NicState::Ready {
            self.life = NicState::Paused;
        }
        false
    }

    fn resume(&mut self) {
        if self.life != NicState::Paused {
            return;
        }
        self.life = NicState::Ready;
        self.outbox.wanted();
        let all = self.qp_numbers.walk();
        self.chores.resume(all);
    }

    fn memory_changed(&mut self, space: AddressSpace) {
        Self::memory_changed(self, space);
    }

    fn follow_memory(&mut self) -> bool {
        Self::follow_memory(self)
    }

    fn memory_vanished(&mut self) {
        if matches!(self.life, NicState::Ready | NicState::Paused) {
            self.meter.charge_each(cost::VISIT, self.space.regions().len());
            if self.space.vanished() {
                Soft::fail(self);
            }
        }
    }

    fn fail(&mut self) {
        Soft::fail(self);
    }

    fn events_wanted(&mut self) {
        self.outbox.wanted();
    }

    fn status(&self) -> NicSnapshot {
        self.snapshot()
    }

    fn take_deferred_drops(&mut self) -> Option<DeferredDrop> {
        let dropped = std::mem::take(&mut self.deferred_drops);
        (!dropped.is_empty()).then(|| DeferredDrop::new(dropped))
    }

    fn scan(&mut self, posts: &mut Vec<Post>) -> bool {
        Self::scan(self, posts)
    }

    fn begin_look(&mut self) {
        self.contexts.begin_look();
    }

    fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool> {
        Self::look_on(self, posts, budget)
    }

    fn has_work(&mut self, now: Nanos) -> bool {
        let runs = self.life == NicState::Ready && !self.run.is_empty();
        OnShard::has_news(self)
            || !self.backing.wakes.is_empty()
            || runs
            || self.has_other_work(now)
    }

    fn has_news(&self) -> bool {
        Self::has_news(self) || self.backing.mirror.has_unsent()
    }

    fn publish(&mut self, visible: Visible, now: Nanos, budget: &mut Budget) {
        self.send_jobs();
        self.fire_completions(visible, now, budget);
        self.deliver_events();
    }

    fn deadline(&self) -> Option<Nanos> {
        self.next_deadline()
    }

    fn set_need_kick(&self, need: bool) {
        self.tell_need_kick(need);
    }
}

impl Shard {
    /// Adds a NIC that brings its own verbs; it waits for INIT.
    pub(crate) fn add_provided(&mut self, mut nic: Box<dyn Provided>) -> NicId {
        nic.set_meter(self.meter.clone());
        let id = self.slots.insert(|_| AnyNic::Provided(nic));
        self.strains.forget(id.0 as usize);
        id
    }

    /// Ends connections of a provider's NIC to peers that it may not reach any more.
    pub fn peers_changed(&mut self, id: NicId) {
        if let Some(AnyNic::Provided(nic)) = self.slots.any_mut(id) {
            nic.peers_changed();
        }
    }
}
