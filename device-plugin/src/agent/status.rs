//! What people and monitoring see.

use std::sync::{Arc, PoisonError};

use vhost_rdma_agent_api::{DeviceStatus, PoolStatus, Status};
use vhost_rdma_proto::v1;

use super::health::defect;
use super::{Agent, Counters, State, debts};
use crate::daemon::{Daemon, session_word};
use crate::grant::nic_name;
use crate::holders::Kubelet;
use crate::ledger::Slot;
use crate::member::Channel;

/// One look at everything, for metrics.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// As the operator sees it.
    pub status: Status,
    /// What happened.
    pub counters: Counters,
    /// The configuration file is in force.
    pub config_valid: bool,
    /// The daemon answers.
    pub daemon_up: bool,
    /// NICs of the daemon by ID.
    pub nics: Vec<(String, v1::Nic)>,
    /// Figures of the channel between nodes: names, explanations, values.
    pub channel: Vec<(&'static str, &'static str, i64)>,
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// The state of the agent.
    pub async fn status(&self) -> Status {
        let state = self.state.lock().await;
        status(&state)
    }

    /// Everything that monitoring wants, as it was at the last change. It waits for nothing: a call
    /// of the daemon may take a minute, and a probe that waited for it would have the agent killed
    /// for that.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn note(&self, state: &State) {
        let snapshot = Arc::new(Snapshot {
            channel: self.channel.as_ref().map(Channel::figures).unwrap_or_default(),
            ..Self::look(state)
        });
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
        self.noted.notify_one();
    }

    fn look(state: &State) -> Snapshot {
        let nics = state.daemon.view.iter().flat_map(|view| &view.nics);
        Snapshot {
            status: status(state),
            counters: state.counters,
            config_valid: state.config_error.is_none(),
            daemon_up: state.daemon.view.is_some(),
            nics: nics
                .filter_map(|(name, nic)| {
                    Some((name.strip_prefix(crate::grant::NIC_PREFIX)?.to_owned(), nic.clone()))
                })
                .collect(),
            channel: Vec::new(),
        }
    }
}

pub(super) fn status(state: &State) -> Status {
    let mut problems = Vec::new();
    problems.extend(
        state
            .config_error
            .iter()
            .map(|error| format!("the configuration file is refused: {error}")),
    );
    problems.extend(state.pools.problems.iter().cloned());
    problems.extend(
        state.host_error.iter().map(|error| format!("cannot look at the hardware: {error}")),
    );
    let kubelet = state.kubelet_error.as_ref();
    problems.extend(
        kubelet.map(|error| format!("the kubelet's pod-resources API does not answer: {error}")),
    );
    let wants_daemon = state.pools.pools.iter().any(|pool| pool.config.kind.is_served());
    let daemon_down = wants_daemon && state.daemon.view.is_none();
    if daemon_down {
        problems.push(format!("the daemon does not answer: {}", state.daemon.error));
    }
    let ready = kubelet.is_none() && !daemon_down;
    let mut pools = Vec::new();
    let mut devices = Vec::new();
    for pool in &state.pools.pools {
        let mut numbers = PoolStatus {
            name: pool.name().to_owned(),
            resource: pool.resource.clone(),
            kind: pool.config.kind,
            network: if pool.config.kind.is_served() {
                pool.config.network().to_owned()
            } else {
                String::new()
            },
            registered: state.registered.contains(pool.name()),
            total: 0,
            healthy: 0,
            granted: 0,
            free: 0,
        };
        for device in pool.devices.values() {
            let slot = state.ledger.get(&device.id);
            let reason = defect(state, pool, device);
            let granted = slot.is_some_and(|slot| slot.grant.is_some());
            numbers.total += 1;
            numbers.healthy += u32::from(reason.is_none());
            numbers.granted += u32::from(granted);
            numbers.free += u32::from(!granted && reason.is_none());
            devices.push(device_status(state, &device.id, pool.name(), slot, reason));
        }
        pools.push(numbers);
    }
    let owed = debts::count(state);
    if owed > 0 {
        problems.push(format!("{owed} addresses are owed by IPAM plugins whose DEL fails"));
    }
    for (id, slot) in state.ledger.iter() {
        if state.pools.device(id).is_none() && !debts::is_debt(id) {
            let reason =
                Some("it is not in the configuration any more, or its hardware is gone".to_owned());
            devices.push(device_status(state, id, &slot.pool, Some(slot), reason));
        }
    }
    Status { version: env!("CARGO_PKG_VERSION").to_owned(), ready, problems, pools, devices }
}

fn device_status(
    state: &State,
    id: &str,
    pool: &str,
    slot: Option<&Slot>,
    reason: Option<String>,
) -> DeviceStatus {
    let blank = Slot::default();
    let slot = slot.unwrap_or(&blank);
    let owner = slot.grant.as_ref().and_then(|grant| grant.owner.as_ref());
    let nic = state.daemon.view.as_ref().and_then(|view| view.nics.get(&nic_name(id)));
    DeviceStatus {
        id: id.to_owned(),
        pool: pool.to_owned(),
        state: slot.state().to_owned(),
        healthy: reason.is_none(),
        reason,
        cordoned: slot.cordoned,
        pod: owner.map(crate::ledger::Owner::pod),
        container: owner.map(|owner| owner.container.clone()),
        attachments: slot.records.iter().map(|record| record.attachment.clone()).collect(),
        session: nic.map(|nic| session_word(nic.session()).to_owned()),
    }
}
