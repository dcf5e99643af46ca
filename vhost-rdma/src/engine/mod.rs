//! The verbs engine: what an RDMA NIC does, without a device, a socket, a thread or a clock.
//!
//! A [`Shard`] owns whole NICs and is the only one who touches their objects, so there is no lock
//! in here. It is driven from outside, like quinn-proto's connections: [`Shard::execute`] takes
//! control commands, [`Shard::poll`] looks at doorbells and moves work requests, timers and
//! completions forward by one bounded round, [`Shard::next_deadline`] says when to call again at
//! the latest. Time is an argument, randomness comes from a [`Random`], events leave through a
//! [`Port`], and guest memory is reached through `crate::memory`, already resolved.
//!
//! ```text
//!  command ──> control ──> nic {context, pd, mr, cq, srq, qp, ah}
//!  doorbells ─> scan ──> requester ──> Link ──────> responder (a peer's nic) ──> memory copy
//!                           └──> cq ──> arm? ──> Port
//! ```
//!
//! What a guest does wrong is a [`Status`], a completion status or an event; it is never an `Err`
//! that ends anything here. All loops are bounded by time (`nic::budget`), not by numbers that a
//! guest writes: a round serves the NICs in the order of `rounds`, what is many goes in `steps`,
//! and the rest waits for the next round.

#![forbid(unsafe_code)]

pub(crate) mod attributes;
mod control;
mod create;
mod crossing;
mod fastreg;
mod local;
mod management;
mod mcast;
mod mirror;
mod modify;
mod mr;
mod network;
mod nic;
mod numbers;
mod on_shard;
mod pace;
mod parking;
mod placement;
pub(crate) mod qp;
mod quota;
mod remote;
mod requester;
mod responder;
mod rounds;
mod saved;
mod slots;
mod srq;
mod steps;
mod strain;
#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers of tests")]
pub(crate) mod tests;
pub(crate) mod window;

use std::collections::VecDeque;
use std::fmt;

use rustc_hash::FxHashMap;

pub use crate::nic::{
    BlockingJob, Command, Counters, DeferredDrop, Job, JobKind, Limits, Nanos, NicSettings,
    NicSnapshot, Objects, Port, Reply, Status, control_offset,
};
pub use crate::ordering::Visible;
pub use numbers::Random;
pub(crate) use on_shard::{OnShard, Provided};
pub use rounds::Look;
pub use saved::SavedNic;

use self::crossing::Waiting;
use self::network::Networks;
use self::nic::Nic;
use self::numbers::Numbers;
use self::on_shard::AnyNic;
use self::parking::Parking;
use self::rounds::Rounds;
use self::slots::Slots;
use self::strain::Strains;
use crate::link::{Local, NicId};
use crate::memory::{AddressSpace, Segment};
use crate::nic::budget::{Clock, Meter};
use crate::nic::doorbell::Post;
use crate::nic::roster::{Roster, Walk};

/// NICs that are served together, by one thread.
pub struct Shard {
    slots: Slots,
    parking: Parking,
    networks: Networks,
    qpns: Numbers,
    random: Box<dyn Random>,
    local: Local,
    /// Requests of other shards that wait for an owner.
    waiting: Waiting,
    /// The requester's segment list, kept for its allocation.
    segments: Vec<Segment>,
    posts: Vec<Post>,
    /// NICs and QPs.
    wakes: VecDeque<(NicId, u32)>,
    /// The NIC whose content is being looked at.
    serving: Option<NicId>,
    deferred_drops: Vec<DeferredDrop>,
    /// QPNs of NICs that were reset, on their way back.
    freed: VecDeque<(Roster, Walk)>,
    rounds: Rounds,
    strains: Strains,
    meter: Meter,
    /// Numbers that NICs had in an earlier process, until they run.
    former: FxHashMap<NicId, NicId>,
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
            networks: Networks::default(),
            qpns: Numbers::default(),
            random,
            local: Local,
            waiting: Waiting::default(),
            segments: Vec::new(),
            posts: Vec::new(),
            wakes: VecDeque::new(),
            serving: None,
            deferred_drops: Vec::new(),
            freed: VecDeque::new(),
            rounds: Rounds::default(),
            strains: Strains::default(),
            meter: Meter::default(),
            former: FxHashMap::default(),
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

