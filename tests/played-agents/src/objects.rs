//! The cluster that is played: nodes in groups, each with a network of its own, a few tenants whose
//! these networks are, one network on RNICs that all nodes have, and what few nodes have.
//!
//! A group has as many nodes in a small cluster as in a large one, so what a change touches is the
//! same in both, and what it costs can be compared.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::agents::{Agents, name, until};
use crate::peers;

/// The fabric that every node has an RNIC on.
pub(crate) const FABRIC: &str = "east";
/// The pool of the network that all nodes have, and that network.
pub(crate) const WIDE: &str = "wide";
/// The pool of a group's network, `group-NUMBER`.
pub(crate) const GROUP: &str = "group";
/// Pool, network, class and policy of the first few nodes.
pub(crate) const FEW: &str = "few";
/// How many these are.
pub(crate) const FEW_NODES: u32 = 10;
/// Networks that the few nodes' policy names and that are not there at first.
pub(crate) const LATE: u32 = 40;
/// Tenants.
const TEAMS: u32 = 10;
/// Addresses of a block.
pub(crate) const BLOCK: u32 = 64;
/// Requests that are under way.
const AT_ONCE: usize = 16;

/// Where a node's kubelet is.
pub(crate) fn node_address(number: u32) -> Ipv4Addr {
    let [_, b, c, d] = number.to_be_bytes();
    Ipv4Addr::new(100, 64 + b, c, d)
}

/// One of our objects.
pub(crate) fn ours(kind: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": kind,
        "metadata": {"name": name}, "spec": spec,
    })
}

/// The interface of one of our kinds.
pub(crate) fn api(client: Client, kind: &str) -> Api<DynamicObject> {
    let plural = match kind {
        "RdmaNetwork" => "rdmanetworks",
        "RdmaNicClass" => "rdmanicclasses",
        "RdmaNodePolicy" => "rdmanodepolicies",
        _ => "rdmatenants",
    };
    let kind = GroupVersionKind::gvk("vhost-rdma.io", "v1alpha1", kind);
    Api::all_with(client, &ApiResource::from_gvk_with_plural(&kind, plural))
}

/// Makes one of our objects.
pub(crate) async fn create(client: Client, kind: &str, name: &str, spec: &Value) -> Result<()> {
    let object: DynamicObject = serde_json::from_value(ours(kind, name, spec))?;
    api(client, kind).create(&PostParams::default(), &object).await?;
    Ok(())
}

/// What the whole cluster has.
async fn common(client: &Client) -> Result<()> {
    let make = |kind: &'static str, name: &'static str, spec: Value| {
        let client = client.clone();
        async move { create(client, kind, name, &spec).await }
    };
    let ipam = |cidr: &str| json!({"cidrs": [cidr], "blockSize": BLOCK});
    let rnic = json!({"fabric": FABRIC, "addressing": "Translated"});
    make("RdmaNetwork", WIDE, json!({"rnic": rnic, "ipam": ipam("10.0.0.0/8")})).await?;
    make("RdmaNetwork", FEW, json!({"soft": {}, "ipam": ipam("10.0.0.0/16")})).await?;
    make("RdmaNicClass", "usual", json!({"limits": {"maxQps": 256, "maxMrBytes": "1Gi"}})).await?;
    make("RdmaNicClass", FEW, json!({"limits": {"maxQps": 64}})).await?;
    let rule = json!({"selector": {}, "fabric": FABRIC, "hostAddress": "101.0.0.0/8"});
    let pool = json!({"name": WIDE, "network": WIDE, "class": "usual", "count": 32});
    let all = json!({"nodeSelector": {}, "rnics": [rule], "pools": [pool]});
    make("RdmaNodePolicy", WIDE, all).await?;
    let mut pools = vec![json!({"name": FEW, "network": FEW, "class": FEW, "count": 4})];
    for n in 0..LATE {
        pools.push(json!({"name": late(n), "network": late(n), "class": FEW, "count": 2}));
    }
    let few = json!({"nodeSelector": {"matchLabels": {"few": "yes"}}, "pools": pools});
    make("RdmaNodePolicy", FEW, few).await
}

