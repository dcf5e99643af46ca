//! A software NIC as its shard sees it.

use super::nic::{Nic, NicState, Soft};
use super::{DeferredDrop, Nanos};
use crate::memory::AddressSpace;
use crate::nic::budget::{Budget, cost};
use crate::nic::doorbell::Post;
use crate::nic::on_shard::OnShard;
use crate::nic::provider::Provider as _;
use crate::nic::{NicSnapshot, Port};
use crate::ordering::Visible;

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
