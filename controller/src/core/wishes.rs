//! Whose an identity is, of those that want it.
//!
//! A MAC address, or an address, is one NIC's in its network. Of several that want it, the first
//! has it: by rank, which keeps it with whoever has it, and then by age.

use std::collections::{BTreeMap, BTreeSet};

/// Namespace and name of a NIC.
type Who = (String, String);
/// A network, and a MAC address or an address in it.
type Identity = (String, String);

/// How much a NIC that wants an identity is heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// It may be, and a pod has it.
    Used,
    /// It may be, and was accepted.
    Accepted,
    /// It may be no longer, but a pod has it.
    Left,
    /// It may be, and was not accepted so far.
    New,
}

/// What a NIC wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) rank: Rank,
    /// When it was made.
    pub(super) made: String,
    pub(super) identities: BTreeSet<Identity>,
}

/// What all want.
#[derive(Debug, Clone, Default)]
pub(super) struct Wishes {
    of: BTreeMap<Who, Wish>,
    identities: BTreeMap<Identity, BTreeSet<(Rank, String, Who)>>,
}

impl Wishes {
    /// What a NIC wants, in the place of what it wanted. Those that got an identity by it or lost
    /// one.
    pub(super) fn set(&mut self, who: &Who, new: Option<&Wish>) -> BTreeSet<Who> {
        let old = match new {
            Some(wish) => self.of.insert(who.clone(), wish.clone()),
            None => self.of.remove(who),
        };
        if old.as_ref() == new {
            return BTreeSet::new();
        }
        let both = || old.iter().chain(new).flat_map(|wish| &wish.identities);
        let before: Vec<_> = both().map(|one| self.first_with(one).cloned()).collect();
        for (wish, present) in [(old.as_ref(), false), (new, true)] {
            let Some(wish) = wish else { continue };
            for identity in &wish.identities {
                let place = (wish.rank, wish.made.clone(), who.clone());
                let all = self.identities.entry(identity.clone()).or_default();
                if present {
                    all.insert(place)
                } else {
                    all.remove(&place)
                };
                if all.is_empty() {
                    self.identities.remove(identity);
                }
            }
        }
        let after = both().map(|one| self.first_with(one).cloned());
        let changed = before.into_iter().zip(after).filter(|(before, after)| before != after);
        changed.flat_map(|(before, after)| [before, after]).flatten().collect()
    }

    /// Whose an identity is.
    pub(super) fn first_with(&self, identity: &Identity) -> Option<&Who> {
        self.identities.get(identity)?.first().map(|(_, _, who)| who)
    }
}
