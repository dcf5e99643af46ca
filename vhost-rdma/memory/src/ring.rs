//! Rings, control blocks, status and doorbell pages: memory that both sides read and write word by
//! word.
//!
//! Offsets come from the engine, which masks every index that a guest chose; an offset outside the
//! ring reads as zero and a store there is dropped, so that a mistake of ours cannot become an
//! access to foreign memory.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::{AddressSpace, Fault, HostPtr, Translation};
use crate::ordering::{Cpu, Fence, Fences, Words};

/// A translation that is accessed in place.
#[derive(Clone, Debug)]
pub struct Ring(Arc<Translation>);

impl Ring {
    /// A ring in the memory of `map`.
    #[must_use]
    pub const fn new(map: Arc<Translation>) -> Self {
        Self(map)
    }

    /// The single page at guest address `addr`.
    ///
    /// # Errors
    /// `addr` is not page-aligned or not guest memory.
    pub fn page(space: &AddressSpace, addr: u64) -> Result<Self, Fault> {
        Ok(Self::new(Arc::new(Translation::of_page(space, addr)?.counted(space)?)))
    }

    /// See [`Translation::populate`].
    ///
    /// # Errors
    /// [`Fault::Room`] if the host has no page.
    pub fn populate(&self, go_on: impl FnMut() -> bool) -> Result<(), Fault> {
        self.0.populate(go_on)
    }

    pub(super) fn map(&self) -> &Translation {
        &self.0
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether it holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it begins at a multiple of so many bytes in its first page.
    #[must_use]
    pub fn is_aligned(&self, bytes: u64) -> bool {
        let (first, ..) = self.0.shape();
        first.is_multiple_of(bytes)
    }

    /// Whether every mapping it uses is still part of `space`.
    #[must_use]
    pub fn lives_in(&self, space: &AddressSpace) -> bool {
        self.0.lives_in(space)
    }

    /// Copies `out.len()` bytes at `offset` out of the ring.
    #[inline]
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let mut done = 0;
        while done < out.len() {
            let Some((host, run)) = self.0.run(offset + done as u64, (out.len() - done) as u64)
            else {
                out[done..].fill(0);
                return;
            };
            // SAFETY: `run` bytes at `host` are mapped and kept alive by the translation; `out` has
            // room for them; guest memory and our buffer cannot overlap. The guest may change the
            // bytes meanwhile: any mixture is a valid u8.
            unsafe { ptr::copy_nonoverlapping(host.0, out[done..].as_mut_ptr(), run) };
            done += run;
        }
    }

    /// The `N` bytes at `offset`, in one read where they lie in one piece.
    #[inline]
    #[must_use]
    pub fn read_array<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut out = [0; N];
        match self.0.run(offset, N as u64) {
            // SAFETY: as in `read`, whose `run` is all of `out`.
            Some((host, run)) if run == N => unsafe {
                ptr::copy_nonoverlapping(host.0, out.as_mut_ptr(), N);
            },
            _ => self.read(offset, &mut out),
        }
        out
    }

    /// Has the processor fetch the bytes at `offset` into the cache; a hint.
    #[inline]
    pub fn fetch(&self, offset: u64) {
        self.0.fetch(offset);
    }

    /// Copies `bytes` into the ring at `offset`.
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let Some((host, run)) = self.0.run(offset + done as u64, (bytes.len() - done) as u64)
            else {
                return;
            };
            // SAFETY: as in `read`, the other way round.
            unsafe { ptr::copy_nonoverlapping(bytes[done..].as_ptr(), host.0, run) };
            done += run;
        }
    }

    /// Loads the byte at `offset` with acquire order.
    #[inline]
    #[must_use]
    pub fn load_u8(&self, offset: u64) -> u8 {
        self.word::<1>(offset).map_or(0, |host| {
            // SAFETY: one mapped byte, kept alive by the translation.
            unsafe { AtomicU8::from_ptr(host.0) }.load(Ordering::Acquire)
        })
    }

    /// Stores a byte with release order.
    #[inline]
    pub fn store_u8(&self, offset: u64, value: u8) {
        if let Some(host) = self.word::<1>(offset) {
            // SAFETY: one mapped byte, kept alive by the translation.
            unsafe { AtomicU8::from_ptr(host.0) }.store(value, Ordering::Release);
        }
    }

    /// Loads the little-endian word at `offset` (a multiple of 4) with acquire order.
    #[inline]
    #[must_use]
    pub fn load_u32(&self, offset: u64) -> u32 {
        self.word::<4>(offset).map_or(0, |host| {
            // SAFETY: four mapped bytes, aligned (`word` checked), kept alive by the translation.
            u32::from_le(unsafe { AtomicU32::from_ptr(host.0.cast()) }.load(Ordering::Acquire))
        })
    }

    /// Stores a little-endian word at `offset` (a multiple of 4) with release order.
    #[inline]
    pub fn store_u32(&self, offset: u64, value: u32) {
        if let Some(host) = self.word::<4>(offset) {
            // SAFETY: four mapped bytes, aligned (`word` checked), kept alive by the translation.
            unsafe { AtomicU32::from_ptr(host.0.cast()) }.store(value.to_le(), Ordering::Release);
        }
    }

    /// Loads the little-endian word at `offset` (a multiple of 8) with acquire order.
    #[inline]
    #[must_use]
    pub fn load_u64(&self, offset: u64) -> u64 {
        self.word::<8>(offset).map_or(0, |host| {
            // SAFETY: eight mapped bytes, aligned (`word` checked), kept alive by the translation.
            u64::from_le(unsafe { AtomicU64::from_ptr(host.0.cast()) }.load(Ordering::Acquire))
        })
    }

    /// The host address of an aligned word of N bytes.
    #[inline]
    fn word<const N: usize>(&self, offset: u64) -> Option<HostPtr> {
        let (host, run) = self.0.run(offset, N as u64)?;
        (run == N && host.addr().is_multiple_of(N)).then_some(host)
    }
}

impl AddressSpace {
    /// Loads the little-endian word at guest address `addr` (a multiple of 8) with acquire order.
    pub(super) fn load_u64(&self, addr: u64) -> Result<u64, Fault> {
        let (host, run) = self.run(addr, 8).ok_or(Fault::Address)?;
        if run < 8 || !host.addr().is_multiple_of(8) {
            return Err(Fault::Address);
        }
        // SAFETY: eight mapped, aligned bytes, kept alive by `self`.
        let word = unsafe { AtomicU64::from_ptr(host.0.cast()) };
        Ok(u64::from_le(word.load(Ordering::Acquire)))
    }
}

impl Fences for Ring {
    #[inline]
    fn full(&self, fence: Fence) {
        Cpu.full(fence);
    }
}

impl Words for Ring {
    #[inline]
    fn read(&self, at: u64, out: &mut [u8]) {
        Self::read(self, at, out);
    }

    #[inline]
    fn write(&self, at: u64, bytes: &[u8]) {
        Self::write(self, at, bytes);
    }

    #[inline]
    fn load_u32(&self, at: u64) -> u32 {
        Self::load_u32(self, at)
    }

    #[inline]
    fn load_u64(&self, at: u64) -> u64 {
        Self::load_u64(self, at)
    }

    #[inline]
    fn store_u8(&self, at: u64, value: u8) {
        Self::store_u8(self, at, value);
    }

    #[inline]
    fn store_u32(&self, at: u64, value: u32) {
        Self::store_u32(self, at, value);
    }
}
