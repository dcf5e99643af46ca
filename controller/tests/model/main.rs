//! The planners against a played API server: two controllers that both believe to lead, with copies
//! as old as one likes; watches that are lost and begun anew; controllers that forget everything;
//! writes that lie about and are done late; clocks that jump; agents, nodes and administrators that
//! do what they want meanwhile. At every step nothing is given twice; and when all has come to rest
//! the end is what `oracle.rs` works out from the objects alone.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails")]
#![allow(
    clippy::collapsible_match,
    reason = "a number names what happens, a condition whether it can"
)]

mod agent;
mod api;
mod oracle;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use proptest::prelude::*;
use vhost_rdma_cluster_api::{
    Ipam, LabelSelector, Limits, PolicyPool, Quota, RdmaNetwork, RdmaNetworkSpec, RdmaNic,
    RdmaNicClass, RdmaNicClassSpec, RdmaNicSpec, RdmaNodePolicy, RdmaNodePolicySpec, RdmaTenant,
    RdmaTenantSpec, Reservation, Rollout, Soft, Usage,
};
use vhost_rdma_controller::core::{
    Guard, Key, Kind, NamespaceInfo, NodeInfo, Object, Request, Settings, World, Write, plan,
};
use vhost_rdma_controller::pki::Asked;

use agent::Agent;
use api::{Api, Event, Outcome};

const NODES: [&str; 4] = ["n1", "n2", "n3", "n4"];
const NETWORKS: [&str; 3] = ["blue", "green", "red"];
const NAMESPACES: [&str; 3] = ["a", "b", "c"];

/// A controller with its copy.
#[derive(Default)]
struct Controller {
    world: World,
    cursors: BTreeMap<Kind, usize>,
    dirty: BTreeSet<Key>,
    /// Writes that it decided on, for which key; whether the guard was asked.
    pending: VecDeque<(Key, Write, bool)>,
    now: Duration,
}

fn guard(write: &Write) -> Option<&Guard> {
    match write {
        Write::ReleaseClaim(_, guard)
        | Write::DeleteBlock(_, guard)
        | Write::ReleaseNic(_, guard) => Some(guard),
        Write::DeleteNode(_, guard) => guard.as_ref(),
        _ => None,
    }
}

impl Controller {
    fn new(api: &Api) -> Self {
        let mut new = Self { world: World::new(true), ..Self::default() };
        Kind::ALL.iter().for_each(|kind| new.relist(api, *kind));
        new
    }

    /// Begins a watch anew: what it missed is a difference of two lists.
    fn relist(&mut self, api: &Api, kind: Kind) {
        let there: BTreeSet<String> = api.list(kind).map(Object::name).collect();
        for name in self.world.names(kind) {
            if !there.contains(&name) {
                self.world.remove(kind, &name, self.now);
            }
        }
        api.list(kind).for_each(|object| self.world.apply(object.clone(), self.now));
        self.cursors.insert(kind, api.log(kind).len());
        self.dirty.append(&mut self.world.take_dirty());
    }

    /// Hears of up to `most` changes of a kind.
    fn hear(&mut self, api: &Api, kind: Kind, most: usize) {
        let cursor = self.cursors.entry(kind).or_default();
        let log = api.log(kind);
        let end = log.len().min(cursor.saturating_add(most));
        for event in &log[*cursor..end] {
            match event {
                Event::Apply(object) => self.world.apply((**object).clone(), self.now),
                Event::Delete(name) => self.world.remove(kind, name, self.now),
            }
        }
        *cursor = end;
        self.dirty.append(&mut self.world.take_dirty());
    }

    fn decide(&mut self, pick: usize) {
        let Some(key) = self.dirty.iter().nth(pick % self.dirty.len().max(1)).cloned() else {
            return;
        };
        self.decide_on(key);
    }

    fn decide_on(&mut self, key: Key) {
        self.dirty.remove(&key);
        let plan = plan(&self.world, &key, self.now, &Settings::default());
        self.pending.extend(plan.writes.into_iter().map(|write| (key.clone(), write, false)));
        if plan.again.is_some() {
            self.dirty.insert(key);
        }
    }

