//! Writes that need the authority's keys, which nothing else of the program has.
//!
//! Each reads the Secret itself, just before: what is signed is signed by the root that signs now,
//! and a step is taken from the version that it was decided on or not at all.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition,
};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::ObjectMeta;
use kube::{Api, ResourceExt as _};
use vhost_rdma_cluster_api::{AUTHORITY, ROOTS};

use crate::apply::{Done, Outcome, Writer, outcome, post};
use crate::convert::{self, CURRENT, NEXT, OLD, ROTATE, TOKEN};
use crate::core::{Proof, Request, Roots, Step};
use crate::pki::{self, Asked, Pair, PkiError};

/// How long a root holds; it is replaced after two thirds.
const ROOT_LIFE: u64 = 365 * 86_400;
/// The API server takes messages of any length; people do not.
const MESSAGE_MAX: usize = 500;

/// Seconds since 1970.
pub(crate) fn wall() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What goes wrong in making a certificate is a failed write.
fn broken(error: PkiError) -> kube::Error {
    kube::Error::Service(Box::new(error))
}

fn put(data: &mut BTreeMap<String, ByteString>, place: &str, pair: &Pair) {
    data.insert(format!("{place}.crt"), ByteString(pair.cert.clone().into_bytes()));
    data.insert(format!("{place}.key"), ByteString(pair.key.clone().into_bytes()));
}

fn meta(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}

/// A Secret's next state; nothing if it cannot take the step.
fn stepped(mut secret: Secret, step: Step, now: u64) -> Result<Option<Secret>, PkiError> {
    let data = secret.data.get_or_insert_default();
    match step {
        Step::Create => {
            put(data, CURRENT, &pki::new_root(now, ROOT_LIFE)?);
            data.insert(TOKEN.to_owned(), ByteString(pki::token()?.into_bytes()));
        }
        Step::Begin => {
            put(data, NEXT, &pki::new_root(now, ROOT_LIFE)?);
            secret.metadata.annotations.get_or_insert_default().remove(ROTATE);
        }
        Step::Switch => {
            for kind in ["crt", "key"] {
                let Some(next) = data.remove(&format!("{NEXT}.{kind}")) else { return Ok(None) };
                let before = data.insert(format!("{CURRENT}.{kind}"), next);
                // The key of a root that signs no more is kept nowhere.
                if let Some(before) = before.filter(|_| kind == "crt") {
                    data.insert(format!("{OLD}.crt"), before);
                }
            }
        }
        Step::Retire => drop(data.remove(&format!("{OLD}.crt"))),
    }
    Ok(Some(secret))
}

impl Writer {
    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn requests(&self) -> Api<CertificateSigningRequest> {
        Api::all(self.client.clone())
    }

    /// The authority's next step.
    pub(crate) async fn authority(&self, step: Step, version: &str) -> Done {
        let fresh = |secret| stepped(secret, step, wall()).map_err(broken);
        if step == Step::Create {
            let empty = Secret { metadata: meta(AUTHORITY), ..Secret::default() };
            let Some(secret) = fresh(empty)? else { return Ok(Outcome::Guarded) };
            return outcome(self.secrets().create(&post(), &secret).await);
        }
        let found = self.secrets().get_opt(AUTHORITY).await?;
        let Some(secret) = found.filter(|s| s.resource_version().as_deref() == Some(version))
        else {
            return Ok(Outcome::Conflict);
        };
        if step == Step::Switch && !self.is_known(&secret).await? {
            return Ok(Outcome::Guarded);
        }
        let Some(secret) = fresh(secret)? else { return Ok(Outcome::Guarded) };
        outcome(self.secrets().replace(AUTHORITY, &post(), &secret).await)
    }

    /// Whether everybody can know the root that is to sign: it is published, now.
    async fn is_known(&self, secret: &Secret) -> Result<bool, kube::Error> {
        let found = self.maps().get_opt(ROOTS).await?;
        let next = convert::pair(secret, NEXT);
        Ok(found.zip(next).is_some_and(|(map, next)| {
            convert::roots(&map).certificates.contains(next.cert.trim())
        }))
    }

    /// Publishes roots if the authority is still at this version.
    pub(crate) async fn publish(&self, roots: &Roots, version: &str) -> Done {
        let found = self.secrets().get_opt(AUTHORITY).await?;
        if found.and_then(|secret| secret.resource_version()).as_deref() != Some(version) {
            return Ok(Outcome::Conflict);
        }
        let data = BTreeMap::from([
            ("ca.crt".to_owned(), roots.certificates.clone()),
            ("current".to_owned(), roots.current.clone()),
        ]);
        let mut map = ConfigMap { metadata: meta(ROOTS), ..ConfigMap::default() };
        map.data = Some(data);
        if roots.version.is_empty() {
            return outcome(self.maps().create(&post(), &map).await);
        }
        map.metadata.resource_version = Some(roots.version.clone());
        outcome(self.maps().replace(ROOTS, &post(), &map).await)
    }

