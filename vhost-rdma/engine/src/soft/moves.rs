//! A NIC that moves to another shard of its process while it runs.
//!
//! A NIC is one value, owned by its shard, so a move is a move: it is taken out between two turns,
//! goes through a mailbox, and is put in. Its rings stay mapped, its numbers stay its own, its
//! objects are not looked at. What a shard knows beside its NICs (addresses, groups) changes hands
//! in the book of the process, which names the new shard from the moment at which the NIC leaves
//! ([`crate::link::AddressBook`]).
//!
//! What is under way meanwhile finds it. A request or an answer that comes to the old shard follows
//! it by the book; what is at the new shard first waits there. A piece that crossed before the move
//! keeps its way and its number, even to a peer of the same shard by now, since only the
//! responder's stream knows whether it was executed. A requester that waits for a receive here is
//! woken by its NIC's number, which is the same on all shards.
//!
//! Two kinds stay where they are. A NIC whose processes mirror memory has jobs under way that name
//! requesters of its shard; and a NIC that waits for such a job would be answered where it is no
//! more, so that an atomic could be executed twice. So it would where the answer has come and its
//! queue pair has not gone on: what crosses takes no answer along.

use super::engine::{Engine, Execution};
use super::nic::{NicState, SoftNic};
use super::nics::Nics;
use super::waiter::Requester;
use crate::link::{Gid, NicId, Parcel};
use crate::nic::Nanos;

/// Queue pairs, and jobs of owners, that are looked through before a move from where there are
/// owners; where there are more, nobody moves.
const JOBS: usize = 4096;

impl SoftNic {
    /// With whom it `spent` that since the last time: the shard and number of each.
    pub(crate) fn take_talks(
        &mut self,
        engine: &Engine,
        spent: Nanos,
    ) -> Vec<(usize, NicId, Nanos)> {
        let vni = self.settings.vni;
        let known = |(gid, sum): (Gid, Nanos)| {
            let (shard, nic) = engine.networks.anywhere(vni, &gid)?;
            Some((shard, nic, sum))
        };
        self.backing.talks.take(spent).filter_map(known).collect()
    }

    /// Whether it may move, as far as it knows itself.
    pub(crate) fn may_move(&self) -> bool {
        self.backing.mirror.is_idle() && !self.backing.goes_on && self.life != NicState::Idle
    }
}

impl Engine {
    /// The number of a new NIC, where shards share them.
    pub(crate) fn new_number(&self) -> Option<NicId> {
        self.networks.enter()
    }

    /// A NIC is gone.
    pub(crate) fn free_number(&mut self, id: NicId) {
        self.owners.remove(&id);
        self.networks.vacate(id);
    }

    /// The wait of a queue pair is over whose NIC has moved.
    pub(super) fn wake_elsewhere(&mut self, nic: NicId, qpn: u32) {
        let seat = self.ways.bus_ref().and_then(|bus| bus.seat(nic));
        self.ways.follow(seat, Parcel::WakeNic { nic, qpn });
    }

    /// A NIC has come from another shard.
    pub(crate) fn take_in(&mut self, nic: &SoftNic) {
        self.networks.take_in(nic);
        self.take_early();
    }

    /// What waited for a NIC that is here now, or that goes on.
    pub(super) fn take_early(&mut self) {
        let early = self.ways.bus().map(crate::link::Bus::take_early);
        early.into_iter().flatten().for_each(|parcel| self.deal_with(parcel));
    }
}

impl<N: Nics> Execution<'_, N> {
    /// Has a NIC leave for another shard, if it may: nothing here is its own any more afterwards,
    /// but the NIC.
    pub(crate) fn send_off(&mut self, id: NicId, to: usize) -> bool {
        self.give_back(id);
        if self.waits_for_owners(id) {
            return false;
        }
        let Self { nics, engine, .. } = self;
        let Some(nic) = nics.nic(id).filter(|nic| nic.may_move()) else { return false };
        engine.networks.send_off(nic, to);
        true
    }

    /// Whether a NIC has asked an owner on this shard, or has what it answered and not gone on yet;
    /// or that takes too long to find out.
    fn waits_for_owners(&mut self, id: NicId) -> bool {
        let Self { nics, engine, .. } = self;
        engine
            .owners
            .retain(|owner| nics.seen(*owner).is_some_and(|nic| !nic.backing.mirror.is_idle()));
        if engine.owners.is_empty() {
            return false;
        }
        let Some(nic) = nics.seen(id) else { return false };
        let mut left = JOBS;
        for qp in nic.qps.values() {
            left -= 1;
            if left == 0 || qp.send.as_ref().is_some_and(|send| send.has_asked()) {
                return true;
            }
        }
        for owner in &engine.owners {
            let Some(nic) = nics.seen(*owner) else { continue };
            for waiter in nic.backing.mirror.open() {
                left -= 1;
                if left == 0 || waiter.who == Requester::Here(id) {
                    return true;
                }
            }
        }
        false
    }
}
