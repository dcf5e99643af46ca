//! Memory windows (IBTA 10.6.7): keys that open a part of a region to peers, bound and unbound by
//! work requests.
//!
//! Type 1 windows belong to a protection domain, type 2 windows (2B: also to its domain) to the QP
//! on which they were bound. A region with bound windows cannot be deregistered, so a window never
//! outlives what it shows.

use serde::{Deserialize, Serialize};

/// The type of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WindowKind {
    One,
    Two,
}

/// What a bound window shows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Binding {
    /// Key of the region.
    pub(super) region: u32,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) access: u32,
    /// The QP of a type 2 window.
    pub(super) qpn: u32,
}

/// A memory window.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) key: u32,
    pub(super) kind: WindowKind,
    pub(super) binding: Option<Binding>,
    /// When it was bound or freed.
    pub(super) since: u64,
}

/// What is saved of a window.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedWindow {
    ctx: u32,
    pdn: u32,
    pub(super) key: u32,
    kind: WindowKind,
    binding: Option<Binding>,
    since: u64,
}

impl Window {
    pub(super) const fn save(&self) -> SavedWindow {
        let Self { ctx, pdn, key, kind, binding, since } = *self;
        SavedWindow { ctx, pdn, key, kind, binding, since }
    }

    pub(super) const fn load(saved: &SavedWindow) -> Self {
        let SavedWindow { ctx, pdn, key, kind, binding, since } = *saved;
        Self { ctx, pdn, key, kind, binding, since }
    }

    /// Key of the region that it shows.
    pub(super) fn region(&self) -> Option<u32> {
        self.binding.map(|binding| binding.region)
    }
}

/// The key of an object whose number stays. The consumer chooses the low 8 bits; the upper 24 are
/// the device's, whatever stands there in a request (IBTA 10.6.3.3). ConnectX and rdma_rxe too look
/// at the low byte only.
pub const fn with_low_byte(present: u32, new: u32) -> u32 {
    present & !0xff | new & 0xff
}

/// A BIND_MW work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bind {
    pub(super) pdn: u32,
    pub(super) qpn: u32,
    pub(super) present: u32,
    pub(super) new: u32,
    pub(super) region: u32,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) access: u32,
}
