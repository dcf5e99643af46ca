//! Where the addresses of a network are: messages, server and client of the service that the
//! controller's replicas offer to the nodes' agents, generated from `peers.proto` at build time.

use crate::Cidr;

/// What a list says, whatever the order of its entries: it follows each change of them, and costs
/// as much as the change. Both sides work it out, and two lists that differ have two digests but by
/// a collision that nobody finds who cannot choose entries of most of a cluster's nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Digest(u128);

impl Digest {
    /// That of one entry.
    #[must_use]
    pub fn of(cidr: &Cidr, through: &str, daemon: &str) -> Self {
        let text = format!("{cidr}\0{through}\0{daemon}\0");
        let hash = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
        let mut first = [0; 16];
        first.iter_mut().zip(hash.as_ref()).for_each(|(to, from)| *to = *from);
        Self(u128::from_le_bytes(first))
    }

    /// With these entries more.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0.wrapping_add(other.0))
    }

    /// Without these entries.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0.wrapping_sub(other.0))
    }

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        self.0.to_le_bytes().into()
    }
}

/// Version 1 of the service.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    clippy::use_self,
    clippy::wildcard_imports
)]
pub mod v1 {
    tonic::include_proto!("vhost_rdma.cluster.v1");
}

#[cfg(test)]
mod tests {
    use super::Digest;

    #[test]
    fn a_digest_follows_what_a_list_says_and_not_how_it_came_to_be() {
        let of = |cidr: &str, through: &str, daemon: &str| {
            Digest::of(&cidr.parse().unwrap(), through, daemon)
        };
        let a = of("10.0.0.0/26", "192.0.2.1", "192.0.2.1:4790");
        let b = of("10.0.0.64/26", "192.0.2.2", "");
        assert_eq!(a.and(b), b.and(a));
        assert_eq!(a.and(b).without(a), b);
        assert_ne!(a.and(b), a);
        for other in [
            of("10.0.0.0/26", "192.0.2.1", ""),
            of("10.0.0.0/26", "", "192.0.2.1:4790"),
            of("10.0.0.0/27", "192.0.2.1", "192.0.2.1:4790"),
            of("10.0.0.0/26", "192.0.2.11", "92.0.2.1:4790"),
        ] {
            assert_ne!(other, a);
        }
        // As the proto says, worked out by another program:
        // printf '%s\0' 10.0.0.64/26 192.0.2.2 '' | sha256sum
        assert_eq!(
            b.to_bytes(),
            [
                0x63, 0x7b, 0xc1, 0xbc, 0xb6, 0x38, 0x3f, 0x37, 0x09, 0xbb, 0xb0, 0xbf, 0xa9, 0xca,
                0x57, 0x25
            ]
        );
    }
}
