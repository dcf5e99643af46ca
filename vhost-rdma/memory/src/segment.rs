//! A piece of a translation: the unit that copies move between.
//!
//! A segment either owns a part in its translation, or borrows it from whoever does. Who can borrow
//! should: taking a part, and giving it up, are atomic operations that wait for all earlier stores,
//! behind a copy for the copy's own.

use std::sync::Arc;

use super::Translation;

/// Whatever a translation can be reached through.
pub trait Held {
    /// It.
    fn translation(&self) -> &Translation;
}

impl Held for Arc<Translation> {
    #[inline]
    fn translation(&self) -> &Translation {
        self
    }
}

impl Held for &Arc<Translation> {
    #[inline]
    fn translation(&self) -> &Translation {
        self
    }
}

/// `len` bytes at `offset` of a translation. The maker has checked that the translation covers
/// them.
#[derive(Clone, Copy, Debug)]
pub struct Segment<M = Arc<Translation>> {
    /// Where the bytes are.
    pub map: M,
    /// Offset of the first byte in `map`.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A segment of a translation that somebody else keeps.
pub type Borrowed<'a> = Segment<&'a Arc<Translation>>;

impl Borrowed<'_> {
    /// Has the processor fetch its first bytes into the cache, without waiting for them.
    #[inline]
    pub fn fetch(&self) {
        self.map.fetch(self.offset);
    }

    /// One that keeps its translation.
    #[must_use]
    pub fn keep(self) -> Segment {
        Segment { map: Arc::clone(self.map), offset: self.offset, len: self.len }
    }

    /// Puts it in the place of `other`, which costs no atomic operation if both lie in the same
    /// translation.
    #[inline]
    pub fn replace(self, other: &mut Segment) {
        if Arc::ptr_eq(self.map, &other.map) {
            (other.offset, other.len) = (self.offset, self.len);
        } else {
            *other = self.keep();
        }
    }
}

/// The number of bytes in a list of segments.
#[must_use]
pub fn total_len<M>(segments: &[Segment<M>]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}
