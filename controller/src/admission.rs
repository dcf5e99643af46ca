//! Admission: a pod that asks for more than its tenant has left is refused when it is made.
//!
//! The API server asks before it stores a pod. What a tenant has left is decided on the tenant's
//! object alone: a pod is let in by adding a reservation to its status, which the API server takes
//! only from whoever saw the last version. So however many pods are made at once, at however many
//! replicas, no two of them get the last place. The controller takes a reservation away when the
//! node reports the pod's NICs, which then count themselves, and when the pod is gone.
//!
//! A network that pods use, and a named NIC that a pod has, are not deleted: whoever asks is told
//! the pods. That is asked of the copy of the cluster, and of the NIC as the API server has it. A
//! pod that comes at the same moment is what the network's finalizer is for.
//!
//! Pods that ask for none of our resources are none of this; the configuration of the API server
//! (`manifests/admission`) does not even ask. The path has a secret part, without which anybody in
//! the cluster could reserve a tenant's NICs for pods that never come.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body, Bytes};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};
use vhost_rdma_cluster_api::{GROUP, MANAGER, RdmaTenant, Reservation, Usage};

use crate::apply::post;
use crate::core::{Answer, Asks, Leaving};
use crate::metrics::{Metrics, Verdict};
use crate::tls::{self, Accepted, Identity};

/// The largest review: a pod of the API server's largest size, in JSON.
const REVIEW_MAX: usize = 4 << 20;
/// How long a review may take; the API server waits for ten seconds.
const PATIENCE: Duration = Duration::from_secs(8);
/// How long a connection is kept whose client has shown nothing, and then one that has.
const UNKNOWN: Duration = Duration::from_secs(10);
const KEPT: Duration = Duration::from_secs(600);
/// How long a namespace may be unknown: the copy is a moment old.
const NEW: Duration = Duration::from_millis(100);
const NEW_TRIES: u32 = 20;
/// How often somebody else may be faster in changing a tenant.
const TRIES: u32 = 24;
/// Pods of a tenant that have a place and no NIC yet.
const RESERVED_MAX: usize = 2048;
/// How often the API server's configuration is looked at.
const LOOK: Duration = Duration::from_secs(5);

/// A question for the engine.
#[derive(Debug)]
pub enum Question {
    /// What a pod would have.
    Pod(Asks, oneshot::Sender<Answer>),
    /// Who uses what is to be deleted.
    Users(Leaving, oneshot::Sender<Vec<String>>),
}

/// What the handler needs.
#[derive(Clone)]
#[allow(missing_debug_implementations, reason = "a client has none")]
pub struct Gate {
    /// The API server.
    pub client: Client,
    /// The engine.
    pub engine: mpsc::Sender<Question>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Certificate and secret path.
    pub identity: watch::Receiver<Option<Identity>>,
}

#[derive(Debug, Deserialize)]
struct Review {
    request: Option<Asked>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Asked {
    uid: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    resource: Of,
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    object: Value,
    /// What is to be deleted, as the API server has it.
    #[serde(default)]
    old_object: Value,
}

impl Asked {
    /// The name of what is to be deleted. Where all of a collection are, each is asked about, and
    /// the request has no name (apiserver, `DeleteCollection`): so a namespace ends.
    fn leaving(&self) -> String {
        let own = self.old_object["metadata"]["name"].as_str();
        own.map_or_else(|| self.name.clone(), str::to_owned)
    }
}

/// Of which kind the object is.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Of {
    group: String,
    resource: String,
}

/// Why a pod is not let in: a status code, and a sentence.
type Refusal = (u16, String);

