//! Shards: NICs that are served together by one thread, without a thread, a device, a socket or a
//! clock in here.
//!
//! A [`Shard`] owns whole NICs and is the only one who touches their objects, so there is no lock
//! in here. It is driven from outside, like quinn-proto's connections: [`Shard::execute`] takes
//! control commands, [`Shard::poll`] looks at doorbells and moves work requests, timers and
//! completions forward by one bounded round, [`Shard::next_deadline`] says when to call again at
//! the latest. Time is an argument, randomness comes from a [`Random`], events leave through a
//! [`Port`], and guest memory is reached through `crate::memory`, already resolved.
//!
//! ```text
//!  Shard ── slots, rounds, commands, parking, strain: which NICs there are, whose turn it is
//!    ├──> soft: NICs that the daemon executes, among their peers
//!    └──> dyn Provided: NICs that bring their verbs (rnic)
//! ```
//!
//! It knows no verb. All loops are bounded by time (`nic::budget`): a round serves the NICs in the
//! order of `rounds`, and the rest waits for the next round.

#![forbid(unsafe_code)]

mod commands;
mod moves;
mod on_shard;
mod parking;
mod rounds;
mod saved;
mod slots;
mod strain;
#[cfg(any(test, feature = "testing"))]
#[allow(
    missing_docs,
    missing_debug_implementations,
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::new_without_default,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test's tools: small numbers, the verbs' own names, and a panic is how they say no"
)]
pub mod testing;
#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers of tests")]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

pub use crate::nic::{
    BlockingJob, Command, Counters, DeferredDrop, Job, JobKind, Limits, Nanos, NicSettings,
    NicSnapshot, Objects, Port, Reply, Status, Step, control_offset,
};
pub use crate::ordering::Visible;
pub use crate::soft::{Random, SavedNic};
pub use moves::{MovedNic, NicLoad};
pub use rounds::Look;
pub use saved::Wakes;

use self::on_shard::AnyNic;
use self::parking::Parking;
use self::rounds::{Rounds, Served};
use self::slots::Slots;
use self::strain::Strains;
use crate::cm::Mad;
use crate::link::{Bus, Gid, Link, NicId, Parcel};
use crate::memory::AddressSpace;
use crate::nic::budget::{Clock, Meter};
use crate::nic::doorbell::Post;
use crate::nic::on_shard::OnShard;
use crate::qpn::Pool;
use crate::soft::{Engine, Execution, SoftNic};

/// NICs that are served together, by one thread.
pub struct Shard {
    slots: Slots,
    parking: Parking,
    engine: Engine,
    posts: Vec<Post>,
    /// The NIC whose content is being looked at.
    serving: Option<NicId>,
    deferred_drops: Vec<DeferredDrop>,
    rounds: Rounds,
    strains: Strains,
    meter: Meter,
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("nics", &self.slots).finish_non_exhaustive()
    }
}

impl Shard {
    /// A shard without NICs.
    #[must_use]
    pub fn new(random: Box<dyn Random>) -> Self {
        Self {
            slots: Slots::default(),
            parking: Parking::default(),
            engine: Engine::new(random),
            posts: Vec::new(),
            serving: None,
            deferred_drops: Vec::new(),
            rounds: Rounds::default(),
            strains: Strains::default(),
            meter: Meter::default(),
        }
    }

    /// Has budgets look at a clock too; without one they are what is charged. Before there are
    /// NICs.
    #[must_use]
    pub fn with_clock(mut self, clock: Box<dyn Clock>) -> Self {
        self.meter = Meter::new(clock);
        self
    }

    /// What all work so far was charged, by the cost model of `nic::budget`.
    #[must_use]
    pub fn charged(&self) -> Nanos {
        self.meter.charged()
    }

    /// The NIC that the last call was busy with when it did not return: whom to blame for a panic.
    #[must_use]
    pub const fn suspect(&self) -> Option<NicId> {
        self.serving
    }

    #[cfg(any(test, feature = "testing"))]
    fn settings(&self, id: NicId) -> Option<NicSettings> {
        self.slots.get(id).and_then(AnyNic::own).map(|nic| nic.settings.clone())
    }

    /// Deadlines of all NICs.
    #[cfg(test)]
    fn waits(&self) -> usize {
        self.slots.own().map(|nic| nic.timers.len()).sum()
    }

