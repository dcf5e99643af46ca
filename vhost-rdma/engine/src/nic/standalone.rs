//! Providers whose NICs need nothing beside themselves.
//!
//! A command of a software NIC may change its whole network, so it is carried out among its peers
//! (`soft::control`). A NIC whose objects, keys and numbers come from somewhere else, such as an
//! RNIC of this host, is changed alone. Its backing says how by [`Standalone`]; the rest is written
//! here, once.

use super::budget::{Budget, Meter};
use super::dispatch::{self, Executor};
use super::nic::{Nic, Provider};
use super::on_shard::Provided;
use super::verb::Verb;
use super::work::{Begun, Work};
use super::{Command, Nanos, NicSettings, Status, Step};
use crate::memory::Ring;

/// What such a backing does of commands and rounds.
pub trait Standalone: Provider + Sized {
    /// The operator changed the NIC.
    fn update(nic: &mut Nic<Self>, settings: NicSettings);

    /// Destroys every object and forgets every guest address.
    fn reset(nic: &mut Nic<Self>);

    /// Other hosts came or went.
    fn peers_changed(nic: &mut Nic<Self>);

    /// Moves work requests and completions by one bounded round; true if there was anything to do.
    fn run(nic: &mut Nic<Self>, now: Nanos) -> bool;

    /// The rest of INIT: all is forgotten, and the new driver's memory is there.
    ///
    /// # Errors
    /// The status to answer.
    fn open(nic: &mut Nic<Self>, status_page: Ring) -> Result<Begun<Self>, Status>;

    /// Carries out, or begins, what only the backing can do.
    ///
    /// # Errors
    /// The status to answer.
    fn carry_out(nic: &mut Nic<Self>, ctx: u32, verb: Verb) -> Result<Begun<Self>, Status>;

    /// Goes on with what [`Self::carry_out`] began; what is left of it, or what comes next. It
    /// returns work only if the budget is over.
    ///
    /// # Errors
    /// The status to answer.
    fn work_on(
        nic: &mut Nic<Self>,
        work: Self::Work,
        budget: &mut Budget,
    ) -> Result<Option<Work<Self>>, Status>;

    /// Takes in what a blocking job found, if there is anything.
    fn take_found(nic: &mut Nic<Self>) -> Option<Result<Begun<Self>, Status>>;
}

impl<P: Standalone> Executor for Nic<P> {
    type Backing = P;

    fn nic(&mut self) -> Result<&mut Self, Status> {
        Ok(self)
    }

    fn reset(&mut self) {
        P::reset(self);
    }

    fn open(&mut self, status_page: Ring) -> Result<Begun<P>, Status> {
        P::open(self, status_page)
    }

    fn carry_out(&mut self, ctx: u32, verb: Verb) -> Result<Begun<P>, Status> {
        P::carry_out(self, ctx, verb)
    }

    fn work_on(&mut self, work: P::Work, budget: &mut Budget) -> Result<Option<Work<P>>, Status> {
        P::work_on(self, work, budget)
    }

    fn take_found(&mut self) -> Option<Result<Begun<P>, Status>> {
        P::take_found(self)
    }

    fn settle(&mut self) {}
}

impl<P: Standalone> Provided for Nic<P> {
    fn update(&mut self, settings: NicSettings) {
        P::update(self, settings);
    }

    fn reset(&mut self) {
        P::reset(self);
    }

    fn set_meter(&mut self, meter: Meter) {
        self.meter = meter;
    }

    fn peers_changed(&mut self) {
        P::peers_changed(self);
    }

    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Step, Status> {
        dispatch::execute(self, ctx, command, now)
    }

    fn run(&mut self, now: Nanos) -> bool {
        P::run(self, now)
    }
}
