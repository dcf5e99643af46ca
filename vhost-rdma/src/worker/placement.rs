//! Which worker a network lives on.
//!
//! All NICs of a network share a worker for as long as the network has any; a new network goes to
//! the worker with the fewest NICs.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy)]
struct Home {
    worker: usize,
    nics: usize,
}

/// The networks that have NICs, and where.
#[derive(Debug)]
pub struct Placement {
    homes: BTreeMap<u32, Home>,
    load: Vec<usize>,
}

impl Placement {
    /// Nothing placed on `workers` workers yet.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self { homes: BTreeMap::new(), load: vec![0; workers.max(1)] }
    }

    /// Counts one more NIC of network `vni` and returns its worker.
    pub fn add(&mut self, vni: u32) -> usize {
        let lightest =
            self.load.iter().enumerate().min_by_key(|(_, load)| **load).map_or(0, |(i, _)| i);
        let home = self.homes.entry(vni).or_insert(Home { worker: lightest, nics: 0 });
        home.nics += 1;
        if let Some(load) = self.load.get_mut(home.worker) {
            *load += 1;
        }
        home.worker
    }

    /// Counts one NIC of network `vni` less.
    pub fn remove(&mut self, vni: u32) {
        let Some(home) = self.homes.get_mut(&vni) else { return };
        home.nics -= 1;
        let Home { worker, nics } = *home;
        if let Some(load) = self.load.get_mut(worker) {
            *load -= 1;
        }
        if nics == 0 {
            self.homes.remove(&vni);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_stays_on_its_worker() {
        let mut placement = Placement::new(2);
        assert_eq!(placement.add(7), 0);
        assert_eq!(placement.add(8), 1);
        assert_eq!(placement.add(8), 1);
        assert_eq!(placement.add(8), 1);
        assert_eq!(placement.add(7), 0, "however unequal the load becomes");
        assert_eq!(placement.add(9), 0, "a new network goes to the lighter one");
    }

    #[test]
    fn an_empty_network_is_forgotten() {
        let mut placement = Placement::new(2);
        assert_eq!(placement.add(7), 0);
        placement.remove(7);
        placement.remove(7);
        assert_eq!(placement.add(1), 0);
        assert_eq!(placement.add(7), 1);
    }
}
