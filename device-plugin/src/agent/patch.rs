//! What may change of a NIC that runs: its limits, which file and objects say, and the addresses
//! that IPAM gave, which the ledger has.
//!
//! Nothing is locked while the daemon is asked, and each network is asked for itself: one that does
//! not answer keeps neither pods waiting nor NICs of others. So what is asked for may be out of
//! date when the answer comes; then it is looked at again at once.

use std::collections::BTreeMap;

use tokio::sync::Semaphore;
use vhost_rdma_proto::v1;

use super::allocate::{limits, same_addresses};
use super::attach::limit_differences;
use super::{Agent, State};
use crate::daemon::{Daemon, DaemonError, is_connected};
use crate::grant::nic_name;
use crate::holders::Kubelet;
use crate::ledger::Grant;
use crate::pool::Pool;

/// NICs of one network that are changed at a time.
const AT_ONCE: usize = 8;

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Has every NIC that runs be what it should be by now.
    pub(super) async fn patch(&self) {
        let mut networks: BTreeMap<String, Vec<(String, v1::UpdateNicRequest)>> = BTreeMap::new();
        {
            let state = self.state.lock().await;
            let Some(view) = &state.daemon.view else { return };
            for (id, _) in state.ledger.iter() {
                let Some(nic) = view.nics.get(&nic_name(id)) else { continue };
                let Some(patch) = wanted(&state, id, nic) else { continue };
                networks.entry(nic.network.clone()).or_default().push((id.clone(), patch));
            }
        }
        let asked = networks.into_values().map(|patches| self.patch_network(patches));
        futures::future::join_all(asked).await;
    }

    async fn patch_network(&self, patches: Vec<(String, v1::UpdateNicRequest)>) {
        let places = &Semaphore::new(AT_ONCE);
        let asked = patches.into_iter().map(|(id, patch)| async move {
            let _place = places.acquire().await;
            self.change(&id, patch).await;
        });
        futures::future::join_all(asked).await;
        // What holds is told at once, whatever other networks do.
        let state = self.state.lock().await;
        self.note(&state);
    }

    /// The same for NICs whose sandbox has ended: what IPAM has back is another's in a moment.
    pub(super) async fn free_addresses(&self, ids: &[String]) {
        for id in ids {
            // Whether a VMM is connected now: the last look may be a while ago.
            let Ok(nic) = self.daemon.nic(&nic_name(id)).await else { continue };
            let patch = {
                let state = self.state.lock().await;
                wanted(&state, id, &nic)
            };
            if let Some(patch) = patch {
                self.change(id, patch).await;
            }
        }
    }

    async fn change(&self, id: &str, patch: v1::UpdateNicRequest) {
        let name = patch.name.clone();
        match self.daemon.update_nic(patch).await {
            Ok(nic) => {
                let mut state = self.state.lock().await;
                tracing::info!(id, "the daemon has what the NIC may hold and use by now");
                if wanted(&state, id, &nic).is_some() {
                    self.wake.notify_one();
                }
                // What was looked at meanwhile is out of date.
                state.daemon.changes += 1;
                let view = state.daemon.view.as_mut();
                if let Some(known) = view.and_then(|view| view.nics.get_mut(&name)) {
                    *known = nic;
                }
            }
            // It has ended meanwhile.
            Err(DaemonError::NotFound(_)) => {}
            Err(error) => {
                let what = "limits or addresses do not reach the NIC; it is tried again";
                tracing::error!(id, %error, what);
            }
        }
    }
}

/// What is to be changed of the NIC of an ID.
fn wanted(state: &State, id: &str, nic: &v1::Nic) -> Option<v1::UpdateNicRequest> {
    let (pool, _) = state.pools.device(id)?;
    let grant = state.ledger.get(id)?.grant.as_ref()?;
    let limits = limits(pool, Some(grant));
    let limits = (!limit_differences(&limits, nic).is_empty()).then_some(limits);
    // None means any to the daemon: whoever is connected, or may come back, has had none so far.
    let bound = !grant.addresses.is_empty() || !(is_connected(nic) || nic.interrupted);
    let differ = bound && !same_addresses(&grant.addresses, &nic.addresses);
    let addresses = (has_cnis(pool, grant) && differ)
        .then(|| v1::Addresses { addresses: grant.addresses.clone() });
    (limits.is_some() || addresses.is_some()).then(|| v1::UpdateNicRequest {
        name: nic.name.clone(),
        limits,
        addresses,
        ..v1::UpdateNicRequest::default()
    })
}

/// Whether the NIC's addresses are those of a sandbox, and end with it. Those of a named NIC are
/// the object's.
pub(super) fn has_cnis(pool: &Pool, grant: &Grant) -> bool {
    pool.config.has_cnis_addresses() && grant.named().is_none()
}
