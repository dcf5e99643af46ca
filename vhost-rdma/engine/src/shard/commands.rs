//! Commands, and what was posted before them.
//!
//! Commands and posts come by different ways, and a worker that slept, or that the host let wait,
//! may find a command before the post that its driver made first. Programs destroy a handle, a key
//! or a queue pair as soon as their last send is posted, without waiting for it (librdmacm's mckey
//! does), and an adapter has sent it by then. So a command that ends something is preceded by a
//! look at the doorbells of its context, and a turn for what was posted. Where that takes longer
//! than [`CATCH_UP`], the command is held back for a round, in which its NIC has its usual turn as
//! well, and then there is another such turn. A guest that posts for ever has its command all the
//! same, after [`MOST`] of them.
//!
//! A command is a turn of its NIC like those of a round, as far as slow memory goes
//! ([`super::strain`]): whoever has the worker wait for it rests afterwards, and executes no work
//! requests until that is over, or a guest would have its slow memory touched by commands instead.

use super::on_shard::AnyNic;
use super::{Nanos, Shard};
use crate::link::NicId;
use crate::nic::{Command, HeldBack, Status, Step};

/// Time for what was posted before a command, in one turn.
const CATCH_UP: Nanos = 20_000;
/// How often a command is held back, at the most.
const MOST: u32 = 8;

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
        let step = match self.begin(id, ctx, command, (rests, now)) {
            Some(command) => self.carry_out(id, ctx, command, (rests, now)),
            None => Ok(Step::More),
        };
        if let Some(probe) = probe {
            self.strains.judge(index, &probe, &self.meter);
        }
        step
    }

    /// The command to be carried out now; none if it is held back.
    fn begin(
        &mut self,
        id: NicId,
        ctx: u32,
        command: Command,
        (rests, now): (bool, Nanos),
    ) -> Option<Command> {
        // Another command in its place means that nobody waits for it any more.
        let held_back = self.slots.any_mut(id).and_then(|nic| nic.on_shard().held_back().take());
        let HeldBack { command, times } = match (command, held_back) {
            (Command::Continue, Some(held_back)) => held_back,
            (command, _) => HeldBack { command, times: 0 },
        };
        if rests || !command.ends_something() || self.has_caught_up(id, ctx, &command, now) {
            return Some(command);
        }
        let nic = self.slots.any_mut(id).filter(|_| times < MOST);
        let Some(nic) = nic else { return Some(command) };
        *nic.on_shard().held_back() = Some(HeldBack { command, times: times + 1 });
        None
    }

    fn carry_out(
        &mut self,
        id: NicId,
        ctx: u32,
        command: Command,
        (rests, now): (bool, Nanos),
    ) -> Result<Step, Status> {
        match self.slots.any_mut(id) {
            Some(AnyNic::Provided(nic)) => nic.execute(ctx, command, now),
            Some(AnyNic::Own(nic)) => {
                nic.backing.rests = rests;
                self.soft().execute(id, ctx, command, now)
            }
            None => self.soft().execute(id, ctx, command, now),
        }
    }

    /// Gives what was posted before a command a turn; false if the time was too short for it.
    fn has_caught_up(&mut self, id: NicId, ctx: u32, command: &Command, now: Nanos) -> bool {
        let mut budget = self.meter.budget_at(now, CATCH_UP);
        let Self { slots, posts, .. } = self;
        let Some(nic) = slots.any_mut(id) else { return true };
        if nic.on_shard().look_at_context(ctx, posts, &mut budget) {
            match nic {
                // It has all been given to the adapter, which sends it.
                AnyNic::Provided(nic) => _ = nic.run(now),
                AnyNic::Own(_) => {
                    self.soft().catch_up(id, command.queue_pair(), now, &mut budget);
                }
            }
        }
        !budget.is_over(&self.meter)
    }
}
