//! The NICs of a shard by number, and which of them its rounds visit.
//!
//! A round costs what its NICs have to do, and not how many there are: a NIC that had nothing to do
//! for a while is *parked* ([`super::parking`]), and rounds pass it by. Whoever changes a NIC
//! reaches it by its number, and that alone makes it *awake* again ([`Slots::own_mut`]): nobody who
//! gives a NIC work has to think of it. Only looks from outside ([`Slots::get`]) leave it where it
//! is.
//!
//! Nothing here knows what a NIC's work is.

use std::collections::BTreeSet;

use super::on_shard::AnyNic;
use crate::link::NicId;
use crate::nic::Nanos;
use crate::soft::SoftNic;

/// Whether rounds visit a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visit {
    /// They do.
    Awake,
    /// They do, while its doorbells are looked at for the last time.
    Parking,
    /// They do not. Its guest kicks.
    Parked,
    /// Nobody is there.
    Gone,
}

/// One number.
#[derive(Debug)]
struct Slot {
    nic: Option<AnyNic>,
    visit: Visit,
    /// The round, and its time, in which it last had anything to do.
    busy: (u64, Nanos),
    /// Its next deadline, if it is parked.
    deadline: Option<Nanos>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Slots {
    all: Vec<Slot>,
    /// Those that rounds visit, in no order; also numbers that became free while they were here.
    awake: Vec<u32>,
    /// How many are parked.
    parked: usize,
    /// Deadlines of those that are parked.
    deadlines: BTreeSet<(Nanos, u32)>,
    /// The one that is [`Visit::Parking`].
    parking: Option<u32>,
    /// Whose turn it is to be parked, of those that are awake.
    turn: usize,
    round: (u64, Nanos),
    /// A NIC became awake since [`Self::forget_roused`].
    roused: bool,
}

impl Slots {
    /// A round begins.
    #[inline]
    pub(super) const fn begin_round(&mut self, now: Nanos) {
        self.round = (self.round.0.wrapping_add(1), now);
    }

    /// Numbers that were ever given.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// A number that no NIC here has.
    pub(super) fn free_number(&self) -> NicId {
        let free = self.all.iter().position(|slot| slot.nic.is_none());
        // Four thousand million NICs do not fit in memory.
        NicId(u32::try_from(free.unwrap_or(self.all.len())).unwrap_or(u32::MAX))
    }

    /// Puts a NIC in; it is awake.
    pub(super) fn put(&mut self, id: NicId, nic: AnyNic) {
        let index = id.0 as usize;
        let round = self.round;
        while self.all.len() <= index {
            self.all.push(Slot { nic: None, visit: Visit::Gone, busy: round, deadline: None });
        }
        self.all[index].nic = Some(nic);
        self.rouse(id.0);
    }

    /// Takes a NIC out.
    pub(super) fn remove(&mut self, id: NicId) -> Option<AnyNic> {
        // What is awake is left where it is, until its turn to be parked.
        self.any_mut(id)?;
        self.all.get_mut(id.0 as usize)?.nic.take()
    }

    /// A NIC as it is seen from outside.
    pub(super) fn get(&self, id: NicId) -> Option<&AnyNic> {
        self.all.get(id.0 as usize)?.nic.as_ref()
    }

    /// A NIC that is looked at and given no work: it stays parked if it is.
    pub(super) fn quietly(&mut self, id: NicId) -> Option<&mut AnyNic> {
        self.all.get_mut(id.0 as usize)?.nic.as_mut()
    }

    /// A NIC, which is awake from now on.
    #[inline]
    pub(super) fn any_mut(&mut self, id: NicId) -> Option<&mut AnyNic> {
        let index = id.0 as usize;
        let slot = self.all.get(index)?;
        if slot.visit != Visit::Awake && slot.nic.is_some() {
            self.rouse(id.0);
        }
        self.all.get_mut(index)?.nic.as_mut()
    }

    /// A NIC of the engine's own, which is awake from now on.
    #[inline]
    pub(super) fn own_mut(&mut self, id: NicId) -> Option<&mut SoftNic> {
        match self.any_mut(id)? {
            AnyNic::Own(nic) => Some(nic),
            AnyNic::Provided(_) => None,
        }
    }

    /// Two different NICs of the engine's own, which are awake from now on.
    #[inline]
    pub(super) fn both(
        &mut self,
        one: NicId,
        other: NicId,
    ) -> Option<(&mut SoftNic, &mut SoftNic)> {
        let indices = [one.0 as usize, other.0 as usize];
        for id in [one, other] {
            if self.all.get(id.0 as usize)?.visit != Visit::Awake {
                self.any_mut(id)?;
            }
        }
        match self.all.get_disjoint_mut(indices).ok()? {
            [
                Slot { nic: Some(AnyNic::Own(one)), .. },
                Slot { nic: Some(AnyNic::Own(other)), .. },
            ] => Some((one, other)),
            _ => None,
        }
    }

    /// All NICs of the engine's own.
    #[cfg(test)]
    pub(super) fn own(&self) -> impl Iterator<Item = &SoftNic> {
        self.all.iter().filter_map(|slot| match &slot.nic {
            Some(AnyNic::Own(nic)) => Some(&**nic),
            _ => None,
        })
    }

    /// How many places [`Self::awake_at`] has.
    #[inline]
    pub(super) const fn awake(&self) -> usize {
        self.awake.len()
    }

    /// The NIC at a place among those that rounds visit, if it is still there.
    #[inline]
    pub(super) fn awake_at(&mut self, place: usize) -> Option<(NicId, &mut AnyNic)> {
        let number = *self.awake.get(place)?;
        let nic = self.all.get_mut(number as usize)?.nic.as_mut()?;
        Some((NicId(number), nic))
    }

