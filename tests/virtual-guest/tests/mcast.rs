//! Multicast groups of datagram queue pairs.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::Duration;

use virtual_guest::backing::rules;
use virtual_guest::guest::{GuestConfig, Result};
use virtual_guest::qp::{Av, QpSpec, SendWr};
use virtual_guest::spec::{Put, cap, cmd, err, qpt};
use virtual_guest::world::{End, Node, World};

const QKEY: u32 = 0x0102_0304;
const EVERYBODY: u32 = 0x00ff_ffff;
/// ff0e::ffff:224.1.2.3, as an IPv4 group is written.
const GROUP: [u8; 16] = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 224, 1, 2, 3];

fn group(end: &End, opcode: u16, mgid: [u8; 16]) -> Result<()> {
    let body = Put::new().u32(end.qp.qpn).u32(0).bytes(&mgid).done(24);
    end.qp.ctx().command(opcode, &body, 0).map(drop)
}

fn member(node: &Node) -> End {
    let end = node.end(&QpSpec::new(qpt::UD));
    end.qp.start_datagrams(QKEY).unwrap();
    end
}

/// A world whose network may use the group: on an RNIC that is the operator's to say.
fn world() -> World {
    let world = World::new();
    if !rules().groups_end_with_the_network {
        world.daemon.add_peer("224.1.2.3", "net");
    }
    world
}

fn offered(node: &Node) -> bool {
    node.guest.query_device().unwrap().caps & cap::MCAST != 0
}

#[test]
fn a_datagram_to_a_group_reaches_every_member_once() {
    let world = world();
    let (na, nb, nc) = (world.node(), world.node(), world.node());
    if !offered(&na) {
        assert_eq!(
            group(&member(&na), cmd::MCAST_ATTACH, GROUP).unwrap_err().status(),
            Some(err::NOTSUPP)
        );
        return;
    }
    let mut sender = member(&na);
    let mut members = [member(&nb), member(&nb), member(&nc), member(&na)];
    let mut stranger = member(&nc);
    let boxes: Vec<_> = members.iter().map(|m| m.node.area(48)).collect();
    for (m, inbox) in members.iter_mut().zip(&boxes) {
        group(m, cmd::MCAST_ATTACH, GROUP).unwrap();
        group(m, cmd::MCAST_ATTACH, GROUP).expect("attaching twice is once");
        m.qp.post_recv(1, &[inbox.sge()]);
        m.qp.post_recv(2, &[inbox.sge()]);
    }
    let other = nc.area(48);
    stranger.qp.post_recv(1, &[other.sge()]);
    let ah = na.ctx.create_ah(na.pdn, &Av::to(GROUP)).unwrap();
    sender.run_ok(&SendWr::datagram(1, &[], ah, EVERYBODY, QKEY).inline(&[6; 8]));
    for (m, inbox) in members.iter_mut().zip(&boxes) {
        let received = m.rcq.ok();
        assert_eq!((received.wr_id, received.byte_len, received.src_qp), (1, 48, sender.qp.qpn));
        assert_eq!(inbox.bytes()[40..], [6; 8]);
        m.rcq.silent(Duration::from_millis(5));
    }
    stranger.rcq.silent(Duration::from_millis(20));
    // Who left hears nothing.
    group(&members[0], cmd::MCAST_DETACH, GROUP).unwrap();
    assert_eq!(
        group(&members[0], cmd::MCAST_DETACH, GROUP).unwrap_err().status(),
        Some(err::INVAL)
    );
    members[1].qp.destroy().unwrap();
    sender.run_ok(&SendWr::datagram(2, &[], ah, EVERYBODY, QKEY).inline(&[7; 8]));
    members[2].rcq.ok();
    members[3].rcq.ok();
    members[0].rcq.silent(Duration::from_millis(20));
    members[1].rcq.silent(Duration::from_millis(5));
}

#[test]
fn groups_are_for_datagrams_and_multicast_addresses() {
    let world = world();
    let node = world.node();
    if !offered(&node) {
        return;
    }
    let connected = node.rc();
    assert_eq!(group(&connected, cmd::MCAST_ATTACH, GROUP).unwrap_err().status(), Some(err::INVAL));
    let end = member(&node);
    assert_eq!(group(&end, cmd::MCAST_ATTACH, node.gid).unwrap_err().status(), Some(err::INVAL));
    assert_eq!(group(&end, cmd::MCAST_DETACH, GROUP).unwrap_err().status(), Some(err::INVAL));
}

#[test]
fn a_group_ends_at_the_border_of_its_network() {
    let world = world();
    world.daemon.add_network("other", 200);
    let here = world.node();
    let there = world.node_with("other", &[], GuestConfig::default());
    if !offered(&here) {
        return;
    }
    let (mut sender, mut far) = (member(&here), member(&there));
    if !rules().groups_end_with_the_network {
        // The wire knows no networks: the other one is kept out of the group as a whole.
        let refused = group(&far, cmd::MCAST_ATTACH, GROUP).unwrap_err();
        assert_eq!(refused.status(), Some(err::UNREACH));
        let refused = there.ctx.create_ah(there.pdn, &Av::to(GROUP)).unwrap_err();
        assert_eq!(refused.status(), Some(err::UNREACH));
        return;
    }
    group(&far, cmd::MCAST_ATTACH, GROUP).unwrap();
    let inbox = there.area(48);
    far.qp.post_recv(1, &[inbox.sge()]);
    let ah = here.ctx.create_ah(here.pdn, &Av::to(GROUP)).unwrap();
    sender.run_ok(&SendWr::datagram(1, &[], ah, EVERYBODY, QKEY).inline(&[6; 8]));
    far.rcq.silent(Duration::from_millis(30));
    assert_eq!(inbox.bytes(), [0; 48]);
}
