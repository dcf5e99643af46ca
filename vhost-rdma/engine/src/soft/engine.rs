//! What the software NICs of a shard have in common, and how they are reached while one of them
//! runs.
//!
//! A work request concerns two NICs, and some commands concern the whole network. So neither can be
//! carried out on one `&mut SoftNic`: an [`Execution`] has all NICs of the shard, by number, and
//! what they share. Where NICs are kept, which of them are visited and whose turn it is are the
//! shard's matter; it lends them for one call, by [`Nics`].

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::DeferredDrop;
use super::network::Networks;
use super::nic::{KERNEL, SoftNic};
use super::nics::Nics;
use super::numbers::{Qpns, Random};
use crate::link::{Link as _, NicId, Ways};
use crate::memory::Segment;
use crate::nic::budget::{Budget, Meter, cost};
use crate::nic::roster::{Roster, Walk};
use crate::nic::{Nanos, NicSettings};
use crate::qpn::Pool;

/// What the software NICs of a shard share.
pub(crate) struct Engine {
    pub(super) networks: Networks,
    pub(super) qpns: Qpns,
    pub(super) random: Box<dyn Random>,
    pub(super) ways: Ways,
    /// The requester's segment list, kept for its allocation.
    pub(super) segments: Vec<Segment>,
    /// NICs and QPs whose wait is over.
    pub(super) wakes: VecDeque<(NicId, u32)>,
    /// QPNs of NICs that were reset, on their way back.
    pub(super) freed: VecDeque<(Roster, Walk)>,
    /// Numbers that NICs had in an earlier process, until they run.
    pub(super) former: FxHashMap<NicId, NicId>,
    pub(super) deferred_drops: Vec<DeferredDrop>,
    /// Whose parcels were served, and what they were charged; kept for its allocation.
    pub(super) carried: Vec<(NicId, Nanos)>,
    /// NICs with owners of mirrored memory, and some that had.
    pub(super) owners: FxHashSet<NicId>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("networks", &self.networks).finish_non_exhaustive()
    }
}

/// The engine at work on the NICs of a shard.
pub(crate) struct Execution<'a, N> {
    pub(crate) nics: N,
    pub(crate) engine: &'a mut Engine,
    pub(crate) meter: &'a Meter,
    /// The NIC that is being served: whom to blame for a panic.
    pub(crate) serving: &'a mut Option<NicId>,
}

impl Engine {
    pub(crate) fn new(random: Box<dyn Random>) -> Self {
        Self {
            networks: Networks::default(),
            qpns: Qpns::default(),
            random,
            ways: Ways::default(),
            segments: Vec::new(),
            wakes: VecDeque::new(),
            freed: VecDeque::new(),
            former: FxHashMap::default(),
            deferred_drops: Vec::new(),
            carried: Vec::new(),
            owners: FxHashSet::default(),
        }
    }

    /// Gives it the QPNs of its process. Before there are NICs.
    pub(crate) fn set_qpns(&mut self, pool: Arc<Pool>) {
        self.qpns = Qpns::of(pool);
    }

    /// When the link is to be asked although nothing comes.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.ways.deadline()
    }

    /// Whether there is something to do that is no NIC's own.
    pub(crate) fn has_work(&self) -> bool {
        !self.freed.is_empty() || !self.wakes.is_empty() || self.has_parcels()
    }

    /// Groups that any NIC is in.
    #[cfg(test)]
    pub(crate) fn group_count(&self) -> usize {
        self.networks.group_count()
    }

    /// What is left of NICs that were reset.
    pub(crate) fn take_deferred_drops(&mut self) -> Vec<DeferredDrop> {
        std::mem::take(&mut self.deferred_drops)
    }

    /// QPNs of NICs that were reset may rest now; true if there were any.
    pub(crate) fn free_numbers(&mut self, meter: &Meter, budget: &mut Budget) -> bool {
        let Some((numbers, walk)) = self.freed.front_mut() else { return false };
        while let Some(qpn) = walk.next(numbers) {
            if qpn != virtio_rdma_abi::GSI_QPN {
                self.qpns.free(qpn);
            }
            meter.charge(cost::VISIT);
            if budget.is_over(meter) {
                return true;
            }
        }
        let gone = self.freed.pop_front();
        self.deferred_drops.extend(gone.map(DeferredDrop::new));
        true
    }
}

impl<N: Nics> Execution<'_, N> {
    #[inline]
    pub(super) fn nic_mut(&mut self, id: NicId) -> Option<&mut SoftNic> {
        self.nics.nic(id)
    }

    /// A NIC with what commands of it may change around it.
    pub(super) fn parts(
        &mut self,
        id: NicId,
    ) -> Option<(&mut SoftNic, &mut Networks, &mut dyn Random)> {
        let Self { nics, engine: Engine { networks, random, .. }, .. } = self;
        Some((nics.nic(id)?, networks, random.as_mut()))
    }

    /// Takes over changed limits and addresses. Existing objects stay; a GID that is no longer
    /// given is withdrawn.
    pub(crate) fn update(&mut self, id: NicId, settings: NicSettings) {
        let Some((nic, networks, _)) = self.parts(id) else { return };
        let vni = nic.settings.vni;
        nic.settings = NicSettings { vni, ..settings };
        for index in 0..nic.gids.len() {
            if let Some(gid) = nic.gids[index].filter(|gid| !nic.may_use(gid)) {
                nic.gids[index] = None;
                networks.release(vni, gid, id);
                nic.raise(virtio_rdma_abi::event::GID_CHANGE, 1, KERNEL);
            }
        }
    }

    /// Destroys every object of a NIC and forgets every guest address.
    pub(crate) fn reset(&mut self, id: NicId) {
        self.give_back(id);
        let Some((nic, networks, _)) = self.parts(id) else { return };
        let vni = nic.settings.vni;
        for gid in nic.gids.iter().flatten() {
            networks.release(vni, *gid, id);
        }
        for mgid in nic.backing.groups.keys() {
            networks.leave(vni, *mgid, id);
        }
        let mut old = nic.clear();
        let numbers = std::mem::take(&mut old.qp_numbers);
        let walk = numbers.walk();
        self.engine.freed.push_back((numbers, walk));
        self.engine.deferred_drops.push(DeferredDrop::new(old));
    }
}
