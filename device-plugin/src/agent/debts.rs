//! Addresses that their IPAM plugin does not take back.
//!
//! Which IPAM plugin a NIC has, and with what it is called, is a tenant's word. One whose DEL fails
//! must not keep the NIC: when all else is undone, the NIC is free, and what is left of its
//! attachment is filed here, under a name that no ID has. It is asked again for a while, by the CNI
//! plugin's DEL as for what runtimes forget, and whenever the runtime itself asks for a DEL or GC
//! of it; then it is let go, and the log says so. Debts are kept in the ledger, so that they
//! outlive the agent, and there is a bound on them.

use std::time::Duration;

use vhost_rdma_agent_api::{Attachment, Record, State as Progress, Step};

use super::{Agent, State};
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::ledger::Slot;

/// How their names in the ledger begin: IDs are made of names of pools, or are PCI addresses.
const MARK: &str = "owed@";
/// The most of them. Each is as long as its network's configuration may be.
const MOST: usize = 64;
/// How often one is asked for, at growing intervals: some fifteen minutes.
const TRIES: u32 = 8;
/// Between two looks.
const LOOK: Duration = Duration::from_secs(5);

/// Is it one of them, and no ID?
pub(super) fn is_debt(id: &str) -> bool {
    id.starts_with(MARK)
}

/// What it is called.
pub(super) fn name(nic: &str, attachment: &Attachment) -> String {
    format!("{MARK}{nic}@{}@{}", attachment.container_id, attachment.if_name)
}

/// How many there are.
pub(super) fn count(state: &State) -> usize {
    state.ledger.iter().filter(|(id, _)| is_debt(id)).count()
}

/// What is left of a record when all but its addresses is undone. `more` are filed in the same
/// moment.
pub(super) fn left(state: &State, record: &Record, more: usize) -> Option<(String, Slot)> {
    let (nic, container) = (&record.nic.id, &record.attachment.container_id);
    if count(state) + more >= MOST {
        tracing::error!(
            nic,
            container,
            most = MOST,
            "an IPAM plugin does not take its addresses back, as too many others: it is let go"
        );
        return None;
    }
    tracing::warn!(nic, container, "its IPAM plugin owes addresses; it is asked again");
    let mut record = Record { state: Progress::Detaching, done: None, ..record.clone() };
    record.steps.retain(|step| matches!(step, Step::Ipam { .. }));
    let slot = Slot { records: vec![record.clone()], ..Slot::default() };
    Some((name(nic, &record.attachment), slot))
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Has addresses given back that are owed, for ever.
    pub async fn collect_debts(&self) {
        loop {
            self.ask_for_debts().await;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Asks for each that is due, once. It takes as long as an IPAM plugin likes, so nothing else
    /// waits for it.
    pub async fn ask_for_debts(&self) {
        let due = {
            let state = self.state.lock().await;
            let all = state.ledger.iter().map(|(id, _)| id.clone()).filter(|id| is_debt(id));
            state.stuck.due(all.collect(), &self.settings)
        };
        for id in due {
            match self.undo_leftovers(&id).await {
                Ok(()) => tracing::info!(id, "addresses that were owed are given back"),
                Err(why) => self.still_owed(id, &why).await,
            }
        }
    }

    /// One was asked for in vain: at some time it is let go.
    async fn still_owed(&self, id: String, why: &str) {
        let mut state = self.state.lock().await;
        if state.stuck.times(&id) < TRIES {
            return;
        }
        tracing::error!(id, why, "addresses are not given back; they are let go");
        match self.commit(&mut state, vec![(id.clone(), Slot::default())], true).await {
            Ok(()) => state.stuck.keep(|other| other != id),
            Err(error) => tracing::error!(id, %error, "cannot write that down"),
        }
    }
}
