//! Who runs where: the guest's threads on the first core, the device's on the last.
//!
//! A scheduler that puts a polling worker and the thread that it serves on one core measures its
//! own time slice; and a placement that changes from sample to sample measures chance. So both the
//! device and its reference get the same places. On a machine with one core nothing is moved.

use std::process::{Command, Stdio};

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// The cores that this process may use, if there are two at least: first and last.
fn places() -> Option<(usize, usize)> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut usable = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let first = usable.next()?;
    usable.next_back().map(|last| (first, last))
}

fn move_to(thread: Option<Pid>, cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // A thread that just ended need not move.
    let _gone = sched_setaffinity(thread, &set);
}

/// The places, asked for before the first move narrows them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cores(Option<(usize, usize)>);

impl Cores {
    /// Of this process, once for all.
    pub(super) fn get() -> Self {
        static CORES: std::sync::OnceLock<Cores> = std::sync::OnceLock::new();
        *CORES.get_or_init(|| Self(places()))
    }

    /// Moves the calling thread, and those that it makes, to the guest's side.
    pub(super) fn guest(self) {
        if let Some((first, _)) = self.0 {
            move_to(None, first);
        }
    }

    /// Moves the calling thread to the device's side.
    pub(super) fn device(self) {
        if let Some((_, last)) = self.0 {
            move_to(None, last);
        }
    }

    /// Gives the workers of a daemon the last core and its other threads the first, and the workers
    /// theirs before all others.
    pub(super) fn worker_alone(self, pids: &[u32]) {
        let Some((first, last)) = self.0 else { return };
        for task in tasks(pids) {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let number = task.file_name().to_str().and_then(|n| n.parse().ok());
            let Some(thread) = number.and_then(Pid::from_raw) else { continue };
            let is_worker = name.starts_with("vrdma-shard");
            move_to(Some(thread), if is_worker { last } else { first });
            if is_worker {
                first_in_line(thread);
            }
        }
    }

    /// Gives each worker of a process a core of its own, as far as there are two: the last core to
    /// the first worker, since guests are on the first.
    pub(super) fn worker_each(self, pid: u32) {
        let Some((first, last)) = self.0 else { return };
        for task in tasks(&[pid]) {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let worker = name.trim_end().strip_prefix("vrdma-shard-").and_then(|n| n.parse().ok());
            let number = task.file_name().to_str().and_then(|n| n.parse().ok());
            if let (Some(worker), Some(thread)) = (worker, number.and_then(Pid::from_raw)) {
                let worker: u32 = worker;
                move_to(Some(thread), if worker.is_multiple_of(2) { last } else { first });
            }
        }
    }

    /// As [`Self::worker_alone`], where a process of `pids` has the worker, and the workers of all
    /// others are like any thread.
    pub(super) fn worker_of(self, worker: u32, pids: &[u32]) {
        let Some((first, _)) = self.0 else { return };
        let others: Vec<u32> = pids.iter().copied().filter(|pid| *pid != worker).collect();
        for task in tasks(&others) {
            let number = task.file_name().to_str().and_then(|n| n.parse().ok());
            if let Some(thread) = number.and_then(Pid::from_raw) {
                move_to(Some(thread), first);
            }
        }
        self.worker_alone(&[worker]);
    }

    /// Moves all threads of processes, and those that they make, to the device's side.
    pub(super) fn device_process(self, pids: &[u32]) {
        let Some((_, last)) = self.0 else { return };
        for task in tasks(pids) {
            let number = task.file_name().to_str().and_then(|n| n.parse().ok());
            if let Some(thread) = number.and_then(Pid::from_raw) {
                move_to(Some(thread), last);
            }
        }
    }
}

/// The threads of processes.
fn tasks(pids: &[u32]) -> Vec<std::fs::DirEntry> {
    let dirs = pids.iter().map(|pid| format!("/proc/{pid}/task"));
    dirs.flat_map(|dir| std::fs::read_dir(dir).expect("/proc").flatten()).collect()
}

/// Lets a thread have its core whenever it wants to, before all threads that are not real time.
///
/// # Panics
/// Where that is refused: what waits for others' threads would measure them.
pub(super) fn first_in_line(thread: Pid) {
    let thread = thread.as_raw_nonzero().to_string();
    let mut chrt = Command::new("chrt");
    chrt.args(["--fifo", "--pid", "1", &thread]).stdin(Stdio::null());
    let done = chrt.status().expect("chrt (util-linux) runs");
    assert!(done.success(), "SCHED_FIFO is refused: it takes CAP_SYS_NICE");
}
