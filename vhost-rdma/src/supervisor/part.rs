//! What one process serves: the NICs of a network on the daemon's own engine, or those on RNICs.
//!
//! Neither kind ever speaks to the other, and who opens devices is in another sandbox.

use crate::node::{Backing, NicConfig};

/// A network's VNI, and whether its NICs are on RNICs.
pub(super) type Part = (u32, bool);

/// What tells a network's two processes apart in logs, metrics and cgroups, and in the service
/// manager's store; no network's name has a `+`.
const ON_RNICS: &str = "+rnic";

/// Which process serves a NIC.
pub(super) fn part(nic: &NicConfig) -> Part {
    (nic.vni, nic.backing != Backing::Soft)
}

/// What that process is called.
pub(super) fn label(nic: &NicConfig) -> String {
    match nic.backing {
        Backing::Soft => nic.network.clone(),
        Backing::Rnic { .. } => format!("{}{ON_RNICS}", nic.network),
    }
}
