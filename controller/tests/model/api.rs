//! An API server as far as the controller can tell: versions, UIDs, generations, finalizers,
//! preconditions, and for each kind a log of what changed that watchers follow at their own pace.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::ObjectMeta;
use vhost_rdma_cluster_api::{AUTHORITY, ROOTS, RdmaNode};
use vhost_rdma_controller::core::{
    Attachment, Authority, Guard, Kind, NodeInfo, Object, Request, Roots, Step, Write,
};
use vhost_rdma_controller::pki::{Asked, Root};

/// What a write came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Conflict,
    Refused,
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    Apply(Box<Object>),
    Delete(String),
}

#[derive(Debug, Default)]
pub(crate) struct Api {
    objects: BTreeMap<Kind, BTreeMap<String, Object>>,
    logs: BTreeMap<Kind, Vec<Event>>,
    counter: u64,
    /// Writes that did something.
    pub(crate) writes: u64,
    /// UIDs of pods that there are.
    pub(crate) pods: BTreeSet<String>,
    /// The last certificate of each node: its addresses, and who signed it.
    pub(crate) signed: BTreeMap<String, (BTreeSet<IpAddr>, String)>,
}

fn meta(object: &mut Object) -> Option<&mut ObjectMeta> {
    Some(match object {
        Object::Tenant(o) => &mut o.metadata,
        Object::Network(o) => &mut o.metadata,
        Object::Class(o) => &mut o.metadata,
        Object::Policy(o) => &mut o.metadata,
        Object::RdmaNode(o) => &mut o.metadata,
        Object::Block(o) => &mut o.metadata,
        Object::Nic(o) => &mut o.metadata,
        Object::Node(_)
        | Object::Namespace(_)
        | Object::Claim(_)
        | Object::Attachment(_)
        | Object::Authority(_)
        | Object::Roots(_)
        | Object::Request(_) => return None,
    })
}

impl Api {
    fn tick(&mut self) -> String {
        self.counter += 1;
        self.counter.to_string()
    }

    pub(crate) fn log(&self, kind: Kind) -> &[Event] {
        self.logs.get(&kind).map(Vec::as_slice).unwrap_or_default()
    }

    pub(crate) fn list(&self, kind: Kind) -> impl Iterator<Item = &Object> {
        self.objects.get(&kind).into_iter().flat_map(BTreeMap::values)
    }

    pub(crate) fn get(&self, kind: Kind, name: &str) -> Option<&Object> {
        self.objects.get(&kind)?.get(name)
    }

    pub(crate) fn rdma_node(&self, name: &str) -> Option<&RdmaNode> {
        match self.get(Kind::RdmaNode, name)? {
            Object::RdmaNode(node) => Some(node),
            _ => None,
        }
    }

    fn store(&mut self, mut object: Object) {
        let version = self.tick();
        if let Some(meta) = meta(&mut object) {
            meta.resource_version = Some(version);
        } else {
            match &mut object {
                Object::Claim(claim) => claim.version = version,
                Object::Authority(authority) => authority.version = version,
                Object::Roots(roots) => roots.version = version,
                _ => {}
            }
        }
        self.logs.entry(object.kind()).or_default().push(Event::Apply(Box::new(object.clone())));
        self.objects.entry(object.kind()).or_default().insert(object.name(), object);
        self.writes += 1;
    }

    fn drop_object(&mut self, kind: Kind, name: &str) {
        if self.objects.entry(kind).or_default().remove(name).is_some() {
            self.tick();
            self.logs.entry(kind).or_default().push(Event::Delete(name.to_owned()));
            self.writes += 1;
        }
    }

    pub(crate) fn create(&mut self, mut object: Object) -> Outcome {
        if self.get(object.kind(), &object.name()).is_some() {
            return Outcome::Conflict;
        }
        let uid = format!("uid-{}", self.tick());
        if let Some(meta) = meta(&mut object) {
            meta.uid = Some(uid);
            meta.generation = Some(1);
        } else {
            match &mut object {
                Object::Claim(claim) => claim.uid = uid,
                Object::Attachment(attachment) => attachment.uid = uid,
                _ => {}
            }
        }
        self.store(object);
        Outcome::Done
    }

