//! What a copy looks like to who watches its target: the processor traps after each instruction
//! (EFLAGS.TF; Intel SDM, volume 3, 17.3.1.4), and all that has arrived is taken away at once. A
//! byte that comes again was stored twice.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};

use super::*;

/// One test at a time has the handler.
static TURN: Mutex<()> = Mutex::new(());
static TARGET: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static LEN: AtomicUsize = AtomicUsize::new(0);
/// Bytes that have arrived, from the first on.
static ARRIVED: AtomicUsize = AtomicUsize::new(0);
/// Where the last word begins: the largest that ends the target where it is aligned.
static LAST: AtomicUsize = AtomicUsize::new(0);
/// Instructions after which something was there that should not have been, or a part of that word.
static WRONG: AtomicUsize = AtomicUsize::new(0);
static STEPS: AtomicUsize = AtomicUsize::new(0);

/// Takes away the bytes that follow those of before; anything else is wrong.
extern "C" fn look(_signal: c_int, _info: *mut libc::siginfo_t, _context: *mut c_void) {
    STEPS.fetch_add(1, Relaxed);
    let (target, len) = (TARGET.load(Relaxed), LEN.load(Relaxed));
    let mut next = ARRIVED.load(Relaxed);
    for word in (0..len.next_multiple_of(8)).step_by(8) {
        // SAFETY: the target, which the test owns and nobody else accesses, is longer by a word.
        if unsafe { target.wrapping_add(word).cast::<u64>().read_unaligned() } == 0 {
            continue;
        }
        for at in word..len.min(word + 8) {
            // SAFETY: as above.
            let had = unsafe { ptr::replace(target.wrapping_add(at), 0) };
            match (had, at == next) {
                (0, _) => {}
                (_, true) => next += 1,
                (_, false) => _ = WRONG.fetch_add(1, Relaxed),
            }
        }
    }
    if (LAST.load(Relaxed) + 1..len).contains(&next) {
        WRONG.fetch_add(1, Relaxed);
    }
    ARRIVED.store(next, Relaxed);
}

fn catch_steps() {
    // SAFETY: a zeroed `sigaction` is one without flags and with an empty mask; the handler only
    // touches atomics and the target.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_flags = libc::SA_SIGINFO;
        action.sa_sigaction = look as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGTRAP, &raw const action, ptr::null_mut()), 0);
    }
}

/// Has the processor trap after each instruction, or no more.
#[inline(never)]
fn step(on: bool) {
    let (keep, set) = (!0x100i64, i64::from(on) << 8);
    // SAFETY: another flag is not touched, and the trap is caught.
    unsafe {
        std::arch::asm!(
            "pushfq",
            "and [rsp], {keep}",
            "or [rsp], {set}",
            "popfq",
            keep = in(reg) keep,
            set = in(reg) set,
        );
    }
}

/// A copy, with a look after each of its instructions: how many bytes came as they should, and
/// after how many instructions others did.
///
/// `has_end`: it is all of a message, which has a last word.
fn watch(
    (copy, has_end): (unsafe fn(*const u8, *mut u8, usize), bool),
    source: &[u8],
    target: &mut [u8],
) -> (usize, usize) {
    assert_eq!(source.len(), target.len());
    TARGET.store(target.as_mut_ptr(), Relaxed);
    LEN.store(target.len(), Relaxed);
    let end = target.as_ptr_range().end.addr();
    let fits = |&word: &usize| word <= target.len() && end.is_multiple_of(word);
    let last = [8, 4, 2].into_iter().find(fits).filter(|_| has_end).unwrap_or_default();
    LAST.store(target.len() - last, Relaxed);
    for counter in [&ARRIVED, &WRONG, &STEPS] {
        counter.store(0, Relaxed);
    }
    let (from, to, len) = (source.as_ptr(), target.as_mut_ptr(), target.len());
    step(true);
    // SAFETY: both are as long as `len`, and do not overlap.
    unsafe { copy(from, to, len) };
    step(false);
    assert!(STEPS.load(Relaxed) > 3, "nothing was looked at");
    (ARRIVED.load(Relaxed), WRONG.load(Relaxed))
}

fn watched(
    copy: unsafe fn(*const u8, *mut u8, usize),
    place: (usize, usize),
    len: usize,
) -> (usize, usize) {
    watch_at((copy, true), place, len)
}

fn watch_at(
    copy: (unsafe fn(*const u8, *mut u8, usize), bool),
    (from, to): (usize, usize),
    len: usize,
) -> (usize, usize) {
    #[repr(align(64))]
    struct Aligned([u8; 8192]);
    let source = Aligned([7; 8192]);
    let mut target = Aligned([0; 8192]);
    watch(copy, &source.0[from..from + len], &mut target.0[to..to + len])
}

/// This processor's, and that of those whose stores overtake each other.
const WAYS: [unsafe fn(*const u8, *mut u8, usize); 2] = [move_run, move_behind_fences];
const PLACES: [(usize, usize); 6] = [(0, 0), (0, 8), (3, 0), (5, 15), (1, 12), (0, 38)];

#[test]
fn each_byte_is_stored_once_and_none_before_those_below_it_and_the_last_word_at_once() {
    let _turn = TURN.lock();
    catch_steps();
    for place in PLACES {
        for len in (0..=34).chain([64, 255]) {
            for copy in WAYS {
                assert_eq!(watched(copy, place, len), (len, 0), "{len} bytes, {place:?}");
            }
        }
    }
    for len in [LEAST - 1, LEAST, LEAST + 77] {
        for copy in WAYS {
            assert_eq!(watched(copy, (5, 15), len), (len, 0), "{len} bytes");
        }
    }
}

/// Whatever the processor: of a string's stores the order is its own, but each byte comes once.
#[test]
fn so_is_each_of_a_long_copy_by_every_way() {
    let _turn = TURN.lock();
    catch_steps();
    let mut ways: Vec<Long> = vec![by_words, by_string];
    if is_x86_feature_detected!("avx2") {
        ways.push(by_registers);
    }
    for way in ways {
        assert_eq!(watch_at((way, false), (1, 0), 4 * STEP), (4 * STEP, 0));
    }
}

/// What the C library does, or there would be no need of this module: the test that sees nothing
/// here sees nothing above.
#[test]
fn the_c_library_stores_bytes_twice() {
    let _turn = TURN.lock();
    catch_steps();
    let copy: unsafe fn(*const u8, *mut u8, usize) = |from, to, len| {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, to, len) };
    };
    let wrong = |len| watched(copy, (0, 0), len).1;
    assert!((16..=32).chain([100, 300]).any(|len| wrong(len) > 0));
}
