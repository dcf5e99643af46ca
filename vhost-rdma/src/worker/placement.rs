//! Which worker a NIC lives on.
//!
//! All NICs of a network share a worker for as long as the network has any, and a new network goes
//! to the worker with the fewest NICs: then no byte has to cross. Where workers are one network's
//! alone, its NICs are spread over them instead, and requests cross by `link::bus`.

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
    spread: bool,
}

impl Placement {
    /// Nothing placed on `workers` workers yet; `spread`: over all of them, whatever the network.
    #[must_use]
    pub fn new(workers: usize, spread: bool) -> Self {
        Self { homes: BTreeMap::new(), load: vec![0; workers.max(1)], spread }
    }

    /// Counts one more NIC of network `vni` and returns its worker.
    pub fn add(&mut self, vni: u32) -> usize {
        let lightest =
            self.load.iter().enumerate().min_by_key(|(_, load)| **load).map_or(0, |(i, _)| i);
        let home = self.homes.entry(vni).or_insert(Home { worker: lightest, nics: 0 });
        home.nics += 1;
        let worker = if self.spread { lightest } else { home.worker };
        if let Some(load) = self.load.get_mut(worker) {
            *load += 1;
        }
        worker
    }

    /// Counts one NIC of network `vni` less on its worker.
    pub fn remove(&mut self, vni: u32, worker: usize) {
        let Some(home) = self.homes.get_mut(&vni) else { return };
        home.nics -= 1;
        if home.nics == 0 {
            self.homes.remove(&vni);
        }
        if let Some(load) = self.load.get_mut(worker) {
            *load = load.saturating_sub(1);
        }
    }

    /// A NIC has moved.
    pub fn change(&mut self, from: usize, to: usize) {
        if let Some(load) = self.load.get_mut(from) {
            *load = load.saturating_sub(1);
        }
        if let Some(load) = self.load.get_mut(to) {
            *load += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_stays_on_its_worker() {
        let mut placement = Placement::new(2, false);
        assert_eq!(placement.add(7), 0);
        assert_eq!(placement.add(8), 1);
        assert_eq!(placement.add(8), 1);
        assert_eq!(placement.add(8), 1);
        assert_eq!(placement.add(7), 0, "however unequal the load becomes");
        assert_eq!(placement.add(9), 0, "a new network goes to the lighter one");
    }

    #[test]
    fn an_empty_network_is_forgotten() {
        let mut placement = Placement::new(2, false);
        assert_eq!(placement.add(7), 0);
        placement.remove(7, 0);
        placement.remove(7, 0);
        assert_eq!(placement.add(1), 0);
        assert_eq!(placement.add(7), 1);
    }
    #[test]
    fn a_network_that_is_alone_is_spread() {
        let mut placement = Placement::new(2, true);
        assert_eq!([placement.add(7), placement.add(7), placement.add(7)], [0, 1, 0]);
        placement.remove(7, 0);
        placement.remove(7, 0);
        assert_eq!([placement.add(7), placement.add(7)], [0, 0], "where there is room");
        placement.change(0, 1);
        assert_eq!([placement.add(7), placement.add(7)], [0, 0], "one has moved");
    }
}
