//! Commands, and what was posted before them.
//!
//! Commands and posts come by different ways, and a worker that slept, or that the host let wait,
//! may find a command before the post that its driver made first. Programs destroy a handle, a key
//! or a queue pair as soon as their last send is posted, without waiting for it (librdmacm's mckey
//! does), and an adapter has sent it by then. So a command that ends something is preceded by a
//! look at the doorbells of its context, and a turn for what was posted.
//!
//! A command is a turn of its NIC like those of a round, as far as slow memory goes
//! ([`super::strain`]): whoever has the worker wait for it rests afterwards, and executes no work
//! requests until that is over, or a guest would have its slow memory touched by commands instead.

use super::on_shard::AnyNic;
use super::{Nanos, Shard};
use crate::link::NicId;
use crate::nic::{Command, Status, Step};

/// Time for what was posted before a command.
const CATCH_UP: Nanos = 20_000;

impl Shard {
    /// Executes one command of context `ctx`, or a step of it. It has taken effect, or had none,
    /// when it comes to an answer.
    ///
    /// # Errors
    /// The status to answer.
    pub fn execute(
        &mut self,
        id: NicId,
        ctx: u32,
        command: Command,
        now: Nanos,
    ) -> Result<Step, Status> {
        let index = id.0 as usize;
        let rests = self.strains.rests(index, now);
        let probe = self.strains.turn(index, now, &self.meter);
        if command.ends_something() && !rests {
            self.catch_up(id, ctx, &command, now);
        }
        let step = match self.slots.any_mut(id) {
            Some(AnyNic::Provided(nic)) => nic.execute(ctx, command, now),
            Some(AnyNic::Own(nic)) => {
                nic.backing.rests = rests;
                self.soft().execute(id, ctx, command, now)
            }
            None => self.soft().execute(id, ctx, command, now),
        };
        if let Some(probe) = probe {
            self.strains.judge(index, &probe, &self.meter);
        }
        step
    }

    /// Gives what was posted before a command a turn.
    fn catch_up(&mut self, id: NicId, ctx: u32, command: &Command, now: Nanos) {
        let mut budget = self.meter.budget_at(now, CATCH_UP);
        let Self { slots, posts, .. } = self;
        let Some(nic) = slots.any_mut(id) else { return };
        if !nic.on_shard().look_at_context(ctx, posts, &mut budget) {
            return;
        }
        match nic {
            AnyNic::Provided(nic) => _ = nic.run(now),
            AnyNic::Own(_) => {
                self.soft().catch_up(id, command.queue_pair(), now, &mut budget);
            }
        }
    }
}
