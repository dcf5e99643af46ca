//! The one copy: from segments to segments, and the atomic operations on guest memory.
//!
//! Source and destination may be the same bytes (a guest that writes to itself), so runs are moved
//! as `memmove` does.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Fault, Held, HostPtr, Segment, host, in_order};

/// Walks a segment list as contiguous host runs.
struct Cursor<'a, M> {
    segments: &'a [Segment<M>],
    /// Bytes of the first segment that are behind us.
    done: u64,
}

impl<'a, M: Held> Cursor<'a, M> {
    fn new(mut segments: &'a [Segment<M>], mut skip: u64) -> Self {
        while let [first, rest @ ..] = segments {
            if skip < u64::from(first.len) {
                break;
            }
            skip -= u64::from(first.len);
            segments = rest;
        }
        Self { segments, done: skip }
    }

    #[inline]
    fn run(&self, max: u64) -> Result<(HostPtr, usize), Fault> {
        let segment = self.segments.first().ok_or(Fault::Shape)?;
        let left = u64::from(segment.len) - self.done;
        segment
            .map
            .translation()
            .run(segment.offset + self.done, left.min(max))
            .ok_or(Fault::Address)
    }

    #[inline]
    fn advance(&mut self, by: usize) {
        self.done += by as u64;
        while let [first, rest @ ..] = self.segments {
            if self.done < u64::from(first.len) {
                break;
            }
            self.done -= u64::from(first.len);
            self.segments = rest;
        }
    }
}

/// Moves `len` bytes: from `src`, `src_skip` bytes in, to `dst`, `dst_skip` bytes in.
///
/// # Errors
/// [`Fault::Shape`] if a list is shorter than that, [`Fault::Address`] if a kernel DMA segment left
/// guest memory. Bytes before the fault have been moved.
#[inline]
pub fn copy(
    dst: &[Segment<impl Held>],
    dst_skip: u64,
    src: &[Segment<impl Held>],
    src_skip: u64,
    len: u64,
) -> Result<(), Fault> {
    // Most messages are one piece on either side.
    if let (Some(target), Some(source)) = (whole(dst, dst_skip, len), whole(src, src_skip, len)) {
        move_run(source, target, host(len));
        return Ok(());
    }
    copy_runs((dst, dst_skip), (src, src_skip), len)
}

/// The host address of `len` bytes, `skip` bytes into a list of one segment, if they lie in one
/// piece.
#[inline]
fn whole(list: &[Segment<impl Held>], skip: u64, len: u64) -> Option<HostPtr> {
    let [segment] = list else { return None };
    let inside = skip <= u64::from(segment.len) && len <= u64::from(segment.len) - skip;
    if !inside || len == 0 {
        return None;
    }
    let (at, run) = segment.map.translation().run(segment.offset + skip, len)?;
    (run == host(len)).then_some(at)
}

/// Moves `len` bytes that are mapped on either side.
#[inline]
fn move_run(source: HostPtr, target: HostPtr, len: usize) {
    if source.0.addr().abs_diff(target.0.addr()) < len {
        // A guest that writes to what it reads has to see all of it moved, as by `memmove`.
        // SAFETY: the callers' runs are mapped for `len` bytes and kept alive by their
        // translations, which the segments hold. Concurrent changes by the guest only change which
        // bytes are moved.
        unsafe { ptr::copy(source.0, target.0, len) };
    } else {
        // SAFETY: as above, and they do not overlap.
        unsafe { in_order::move_run(source.0, target.0, len) };
    }
}

fn copy_runs(
    (dst, dst_skip): (&[Segment<impl Held>], u64),
    (src, src_skip): (&[Segment<impl Held>], u64),
    len: u64,
) -> Result<(), Fault> {
    let mut to = Cursor::new(dst, dst_skip);
    let mut from = Cursor::new(src, src_skip);
    let mut left = len;
    while left > 0 {
        let (source, run) = from.run(left)?;
        let (target, run) = to.run(run as u64)?;
        move_run(source, target, run);
        from.advance(run);
        to.advance(run);
        left -= run as u64;
    }
    Ok(())
}

/// Copies `bytes` to `dst`, `skip` bytes in.
///
/// # Errors
/// As [`copy`].
#[inline]
pub fn write(dst: &[Segment<impl Held>], skip: u64, bytes: &[u8]) -> Result<(), Fault> {
    let mut to = Cursor::new(dst, skip);
    let mut done = 0;
    while done < bytes.len() {
        let (target, run) = to.run((bytes.len() - done) as u64)?;
        // SAFETY: `target` is mapped for `run` bytes and kept alive by its translation; `bytes` is
        // ours.
        unsafe { in_order::move_run(bytes[done..].as_ptr(), target.0, run) };
        to.advance(run);
        done += run;
    }
    Ok(())
}

