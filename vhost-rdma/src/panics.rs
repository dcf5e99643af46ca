//! What a panic ends.
//!
//! Nobody misses a thread that is gone: a process whose watch has panicked lives on and hears of no
//! VMM. So a panic ends the whole of a network's process, and the supervisor starts another. Where
//! a part of the process answers for less, as a NIC or one VMM's connection does, its work goes
//! through [`contained`], and a panic costs that part alone.
//!
//! A panic's hook is asked before anybody has caught it. Hence the count: who will catch it says so
//! in advance.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

thread_local! {
    /// How many callers of this thread would catch a panic now.
    static CATCHERS: Cell<u32> = const { Cell::new(0) };
}

/// Whether the process is one that ends, and is started again.
static ENDS: AtomicBool = AtomicBool::new(false);

/// From now on a panic that nobody contains ends this process, once it is in the log.
pub(crate) fn end_the_process() {
    ENDS.store(true, Ordering::Relaxed);
    std::panic::set_hook(Box::new(|panic| {
        tell(panic);
        if CATCHERS.get() == 0 {
            give_up();
        }
    }));
}

/// Does `work`, whose panic costs nothing but what the caller says.
pub(crate) fn contained<R>(work: impl FnOnce() -> R) -> thread::Result<R> {
    CATCHERS.set(CATCHERS.get() + 1);
    let done = catch_unwind(AssertUnwindSafe(work));
    CATCHERS.set(CATCHERS.get() - 1);
    done
}

/// A contained panic turned out to concern more than was said: the end of a process that ends by
/// panics.
pub(crate) fn give_up() {
    if ENDS.load(Ordering::Relaxed) {
        std::process::abort();
    }
}

fn tell(panic: &PanicHookInfo<'_>) {
    let at = panic.location().map(ToString::to_string).unwrap_or_default();
    let why = panic.payload_as_str().unwrap_or_default();
    let current = thread::current();
    let thread = current.name().unwrap_or_default();
    // No backtrace: within the sandbox nobody can read what the addresses are.
    tracing::error!(thread, why, "panicked at {at}");
}
