//! One change at a time, and how long it takes until everybody whom it concerns has it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use vhost_rdma_cluster_api::{RdmaIPBlock, RdmaNodeSpec, block_name};

use crate::agents::{Agent, Agents, lock, until};
use crate::objects::{BLOCK, FEW, FEW_NODES, LATE, WIDE, api, create, late};

/// Between two changes: sums are written at most twice a second, and are to be counted with the
/// change that they are of.
const APART: Duration = Duration::from_secs(1);

/// Makes so many changes of a kind; how long each took, and how many writes were ours.
pub(crate) async fn change(agents: &Arc<Agents>, kind: &str, times: u32) -> Result<Value> {
    let mut took = Vec::new();
    let mut own = 0;
    for time in 0..times {
        let begun = Instant::now();
        own += match kind {
            "class" => class(agents, time).await?,
            "block" => block(agents, time).await?,
            "network" => network(agents).await?,
            "host" => host(agents, time).await?,
            "policy" => policy(agents, time).await?,
            _ => bail!("no change is called {kind:?}"),
        };
        took.push(begun.elapsed().as_secs_f64());
        tokio::time::sleep(APART).await;
    }
    Ok(json!({ "seconds": took, "own": own }))
}

/// Waits until the few nodes have heard and say so.
async fn few(agents: &Agents, what: &str, so: impl Fn(&RdmaNodeSpec) -> bool) -> Result<()> {
    let few: Vec<Arc<Agent>> = (0..FEW_NODES).filter_map(|number| agents.at(number)).collect();
    until(what, || {
        let lacks = |agent: &&Arc<Agent>| {
            !(agent.said().is_some_and(|said| so(&said.spec)) && agent.serves())
        };
        let lacking = few.iter().filter(lacks).count();
        if lacking == 0 { Ok(()) } else { Err(format!("{lacking} nodes lack it")) }
    })
    .await?;
    Ok(())
}

/// A limit of the class that few nodes use.
async fn class(agents: &Agents, time: u32) -> Result<u32> {
    let classes = api(agents.admin(), "RdmaNicClass");
    let now = classes.get(FEW).await?;
    let before = now.data.pointer("/spec/limits/maxQps").and_then(Value::as_u64);
    let limit = before.map_or(64, |before| before + 1);
    let patch = json!({"spec": {"limits": {"maxQps": limit}}});
    classes.patch(FEW, &PatchParams::default(), &Patch::Merge(patch)).await?;
    few(agents, &format!("limit {time} to be at its nodes"), |spec| {
        let mut of = spec.pools.iter().filter(|pool| pool.class.as_deref() == Some(FEW));
        of.all(|pool| pool.nic.limits.max_qps.map(u64::from) == Some(limit))
    })
    .await?;
    Ok(1)
}

/// A network that few nodes' policy names already.
async fn network(agents: &Agents) -> Result<u32> {
    let has = |spec: &RdmaNodeSpec, name: &str| {
        spec.networks.iter().any(|network| network.name == name)
            && spec.blocks.iter().any(|block| block.network == name)
    };
    let first = agents.at(0).and_then(|agent| agent.said()).context("nobody is there")?;
    let name = (0..LATE).map(late).find(|name| !has(&first.spec, name)).context("none is left")?;
    let ipam = json!({"cidrs": ["10.0.0.0/16"], "blockSize": BLOCK});
    create(agents.admin(), "RdmaNetwork", &name, &json!({"soft": {}, "ipam": ipam})).await?;
    few(agents, "a network to be at its nodes", |spec| has(spec, &name)).await?;
    Ok(1)
}

