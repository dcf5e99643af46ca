//! What a process of a network on RNICs and the one of what they share ([`crate::outside`]) say to
//! each other: addresses, queue pairs, and datagrams of QP 1 for who is not in the network's
//! process.
//!
//! The process names a NIC by its MAC address and nothing else of it: on which device it is, which
//! host's address stands for its own and whether it may have an address are what the operator gave,
//! as the supervisor has told. What is said so is bounded here, where it is read.

use serde::{Deserialize, Serialize};

use super::bad_message::BadMessage;
use crate::cm::{MAD_LEN, Mad};
use crate::link::Gid;
use crate::rnic::{Far, Mac};

/// Queue pairs of one message.
pub const QPS_MAX: usize = 1024;
/// Characters of a device's name (`IB_DEVICE_NAME_MAX`).
const DEVICE_MAX: usize = 63;
/// QPNs have 24 bits.
const QPN_MAX: u32 = (1 << 24) - 1;

/// A question of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Asked {
    /// May this NIC have this address?
    Address(Mac, Gid),
    /// What is known of a queue pair at an address of a host?
    Peer {
        /// The RNIC.
        device: String,
        /// The host's address.
        gid: Gid,
        /// Its queue pair.
        qpn: u32,
    },
}

/// What a process tells of its NICs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Told {
    /// A question, and the number that its answer is known by; nobody waits for one without.
    Asked(Option<u64>, Asked),
    /// A NIC has an address no longer.
    Release {
        /// The NIC.
        nic: Mac,
        /// The address.
        gid: Gid,
    },
    /// Queue pairs that have come and gone.
    Queues {
        /// Their RNIC.
        device: String,
        /// By number.
        new: Vec<u32>,
        /// Likewise.
        gone: Vec<u32>,
    },
    /// A neighbour that the host is to look for.
    Wanted(Gid),
    /// A datagram of a NIC's QP 1.
    Datagram(Mac, Datagram),
}

/// The answer to a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Settled {
    /// The NIC may have the address, or not.
    Address(bool),
    /// What is known of a queue pair.
    Peer(Far),
}

/// What such a process is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Host {
    /// The answer to the question with this number.
    Settled(u64, Settled),
    /// A datagram for a NIC of network `vni` on a device.
    Datagram {
        /// The RNIC.
        device: String,
        /// The network.
        vni: u32,
        /// The datagram.
        datagram: Datagram,
    },
}

/// A datagram of QP 1 ([`Mad`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Datagram {
    source: Gid,
    dest: Gid,
    traffic_class: u8,
    sl: u8,
    /// As many as a datagram has.
    bytes: Vec<u8>,
}

impl Datagram {
    /// Its form on the wire.
    #[must_use]
    pub fn of(mad: &Mad) -> Self {
        let &Mad { source, dest, traffic_class, sl, bytes } = mad;
        Self { source, dest, traffic_class, sl, bytes: bytes.to_vec() }
    }

    /// The datagram; none if it is longer or shorter than one.
    #[must_use]
    pub fn mad(&self) -> Option<Mad> {
        let bytes: [u8; MAD_LEN] = self.bytes.as_slice().try_into().ok()?;
        let &Self { source, dest, traffic_class, sl, .. } = self;
        Some(Mad { source, dest, traffic_class, sl, bytes })
    }
}

impl Told {
    /// Looks at what does not depend on the network.
    ///
    /// # Errors
    /// No sane process says that.
    pub fn check(&self) -> Result<(), BadMessage> {
        let named = |device: &String| device.len() <= DEVICE_MAX;
        let (sane, what) = match self {
            Self::Asked(_, Asked::Peer { device, qpn, .. }) => {
                (named(device) && *qpn <= QPN_MAX, "such a peer")
            }
            Self::Queues { device, new, gone } => {
                let few = new.len() + gone.len() <= QPS_MAX;
                let numbers = new.iter().chain(gone).all(|qpn| *qpn <= QPN_MAX);
                (named(device) && few && numbers, "such queue pairs")
            }
            Self::Datagram(_, datagram) => (datagram.bytes.len() == MAD_LEN, "such a datagram"),
            Self::Asked(_, Asked::Address(..)) | Self::Release { .. } | Self::Wanted(_) => {
                (true, "")
            }
        };
        if sane { Ok(()) } else { Err(BadMessage::Content(what)) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::protocol::{decode, encode};
    use super::*;

    #[test]
    fn what_no_sane_process_says_is_refused() {
        let device = || "rxe0".to_owned();
        let mad =
            Mad { source: [1; 16], dest: [2; 16], traffic_class: 3, sl: 4, bytes: [5; MAD_LEN] };
        let long = Datagram { bytes: vec![0; MAD_LEN + 1], ..Datagram::of(&mad) };
        assert_eq!((Datagram::of(&mad).mad(), long.mad()), (Some(mad.clone()), None));
        let peer = |device, qpn| Told::Asked(Some(1), Asked::Peer { device, gid: [1; 16], qpn });
        let queues = |new, gone| Told::Queues { device: device(), new, gone };
        for good in [
            peer(device(), QPN_MAX),
            queues(vec![1; QPS_MAX], vec![]),
            Told::Datagram([2; 6], Datagram::of(&mad)),
        ] {
            good.check().unwrap();
        }
        for bad in [
            peer("x".repeat(64), 1),
            peer(device(), QPN_MAX + 1),
            queues(vec![1; QPS_MAX], vec![1]),
            queues(vec![], vec![QPN_MAX + 1]),
            Told::Datagram([2; 6], long),
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    proptest! {
        /// Messages with some bytes changed: what is still understood is looked at without a fault.
        #[test]
        fn a_bent_message_is_looked_at(
            which in any::<prop::sample::Index>(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mad = Mad {
                source: [1; 16],
                dest: [2; 16],
                traffic_class: 0,
                sl: 0,
                bytes: [255; MAD_LEN],
            };
            let (device, gid) = ("rxe0".to_owned(), [1; 16]);
            let all = [
                Told::Release { nic: [2; 6], gid },
                Told::Queues { device: device.clone(), new: vec![17], gone: vec![] },
                Told::Datagram([2; 6], Datagram::of(&mad)),
                Told::Asked(Some(1), Asked::Peer { device, gid, qpn: 1 }),
                Told::Wanted(gid),
            ];
            let mut bytes = encode(which.get(&all)).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(told) = decode::<Told>(&bytes) {
                let _ = told.check();
            }
        }
    }
}