    /// One step of one write: first its guard, later the write itself.
    fn write(&mut self, api: &mut Api, agents: &mut BTreeMap<String, Agent>, pick: usize) {
        if self.pending.is_empty() {
            return;
        }
        let at = pick % self.pending.len();
        let Some((key, write, asked)) = self.pending.remove(at) else { return };
        match guard(&write) {
            Some(guard) if !asked => {
                if api.allows(guard) {
                    self.pending.push_back((key, write, true));
                } else {
                    self.dirty.insert(key);
                }
                return;
            }
            _ => {}
        }
        if let Write::Evict { uid, .. } = &write {
            agents.values_mut().for_each(|agent| agent.evicted(api, uid));
        }
        let before = api.writes;
        let outcome = api.write(write.clone());
        if outcome != Outcome::Done {
            self.dirty.insert(key);
        }
        if outcome == Outcome::Done && api.writes == before && !matches!(write, Write::Evict { .. })
        {
            assert!(matches!(write, Write::ApplyAttachment(_)), "a write of nothing: {write:?}");
        }
    }
}

struct Cluster {
    api: Api,
    controllers: [Controller; 2],
    agents: BTreeMap<String, Agent>,
    vnis: BTreeMap<String, u32>,
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn selector(pairs: &[(&str, &str)]) -> LabelSelector {
    LabelSelector { match_labels: labels(pairs), ..LabelSelector::default() }
}

/// Each node has one of its own.
fn address(node: &str) -> IpAddr {
    [10, 1, 0, node.as_bytes()[1] - b'0'].into()
}

/// What an agent asks for: its node's address, or another node's.
fn request(serial: usize, node: &str, of: &str) -> Request {
    Request {
        name: format!("r{serial}"),
        uid: format!("r{serial}"),
        user: Settings::default().agent,
        on_node: Some(node.to_owned()),
        pod: None,
        asked: Ok(Asked {
            node: if serial.is_multiple_of(7) { of.to_owned() } else { node.to_owned() },
            addresses: BTreeSet::from([address(of)]),
            key: Vec::new(),
        }),
        life: None,
        approved: false,
        done: false,
    }
}

fn node_info(name: &str, kind: usize) -> NodeInfo {
    let rack = if kind.is_multiple_of(3) { "x" } else { "y" };
    NodeInfo {
        name: name.to_owned(),
        labels: labels(&[("rack", rack)]),
        ready: !kind.is_multiple_of(5),
        addresses: BTreeSet::from([address(name)]),
    }
}

fn network_spec(pick: usize) -> RdmaNetworkSpec {
    RdmaNetworkSpec {
        soft: Some(Soft {}),
        vni: pick.is_multiple_of(4).then_some(7),
        ipam: (!pick.is_multiple_of(3)).then(|| Ipam {
            cidrs: vec!["10.0.0.0/29".parse().unwrap()],
            named: Vec::new(),
            block_size: 2,
        }),
        ..RdmaNetworkSpec::default()
    }
}

/// One of a few named NICs; two of them want the same MAC address.
fn nic(pick: usize) -> Object {
    let name = ["x", "y"][pick % 2];
    let mut nic = RdmaNic::new(
        name,
        RdmaNicSpec {
            network: NETWORKS[pick / 2 % 2].to_owned(),
            mac: pick.is_multiple_of(2).then(|| "02:00:00:00:00:01".to_owned()),
            limits: Limits { max_qps: u32::try_from(pick / 8 % 3).ok(), ..Limits::default() },
            ..RdmaNicSpec::default()
        },
    );
    nic.metadata.namespace = Some(NAMESPACES[pick / 4 % 2].to_owned());
    // The network of a NIC cannot be changed, so its name says which.
    nic.metadata.name = Some(format!("{name}-{}", nic.spec.network));
    Object::Nic(nic)
}

fn pool(name: &str, network: &str, pick: usize) -> PolicyPool {
    PolicyPool {
        name: name.to_owned(),
        network: network.to_owned(),
        class: pick.is_multiple_of(3).then(|| "small".to_owned()),
        count: 8,
        numa: Vec::new(),
    }
}

fn policy_spec(pick: usize) -> RdmaNodePolicySpec {
    let select: &[(&str, &str)] = match pick % 4 {
        0 => &[],
        1 => &[("rack", "y")],
        _ => &[("rack", "x")],
    };
    let pools = NETWORKS.iter().enumerate().filter(|(n, _)| (pick >> n) & 4 != 0);
    RdmaNodePolicySpec {
        node_selector: selector(select),
        priority: i32::try_from(pick % 3).unwrap(),
        pools: pools.map(|(n, net)| pool(net, NETWORKS[(n + pick / 32) % 3], pick + n)).collect(),
        rollout: Rollout { evict: pick.is_multiple_of(2), max_unavailable: Some(1) },
        ..RdmaNodePolicySpec::default()
    }
}

fn class_spec(pick: usize) -> RdmaNicClassSpec {
    let qps = u32::try_from(pick % 5).unwrap();
    RdmaNicClassSpec {
        limits: Limits { max_qps: Some(qps), ..Limits::default() },
        vectors: Some(1 + qps % 2),
        ..RdmaNicClassSpec::default()
    }
}

impl Cluster {
    fn new() -> Self {
        let mut api = Api::default();
        for (n, name) in NAMESPACES.iter().enumerate() {
            let team = if n == 0 { "one" } else { "two" };
            let labels = labels(&[("team", team)]);
            api.create(Object::Namespace(NamespaceInfo { name: (*name).to_owned(), labels }));
        }
        let mut agents = BTreeMap::new();
        for (n, name) in NODES.iter().enumerate() {
            api.set_node(node_info(name, n + 1));
            agents.insert((*name).to_owned(), Agent::new(name));
        }
        api.create(Object::Network(RdmaNetwork::new("blue", network_spec(1))));
        api.create(Object::Policy(RdmaNodePolicy::new("p0", policy_spec(4))));
        api.create(Object::Class(RdmaNicClass::new("small", class_spec(1))));
        for pick in 0..8 {
            api.create(nic(pick));
        }
        let spec = RdmaTenantSpec {
            networks: NETWORKS.map(str::to_owned).to_vec(),
            ..RdmaTenantSpec::default()
        };
        api.create(Object::Tenant(RdmaTenant::new("t0", spec)));
        let controllers = [Controller::new(&api), Controller::new(&api)];
        Self { api, controllers, agents, vnis: BTreeMap::new() }
    }

