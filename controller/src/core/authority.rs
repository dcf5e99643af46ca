//! The authority: a root that signs, another one beside it while it is replaced.
//!
//! A certificate must never be shown to somebody who does not know its root. So a new root is
//! published first, signs after a grace in which everybody hears of it, and the one before is
//! trusted until nobody shows a certificate of it. At most two are trusted at a time.
//!
//! How long a phase lasts is counted by the replica that looks, from when it saw the roots
//! published, by a clock that does not jump: a replica that starts begins anew. Only how old a root
//! is comes from the clock on the wall, since years outlive every process.

use std::time::Duration;

use super::write::{Plan, Step, Write};
use super::{Authority, Mono, Roots, Settings, World};

/// How often it is looked at without a change.
const LOOK: Duration = Duration::from_secs(3600);
/// How often it is asked whether all nodes have renewed.
const RENEWED: Duration = Duration::from_secs(20);

/// What is to be published of an authority.
pub(super) fn roots(authority: &Authority) -> Roots {
    Roots {
        version: String::new(),
        certificates: authority.roots().map(|root| root.pem.as_str()).collect(),
        current: authority.current.as_ref().map(|root| root.id.clone()).unwrap_or_default(),
    }
}

/// Whether what is published is what the authority has.
pub(super) fn is_published(world: &World) -> bool {
    let (Some(authority), Some(found)) = (&world.authority, &world.roots) else { return false };
    let wanted = roots(authority);
    wanted.certificates == found.certificates && wanted.current == found.current
}

pub(super) fn plan(world: &World, now: Mono, settings: &Settings) -> Plan {
    let Some(authority) = &world.authority else {
        return vec![Write::Authority(Step::Create, String::new())].into();
    };
    // One that cannot be read is left as it is: what it was may be somewhere.
    let Some(current) = &authority.current else { return Plan::default() };
    if !is_published(world) {
        let mut wanted = roots(authority);
        wanted.version = world.roots.as_ref().map(|r| r.version.clone()).unwrap_or_default();
        return vec![Write::PublishRoots(wanted, authority.version.clone())].into();
    }
    let step = |step| vec![Write::Authority(step, authority.version.clone())].into();
    let again = |left| Plan { writes: Vec::new(), again: Some(left) };
    let passed = now.saturating_sub(world.published_since.unwrap_or(now));
    if authority.next.is_some() {
        let left = settings.root_grace.saturating_sub(passed);
        return if left.is_zero() { step(Step::Switch) } else { again(left) };
    }
    if authority.old.is_some() {
        let left = settings.certificate_life.saturating_sub(passed);
        let done = left.is_zero() || all_renewed(world, &current.id);
        return if done { step(Step::Retire) } else { again(left.min(RENEWED)) };
    }
    let third = current.until.saturating_sub(current.from) / 3;
    let left = current.until.saturating_sub(third).saturating_sub(world.wall(now));
    if authority.rotate || left == 0 {
        return step(Step::Begin);
    }
    again(Duration::from_secs(left).min(LOOK))
}

/// Whether no node of the cluster shows a certificate of another root.
fn all_renewed(world: &World, id: &str) -> bool {
    world.rdma_nodes.iter().filter(|(name, _)| world.nodes.contains_key(*name)).all(|(_, node)| {
        let channel = node.status.as_ref().and_then(|status| status.channel.as_ref());
        channel.is_none_or(|c| c.certificate.as_ref().is_some_and(|c| c.issuer == id))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Key, Kind, Object, plan};
    use crate::pki::Root;

    const DAY: u64 = 86_400;

    fn root(id: &str) -> Root {
        Root { id: id.to_owned(), from: 0, until: 30 * DAY, pem: id.to_owned() }
    }

    fn world(authority: &Authority, now: Mono) -> World {
        let mut world = World::new(false);
        world.apply(Object::Authority(authority.clone()), now);
        world.apply(Object::Roots(roots(authority)), now);
        world
    }

    fn after(world: &World, seconds: u64) -> Plan {
        plan(world, &Key::Authority, Duration::from_secs(seconds), &Settings::default())
    }

    fn step(plan: &Plan) -> Option<Step> {
        match &plan.writes[..] {
            [Write::Authority(step, _)] => Some(*step),
            _ => None,
        }
    }

    #[test]
    fn a_root_is_replaced_after_two_thirds_of_its_life() {
        let authority = Authority { current: Some(root("a")), ..Authority::default() };
        let mut world = world(&authority, Mono::ZERO);
        world.set_epoch(20 * DAY - 100);
        let young = after(&world, 99);
        assert_eq!((step(&young), young.again), (None, Some(Duration::from_secs(1))));
        assert_eq!(step(&after(&world, 100)), Some(Step::Begin));
    }

    #[test]
    fn a_new_root_signs_when_it_was_known_for_the_grace() {
        let authority =
            Authority { current: Some(root("a")), next: Some(root("b")), ..Authority::default() };
        let mut world = world(&authority, Duration::from_secs(50));
        assert_eq!(step(&after(&world, 3649)), None);
        assert_eq!(step(&after(&world, 3650)), Some(Step::Switch));
        // Somebody took the new root out of what is published: back it goes, and time begins anew.
        let less = Roots { certificates: "a".to_owned(), ..roots(&authority) };
        world.apply(Object::Roots(less), Duration::from_secs(3600));
        assert!(matches!(&after(&world, 3650).writes[..], [Write::PublishRoots(..)]));
        world.apply(Object::Roots(roots(&authority)), Duration::from_secs(3650));
        assert_eq!(step(&after(&world, 3651)), None);
        world.remove(Kind::Roots, "", Duration::from_secs(3652));
        assert!(matches!(&after(&world, 3653).writes[..], [Write::PublishRoots(..)]));
    }

    #[test]
    fn the_root_before_goes_when_no_node_shows_it() {
        use vhost_rdma_cluster_api::{
            Channel, ChannelCertificate, RdmaNode, RdmaNodeSpec, RdmaNodeStatus,
        };
        let authority =
            Authority { current: Some(root("b")), old: Some(root("a")), ..Authority::default() };
        let mut world = world(&authority, Mono::ZERO);
        let mut show = |issuer: &str| {
            let certificate =
                ChannelCertificate { not_after: String::new(), issuer: issuer.to_owned() };
            let channel = Channel { endpoint: String::new(), certificate: Some(certificate) };
            let mut node = RdmaNode::new("n1", RdmaNodeSpec::default());
            node.status =
                Some(RdmaNodeStatus { channel: Some(channel), ..RdmaNodeStatus::default() });
            let info = crate::core::NodeInfo { name: "n1".to_owned(), ..Default::default() };
            world.apply(Object::Node(info), Mono::ZERO);
            world.apply(Object::RdmaNode(node), Mono::ZERO);
            world.clone()
        };
        let with_old = show("a");
        assert_eq!(step(&after(&with_old, 100)), None);
        assert_eq!(step(&after(&with_old, DAY)), Some(Step::Retire));
        assert_eq!(step(&after(&show("b"), 100)), Some(Step::Retire));
    }

    #[test]
    fn what_cannot_be_read_is_left() {
        let world = world(&Authority::default(), Mono::ZERO);
        assert!(after(&world, DAY).writes.is_empty());
    }
}
