//! The program while it runs: its end is waited for, and what we are told to do it is told.
//!
//! A supervisor (`docker stop`, a runner that cancels) signals the process that it started, which
//! is this one. If we died of it, the program would live on without its devices, and NICs of a
//! daemon that others use would stay. So signals are handed on, and it is the program that ends.
//!
//! A terminal signals all of its foreground group itself (termios(3), ISIG), the program among
//! them: what comes from its keys is not told twice.

use std::io;
use std::process::{Child, ExitStatus};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::signal::unix::{SignalKind, signal};

/// What is handed on.
const TOLD: [Signal; 6] =
    [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2];
/// What a terminal's keys send.
const KEYS: [Signal; 2] = [Signal::INT, Signal::QUIT];

/// Whether it is ignored since before we were: so it is by the program then (`nohup`).
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal.as_raw() - 1) & 1 == 1
}

/// Whether a terminal has us as its foreground group.
fn at_the_keys() -> bool {
    std::fs::File::open("/dev/tty")
        .and_then(|tty| Ok(rustix::termios::tcgetpgrp(&tty)?))
        .is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Starts it, with signals handed on from before it is there, and waits for its end.
///
/// # Errors
/// It cannot be started, or the host's.
pub(super) fn run(start: impl FnOnce() -> io::Result<Child>) -> io::Result<ExitStatus> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let (told, mut next) = tokio::sync::mpsc::unbounded_channel();
        for one in TOLD.into_iter().filter(|signal| !is_ignored(*signal)) {
            let mut signals = signal(SignalKind::from_raw(one.as_raw()))?;
            let told = told.clone();
            // Signals of a kind that are not taken yet are one (signal(7)): no queue grows.
            tokio::spawn(async move {
                while signals.recv().await.is_some() && told.send(one).is_ok() {}
            });
        }
        let mut child = start()?;
        // Our own child that was not waited for yet: the number is nobody else's.
        let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        let (over, mut end) = tokio::sync::oneshot::channel();
        std::thread::Builder::new().name("program".into()).spawn(move || {
            // Whoever asked is there until it is told.
            let _ = over.send(child.wait());
        })?;
        loop {
            tokio::select! {
                ended = &mut end => return ended.map_err(io::Error::other)?,
                Some(one) = next.recv() => {
                    if !(KEYS.contains(&one) && at_the_keys()) {
                        // It may end this moment: then that is what is seen next.
                        let _ = pidfd_send_signal(&handle, one);
                    }
                }
            }
        }
    })
}
