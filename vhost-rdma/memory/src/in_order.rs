//! Copies as a NIC makes them: each byte is stored once, and the last after those below them.
//!
//! Programs look at memory that a peer writes, and not only at completions. Some wait for the last
//! byte of a message and take it that the others are there (`ib_write_lat`). Others change what
//! they have found at once: a sender of rsockets takes from the room that its peer has told it of
//! (librdmacm/rsocket.c, `rs_write_data()`). IBTA 9.5 promises neither, but every adapter does so:
//! its bus brings writes in order, each once.
//!
//! The C library does not. Its `memcpy` stores 16 to 32 bytes twice where the halves overlap: one
//! that is interrupted between the two stores undoes what the program did meanwhile. Longer ones
//! end with their *first* bytes (glibc, memmove-vec-unaligned-erms.S). So here is a copy of our
//! own. Every store is aligned to its size, but for that of a message of one word: what the program
//! reads by one aligned load, of 8 bytes or less, is never of two messages in part.
//!
//! Long copies go by vector registers on AMD's processors (Zen 3 and 4). These carry out `rep
//! movsb` byte by byte where the target lies 1 to 31 bytes behind the source, up to a multiple of
//! 4 KiB: a sixteenth of the speed (glibc bug 30994), and a guest chooses where its buffers lie.
//! They are slower with it by some twentieth elsewhere, and what follows waits until its last byte
//! is moved. Others go by it, as the C library would: within it stores come in any order, so the
//! last bytes of a message are never among them (Intel SDM, volume 3, 8.2.4).

#![expect(clippy::multiple_unsafe_ops_per_block, reason = "one copy, in several parts")]
#![expect(clippy::cast_ptr_alignment, reason = "loads may be unaligned, stores are not")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__cpuid, __m128i, __m256i, _mm256_loadu_si256, _mm256_store_si256};
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::Ordering;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::compiler_fence;
#[cfg(any(test, not(target_arch = "x86_64")))]
use std::sync::atomic::fence;

/// From this length on a copy goes by the way that the processor is best at.
pub(super) const LEAST: usize = 2048;
/// Bytes that a long copy moves at a time, and that its targets are aligned to; half of it.
const STEP: usize = 128;
const LINE: usize = 64;

/// Moves all but the end of a long copy.
///
/// # Safety
/// `source` is readable and `target` writable for `len` bytes, which do not overlap; `target` is
/// aligned to [`LINE`], and `len` is a multiple of [`STEP`].
type Long = unsafe fn(source: *const u8, target: *mut u8, len: usize);

static LONG: LazyLock<Long> = LazyLock::new(best);

#[cfg(target_arch = "x86_64")]
fn best() -> Long {
    let avx2 = is_x86_feature_detected!("avx2");
    // "AuthenticAMD" in EBX, EDX, ECX (AMD64 Architecture Programmer's Manual, volume 3, E.3.1).
    let vendor = __cpuid(0);
    let amd = (vendor.ebx, vendor.edx, vendor.ecx) == (0x6874_7541, 0x6974_6e65, 0x444d_4163);
    match (avx2 && amd, is_x86_feature_detected!("ermsb")) {
        (true, _) => by_registers,
        (false, true) => by_string,
        (false, false) if avx2 => by_registers,
        (false, false) => by_words,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn best() -> Long {
    by_words
}

/// Moves `len` bytes. Others may read and change them meanwhile.
///
/// # Safety
/// `source` is readable and `target` writable for `len` bytes, which do not overlap.
#[inline]
pub(super) unsafe fn move_run(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        move_parts(source, target, len);
    }
    // SAFETY: the caller's promise.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        move_behind_fences(source, target, len);
    }
}

/// The same where stores may overtake each other: those of the last aligned word are kept back, and
/// each of them comes behind a fence. A store over the end of such a word is not one store on every
/// such processor (Arm ARM, B2.2.1: FEAT_LSE2), so there is none.
///
/// # Safety
/// As [`move_run`].
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline]
unsafe fn move_behind_fences(source: *const u8, target: *mut u8, len: usize) {
    let first = before_the_last_word(target.addr(), len);
    // SAFETY: the caller's promise; a part of the range is a range of which it holds as well.
    unsafe {
        move_parts(source, target, first);
        let (source, target) = (source.wrapping_add(first), target.wrapping_add(first));
        let mut run = Run { source, target, left: len - first };
        while run.left > 0 {
            fence(Ordering::Release);
            run.move_next();
        }
    }
}

/// Bytes of a range before the last aligned word that has any of it.
#[cfg(any(test, not(target_arch = "x86_64")))]
const fn before_the_last_word(target: usize, len: usize) -> usize {
    const WORD: usize = size_of::<u64>();
    let last = target.wrapping_add(len).wrapping_sub(1) % WORD + 1;
    len.saturating_sub(last)
}