/// NICs that a pod asks for, by pool. Of what starts before the others, and ends, the most counts.
fn asked(pod: &Pod) -> BTreeMap<String, u32> {
    let prefix = format!("{GROUP}/");
    let of = |container: &Container| -> BTreeMap<String, u32> {
        let resources = container.resources.as_ref();
        // The API server has made requests and limits of such resources equal, or refuses the pod.
        let limits = resources.iter().flat_map(|all| [&all.limits, &all.requests]).flatten();
        let mut found = BTreeMap::new();
        for (name, quantity) in limits.flatten() {
            let Some(pool) = name.strip_prefix(&prefix) else { continue };
            // What is no number the API server refuses; too large a one must not be a small one.
            let count = quantity.0.parse().unwrap_or(u32::MAX);
            let most: &mut u32 = found.entry(pool.to_owned()).or_default();
            *most = (*most).max(count);
        }
        found
    };
    let Some(spec) = &pod.spec else { return BTreeMap::new() };
    let mut sum: BTreeMap<String, u32> = BTreeMap::new();
    let mut most: BTreeMap<String, u32> = BTreeMap::new();
    let add = |sum: &mut BTreeMap<String, u32>, of: BTreeMap<String, u32>| {
        for (pool, count) in of {
            let all = sum.entry(pool).or_default();
            *all = all.saturating_add(count);
        }
    };
    for container in spec.init_containers.iter().flatten() {
        let stays = container.restart_policy.as_deref() == Some("Always");
        if stays {
            add(&mut sum, of(container));
            continue;
        }
        let mut now = sum.clone();
        add(&mut now, of(container));
        for (pool, count) in now {
            let before = most.entry(pool).or_default();
            *before = (*before).max(count);
        }
    }
    for container in &spec.containers {
        add(&mut sum, of(container));
    }
    for (pool, count) in most {
        let all = sum.entry(pool).or_default();
        *all = (*all).max(count);
    }
    sum.retain(|_, count| *count > 0);
    sum
}