    /// All that rounds visit.
    pub(super) fn each_awake(&mut self, mut f: impl FnMut(&mut AnyNic)) {
        for place in 0..self.awake.len() {
            if let Some((_, nic)) = self.awake_at(place) {
                f(nic);
            }
        }
    }

    /// Notes that a NIC had something to do in this round.
    #[inline]
    pub(super) fn note_busy(&mut self, id: NicId) {
        if let Some(slot) = self.all.get_mut(id.0 as usize) {
            slot.busy = self.round;
            if slot.visit == Visit::Parking {
                self.rouse(id.0);
            }
        }
    }

    /// Whether some NICs are parked, or about to be.
    #[inline]
    pub(super) const fn has_parked(&self) -> bool {
        self.parked > 0 || self.parking.is_some()
    }

    /// Whether a NIC became awake since [`Self::forget_roused`].
    pub(super) const fn has_roused(&self) -> bool {
        self.roused
    }

    pub(super) const fn forget_roused(&mut self) {
        self.roused = false;
    }

    /// A guest kicked. One whose NIC is awake need not have.
    pub(super) fn kicked(&mut self, id: NicId) {
        let slot = self.all.get(id.0 as usize);
        if slot.is_some_and(|slot| matches!(slot.visit, Visit::Parking | Visit::Parked)) {
            self.rouse(id.0);
        }
    }

    /// Has rounds visit a NIC.
    #[cold]
    fn rouse(&mut self, number: u32) {
        self.forget_deadline(number);
        let Some(slot) = self.all.get_mut(number as usize) else { return };
        match slot.visit {
            Visit::Awake | Visit::Parking => {}
            Visit::Gone => self.awake.push(number),
            Visit::Parked => {
                self.awake.push(number);
                self.parked -= 1;
            }
        }
        if self.parking == Some(number) {
            self.parking = None;
        }
        slot.visit = Visit::Awake;
        slot.busy = self.round;
        self.roused = true;
        if let Some(nic) = &slot.nic {
            nic.on_shard_ref().set_need_kick(false);
        }
        // What arrives for it in this round is stamped with the round's time.
        if let Some(AnyNic::Own(nic)) = &mut slot.nic {
            nic.now = nic.now.max(self.round.1);
        }
    }

    fn forget_deadline(&mut self, number: u32) {
        let deadline = self.all.get_mut(number as usize).and_then(|slot| slot.deadline.take());
        if let Some(deadline) = deadline {
            self.deadlines.remove(&(deadline, number));
        }
    }

    /// The NIC that is being parked.
    pub(super) const fn parking(&self) -> Option<u32> {
        self.parking
    }

    /// The next NIC that may be parked: one that had nothing to do for so many rounds and so long.
    /// A place that nobody is at any more is left on the way.
    pub(super) fn next_quiet(&mut self, (rounds, time): (u64, Nanos)) -> Option<NicId> {
        if self.turn >= self.awake.len() {
            self.turn = 0;
        }
        let number = *self.awake.get(self.turn)?;
        let slot = self.all.get_mut(number as usize)?;
        if slot.nic.is_none() {
            slot.visit = Visit::Gone;
            self.awake.swap_remove(self.turn);
            return None;
        }
        self.turn += 1;
        let (round, at) = slot.busy;
        let quiet = self.round.0.wrapping_sub(round) >= rounds
            && self.round.1.saturating_sub(at) >= time
            && matches!(slot.nic, Some(AnyNic::Own(_)));
        quiet.then_some(NicId(number))
    }

    /// Begins to park a NIC: its guest is asked to kick.
    pub(super) fn begin_parking(&mut self, id: NicId) {
        let Some(slot) = self.all.get_mut(id.0 as usize) else { return };
        if let (Visit::Awake, Some(nic)) = (slot.visit, &mut slot.nic) {
            slot.visit = Visit::Parking;
            self.parking = Some(id.0);
            nic.on_shard().set_need_kick(true);
            nic.on_shard().begin_look();
        }
    }

    /// Every doorbell of the NIC that is being parked was looked at: rounds pass it by.
    pub(super) fn park(&mut self) {
        let Some(number) = self.parking.take() else { return };
        let Some(slot) = self.all.get_mut(number as usize) else { return };
        let Some(place) = self.awake.iter().position(|&at| at == number) else { return };
        slot.visit = Visit::Parked;
        self.parked += 1;
        self.awake.swap_remove(place);
        slot.deadline = slot.nic.as_ref().and_then(|nic| nic.on_shard_ref().deadline());
        self.deadlines.extend(slot.deadline.map(|deadline| (deadline, number)));
    }

    /// The NIC that is being parked has something to do.
    pub(super) fn stay_awake(&mut self) {
        if let Some(number) = self.parking {
            self.rouse(number);
        }
    }

    /// The worker is about to sleep, for which every NIC is looked at anew.
    pub(super) fn forget_parking(&mut self) {
        let slot = self.parking.take().and_then(|number| self.all.get_mut(number as usize));
        if let Some(slot) = slot {
            slot.visit = Visit::Awake;
        }
    }

    /// The next deadline of all NICs.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        let parked = self.deadlines.first().map(|&(deadline, _)| deadline);
        let awake = self.awake.iter().filter_map(|&number| {
            self.all.get(number as usize)?.nic.as_ref()?.on_shard_ref().deadline()
        });
        awake.chain(parked).min()
    }

    /// Makes awake one whose deadline has come.
    pub(super) fn rouse_due(&mut self, now: Nanos) -> bool {
        match self.deadlines.first() {
            Some(&(deadline, number)) if deadline <= now => {
                self.rouse(number);
                true
            }
            _ => false,
        }
    }
}
