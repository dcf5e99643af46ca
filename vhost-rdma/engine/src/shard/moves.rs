//! NICs that move between shards: the shard's part, which is to give one up and to take one in,
//! and to say what each costs.
//!
//! Who moves a NIC is outside, and so is the way between (`dataplane/balance.rs`). Here a NIC is
//! whole before and after: nothing of it is begun, its charges go to the meter of the shard that
//! it is on, and what was held against it for slow memory goes along (`strain`).

use super::on_shard::AnyNic;
use super::strain::Strain;
use super::{Nanos, NicId, Shard};
use crate::nic::on_shard::OnShard as _;
use crate::soft::SoftNic;

/// A NIC between two shards.
#[derive(Debug)]
pub struct MovedNic {
    id: NicId,
    nic: Box<SoftNic>,
    strain: Strain,
}

/// What a NIC cost its shard since that was asked last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicLoad {
    /// Which.
    pub id: NicId,
    /// Time that it was served.
    pub spent: Nanos,
    /// Whether it may move.
    pub moves: bool,
    /// Those that it had most to do with: the shard and number of each, and how much.
    pub talks: Vec<(usize, NicId, Nanos)>,
}

impl Shard {
    /// Takes a NIC out, to be put in shard `to` of this process at once. `None`: it is none that
    /// may move, and nothing has changed.
    #[must_use]
    pub fn take_nic(&mut self, id: NicId, to: usize) -> Option<MovedNic> {
        if !self.soft().send_off(id, to) {
            return None;
        }
        let nic = match self.slots.remove(id)? {
            AnyNic::Own(nic) => nic,
            // It has nothing of the engine's, which let it go.
            AnyNic::Provided(nic) => {
                self.slots.put(id, AnyNic::Provided(nic));
                return None;
            }
        };
        Some(MovedNic { id, nic, strain: self.strains.take(id.0 as usize) })
    }

    /// Takes in a NIC that another shard gave up.
    pub fn put_nic(&mut self, moved: MovedNic) {
        let MovedNic { id, mut nic, strain } = moved;
        nic.meter = self.meter.clone();
        // The look at memory that vanished may have passed by its number here, and not yet there.
        nic.memory_vanished();
        self.strains.put(id.0 as usize, strain);
        self.rounds.forget_spent(id);
        self.slots.put(id, AnyNic::Own(nic));
        if let Some(AnyNic::Own(nic)) = self.slots.any_mut(id) {
            self.engine.take_in(nic);
        }
    }

    /// What each NIC cost since this was asked last; those that cost nothing are left out.
    pub fn take_loads(&mut self) -> Vec<NicLoad> {
        let Self { slots, rounds, engine, .. } = self;
        let mut loads = Vec::new();
        for index in 0..slots.len() {
            let Ok(id) = u32::try_from(index).map(NicId) else { break };
            let spent = rounds.take_spent(id);
            if spent == 0 {
                continue;
            }
            if let Some(AnyNic::Own(nic)) = slots.quietly(id) {
                let (moves, talks) = (nic.may_move(), nic.take_talks(engine, spent));
                loads.push(NicLoad { id, spent, moves, talks });
            }
        }
        loads
    }
}