    /// Makes an object, changes it or deletes it.
    #[allow(clippy::cognitive_complexity, reason = "one arm for each kind")]
    fn administer(&mut self, pick: usize) {
        let change = pick / 8;
        match pick % 8 {
            0 | 1 => self
                .set(Object::Network(RdmaNetwork::new(NETWORKS[change % 3], network_spec(change)))),
            2 => self.api.delete(Kind::Network, NETWORKS[change % 3]),
            3 => self.set(Object::Policy(RdmaNodePolicy::new(
                ["p0", "p1", "p2"][change % 3],
                policy_spec(change),
            ))),
            4 => self.api.delete(Kind::Policy, ["p0", "p1", "p2"][change % 3]),
            5 => self.set(Object::Class(RdmaNicClass::new("small", class_spec(change)))),
            6 => {
                let teams: &[(&str, &str)] =
                    [&[][..], &[("team", "one")], &[("team", "two")]][change % 3];
                let spec = RdmaTenantSpec {
                    namespace_selector: selector(teams),
                    networks: vec![NETWORKS[change % 3].to_owned()],
                    quota: Some(Quota { nics: Some(1), ..Quota::default() }),
                    ..RdmaTenantSpec::default()
                };
                self.set(Object::Tenant(RdmaTenant::new(["t0", "t1"][change % 2], spec)));
            }
            _ => self.api.delete(Kind::Tenant, ["t0", "t1"][change % 2]),
        }
    }

