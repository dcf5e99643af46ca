//! The end of attachments: what there is to undo, and that it is undone.

use std::sync::Arc;

use vhost_rdma_agent_api::{self as api, Detach, Detached, Gc, Record, State as Progress};

use super::refusal::internal;
use super::{Agent, debts, patch};
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::ledger::Slot;

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    pub(super) async fn detach(&self, asked: Detach) -> Result<Vec<Record>, api::Fault> {
        let means = |record: &Record| {
            record.attachment.container_id == asked.container_id
                && asked.if_name.as_ref().is_none_or(|name| *name == record.attachment.if_name)
                && asked.device_id.as_ref().is_none_or(|device| *device == record.nic.id)
        };
        self.mark_detaching(means).await
    }

    pub(super) async fn gc(&self, asked: Gc) -> Result<Vec<Record>, api::Fault> {
        let means = |record: &Record| {
            record.network == asked.network && !asked.valid.contains(&record.attachment)
        };
        self.mark_detaching(means).await
    }

    async fn mark_detaching(
        &self,
        means: impl Fn(&Record) -> bool,
    ) -> Result<Vec<Record>, api::Fault> {
        let mut state = self.state.lock().await;
        let mut changes = Vec::new();
        let mut records = Vec::new();
        for (id, slot) in state.ledger.iter() {
            if !slot.records.iter().any(&means) {
                continue;
            }
            let mut slot = slot.clone();
            for record in slot.records.iter_mut().filter(|record| means(record)) {
                record.state = Progress::Detaching;
                records.push(record.clone());
            }
            changes.push((id.clone(), slot));
        }
        self.commit(&mut state, changes, true).await.map_err(internal)?;
        Ok(records)
    }

    /// All is undone, or all but what an IPAM plugin gave (`owing`).
    pub(super) async fn detached(&self, asked: Detached, owing: bool) -> Result<(), api::Fault> {
        let mut state = self.state.lock().await;
        let pools = Arc::clone(&state.pools);
        let mut changes: Vec<(String, Slot)> = Vec::new();
        let mut owed = Vec::new();
        let mut ended = Vec::new();
        for (id, slot) in state.ledger.iter() {
            let Some(record) = slot.record(&asked.attachment) else { continue };
            if !asked.nics.is_empty() && !asked.nics.contains(&record.nic.id) {
                continue;
            }
            if owing {
                if debts::is_debt(id) {
                    continue;
                }
                owed.extend(debts::left(&state, record, owed.len()));
            }
            let mut slot = slot.clone();
            slot.records.retain(|record| record.attachment != asked.attachment);
            // Used is remembered: the next pod must get a NIC without the objects of this one.
            if let Some(grant) = &mut slot.grant {
                grant.used = true;
                let found = pools.device(id).filter(|(pool, _)| patch::has_cnis(pool, grant));
                if found.is_some() && slot.records.is_empty() && !grant.addresses.is_empty() {
                    grant.addresses.clear();
                    ended.push(id.clone());
                }
            }
            changes.push((id.clone(), slot));
        }
        changes.extend(owed);
        self.commit(&mut state, changes, true).await.map_err(internal)?;
        self.publish(&mut state);
        drop(state);
        self.free_addresses(&ended).await;
        self.wake.notify_one();
        Ok(())
    }
}
