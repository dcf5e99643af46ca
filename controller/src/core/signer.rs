//! A node's request for a certificate: whose it is, and what it may have.
//!
//! An address in a certificate is who a daemon is for all others. So a node gets those that are its
//! own and nobody else's: what its kubelet says, which the API server lets no other node's say, and
//! what its agent found on RNICs, unless any other node has that too.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use super::write::{Plan, Proof, Write};
use super::{Mono, Request, Settings, World, authority};
use crate::pki::Asked;

/// How long a request waits for the node to have the addresses: copies are old.
const WAIT: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_secs(5);
/// The shortest life that a request may ask for, which is the API's.
const LIFE_MIN: u64 = 600;

/// What is thought of a request.
enum Verdict<'a> {
    Grant(&'a Asked, Option<Proof>),
    /// Not now: why.
    Wait(String),
    Refuse(&'static str, String),
}

pub(super) fn plan(world: &World, name: &str, now: Mono, settings: &Settings) -> Plan {
    let Some(request) = world.requests.get(name).filter(|request| !request.done) else {
        return Plan::default();
    };
    let refuse = |reason, message| {
        vec![Write::RefuseRequest { request: request.clone(), reason, message }].into()
    };
    match judge(world, request, settings) {
        Verdict::Refuse(reason, message) => refuse(reason, message),
        Verdict::Wait(why) => {
            let since = world.asked_since.get(name).map_or(now, |(_, since)| *since);
            if now.saturating_sub(since) >= WAIT {
                return refuse("NotOfNode", why);
            }
            Plan { writes: Vec::new(), again: Some(LOOK) }
        }
        // What is published brings it up again.
        Verdict::Grant(..) if !authority::is_published(world) => Plan::default(),
        Verdict::Grant(asked, proof) => {
            let most = settings.certificate_life.as_secs();
            let life = request.life.map_or(most, |life| life.clamp(LIFE_MIN, most.max(LIFE_MIN)));
            let (request, asked) = (request.clone(), asked.clone());
            vec![Write::GrantRequest { request, asked, proof, life }].into()
        }
    }
}

fn judge<'a>(world: &World, request: &'a Request, settings: &Settings) -> Verdict<'a> {
    if request.user != settings.agent {
        let message = format!("only {} may ask for a node's certificate", settings.agent);
        return Verdict::Refuse("NotAnAgent", message);
    }
    let asked = match &request.asked {
        Ok(asked) => asked,
        Err(wrong) => return Verdict::Refuse("Malformed", wrong.clone()),
    };
    let proof = match (&request.on_node, &request.pod) {
        (Some(node), _) if *node == asked.node => None,
        (Some(node), _) => {
            let message = format!("the agent is on {node:?} and asks for {:?}", asked.node);
            return Verdict::Refuse("AnotherNode", message);
        }
        (None, Some((pod, uid))) => {
            Some(Proof { pod: pod.clone(), uid: uid.clone(), node: asked.node.clone() })
        }
        (None, None) if settings.unproven => None,
        (None, None) => {
            let message = "the agent's token names no node and no pod: give its pod a projected \
                           token, or the controller --unproven-agents";
            return Verdict::Refuse("Unproven", message.to_owned());
        }
    };
    if !world.nodes.contains_key(&asked.node) {
        return Verdict::Wait(format!("the cluster has no node {:?}", asked.node));
    }
    let foreign: Vec<String> = asked
        .addresses
        .iter()
        .filter_map(|address| obstacle(world, &asked.node, address))
        .collect();
    if foreign.is_empty() {
        Verdict::Grant(asked, proof)
    } else {
        Verdict::Wait(foreign.join("; "))
    }
}

