//! The verbs engine: what an RDMA NIC does, without a device, a socket, a thread or a clock.
//!
//! A [`Shard`] owns whole NICs and is the only one who touches their objects, so there is no lock in here. It is driven from
//! outside, like quinn-proto's connections: [`Shard::execute`] takes control commands, [`Shard::poll`] looks at doorbells and moves work
//! requests, timers and completions forward by one bounded round, [`Shard::next_deadline`] says when to call again at the latest. Time is an
//! argument, randomness comes from a [`Random`], events leave through a [`Port`], and guest memory is reached through `crate::memory`, already resolved.
//!
//! ```text
//!  command ──> control ──> nic {context, pd, mr, cq, srq, qp, ah}
//!  doorbells ─> scan ──> requester ──> Transport ──> responder (a peer's nic) ──> memory copy
//!                           └──> cq ──> arm? ──> Port
//! ```
//!
//! What a guest does wrong is a [`Status`], a completion status or an event; it is never an `Err` that ends anything here. All
//! loops are bounded by limits that the device sets, not by numbers that a guest writes.

#![forbid(unsafe_code)]

mod attributes;
pub mod budget;
mod command;
pub(crate) mod contexts;
mod control;
pub(crate) mod cq;
mod create;
pub(crate) mod doorbell;
mod fastreg;
mod follow;
pub(crate) mod grh;
mod hosted;
pub mod limits;
mod local;
mod mcast;
#[cfg(test)]
mod models;
mod moderation;
mod modify;
mod mr;
mod network;
mod nic;
mod numbers;
pub(crate) mod outbox;
mod pending;
mod placement;
mod port;
pub(crate) mod qp;
pub(crate) mod receive;
mod requester;
mod responder;
pub(crate) mod shape;
mod srq;
#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers of tests")]
pub(crate) mod tests;
pub(crate) mod timer;
mod window;

use std::fmt;

pub use crate::protocol::Visible;
pub use command::{Command, Errand, Reply, Status};
pub use cq::control_offset;
pub use follow::MemoryChange;
pub use hosted::Hosted;
pub use limits::{Counters, Limits, Objects};
pub use nic::NicSettings;
pub use numbers::Random;
pub use port::Port;

use self::budget::{Clock, Meter, cost};
use self::doorbell::Post;
use self::network::Networks;
use self::nic::{Life, Nic};
use self::numbers::Numbers;
use self::qp::Waiter;
use self::timer::{Timers, Waiting};
use crate::memory::{AddressSpace, Segment};
use crate::protocol::{self, Cpu};
use crate::transport::{Gid, Local, NicId, Transport};

/// Nanoseconds of a monotonic clock.
pub type Nanos = u64;

/// QPs of one NIC that run in one round.
const ROUND_QPS: usize = 16;
/// Bytes that one NIC's QPs move in one round; the turn that reaches it is the last.
const ROUND_BYTES: u32 = 4 << 20;

/// Time for deadlines in one round; more wait for the next.
const TIMERS: Nanos = 50_000;

/// What is seen of a NIC from outside.
#[derive(Clone, Debug)]
pub struct NicSnapshot {
    /// A driver has sent INIT.
    pub ready: bool,
    /// The NIC failed and waits for a reset.
    pub failed: bool,
    /// What happened.
    pub counters: Counters,
    /// What exists.
    pub objects: Objects,
    /// Addresses in the port's table.
    pub gids: Vec<Gid>,
}

/// NICs that are served together, by one thread.
pub struct Shard {
    nics: Vec<Option<Box<Nic>>>,
    /// NICs that bring their own verbs; where one is, `nics` has none.
    hosted: Vec<Option<Box<dyn Hosted>>>,
    networks: Networks,
    timers: Timers,
    qpns: Numbers,
    random: Box<dyn Random>,
    local: Local,
    /// The requester's segment list, kept for its allocation.
    segments: Vec<Segment>,
    posts: Vec<Post>,
    wakes: Vec<Waiter>,
    /// The NIC whose content is being looked at.
    serving: Option<NicId>,
    remains: Vec<Remains>,
    meter: Meter,
}

/// What nobody uses any more, and what takes its time to end.
#[derive(Debug)]
pub struct Remains {
    _parts: Box<dyn fmt::Debug + Send>,
}

impl Remains {
    /// What is dropped with this.
    pub fn new(parts: impl fmt::Debug + Send + 'static) -> Self {
        Self { _parts: Box::new(parts) }
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("nics", &self.nics).finish_non_exhaustive()
    }
}

