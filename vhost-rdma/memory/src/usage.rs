//! What the calling thread has had of the host: how often a page was missing, how often it was made
//! to wait for its processor, and how often it gave that up by itself.

use std::mem::MaybeUninit;

/// See the module. Numbers since the thread began; only differences mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Page faults.
    pub faults: u64,
    /// Times that the host ran somebody else though the thread had work.
    pub preempted: u64,
    /// Times that the thread had to wait for something.
    pub blocked: u64,
}

/// The calling thread's usage now. A system call.
#[must_use]
pub fn usage() -> Usage {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a structure of the right type.
    let failed = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0;
    // SAFETY: all zeroes is a valid `rusage`, and the call filled it if it succeeded.
    let usage = unsafe { usage.assume_init() };
    if failed {
        return Usage::default();
    }
    let count = |number: libc::c_long| u64::try_from(number).unwrap_or(0);
    Usage {
        faults: count(usage.ru_minflt).wrapping_add(count(usage.ru_majflt)),
        preempted: count(usage.ru_nivcsw),
        blocked: count(usage.ru_nvcsw),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AddressSpace, Ring};

    #[test]
    fn a_thread_that_sleeps_was_blocked() {
        let before = usage();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(usage().blocked > before.blocked);
    }

    #[test]
    fn a_page_that_is_touched_for_the_first_time_counts() {
        let space = AddressSpace::anonymous(&[(0, 1 << 20)]).unwrap();
        let before = usage();
        for page in 0..64 {
            Ring::page(&space, page << 12).unwrap().store_u32(0, 1);
        }
        assert!(usage().faults > before.faults);
    }
}