/// Why a node may not have an address, if it may not.
fn obstacle(world: &World, node: &str, address: &IpAddr) -> Option<String> {
    if address.is_loopback() || address.is_unspecified() || address.is_multicast() {
        return Some(format!("{address} is nobody's"));
    }
    let empty = BTreeSet::new();
    let others = |all: &BTreeSet<String>| all.iter().find(|other| *other != node).cloned();
    let said = world.index.said_by_kubelets(address).unwrap_or(&empty);
    if let Some(other) = others(said) {
        return Some(format!("{address} is that of the node {other:?}"));
    }
    if said.contains(node) {
        return None;
    }
    let found = world.index.found_on_rnics(address).unwrap_or(&empty);
    if !found.contains(node) {
        return Some(format!("the node {node:?} does not have {address}"));
    }
    others(found).map(|other| format!("the node {other:?} says that it has {address} too"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Authority, Key, NodeInfo, Object, plan};
    use crate::pki::Root;
    use vhost_rdma_cluster_api::{RdmaNode, RdmaNodeSpec, RdmaNodeStatus, RnicStatus};

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// n1 has .1, n2 has .2; both agents say .5 of an RNIC, n1's says .2 and .6 too.
    fn world() -> World {
        let mut world = World::new(false);
        for (n, rnics) in [(1_u8, &[2_u8, 5, 6][..]), (2, &[5])] {
            let name = format!("n{n}");
            let addresses = BTreeSet::from([address(n)]);
            let info = NodeInfo { name: name.clone(), addresses, ..NodeInfo::default() };
            world.apply(Object::Node(info), Mono::ZERO);
            let rnics = rnics.iter().map(|last| RnicStatus {
                host_address: Some(address(*last).to_string()),
                ..RnicStatus::default()
            });
            let mut node = RdmaNode::new(&name, RdmaNodeSpec::default());
            node.status =
                Some(RdmaNodeStatus { rnics: rnics.collect(), ..RdmaNodeStatus::default() });
            world.apply(Object::RdmaNode(node), Mono::ZERO);
        }
        let root = Root { id: "a".into(), from: 0, until: u64::MAX, pem: "a".into() };
        let authority = Authority { current: Some(root), ..Authority::default() };
        world.apply(Object::Roots(authority::roots(&authority)), Mono::ZERO);
        world.apply(Object::Authority(authority), Mono::ZERO);
        world
    }

    fn request(node: &str, last: &[u8]) -> Request {
        Request {
            name: "r".to_owned(),
            uid: "u".to_owned(),
            user: Settings::default().agent,
            on_node: Some("n1".to_owned()),
            pod: None,
            asked: Ok(Asked {
                node: node.to_owned(),
                addresses: last.iter().map(|last| address(*last)).collect(),
                key: Vec::new(),
            }),
            life: None,
            approved: false,
            done: false,
        }
    }

    fn says(request: Request, seconds: u64, settings: &Settings) -> (String, u64) {
        let mut world = world();
        world.apply(Object::Request(request), Mono::ZERO);
        let key = Key::Request("r".to_owned());
        let plan = plan(&world, &key, Duration::from_secs(seconds), settings);
        match &plan.writes[..] {
            [] => ("waits".to_owned(), 0),
            [Write::GrantRequest { proof, life, .. }] => (
                proof.as_ref().map_or("granted".to_owned(), |p| format!("if {} {}", p.pod, p.node)),
                *life,
            ),
            [Write::RefuseRequest { reason, .. }] => ((*reason).to_owned(), 0),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_node_gets_its_own_addresses_only() {
        let settings = Settings::default();
        let said = |node: &str, last: &[u8], at| says(request(node, last), at, &settings).0;
        assert_eq!(said("n1", &[1], 0), "granted");
        assert_eq!(said("n1", &[1, 6], 0), "granted");
        // That of another kubelet, whatever the agent found; one that two agents found; nobody's.
        for last in [2, 5, 9] {
            assert_eq!(said("n1", &[1, last], 29), "waits");
            assert_eq!(said("n1", &[1, last], 30), "NotOfNode");
        }
        assert_eq!(said("n2", &[2], 0), "AnotherNode");
        let mut local = request("n1", &[]);
        if let Ok(asked) = &mut local.asked {
            asked.addresses.insert([127, 0, 0, 1].into());
        }
        assert_eq!(says(local, 30, &settings).0, "NotOfNode");
    }

    #[test]
    fn a_request_that_is_made_again_waits_as_long_as_any() {
        let mut world = world();
        let (key, settings) = (Key::Request("r".to_owned()), Settings::default());
        world.apply(Object::Request(request("n1", &[9])), Mono::ZERO);
        let again = Request { uid: "another".to_owned(), ..request("n1", &[9]) };
        world.apply(Object::Request(again), WAIT - LOOK);
        assert!(plan(&world, &key, WAIT, &settings).writes.is_empty());
        assert_eq!(plan(&world, &key, WAIT * 2, &settings).writes.len(), 1);
    }

    #[test]
    fn only_an_agent_that_is_known_to_be_there_gets_any() {
        let mut settings = Settings::default();
        let mut other = request("n1", &[1]);
        other.user = "system:serviceaccount:default:default".to_owned();
        assert_eq!(says(other, 0, &settings).0, "NotAnAgent");
        let mut bad = request("n1", &[1]);
        bad.asked = Err("it is rubbish".to_owned());
        assert_eq!(says(bad, 0, &settings).0, "Malformed");
        let unknown = Request { on_node: None, ..request("n1", &[1]) };
        assert_eq!(says(unknown.clone(), 0, &settings).0, "Unproven");
        let pod = Some(("agent-x".to_owned(), "uid".to_owned()));
        let by_pod = Request { pod, ..unknown.clone() };
        assert_eq!(says(by_pod, 0, &settings).0, "if agent-x n1");
        settings.unproven = true;
        assert_eq!(says(unknown, 0, &settings).0, "granted");
        // What the token says counts also then.
        assert_eq!(says(request("n2", &[2]), 0, &settings).0, "AnotherNode");
    }

    #[test]
    fn a_life_is_what_was_asked_for_within_bounds() {
        let settings = Settings::default();
        let life = |life| says(Request { life, ..request("n1", &[1]) }, 0, &settings).1;
        assert_eq!(
            (life(None), life(Some(1)), life(Some(7000)), life(Some(u64::MAX))),
            (86_400, 600, 7000, 86_400)
        );
    }

    #[test]
    fn nothing_is_signed_before_the_root_is_known() {
        let mut world = world();
        world.apply(Object::Request(request("n1", &[1])), Mono::ZERO);
        world.apply(Object::Roots(super::super::Roots::default()), Mono::ZERO);
        let key = Key::Request("r".to_owned());
        assert!(plan(&world, &key, Mono::ZERO, &Settings::default()).writes.is_empty());
        let done = Request { done: true, ..request("n1", &[1]) };
        world.apply(Object::Request(done), Mono::ZERO);
        assert!(plan(&world, &key, WAIT, &Settings::default()).writes.is_empty());
    }
}
