//! `GetPreferredAllocation`: which of the free IDs are best given together.
//!
//! NICs of one container should be near each other: first on one NUMA node, then on one PF. Within
//! that the choice fills the group that has the least free IDs which still suffice, so that large
//! groups stay whole for those who need many. The kubelet may do otherwise.

use std::collections::BTreeMap;

use crate::pool::Pool;

/// `size` IDs out of `available` with all of `must`; fewer if there are not enough.
#[must_use]
pub fn preferred(pool: &Pool, available: &[String], must: &[String], size: usize) -> Vec<String> {
    let mut chosen: Vec<String> = Vec::new();
    for id in must {
        if chosen.len() < size && !chosen.contains(id) {
            chosen.push(id.clone());
        }
    }
    while chosen.len() < size {
        let free: Vec<&String> = available.iter().filter(|id| !chosen.contains(id)).collect();
        let Some(next) = best(pool, &free, &chosen, size - chosen.len()) else { break };
        chosen.push(next.clone());
    }
    chosen
}

/// The next ID: of the same NUMA node and group as what is chosen, else of the group that fits
/// best.
fn best<'a>(
    pool: &Pool,
    free: &[&'a String],
    chosen: &[String],
    wanted: usize,
) -> Option<&'a String> {
    let place = |id: &str| pool.devices.get(id).map(|device| (&device.numa, &device.group));
    let mut in_numa: BTreeMap<_, usize> = BTreeMap::new();
    let mut in_group: BTreeMap<_, usize> = BTreeMap::new();
    for (numa, group) in free.iter().filter_map(|id| place(id)) {
        *in_numa.entry(numa).or_default() += 1;
        *in_group.entry((numa, group)).or_default() += 1;
    }
    // A fit that is too small comes after every fit that suffices.
    let fit =
        |count: usize| (count < wanted, if count < wanted { usize::MAX - count } else { count });
    free.iter().copied().min_by_key(|id| {
        let Some((numa, group)) = place(id) else {
            return (usize::MAX, usize::MAX, fit(0), fit(0), number(id));
        };
        let far_numa =
            chosen.iter().filter(|other| place(other).is_some_and(|(n, _)| n != numa)).count();
        let far_group =
            chosen.iter().filter(|other| place(other).is_some_and(|(_, g)| g != group)).count();
        let numa_fit = fit(in_numa.get(numa).copied().unwrap_or(0));
        let group_fit = fit(in_group.get(&(numa, group)).copied().unwrap_or(0));
        (far_numa, far_group, numa_fit, group_fit, number(id))
    })
}

/// Lower numbers first, `a-9` before `a-10`.
fn number(id: &str) -> (u64, String) {
    let digits = id.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    (digits.parse().unwrap_or(u64::MAX), id.to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use vhost_rdma_agent_api::NetnsMode;

    use super::preferred;
    use crate::config::Config;
    use crate::pool::{Device, Pool};

    /// IDs by NUMA node and PF: `n<numa>p<pf>-<k>`.
    fn pool(shape: &[(u32, &str, u32)]) -> Pool {
        let config =
            Config::parse("[[pools]]\nname='a'\nkind='vhost-user'\ncount=1", Path::new("f"));
        let mut devices = BTreeMap::new();
        for (numa, pf, count) in shape {
            for n in 0..*count {
                let id = format!("n{numa}p{pf}-{n}");
                let device = Device {
                    id: id.clone(),
                    numa: vec![*numa],
                    group: (*pf).to_owned(),
                    hardware: None,
                    defect: None,
                };
                devices.insert(id, device);
            }
        }
        Pool {
            config: config.unwrap().pools.remove(0),
            resource: "x.y/a".to_owned(),
            devices,
            netns_mode: NetnsMode::Shared,
        }
    }

    fn all(pool: &Pool) -> Vec<String> {
        pool.devices.keys().cloned().collect()
    }

    #[test]
    fn one_numa_node_and_one_pf_before_anything_else() {
        let pool = pool(&[(0, "x", 3), (1, "y", 1), (1, "z", 3)]);
        let two = preferred(&pool, &all(&pool), &[], 2);
        assert!(two.iter().all(|id| id.starts_with("n0px")), "{two:?}");
        let four = preferred(&pool, &all(&pool), &[], 4);
        assert!(four.iter().all(|id| id.starts_with("n1")), "{four:?}");
        let with = preferred(&pool, &all(&pool), &["n1pz-1".to_owned()], 3);
        assert_eq!(with, ["n1pz-1", "n1pz-0", "n1pz-2"]);
    }

    #[test]
    fn the_smallest_group_that_suffices_is_filled() {
        let pool = pool(&[(0, "x", 3), (0, "y", 1), (0, "z", 2)]);
        assert_eq!(preferred(&pool, &all(&pool), &[], 1), ["n0py-0"]);
        assert_eq!(preferred(&pool, &all(&pool), &[], 2), ["n0pz-0", "n0pz-1"]);
    }

    #[test]
    fn numbers_count_and_unknown_ids_come_last() {
        let pool = pool(&[(0, "x", 11)]);
        let available = ["gone-0", "n0px-10", "n0px-9"].map(str::to_owned);
        assert_eq!(preferred(&pool, &available, &[], 1), ["n0px-9"]);
        assert_eq!(preferred(&pool, &available, &[], 3).len(), 3);
    }

    proptest! {
        #[test]
        fn the_answer_has_the_size_and_the_must_and_no_id_twice(
            picks in proptest::collection::vec(any::<proptest::sample::Index>(), 0..4),
            size in 0_usize..12,
        ) {
            let pool = pool(&[(0, "x", 3), (1, "y", 2), (1, "z", 4)]);
            let ids = all(&pool);
            let must: BTreeSet<String> =
                picks.iter().map(|pick| ids[pick.index(ids.len())].clone()).collect();
            let must: Vec<String> = must.into_iter().collect();
            let chosen = preferred(&pool, &ids, &must, size);
            prop_assert_eq!(chosen.len(), size.min(ids.len()));
            let unique: BTreeSet<&String> = chosen.iter().collect();
            prop_assert_eq!(unique.len(), chosen.len());
            prop_assert!(must.iter().take(size).all(|id| unique.contains(id)));
        }
    }
}
