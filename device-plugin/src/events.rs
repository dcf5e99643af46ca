//! Kubernetes events: what happened to the node and to pods, for whoever reads `kubectl describe`.
//!
//! Events are news, not state: they are sent by a task of their own, from a queue that is bounded, and lost when no API server takes
//! them. Nothing waits for them, and without an API server the agent works the same.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource as _};
use tokio::sync::mpsc;

use crate::ledger::Owner;

/// Events that wait to be sent; a node of many NICs that loses its daemon makes one each.
const QUEUE: usize = 1024;
/// Between two tries to reach the API server.
const RETRY: Duration = Duration::from_secs(30);
/// The API server takes notes of at most 1 KiB.
const NOTE_MAX: usize = 1000;

/// The component that reports.
const CONTROLLER: &str = "vhost-rdma-agent";

#[derive(Debug)]
struct News {
    about: Option<Owner>,
    reason: &'static str,
    note: String,
    warning: bool,
}

/// Takes events.
#[derive(Debug, Clone, Default)]
pub struct Events(Option<mpsc::Sender<News>>);

impl Events {
    /// About the node.
    pub fn node(&self, reason: &'static str, note: &str, warning: bool) {
        self.about(None, reason, note, warning);
    }

    /// About a pod, if it is known which.
    pub fn about(&self, owner: Option<&Owner>, reason: &'static str, note: &str, warning: bool) {
        let Some(queue) = &self.0 else { return };
        let news = News { about: owner.cloned(), reason, note: cut(note), warning };
        if queue.try_send(news).is_err() {
            tracing::debug!(reason, "too many events wait for the API server; one is lost");
        }
    }

    /// Sends events to the API server that kubeconfig or the pod's service account name, for this node. Must be called inside a
    /// runtime.
    #[must_use]
    pub fn to_api_server(node: String) -> Self {
        let (queue, news) = mpsc::channel(QUEUE);
        tokio::spawn(send_all(node, news));
        Self(Some(queue))
    }
}

fn cut(note: &str) -> String {
    note.char_indices()
        .take_while(|(at, c)| at + c.len_utf8() <= NOTE_MAX)
        .map(|(_, c)| c)
        .collect()
}

async fn send_all(node: String, mut news: mpsc::Receiver<News>) {
    let client = loop {
        match Client::try_default().await {
            Ok(client) => break client,
            Err(error) => {
                tracing::debug!(%error, "no API server; events wait");
                tokio::time::sleep(RETRY).await;
            }
        }
    };
    let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: Some(node.clone()) };
    let recorder = Recorder::new(client.clone(), reporter);
    let mut node_uid = None;
    while let Some(news) = news.recv().await {
        if node_uid.is_none() {
            // `kubectl describe node` finds events by the UID that the kubelet uses: the node's name.
            node_uid = Some(node.clone());
        }
        let reference = match &news.about {
            Some(owner) => pod_reference(owner),
            None => ObjectReference {
                kind: Some(Node::kind(&()).into_owned()),
                api_version: Some("v1".to_owned()),
                name: Some(node.clone()),
                uid: node_uid.clone(),
                ..ObjectReference::default()
            },
        };
        let event = Event {
            type_: if news.warning { EventType::Warning } else { EventType::Normal },
            reason: news.reason.to_owned(),
            note: Some(news.note),
            action: news.reason.to_owned(),
            secondary: None,
        };
        if let Err(error) = recorder.publish(&event, &reference).await {
            tracing::debug!(%error, reason = event.reason, "the API server did not take an event");
        }
    }
}

fn pod_reference(owner: &Owner) -> ObjectReference {
    ObjectReference {
        kind: Some("Pod".to_owned()),
        api_version: Some("v1".to_owned()),
        namespace: Some(owner.namespace.clone()),
        name: Some(owner.pod.clone()),
        uid: owner.uid.clone(),
        ..ObjectReference::default()
    }
}

/// Does the kubelet of this node know CDI? The field came with 1.28 and is on by default since 1.29 (KEP-4009). `false` if that
/// cannot be told: classic injection works everywhere.
pub async fn kubelet_knows_cdi(node: &str) -> bool {
    let asked = async {
        let client = Client::try_default().await.ok()?;
        let node = Api::<Node>::all(client).get(node).await.ok()?;
        node.status?.node_info.map(|info| info.kubelet_version)
    };
    let version = tokio::time::timeout(Duration::from_secs(5), asked).await.ok().flatten();
    let known = version.as_deref().is_some_and(at_least_1_29);
    tracing::info!(node, kubelet = version, cdi = known, "injection is automatic");
    known
}

fn at_least_1_29(version: &str) -> bool {
    let mut parts = version.trim_start_matches('v').split(['.', '-', '+']);
    let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok());
    matches!((number(), number()), (Some(1), Some(minor)) if minor >= 29)
}

#[cfg(test)]
mod tests {
    use super::{NOTE_MAX, at_least_1_29, cut};

    #[test]
    fn versions() {
        assert!(at_least_1_29("v1.29.0") && at_least_1_29("v1.36.4-gke.1"));
        assert!(!at_least_1_29("v1.20.2") && !at_least_1_29("v1.28.9") && !at_least_1_29("junk"));
    }

    #[test]
    fn notes_are_cut_at_a_character() {
        assert_eq!(cut("short"), "short");
        let long = "é".repeat(NOTE_MAX);
        assert!(cut(&long).len() <= NOTE_MAX && cut(&long).chars().all(|c| c == 'é'));
    }
}
