//! A NIC that goes on in another process: what is saved of it, and how it is made again.
//!
//! Who saves has paused the NIC, so nothing of it is under way but what its objects say: a message
//! that is half there goes on with its next piece, and a deadline is a time of a clock that both
//! processes have.
//!
//! Every number stays what it was: QPNs, keys, contexts, doorbells, CQNs and SRQNs, ring indices,
//! and what rests. Only a NIC's number on its shard is another; whoever waits for a peer's receive
//! is told of it when all NICs are there ([`Shard::go_on_with`]). Where NICs are spread over shards
//! they are placed anew, so there whoever waits is known by an address. What a shard knows beside
//! its NICs, the addresses and groups of networks, is made from them.
//!
//! That a wait is over may be on its way to another shard while NICs are halted. They are saved
//! when all of that has come ([`Engine::wakes_heard`]).

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use virtio_rdma_abi::event;

use super::engine::{Engine, Execution};
use super::mr::{MrTable, SavedKeys};
use super::network::Networks;
use super::nic::{Ah, KERNEL, NicState, Pd, Qp, SoftNic, Srq};
use super::nics::Nics;
use super::numbers::Qpns;
use super::qp::{Inbound, SavedInbound};
use super::quota;
use super::srq::MAX_WAITERS;
use super::waiter::{Requester, Waiter};
use crate::link::{Bus, Gid, NicId, Ways};
use crate::memory::{AddressSpace, Ring, SavedMap};
use crate::nic::chunks::Chunks;
use crate::nic::contexts::{Contexts, SavedContexts};
use crate::nic::cq::{Cq, SavedCq};
use crate::nic::holdings::Links;
use crate::nic::objects::SavedSrq;
use crate::nic::outbox::SavedEvents;
use crate::nic::qp::{Attrs, Kind, SavedSends, SendQueue, State, Wait};
use crate::nic::quota::{Kept, Kind as Place};
use crate::nic::receive::{ReceiveRing, SavedReceives};
use crate::nic::roster::Roster;
use crate::nic::saved::{AbiBytes, BadState, load_counters};
use crate::nic::table::Table;
use crate::nic::timer::Waiting;
use crate::nic::{Counters, Nanos};

/// Domains or address handles of one guest, at most: more than any limit allows.
const MOST: u32 = 1 << 24;

/// A table of objects: by number, and how often each slot was used.
#[derive(Debug, Serialize, Deserialize)]
struct SavedTable<T> {
    objects: Vec<(u32, T)>,
    uses: Vec<u16>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedAh {
    ctx: u32,
    pdn: u32,
    av: AbiBytes,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedQp {
    qpn: u32,
    ctx: u32,
    pdn: u32,
    kind: Kind,
    state: State,
    attrs: AbiBytes,
    signal_all: bool,
    send_cqn: u32,
    recv_cqn: u32,
    srqn: Option<u32>,
    sends: Option<SavedSends>,
    receives: Option<SavedReceives>,
    doorbells: [u32; 2],
    scheduled: bool,
    inbound: SavedInbound,
}

/// Everything of one guest.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedNic {
    /// It ran, and is to run again.
    ready: bool,
    /// Not all of its QPs have heard that an earlier pause is over.
    resuming: bool,
    /// What it was to its peers on the shard.
    id: NicId,
    status_page: SavedMap,
    contexts: SavedContexts,
    /// Numbers and contexts.
    pds: Vec<(u32, u32)>,
    ahs: Vec<(u32, SavedAh)>,
    keys: SavedKeys,
    cqs: SavedTable<SavedCq>,
    srqs: SavedTable<(SavedSrq, Vec<Waiter>)>,
    qps: Vec<SavedQp>,
    /// Whom it was about to wake.
    wakes: Vec<Waiter>,
    gids: Vec<Option<Gid>>,
    groups: Vec<(Gid, Vec<u32>)>,
    events: SavedEvents,
    dead_cqs: Vec<u32>,
    counters: [Counters; 2],
}

fn number(index: usize) -> Option<u32> {
    u32::try_from(index).ok()
}

/// Slots of a table that numbers its objects itself: those below the highest number are made, too.
fn slots<T>(objects: &[(u32, T)]) -> usize {
    let highest = objects.iter().map(|(number, _)| *number).max();
    highest.map_or(0, |number| number.min(MOST) as usize + 1)
}

/// A table that numbers its objects itself.
fn numbered<T>(objects: Vec<(u32, T)>) -> Result<Chunks<T>, BadState> {
    let all = objects.len();
    let table: Chunks<T> = objects
        .into_iter()
        .filter(|(number, _)| *number < MOST)
        .map(|(number, object)| (number as usize, object))
        .collect();
    if table.len() == all { Ok(table) } else { Err(BadState::Content("such numbers")) }
}

impl<T> SavedTable<T> {
    fn of<O>(table: &Table<O>, save: impl Fn(&O) -> T) -> Option<Self> {
        let saved = |(index, object): (usize, &O)| Some((number(index)?, save(object)));
        let objects = table.iter().map(saved).collect::<Option<_>>()?;
        Some(Self { objects, uses: table.uses().to_vec() })
    }

