//! What is left to be looked at after a change of the guest's memory map (`follow`).

use super::roster::{Slots, Walk};

/// What is left to be looked at after a change.
#[derive(Debug, Default)]
pub(crate) struct Change<K> {
    pub(super) pages: Walk,
    pub(super) keys: K,
    pub(super) cqs: Slots,
    pub(super) srqs: Slots,
    pub(super) qps: Walk,
}
