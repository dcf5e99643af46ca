//! The engine's part of a NIC: its keys, its groups, whom it wakes, and its turns in a round.

use rustc_hash::FxHashMap;

use super::Nanos;
use super::jobs::Jobs;
use super::mr::MrTable;
use super::pace::Pace;
use super::qp::Inbound;
use super::talks::Talks;
use super::waiter::Waiter;
use super::work::SoftWork;
use crate::link::{Gid, NicId};
use crate::nic::budget::Meter;
use crate::nic::qp::SendQueue;
use crate::nic::receive::ReceiveRing;
use crate::nic::roster::Walk;
use crate::nic::{self, NicSettings, Parts, Port};
pub(super) use crate::nic::{KERNEL, NicState};

/// QPs of one NIC that run in one round.
const ROUND_QPS: u32 = 16;

/// A NIC whose work requests the daemon executes.
pub(crate) type SoftNic = nic::Nic<Soft>;
pub(super) type Pd = nic::objects::Pd<()>;
pub(super) type Ah = nic::objects::Ah<()>;
/// A shared receive queue that the daemon takes receives from.
pub(super) type Srq = nic::objects::Srq<Soft>;
/// A queue pair whose work requests the daemon executes.
pub(crate) type Qp = nic::objects::Qp<Soft>;
/// The groups of one NIC and their QPs.
type Groups = FxHashMap<Gid, Vec<u32>>;

/// What the engine keeps for a NIC.
#[derive(Debug)]
pub(crate) struct Soft {
    pub(super) id: NicId,
    pub(super) mrs: MrTable,
    pub(super) groups: Groups,
    /// Groups that no QP is in any more and that the network still lists this NIC for.
    pub(super) left: Vec<Gid>,
    /// QPNs whose QPs are gone and that the shard still has for its own.
    pub(super) freed: Vec<u32>,
    /// Requesters elsewhere to try again, because this NIC posted a receive or became reachable.
    pub(super) wakes: Vec<Waiter>,
    /// QPs that may still run in this round.
    pub(super) turns: u32,
    /// It has rest from slow memory: its commands execute no work requests.
    pub(crate) rests: bool,
    /// How much it moves in one piece.
    pub(crate) pace: Pace,
    /// What the owners of mirrored regions are asked to do.
    pub(super) mirror: Jobs,
    /// It was loaded, and ran before it was saved.
    pub(super) goes_on: bool,
    /// Whom it has most to do with.
    pub(super) talks: Talks,
}

impl Soft {
    pub(super) fn new(id: NicId) -> Self {
        Self {
            id,
            mrs: MrTable::default(),
            groups: Groups::default(),
            left: Vec::new(),
            freed: Vec::new(),
            wakes: Vec::new(),
            turns: 0,
            rests: false,
            pace: Pace::default(),
            mirror: Jobs::of(id),
            goes_on: false,
            talks: Talks::default(),
        }
    }
}

impl Parts for Soft {
    type Pd = ();
    type Ah = ();
    /// Requesters that found no receive.
    type Srq = Vec<Waiter>;
    type Qp = Inbound;
    type Send = Box<SendQueue>;
    type Receive = ReceiveRing;
    type Address = Gid;
    type Work = SoftWork;
    type Ending = ();
    type Keys = Walk;
}

impl SoftNic {
    pub(crate) fn new(id: NicId, settings: NicSettings, port: Box<dyn Port>, meter: Meter) -> Self {
        Self::idle(Soft::new(id), settings, port, meter)
    }

    /// The maps that its regions have, each once.
    #[cfg(test)]
    pub(crate) fn region_maps(&self) -> usize {
        let maps = self.backing.mrs.by_number.values().filter_map(|keyed| match keyed {
            super::mr::Keyed::Region(mr) => mr.map.as_ref().map(std::sync::Arc::as_ptr),
            super::mr::Keyed::Window(_) => None,
        });
        maps.collect::<std::collections::HashSet<_>>().len()
    }

    /// The address at an index of the port's table.
    pub(super) fn gid(&self, index: u16) -> Option<Gid> {
        self.gids.get(usize::from(index)).copied().flatten()
    }

    /// Whether there is anything for it to do in this round.
    #[inline]
    pub(crate) fn begin_round(&mut self, now: Nanos) -> bool {
        self.backing.turns = 0;
        self.now = now;
        if self.life == NicState::Ready {
            let waiting = u32::try_from(self.run.len()).unwrap_or(u32::MAX);
            self.backing.turns = waiting.min(ROUND_QPS);
        }
        self.backing.turns > 0 || self.has_other_work(now)
    }

    /// Another turn in this round, if a QP has something to do.
    #[inline]
    pub(crate) fn take_turn(&mut self) -> bool {
        let turns = u32::from(self.life == NicState::Ready && !self.run.is_empty());
        self.backing.turns = turns;
        turns > 0
    }

    /// Deadlines that have come, and chores. Of a NIC that stands still none comes: its memory may
    /// be another driver's by now, and its waits begin anew (docs/virtio-rdma.md §5.3).
    #[inline]
    pub(super) fn has_other_work(&self, now: Nanos) -> bool {
        self.life == NicState::Ready && (self.timers.is_due(now) || !self.chores.is_empty())
    }
}
