//! A thread that is there while there is something to do.
//!
//! What a VMM may make long has a thread of its own: its messages, its queues, telling it of
//! events, letting it in. A guest that is idle has work of no kind for hours, and a thread costs
//! memory. So a thread leaves when it was not called for a while, and comes back when it is.
//!
//! Whoever has work sets a bit and calls. Where a thread waits, it is woken; where there is none,
//! the [`Watch`] of the process starts one: a worker makes no thread. `mode` says which it is, and
//! of the two stores and looks (the caller's of `due`, then `mode`; the thread's the other way
//! round) one sees the other, since all are sequentially consistent. A word that a thread waits for
//! is changed before the thread is woken: it may have looked, and not wait yet, and the kernel
//! compares the word once more before it does (futex(2)).

use std::fmt;
use std::io;
#[cfg(test)]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::thread::futex;

use super::Watch;

/// How long a thread waits for more before it leaves: longer than between two commands of a driver
/// that is busy.
const LINGER: Duration = Duration::from_secs(1);

/// Between two looks whether a thread has ended.
const LOOK: Duration = Duration::from_millis(1);

/// There is no thread.
const AWAY: u32 = 0;
/// There is one, and it works or is about to look.
const AWAKE: u32 = 1;
/// There is one, and it waits.
const ASLEEP: u32 = 2;
/// There will be none any more.
const OVER: u32 = 3;

/// `ending`: it is not.
const NOT_YET: u32 = 0;
/// It is to end.
const NOW: u32 = 1;

/// What it does: all that these bits stand for.
type Job = Box<dyn Fn(&Arc<OnCall>, u64) + Send + Sync>;

/// See the module.
pub(crate) struct OnCall {
    name: String,
    /// Bits of what is to be done.
    due: AtomicU64,
    mode: AtomicU32,
    ending: AtomicU32,
    job: Job,
    /// What is done each time that the host has no thread.
    without: Box<dyn Fn() + Send + Sync>,
    watch: Arc<Watch>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The host has no thread.
    #[cfg(test)]
    refused: AtomicBool,
    /// What happens once, right after the thread has found nothing due.
    #[cfg(test)]
    looked: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl fmt::Debug for OnCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnCall").field("name", &self.name).finish_non_exhaustive()
    }
}

impl OnCall {
    /// One that has nothing to do yet; `name` is for its thread, which `watch` starts.
    pub(crate) fn new(
        name: String,
        watch: Arc<Watch>,
        job: impl Fn(&Arc<Self>, u64) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::or(name, watch, job, || ())
    }