    /// Replaces what a user may replace; `status` or all but that. The version must be the present
    /// one.
    pub(crate) fn replace(&mut self, mut new: Object, status: bool) -> Outcome {
        let Some(old) = self.get(new.kind(), &new.name()).cloned() else { return Outcome::Refused };
        let mut old_copy = old.clone();
        let (Some(old_meta), Some(new_meta)) = (meta(&mut old_copy), meta(&mut new)) else {
            self.store(new);
            return Outcome::Done;
        };
        if new_meta.resource_version != old_meta.resource_version || new_meta.uid != old_meta.uid {
            return Outcome::Conflict;
        }
        let generation = old_meta.generation;
        let merged = merge(old, new, status);
        let (mut merged, spec_changed) = merged;
        if spec_changed && let Some(meta) = meta(&mut merged) {
            meta.generation = generation.map(|g| g + 1);
        }
        let gone = meta(&mut merged).is_some_and(|m| {
            m.deletion_timestamp.is_some() && m.finalizers.as_deref().unwrap_or_default().is_empty()
        });
        if gone {
            self.drop_object(merged.kind(), &merged.name());
        } else {
            self.store(merged);
        }
        Outcome::Done
    }

    pub(crate) fn delete(&mut self, kind: Kind, name: &str) {
        let Some(mut object) = self.get(kind, name).cloned() else { return };
        if let Some(meta) = meta(&mut object)
            && !meta.finalizers.as_deref().unwrap_or_default().is_empty()
        {
            if meta.deletion_timestamp.is_none() {
                meta.deletion_timestamp = Some(some_time());
                self.store(object);
            }
            return;
        }
        self.drop_object(kind, name);
    }

    fn delete_exact(&mut self, mut object: Object) -> Outcome {
        let Some(mut found) = self.get(object.kind(), &object.name()).cloned() else {
            return Outcome::Refused;
        };
        let same = match (meta(&mut found), meta(&mut object)) {
            (Some(a), Some(b)) => a.uid == b.uid && a.resource_version == b.resource_version,
            _ => found == object,
        };
        if !same {
            return Outcome::Conflict;
        }
        self.drop_object(object.kind(), &object.name());
        Outcome::Done
    }

    /// The answer to a guard's question, now.
    pub(crate) fn allows(&self, guard: &Guard) -> bool {
        match guard {
            Guard::NetworkHasNot { network, uid, vni } => match self.get(Kind::Network, network) {
                Some(Object::Network(n)) if n.metadata.uid.as_deref() == Some(uid) => {
                    n.status.as_ref().and_then(|s| s.vni).is_some_and(|has| has != *vni)
                }
                _ => true,
            },
            Guard::NodeHoldsNot { node, uid } => self
                .rdma_node(node)
                .and_then(|n| n.status.as_ref())
                .is_none_or(|s| !s.blocks.contains(uid)),
            Guard::NodeIsGone { node } => self.get(Kind::Node, node).is_none(),
            Guard::PodIsGone { uid, .. } => !self.pods.contains(uid),
        }
    }

    /// Does a write, whose guard was asked before.
    pub(crate) fn write(&mut self, write: Write) -> Outcome {
        match write {
            Write::CreateClaim(claim) => self.create(Object::Claim(claim)),
            Write::ReleaseClaim(claim, _) => self.delete_exact(Object::Claim(claim)),
            Write::NetworkFinalizers(o) => self.replace(Object::Network(o), false),
            Write::NetworkStatus(o) => self.replace(Object::Network(o), true),
            Write::CreateNode(o) => self.create(Object::RdmaNode(o)),
            Write::ReplaceNode(o) => self.replace(Object::RdmaNode(o), false),
            Write::DeleteNode(o, _) => self.delete_exact(Object::RdmaNode(o)),
            Write::CreateBlock(o) => self.create(Object::Block(o)),
            Write::ReplaceBlock(o) => self.replace(Object::Block(o), false),
            Write::BlockStatus(o) => self.replace(Object::Block(o), true),
            Write::DeleteBlock(o, _) => self.delete_exact(Object::Block(o)),
            Write::TenantStatus(o) => self.replace(Object::Tenant(o), true),
            Write::ExpireReservations(mut o, uids) => {
                let status = o.status.get_or_insert_default();
                status.reserved.retain(|place| !uids.contains(&place.pod_uid));
                self.replace(Object::Tenant(o), true)
            }
            Write::PolicyStatus(o) => self.replace(Object::Policy(o), true),
            Write::ClassStatus(o) => self.replace(Object::Class(o), true),
            Write::NicStatus(o) | Write::ReleaseNic(o, _) => self.replace(Object::Nic(o), true),
            Write::ApplyAttachment(o) => self.apply_attachment(o),
            Write::DeleteAttachment(o) => self.delete_exact(Object::Attachment(o)),
            Write::Authority(step, version) => self.authority(step, &version),
            Write::PublishRoots(roots, version) => self.publish(roots, &version),
            Write::GrantRequest { request, asked, .. } => self.grant(request, &asked),
            Write::RefuseRequest { mut request, .. } => {
                if self.get(Kind::Request, &request.name) != Some(&Object::Request(request.clone()))
                {
                    return Outcome::Conflict;
                }
                request.done = true;
                self.store(Object::Request(request));
                Outcome::Done
            }
            // The pod is ended by whoever plays the agents.
            Write::Evict { .. } => Outcome::Done,
        }
    }