    fn load<O>(self, mut load: impl FnMut(T) -> Result<O, BadState>) -> Result<Table<O>, BadState> {
        let loaded = self.objects.into_iter().map(|(n, object)| Ok((n as usize, load(object)?)));
        let objects = loaded.collect::<Result<Vec<_>, BadState>>()?;
        Table::load(objects, self.uses).ok_or(BadState::Content("such numbers"))
    }
}

impl SavedQp {
    fn of(qp: &Qp, space: &AddressSpace) -> Self {
        Self {
            qpn: qp.qpn,
            ctx: qp.ctx,
            pdn: qp.pdn,
            kind: qp.kind,
            state: qp.state,
            attrs: qp.attrs.save(),
            signal_all: qp.signal_all,
            send_cqn: qp.send_cqn,
            recv_cqn: qp.recv_cqn,
            srqn: qp.srqn,
            sends: qp.send.as_ref().map(|send| send.save(space)),
            receives: qp.receive.as_ref().map(|receive| receive.save(space)),
            doorbells: qp.doorbells,
            scheduled: qp.scheduled,
            inbound: qp.own.save(),
        }
    }

    fn load(self, space: &AddressSpace, kept: &mut Kept, present: usize) -> Result<Qp, BadState> {
        kept.place(Place::Qp, present)?;
        let send = self.sends.map(|saved| SendQueue::load(saved, space, kept)).transpose()?;
        let receive = self.receives.map(|saved| ReceiveRing::load(&saved, space)).transpose()?;
        let max_inline = send.as_ref().map_or(0, |send| send.max_inline);
        Ok(Qp {
            qpn: self.qpn,
            ctx: self.ctx,
            pdn: self.pdn,
            kind: self.kind,
            state: self.state,
            attrs: Attrs::load(&self.attrs)?,
            signal_all: self.signal_all,
            send_cqn: self.send_cqn,
            recv_cqn: self.recv_cqn,
            srqn: self.srqn,
            send: send.map(Box::new),
            receive,
            doorbells: self.doorbells,
            scheduled: false,
            links: Links::default(),
            own: Inbound::load(&self.inbound)?,
            _kept: kept.beside(quota::queue_pair(max_inline))?,
        })
    }
}

impl SoftNic {
    /// `None` if there is nothing that a driver could go on with.
    fn save(&self, ready: bool) -> Option<SavedNic> {
        let space = &self.space;
        let mut qps = Vec::with_capacity(self.qps.len());
        let mut walk = self.qp_numbers.walk();
        while let Some(qpn) = walk.next(&self.qp_numbers) {
            qps.push(SavedQp::of(self.qps.get(&qpn)?, space));
        }
        let ah = |(index, ah): (usize, &Ah)| {
            Some((number(index)?, SavedAh { ctx: ah.ctx, pdn: ah.pdn, av: AbiBytes::of(&ah.av) }))
        };
        let pd = |(index, pd): (usize, &Pd)| Some((number(index)?, pd.ctx));
        Some(SavedNic {
            ready,
            resuming: self.chores.are_resuming(),
            id: self.backing.id,
            status_page: self.status_page.as_ref()?.save()?,
            contexts: self.contexts.save()?,
            pds: self.pds.iter().map(pd).collect::<Option<_>>()?,
            ahs: self.ahs.iter().map(ah).collect::<Option<_>>()?,
            keys: self.backing.mrs.save()?,
            cqs: SavedTable::of(&self.cqs, |cq| cq.save(space))?,
            srqs: SavedTable::of(&self.srqs, |srq| (srq.save(space), srq.own.clone()))?,
            qps,
            wakes: self.backing.wakes.clone(),
            gids: self.gids.clone(),
            groups: self.backing.groups.iter().map(|(gid, qps)| (*gid, qps.clone())).collect(),
            events: self.outbox.save(),
            dead_cqs: self.chores.dead_cqs(),
            counters: [self.counters, self.counters_at_init],
        })
    }