    /// The same; while the host has no thread, `without` is done now and then, which waits for
    /// nobody.
    pub(crate) fn or(
        name: String,
        watch: Arc<Watch>,
        job: impl Fn(&Arc<Self>, u64) + Send + Sync + 'static,
        without: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            due: AtomicU64::new(0),
            mode: AtomicU32::new(AWAY),
            ending: AtomicU32::new(NOT_YET),
            job: Box::new(job),
            without: Box::new(without),
            watch,
            thread: Mutex::default(),
            #[cfg(test)]
            refused: AtomicBool::new(false),
            #[cfg(test)]
            looked: Mutex::default(),
        })
    }

    /// Has what these bits stand for done. What it needs must have been stored before. It waits for
    /// nobody, and is a system call only if the thread is not awake.
    #[inline]
    pub(crate) fn call(self: &Arc<Self>, bits: u64) {
        // Whoever set a bit before has called it, and it sees this one as well.
        if self.due.fetch_or(bits, SeqCst) == 0 && self.wake() == AWAY {
            self.watch.start_thread(self.clone());
        }
    }

    /// Starts the thread, if there is none; false if the host has none at the moment.
    pub(crate) fn start(self: &Arc<Self>) -> bool {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // One that was told to end does the rest itself.
        if self.is_ending() || self.mode.compare_exchange(AWAY, AWAKE, SeqCst, SeqCst).is_err() {
            return true;
        }
        let Ok(started) = self.spawn() else {
            self.mode.store(AWAY, SeqCst);
            return false;
        };
        // The one before has left, or is about to.
        *thread = Some(started);
        true
    }

    fn spawn(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        #[cfg(test)]
        if self.refused.load(SeqCst) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let own = self.clone();
        std::thread::Builder::new().name(self.name.clone()).spawn(move || own.run())
    }

    /// Starts the thread. Where the host has none it says so, if that `is_new`, and does what is to
    /// be done without; false then.
    pub(super) fn start_or_do_without(self: &Arc<Self>, is_new: bool) -> bool {
        let started = self.start();
        if !started {
            if is_new {
                let thread = &self.name;
                tracing::error!(thread, "the host has no thread for this; it is tried again");
            }
            (self.without)();
        }
        started
    }

    /// Lets `time` pass, or what is left of it when the end comes.
    pub(crate) fn pause(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.is_ending()
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            wait(&self.ending, NOT_YET, left);
        }
    }

    /// Whether it is to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(SeqCst) == NOW
    }

    /// Does what is still due, and nothing afterwards. Waits for it, unless it is the thread itself
    /// that says so.
    pub(crate) fn end(self: &Arc<Self>) {
        let thread = {
            let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
            self.ending.store(NOW, SeqCst);
            if self.mode.compare_exchange(AWAY, OVER, SeqCst, SeqCst).is_ok() {
                drop(thread);
                return self.finish();
            }
            thread.take()
        };
        wake(&self.ending);
        self.wake();
        let Some(thread) = thread else { return };
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!(thread = self.name, "a thread of a connection panicked");
        }
    }

    /// As [`Self::end`], but no longer than so; false if its thread still does something then. It
    /// ends when it is done with it.
    pub(crate) fn end_within(self: &Arc<Self>, time: Duration) -> bool {
        {
            let _thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
            self.ending.store(NOW, SeqCst);
        }
        wake(&self.ending);
        self.wake();
        let until = Instant::now() + time;
        while !matches!(self.mode.load(SeqCst), AWAY | OVER) {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        self.end();
        true
    }

    fn finish(self: &Arc<Self>) {
        let due = self.due.swap(0, SeqCst);
        if due != 0 {
            (self.job)(self, due);
        }
    }

    fn run(self: &Arc<Self>) {
        loop {
            // Before the look at what is due: who calls and then ends it has both seen.
            let ends = self.is_ending();
            let due = self.due.swap(0, SeqCst);
            if due != 0 {
                (self.job)(self, due);
                continue;
            }
            #[cfg(test)]
            if let Some(meanwhile) = self.looked.lock().unwrap().take() {
                meanwhile();
            }
            if ends {
                return self.mode.store(OVER, SeqCst);
            }
            self.mode.store(ASLEEP, SeqCst);
            let stays = self.is_wanted() || wait(&self.mode, ASLEEP, LINGER) || self.is_wanted();
            if stays {
                self.mode.store(AWAKE, SeqCst);
                continue;
            }
            self.mode.store(AWAY, SeqCst);
            // Who called just now may have taken it to be asleep.
            if !self.is_wanted() || !self.comes_back() {
                return;
            }
        }
    }

    /// Whether a thread that was about to leave stays after all. Not if another has come meanwhile:
    /// the end waits for the one that came last.
    fn comes_back(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let own = std::thread::current().id();
        let is_last = thread.as_ref().is_none_or(|last| last.thread().id() == own);
        is_last && self.mode.compare_exchange(AWAY, AWAKE, SeqCst, SeqCst).is_ok()
    }

    fn is_wanted(&self) -> bool {
        self.due.load(SeqCst) != 0 || self.is_ending()
    }

    /// Wakes the thread, if it waits, or is about to; what `mode` was.
    fn wake(&self) -> u32 {
        let asleep = self.mode.compare_exchange(ASLEEP, AWAKE, SeqCst, SeqCst);
        if asleep.is_ok() {
            wake(&self.mode);
        }
        asleep.unwrap_or_else(|mode| mode)
    }
}

/// Waits while a word is that, for so long; false if that was it.
fn wait(word: &AtomicU32, while_it_is: u32, time: Duration) -> bool {
    let time = Timespec::try_from(time).ok();
    let waited = futex::wait(word, futex::Flags::PRIVATE, while_it_is, time.as_ref());
    waited != Err(Errno::TIMEDOUT)
}