    #[cfg(test)]
    fn settings(&self, id: NicId) -> NicSettings {
        self.slots.get(id).and_then(AnyNic::own).map(|nic| nic.settings.clone()).unwrap()
    }

    /// Deadlines of all NICs.
    #[cfg(test)]
    fn waits(&self) -> usize {
        self.slots.own().map(|nic| nic.timers.len()).sum()
    }

    #[inline]
    fn nic_mut(&mut self, id: NicId) -> Option<&mut Nic> {
        self.slots.own_mut(id)
    }

    /// A NIC with what commands of it may change around it.
    fn parts(&mut self, id: NicId) -> Option<(&mut Nic, &mut Networks, &mut dyn Random)> {
        let Self { slots, networks, random, .. } = self;
        Some((slots.own_mut(id)?, networks, random.as_mut()))
    }

    /// A NIC, for what every NIC can.
    fn on_shard(&mut self, id: NicId) -> Option<&mut dyn OnShard> {
        self.slots.any_mut(id).map(AnyNic::on_shard)
    }

    /// Adds a NIC, which waits for INIT.
    pub fn add_nic(&mut self, settings: NicSettings, port: Box<dyn Port>) -> NicId {
        let meter = self.meter.clone();
        let make = |id| AnyNic::Own(Box::new(Nic::new(id, settings, port, meter)));
        let id = self.slots.insert(make);
        self.strains.forget(id.0 as usize);
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
        if let Some(nic) = self.nic_mut(id) {
            nic.raise(virtio_rdma_abi::event::DEVICE_FATAL, 0, nic::KERNEL);
        }
    }

    /// Removes a NIC and everything it has.
    pub fn remove_nic(&mut self, id: NicId) {
        self.reset(id);
        match self.slots.remove(id) {
            Some(AnyNic::Provided(nic)) => self.deferred_drops.push(DeferredDrop::new(nic)),
            // It was emptied by the reset.
            Some(AnyNic::Own(_)) | None => {}
        }
    }

    /// Takes over changed limits and addresses. Existing objects stay; a GID that is no longer
    /// given is withdrawn.
    pub fn update_nic(&mut self, id: NicId, settings: NicSettings) {
        if let Some(AnyNic::Provided(nic)) = self.slots.any_mut(id) {
            return nic.update(settings);
        }
        let Some((nic, networks, _)) = self.parts(id) else { return };
        let vni = nic.settings.vni;
        nic.settings = NicSettings { vni, ..settings };
        for index in 0..nic.gids.len() {
            if let Some(gid) = nic.gids[index].filter(|gid| !nic.may_use(gid)) {
                nic.gids[index] = None;
                networks.release(vni, gid, id);
                nic.raise(virtio_rdma_abi::event::GID_CHANGE, 1, nic::KERNEL);
            }
        }
    }

    /// Destroys every object of a NIC and forgets every guest address; the next command must be
    /// INIT. Counters go on.
    pub fn reset(&mut self, id: NicId) {
        if let Some(AnyNic::Provided(nic)) = self.slots.any_mut(id) {
            return nic.reset();
        }
        let Some((nic, networks, _)) = self.parts(id) else { return };
        let vni = nic.settings.vni;
        for gid in nic.gids.iter().flatten() {
            networks.release(vni, *gid, id);
        }
        for mgid in nic.backing.groups.keys().chain(&nic.backing.left) {
            networks.leave(vni, *mgid, id);
        }
        let mut old = nic.clear();
        let numbers = std::mem::take(&mut old.qp_numbers);
        let walk = numbers.walk();
        self.freed.push_back((numbers, walk));
        self.deferred_drops.push(DeferredDrop::new(old));
    }

    /// What is left of NICs that were reset since the last call, and of objects of the NIC `id`.
    /// There may be a hundred thousand in it, and host objects whose end blocks, so it should be
    /// dropped where nobody waits: not on the thread that runs the shard.
    pub fn take_deferred_drops(&mut self, id: NicId) -> Vec<DeferredDrop> {
        let mut dropped = std::mem::take(&mut self.deferred_drops);
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
}
