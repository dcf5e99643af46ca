//! Long copies by vector registers, for processors on which those of the C library are slow.
//!
//! From a few KiB on glibc copies by `rep movsb`. AMD's processors (Zen 3 and 4) carry that out
//! byte by byte where the target lies 1 to 31 bytes behind the source, up to a multiple of 4 KiB:
//! a sixteenth of the speed (glibc bug 30994), and a guest chooses where its buffers lie. They are
//! slower with it by some twentieth elsewhere, and what follows waits until its last byte is moved.
//! A plain loop of 32-byte registers has neither fault. On other processors the C library knows
//! best.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__cpuid, __m256i, _mm256_loadu_si256, _mm256_store_si256};
use std::ptr;
use std::sync::LazyLock;

/// From this length on the C library may copy by `rep movsb`.
pub(super) const LEAST: usize = 2048;

/// Bytes that the loop moves at a time: four registers.
const STEP: usize = 128;

/// Whether this is such a processor.
static IS_BETTER: LazyLock<bool> = LazyLock::new(is_amd_with_avx2);

#[cfg(target_arch = "x86_64")]
fn is_amd_with_avx2() -> bool {
    // "AuthenticAMD" in EBX, EDX, ECX (AMD64 Architecture Programmer's Manual, volume 3, E.3.1).
    let vendor = __cpuid(0);
    let amd = (vendor.ebx, vendor.edx, vendor.ecx) == (0x6874_7541, 0x6974_6e65, 0x444d_4163);
    amd && is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd_with_avx2() -> bool {
    false
}

/// Whether this is the better way to move `len` bytes. Then they do not overlap: where they do
/// `memmove` has to see all of it.
#[inline]
pub(super) fn is_better(source: *const u8, target: *const u8, len: usize) -> bool {
    len >= LEAST && target.addr().abs_diff(source.addr()) >= len && *IS_BETTER
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "one copy, in three parts")]
#[expect(clippy::cast_ptr_alignment, reason = "loads may be unaligned, stores are not")]
/// Moves `len` bytes. Others may change them meanwhile.
///
/// # Safety
/// [`is_better`] must have said so of these, `source` must be readable and `target` writable.
pub(super) unsafe fn move_run(source: *const u8, target: *mut u8, len: usize) {
    // Stores that cross a cache line cost two.
    let head = target.align_offset(64).min(len);
    let end = head + (len - head) / STEP * STEP;
    let from = |at: usize| source.wrapping_add(at);
    let to = |at: usize| target.wrapping_add(at);
    // SAFETY: `head`, `end` and all between are within `len`, for which the caller vouches; the two
    // do not overlap, and the targets of the loop are aligned to 64 bytes.
    unsafe {
        ptr::copy_nonoverlapping(source, target, head);
        for at in (head..end).step_by(STEP) {
            let (from, to) = (from(at).cast::<__m256i>(), to(at).cast::<__m256i>());
            let (a, b) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.wrapping_add(1)));
            let c = _mm256_loadu_si256(from.wrapping_add(2));
            let d = _mm256_loadu_si256(from.wrapping_add(3));
            _mm256_store_si256(to, a);
            _mm256_store_si256(to.wrapping_add(1), b);
            _mm256_store_si256(to.wrapping_add(2), c);
            _mm256_store_si256(to.wrapping_add(3), d);
        }
        ptr::copy_nonoverlapping(from(end), to(end), len - end);
    }
}

/// # Safety
/// As above; it is never the better way.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn move_run(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(source, target, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_place_is_moved_and_nothing_else() {
        let bytes: Vec<u8> = (0..=250).cycle().take(3 * LEAST).collect();
        for (from, to) in [(0, 0), (1, 0), (0, 1), (17, 63), (64, 31)] {
            for len in (LEAST..LEAST + 2 * STEP + 2).step_by(7) {
                let mut target = vec![0xff; 3 * LEAST];
                let (source, to_here) = (&raw const bytes[from], &raw mut target[to]);
                assert_eq!(is_better(source, to_here, len), *IS_BETTER, "{len} bytes are enough");
                if !*IS_BETTER {
                    return;
                }
                // SAFETY: both are longer than their offset and `len`, and it is the better way.
                unsafe { move_run(source, to_here, len) };
                assert_eq!(target[to..to + len], bytes[from..from + len]);
                let rest = || target[..to].iter().chain(&target[to + len..]);
                assert!(rest().all(|&byte| byte == 0xff), "{len} bytes from {from} to {to}");
            }
        }
    }

    /// The kernel says what the processor is, where it is one of that kind at all.
    #[test]
    fn it_is_for_amds_processors() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let amd = text
            .lines()
            .any(|line| line.starts_with("vendor_id") && line.ends_with("AuthenticAMD"));
        let flags = text.lines().find(|line| line.starts_with("flags"));
        let avx2 = flags.is_some_and(|line| line.split_whitespace().any(|flag| flag == "avx2"));
        assert_eq!(*IS_BETTER, amd && avx2);
    }

    #[test]
    fn what_is_short_or_overlaps_is_left_to_the_c_library() {
        let bytes = [0; 2 * LEAST];
        let at = &raw const bytes[0];
        let better = |by: usize, len| is_better(at, at.wrapping_add(by), len);
        assert!(!better(LEAST, LEAST - 1) && !better(LEAST - 1, LEAST) && !better(0, LEAST));
        assert_eq!(better(LEAST, LEAST), *IS_BETTER);
    }
}