impl Shard {
    /// A shard without NICs.
    #[must_use]
    pub fn new(random: Box<dyn Random>) -> Self {
        Self {
            nics: Vec::new(),
            hosted: Vec::new(),
            networks: Networks::default(),
            timers: Timers::default(),
            qpns: Numbers::default(),
            random,
            local: Local,
            segments: Vec::new(),
            posts: Vec::new(),
            wakes: Vec::new(),
            serving: None,
            remains: Vec::new(),
            meter: Meter::default(),
        }
    }

    /// Has budgets look at a clock too; without one they are what is charged. Before there are NICs.
    #[must_use]
    pub fn with_clock(mut self, clock: Box<dyn Clock>) -> Self {
        self.meter = Meter::new(clock);
        self
    }

    /// What all work so far was charged, by the cost model of [`budget`].
    #[must_use]
    pub fn charged(&self) -> Nanos {
        self.meter.charged()
    }

    /// The NIC that the last call was busy with when it did not return: whom to blame for a panic.
    #[must_use]
    pub const fn suspect(&self) -> Option<NicId> {
        self.serving
    }

    fn nic_mut(&mut self, id: NicId) -> Option<&mut Nic> {
        self.nics.get_mut(id.0 as usize)?.as_deref_mut()
    }

    /// A NIC with what commands of it may change around it.
    fn parts(&mut self, id: NicId) -> Option<(&mut Nic, &mut Networks, &mut dyn Random)> {
        let Self { nics, networks, random, .. } = self;
        let nic = nics.get_mut(id.0 as usize)?.as_deref_mut()?;
        Some((nic, networks, random.as_mut()))
    }

    /// A number that no NIC has, and its slot.
    fn free_slot(&mut self) -> (NicId, usize) {
        let free = |index: &usize| self.nics[*index].is_none() && !self.is_hosted(*index);
        let index = (0..self.nics.len()).find(free).unwrap_or_else(|| {
            self.nics.push(None);
            self.nics.len() - 1
        });
        // Four thousand million NICs do not fit in memory.
        (NicId(u32::try_from(index).unwrap_or(u32::MAX)), index)
    }

    /// Adds a NIC, which waits for INIT.
    pub fn add_nic(&mut self, settings: NicSettings, port: Box<dyn Port>) -> NicId {
        let (id, index) = self.free_slot();
        let nic = Nic::new(id, settings, port, self.meter.clone());
        self.nics[index] = Some(Box::new(nic));
        id
    }

    /// Gives a NIC another way out for its events.
    pub fn set_port(&mut self, id: NicId, port: Box<dyn Port>) {
        if let Some(nic) = self.hosted_mut(id) {
            nic.set_port(port);
        } else if let Some(nic) = self.nic_mut(id) {
            nic.outbox.set_port(port);
        }
    }

    /// Removes a NIC and everything it has.
    pub fn remove_nic(&mut self, id: NicId) {
        self.reset(id);
        if let Some(slot) = self.nics.get_mut(id.0 as usize) {
            *slot = None;
        }
        if let Some(nic) = self.hosted.get_mut(id.0 as usize).and_then(Option::take) {
            self.remains.push(Remains::new(nic));
        }
    }