    /// What answers of other shards say that no round has looked at.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn unheard(&self) -> Vec<crate::link::Outcome> {
        self.engine.unheard()
    }

    /// Pieces that a NIC has sent to another shard before their turn, which has not come.
    #[cfg(test)]
    fn flights(&self, id: NicId) -> usize {
        let nic = self.slots.get(id).and_then(AnyNic::own);
        nic.map_or(0, |nic| {
            let sends = nic.qps.values().filter_map(|qp| qp.send.as_ref());
            sends.map(|send| send.ahead.flights().len()).sum()
        })
    }

    #[inline]
    fn nic_mut(&mut self, id: NicId) -> Option<&mut SoftNic> {
        self.slots.own_mut(id)
    }

    /// The engine, with the NICs that it works on.
    #[inline]
    fn soft(&mut self) -> Execution<'_, Served<'_>> {
        let Self { slots, rounds, engine, meter, serving, .. } = self;
        Execution { nics: Served { slots, rounds, meter }, engine, meter, serving }
    }

    /// A NIC, for what every NIC can.
    fn on_shard(&mut self, id: NicId) -> Option<&mut dyn OnShard> {
        self.slots.any_mut(id).map(AnyNic::on_shard)
    }

    /// Adds a NIC, which waits for INIT.
    pub fn add_nic(&mut self, settings: NicSettings, port: Box<dyn Port>) -> NicId {
        let id = self.new_number();
        let nic = SoftNic::new(id, settings, port, self.meter.clone());
        self.slots.put(id, AnyNic::Own(Box::new(nic)));
        id
    }

    /// A number for a NIC that begins here.
    fn new_number(&mut self) -> NicId {
        let id = self.engine.new_number().unwrap_or_else(|| self.slots.free_number());
        self.strains.forget(id.0 as usize);
        self.rounds.forget_spent(id);
        id
    }

    /// Gives a NIC another way out for its events.
    pub fn set_port(&mut self, id: NicId, port: Box<dyn Port>) {
        if let Some(nic) = self.on_shard(id) {
            nic.set_port(port);
        }
    }

    /// Tells the driver of a NIC that its objects are gone, which were in another process.
    pub fn lost(&mut self, id: NicId) {
        if let Some(nic) = self.on_shard(id) {
            nic.objects_lost();
        }
    }

    /// Removes a NIC and everything it has.
    pub fn remove_nic(&mut self, id: NicId) {
        self.reset(id);
        match self.slots.remove(id) {
            Some(AnyNic::Provided(nic)) => self.deferred_drops.push(DeferredDrop::new(nic)),
            // It was emptied by the reset.
            Some(AnyNic::Own(_)) => {}
            None => return,
        }
        self.engine.free_number(id);
    }

    /// Takes over changed limits and addresses. Existing objects stay; a GID that is no longer
    /// given is withdrawn.
    pub fn update_nic(&mut self, id: NicId, settings: NicSettings) {
        if let Some(AnyNic::Provided(nic)) = self.slots.any_mut(id) {
            return nic.update(settings);
        }
        self.soft().update(id, settings);
    }

    /// Sets an entry of a NIC's table of addresses, where the host does so and not its guests. It
    /// is no command: whichever of these is under way goes on.
    ///
    /// # Errors
    /// As GID_SET; NOTSUPP if the backing has such a table of its own.
    pub fn set_gid(&mut self, id: NicId, index: u16, gid: Option<Gid>) -> Result<(), Status> {
        if let Some(AnyNic::Provided(_)) = self.slots.any_mut(id) {
            return Err(Status::NOTSUPP);
        }
        self.soft().host_sets_gid(id, index, gid)
    }

    /// Destroys every object of a NIC and forgets every guest address; the next command must be
    /// INIT. Counters go on.
    pub fn reset(&mut self, id: NicId) {
        if let Some(AnyNic::Provided(nic)) = self.slots.any_mut(id) {
            return nic.reset();
        }
        self.soft().reset(id);
    }

    /// What is left of NICs that were reset since the last call, and of objects of the NIC `id`.
    /// There may be a hundred thousand in it, and host objects whose end blocks, so it should be
    /// dropped where nobody waits: not on the thread that runs the shard.
    pub fn take_deferred_drops(&mut self, id: NicId) -> Vec<DeferredDrop> {
        let mut dropped = self.engine.take_deferred_drops();
        dropped.append(&mut self.deferred_drops);
        dropped.extend(self.slots.quietly(id).and_then(|nic| nic.on_shard().take_deferred_drops()));
        dropped
    }

    /// Stops all access to a NIC's memory; its objects stay. True: it has not stopped yet, and this
    /// has to be called again.
    pub fn pause(&mut self, id: NicId) -> bool {
        self.on_shard(id).is_some_and(OnShard::pause)
    }

    /// Goes on after [`Self::pause`]. Waits begin anew.
    pub fn resume(&mut self, id: NicId) {
        if let Some(nic) = self.on_shard(id) {
            nic.resume();
        }
    }

    /// Follows a change of a guest's memory map: what lies in memory that is gone fails, each
    /// object in its own way.
    ///
    /// There may be a hundred thousand objects, so this only begins; [`Self::follow_memory`] is
    /// called until nothing is left to do.
    pub fn memory_changed(&mut self, id: NicId, space: AddressSpace) {
        if let Some(nic) = self.on_shard(id) {
            nic.memory_changed(space);
        }
    }

    /// Looks at some more objects after a change of memory; true if there are others.
    pub fn follow_memory(&mut self, id: NicId) -> bool {
        self.on_shard(id).is_some_and(OnShard::follow_memory)
    }

    /// Fails a NIC: DEVICE_FATAL to its guest, nothing to anybody else.
    pub fn fail(&mut self, id: NicId) {
        if let Some(nic) = self.on_shard(id) {
            nic.fail();
        }
    }

    /// Guest memory vanished: has the NICs looked at, those whose it was fail.
    pub fn memory_vanished(&mut self) {
        self.rounds.look_for_vanished();
    }

    /// There are new buffers on one of the NIC's event queues.
    pub fn events_wanted(&mut self, id: NicId) {
        if let Some(nic) = self.on_shard(id) {
            nic.events_wanted();
        }
    }

    /// What is seen of a NIC.
    #[must_use]
    pub fn status(&self, id: NicId) -> Option<NicSnapshot> {
        let mut snapshot = self.slots.get(id)?.on_shard_ref().status();
        snapshot.counters.page_faults = self.strains.faults(id.0 as usize);
        Some(snapshot)
    }

    /// The number of a NIC on the host: what is said of it where others read it.
    #[must_use]
    pub fn number(&self, id: NicId) -> Option<u32> {
        self.slots.get(id).map(|nic| nic.on_shard_ref().number())
    }

    /// Lets requests cross to other shards. Before there are NICs.
    #[must_use]
    pub fn with_bus(mut self, bus: Bus) -> Self {
        self.engine.set_bus(bus);
        self
    }

    /// Gives it the QPNs of its process. Before there are NICs.
    #[must_use]
    pub fn with_qpns(mut self, pool: Arc<Pool>) -> Self {
        self.engine.set_qpns(pool);
        self
    }

    /// Lets requests go to peers that are no NICs of this process, and come from them. Beside a
    /// bus.
    pub fn set_wire(&mut self, wire: Box<dyn Link>) {
        self.engine.set_wire(wire);
    }

    /// Something came from another shard.
    pub fn arrive(&mut self, parcel: Parcel) {
        self.engine.arrive(parcel);
    }

    /// What leaves for each shard.
    pub fn outgoing(&mut self) -> &mut [VecDeque<Parcel>] {
        self.engine.outgoing()
    }

    /// Has nothing new leave, so that NICs can be saved; true: nothing is under way any more.
    pub fn close_bus(&mut self) -> bool {
        self.engine.close_bus()
    }

    /// Sends a datagram from QP 1 of a NIC that has none; false if it left not: the NIC is not
    /// ready, or does not hold the address.
    pub fn send_management(&mut self, id: NicId, mad: &Mad) -> bool {
        self.soft().send_management(id, mad)
    }

    /// Whether a NIC of this NIC's network holds an address now.
    pub fn reaches(&mut self, id: NicId, gid: &Gid) -> bool {
        self.soft().reaches(id, gid)
    }

    /// A context's owner takes jobs from now on: it may register mirrored regions.
    pub fn serve_mirrors(&mut self, id: NicId, ctx: u32) {
        self.soft().serve_mirrors(id, ctx);
    }

    /// The owner has done its jobs: their numbers, and what stood where an atomic changed a word;
    /// `None`: the memory is not there.
    pub fn owner_answered(&mut self, id: NicId, ctx: u32, done: &[(u64, Option<u64>)]) {
        self.soft().owner_answered(id, ctx, done);
    }
}
