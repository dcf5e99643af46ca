//! The API server's side of a node that the controller leads: watches the node's object and writes
//! its status.
//!
//! What is watched is handed to the agent as soon as the agent could write it down, the newest
//! only. What the agent reports is written when it changed, at most a few times a second, the first
//! time whatever it says: what a forerunner left there counts no more. Nothing waits for the API
//! server; while it is away the agent goes on with what it knows.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use vhost_rdma_cluster_api::{
    NodeBlock, RdmaIPBlock, RdmaNode, RdmaNodeStatus, block_name, set_condition,
};

use crate::agent::Agent;
use crate::channel::certify;
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::repeats::Repeats;

/// Between two tries to reach the API server, or the disk.
const RETRY: Duration = Duration::from_secs(2);
/// How long the API server may take for one write.
const PATIENCE: Duration = Duration::from_secs(10);
/// What happens within this time is written together.
const TOGETHER: Duration = Duration::from_millis(200);
/// The longest time without a look at what there is to report.
const LOOK: Duration = Duration::from_secs(30);

/// Follows this node's object for ever, by the API server that kubeconfig or the pod's account
/// name.
pub async fn run<D: Daemon, K: Kubelet>(agent: Arc<Agent<D, K>>, node: String) {
    loop {
        match Client::try_default().await {
            Ok(client) => return by_client(&agent, &node, client).await,
            Err(error) => {
                tracing::debug!(%error, "no API server; what was said last holds");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

async fn by_client<D: Daemon, K: Kubelet>(agent: &Agent<D, K>, node: &str, client: Client) {
    agent.meet(client.clone(), node);
    let certificates = client.clone();
    let certified = async {
        if let Some(channel) = agent.channel() {
            certify::run(agent, channel, certificates).await;
        }
    };
    let api: Api<RdmaNode> = Api::all(client);
    let (newest, seen) = watch::channel(None);
    let names = agent.tend_names();
    tokio::join!(
        look(&api, node, &newest),
        take(agent, seen),
        tell(agent, &api, node),
        certified,
        names
    );
}

async fn look(api: &Api<RdmaNode>, node: &str, newest: &watch::Sender<Option<RdmaNode>>) {
    let only = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let mut changes = Box::pin(watcher(api.clone(), only).default_backoff());
    let mut faults = Repeats::default();
    while let Some(change) = changes.next().await {
        match change {
            Ok(Event::InitApply(node) | Event::Apply(node)) => {
                faults.log_end("the node's object is watched again");
                newest.send_replace(Some(node));
            }
            Ok(Event::Delete(_)) => {
                tracing::warn!("the node's object is gone; what it said last holds");
            }
            Ok(Event::Init | Event::InitDone) => {}
            Err(error) => faults.log(&error.to_string(), "cannot watch the node's object"),
        }
    }
}

async fn take<D: Daemon, K: Kubelet>(
    agent: &Agent<D, K>,
    mut seen: watch::Receiver<Option<RdmaNode>>,
) {
    while seen.changed().await.is_ok() {
        loop {
            let Some(node) = seen.borrow_and_update().clone() else { break };
            match agent.follow(&node).await {
                Ok(()) => break,
                Err(error) => {
                    tracing::error!(%error, "cannot write down what the controller says");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

async fn tell<D: Daemon, K: Kubelet>(agent: &Agent<D, K>, api: &Api<RdmaNode>, node: &str) {
    let mut told: Option<(String, RdmaNodeStatus)> = None;
    let mut faults = Repeats::default();
    loop {
        if let Some((uid, status)) = agent.report().await {
            let status = dated(status, told.as_ref().map(|(_, status)| status));
            let new = (uid, status);
            if told.as_ref() != Some(&new) {
                match write(api, node, &new).await {
                    Ok(()) => {
                        faults.log_end("the node's status is written again");
                        told = Some(new);
                    }
                    Err(error) => {
                        faults.log(&error, "the node's status is not written");
                        tokio::time::sleep(RETRY).await;
                        continue;
                    }
                }
            }
        }
        if let Some((_, status)) = &told {
            own_blocks(agent, api, node, status).await;
        }
        let _ = tokio::time::timeout(LOOK, agent.noted()).await;
        tokio::time::sleep(TOGETHER).await;
    }
}

/// Makes blocks the node's own that the written status names: only now is the block itself asked,
/// which the controller changes before it looks at the status. One of the two sees the other.
async fn own_blocks<D: Daemon, K: Kubelet>(
    agent: &Agent<D, K>,
    api: &Api<RdmaNode>,
    node: &str,
    status: &RdmaNodeStatus,
) {
    let blocks: Api<RdmaIPBlock> = Api::all(api.clone().into_client());
    for block in agent.offered_blocks().await {
        if !status.blocks.contains(&block.uid) {
            continue;
        }
        let taken = match is_ours(&blocks, node, &block).await {
            Ok(true) => agent.own(&block).await.map_err(|error| error.to_string()),
            Ok(false) => Err("it is another's by now".to_owned()),
            Err(why) => Err(why),
        };
        if let Err(why) = taken {
            tracing::info!(
                network = block.network,
                cidr = %block.cidr,
                why,
                "a block is not taken"
            );
        }
    }
}

/// Is the block bound to this node, and not being taken back?
async fn is_ours(blocks: &Api<RdmaIPBlock>, node: &str, block: &NodeBlock) -> Result<bool, String> {
    let name = block_name(&block.network, &block.cidr);
    let found = tokio::time::timeout(PATIENCE, blocks.get_opt(&name)).await;
    let found = found.map_err(|_| "the API server does not answer")?;
    let found = found.map_err(|error| error.to_string())?;
    Ok(found.is_some_and(|found| {
        found.metadata.uid.as_ref() == Some(&block.uid)
            && found.metadata.deletion_timestamp.is_none()
            && found.spec.node == node
            && !found.spec.releasing
    }))
}

/// The status with the times at which its conditions turned.
fn dated(mut status: RdmaNodeStatus, before: Option<&RdmaNodeStatus>) -> RdmaNodeStatus {
    let mut conditions = before.map(|status| status.conditions.clone()).unwrap_or_default();
    for condition in std::mem::take(&mut status.conditions) {
        set_condition(&mut conditions, condition);
    }
    for condition in &mut conditions {
        condition.last_transition_time.get_or_insert_with(|| Timestamp::now().to_string());
    }
    RdmaNodeStatus { conditions, ..status }
}

async fn write(
    api: &Api<RdmaNode>,
    node: &str,
    (uid, status): &(String, RdmaNodeStatus),
) -> Result<(), String> {
    let patch = patch(uid, status).map_err(|error| error.to_string())?;
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let written = api.patch_status(node, &params, &patch);
    match tokio::time::timeout(PATIENCE, written).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the API server does not answer".to_owned()),
    }
}

/// A merge patch (RFC 7396) that leaves nothing of an old status, and is refused by an object that
/// only has the same name.
fn patch(uid: &str, status: &RdmaNodeStatus) -> serde_json::Result<Value> {
    let mut said = serde_json::to_value(status)?;
    if let Some(said) = said.as_object_mut() {
        for field in
            ["observedGeneration", "rnics", "daemon", "channel", "networks", "blocks", "nics"]
        {
            said.entry(field).or_insert(Value::Null);
        }
    }
    Ok(json!({ "metadata": { "uid": uid }, "status": said }))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use vhost_rdma_cluster_api::{Condition, RdmaNodeStatus};

    use super::{dated, patch};

    #[test]
    fn a_patch_names_every_field_that_an_old_status_may_have() {
        let full = serde_json::json!({
            "observedGeneration": 1, "granted": 1, "rnics": [{"device": "d", "port": "Active"}],
            "daemon": {"instance": "i", "version": "v"}, "channel": {"endpoint": "e"},
            "networks": [{"name": "n", "uid": "u"}], "blocks": ["b"],
            "nics": [{
                "id": "i", "pool": "p", "network": "n", "namespace": "s", "pod": "d", "podUid": "u"
            }],
            "conditions": [],
        });
        let old: RdmaNodeStatus = serde_json::from_value(full).unwrap();
        let old = serde_json::to_value(old).unwrap();
        let new = patch("u", &RdmaNodeStatus::default()).unwrap();
        for field in old.as_object().unwrap().keys() {
            assert!(new["status"].get(field).is_some(), "{field} would stay");
        }
        assert_eq!(new["status"]["nics"], Value::Null);
        assert_eq!(new["metadata"]["uid"], "u");
    }

    #[test]
    fn a_condition_has_the_time_at_which_it_turned() {
        let status = |ready| RdmaNodeStatus {
            conditions: vec![Condition::new("Ready", ready, "R", "")],
            ..RdmaNodeStatus::default()
        };
        let mut first = dated(status(true), None);
        assert!(first.conditions[0].last_transition_time.is_some());
        first.conditions[0].last_transition_time = Some("then".to_owned());
        let time = |s: &RdmaNodeStatus| s.conditions[0].last_transition_time.clone().unwrap();
        assert_eq!(time(&dated(status(true), Some(&first))), "then");
        assert_ne!(time(&dated(status(false), Some(&first))), "then");
    }
}