    /// Takes over changed limits and addresses. Existing objects stay; a GID that is no longer given is withdrawn.
    pub fn update_nic(&mut self, id: NicId, settings: NicSettings) {
        if let Some(nic) = self.hosted_mut(id) {
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

    /// Destroys every object of a NIC and forgets every guest address; the next command must be INIT. Counters go on.
    pub fn reset(&mut self, id: NicId) {
        if let Some(nic) = self.hosted_mut(id) {
            return nic.reset();
        }
        let mut freed = Vec::new();
        let old = self.nic_mut(id).map(|nic| nic.clear(&mut freed));
        self.remains.extend(old.map(Remains::new));
        for qpn in freed.into_iter().filter(|&qpn| qpn != virtio_rdma_abi::GSI_QPN) {
            self.qpns.free(qpn);
        }
        self.timers.remove_nic(id);
        self.networks.release_all(id);
    }

    /// What is left of NICs that were reset since the last call, and of objects of the NIC `id`. There may be a hundred thousand in it, and host
    /// objects whose end blocks, so it should be dropped where nobody waits: not on the thread that runs the shard.
    pub fn take_remains(&mut self, id: NicId) -> Vec<Remains> {
        let mut remains = std::mem::take(&mut self.remains);
        if let Some(nic) = self.hosted_mut(id) {
            remains.extend(nic.take_remains());
        }
        remains
    }

    /// Stops all access to a NIC's memory; its objects stay. True: it has not stopped yet, and this has to be called again.
    pub fn pause(&mut self, id: NicId) -> bool {
        if let Some(nic) = self.hosted_mut(id) {
            return nic.pause();
        }
        if let Some(nic) = self.nic_mut(id)
            && nic.life == Life::Ready
        {
            nic.life = Life::Paused;
        }
        false
    }

    /// Goes on after [`Self::pause`]. Waits begin anew.
    pub fn resume(&mut self, id: NicId) {
        if let Some(nic) = self.hosted_mut(id) {
            return nic.resume();
        }
        let Some(nic) = self.nic_mut(id) else { return };
        if nic.life != Life::Paused {
            return;
        }
        nic.life = Life::Ready;
        nic.outbox.wanted();
        let qpns: Vec<u32> = nic.qps.keys().copied().collect();
        for qpn in qpns {
            nic.woken(qpn);
            nic.schedule(qpn);
        }
    }

    /// Follows a change of a guest's memory map: what lies in memory that is gone fails, each object in its own way.
    ///
    /// There may be a hundred thousand objects, so this only begins; [`Self::follow_memory`] is called until nothing is left to do.
    pub fn memory_changed(&mut self, id: NicId, space: AddressSpace) -> MemoryChange {
        if let Some(nic) = self.hosted_mut(id) {
            nic.memory_changed(space);
            return MemoryChange::default();
        }
        let Some(nic) = self.nic_mut(id) else { return MemoryChange::default() };
        match nic.life {
            Life::Ready | Life::Paused => nic.memory_changed(space),
            Life::Idle | Life::Failed => MemoryChange::default(),
        }
    }

    /// Looks at some more objects after a change of memory; true if there are others.
    pub fn follow_memory(&mut self, id: NicId, change: &mut MemoryChange) -> bool {
        let Some(nic) = self.nic_mut(id) else { return false };
        matches!(nic.life, Life::Ready | Life::Paused) && nic.follow_memory(change)
    }

    /// Fails a NIC: DEVICE_FATAL to its guest, nothing to anybody else.
    pub fn fail(&mut self, id: NicId) {
        if let Some(nic) = self.hosted_mut(id) {
            nic.fail();
        } else if let Some(nic) = self.nic_mut(id) {
            nic.fail();
        }
    }

    /// Fails the NICs whose guest memory vanished.
    pub fn memory_vanished(&mut self) {
        self.hosted.iter_mut().flatten().for_each(|nic| nic.memory_vanished());
        for nic in self.nics.iter_mut().flatten() {
            if matches!(nic.life, Life::Ready | Life::Paused) && nic.space.vanished() {
                nic.fail();
            }
        }
    }

    /// There are new buffers on one of the NIC's event queues.
    pub fn events_wanted(&mut self, id: NicId) {
        if let Some(nic) = self.hosted_mut(id) {
            nic.events_wanted();
        } else if let Some(nic) = self.nic_mut(id) {
            nic.outbox.wanted();
        }
    }

    /// What is seen of a NIC.
    #[must_use]
    pub fn status(&self, id: NicId) -> Option<NicSnapshot> {
        if let Some(Some(nic)) = self.hosted.get(id.0 as usize) {
            return Some(nic.status());
        }
        let nic = self.nics.get(id.0 as usize)?.as_ref()?;
        Some(NicSnapshot {
            ready: matches!(nic.life, Life::Ready | Life::Paused),
            failed: nic.life == Life::Failed,
            counters: nic.counters,
            objects: nic.objects(),
            gids: nic.gids.iter().flatten().copied().collect(),
        })
    }

    /// One round: timers, doorbells, work requests, completions, events. True if there was anything to do.
    pub fn poll(&mut self, now: Nanos) -> bool {
        let mut busy = self.fire_timers(now);
        busy |= self.scan();
        self.wake_waiters();
        busy |= self.run(now);
        while let Some(late) = self.local.completed() {
            self.answered(late.nic, late.qpn, late.outcome, now);
            busy = true;
        }
        busy |= self.run_hosted(now);
        self.publish(now);
        busy
    }

    /// When [`Self::poll`] must be called again though nothing was posted.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        let hosted = self.hosted.iter().flatten().filter_map(|nic| nic.deadline());
        hosted.chain(self.timers.next()).min()
    }

    /// Asks all guests to kick, then looks once more; true: there is work, do not sleep.
    pub fn prepare_sleep(&mut self) -> bool {
        let ask = |shard: &mut Self| {
            shard.nics.iter().flatten().for_each(|nic| nic.set_need_kick(true));
            shard.hosted.iter().flatten().for_each(|nic| nic.set_need_kick(true));
        };
        protocol::last_look(&Cpu, self, ask, Self::scan)
            || self.nics.iter().flatten().any(|nic| !nic.run.is_empty() || !nic.wakes.is_empty())
            || self.hosted.iter_mut().flatten().any(|nic| nic.prepare_sleep())
    }

    /// Tells all guests that kicks are not needed.
    pub fn wake(&mut self) {
        self.nics.iter().flatten().for_each(|nic| nic.set_need_kick(false));
        self.hosted.iter().flatten().for_each(|nic| nic.set_need_kick(false));
    }

    fn fire_timers(&mut self, now: Nanos) -> bool {
        let mut fired = false;
        let mut budget = self.meter.budget(TIMERS);
        while !budget.is_over(&self.meter)
            && let Some((deadline, id, waiting)) = self.timers.pop(now)
        {
            fired = true;
            self.meter.charge(cost::TIMER);
            self.serving = Some(id);
            match waiting {
                Waiting::Send(qpn) => self.timer_fired(id, qpn, deadline),
                Waiting::Event(cqn) => {
                    if let Some(nic) = self.nic_mut(id) {
                        nic.event_timer_fired(cqn, now);
                    }
                }
            }
        }
        fired
    }

    /// Looks at the doorbells of one NIC.
    fn scan_nic(&mut self, id: NicId) {
        let Self { nics, posts, .. } = self;
        if let Some(nic) = nics.get_mut(id.0 as usize).and_then(Option::as_deref_mut) {
            nic.scan(posts);
        }
    }

    fn scan(&mut self) -> bool {
        let Self { nics, hosted, posts, serving, .. } = self;
        let mut found = false;
        for nic in nics.iter_mut().flatten() {
            *serving = Some(nic.id);
            found |= nic.scan(posts);
        }
        for (nic, number) in hosted.iter_mut().zip(0u32..) {
            if let Some(nic) = nic {
                *serving = Some(NicId(number));
                found |= nic.scan();
            }
        }
        found
    }

    fn wake_waiters(&mut self) {
        let mut wakes = std::mem::take(&mut self.wakes);
        for nic in self.nics.iter_mut().flatten() {
            wakes.append(&mut nic.wakes);
        }
        self.meter.charge_each(cost::WAKE, wakes.len());
        for waiter in wakes.drain(..) {
            if let Some(nic) = self.nic_mut(waiter.nic) {
                nic.woken(waiter.qpn);
            }
        }
        self.wakes = wakes;
    }

    fn run(&mut self, now: Nanos) -> bool {
        let mut busy = false;
        for index in 0..self.nics.len() {
            // What is on the queue now; QPs that go back to its end wait for the next round.
            let turns = match &self.nics[index] {
                Some(nic) if nic.life == Life::Ready => nic.run.len().min(ROUND_QPS),
                _ => 0,
            };
            let mut bytes = 0u32;
            for _ in 0..turns {
                if bytes >= ROUND_BYTES {
                    break;
                }
                let Some(nic) = self.nics[index].as_deref_mut() else { break };
                let (id, Some(qpn)) = (nic.id, nic.run.pop_front()) else { break };
                self.serving = Some(id);
                bytes = bytes.saturating_add(self.run_qp(id, qpn, now));
                busy = true;
            }
        }
        busy
    }

    fn publish(&mut self, now: Nanos) {
        let dirty = self.nics.iter().flatten().any(|nic| !nic.dirty.is_empty())
            || self.hosted.iter().flatten().any(|nic| nic.is_dirty());
        // One fence for the CQs of all NICs.
        let visible = dirty.then(|| protocol::entries_visible(&Cpu));
        let Self { nics, hosted, serving, timers, .. } = self;
        for (nic, number) in hosted.iter_mut().zip(0u32..) {
            if let Some(nic) = nic {
                *serving = Some(NicId(number));
                nic.publish(visible, now);
            }
        }
        for nic in nics.iter_mut().flatten() {
            *serving = Some(nic.id);
            if nic.life != Life::Paused {
                if let Some(visible) = visible {
                    nic.fire_completions(visible, now, timers);
                }
                nic.deliver_events();
            }
        }
    }
}