    /// Makes an object, or changes the specification of the one that there is.
    fn set(&mut self, mut object: Object) {
        let Some(found) = self.api.get(object.kind(), &object.name()).cloned() else {
            self.api.create(object);
            return;
        };
        match (&mut object, found) {
            // What cannot be changed the server refuses.
            (Object::Network(new), Object::Network(old)) => {
                new.metadata = old.metadata;
                new.spec.vni = old.spec.vni;
            }
            (Object::Policy(new), Object::Policy(old)) => new.metadata = old.metadata,
            (Object::Class(new), Object::Class(old)) => new.metadata = old.metadata,
            (Object::Tenant(new), Object::Tenant(old)) => new.metadata = old.metadata,
            (Object::Nic(new), Object::Nic(old)) => new.metadata = old.metadata,
            _ => {}
        }
        self.api.replace(object, false);
    }

    #[allow(clippy::cognitive_complexity, reason = "one arm for each thing that may happen")]
    fn step(&mut self, op: u8, pick: usize) {
        let which = pick % 2;
        let rest = pick / 2;
        let node = NODES[rest % 4];
        match op {
            0..=5 => {
                let kind = Kind::ALL[rest % Kind::ALL.len()];
                self.controllers[which].hear(&self.api, kind, 1 + rest / 16);
            }
            6..=9 => self.controllers[which].decide(rest),
            10..=13 => self.controllers[which].write(&mut self.api, &mut self.agents, rest),
            14 => self.controllers[which].relist(&self.api, Kind::ALL[rest % Kind::ALL.len()]),
            15 => match rest % 8 {
                // A controller that was killed: what it decided and did not write is lost.
                0 => self.controllers[which] = Controller::new(&self.api),
                // A clock that jumps, and stands where it is.
                1..=4 => {
                    self.controllers[which].now += Duration::from_secs(50 * (rest as u64 % 40));
                }
                // A write that is lost on the way, and is known to have failed.
                _ => {
                    let controller = &mut self.controllers[which];
                    if let Some((key, ..)) = controller.pending.pop_front() {
                        controller.dirty.insert(key);
                    }
                }
            },
            16 | 17 => self.administer(pick),
            18..=20 => {
                if self.api.get(Kind::Node, node).is_some() {
                    self.agents.get_mut(node).unwrap().work(&mut self.api);
                }
            }
            25 => {
                let serial = rest / 16;
                let of = if serial.is_multiple_of(3) { NODES[rest / 4 % 4] } else { node };
                self.api.create(Object::Request(request(serial, node, of)));
            }
            // A pod is let in; it may never come.
            27 => {
                let found = self.api.get(Kind::Tenant, ["t0", "t1"][rest % 2]).cloned();
                if let Some(Object::Tenant(mut tenant)) = found {
                    let pod_uid = format!("{node}-{}", rest / 8);
                    let usage = Usage { nics: 1, ..Usage::default() };
                    let place = Reservation { pod_uid, usage, ..Reservation::default() };
                    tenant.status.get_or_insert_default().reserved.push(place);
                    self.api.replace(Object::Tenant(tenant), true);
                }
            }
            26 => {
                if let Some(mut authority) = self.api.authority_now().cloned() {
                    authority.rotate = true;
                    self.api.replace(Object::Authority(authority), false);
                }
            }
            21 => {
                if self.api.get(Kind::Node, node).is_some() {
                    self.agents.get_mut(node).unwrap().look(&self.api);
                }
            }
            22 => {
                let namespace = NAMESPACES[rest % 3];
                self.agents.get_mut(node).unwrap().grant(&mut self.api, rest, namespace);
            }
            23 => self.agents.get_mut(node).unwrap().end(&mut self.api, rest),
            24 => match rest % 3 {
                // A machine that goes: its agent and its pods with it.
                0 => {
                    self.api.delete(Kind::Node, node);
                    self.agents.get_mut(node).unwrap().leave(&mut self.api);
                }
                // One that comes, or whose labels change.
                _ => self.api.set_node(node_info(node, rest / 3)),
            },
            28..=30 => self.agents.get_mut(node).unwrap().name(&mut self.api, rest),
            31 => match rest % 4 {
                0 => self.agents.get_mut(node).unwrap().forget(),
                1 => self.set(nic(rest / 4)),
                // Its pod goes on without an object.
                2 => self.api.delete(Kind::Nic, &nic(rest / 4).name()),
                _ => {}
            },
            _ => {}
        }
    }