    /// Approves a request, if need be, and signs.
    pub(crate) async fn grant(
        &self,
        request: &Request,
        asked: &Asked,
        proof: Option<&Proof>,
        life: u64,
    ) -> Done {
        if let Some(proof) = proof
            && let Some(message) = self.refuted(proof).await?
        {
            return self.refuse(request, "AnotherNode", &message).await;
        }
        let mut found = match self.same(request).await? {
            Some(found) => found,
            None => return Ok(Outcome::Conflict),
        };
        if !request.approved {
            condition(&mut found, "Approved", "NodesOwn", "the agent of the node asks for its own");
            match self.put("approval", &found).await {
                Ok(now) => found = now,
                Err(error) => return outcome(Err::<(), _>(error)),
            }
        }
        let Some(secret) = self.secrets().get_opt(AUTHORITY).await? else {
            return Ok(Outcome::Conflict);
        };
        let Some(pair) = convert::pair(&secret, CURRENT) else { return Ok(Outcome::Guarded) };
        let signed = pki::sign_node(&pair, asked, wall(), life).map_err(broken)?;
        let status = found.status.get_or_insert_default();
        status.certificate = Some(ByteString(signed.into_bytes()));
        outcome(self.put("status", &found).await)
    }

    /// Why the pod that asks is not the node's, if it is not.
    async fn refuted(&self, proof: &Proof) -> Result<Option<String>, kube::Error> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let found = pods.get_opt(&proof.pod).await?;
        let found = found.filter(|pod| pod.uid().as_deref() == Some(&proof.uid));
        let on = found.and_then(|pod| pod.spec).and_then(|spec| spec.node_name);
        Ok(match on {
            Some(node) if node == proof.node => None,
            Some(node) => {
                Some(format!("the pod {} is on {node:?}, not {:?}", proof.pod, proof.node))
            }
            None => Some(format!("the pod {} is not there", proof.pod)),
        })
    }

    /// Refuses a request: one that somebody approved has failed.
    pub(crate) async fn refuse(&self, request: &Request, reason: &str, message: &str) -> Done {
        let Some(mut found) = self.same(request).await? else { return Ok(Outcome::Conflict) };
        let (kind, subresource) =
            if request.approved { ("Failed", "status") } else { ("Denied", "approval") };
        condition(&mut found, kind, reason, message);
        tracing::warn!(request = request.name, user = request.user, reason, message, "refused");
        outcome(self.put(subresource, &found).await)
    }

    /// The request, if it is the one that was judged and nothing has become of it.
    async fn same(
        &self,
        request: &Request,
    ) -> Result<Option<CertificateSigningRequest>, kube::Error> {
        let found = self.requests().get_opt(&request.name).await?;
        Ok(found.filter(|found| convert::request(found) == *request))
    }

    async fn put(
        &self,
        subresource: &str,
        object: &CertificateSigningRequest,
    ) -> Result<CertificateSigningRequest, kube::Error> {
        let name = object.name_any();
        self.requests().replace_subresource(subresource, &name, &post(), object).await
    }
}

fn condition(object: &mut CertificateSigningRequest, kind: &str, reason: &str, message: &str) {
    let conditions = object.status.get_or_insert_default().conditions.get_or_insert_default();
    conditions.push(CertificateSigningRequestCondition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.chars().take(MESSAGE_MAX).collect()),
        ..CertificateSigningRequestCondition::default()
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_trusts_at_most_two_and_keeps_no_old_key() {
        let now = 1_800_000_000;
        let mut secret = Secret { metadata: meta(AUTHORITY), ..Secret::default() };
        let mut ids = Vec::new();
        for step in [Step::Create, Step::Begin, Step::Switch, Step::Retire] {
            let annotations = secret.metadata.annotations.get_or_insert_default();
            annotations.insert(ROTATE.to_owned(), "x".to_owned());
            secret = stepped(secret, step, now).expect("a step").expect("possible");
            let found = convert::authority(&secret);
            assert_eq!(found.rotate, step != Step::Begin);
            ids.push(found.roots().map(|root| root.id.clone()).collect::<Vec<_>>());
        }
        let [a, ab, ba, b] = &ids[..] else { panic!("four steps") };
        assert_eq!((a.len(), ab.len(), ba.len(), b.len()), (1, 2, 2, 1));
        assert_eq!(ab, &[a[0].clone(), b[0].clone()]);
        assert_eq!(ba, &[b[0].clone(), a[0].clone()]);
        assert_ne!(a, b);
        let keys: Vec<&String> = secret.data.iter().flat_map(BTreeMap::keys).collect();
        assert_eq!(keys, ["admission.token", "current.crt", "current.key"]);
        // A switch without a root to switch to is none.
        assert!(stepped(secret, Step::Switch, now).expect("no fault").is_none());
    }
}