impl Gate {
    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> Question,
    ) -> Result<T, Refusal> {
        let (answer, answered) = oneshot::channel();
        let gone = || (503, "the controller is stopping; try again".to_owned());
        self.engine.send(question(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())
    }

    /// Whether what is asked about may be done.
    async fn admit(&self, asked: &Asked) -> Result<(), Refusal> {
        let of = (asked.resource.group.as_str(), asked.resource.resource.as_str());
        match (asked.operation.as_str(), of) {
            ("CREATE", ("", "pods")) => {
                let pod = serde_json::from_value(asked.object.clone())
                    .map_err(|error| (400, format!("this is no pod: {error}")))?;
                self.admit_pod(asked, &pod).await
            }
            ("DELETE", (GROUP, "rdmanetworks")) => {
                self.admit_end(Leaving::Network(asked.leaving()), asked).await
            }
            ("DELETE", (GROUP, "rdmanics")) => {
                let nic = Leaving::Nic(asked.namespace.clone(), asked.leaving());
                self.admit_end(nic, asked).await
            }
            // Whoever configured it to be asked about more does not want it to say no.
            _ => Ok(()),
        }
    }

    /// Whether something may be deleted.
    async fn admit_end(&self, leaving: Leaving, asked: &Asked) -> Result<(), Refusal> {
        let (kind, name) = match &leaving {
            Leaving::Network(name) => ("network", name.clone()),
            Leaving::Nic(_, name) => ("NIC", name.clone()),
        };
        // A NIC that was claimed a moment ago says so itself.
        let claimed = asked.old_object["status"]["pod"].as_str();
        let users = match (&leaving, claimed) {
            (Leaving::Nic(namespace, _), Some(pod)) => vec![format!("{namespace}/{pod}")],
            _ => self.ask(|answer| Question::Users(leaving, answer)).await?,
        };
        if users.is_empty() {
            return Ok(());
        }
        let message = format!("the {kind} {name:?} is used by pods: {}", users.join(", "));
        Err((403, message))
    }

    /// Whether a pod may be made.
    async fn admit_pod(&self, asked: &Asked, pod: &Pod) -> Result<(), Refusal> {
        let pools = self::asked(pod);
        if pools.is_empty() {
            return Ok(());
        }
        let asks = Asks { namespace: asked.namespace.clone(), pools };
        let mut answer = self.ask(|to| Question::Pod(asks.clone(), to)).await?;
        for _ in 0..NEW_TRIES {
            if answer != Answer::Unknown {
                break;
            }
            tokio::time::sleep(NEW).await;
            answer = self.ask(|to| Question::Pod(asks.clone(), to)).await?;
        }
        match answer {
            Answer::Foreign => Ok(()),
            Answer::Unknown => Err((
                503,
                format!("the namespace {:?} is not known yet; try again", asks.namespace),
            )),
            Answer::Refused(why) => Err((403, why)),
            Answer::Counts { tenant, usage } => self.reserve(asked, pod, &tenant, usage).await,
        }
    }

    /// Takes a place in the tenant's quota.
    async fn reserve(
        &self,
        asked: &Asked,
        pod: &Pod,
        name: &str,
        usage: Usage,
    ) -> Result<(), Refusal> {
        let api: Api<RdmaTenant> = Api::all(self.client.clone());
        let failed =
            |error: kube::Error| (503, format!("cannot look at the tenant {name:?}: {error}"));
        for turn in 0..TRIES {
            let mut tenant = api.get(name).await.map_err(failed)?;
            let status = tenant.status.get_or_insert_default();
            let uid = pod.metadata.uid.clone().unwrap_or_else(|| asked.uid.clone());
            let Some(quota) = tenant.spec.quota else { return Ok(()) };
            if status.reserved.iter().any(|place| place.pod_uid == uid) {
                return Ok(());
            }
            if status.reserved.len() >= RESERVED_MAX {
                let message = format!("{RESERVED_MAX} pods of the tenant {name:?} are starting");
                return Err((429, message));
            }
            let waiting = status.reserved.iter().fold(Usage::default(), |a, b| a.plus(b.usage));
            let over = status.used.plus(waiting).plus(usage).over(&quota);
            if !over.is_empty() {
                let over: Vec<String> = over
                    .into_iter()
                    .map(|(what, held, most)| format!("{what} would be {held} of {most}"))
                    .collect();
                return Err((
                    403,
                    format!(
                        "the quota of the tenant {name:?} is full: {} ({} NICs in use, {} of pods \
                         that start)",
                        over.join(", "),
                        status.used.nics,
                        waiting.nics,
                    ),
                ));
            }
            if asked.dry_run {
                return Ok(());
            }
            status.reserved.push(Reservation {
                pod_uid: uid,
                namespace: asked.namespace.clone(),
                pod: pod.metadata.name.clone().unwrap_or_default(),
                usage,
            });
            match api.replace_status(name, &post(), &tenant).await {
                Ok(_) => return Ok(()),
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    // Whoever lost waits a little, and not as long as the others.
                    let wait = (getrandom::u32().unwrap_or(turn) % 16 + 1) * (turn + 1);
                    tokio::time::sleep(Duration::from_millis(wait.into())).await;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Err((429, format!("too many pods of the tenant {name:?} at once; try again")))
    }

    /// Whether it is the API server that asks.
    fn knows<B>(&self, request: &Request<B>) -> bool {
        let token = self.identity.borrow().as_ref().map(|identity| identity.token.clone());
        let given = request.uri().path().strip_prefix("/admit/").map(str::as_bytes);
        let known = token.filter(|token| !token.is_empty()).zip(given).is_some_and(|(a, b)| {
            // Digests take as long to compare whatever was given.
            ring::digest::digest(&ring::digest::SHA256, a.as_bytes()).as_ref()
                == ring::digest::digest(&ring::digest::SHA256, b).as_ref()
        });
        known && request.method() == Method::POST
    }

    async fn respond<B>(&self, request: Request<B>) -> Response<Full<Bytes>>
    where
        B: Body + Send,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let plain = |status: StatusCode, text: &'static str| {
            let mut response = Response::new(Full::new(Bytes::from(text)));
            *response.status_mut() = status;
            response
        };
        let Ok(body) = Limited::new(request.into_body(), REVIEW_MAX).collect().await else {
            return plain(StatusCode::PAYLOAD_TOO_LARGE, "the review is too large\n");
        };
        let review = serde_json::from_slice::<Review>(&body.to_bytes());
        let Ok(Review { request: Some(asked) }) = review else {
            return plain(StatusCode::BAD_REQUEST, "this is no review\n");
        };
        let verdict = tokio::time::timeout(PATIENCE, self.admit(&asked))
            .await
            .unwrap_or_else(|_| Err((503, "the API server does not answer; try again".to_owned())));
        let word = match &verdict {
            Ok(()) => "admitted",
            Err((403, _)) => "refused",
            Err(_) => "failed",
        };
        self.metrics.admissions.get_or_create(&Verdict { verdict: word }).inc();
        let mut response = Response::new(Full::new(Bytes::from(answer(&asked.uid, verdict))));
        let json = hyper::header::HeaderValue::from_static("application/json");
        response.headers_mut().insert(hyper::header::CONTENT_TYPE, json);
        response
    }
}

