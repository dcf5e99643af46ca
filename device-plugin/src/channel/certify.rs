//! Asks the API server for the certificate of this node, and follows the roots.
//!
//! A CertificateSigningRequest under the signer's name, which the controller approves and signs or
//! refuses. It is made again when two thirds of the certificate's life are over, when the root that
//! signs is another one, and when there is none that holds. Roots are followed by a watch of one
//! ConfigMap.
//!
//! The request is on the disk before it is in the cluster: an agent that is started again waits for
//! the answer to the one that it made. After a refusal it asks again later, with a new key, since a
//! refused request stays refused.

use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use vhost_rdma_cluster_api::{ROOTS, SIGNER};

use crate::agent::Agent;
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::member::identity::{Certificate, Pair, Request, Roots};
use crate::member::store::Kept;
use crate::member::{Channel, Trouble};
use crate::repeats::Repeats;

/// How long the API server may take for one call.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks at a request, at first; then twice as long each time, up to [`LOOK_MAX`].
const LOOK: Duration = Duration::from_millis(500);
const LOOK_MAX: Duration = Duration::from_secs(15);
/// A request that nobody answers for so long is made anew.
const ANSWER: Duration = Duration::from_secs(600);
/// The API server does not answer, or not well.
const UNREACHABLE: &str = "Unreachable";
/// Between two tries then.
const AWAY: Duration = Duration::from_secs(5);
/// After a refusal, at first; then twice as long each time, up to [`REFUSED_MAX`].
const REFUSED: Duration = Duration::from_secs(20);
const REFUSED_MAX: Duration = Duration::from_secs(600);
/// When the root that signs is another one, nodes come within this time, not all at once.
const SPREAD: Duration = Duration::from_secs(10);

/// Follows roots and renews the certificate for ever.
pub async fn run<D: Daemon, K: Kubelet>(agent: &Agent<D, K>, channel: &Channel, client: Client) {
    let roots = Api::namespaced(client.clone(), &channel.settings().namespace);
    let requests = Api::all(client);
    tokio::join!(follow_roots(agent, channel, roots), renew(agent, channel, &requests));
}

async fn follow_roots<D: Daemon, K: Kubelet>(
    agent: &Agent<D, K>,
    channel: &Channel,
    api: Api<ConfigMap>,
) {
    let only = watcher::Config::default().fields(&format!("metadata.name={ROOTS}"));
    let mut changes = Box::pin(watcher(api, only).default_backoff());
    let mut faults = Repeats::default();
    while let Some(change) = changes.next().await {
        match change {
            Ok(Event::InitApply(map) | Event::Apply(map)) => {
                faults.log_end("the channel's roots are watched again");
                take_roots(channel, &map);
                agent.channel_changed().await;
            }
            Ok(Event::Delete(_)) => {
                tracing::warn!("the ConfigMap {ROOTS} is gone; its last roots are believed");
            }
            Ok(Event::Init | Event::InitDone) => {}
            Err(error) => faults.log(&error.to_string(), "cannot watch the channel's roots"),
        }
    }
}

/// Roots that are none are no reason to forget those that are believed.
fn take_roots(channel: &Channel, map: &ConfigMap) {
    let text = |key: &str| map.data.as_ref().and_then(|data| data.get(key)).map(String::as_str);
    let read = Roots::read(text("ca.crt").unwrap_or_default(), text("current").unwrap_or_default());
    let taken = read.and_then(|roots| {
        channel.keep(|kept| kept.roots = Some(roots)).map_err(|error| error.to_string())
    });
    if let Err(why) = taken {
        tracing::error!(why, "the channel's roots are not taken; those of before are believed");
    }
}

/// What the certificate's state asks for.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    Now,
    /// The root that signs is another one: within this time.
    Soon(Duration),
    At(SystemTime),
    /// There are no roots yet, so nobody signs.
    Never,
}

fn due(channel: &Channel, part: f64) -> Due {
    let kept = channel.kept.borrow().clone();
    let Some(roots) = &kept.roots else { return Due::Never };
    let Ok(certificate) = channel.look(&kept) else { return Due::Now };
    if !certificate.holds(SystemTime::now()) {
        return Due::Now;
    }
    if certificate.issuer != roots.current {
        return Due::Soon(SPREAD.mul_f64(part));
    }
    Due::At(certificate.renew_at(part))
}

/// A number from 0 to 1 that no two nodes have.
pub(super) fn chance() -> f64 {
    let mut bytes = [0; 4];
    // Without a random source all come at once.
    let _ = getrandom::fill(&mut bytes);
    f64::from(u32::from_ne_bytes(bytes)) / f64::from(u32::MAX)
}