    pub(crate) fn authority_now(&self) -> Option<&Authority> {
        match self.get(Kind::Authority, AUTHORITY)? {
            Object::Authority(authority) => Some(authority),
            _ => None,
        }
    }

    pub(crate) fn roots_now(&self) -> Option<&Roots> {
        match self.get(Kind::Roots, ROOTS)? {
            Object::Roots(roots) => Some(roots),
            _ => None,
        }
    }

    /// A root that was never there before, and outlives the model's clocks.
    fn root(&mut self) -> Root {
        let id = format!("root-{};", self.tick());
        Root { pem: id.clone(), id, from: 0, until: u64::MAX / 4 }
    }

    fn authority(&mut self, step: Step, version: &str) -> Outcome {
        let Some(mut found) = self.authority_now().cloned() else {
            if step != Step::Create {
                return Outcome::Conflict;
            }
            let current = Some(self.root());
            return self.create(Object::Authority(Authority { current, ..Authority::default() }));
        };
        if step == Step::Create || found.version != version {
            return Outcome::Conflict;
        }
        match step {
            Step::Create => {}
            Step::Begin => {
                found.next = Some(self.root());
                found.rotate = false;
            }
            Step::Switch => {
                let known = |next: &Root| {
                    self.roots_now().is_some_and(|roots| roots.certificates.contains(&next.pem))
                };
                if !found.next.as_ref().is_some_and(known) {
                    return Outcome::Refused;
                }
                found.old = found.current.take();
                found.current = found.next.take();
            }
            Step::Retire => found.old = None,
        }
        self.store(Object::Authority(found));
        Outcome::Done
    }

    fn publish(&mut self, roots: Roots, version: &str) -> Outcome {
        if self.authority_now().is_none_or(|found| found.version != version) {
            return Outcome::Conflict;
        }
        let there = self.roots_now().map(|found| found.version.clone()).unwrap_or_default();
        if there != roots.version {
            return Outcome::Conflict;
        }
        self.store(Object::Roots(roots));
        Outcome::Done
    }

    fn grant(&mut self, mut request: Request, asked: &Asked) -> Outcome {
        if self.get(Kind::Request, &request.name) != Some(&Object::Request(request.clone())) {
            return Outcome::Conflict;
        }
        let Some(root) = self.authority_now().and_then(|a| a.current.clone()) else {
            return Outcome::Refused;
        };
        request.done = true;
        self.signed.insert(asked.node.clone(), (asked.addresses.clone(), root.id));
        self.store(Object::Request(request));
        Outcome::Done
    }

    fn apply_attachment(&mut self, mut wanted: Attachment) -> Outcome {
        if let Some(Object::Attachment(found)) = self.get(Kind::Attachment, &wanted.name) {
            wanted.uid.clone_from(&found.uid);
            if *found != wanted {
                self.store(Object::Attachment(wanted));
            }
            return Outcome::Done;
        }
        self.create(Object::Attachment(wanted))
    }

    pub(crate) fn set_node(&mut self, node: NodeInfo) {
        if self.get(Kind::Node, &node.name).is_none() {
            self.create(Object::Node(node));
        } else {
            self.replace(Object::Node(node), false);
        }
    }
}

fn some_time() -> Time {
    Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH)
}

macro_rules! merged {
    ($variant:ident, $old:ident, $new:ident, $status:ident) => {{
        let changed = !$status && $old.spec != $new.spec;
        let mut object = $old;
        if $status {
            object.status = $new.status;
        } else {
            object.spec = $new.spec;
            object.metadata.finalizers = $new.metadata.finalizers;
        }
        (Object::$variant(object), changed)
    }};
}

fn merge(old: Object, new: Object, status: bool) -> (Object, bool) {
    match (old, new) {
        (Object::Tenant(a), Object::Tenant(b)) => merged!(Tenant, a, b, status),
        (Object::Network(a), Object::Network(b)) => merged!(Network, a, b, status),
        (Object::Class(a), Object::Class(b)) => merged!(Class, a, b, status),
        (Object::Policy(a), Object::Policy(b)) => merged!(Policy, a, b, status),
        (Object::RdmaNode(a), Object::RdmaNode(b)) => merged!(RdmaNode, a, b, status),
        (Object::Block(a), Object::Block(b)) => merged!(Block, a, b, status),
        (Object::Nic(a), Object::Nic(b)) => merged!(Nic, a, b, status),
        (_, new) => (new, false),
    }
}