/// Wakes whoever waits for a word.
fn wake(word: &AtomicU32) {
    // Nothing can go wrong with a word of our own.
    let _ = futex::wake(word, futex::Flags::PRIVATE, u32::MAX >> 1);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Threads of this process that have the name.
    fn threads(name: &str) -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|found| found.trim() == name).count()
    }

    fn eventually(what: &str, is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    #[test]
    fn every_call_is_done_whether_or_not_there_is_a_thread() {
        let watch = Watch::start().unwrap();
        let done = Arc::<AtomicU64>::default();
        let own = done.clone();
        let work = OnCall::new("called-often".into(), watch, move |_, bits| {
            own.fetch_or(bits, SeqCst);
        });
        assert_eq!(threads("called-often"), 0);
        for round in 0..2000u64 {
            let bit = 1 << (round % 64);
            done.store(0, SeqCst);
            work.call(bit);
            eventually("a call is lost", || done.load(SeqCst) & bit != 0);
            // Just when it is about to leave.
            if round % 500 == 250 {
                std::thread::sleep(LINGER - Duration::from_millis(1));
            }
        }
        assert_eq!(threads("called-often"), 1);
        eventually("it does not leave", || threads("called-often") == 0);
        done.store(0, SeqCst);
        work.call(7);
        eventually("it does not come back", || done.load(SeqCst) == 7);
        work.end();
        assert_eq!(threads("called-often"), 0);
    }

    #[test]
    fn what_was_called_for_while_it_looks_is_done_before_the_end() {
        let done = Arc::<AtomicU64>::default();
        let own = done.clone();
        let work = OnCall::new("looks".into(), Watch::start().unwrap(), move |_, bits| {
            own.fetch_or(bits, SeqCst);
        });
        let it = work.clone();
        *work.looked.lock().unwrap() = Some(Box::new(move || {
            it.call(2);
            it.end();
        }));
        work.call(1);
        eventually("it does not end", || work.mode.load(SeqCst) == OVER);
        assert_eq!(done.load(SeqCst), 3);
    }

    #[test]
    fn what_was_called_for_before_the_end_is_done_and_nothing_after() {
        let watch = Watch::start().unwrap();
        for _ in 0..200 {
            let done = Arc::<AtomicU64>::default();
            let own = done.clone();
            let work = OnCall::new("ends".into(), watch.clone(), move |_, bits| {
                own.fetch_or(bits, SeqCst);
            });
            work.call(1);
            work.end();
            assert_eq!(done.load(SeqCst), 1);
            work.call(2);
            assert!(work.start());
            assert_eq!(done.load(SeqCst), 1);
        }
    }

    #[test]
    fn who_has_no_thread_does_without_until_there_is_one() {
        let (done, does_without) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let (own, other) = (done.clone(), does_without.clone());
        let work = OnCall::or(
            "without".into(),
            Watch::start().unwrap(),
            move |_, bits| _ = own.fetch_or(bits, SeqCst),
            move || _ = other.fetch_add(1, SeqCst),
        );
        work.refused.store(true, SeqCst);
        work.call(1);
        eventually("nothing is done", || does_without.load(SeqCst) > 2);
        assert_eq!(done.load(SeqCst), 0);
        work.refused.store(false, SeqCst);
        eventually("it does not come", || done.load(SeqCst) == 1);
        // And where the end comes first.
        eventually("it does not leave", || work.mode.load(SeqCst) == AWAY);
        work.refused.store(true, SeqCst);
        work.call(2);
        work.end();
        assert_eq!(done.load(SeqCst), 3);
    }

    /// Calls that come while the thread makes up its mind to wait.
    #[test]
    fn a_call_is_heard_by_a_thread_that_is_about_to_wait() {
        let done = Arc::<AtomicU64>::default();
        let own = done.clone();
        let work = OnCall::new("dozes".into(), Watch::start().unwrap(), move |_, _| {
            own.fetch_add(1, SeqCst);
        });
        let mut late = 0;
        for round in 0..100_000u64 {
            let begin = Instant::now();
            work.call(1);
            while done.load(SeqCst) == round {
                std::hint::spin_loop();
            }
            late += u32::from(begin.elapsed() > LINGER / 2);
            // At another point of its way each time.
            (0..round % 200).for_each(|_| std::hint::spin_loop());
        }
        work.end();
        // A machine with much to do may keep a thread waiting for so long as well, but not often.
        assert!(late <= 3, "{late} calls were heard as late as if nobody had called");
    }

    #[test]
    fn the_end_ends_a_pause_that_begins() {
        for round in 0..2000u64 {
            let begun = Arc::<AtomicU64>::default();
            let own = begun.clone();
            let work = OnCall::new("nods".into(), Watch::start().unwrap(), move |on_call, _| {
                own.store(1, SeqCst);
                on_call.pause(Duration::from_secs(60));
            });
            work.call(1);
            while begun.load(SeqCst) == 0 {
                std::hint::spin_loop();
            }
            (0..round % 200).for_each(|_| std::hint::spin_loop());
            let begin = Instant::now();
            work.end();
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        }
    }

    #[test]
    fn the_end_ends_a_pause() {
        let (begun, is_begun) = channel();
        let work = OnCall::new("pauses".into(), Watch::start().unwrap(), move |own, _| {
            begun.send(()).unwrap();
            own.pause(Duration::from_secs(60));
        });
        work.call(1);
        is_begun.recv().unwrap();
        // Calls do not.
        work.call(2);
        let begin = Instant::now();
        work.end();
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }
}