async fn renew<D: Daemon, K: Kubelet>(
    agent: &Agent<D, K>,
    channel: &Channel,
    api: &Api<CertificateSigningRequest>,
) {
    let mut kept = channel.kept.subscribe();
    let mut pause = REFUSED;
    let mut part = chance();
    let mut faults = Repeats::default();
    loop {
        kept.mark_unchanged();
        // How long nothing is to be done, and whether other roots would change that. Clocks jump,
        // so it is looked at again at least every minute.
        let wait = match due(channel, part) {
            Due::Now => None,
            Due::Soon(wait) => Some((wait, false)),
            Due::At(time) => {
                let left = time.duration_since(SystemTime::now()).unwrap_or_default();
                (!left.is_zero()).then_some((left.min(Duration::from_secs(60)), true))
            }
            Due::Never => Some((Duration::from_secs(3600), true)),
        };
        if let Some((wait, again)) = wait {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = kept.changed(), if again => {}
            }
            if again {
                continue;
            }
        }
        match certified(channel, api).await {
            Ok(()) => {
                if faults.ends() {
                    agent.tells("Certified", "the node has a certificate", false);
                }
                channel.view().certificate_trouble = None;
                (pause, part) = (REFUSED, chance());
                agent.channel_changed().await;
            }
            Err(trouble) => {
                let Trouble { reason, message } = &trouble;
                if faults.tells(&format!("{reason} {message}"), Instant::now()) {
                    tracing::warn!(reason, message, "no certificate");
                    agent.tells("NotCertified", &format!("{reason}: {message}"), true);
                }
                let away = trouble.reason == UNREACHABLE;
                channel.view().certificate_trouble = Some(trouble);
                agent.channel_changed().await;
                let wait = if away { AWAY } else { pause };
                tokio::time::sleep(wait.mul_f64(1.0 + chance() / 4.0)).await;
                pause = if away { pause } else { (pause * 2).min(REFUSED_MAX) };
            }
        }
    }
}

fn fault(action: &str, error: &dyn std::fmt::Display) -> Trouble {
    Trouble::new(UNREACHABLE, format!("cannot {action}: {error}"))
}

/// Asks for a certificate and waits for it.
async fn certified(channel: &Channel, api: &Api<CertificateSigningRequest>) -> Result<(), Trouble> {
    let address = channel.settings().endpoint.ip();
    let held = channel.kept.borrow().asked.clone().filter(|asked| asked.address == address);
    let asked = match held {
        Some(asked) => asked,
        None => {
            let made = Request::new(&channel.settings().node, address)
                .map_err(|error| fault("make a key", &error))?;
            keep(channel, |kept| kept.asked = Some(made.clone()))?;
            made
        }
    };
    let answer = answered(api, &asked).await;
    if answer.as_ref().is_err_and(|trouble| trouble.reason != UNREACHABLE) {
        // It will never be answered otherwise: the next one has a key of its own.
        keep(channel, |kept| kept.asked = None)?;
    }
    let pair = Pair { cert: answer?, key: asked.key };
    let roots = channel.kept.borrow().roots.clone().unwrap_or_default();
    let read = Certificate::read(&pair, &roots, &channel.settings().node, address);
    let bad = read.and_then(|certificate| {
        if certificate.holds(SystemTime::now()) {
            Ok(())
        } else {
            Err("it does not hold now".into())
        }
    });
    keep(channel, |kept| {
        kept.asked = None;
        if bad.is_ok() {
            kept.pair = Some(pair);
        }
    })?;
    bad.map_err(|why| Trouble::new("NotUsable", why))
}

fn keep(channel: &Channel, change: impl FnOnce(&mut Kept)) -> Result<(), Trouble> {
    channel.keep(change).map_err(|error| Trouble::new("Disk", format!("cannot keep it: {error}")))
}