    /// Everybody hears everything and does all that there is to do, until nobody has anything to
    /// do.
    #[allow(clippy::cognitive_complexity, reason = "whose turn it is, in one place")]
    fn settle(&mut self) -> Result<(), String> {
        for node in NODES {
            if self.api.get(Kind::Node, node).is_none() {
                self.agents.get_mut(node).unwrap().leave(&mut self.api);
            }
        }
        for _ in 0..400 {
            let before = self.api.writes;
            for which in 0..2 {
                for kind in Kind::ALL {
                    self.controllers[which].hear(&self.api, kind, usize::MAX);
                }
                self.controllers[which].now += Duration::from_secs(60);
                for key in self.controllers[which].dirty.clone() {
                    self.controllers[which].decide_on(key);
                }
                while !self.controllers[which].pending.is_empty() {
                    self.controllers[which].write(&mut self.api, &mut self.agents, 0);
                    oracle::always(&self.api, &self.agents, &mut self.vnis)?;
                }
            }
            for name in NODES {
                if self.api.get(Kind::Node, name).is_some() {
                    self.agents.get_mut(name).unwrap().look(&self.api);
                    for _ in 0..4 {
                        self.agents.get_mut(name).unwrap().work(&mut self.api);
                        oracle::always(&self.api, &self.agents, &mut self.vnis)?;
                    }
                }
            }
            // The age of the root is looked at for ever, and whether a pod is there still.
            let looks = |key: &Key| matches!(key, Key::Authority | Key::Nic(..));
            let still = self.api.authority_now().is_some_and(|authority| {
                authority.next.is_none() && authority.old.is_none() && !authority.rotate
            });
            let idle = still
                && self
                    .controllers
                    .iter()
                    .all(|c| c.dirty.iter().all(looks) && c.pending.is_empty());
            if self.api.writes == before && idle {
                return Ok(());
            }
        }
        let left: Vec<_> = self.controllers.iter().map(|c| (&c.dirty, &c.pending)).collect();
        Err(format!("no rest: {left:#?}"))
    }
}

/// Two networks that want one number: which of them is an accident, so no end is given for that.
fn contested(api: &Api) -> bool {
    let wanting = api.list(Kind::Network).filter(|object| match object {
        Object::Network(network) => network.spec.vni.is_some(),
        _ => false,
    });
    wanting.count() > 1
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96,
        max_shrink_iters: 4000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn whatever_happens_nothing_is_given_twice_and_the_end_is_the_same(
        steps in proptest::collection::vec((0_u8..32, any::<u16>()), 0..600),
    ) {
        let mut cluster = Cluster::new();
        for (op, pick) in steps {
            cluster.step(op, usize::from(pick));
            let held = oracle::always(&cluster.api, &cluster.agents, &mut cluster.vnis);
            prop_assert!(held.is_ok(), "after ({op}, {pick}): {}", held.unwrap_err());
        }
        if contested(&cluster.api) {
            for name in &NETWORKS[1..] {
                cluster.api.delete(Kind::Network, name);
            }
        }
        let settled = cluster.settle();
        prop_assert!(settled.is_ok(), "{}", settled.unwrap_err());
        let end = oracle::at_rest(&cluster.api, &cluster.agents);
        prop_assert!(end.is_ok(), "{}", end.unwrap_err());
    }
}