fn answer(uid: &str, verdict: Result<(), Refusal>) -> String {
    let mut response = json!({"uid": uid, "allowed": verdict.is_ok()});
    if let Err((code, message)) = verdict {
        response["status"] = json!({"code": code, "message": message});
    }
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response,
    });
    Value::to_string(&review)
}

/// What others are told, and that nothing follows.
fn stranger() -> Response<Full<Bytes>> {
    let text = Bytes::from("only the API server is answered here\n");
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = StatusCode::NOT_FOUND;
    let close = hyper::header::HeaderValue::from_static("close");
    response.headers_mut().insert(hyper::header::CONNECTION, close);
    response
}

/// Serves reviews at `listener`.
pub async fn serve(listener: TcpListener, gate: Gate) {
    let (accepted, mut incoming) = mpsc::channel::<Accepted>(64);
    let identity = gate.identity.clone();
    let anybody: tls::Choice = |identity| identity.anybody.clone();
    tokio::spawn(tls::accept(listener, identity, (anybody, tls::SHARE), accepted));
    while let Some(accepted) = incoming.recv().await {
        tokio::spawn(answer_all(accepted, gate.clone()));
    }
}

/// Answers a connection. The API server keeps its connections, and makes new ones when roots
/// change; whoever is not known to be it has seconds to show that.
async fn answer_all(accepted: Accepted, gate: Gate) {
    let Accepted { stream, mut place, .. } = accepted;
    let known = Arc::new(AtomicBool::new(false));
    let shown = Arc::clone(&known);
    let service = service_fn(move |request| {
        let (gate, shown) = (gate.clone(), Arc::clone(&shown));
        async move {
            if !gate.knows(&request) {
                return Ok::<_, std::convert::Infallible>(stranger());
            }
            shown.store(true, Ordering::Relaxed);
            Ok(gate.respond(request).await)
        }
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(PATIENCE);
    let served = server.serve_connection(TokioIo::new(stream), service);
    let over = async {
        tokio::time::sleep(UNKNOWN).await;
        if known.load(Ordering::Relaxed) {
            tokio::time::sleep(KEPT).await;
        }
    };
    tokio::select! {
        _ = served => {}
        () = over => {}
        () = place.lost() => {}
    }
}

/// Keeps the API server's configuration, if somebody installed it: by which roots it knows us, and
/// the secret path. Only the leader writes.
pub async fn configure(
    client: Client,
    leader: watch::Receiver<bool>,
    identity: watch::Receiver<Option<Identity>>,
) {
    let api: Api<ValidatingWebhookConfiguration> = Api::all(client);
    loop {
        tokio::time::sleep(LOOK).await;
        let shown = identity.borrow().clone();
        let Some(identity) = shown.filter(|_| *leader.borrow()) else { continue };
        if let Err(error) = configure_once(&api, &identity).await {
            tracing::warn!(%error, "cannot keep the configuration of admission");
        }
    }
}

async fn configure_once(
    api: &Api<ValidatingWebhookConfiguration>,
    identity: &Identity,
) -> Result<(), kube::Error> {
    let found = api.get_opt(MANAGER).await?;
    if let Some(changed) = found.and_then(|found| configured(&found, identity)) {
        api.replace(MANAGER, &post(), &changed).await?;
        tracing::info!("the API server knows the present roots of admission");
    }
    Ok(())
}

/// What the configuration should be; nothing if it is that.
fn configured(
    found: &ValidatingWebhookConfiguration,
    identity: &Identity,
) -> Option<ValidatingWebhookConfiguration> {
    let mut wanted = found.clone();
    for hook in wanted.webhooks.iter_mut().flatten() {
        hook.client_config.ca_bundle = Some(ByteString(identity.roots.clone().into_bytes()));
        if let Some(service) = &mut hook.client_config.service {
            service.path = Some(format!("/admit/{}", identity.token));
        } else if let Some(url) = &mut hook.client_config.url {
            let host = url.split_once("/admit").map_or(url.as_str(), |(host, _)| host);
            *url = format!("{host}/admit/{}", identity.token);
        }
    }
    (wanted != *found).then_some(wanted)
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
