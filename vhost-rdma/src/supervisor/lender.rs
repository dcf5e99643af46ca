//! Which blocks of QPNs are whose ([`crate::qpn`]).
//!
//! A network has its blocks for as long as it has NICs, whatever becomes of its process: one that
//! comes after another finds the QPNs of those queue pairs that go on. After an upgrade they are
//! those that the daemon before had lent. A process that asks is not believed: a network gets no
//! more than its NICs could use, and never more than a part of what is left.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::qpn::{BLOCK, BLOCKS, Key};
use crate::random::qpn_key;

/// Blocks of a network that begins.
const FIRST: usize = 2;
/// A network gets at most this part of what is left, and one block at least.
const PART: usize = 8;

/// The blocks of one network as they are handed down.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Handed {
    key: Key,
    blocks: Vec<u32>,
}

#[derive(Debug, Default)]
struct State {
    /// Nobody's; the longest first.
    free: VecDeque<u32>,
    /// Handed down, by network; for the NICs that are still to come.
    kept: BTreeMap<String, Vec<u32>>,
}

/// The host's.
#[derive(Debug)]
pub(super) struct Lender {
    key: Key,
    state: Mutex<State>,
}

/// What one network has. It goes back when this is dropped.
#[derive(Debug)]
pub(super) struct Lease {
    lender: Arc<Lender>,
    blocks: Vec<u32>,
}

impl Lender {
    /// With what the daemon before had lent, by network.
    ///
    /// # Errors
    /// The host has no random numbers.
    pub(super) fn new(handed: BTreeMap<String, Handed>) -> std::io::Result<Arc<Self>> {
        let former = handed.values().next().map(|handed| handed.key);
        let key = former.map_or_else(qpn_key, Ok)?;
        let mut free = vec![true; BLOCKS as usize];
        let mut kept = BTreeMap::new();
        for (network, mut handed) in handed {
            handed.blocks.retain(|&block| {
                // One key, and each block once, or numbers would be two queue pairs'.
                let ours = free.get_mut(block as usize).is_some_and(std::mem::take);
                ours && handed.key == key
            });
            kept.insert(network, handed.blocks);
        }
        let free = (0..BLOCKS).filter(|&block| free[block as usize]).collect();
        Ok(Arc::new(Self { key, state: Mutex::new(State { free, kept }) }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host's secret, for its processes.
    pub(super) fn key(&self) -> Key {
        self.key
    }

    /// For a network that begins, or goes on.
    pub(super) fn lease(self: &Arc<Self>, network: &str) -> Lease {
        let kept = self.state().kept.remove(network);
        let mut lease = Lease { lender: self.clone(), blocks: kept.unwrap_or_default() };
        lease.extend_to(FIRST);
        lease
    }

    /// For a network whose QPNs are not ours.
    pub(super) fn nothing(self: &Arc<Self>) -> Lease {
        Lease { lender: self.clone(), blocks: Vec::new() }
    }

    /// Networks that have not come do not come any more.
    pub(super) fn close(&self) {
        let mut state = self.state();
        let kept = std::mem::take(&mut state.kept);
        state.free.extend(kept.into_values().flatten());
    }
}

impl Lease {
    pub(super) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// As it is handed down.
    pub(super) fn hand_down(&self) -> Handed {
        Handed { key: self.lender.key, blocks: self.blocks.clone() }
    }

    /// As many again, for NICs that may have so many QPs together; what is new.
    pub(super) fn extend(&mut self, qps: u64) -> Vec<u32> {
        // Half of it may rest, and a pool that is nearly full is slow.
        let most = qps.saturating_mul(2).div_ceil(BLOCK.into()) + FIRST as u64;
        // It may have begun when there were none.
        let wanted =
            (2 * self.blocks.len()).max(FIRST).min(usize::try_from(most).unwrap_or(usize::MAX));
        self.extend_to(wanted)
    }

    fn extend_to(&mut self, wanted: usize) -> Vec<u32> {
        let mut state = self.lender.state();
        let part = (state.free.len() / PART).max(1).min(state.free.len());
        let more = wanted.saturating_sub(self.blocks.len()).min(part);
        let new: Vec<u32> = state.free.drain(..more).collect();
        drop(state);
        self.blocks.extend(&new);
        new
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.lender.state().free.extend(self.blocks.drain(..));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn lender() -> Arc<Lender> {
        Lender::new(BTreeMap::new()).unwrap()
    }

    #[test]
    fn no_block_is_two_networks_and_what_goes_back_rests_longest() {
        let lender = lender();
        let mut leases: Vec<Lease> = (0..20).map(|_| lender.lease("net")).collect();
        (0..10).for_each(|_| leases.iter_mut().for_each(|lease| drop(lease.extend(1 << 20))));
        let all: Vec<u32> = leases.iter().flat_map(|lease| lease.blocks().to_vec()).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        let back = leases[3].blocks().to_vec();
        leases.remove(3);
        assert!(lender.state().free.iter().rev().zip(back.iter().rev()).all(|(a, b)| a == b));
    }

    #[test]
    fn a_process_gets_no_more_than_its_nics_could_use_nor_all_that_is_left() {
        let lender = lender();
        let mut small = lender.lease("small");
        (0..40).for_each(|_| drop(small.extend(100)));
        assert_eq!(small.blocks().len(), FIRST + 1);
        let mut greedy = lender.lease("greedy");
        (0..100).for_each(|_| drop(greedy.extend(u64::MAX)));
        assert!(greedy.blocks().len() > 1000);
        let others: Vec<Lease> = (0..30).map(|_| lender.lease("other")).collect();
        assert!(
            others.iter().all(|lease| !lease.blocks().is_empty() || lender.state().free.is_empty())
        );
    }

    #[test]
    fn who_began_when_there_were_none_gets_some_later() {
        let lender = lender();
        let all: Vec<u32> = lender.state().free.drain(..).collect();
        let mut late = lender.lease("late");
        assert!(late.blocks().is_empty() && late.extend(100).is_empty());
        lender.state().free.extend(all);
        assert_eq!(late.extend(100).len(), FIRST);
    }

    #[test]
    fn what_was_lent_goes_on_after_an_upgrade() {
        let before = lender();
        let mut lease = before.lease("blue");
        lease.extend(1 << 20);
        let other = before.lease("red");
        let handed = |lease: &Lease| {
            let bytes = serde_json::to_vec(&lease.hand_down()).unwrap();
            serde_json::from_slice::<Handed>(&bytes).unwrap()
        };
        let both = [("blue".to_owned(), handed(&lease)), ("red".to_owned(), handed(&other))];
        let after = Lender::new(both.into()).unwrap();
        assert!(after.key() == before.key());
        let new = after.lease("green");
        assert!(
            new.blocks().iter().all(|b| !lease.blocks().contains(b) && !other.blocks().contains(b))
        );
        let blue = after.lease("blue");
        assert_eq!(blue.blocks(), lease.blocks());
        let free = after.state().free.len();
        after.close();
        assert_eq!(after.state().free.len(), free + other.blocks().len(), "red does not come");
        // What is not to be believed: another key, a block twice, and one that is none.
        let strange = Handed { key: Key::default(), blocks: vec![9] };
        let twice = Handed { key: before.key(), blocks: vec![7, 7, BLOCKS] };
        let both = [("a".to_owned(), twice), ("b".to_owned(), strange)];
        let lender = Lender::new(both.into()).unwrap();
        assert_eq!(lender.state().kept["a"], [7]);
        assert_eq!(lender.state().kept["b"], [0; 0]);
    }
}
