//! Changes of one network come to their turn one after the other (`crate::turns`), and wait for it
//! here, without a thread: threads that carry out calls are few. A network whose process answers
//! nothing may be asked by many; all of them would hold one for a minute, and neither other
//! networks nor who only looks would be served.
//!
//! Who hangs up while it waits does not come to its turn any more.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// By network, as long as somebody is there.
    each: Mutex<BTreeMap<String, Weak<Semaphore>>>,
}

impl Lanes {
    /// Waits until nobody else is in a network's lane, who is then there until it is dropped.
    pub(super) async fn enter(&self, network: &str) -> Option<OwnedSemaphorePermit> {
        // It is never closed.
        self.lane(network).acquire_owned().await.ok()
    }

    fn lane(&self, network: &str) -> Arc<Semaphore> {
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lane) = each.get(network).and_then(Weak::upgrade) {
            return lane;
        }
        each.retain(|_, lane| lane.strong_count() > 0);
        let lane = Arc::new(Semaphore::new(1));
        each.insert(network.to_owned(), Arc::downgrade(&lane));
        lane
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_at_a_time_is_in_a_lane_and_nothing_is_left() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let lanes = Lanes::default();
            let brief = Duration::from_millis(20);
            let first = lanes.enter("red").await.unwrap();
            let waits = tokio::time::timeout(brief, lanes.enter("red")).await;
            assert!(waits.is_err(), "two are in one lane");
            let other = lanes.enter("blue").await.unwrap();
            drop(first);
            // Who gave up before is not in the way.
            let second = lanes.enter("red").await.unwrap();
            drop((second, other));
            drop(lanes.enter("green").await);
            assert_eq!(lanes.each.lock().unwrap().len(), 1, "those of others are gone");
        });
    }
}