/// The request as the API server has it.
fn object(asked: &Request) -> CertificateSigningRequest {
    let usages = ["digital signature", "client auth", "server auth"].map(str::to_owned);
    CertificateSigningRequest {
        metadata: ObjectMeta { name: Some(asked.name.clone()), ..ObjectMeta::default() },
        spec: CertificateSigningRequestSpec {
            request: ByteString(asked.request.clone().into_bytes()),
            signer_name: SIGNER.to_owned(),
            usages: Some(usages.into()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    }
}

/// The certificate that was made for a request.
async fn answered(
    api: &Api<CertificateSigningRequest>,
    asked: &Request,
) -> Result<String, Trouble> {
    let begin = tokio::time::Instant::now();
    let mut wait = LOOK;
    loop {
        let found = within(api.get_opt(&asked.name)).await?;
        match found {
            None => match within(api.create(&PostParams::default(), &object(asked))).await {
                Ok(_) => {}
                // A server that has seen it twice, or somebody else's of the name: it is looked at.
                Err(trouble) if trouble.reason == "Exists" => {}
                Err(trouble) => return Err(trouble),
            },
            Some(found) => {
                if let Some(done) = outcome(found, asked)? {
                    return Ok(done);
                }
            }
        }
        if begin.elapsed() > ANSWER {
            let waited = format!("{} was not answered in {} s", asked.name, ANSWER.as_secs());
            return Err(Trouble::new("NotAnswered", waited));
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LOOK_MAX);
    }
}

async fn within<T>(call: impl Future<Output = kube::Result<T>> + Send) -> Result<T, Trouble> {
    match tokio::time::timeout(PATIENCE, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
            Err(Trouble::new("Exists", status.message))
        }
        Ok(Err(error)) => Err(fault("ask for the certificate", &error)),
        Err(_) => Err(fault("ask for the certificate", &"the API server does not answer")),
    }
}

/// The certificate, if there is one yet.
fn outcome(found: CertificateSigningRequest, asked: &Request) -> Result<Option<String>, Trouble> {
    if found.spec.request.0 != asked.request.as_bytes() || found.spec.signer_name != SIGNER {
        return Err(Trouble::new("Taken", format!("{} is somebody else's", asked.name)));
    }
    let status = found.status.unwrap_or_default();
    for condition in status.conditions.unwrap_or_default() {
        let reason = match condition.type_.as_str() {
            "Denied" => "Refused",
            "Failed" => "Failed",
            _ => continue,
        };
        let why = [condition.reason, condition.message].map(Option::unwrap_or_default);
        let why = why.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ");
        return Err(Trouble::new(reason, why.chars().take(500).collect::<String>()));
    }
    let text = status.certificate.map(|ByteString(bytes)| String::from_utf8(bytes));
    text.transpose().map_err(|_| Trouble::new("NotUsable", "the certificate is no text"))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::certificates::v1::{
        CertificateSigningRequestCondition, CertificateSigningRequestStatus,
    };

    use super::*;
    use crate::member::Settings;
    use crate::member::identity::tests::{Authority, HERE};

    fn here(dir: &std::path::Path) -> Channel {
        let settings = Settings {
            node: "node-1".to_owned(),
            endpoint: (HERE, 4790).into(),
            shared: dir.join("run"),
            namespace: "vhost-rdma".to_owned(),
            controller: String::new(),
            controller_name: String::new(),
        };
        Channel::new(settings, &dir.join("state"))
    }

    fn map(pem: &str, current: &str) -> ConfigMap {
        let data = [("ca.crt", pem), ("current", current)];
        let data = data.map(|(key, text)| (key.to_owned(), text.to_owned()));
        ConfigMap { data: Some(data.into()), ..ConfigMap::default() }
    }

    #[test]
    fn what_is_due_follows_from_roots_and_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (Authority::new(), Authority::new());
        let channel = here(dir.path());
        assert_eq!(due(&channel, 0.5), Due::Never);
        take_roots(&channel, &map(&old.pem, &old.id()));
        assert_eq!(due(&channel, 0.5), Due::Now);
        let asked = Request::new("node-1", HERE).unwrap();
        let pair = Pair { cert: old.sign(&asked, "node-1"), key: asked.key };
        channel.keep(|kept| kept.pair = Some(pair)).unwrap();
        assert!(matches!(due(&channel, 0.5), Due::At(_)));
        assert_eq!(channel.reported().certificate.unwrap().issuer, old.id());
        // A new root is believed beside the old one, and then it signs.
        let both = format!("{}{}", old.pem, new.pem);
        take_roots(&channel, &map(&both, &old.id()));
        assert!(matches!(due(&channel, 0.5), Due::At(_)));
        take_roots(&channel, &map(&both, &new.id()));
        assert_eq!(due(&channel, 0.5), Due::Soon(SPREAD / 2));
        // Nonsense changes nothing.
        take_roots(&channel, &map("nonsense", &new.id()));
        take_roots(&channel, &ConfigMap::default());
        assert_eq!(due(&channel, 0.5), Due::Soon(SPREAD / 2));
        take_roots(&channel, &map(&new.pem, &new.id()));
        assert_eq!(due(&channel, 0.5), Due::Now, "the old root is gone");
        // It is the same after the agent was started again.
        let again = here(dir.path());
        assert_eq!(*again.kept.borrow(), *channel.kept.borrow());
    }

    #[test]
    fn an_answer_is_a_certificate_a_refusal_or_none_yet() {
        let asked = Request::new("node-1", HERE).unwrap();
        let with = |status| {
            let found = CertificateSigningRequest { status: Some(status), ..object(&asked) };
            outcome(found, &asked)
        };
        assert_eq!(outcome(object(&asked), &asked), Ok(None));
        let denied = CertificateSigningRequestCondition {
            type_: "Denied".to_owned(),
            reason: Some("NotOfNode".to_owned()),
            message: Some("not its address".to_owned()),
            ..CertificateSigningRequestCondition::default()
        };
        let refused = with(CertificateSigningRequestStatus {
            conditions: Some(vec![denied]),
            ..CertificateSigningRequestStatus::default()
        });
        assert_eq!(refused, Err(Trouble::new("Refused", "NotOfNode: not its address")));
        let signed = with(CertificateSigningRequestStatus {
            certificate: Some(ByteString(b"PEM".to_vec())),
            ..CertificateSigningRequestStatus::default()
        });
        assert_eq!(signed, Ok(Some("PEM".to_owned())));
        let other = Request::new("node-1", HERE).unwrap();
        assert_eq!(outcome(object(&other), &asked).unwrap_err().reason, "Taken");
    }
}