/// Copies from `src`, `skip` bytes in, to `out`.
///
/// # Errors
/// As [`copy`].
#[inline]
pub fn read(src: &[Segment<impl Held>], skip: u64, out: &mut [u8]) -> Result<(), Fault> {
    let mut from = Cursor::new(src, skip);
    let mut done = 0;
    while done < out.len() {
        let (source, run) = from.run((out.len() - done) as u64)?;
        // SAFETY: `source` is mapped for `run` bytes and kept alive by its translation; `out` is
        // ours.
        unsafe { ptr::copy_nonoverlapping(source.0, out[done..].as_mut_ptr(), run) };
        from.advance(run);
        done += run;
    }
    Ok(())
}

/// The 64-bit word that a segment of 8 bytes names, if it is aligned in host memory.
fn word<M: Held>(segment: &Segment<M>) -> Result<&AtomicU64, Fault> {
    let (host, run) = segment.map.translation().run(segment.offset, 8).ok_or(Fault::Address)?;
    if run < 8 || !host.addr().is_multiple_of(8) {
        return Err(Fault::Shape);
    }
    // SAFETY: eight mapped, aligned bytes that live as long as the segment's translation, to which
    // the borrow is tied. The guest's CPUs access the same word with their own atomic instructions.
    Ok(unsafe { AtomicU64::from_ptr(host.0.cast()) })
}

/// Adds to the word, atomically for every CPU of host and guests; returns what was there before.
///
/// # Errors
/// [`Fault::Shape`] if the word is not aligned, [`Fault::Address`] if it is outside guest memory.
pub fn fetch_add(segment: &Segment<impl Held>, add: u64) -> Result<u64, Fault> {
    Ok(word(segment)?.fetch_add(add, Ordering::SeqCst))
}

/// Stores a word at once for every CPU of host and guests.
///
/// # Errors
/// As [`fetch_add`].
pub fn store(segment: &Segment<impl Held>, value: u64) -> Result<(), Fault> {
    word(segment)?.store(value, Ordering::SeqCst);
    Ok(())
}

/// Stores `swap` if the word equals `compare`; returns what was there before.
///
/// # Errors
/// As [`fetch_add`].
pub fn compare_swap(segment: &Segment<impl Held>, compare: u64, swap: u64) -> Result<u64, Fault> {
    let result = word(segment)?.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst);
    Ok(result.unwrap_or_else(|found| found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::in_order::LEAST;

    /// Moves within one buffer, and looks at every byte of it.
    fn moves(from: usize, to: usize, len: usize) {
        let before: Vec<u8> = (0..=250).cycle().take(5 << 12).collect();
        let (mut moved, mut expected) = (before.clone(), before);
        expected.copy_within(from..from + len, to);
        let base = moved.as_mut_ptr();
        assert!(from.max(to) + len <= expected.len());
        // Both are within `moved`, which nobody else uses.
        move_run(HostPtr(base.wrapping_add(from)), HostPtr(base.wrapping_add(to)), len);
        assert!(moved == expected, "{len} bytes from {from} to {to}");
    }

    #[test]
    fn bytes_are_those_of_memmove_wherever_they_are() {
        for behind in [0, 1, 8, 31, 32, 4095] {
            for len in [0, 1, LEAST - 1, LEAST, LEAST + 1, 4096, 5000] {
                moves(100, 8192 + 100 + behind, len);
                moves(8192 + 100 + behind, 100, len);
                // Overlapping, in either direction.
                moves(100, 100 + behind, len);
                moves(100 + behind, 100, len);
            }
        }
    }

    /// A guest chooses where its buffers lie: a target a little behind its source takes sixteen
    /// times as long where a copy goes byte by byte (`in_order`).
    #[test]
    fn no_place_of_a_target_makes_a_copy_slow() {
        const LEN: usize = 64 << 10;
        let mut bytes = vec![1u8; 3 * LEN];
        let base = bytes.as_mut_ptr().wrapping_add(bytes.as_ptr().align_offset(4096));
        let took = |behind: usize| {
            let target = base.wrapping_add(LEN + behind);
            let one = || {
                let began = std::time::Instant::now();
                // Both are within `bytes`, and `behind` is less than what is left of it.
                (0..8).for_each(|_| move_run(HostPtr(base), HostPtr(target), LEN));
                began.elapsed()
            };
            (0..20).map(|_| one()).min().unwrap()
        };
        let usual = took(64);
        for behind in [1, 16, 31] {
            assert!(took(behind) < 6 * usual, "{behind} bytes behind: {:?}", took(behind));
        }
    }
}
