//! Addresses out of the blocks that a node holds.
//!
//! A NIC gets the lowest free address of each family. What old hosts take for a network or for all
//! of its hosts is given to nobody (IPv4 addresses that end in 0 or 255), nor is an IPv6 address
//! whose last group is zero (the subnet's routers, RFC 4291 §2.6.1).

use std::collections::BTreeSet;
use std::net::IpAddr;

use vhost_rdma_cluster_api::Cidr;

/// The most addresses of a block that are looked at: a block has no more.
const BLOCK_MAX: u64 = 1 << 16;

/// The lowest address of these blocks that nobody has.
#[must_use]
pub fn free<'a>(
    blocks: impl Iterator<Item = &'a Cidr>,
    taken: &BTreeSet<IpAddr>,
    v4: bool,
) -> Option<IpAddr> {
    blocks
        .filter(|block| block.first().is_ipv4() == v4)
        .flat_map(|block| {
            let count = block.blocks(1).min(BLOCK_MAX);
            (0..count).filter_map(|index| Some(block.block(1, index)?.first()))
        })
        .find(|address| is_given(*address) && !taken.contains(address))
}

fn is_given(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !matches!(v4.octets()[3], 0 | 255),
        IpAddr::V6(v6) => v6.segments()[7] != 0,
    }
}

/// How many addresses of a block are given to nobody.
#[must_use]
pub fn withheld(block: &Cidr) -> u32 {
    let ends = [0, block.blocks(1).min(BLOCK_MAX) - 1];
    if block.first().is_ipv4() && block.length() < 24 {
        return (1 << (24 - block.length().max(16))) * 2;
    }
    let mut found: Vec<IpAddr> =
        ends.iter().filter_map(|index| Some(block.block(1, *index)?.first())).collect();
    found.dedup();
    found.into_iter().map(|address| u32::from(!is_given(address))).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use vhost_rdma_cluster_api::Cidr;

    use super::{free, withheld};

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn each_address_is_given_once_and_those_at_the_ends_never() {
        let blocks = [cidr("10.9.0.0/30"), cidr("fd00::/126"), cidr("10.9.0.252/30")];
        for (v4, expected) in [
            (
                true,
                vec!["10.9.0.1", "10.9.0.2", "10.9.0.3", "10.9.0.252", "10.9.0.253", "10.9.0.254"],
            ),
            (false, vec!["fd00::1", "fd00::2", "fd00::3"]),
        ] {
            let mut taken = BTreeSet::new();
            while let Some(address) = free(blocks.iter(), &taken, v4) {
                assert!(taken.insert(address));
            }
            let all: Vec<String> = taken.iter().map(ToString::to_string).collect();
            assert_eq!(all, expected);
        }
    }

    #[test]
    fn what_is_withheld_and_what_is_given_are_the_whole_block() {
        for text in [
            "10.9.0.0/30",
            "10.9.0.64/26",
            "10.9.0.252/30",
            "10.9.0.0/24",
            "10.8.0.0/22",
            "10.9.1.5/32",
            "fd00::/120",
            "fd00::10/124",
        ] {
            let block = cidr(text);
            let mut taken = BTreeSet::new();
            while let Some(address) = free([&block].into_iter(), &taken, block.first().is_ipv4()) {
                taken.insert(address);
            }
            assert_eq!(taken.len() as u64 + u64::from(withheld(&block)), block.blocks(1), "{text}");
        }
    }
}
