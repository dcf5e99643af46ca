//! Agents that follow the controller's lists of peers, over mTLS with certificates of its signer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::PostParams;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use serde_json::{Value, json};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use vhost_rdma_cluster_api::peers::Digest;
use vhost_rdma_cluster_api::peers::v1::peers_client::PeersClient;
use vhost_rdma_cluster_api::peers::v1::{FollowRequest, Held, Update};
use vhost_rdma_cluster_api::{NODE_PREFIX, NODES, ROOTS, SIGNER};

use crate::agents::{Agent, Agents, lock, until};
use crate::objects::{WIDE, node_address};

const NAMESPACE: &str = "vhost-rdma";
/// By which name the controller's certificate is known.
const SERVICE: &str = "vhost-rdma-controller.vhost-rdma.svc";
const AGAIN: Duration = Duration::from_millis(200);
const SIGNED: Duration = Duration::from_secs(120);

/// A network's list.
#[derive(Debug, Default)]
struct List {
    uid: String,
    epoch: u64,
    generation: u64,
    /// Host's address and daemon by range.
    entries: BTreeMap<String, (String, String)>,
    /// More of the last message's generation is to come.
    partial: bool,
    /// Told on the stream of now.
    fresh: bool,
}

impl List {
    /// What the agent has, as it says it when it comes back.
    fn held(&self) -> Result<Held> {
        let mut digest = Digest::default();
        for (cidr, (through, daemon)) in &self.entries {
            digest = digest.and(Digest::of(&cidr.parse()?, through, daemon));
        }
        Ok(Held {
            network_uid: self.uid.clone(),
            epoch: self.epoch,
            generation: self.generation,
            digest: digest.to_bytes(),
        })
    }
}

/// An agent that follows.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) agent: Arc<Agent>,
    lists: Mutex<BTreeMap<String, List>>,
}

impl Peer {
    /// Where it was told that a range is.
    pub(crate) fn through(&self, network: &str, cidr: &str) -> Option<String> {
        lock(&self.lists).get(network)?.entries.get(cidr).map(|(through, _)| through.clone())
    }

    fn entries(&self, network: &str) -> usize {
        let lists = lock(&self.lists);
        let told = lists.get(network).filter(|list| list.fresh && !list.partial);
        told.map_or(0, |list| list.entries.len())
    }

    fn take(&self, update: Update) {
        let mut lists = lock(&self.lists);
        let list = lists.entry(update.network).or_default();
        if update.whole && !list.partial {
            list.entries.clear();
        }
        (list.partial, list.fresh, list.uid) = (update.more, true, update.network_uid);
        (list.epoch, list.generation) = (update.epoch, update.generation);
        for cidr in update.remove {
            list.entries.remove(&cidr);
        }
        let add = update.add.into_iter();
        list.entries.extend(add.map(|entry| (entry.cidr, (entry.through, entry.daemon))));
    }

    async fn follow(self: Arc<Self>, endpoint: Endpoint) {
        loop {
            // What was told before holds, but here it must be told again; half a list is none.
            lock(&self.lists).retain(|_, list| {
                list.fresh = false;
                !list.partial
            });
            let _ = self.once(&endpoint).await;
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn once(&self, endpoint: &Endpoint) -> Result<()> {
        let mut client = PeersClient::new(endpoint.connect().await?);
        let held = lock(&self.lists).values().map(List::held).collect::<Result<_>>()?;
        let asked = FollowRequest { node: self.agent.name.clone(), held };
        let mut stream = client.follow(asked).await?.into_inner();
        while let Some(update) = stream.message().await? {
            self.take(update);
        }
        Ok(())
    }
}

/// A key, and the request for its certificate.
fn request(agent: &Agent) -> Result<(KeyPair, CertificateSigningRequest)> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, NODES);
    let common = format!("{NODE_PREFIX}{}", agent.name);
    params.distinguished_name.push(DnType::CommonName, common);
    params.subject_alt_names = vec![SanType::IpAddress(node_address(agent.number).into())];
    let key = KeyPair::generate()?;
    let pem = params.serialize_request(&key)?.pem()?;
    let mut object: CertificateSigningRequest = serde_json::from_value(json!({
        "metadata": {"name": format!("played-{}", agent.name)},
        "spec": {
            "signerName": SIGNER, "request": "",
            "usages": ["digital signature", "client auth", "server auth"],
        },
    }))?;
    object.spec.request.0 = pem.into_bytes();
    Ok((key, object))
}

/// A certificate by the controller's signer.
async fn certified(agents: &Agents, agent: &Agent) -> Result<Identity> {
    let (key, object) = request(agent)?;
    let api: Api<CertificateSigningRequest> = Api::all(agents.account());
    api.create(&PostParams::default(), &object).await?;
    let name = object.metadata.name.unwrap_or_default();
    let begun = Instant::now();
    loop {
        let status = api.get(&name).await?.status.unwrap_or_default();
        if let Some(certificate) = status.certificate {
            return Ok(Identity::from_pem(certificate.0, key.serialize_pem()));
        }
        if begun.elapsed() > SIGNED {
            bail!("nobody signs {name}: {:?}", status.conditions);
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// The first agents follow from now on.
pub(crate) async fn start(agents: &Arc<Agents>) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(agents.account(), NAMESPACE);
    let roots = maps.get(ROOTS).await?.data.unwrap_or_default();
    let roots = Certificate::from_pem(roots.get("ca.crt").context("no roots")?);
    let url = format!("https://{}", agents.args.controller);
    let first = agents.all().into_iter().take(usize::try_from(agents.args.peers)?);
    let peers: Vec<Arc<Peer>> = futures::stream::iter(first)
        .map(|agent| {
            let (roots, url) = (roots.clone(), url.clone());
            async move {
                let identity = certified(agents, &agent).await?;
                let tls = ClientTlsConfig::new().ca_certificate(roots).domain_name(SERVICE);
                let endpoint = Endpoint::from_shared(url)?.tls_config(tls.identity(identity))?;
                let peer = Arc::new(Peer { agent, lists: Mutex::default() });
                tokio::spawn(Arc::clone(&peer).follow(endpoint));
                anyhow::Ok(peer)
            }
        })
        .buffer_unordered(8)
        .try_collect()
        .await?;
    *lock(&agents.peers) = peers;
    Ok(())
}

/// Waits until all that follow know where the blocks of all other nodes are.
pub(crate) async fn told(agents: &Arc<Agents>) -> Result<Value> {
    let blocks = |agent: &Arc<Agent>| {
        let said = agent.said();
        said.map_or(0, |s| s.spec.blocks.iter().filter(|block| block.network == WIDE).count())
    };
    let all: usize = agents.all().iter().map(blocks).sum();
    let peers = lock(&agents.peers).clone();
    let took = until("lists of peers to be complete", || {
        let lacking = peers.iter().filter(|p| p.entries(WIDE) + blocks(&p.agent) != all).count();
        if lacking == 0 { Ok(()) } else { Err(format!("{lacking} lists lack something")) }
    })
    .await?;
    Ok(json!({ "seconds": took.as_secs_f64(), "entries": all }))
}