/// A network that is not there at first.
pub(crate) fn late(number: u32) -> String {
    format!("late-{number:02}")
}

/// The namespace of a group's pods, which is its tenant's name too.
pub(crate) fn team(group: u32) -> String {
    format!("team-{}", group % TEAMS)
}

/// The tenants, whose groups are these.
async fn teams(client: &Client, groups: u32) -> Result<()> {
    for number in 0..TEAMS {
        let team = team(number);
        let namespaces: Api<Namespace> = Api::all(client.clone());
        if namespaces.get_opt(&team).await?.is_none() {
            let meta = json!({"metadata": {"name": team, "labels": {"team": team}}});
            namespaces.create(&PostParams::default(), &serde_json::from_value(meta)?).await?;
            let tenant = json!({
                "namespaceSelector": {"matchLabels": {"team": team}},
                "networks": [WIDE], "quota": {"nics": 1_000_000},
            });
            create(client.clone(), "RdmaTenant", &team, &tenant).await?;
        }
        let own = (0..groups).filter(|group| group % TEAMS == number);
        let mut networks: Vec<String> = own.map(|group| format!("{GROUP}-{group}")).collect();
        networks.push(WIDE.to_owned());
        let patch = Patch::Merge(json!({"spec": {"networks": networks}}));
        api(client.clone(), "RdmaTenant").patch(&team, &PatchParams::default(), &patch).await?;
    }
    Ok(())
}

/// A group: its network and the policy of its nodes.
async fn group(client: &Client, number: u32) -> Result<()> {
    let network = format!("{GROUP}-{number}");
    let ipam = json!({"cidrs": ["10.0.0.0/16"], "blockSize": BLOCK});
    create(client.clone(), "RdmaNetwork", &network, &json!({"soft": {}, "ipam": ipam})).await?;
    let pool = json!({"name": GROUP, "network": network, "class": "usual", "count": 32});
    let selector = json!({"matchLabels": {"group": number.to_string()}});
    let policy = json!({"nodeSelector": selector, "pools": [pool]});
    create(client.clone(), "RdmaNodePolicy", &network, &policy).await
}

fn node(number: u32, group: u32) -> Result<Node> {
    let mut labels = json!({
        "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux",
        "kubernetes.io/hostname": name(number), "group": (number / group).to_string(),
    });
    if number < FEW_NODES {
        labels["few"] = "yes".into();
    }
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name(number), "labels": labels},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": node_address(number).to_string()},
                {"type": "Hostname", "address": name(number)},
            ],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }))?)
}

/// Makes the cluster as large as this, and waits until every agent serves what it was told.
pub(crate) async fn fill(agents: &Arc<Agents>, nodes: u32) -> Result<Value> {
    let begun = Instant::now();
    let have = u32::try_from(agents.all().len())?;
    let client = agents.admin();
    if have == 0 {
        common(&client).await?;
    }
    let size = agents.args.group;
    for number in have.div_ceil(size)..nodes.div_ceil(size) {
        group(&client, number).await?;
    }
    teams(&client, nodes.div_ceil(size)).await?;
    agents.grow(nodes);
    let api: Api<Node> = Api::all(client);
    futures::stream::iter(have..nodes)
        .map(|number| {
            let api = api.clone();
            async move {
                api.create(&PostParams::default(), &node(number, size)?).await?;
                anyhow::Ok(())
            }
        })
        .buffer_unordered(AT_ONCE)
        .try_for_each(|()| std::future::ready(Ok(())))
        .await?;
    let made = begun.elapsed();
    let mut left = agents.all();
    until("agents to serve what they were told", || {
        left.retain(|agent| {
            // Pool and block of the wide network, and of the group's.
            let said = agent.said();
            let whole = said.is_some_and(|s| s.spec.pools.len() >= 2 && s.spec.blocks.len() >= 2);
            !(whole && agent.serves())
        });
        if left.is_empty() { Ok(()) } else { Err(format!("{} do not yet", left.len())) }
    })
    .await?;
    if have == 0 {
        peers::start(agents).await?;
    }
    peers::told(agents).await?;
    Ok(json!({"nodes_made": made.as_secs_f64(), "seconds": begun.elapsed().as_secs_f64()}))
}
