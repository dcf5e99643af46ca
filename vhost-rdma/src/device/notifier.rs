//! The thread that tells one VMM of the guest's events, in the workers' place.
//!
//! The system call that signals an eventfd wakes everyone who waits for it, and the VMM chooses who
//! that is. While a VMM is not trusted with a worker's time (`trust`), the worker sets a bit, and
//! wakes this thread if it sleeps ([`OnCall`]); what the call costs is then the time of a thread
//! that serves this connection alone.
//!
//! A burst of events is one wake-up: bits that come while the thread is busy, or rests as it has to
//! (`Trust::rest`), are found when it looks again. Whoever else would tell a VMM that is to be left
//! alone for a while rings this bell as well.

use std::sync::Arc;

use super::trust::Trust;
use super::vring::Vring;
use crate::watch::{OnCall, Watch};

/// The end that a worker has.
#[derive(Debug, Clone)]
pub(super) struct Bell(Arc<OnCall>);

impl Bell {
    /// Has the VMM told that queue `index` has used buffers. What they hold must have been written
    /// before.
    #[inline]
    pub(super) fn ring(&self, index: usize) {
        self.0.call(1 << (index & 63));
    }
}

/// See the module. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Notifier(Arc<OnCall>);

impl Notifier {
    /// For these queues; bit n is the n-th.
    pub(super) fn new(vrings: Vec<Vring>, trust: Arc<Trust>, watch: Arc<Watch>) -> Self {
        let tell = move |own: &Arc<OnCall>, mut due: u64| {
            while due != 0 {
                rest(own, &trust);
                if let Some(vring) = vrings.get(due.trailing_zeros() as usize) {
                    trust.watch(|| vring.signal());
                }
                due &= due - 1;
            }
        };
        Self(OnCall::new("notifier".to_owned(), watch, tell))
    }

    /// Tells what was rung for, and nothing afterwards.
    pub(super) fn end(&self) {
        self.0.end();
    }

    pub(super) fn bell(&self) -> Bell {
        Bell(self.0.clone())
    }
}

/// Lets the VMM rest for as long as it has to, or until the connection ends.
fn rest(own: &OnCall, trust: &Trust) {
    while let Some(left) = trust.rest()
        && !own.is_ending()
    {
        own.pause(left);
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::eventfd;

    /// A queue, and the VMM's own descriptor of what it is told by.
    fn told() -> (Vring, File) {
        let vring = Vring::new(16).unwrap();
        let vmm = File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        vring.set_call(Some(vmm.try_clone().unwrap()));
        (vring, vmm)
    }

    fn told_by(vrings: Vec<Vring>, trust: Arc<Trust>) -> Notifier {
        Notifier::new(vrings, trust, Watch::start().unwrap())
    }

    fn awaits(vmm: &File) {
        let begin = Instant::now();
        while !eventfd::take(vmm.as_fd()).unwrap() {
            assert!(begin.elapsed() < Duration::from_secs(20), "the VMM is not told");
            std::thread::yield_now();
        }
    }

    #[test]
    fn no_bell_is_lost_and_each_is_for_its_queue() {
        let (first, second) = (told(), told());
        let notifier = told_by(vec![first.0, second.0], Arc::new(Trust::new()));
        let bell = notifier.bell();
        for _ in 0..2000 {
            bell.ring(0);
            awaits(&first.1);
            bell.ring(1);
            awaits(&second.1);
        }
        assert!(!eventfd::take(first.1.as_fd()).unwrap(), "nobody rang for it");
    }

    #[test]
    fn a_vmm_that_is_to_rest_is_told_later_and_does_not_hold_up_the_end() {
        let slow = |rest: Duration| {
            let trust = Arc::new(Trust::new());
            trust.took(rest);
            trust
        };
        let (vring, vmm) = told();
        let trust = slow(Duration::from_millis(300));
        let begin = Instant::now();
        let notifier = told_by(vec![vring], trust);
        notifier.bell().ring(0);
        awaits(&vmm);
        assert!(begin.elapsed() > Duration::from_millis(250), "{:?}", begin.elapsed());
        drop(notifier);
        let notifier = told_by(vec![told().0], slow(Duration::from_secs(20)));
        notifier.bell().ring(0);
        let begin = Instant::now();
        drop(notifier);
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }

    #[test]
    fn what_was_rung_before_the_end_is_told() {
        for _ in 0..200 {
            let (vring, vmm) = told();
            let notifier = told_by(vec![vring], Arc::new(Trust::new()));
            notifier.bell().ring(0);
            drop(notifier);
            assert!(eventfd::take(vmm.as_fd()).unwrap());
        }
    }
}
