//! Numbers of objects that contexts own: each context's own can be found without a look at all.
//!
//! A NIC of many processes has as many regions as they like, and the end of one of them is to cost
//! what that one has. So beside the [`Roster`] of all, the numbers of each context are a list, each
//! of them with its neighbours.

use rustc_hash::FxHashMap;

use super::roster::Roster;
use super::shards::Shards;

/// A number's place in the list of its context.
#[derive(Clone, Copy, Debug)]
struct Links {
    ctx: u32,
    before: Option<u32>,
    behind: Option<u32>,
}

/// Bytes that a number takes beside its place in the roster.
pub const LINKS: usize = size_of::<Links>() + 8;

/// See the module.
#[derive(Debug, Default)]
pub struct OwnedNumbers {
    all: Roster,
    links: Shards<Links>,
    /// The head of each list.
    heads: FxHashMap<u32, u32>,
}

impl OwnedNumbers {
    /// All numbers.
    pub const fn all(&self) -> &Roster {
        &self.all
    }

    /// One of a context's numbers.
    pub fn first_of(&self, ctx: u32) -> Option<u32> {
        self.heads.get(&ctx).copied()
    }

    /// Adds a number, which is in no list.
    pub fn insert(&mut self, number: u32, ctx: u32) {
        self.remove(number);
        let behind = self.heads.insert(ctx, number);
        if let Some(old) = behind.and_then(|old| self.links.get_mut(&old)) {
            old.before = Some(number);
        }
        self.links.insert(number, Links { ctx, before: None, behind });
        self.all.insert(number);
    }

    /// Takes a number out.
    pub fn remove(&mut self, number: u32) {
        let Some(Links { ctx, before, behind }) = self.links.remove(&number) else { return };
        if let Some(next) = behind.and_then(|next| self.links.get_mut(&next)) {
            next.before = before;
        }
        match (before.and_then(|last| self.links.get_mut(&last)), behind) {
            (Some(last), _) => last.behind = behind,
            (None, Some(next)) => _ = self.heads.insert(ctx, next),
            (None, None) => _ = self.heads.remove(&ctx),
        }
        self.all.remove(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_context_finds_its_own_until_they_are_gone() {
        let mut numbers = OwnedNumbers::default();
        (0..3000).for_each(|n| numbers.insert(n, n % 3));
        // The first of a list, its last, and some between.
        for gone in [2997, 0, 3, 1500, 1503] {
            numbers.remove(gone);
            numbers.remove(gone);
        }
        assert_eq!((numbers.all().len(), numbers.first_of(7)), (2995, None));
        let mut found = Vec::new();
        while let Some(n) = numbers.first_of(0) {
            numbers.remove(n);
            found.push(n);
        }
        found.sort_unstable();
        let own = (0..3000).step_by(3).filter(|n| ![2997, 0, 3, 1500, 1503].contains(n));
        assert_eq!(found, own.collect::<Vec<u32>>());
        assert_eq!((numbers.all().len(), numbers.first_of(1)), (2000, Some(2998)));
    }
}
