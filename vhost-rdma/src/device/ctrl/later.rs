//! A device with one feature more than there are: what a later one is to the drivers of today, and
//! today's to later drivers (docs/virtio-rdma.md §5.9).
//!
//! Built for unit tests and with the cargo feature `later-device`, which no release has and which
//! `cargo xtask vm ages` uses. The feature is a *label*: 64 bits behind the request of QP_CREATE
//! and of KEEPALIVE that are taken while its capability is in effect, and nothing is done with; and
//! 8 bytes behind their responses, zero. Its bits are the last there are, which no real feature
//! gets before all others are used up.

use virtio_rdma_abi::{self as abi, StructLayout, cmd};

use super::Revision;
use super::lengths::{self, Lengths};

/// The capability of the label.
pub(super) const CAP: u64 = 1 << 63;

/// A virtio feature bit of this device's range: offered, and nothing hangs on it.
#[cfg(feature = "later-device")]
pub(crate) const FEATURE: u64 = 1 << 63;

/// By how much requests and responses have grown.
const GROWN: usize = 8;

const QP_CREATE: StructLayout = grown(&abi::QpCreateReq::LAYOUT);
const KEEPALIVE: StructLayout = grown(&abi::KeepaliveReq::LAYOUT);

const fn grown(layout: &StructLayout) -> StructLayout {
    StructLayout { name: layout.name, size: layout.size + GROWN, fields: layout.fields }
}

pub(super) const REVISION: Revision = Revision { lengths, caps: CAP };

fn lengths(opcode: u16, agreed: u64) -> Option<Lengths> {
    let known = lengths::of(opcode)?;
    let labelled = match opcode {
        cmd::QP_CREATE => &QP_CREATE,
        cmd::KEEPALIVE => &KEEPALIVE,
        _ => return Some(known),
    };
    let layout = if agreed & CAP != 0 { Some(labelled) } else { known.layout };
    Some(Lengths { layout, response: known.response + GROWN, ..known })
}