    /// Makes what was saved; the NIC has nothing, and stands still afterwards.
    fn load(&mut self, saved: SavedNic, space: AddressSpace) -> Result<(), BadState> {
        self.make(saved, space).inspect_err(|_| {
            // Its QPNs are not its own yet, and not its to give back.
            self.qp_numbers = Roster::default();
        })
    }

    fn make(&mut self, saved: SavedNic, space: AddressSpace) -> Result<(), BadState> {
        let mut kept = Kept::begin(&space, &quota::ENGINE);
        self.status_page = Some(Ring::load(&saved.status_page, &space)?);
        self.contexts = Contexts::load(saved.contexts, &space, &mut kept)?;
        places(&mut kept, Place::Pd, slots(&saved.pds))?;
        let pds = saved
            .pds
            .into_iter()
            .map(|(pdn, ctx)| (pdn, Pd { ctx, users: 0, links: Links::default(), own: () }));
        self.pds = numbered(pds.collect())?;
        self.load_ahs(saved.ahs, &mut kept)?;
        places(&mut kept, Place::Region, saved.keys.len())?;
        self.backing.mrs = MrTable::load(saved.keys, &space)?;
        places(&mut kept, Place::Cq, saved.cqs.objects.len())?;
        self.cqs = saved.cqs.load(|cq| Cq::load(cq, &space))?;
        self.load_srqs(saved.srqs, &space, &mut kept)?;
        self.own_loaded();
        for (present, qp) in saved.qps.into_iter().enumerate() {
            let goes_on = qp.sends.as_ref().is_some_and(SavedSends::goes_on);
            let scheduled = qp.scheduled || goes_on;
            let qp = qp.load(&space, &mut kept, present)?;
            if self.qps.contains_key(&qp.qpn) {
                return Err(BadState::Content("the same QPN twice"));
            }
            self.check_parts(&qp)?;
            let qpn = qp.qpn;
            if let Some(Wait::Receiver(until) | Wait::Answer(until)) =
                qp.send.as_ref().map(|send| send.wait)
            {
                self.timers.set(until, Waiting::Send(qpn));
            }
            self.link_qp(qp);
            if scheduled {
                self.schedule(qpn);
            }
        }
        self.backing.wakes = saved.wakes;
        if saved.resuming {
            self.chores.resume(self.qp_numbers.walk());
        }
        self.backing.groups = saved.groups.into_iter().collect();
        if saved.gids.len() != self.gids.len() {
            return Err(BadState::Content("such a table of addresses"));
        }
        self.gids = saved.gids;
        saved.dead_cqs.into_iter().for_each(|cqn| self.chores.cq_died(cqn));
        self.outbox.load(saved.events);
        let [counters, at_init] = saved.counters;
        (self.counters, self.counters_at_init) =
            (load_counters(counters)?, load_counters(at_init)?);
        (self.kept, self.space) = (kept, space);
        self.look_at_all();
        self.life = NicState::Paused;
        Ok(())
    }

    fn load_ahs(&mut self, saved: Vec<(u32, SavedAh)>, kept: &mut Kept) -> Result<(), BadState> {
        places(kept, Place::Ah, slots(&saved))?;
        let ah = |(index, saved): (u32, SavedAh)| {
            let (av, links) = (saved.av.read()?, Links::default());
            Ok((index, Ah { ctx: saved.ctx, pdn: saved.pdn, av, links, own: () }))
        };
        let all = saved.into_iter().map(ah).collect::<Result<Vec<_>, BadState>>()?;
        all.iter().for_each(|(_, ah)| self.join_pd(ah.pdn));
        self.ahs = numbered(all)?;
        Ok(())
    }

