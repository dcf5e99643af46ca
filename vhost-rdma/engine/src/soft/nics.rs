//! The NICs of a shard, as it lends them to the engine for one call.

use super::nic::SoftNic;
use crate::link::NicId;
use crate::nic::Nanos;
use crate::nic::budget::Budget;

/// The NICs of a shard, as far as the engine knows of them.
pub(crate) trait Nics {
    /// A software NIC, which may be given work.
    fn nic(&mut self, id: NicId) -> Option<&mut SoftNic>;

    /// Two different software NICs, which may be given work.
    fn both(&mut self, one: NicId, other: NicId) -> Option<(&mut SoftNic, &mut SoftNic)>;

    /// A software NIC, to look at.
    fn seen(&self, id: NicId) -> Option<&SoftNic>;

    /// Looks at the doorbells of all NICs, as far as there is time; what arrives at one until its
    /// next round is stamped with `now`. `serving` names the NIC that is looked at, for the blame
    /// if that panics, and is afterwards what it was.
    fn scan(&mut self, now: Nanos, budget: &mut Budget, serving: &mut Option<NicId>);

    /// Counts what was done for a NIC outside of its turn.
    fn account(&mut self, id: NicId, service: Nanos);

    /// Counts what was done for a NIC because its peers on other shards asked: not held against it,
    /// as it is not by peers of this shard.
    fn count(&mut self, id: NicId, spent: Nanos);

    /// Whether nobody but the NIC that is being served is known to have work.
    fn is_lone(&self) -> bool;
}
