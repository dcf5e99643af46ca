//! Which ranges of a network somebody has: blocks of whatever sizes, addresses of named NICs.
//!
//! Names of blocks alone do not keep two of them apart: a range that grows, or a network that was
//! made with another block size, has blocks that overlap and are called otherwise.

use std::collections::BTreeMap;

use vhost_rdma_cluster_api::Cidr;

/// Ranges by family and length, so that a look for one that overlaps costs as much as there are
/// lengths; how many have it.
#[derive(Debug, Clone, Default)]
pub(super) struct Taken(BTreeMap<(bool, u8), BTreeMap<Cidr, u32>>);

impl Taken {
    fn set(&mut self, cidr: Cidr, present: bool) {
        let key = (cidr.first().is_ipv4(), cidr.length());
        let these = self.0.entry(key).or_default();
        let count = these.entry(cidr).or_default();
        *count = if present { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            these.remove(&cidr);
        }
        if these.is_empty() {
            self.0.remove(&key);
        }
    }

    /// One that overlaps with `cidr`; the largest.
    pub(super) fn overlapping(&self, cidr: &Cidr) -> Option<Cidr> {
        let v4 = cidr.first().is_ipv4();
        self.0.range((v4, 0)..=(v4, u8::MAX)).find_map(|((_, length), these)| {
            if *length < cidr.length() {
                let around = Cidr::holding(cidr.first(), *length)?;
                return these.contains_key(&around).then_some(around);
            }
            these.range(cidr..).next().map(|(found, _)| *found).filter(|found| cidr.covers(found))
        })
    }

    /// How many blocks of `size` addresses they touch at most.
    pub(super) fn touching(&self, v4: bool, size: u32) -> u64 {
        let of_family = self.0.range((v4, 0)..=(v4, u8::MAX));
        let each = of_family.filter_map(|(_, these)| {
            let (one, _) = these.first_key_value()?;
            Some(one.blocks(size).saturating_mul(u64::try_from(these.len()).unwrap_or(u64::MAX)))
        });
        each.fold(0, u64::saturating_add)
    }

    /// How many of them lie in `cidr`.
    pub(super) fn inside(&self, cidr: &Cidr) -> u64 {
        let v4 = cidr.first().is_ipv4();
        let of_family = self.0.range((v4, cidr.length())..=(v4, u8::MAX));
        let counts = of_family.map(|(_, these)| {
            let inside = these.range(cidr..).take_while(|(found, _)| cidr.covers(found));
            u64::try_from(inside.count()).unwrap_or(u64::MAX)
        });
        counts.fold(0, u64::saturating_add)
    }
}

/// Those of each network.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranges(BTreeMap<String, Taken>);

impl Ranges {
    pub(super) fn set(&mut self, network: &str, cidr: Cidr, present: bool) {
        let taken = self.0.entry(network.to_owned()).or_default();
        taken.set(cidr, present);
        if taken.0.is_empty() {
            self.0.remove(network);
        }
    }

    pub(super) fn of(&self, network: &str) -> Option<&Taken> {
        self.0.get(network)
    }

    /// One of a network's that overlaps with `cidr`.
    pub(super) fn overlapping(&self, network: &str, cidr: &Cidr) -> Option<Cidr> {
        self.of(network)?.overlapping(cidr)
    }
}