    fn load_srqs(
        &mut self,
        saved: SavedTable<(SavedSrq, Vec<Waiter>)>,
        space: &AddressSpace,
        kept: &mut Kept,
    ) -> Result<(), BadState> {
        places(kept, Place::Srq, saved.objects.len())?;
        saved.objects.iter().for_each(|(_, (srq, _))| self.join_pd(srq.pdn));
        self.srqs = saved.load(|(srq, mut waiters)| {
            waiters.truncate(MAX_WAITERS);
            Srq::load(&srq, space, (kept.beside(quota::SHARED)?, waiters))
        })?;
        Ok(())
    }

    /// Whether a QP's parts are there.
    fn check_parts(&self, qp: &Qp) -> Result<(), BadState> {
        let cqs = [qp.send_cqn, qp.recv_cqn];
        let there = cqs.iter().all(|&cqn| self.cqs.get(cqn as usize).is_some())
            && qp.srqn.is_none_or(|srqn| self.srqs.get(srqn as usize).is_some())
            && self.pds.contains(qp.pdn as usize);
        if there { Ok(()) } else { Err(BadState::Content("a QP without what it uses")) }
    }

    /// Whatever was written before is looked at: somebody may have armed a CQ, and no timer is set.
    fn look_at_all(&mut self) {
        let waits: Vec<(u32, Option<Nanos>)> = self
            .cqs
            .iter()
            .filter_map(|(index, cq)| Some((number(index)?, cq.moderation.waits_until())))
            .collect();
        for (cqn, until) in waits {
            self.look_at(cqn);
            if let Some(until) = until {
                self.timers.set(until, Waiting::Event(cqn));
            }
        }
    }
}

/// Room for so many objects of a kind.
fn places(kept: &mut Kept, kind: Place, count: usize) -> Result<(), BadState> {
    Ok((0..count).try_for_each(|n| kept.place(kind, n))?)
}

impl Engine {
    /// QPNs that rest, the longest first.
    #[must_use]
    pub(crate) fn resting(&self) -> Vec<u32> {
        self.qpns.resting().collect()
    }

    /// How many wakes this shard has sent to others, and heard of others; `None` while it has not
    /// dealt with all that it heard.
    pub(crate) fn wakes_heard(&self) -> Option<[u64; 2]> {
        let wakes = self.ways.bus_ref().map_or(Some([0; 2]), Bus::wakes_heard);
        wakes.filter(|_| self.wakes.is_empty())
    }

    /// Has QPNs rest that rested in an earlier process.
    pub(crate) fn rest(&mut self, numbers: &[u32]) {
        numbers.iter().for_each(|&number| self.qpns.rest(number));
    }
}

impl<N: Nics> Execution<'_, N> {
    /// Pauses a NIC that is to be saved. All of a network are, before the first is saved: one that
    /// still ran would find that nobody answers.
    pub(crate) fn halt(&mut self, id: NicId) {
        while let Some((id, qpn)) = self.engine.wakes.pop_front() {
            match self.nic_mut(id) {
                Some(nic) => nic.woken(qpn),
                None => self.engine.wake_elsewhere(id, qpn),
            }
        }
        let Some(nic) = self.nic_mut(id) else { return };
        if nic.life == NicState::Ready {
            nic.life = NicState::Paused;
            nic.backing.goes_on = true;
        }
    }

    /// Pauses a NIC and says what is left of it; `None` if no driver could go on with that.
    #[must_use]
    pub(crate) fn save(&mut self, id: NicId) -> Option<SavedNic> {
        self.halt(id);
        self.name_who_waits(id);
        let nic = self.nic_mut(id)?;
        if nic.life == NicState::Paused { nic.save(nic.backing.goes_on) } else { None }
    }

    /// Where there are several shards, NICs may be on others in another process, which knows
    /// whoever waits for this NIC by its address alone.
    fn name_who_waits(&mut self, id: NicId) {
        let Self { nics, engine: Engine { networks, .. }, .. } = self;
        let Some(nic) = nics.nic(id).filter(|_| networks.book.is_some()) else { return };
        let vni = nic.settings.vni;
        // All addresses are looked through, and one NIC may wait many times.
        let mut known: FxHashMap<NicId, Option<Gid>> = FxHashMap::default();
        nic.replace_waiters(|waiter| match waiter.who {
            Requester::Here(nic) if nic != id => {
                let found = known.entry(nic).or_insert_with(|| networks.address_of(vni, nic));
                let who = Requester::Elsewhere((*found)?);
                Some(Waiter { who, ..waiter })
            }
            _ => Some(waiter),
        });
    }

