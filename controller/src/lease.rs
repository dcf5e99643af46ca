//! Who may write: one replica, by a lease.
//!
//! The lease saves work and is not what keeps allocations right (see `core`), so it is held
//! loosely: a holder that could not renew for a while stops by itself, before another one may take
//! over. How old a lease is, is measured from when this process saw its version change, by a clock
//! that does not jump; the time that is written into it is for people.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use vhost_rdma_cluster_api::MANAGER;

/// How long a lease holds that nobody renews.
const DURATION: Duration = Duration::from_secs(15);
/// When a holder that cannot renew stops; counted from when it began to renew.
const RENEWED_WITHIN: Duration = Duration::from_secs(8);
/// Between two looks.
const PERIOD: Duration = Duration::from_secs(2);
/// How long the API server may take.
const PATIENCE: Duration = Duration::from_secs(4);

/// What a look at the lease means.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// There is none.
    Create,
    /// It is ours, free or stale.
    Take,
    /// Somebody else has it.
    Wait,
}

/// One replica's part in the election.
#[derive(Debug)]
pub struct Election {
    api: Api<Lease>,
    identity: String,
    leader: watch::Sender<bool>,
    sight: Sight,
    renewed: Option<Instant>,
}

/// The version of the lease that was seen last, and when first.
#[derive(Debug, Default)]
struct Sight(Option<(String, Instant)>);

impl Election {
    /// Takes part under this name. The receiver says whether this replica may write.
    #[must_use]
    pub fn new(client: Client, namespace: &str, identity: &str) -> (Self, watch::Receiver<bool>) {
        let (leader, is_leader) = watch::channel(false);
        let election = Self {
            api: Api::namespaced(client, namespace),
            identity: identity.to_owned(),
            leader,
            sight: Sight::default(),
            renewed: None,
        };
        (election, is_leader)
    }

    /// Takes part for ever.
    pub async fn run(&mut self) {
        loop {
            let begun = Instant::now();
            match self.turn_in_time().await {
                Ok(held) => self.renewed = held.then_some(begun),
                Err(why) => tracing::warn!(why, "cannot look at the lease"),
            }
            let holds = self.renewed.is_some_and(|at| at.elapsed() < RENEWED_WITHIN);
            if self.leader.send_replace(holds) != holds {
                tracing::info!(leader = holds, identity = %self.identity, "election");
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    async fn turn_in_time(&mut self) -> Result<bool, String> {
        match tokio::time::timeout(PATIENCE, self.turn()).await {
            Ok(turn) => turn.map_err(|error| error.to_string()),
            Err(_) => Err("the API server does not answer".to_owned()),
        }
    }

    /// Gives the lease up, so that another replica need not wait.
    pub async fn resign(&mut self) {
        self.leader.send_replace(false);
        if self.renewed.take().is_none() {
            return;
        }
        let given_up = async {
            let Some(mut lease) = self.api.get_opt(MANAGER).await? else { return Ok(()) };
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() != Some(&self.identity) {
                return Ok(());
            }
            spec.holder_identity = Some(String::new());
            self.api.replace(MANAGER, &PostParams::default(), &lease).await.map(drop)
        };
        let result: Result<Result<(), kube::Error>, _> =
            tokio::time::timeout(PATIENCE, given_up).await;
        if !matches!(result, Ok(Ok(()))) {
            tracing::warn!("the lease could not be given up; the next leader waits for its end");
        }
    }

    /// Looks, and takes or renews. Whether the lease is ours now.
    async fn turn(&mut self) -> Result<bool, kube::Error> {
        let found = self.api.get_opt(MANAGER).await?;
        let step = self.sight.judge(&self.identity, found.as_ref(), Instant::now());
        let result = match (step, found) {
            (Step::Wait, _) => return Ok(false),
            (Step::Take, Some(mut lease)) => {
                self.fill(&mut lease);
                self.api.replace(MANAGER, &PostParams::default(), &lease).await
            }
            (_, _) => {
                let mut lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(MANAGER.to_owned()),
                        ..ObjectMeta::default()
                    },
                    spec: None,
                };
                self.fill(&mut lease);
                self.api.create(&PostParams::default(), &lease).await
            }
        };
        match result {
            Ok(_) => Ok(true),
            // Another replica was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn fill(&self, lease: &mut Lease) {
        let now = MicroTime(Timestamp::now());
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0).saturating_add(1));
        }
        *spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            renew_time: Some(now),
            ..spec.clone()
        };
    }
}

impl Sight {
    fn judge(&mut self, identity: &str, found: Option<&Lease>, now: Instant) -> Step {
        let Some(lease) = found else { return Step::Create };
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        if self.0.as_ref().is_none_or(|(seen, _)| *seen != version) {
            self.0 = Some((version, now));
        }
        let since = self.0.as_ref().map_or(now, |(_, since)| *since);
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        match holder {
            None | Some("") => Step::Take,
            Some(holder) if holder == identity => Step::Take,
            Some(_) if now.saturating_duration_since(since) >= DURATION => Step::Take,
            Some(_) => Step::Wait,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, version: &str) -> Lease {
        Lease {
            metadata: ObjectMeta {
                resource_version: Some(version.to_owned()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                ..LeaseSpec::default()
            }),
        }
    }

    #[test]
    fn a_lease_is_taken_when_nobody_renews_it_and_not_before() {
        let mut sight = Sight::default();
        let start = Instant::now();
        assert_eq!(sight.judge("me", None, start), Step::Create);
        assert_eq!(sight.judge("me", Some(&lease("other", "1")), start), Step::Wait);
        let almost = start + DURATION - Duration::from_millis(1);
        assert_eq!(sight.judge("me", Some(&lease("other", "1")), almost), Step::Wait);
        // It is renewed: the time begins anew.
        assert_eq!(sight.judge("me", Some(&lease("other", "2")), almost), Step::Wait);
        assert_eq!(sight.judge("me", Some(&lease("other", "2")), start + DURATION), Step::Wait);
        assert_eq!(sight.judge("me", Some(&lease("other", "2")), almost + DURATION), Step::Take);
        assert_eq!(sight.judge("me", Some(&lease("", "3")), start), Step::Take);
        assert_eq!(sight.judge("me", Some(&lease("me", "4")), start), Step::Take);
    }

    #[test]
    fn a_holder_stops_before_another_may_begin() {
        // What it holds by is looked at after each turn, and a turn that fails may take all its
        // time.
        assert!(RENEWED_WITHIN + PERIOD + PATIENCE < DURATION);
        assert!(PERIOD + PATIENCE < RENEWED_WITHIN);
    }
}
