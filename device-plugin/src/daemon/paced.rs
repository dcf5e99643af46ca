//! A daemon of which one network may be silent.
//!
//! A tenant may keep its network's process from answering for a while, and the agent asks under the
//! one lock that all pods of the node wait for: so such a call has a short time. Who did not answer
//! in it is left alone, each time for twice as long, and every call for it meanwhile fails at once.
//! What was asked may still happen: the agent finds it when it looks again, as after a crash.
//!
//! A daemon says of its networks which do not answer. So a change of one that has a NIC begins with
//! a look at that, which is short: who was silent when all was looked at last, and is still, is not
//! asked at all, and who has just become so gets a second. A daemon of before does not say it.
//!
//! NICs that end may rightly take long, since their guests have the last word, so that is counted
//! apart: a network whose VMM is slow to close still makes NICs.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vhost_rdma_proto::v1;

use super::{Daemon, DaemonError, Done, View};

/// How patient it is.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// How long a change may take.
    pub call: Duration,
    /// How long a network that did not answer is left alone, at first.
    pub rest: Duration,
    /// And at most.
    pub longest: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        let [call, rest, longest] = [5, 10, 300].map(Duration::from_secs);
        Self { call, rest, longest }
    }
}

/// How long a network may be silent that was not before, and between two looks whether it is.
const BRIEF: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(100);

/// What is asked of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    /// What the supervisor mostly answers by itself: that says nothing of the network's process.
    Network,
    /// To make or change a NIC.
    Change,
    /// To end a NIC.
    End,
}

/// When a network is asked again.
#[derive(Debug, Clone, Copy)]
struct Rest {
    until: Instant,
    length: Duration,
}

#[derive(Debug, Default)]
struct Known {
    rests: BTreeMap<(String, Work), Rest>,
    /// The network of each NIC.
    networks: BTreeMap<String, String>,
    /// A NIC of each network, and whether that did not answer, when all was looked at last.
    looks: BTreeMap<String, (String, bool)>,
}

/// A daemon whose networks cannot take each other's time.
#[derive(Debug)]
pub struct Paced<D> {
    daemon: D,
    pace: Pace,
    known: Mutex<Known>,
}

impl<D: Daemon> Paced<D> {
    /// The same daemon.
    #[must_use]
    pub fn new(daemon: D, pace: Pace) -> Self {
        Self { daemon, pace, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The network of a NIC; of one that is not known, a network of its own.
    fn network_of(&self, nic: &str) -> String {
        self.known().networks.get(nic).cloned().unwrap_or_else(|| format!("of {nic}"))
    }

    /// Whether the daemon says that a network does not answer, and goes on saying so.
    async fn says_nothing(&self, network: &str) -> bool {
        let look = self.known().looks.get(network).cloned();
        let Some((nic, silent)) = look else { return false };
        let until = Instant::now() + BRIEF;
        loop {
            match tokio::time::timeout(self.pace.call, self.daemon.nic(&nic)).await {
                Ok(Ok(nic)) if nic.silent && nic.network == network => {}
                // It answers, or that says nothing of it.
                _ => return false,
            }
            if silent || Instant::now() >= until {
                return true;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn ask<T>(
        &self,
        network: &str,
        work: Work,
        call: impl Future<Output = Done<T>> + Send,
    ) -> Done<T> {
        let key = (network.to_owned(), work);
        let rest = self.known().rests.get(&key).copied();
        if let Some(rest) = rest {
            let left = rest.until.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                return Err(silent(network, left));
            }
        }
        let begun = Instant::now();
        let answer = if work == Work::Change && self.says_nothing(network).await {
            None
        } else {
            tokio::time::timeout(self.pace.call, call).await.ok()
        };
        let Some(answer) = answer else {
            let length = rest.map_or(self.pace.rest, |rest| rest.length * 2);
            let length = length.min(self.pace.longest);
            self.known().rests.insert(key, Rest { until: Instant::now() + length, length });
            let error = silent(network, length);
            tracing::error!(network, waited = ?begun.elapsed(), %error, "no answer in time");
            return Err(error);
        };
        // A daemon that is gone says nothing about a network.
        if !matches!(answer, Err(DaemonError::Unreachable(_))) {
            self.known().rests.remove(&key);
        }
        answer
    }
}

fn silent(network: &str, left: Duration) -> DaemonError {
    DaemonError::Silent(format!(
        "network {network:?} of the daemon does not answer; it is asked again in {} s",
        left.as_secs() + 1
    ))
}

impl<D: Daemon> Daemon for Paced<D> {
    async fn view(&self) -> Done<View> {
        let view = self.daemon.view().await?;
        let of = |nic: &v1::Nic| (nic.name.clone(), nic.network.clone());
        let mut known = self.known();
        known.networks = view.nics.values().map(of).collect();
        let look = |nic: &v1::Nic| (nic.network.clone(), (nic.name.clone(), nic.silent));
        known.looks = view.nics.values().map(look).collect();
        let now = Instant::now();
        let longest = self.pace.longest;
        // Whoever rested long ago, and was not asked since, may have been removed.
        known.rests.retain(|_, rest| rest.until + longest > now);
        drop(known);
        Ok(view)
    }

    async fn ensure_network(&self, name: &str, vni: Option<u32>) -> Done<()> {
        self.ask(name, Work::Network, self.daemon.ensure_network(name, vni)).await
    }

    async fn remove_network(&self, name: &str, vni: u32) -> Done<()> {
        self.ask(name, Work::Network, self.daemon.remove_network(name, vni)).await
    }

    async fn replace_peers(&self, request: v1::ReplacePeersRequest) -> Done<()> {
        let network = request.network.clone();
        self.ask(&network, Work::Network, self.daemon.replace_peers(request)).await
    }

    async fn reload(&self) -> Done<v1::ReloadResponse> {
        self.daemon.reload().await
    }

    async fn add_nic(&self, request: v1::AddNicRequest) -> Done<v1::Nic> {
        let network = request.network.clone();
        // Also if it is late: then it ends as one of this network.
        self.known().networks.insert(request.name.clone(), network.clone());
        self.ask(&network, Work::Change, self.daemon.add_nic(request)).await
    }

    async fn update_nic(&self, request: v1::UpdateNicRequest) -> Done<v1::Nic> {
        let network = self.network_of(&request.name);
        self.ask(&network, Work::Change, self.daemon.update_nic(request)).await
    }

    async fn nic(&self, name: &str) -> Done<v1::Nic> {
        self.daemon.nic(name).await
    }

    async fn remove_nic(&self, name: &str) -> Done<()> {
        let network = self.network_of(name);
        self.ask(&network, Work::End, self.daemon.remove_nic(name)).await
    }
}
