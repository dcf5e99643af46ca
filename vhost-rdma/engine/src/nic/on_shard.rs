//! What a shard asks of a NIC, whoever executes its verbs.
//!
//! A NIC has a place and a number on a shard, and rounds drive it by the calls of [`OnShard`]. The
//! NICs of `soft` run among their peers, which they reach through the shard. A [`Provided`] NIC
//! brings its verbs: its objects, keys and QPNs come from somewhere else, such as an RNIC of this
//! host, and the shard knows no more of it than that trait.

use std::fmt;

use virtio_rdma_abi::event;

use super::budget::{Budget, Meter, cost};
use super::doorbell::Post;
use super::nic::{KERNEL, Nic, NicState, Provider};
use super::{
    Command, DeferredDrop, HeldBack, MEMORY_LOST, Nanos, NicSettings, NicSnapshot, Port, Status,
    Step,
};
use crate::memory::{AddressSpace, Missing};
use crate::ordering::Visible;

/// A NIC on a shard. Each call means what the shard's method of that name does.
#[allow(missing_docs, reason = "see the methods of `Shard`")]
pub trait OnShard: Send + fmt::Debug {
    fn set_port(&mut self, port: Box<dyn Port>);
    fn pause(&mut self) -> bool;
    fn resume(&mut self);
    fn memory_changed(&mut self, space: AddressSpace);
    fn follow_memory(&mut self) -> bool;
    fn memory_vanished(&mut self);
    fn fail(&mut self);
    /// Its objects are gone, which were in another process: its driver is told.
    fn objects_lost(&mut self);
    fn events_wanted(&mut self);
    fn status(&self) -> NicSnapshot;
    /// Its number on the host.
    fn number(&self) -> u32;

    /// What takes its time to end.
    fn take_deferred_drops(&mut self) -> Option<DeferredDrop>;

    /// Looks at doorbells, where others' work waits (`brief`) at few; true if anything was posted.
    fn scan(&mut self, posts: &mut Vec<Post>, brief: bool) -> bool;

    /// Looks at all doorbells of a context, if there is time; true if queue pairs have work by now.
    fn look_at_context(&mut self, ctx: u32, posts: &mut Vec<Post>, budget: &mut Budget) -> bool;

    /// Where a command waits for what was posted before it.
    fn held_back(&mut self) -> &mut Option<HeldBack>;

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
pub trait Provided: OnShard {
    fn update(&mut self, settings: NicSettings);
    fn reset(&mut self);
    fn peers_changed(&mut self);

    /// The shard's meter, to which all its work is charged.
    fn set_meter(&mut self, meter: Meter);

    /// Executes one command of context `ctx`, or a step of it.
    ///
    /// # Errors
    /// The status to answer.
    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Step, Status>;

    /// Moves work requests and completions by one bounded round; true if there was anything to do.
    fn run(&mut self, now: Nanos) -> bool;
}

impl<P: Provider> OnShard for Nic<P> {
    fn set_port(&mut self, port: Box<dyn Port>) {
        self.outbox.set_port(port);
    }

    fn pause(&mut self) -> bool {
        let begins = self.life == NicState::Ready;
        if begins {
            self.life = NicState::Paused;
        }
        P::stand_still(self, begins)
    }

    fn resume(&mut self) {
        if self.life == NicState::Paused {
            self.life = NicState::Ready;
            self.outbox.wanted();
            P::go_on(self);
        }
    }

    fn memory_changed(&mut self, space: AddressSpace) {
        if self.life == NicState::Idle && self.backing.is_beginning() {
            self.space = space;
        } else {
            Self::memory_changed(self, space);
        }
    }

    fn follow_memory(&mut self) -> bool {
        Self::follow_memory(self)
    }

    fn memory_vanished(&mut self) {
        if matches!(self.life, NicState::Ready | NicState::Paused) {
            self.meter.charge_each(cost::VISIT, self.space.regions().len());
            match self.space.missing() {
                Missing::Nothing => {}
                Missing::Loose => self.raise(MEMORY_LOST, 0, KERNEL),
                Missing::Vital => P::fail(self),
            }
        }
    }

    fn fail(&mut self) {
        P::fail(self);
    }

    fn objects_lost(&mut self) {
        self.raise(event::DEVICE_FATAL, 0, KERNEL);
    }

    fn events_wanted(&mut self) {
        self.outbox.wanted();
    }

    fn status(&self) -> NicSnapshot {
        self.snapshot()
    }

    fn number(&self) -> u32 {
        self.settings.number
    }

    fn take_deferred_drops(&mut self) -> Option<DeferredDrop> {
        let dropped = std::mem::take(&mut self.deferred_drops);
        (!dropped.is_empty()).then(|| DeferredDrop::new(dropped))
    }

    #[inline]
    fn scan(&mut self, posts: &mut Vec<Post>, brief: bool) -> bool {
        Self::scan(self, posts, brief)
    }

    fn look_at_context(&mut self, ctx: u32, posts: &mut Vec<Post>, budget: &mut Budget) -> bool {
        Self::look_at_context(self, ctx, posts, budget)
    }

    fn held_back(&mut self) -> &mut Option<HeldBack> {
        &mut self.held_back
    }

    fn begin_look(&mut self) {
        self.contexts.begin_look();
    }

    fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool> {
        Self::look_on(self, posts, budget)
    }

    fn has_work(&mut self, now: Nanos) -> bool {
        OnShard::has_news(self) || P::has_work(self, now)
    }

    #[inline]
    fn has_news(&self) -> bool {
        Self::has_news(self) || self.backing.has_news()
    }

    #[inline]
    fn publish(&mut self, visible: Visible, now: Nanos, budget: &mut Budget) {
        P::tell(self);
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
