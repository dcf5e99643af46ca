//! A piece of a translation: the unit that copies move between.

use std::sync::Arc;

use super::Translation;

/// `len` bytes at `offset` of a translation. The maker has checked that the translation covers them.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Where the bytes are.
    pub map: Arc<Translation>,
    /// Offset of the first byte in `map`.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// The number of bytes in a list of segments.
#[must_use]
pub fn total_len(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}
