//! Virtual network identifiers.
//!
//! A VNI belongs to a network when the network's status says so, and that never changes. Before the
//! status may say it, the VNI is claimed by creating the lease `vni-NUMBER` with the network's name
//! and UID as its holder. Two controllers may claim two VNIs for one network; the status decides by
//! its version, and the other claim is given free.

use std::fmt;

use vhost_rdma_cluster_api::RdmaNetwork;

use super::write::{Guard, Plan, Write};
use super::{Claim, World, digest};

/// The daemon's network `default` has 1.
const FIRST: u32 = 2;
/// A VNI has 24 bits (RFC 7348).
const LAST: u32 = 0x00ff_ffff;

/// Why a network has no VNI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoVni {
    /// It is being claimed.
    Pending,
    /// Somebody else has it.
    Taken { vni: u32, by: String },
    /// There is none left.
    Exhausted,
}

impl fmt::Display for NoVni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending => f.write_str("a VNI is being claimed"),
            Self::Taken { vni, by } => write!(f, "the VNI {vni} belongs to the network {by:?}"),
            Self::Exhausted => f.write_str("no VNI is left"),
        }
    }
}

/// The VNI that the network has or should now take; with a claim to be made first.
pub(super) fn choose(world: &World, network: &RdmaNetwork) -> Result<(u32, Option<Write>), NoVni> {
    let name = network.metadata.name.clone().unwrap_or_default();
    let uid = network.metadata.uid.clone().unwrap_or_default();
    let committed = network.status.as_ref().and_then(|status| status.vni);
    let claim = |vni| Write::CreateClaim(Claim::new(vni, &name, &uid));
    if let Some(vni) = committed.or(network.spec.vni) {
        return match world.claims.get(&vni) {
            Some(held) if held.network_uid == uid => Ok((vni, None)),
            Some(held) => Err(NoVni::Taken { vni, by: held.network.clone() }),
            None => Ok((vni, Some(claim(vni)))),
        };
    }
    if let Some(vni) = world.claims_of(&uid).next() {
        return Ok((vni, None));
    }
    // From a place that the name gives: two controllers then mostly choose the same.
    let count = LAST - FIRST + 1;
    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below 2²⁴")]
    let start = (digest(&name) % u64::from(count)) as u32;
    (0..count)
        .map(|step| FIRST + (start + step) % count)
        .find(|vni| !world.claims.contains_key(vni))
        .map(|vni| (vni, Some(claim(vni))))
        .ok_or(NoVni::Exhausted)
}

/// Gives a claim free that its network does not need and no node uses.
pub(super) fn plan(world: &World, number: u32) -> Plan {
    let Some(claim) = world.claims.get(&number) else { return Plan::default() };
    let network = world
        .networks
        .get(&claim.network)
        .filter(|network| network.metadata.uid.as_deref() == Some(&claim.network_uid));
    let needed = network.is_some_and(|network| {
        network.status.as_ref().and_then(|status| status.vni).is_none_or(|vni| vni == number)
    });
    // A node that still has the network must not meet another one of the same number.
    if needed || (network.is_none() && world.index.holders(&claim.network_uid).next().is_some()) {
        return Plan::default();
    }
    let guard = Guard::NetworkHasNot {
        network: claim.network.clone(),
        uid: claim.network_uid.clone(),
        vni: number,
    };
    vec![Write::ReleaseClaim(claim.clone(), guard)].into()
}