/// # Safety
/// As [`move_run`].
#[inline]
unsafe fn move_parts(source: *const u8, target: *mut u8, len: usize) {
    if len == size_of::<u64>() {
        // A word is read and stored at once wherever the other side lies.
        // SAFETY: the caller's promise.
        unsafe { target.cast::<u64>().write_unaligned(source.cast::<u64>().read_unaligned()) };
        return;
    }
    let mut run = Run { source, target, left: len };
    // SAFETY: the caller's promise, of which a run keeps account.
    unsafe {
        run.align_to(WIDTH);
        if run.left >= LEAST {
            run.go_far();
        }
        while run.left >= 4 * WIDTH {
            run.move_four();
        }
        while run.left >= WIDTH {
            run.move_one::<Word>();
        }
        run.finish();
    }
}

#[cfg(target_arch = "x86_64")]
type Word = __m128i;
#[cfg(not(target_arch = "x86_64"))]
type Word = u64;
const WIDTH: usize = size_of::<Word>();

/// What is left of a copy.
struct Run {
    source: *const u8,
    target: *mut u8,
    left: usize,
}

impl Run {
    /// Moves one `T` and goes on behind it.
    ///
    /// # Safety
    /// So much is left, and the target is aligned for it.
    #[inline(always)]
    unsafe fn move_one<T: Copy>(&mut self) {
        debug_assert!(self.left >= size_of::<T>() && self.target.cast::<T>().is_aligned());
        // SAFETY: the caller's promise. Volatile: one store, which is neither split nor made one
        // with its neighbours by a call of the C library's copy.
        unsafe {
            let value = self.source.cast::<T>().read_unaligned();
            ptr::write_volatile(self.target.cast::<T>(), value);
        }
        self.pass(size_of::<T>());
    }

    /// Moves as much as one aligned store of a word or less takes.
    ///
    /// # Safety
    /// As [`move_run`], of what is left, which is not nothing.
    #[cfg(any(test, not(target_arch = "x86_64")))]
    unsafe fn move_next(&mut self) {
        // SAFETY: the caller's promise; the target is a multiple of each size that is taken.
        unsafe {
            match (self.target.addr() | 8).trailing_zeros().min(self.left.ilog2()) {
                3.. => self.move_one::<u64>(),
                2 => self.move_one::<u32>(),
                1 => self.move_one::<u16>(),
                0 => self.move_one::<u8>(),
            }
        }
    }

    /// Moves four words: the loads of one turn need not wait for its stores.
    ///
    /// # Safety
    /// As [`Self::move_one`], of so many.
    #[inline(always)]
    unsafe fn move_four(&mut self) {
        let (from, to) = (self.source.cast::<Word>(), self.target.cast::<Word>());
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b) = (from.read_unaligned(), from.wrapping_add(1).read_unaligned());
            let c = from.wrapping_add(2).read_unaligned();
            let d = from.wrapping_add(3).read_unaligned();
            ptr::write_volatile(to, a);
            ptr::write_volatile(to.wrapping_add(1), b);
            ptr::write_volatile(to.wrapping_add(2), c);
            ptr::write_volatile(to.wrapping_add(3), d);
        }
        self.pass(4 * WIDTH);
    }

    #[inline(always)]
    const fn pass(&mut self, len: usize) {
        self.source = self.source.wrapping_add(len);
        self.target = self.target.wrapping_add(len);
        self.left -= len;
    }

    /// Moves what is before the next multiple of `to`, a power of two, or all there is.
    ///
    /// # Safety
    /// As [`move_run`], of what is left.
    #[inline(always)]
    unsafe fn align_to(&mut self, to: usize) {
        if self.target.addr() & (to - 1) == 0 {
            return;
        }
        // SAFETY: the caller's promise; each size goes where the target is a multiple of it.
        unsafe {
            if self.goes::<u8>() {
                self.move_one::<u8>();
            }
            if self.goes::<u16>() {
                self.move_one::<u16>();
            }
            if self.goes::<u32>() {
                self.move_one::<u32>();
            }
            if WIDTH > 8 && self.goes::<u64>() {
                self.move_one::<u64>();
            }
        }
    }

    /// Whether a `T` is between here and the next multiple of twice its size, and there is one.
    /// Where there is none there is nothing larger either.
    #[inline(always)]
    fn goes<T>(&self) -> bool {
        self.target.addr() & size_of::<T>() != 0 && self.left >= size_of::<T>()
    }

    /// Moves what is less than a word, from an aligned place on.
    ///
    /// # Safety
    /// As [`move_run`], of what is left.
    #[inline(always)]
    unsafe fn finish(&mut self) {
        // SAFETY: the caller's promise; sizes descend, so each goes where it is aligned.
        unsafe {
            if WIDTH > 8 && self.left & 8 != 0 {
                self.move_one::<u64>();
            }
            if self.left & 4 != 0 {
                self.move_one::<u32>();
            }
            if self.left & 2 != 0 {
                self.move_one::<u16>();
            }
            if self.left & 1 != 0 {
                self.move_one::<u8>();
            }
        }
    }

    /// Moves all but the end of what is left, by the processor's best way.
    ///
    /// # Safety
    /// As [`move_run`], of what is left, which is at least [`LEAST`]; the target is aligned.
    unsafe fn go_far(&mut self) {
        // SAFETY: the caller's promise; `len` is less than what is left, and no part overlaps.
        unsafe {
            // Stores that cross a cache line cost two.
            while self.target.addr() & (LINE - 1) != 0 {
                self.move_one::<Word>();
            }
            let len = (self.left - 1) / STEP * STEP;
            LONG(self.source, self.target, len);
            self.pass(len);
        }
    }
}