    /// Makes a NIC what it was, with this memory. It stands still until [`Self::go_on_with`].
    ///
    /// # Errors
    /// The NIC is as it is after a reset.
    pub(crate) fn load(
        &mut self,
        id: NicId,
        saved: SavedNic,
        space: AddressSpace,
    ) -> Result<(), BadState> {
        self.reset(id);
        let Self { nics, engine: Engine { networks, qpns, ways, .. }, .. } = self;
        let Some(nic) = nics.nic(id) else {
            return Err(BadState::Content("state on such a backing"));
        };
        let (ready, former) = (saved.ready, saved.id);
        let loaded = nic.load(saved, space).and_then(|()| claim(nic, networks, (qpns, ways)));
        nic.backing.goes_on = ready;
        match loaded {
            Ok(()) => drop(self.engine.former.insert(former, id)),
            Err(_) => self.reset(id),
        }
        loaded
    }

    /// Has NICs run that were loaded, if they ran before: all of a network at once. What came for
    /// them from shards that went on before is dealt with.
    pub(crate) fn go_on_with(&mut self, ids: &[NicId]) {
        let former = std::mem::take(&mut self.engine.former);
        for &id in ids {
            let Some(nic) = self.nic_mut(id) else { continue };
            nic.rename(&former);
            if std::mem::take(&mut nic.backing.goes_on) && nic.life == NicState::Paused {
                nic.life = NicState::Ready;
                nic.outbox.wanted();
            }
        }
        self.engine.take_early();
    }
}

impl SoftNic {
    /// Whoever waits for it has another number by now; who is not there waits no more.
    fn rename(&mut self, former: &FxHashMap<NicId, NicId>) {
        self.replace_waiters(|waiter| match waiter.who {
            Requester::Here(id) => former.get(&id).map(|&nic| Waiter::here(nic, waiter.qpn)),
            Requester::Elsewhere(_) => Some(waiter),
        });
    }

    fn replace_waiters(&mut self, mut by: impl FnMut(Waiter) -> Option<Waiter>) {
        let mut replace = |waiters: &mut Vec<Waiter>| {
            *waiters = waiters.drain(..).filter_map(&mut by).collect();
        };
        replace(&mut self.backing.wakes);
        self.srqs.iter_mut().for_each(|(_, srq)| replace(&mut srq.own));
        self.qps.values_mut().for_each(|qp| qp.own.waiter = qp.own.waiter.and_then(&mut by));
    }
}

/// Takes what a NIC has in its network and on its shard. An address that is another's by now, or
/// that it may not use any more, is gone.
fn claim(
    nic: &mut SoftNic,
    networks: &mut Networks,
    own: (&mut Qpns, &mut Ways),
) -> Result<(), BadState> {
    let (id, vni) = (nic.backing.id, nic.settings.vni);
    let (qpns, ways) = own;
    let mut walk = nic.qp_numbers.walk();
    let mut claimed = VecDeque::new();
    while let Some(qpn) = walk.next(&nic.qp_numbers) {
        if let (Some(qp), Some(bus)) = (nic.qps.get(&qpn), ways.bus()) {
            // Its own, and its peer's: by that it knows what it has executed.
            bus.had_life(qp.send.as_ref().map_or(0, |send| send.ticket.life));
            bus.had_life(qp.own.stream.life);
        }
        if qpn != virtio_rdma_abi::GSI_QPN {
            if !qpns.claim(qpn) {
                // They are given back by the reset that follows: only those that are its own.
                nic.qp_numbers = Roster::default();
                claimed.into_iter().for_each(|qpn| nic.qp_numbers.insert(qpn));
                return Err(BadState::Content("a QPN that is another's"));
            }
            claimed.push_back(qpn);
        }
    }
    for index in 0..nic.gids.len() {
        let Some(gid) = nic.gids.get(index).copied().flatten() else { continue };
        if !nic.may_use(&gid) || !networks.claim(vni, gid, id) {
            nic.gids[index] = None;
            nic.raise(event::GID_CHANGE, 1, KERNEL);
        }
    }
    for mgid in nic.backing.groups.keys() {
        networks.join(vni, *mgid, id);
    }
    Ok(())
}
