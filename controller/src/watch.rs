//! Watches: one for each kind, begun anew when it is lost, into one queue.
//!
//! A watch that begins anew lists everything first. What is in the copy and not in that list is
//! gone, although nobody said so: the engine removes it when the list is complete.

use std::fmt::Debug;

use futures::{Stream, StreamExt as _};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Secret};
use kube::api::DynamicObject;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use vhost_rdma_cluster_api::{
    AUTHORITY, ROOTS, RdmaIPBlock, RdmaNetwork, RdmaNic, RdmaNicClass, RdmaNode, RdmaNodePolicy,
    RdmaTenant, SIGNER,
};

use crate::convert;
use crate::core::{Kind, Object};

/// Changes that wait for the engine. A full queue makes watches wait: nothing is lost.
const QUEUE: usize = 1024;

/// NICs of one answer to a list. Users write them, each with as much as an object may have, and an
/// answer is held as a whole before anything of it is left out.
const NICS_AT_ONCE: u32 = 50;

/// What a watch has to say.
#[derive(Debug)]
pub enum Change {
    /// A list of all objects of the kind begins.
    Begin(Kind),
    /// An object of that list.
    Listed(Box<Object>),
    /// The list is complete.
    Complete(Kind),
    /// An object is there, or is so now.
    Applied(Box<Object>),
    /// An object is gone.
    Deleted(Kind, String),
    /// The watch broke; it begins anew.
    Broke(Kind, String),
}

/// Watches everything that the planners look at. Must be called inside a runtime.
#[must_use]
pub fn all(client: &Client, namespace: &str, attachments: bool) -> mpsc::Receiver<Change> {
    let (queue, changes) = mpsc::channel(QUEUE);
    let everywhere = |kind| Follow { kind, queue: queue.clone() };
    everywhere(Kind::Tenant).spawn::<RdmaTenant>(Api::all(client.clone()), Object::Tenant);
    everywhere(Kind::Network).spawn::<RdmaNetwork>(Api::all(client.clone()), Object::Network);
    everywhere(Kind::Class).spawn::<RdmaNicClass>(Api::all(client.clone()), Object::Class);
    everywhere(Kind::Policy).spawn::<RdmaNodePolicy>(Api::all(client.clone()), Object::Policy);
    everywhere(Kind::RdmaNode).spawn::<RdmaNode>(Api::all(client.clone()), Object::RdmaNode);
    everywhere(Kind::Block).spawn::<RdmaIPBlock>(Api::all(client.clone()), Object::Block);
    let nics = watcher::Config::default().page_size(NICS_AT_ONCE);
    tokio::spawn(
        everywhere(Kind::Nic).follow(watcher(Api::all(client.clone()), nics), |nic: RdmaNic| {
            Some(Object::Nic(convert::nic(nic)))
        }),
    );
    everywhere(Kind::Node)
        .spawn::<Node>(Api::all(client.clone()), |node| Object::Node(convert::node(&node)));
    everywhere(Kind::Namespace).spawn::<Namespace>(Api::all(client.clone()), |namespace| {
        Object::Namespace(convert::namespace(&namespace))
    });
    let claims = watcher::Config::default().labels(&format!(
        "{}={}",
        convert::CLAIM_LABEL,
        convert::CLAIM_VNI
    ));
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    tokio::spawn(
        everywhere(Kind::Claim)
            .follow(watcher(leases, claims), |lease| convert::claim(&lease).map(Object::Claim)),
    );
    trust(client, namespace, &queue);
    if attachments {
        let api: Api<DynamicObject> =
            Api::namespaced_with(client.clone(), namespace, &convert::attachment_kind());
        tokio::spawn(
            everywhere(Kind::Attachment)
                .follow(watcher(api, watcher::Config::default()), |object| {
                    Some(Object::Attachment(convert::attachment(&object)))
                }),
        );
    }
    changes
}

/// The authority, its roots, and requests to it.
fn trust(client: &Client, namespace: &str, queue: &mpsc::Sender<Change>) {
    let of = |kind| Follow { kind, queue: queue.clone() };
    let named = |name| watcher::Config::default().fields(&format!("metadata.name={name}"));
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    tokio::spawn(of(Kind::Authority).follow(watcher(secrets, named(AUTHORITY)), |secret| {
        Some(Object::Authority(convert::authority(&secret)))
    }));
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    tokio::spawn(
        of(Kind::Roots)
            .follow(watcher(maps, named(ROOTS)), |map| Some(Object::Roots(convert::roots(&map)))),
    );
    let ours = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    tokio::spawn(of(Kind::Request).follow(watcher(requests, ours), |request| {
        Some(Object::Request(convert::request(&request)))
    }));
}

struct Follow {
    kind: Kind,
    queue: mpsc::Sender<Change>,
}

impl Follow {
    fn spawn<K>(self, api: Api<K>, convert: impl Fn(K) -> Object + Send + 'static)
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let changes = watcher(api, watcher::Config::default());
        tokio::spawn(self.follow(changes, move |object| Some(convert(object))));
    }

    /// Ends when the engine does.
    async fn follow<K: Resource + Send>(
        self,
        changes: impl Stream<Item = watcher::Result<Event<K>>> + Send,
        convert: impl Fn(K) -> Option<Object> + Send,
    ) {
        // Who wrote which field is nothing to the planners and much of an object's memory. Where a
        // write leaves it out the API server keeps what it has.
        let convert = move |mut object: K| {
            object.meta_mut().managed_fields = None;
            convert(object)
        };
        let mut changes = Box::pin(changes.default_backoff());
        while let Some(change) = changes.next().await {
            let change = match change {
                Ok(Event::Init) => Some(Change::Begin(self.kind)),
                Ok(Event::InitApply(object)) => {
                    convert(object).map(|object| Change::Listed(Box::new(object)))
                }
                Ok(Event::InitDone) => Some(Change::Complete(self.kind)),
                Ok(Event::Apply(object)) => {
                    convert(object).map(|object| Change::Applied(Box::new(object)))
                }
                Ok(Event::Delete(object)) => {
                    convert(object).map(|object| Change::Deleted(self.kind, object.name()))
                }
                Err(error) => Some(Change::Broke(self.kind, error.to_string())),
            };
            if let Some(change) = change
                && self.queue.send(change).await.is_err()
            {
                return;
            }
        }
    }
}