/// # Safety
/// As [`Long`].
unsafe fn by_words(source: *const u8, target: *mut u8, len: usize) {
    let mut run = Run { source, target, left: len };
    while run.left > 0 {
        // SAFETY: the caller's promise: it is a multiple of a word's size.
        unsafe { run.move_one::<Word>() };
    }
}

/// # Safety
/// As [`Long`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn by_registers(source: *const u8, target: *mut u8, len: usize) {
    for at in (0..len).step_by(STEP) {
        let from = source.wrapping_add(at).cast::<__m256i>();
        let to = target.wrapping_add(at).cast::<__m256i>();
        // SAFETY: the caller's promise; loads may be unaligned, and stores are not. No store moves
        // over the fence, and no compiler makes a call of the whole loop.
        unsafe {
            let (a, b) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.wrapping_add(1)));
            let c = _mm256_loadu_si256(from.wrapping_add(2));
            let d = _mm256_loadu_si256(from.wrapping_add(3));
            _mm256_store_si256(to, a);
            _mm256_store_si256(to.wrapping_add(1), b);
            _mm256_store_si256(to.wrapping_add(2), c);
            _mm256_store_si256(to.wrapping_add(3), d);
        }
        compiler_fence(Ordering::Release);
    }
}

/// # Safety
/// As [`Long`].
#[cfg(target_arch = "x86_64")]
unsafe fn by_string(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the caller's promise; the direction flag is clear (System V ABI, 3.2.1).
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") source => _,
            inout("rdi") target => _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod stepped;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_place_is_moved_and_nothing_else() {
        let bytes: Vec<u8> = (0..=250).cycle().take(3 * LEAST).collect();
        let far = (LEAST - 1..LEAST + 2 * STEP + 2).step_by(7);
        for (from, to) in [(0, 0), (1, 0), (0, 1), (17, 63), (64, 31), (3, 8), (8, 4)] {
            for len in (0..200).chain(far.clone()) {
                let mut target = vec![0xff; 3 * LEAST];
                // SAFETY: both are longer than their offset and `len`.
                unsafe { move_run(&raw const bytes[from], &raw mut target[to], len) };
                assert_eq!(target[to..to + len], bytes[from..from + len]);
                let rest = || target[..to].iter().chain(&target[to + len..]);
                assert!(rest().all(|&byte| byte == 0xff), "{len} bytes from {from} to {to}");
            }
        }
    }

    #[test]
    fn the_last_word_begins_where_a_word_does() {
        for target in 0x1000..0x1010 {
            for len in 0..40 {
                let first = before_the_last_word(target, len);
                let last = len - first;
                assert!(last <= 8 && (last > 0 || len == 0), "{len} bytes at {target:#x}");
                let begins = first == 0 || (target + first).is_multiple_of(8);
                assert!(begins, "{len} bytes at {target:#x}: the last {last} are of two words");
            }
        }
    }

    /// The kernel says what the processor is.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn registers_are_for_amds_processors() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let amd = text
            .lines()
            .any(|line| line.starts_with("vendor_id") && line.ends_with("AuthenticAMD"));
        let flags = text.lines().find(|line| line.starts_with("flags")).unwrap();
        let has = |flag| flags.split_whitespace().any(|it| it == flag);
        let expected: Long = match (has("avx2"), has("erms")) {
            (true, _) if amd => by_registers,
            (_, true) => by_string,
            (true, false) => by_registers,
            (false, false) => by_words,
        };
        assert!(ptr::fn_addr_eq(*LONG, expected));
    }
}
