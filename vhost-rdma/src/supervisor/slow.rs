//! NICs that a process is slow to let go of.
//!
//! Their guests have the last word, so it may rightly take a minute; and one that a guest took over
//! may say nothing at all. Who removes a NIC waits for neither: what is left is waited for here, by
//! a thread that is there as long as there is something, and who does not do it in time is ended.
//! What the process is asked next comes after it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Instant;

use super::calls::{Change, PATIENCE, Shared};

/// Those of one network.
#[derive(Default)]
pub(super) struct Slow(Arc<Mutex<Queue>>);

#[derive(Default)]
struct Queue {
    /// By age: which NIC, what was asked, and since when it may take its time.
    waiting: VecDeque<(String, Change, Instant)>,
    /// There is a thread.
    served: bool,
}

impl Slow {
    /// Waits for the end of a NIC, but not here.
    pub(super) fn wait(&self, shared: &Arc<Shared>, nic: &str, change: Change) {
        let mut queue = lock(&self.0);
        queue.waiting.push_back((nic.to_owned(), change, Instant::now()));
        if std::mem::replace(&mut queue.served, true) {
            return;
        }
        drop(queue);
        let name = format!("slow-{}", shared.start.network);
        let (own, queue) = (shared.clone(), self.0.clone());
        if Builder::new().name(name).spawn(move || serve(&own, &queue)).is_err() {
            serve(shared, &self.0);
        }
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(shared: &Shared, queue: &Mutex<Queue>) {
    loop {
        let (nic, change, since) = {
            let mut queue = lock(queue);
            let Some(next) = queue.waiting.pop_front() else {
                queue.served = false;
                return;
            };
            next
        };
        let left = PATIENCE.saturating_sub(since.elapsed());
        let done = shared.carried_out_within(&change, left);
        if let Err(undone) = done.unwrap_or_else(|| Err(shared.give_up_on(change))) {
            let why = undone.why();
            tracing::error!(nic, why, "the NIC was not let go of in time");
        }
    }
}
