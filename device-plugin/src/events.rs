//! Kubernetes events: what happened to the node and to pods, for whoever reads `kubectl describe`.
//!
//! Events are news, not state: they are sent by a task of their own, from a queue that is bounded,
//! and lost when no API server takes them. Nothing waits for them, and without an API server the
//! agent works the same.
//!
//! What repeats within minutes becomes one event with a count (that is the recorder's doing, and
//! the API server's wish). It tells events apart by what they are about, not by their text; so the
//! NIC is named as the related object, lest a pod with two NICs hear of one, and a refused
//! configuration is always an event of its own, since its text is the news.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client};
use tokio::sync::mpsc;

use crate::ledger::Owner;

/// Events that wait to be sent; a node of many NICs that loses its daemon makes one each.
const QUEUE: usize = 1024;
/// Between two tries to reach the API server.
const RETRY: Duration = Duration::from_secs(30);
/// How long the API server may take for one event: a queue behind one that hangs would only grow
/// old.
const PATIENCE: Duration = Duration::from_secs(10);
/// The API server takes notes of at most 1 KiB.
const NOTE_MAX: usize = 1000;

/// The API server's word for an object that breaks a rule.
const UNPROCESSABLE: u16 = 422;

/// The component that reports.
const CONTROLLER: &str = "vhost-rdma-agent";

#[derive(Debug)]
enum About {
    Node,
    /// One of a pod's NICs, as far as it is known whose.
    Nic {
        id: String,
        owner: Option<Owner>,
    },
}

#[derive(Debug)]
struct News {
    about: About,
    reason: &'static str,
    note: String,
    warning: bool,
    /// Never counted together with an earlier one.
    single: bool,
}

/// Takes events.
#[derive(Debug, Clone, Default)]
pub struct Events(Option<mpsc::Sender<News>>);

impl Events {
    /// About the node.
    pub fn node(&self, reason: &'static str, note: &str, warning: bool) {
        self.tell(News { about: About::Node, reason, note: cut(note), warning, single: false });
    }

    /// About the node, with a text that matters as much as the reason.
    pub fn configuration(&self, reason: &'static str, note: &str, warning: bool) {
        self.tell(News { about: About::Node, reason, note: cut(note), warning, single: true });
    }

    /// About a NIC, to the pod that has it; to the node if it is not known which has.
    pub fn nic(
        &self,
        id: &str,
        owner: Option<&Owner>,
        reason: &'static str,
        note: &str,
        warning: bool,
    ) {
        let about = About::Nic { id: id.to_owned(), owner: owner.cloned() };
        self.tell(News { about, reason, note: cut(note), warning, single: false });
    }

    fn tell(&self, news: News) {
        let Some(queue) = &self.0 else { return };
        let reason = news.reason;
        if queue.try_send(news).is_err() {
            tracing::debug!(reason, "too many events wait for the API server; one is lost");
        }
    }

    /// Sends events to the API server that kubeconfig or the pod's service account name, for this
    /// node. Must be called inside a runtime.
    #[must_use]
    pub fn to_api_server(node: String) -> Self {
        let (queue, news) = mpsc::channel(QUEUE);
        tokio::spawn(async move { Reporting::new(node, api_server().await).all(news).await });
        Self(Some(queue))
    }

    /// Sends events by this client. Must be called inside a runtime.
    #[must_use]
    pub fn to_client(node: String, client: Client) -> Self {
        let (queue, news) = mpsc::channel(QUEUE);
        tokio::spawn(async move { Reporting::new(node, client).all(news).await });
        Self(Some(queue))
    }
}

fn cut(note: &str) -> String {
    note.char_indices()
        .take_while(|(at, c)| at + c.len_utf8() <= NOTE_MAX)
        .map(|(_, c)| c)
        .collect()
}

async fn api_server() -> Client {
    loop {
        match Client::try_default().await {
            Ok(client) => return client,
            Err(error) => {
                tracing::debug!(%error, "no API server; events wait");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// The task that sends.
struct Reporting {
    node: String,
    client: Client,
    recorder: Recorder,
}

impl Reporting {
    fn new(node: String, client: Client) -> Self {
        let recorder = Recorder::new(client.clone(), reporter(&node));
        Self { node, client, recorder }
    }

    async fn all(self, mut news: mpsc::Receiver<News>) {
        while let Some(news) = news.recv().await {
            let reason = news.reason;
            match tokio::time::timeout(PATIENCE, self.send(news)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::debug!(%error, reason, "the API server did not take an event");
                }
                Err(_) => tracing::debug!(reason, "the API server does not answer"),
            }
        }
    }

    async fn send(&self, news: News) -> kube::Result<()> {
        let event = Event {
            type_: if news.warning { EventType::Warning } else { EventType::Normal },
            reason: news.reason.to_owned(),
            note: Some(news.note),
            action: news.reason.to_owned(),
            secondary: match &news.about {
                About::Node => None,
                About::Nic { id, .. } => Some(ObjectReference {
                    kind: Some("VirtualRdmaNic".to_owned()),
                    name: Some(id.clone()),
                    ..ObjectReference::default()
                }),
            },
        };
        let reference = match &news.about {
            About::Nic { owner: Some(owner), .. } => pod_reference(owner),
            About::Nic { owner: None, .. } | About::Node => self.node_reference(),
        };
        // A recorder counts what it has seen: a fresh one has seen nothing.
        let fresh = Recorder::new(self.client.clone(), reporter(&self.node));
        let recorder = if news.single { &fresh } else { &self.recorder };
        match recorder.publish(&event, &reference).await {
            // An API server before 1.22 wants to be told which namespace an event about a node is
            // in. Newer ones fill it in, and then `kubectl describe node` finds the event, which
            // looks for those without.
            Err(kube::Error::Api(status))
                if status.code == UNPROCESSABLE && reference.namespace.is_none() =>
            {
                let namespace = Some("default".to_owned());
                let reference = ObjectReference { namespace, ..reference };
                recorder.publish(&event, &reference).await
            }
            other => other,
        }
    }

    fn node_reference(&self) -> ObjectReference {
        ObjectReference {
            kind: Some("Node".to_owned()),
            api_version: Some("v1".to_owned()),
            name: Some(self.node.clone()),
            // `kubectl describe node` finds events by the UID that the kubelet uses: the node's
            // name.
            uid: Some(self.node.clone()),
            ..ObjectReference::default()
        }
    }
}

fn reporter(node: &str) -> Reporter {
    Reporter { controller: CONTROLLER.to_owned(), instance: Some(node.to_owned()) }
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

/// Does the kubelet of this node know CDI? The field came with 1.28 and is on by default since 1.29
/// (KEP-4009). `false` if that cannot be told: classic injection works everywhere.
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