/// The late networks go again, so that those nodes have as many networks at every size.
pub(crate) async fn tidy(agents: &Agents) -> Result<Value> {
    let networks = api(agents.admin(), "RdmaNetwork");
    let mut gone = 0;
    for name in (0..LATE).map(late) {
        if networks.get_opt(&name).await?.is_none() {
            continue;
        }
        networks.delete(&name, &DeleteParams::default()).await?;
        let has = |spec: &RdmaNodeSpec| spec.networks.iter().any(|network| network.name == name);
        few(agents, "a network to leave its nodes", |spec| !has(spec)).await?;
        let begun = Instant::now();
        while networks.get_opt(&name).await?.is_some() {
            if begun.elapsed() > Duration::from_secs(60) {
                bail!("{name} stays");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        gone += 1;
    }
    Ok(json!({ "gone": gone }))
}

/// A policy that selects few nodes, which goes again.
async fn policy(agents: &Agents, time: u32) -> Result<u32> {
    let name = format!("extra-{time}");
    let pool = json!({"name": name, "network": FEW, "class": FEW, "count": 1});
    let selector = json!({"matchLabels": {"few": "yes"}});
    let spec = json!({"nodeSelector": selector, "pools": [pool]});
    create(agents.admin(), "RdmaNodePolicy", &name, &spec).await?;
    let has = |spec: &RdmaNodeSpec| spec.pools.iter().any(|pool| pool.name == name);
    few(agents, "a policy's pool to be at its nodes", has).await?;
    let policies = api(agents.admin(), "RdmaNodePolicy");
    policies.delete(&name, &DeleteParams::default()).await?;
    few(agents, "a policy's pool to be gone", |spec| !has(spec)).await?;
    Ok(2)
}

/// A node that follows no lists: another each time.
fn some(agents: &Agents, time: u32) -> Result<Arc<Agent>> {
    let nodes = u32::try_from(agents.all().len())?;
    let number = nodes.checked_sub(1 + time).context("too few nodes")?;
    agents.at(number).context("no such node")
}

/// A node whose addresses come to an end: it gets another block, and it and its peers know.
async fn block(agents: &Arc<Agents>, time: u32) -> Result<u32> {
    let agent = some(agents, time)?;
    let of = |agent: &Agent| {
        let blocks = agent.said().map(|said| said.spec.blocks).unwrap_or_default();
        blocks.into_iter().filter(|block| block.network == WIDE).collect::<Vec<_>>()
    };
    let before = of(&agent);
    agent.own().needs += BLOCK;
    agents.note(&agent);
    until("another block", || {
        let there = of(&agent).len() > before.len() && agent.serves();
        if there { Ok(()) } else { Err("it is not there".to_owned()) }
    })
    .await?;
    let new = of(&agent).into_iter().find(|block| !before.contains(block)).context("no block")?;
    let blocks: Api<RdmaIPBlock> = Api::all(agents.admin());
    let name = block_name(WIDE, &new.cidr);
    let begun = Instant::now();
    while !blocks.get(&name).await?.status.is_some_and(|status| status.bound) {
        if begun.elapsed() > Duration::from_secs(60) {
            bail!("{name} is not bound");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let through = agent.host_address(agent.own().moved).to_string();
    known(agents, &new.cidr.to_string(), &through).await?;
    Ok(0)
}

/// All that follow lists know where a range is.
async fn known(agents: &Agents, cidr: &str, through: &str) -> Result<()> {
    let peers = lock(&agents.peers).clone();
    until("peers to know where a block is", || {
        let lacks =
            |peer: &&Arc<crate::peers::Peer>| peer.through(WIDE, cidr).as_deref() != Some(through);
        let lacking = peers.iter().filter(lacks).count();
        if lacking == 0 { Ok(()) } else { Err(format!("{lacking} do not")) }
    })
    .await?;
    Ok(())
}

/// A node whose RNIC has another address: all peers know.
async fn host(agents: &Arc<Agents>, time: u32) -> Result<u32> {
    let agent = some(agents, time)?;
    let said = agent.said().context("it was told nothing")?;
    let block = said.spec.blocks.iter().find(|block| block.network == WIDE);
    let cidr = block.context("it has no block")?.cidr.to_string();
    let moved = {
        let mut own = agent.own();
        own.moved = own.moved.wrapping_add(1);
        own.moved
    };
    agents.note(&agent);
    known(agents, &cidr, &agent.host_address(moved).to_string()).await?;
    Ok(0)
}
