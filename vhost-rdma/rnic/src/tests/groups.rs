//! Multicast groups over null host verbs: who may be in one, who hears it, and what is left of it.

use vhost_rdma_engine::link::{Gid, MULTICAST_QPN};

use super::*;

/// 224.1.2.`last`, as IBTA writes an IPv4 group.
fn group(last: u8) -> Gid {
    [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 224, 1, 2, last]
}

fn datagrams(bench: &mut Bench, guest: &mut Guest) -> Qp {
    let qp = bench.world.qp(guest, qpt::UD, 16, None);
    bench.world.connect(guest, &qp, qpt::UD, (0, guest.gid));
    qp
}

fn join(bench: &mut Bench, guest: &Guest, qpn: u32, mgid: Gid) -> Result<(), Status> {
    bench.world.execute(guest, guest.ctx, Command::McastAttach { qpn, mgid }).map(drop)
}

fn leave(bench: &mut Bench, guest: &Guest, qpn: u32, mgid: Gid) -> Result<(), Status> {
    bench.world.execute(guest, guest.ctx, Command::McastDetach { qpn, mgid }).map(drop)
}

/// A guest of a network that may use 224.1.2.0/28.
fn scene() -> (Bench, Guest, Faults) {
    let mut bench = Bench::new();
    let (guest, faults) = bench.guest(1, 1);
    let groups =
        Peer { address: "224.1.2.0".parse().unwrap(), prefix_len: 28, through: None, remote: None };
    bench.directory.set_peers(1, vec![groups]);
    (bench, guest, faults)
}

#[test]
fn a_group_is_heard_by_its_members() {
    let (mut bench, mut guest, faults) = scene();
    let mut sender = datagrams(&mut bench, &mut guest);
    let mut members = [datagrams(&mut bench, &mut guest), datagrams(&mut bench, &mut guest)];
    for member in &mut members {
        assert_eq!(join(&mut bench, &guest, member.qpn, group(1)), Ok(()));
        assert_eq!(join(&mut bench, &guest, member.qpn, group(1)), Ok(()), "twice is once");
        guest.post_receive(member, 7, &[guest.sge(0, 64)]);
        guest.post_receive(member, 8, &[guest.sge(0, 64)]);
    }
    assert_eq!(faults.live().0.attachments, 2);
    let ctx = guest.ctx;
    let av = Command::AhCreate { pdn: guest.pd, av: driver::av(group(1)) };
    let Reply::Object(ah) = bench.world.ok(&guest, ctx, av) else { panic!("an AH") };
    bench.world.settle();
    let mut to_all = wqe(opcode::SEND, SIGNALED, 1);
    (to_all.arg0, to_all.rkey) = (U64::new(ah.into()), U32::new(MULTICAST_QPN));
    guest.post_send(&mut sender, to_all, &[guest.sge(0, 8)]);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut sender.cq), [(1, 0)]);
    for member in &mut members {
        assert_eq!(guest.statuses(&mut member.cq), [(7, 0)]);
    }
    assert_eq!(leave(&mut bench, &guest, members[0].qpn, group(1)), Ok(()));
    assert_eq!(leave(&mut bench, &guest, members[0].qpn, group(1)), Err(Status::INVAL));
    guest.post_send(&mut sender, to_all, &[guest.sge(0, 8)]);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut members[0].cq), []);
    assert_eq!(guest.statuses(&mut members[1].cq), [(8, 0)]);
    // The end of a QP is the end of its membership: hardware keeps QPs that are in a group.
    bench.world.ok(&guest, ctx, Command::QpDestroy(members[1].qpn));
    assert_eq!((faults.live().0.attachments, faults.live().0.qps), (0, 2));
    assert_eq!(join(&mut bench, &guest, members[0].qpn, group(2)), Ok(()));
    bench.world.ok(&guest, ctx, Command::ContextDestroy);
    assert_eq!(faults.live().0, HostObjects::default());
}

#[test]
fn groups_are_what_the_operator_names() {
    let (mut bench, mut guest, faults) = scene();
    let qp = datagrams(&mut bench, &mut guest);
    let connected = bench.world.qp(&mut guest, qpt::RC, 16, None);
    let own = guest.gid;
    assert_eq!(join(&mut bench, &guest, qp.qpn, group(99)), Err(Status::UNREACH));
    assert_eq!(join(&mut bench, &guest, qp.qpn, own), Err(Status::INVAL));
    assert_eq!(join(&mut bench, &guest, connected.qpn, group(1)), Err(Status::INVAL));
    assert_eq!(join(&mut bench, &guest, 0x99_9999, group(1)), Err(Status::NOENT));
    // On the same device, so that no number is there twice.
    faults.set_gids(vec![address(1), address(3)]);
    let mut stranger = bench.guest_on(2, 3, &faults);
    let theirs = datagrams(&mut bench, &mut stranger);
    assert_eq!(join(&mut bench, &stranger, theirs.qpn, group(1)), Err(Status::UNREACH));
    assert_eq!(join(&mut bench, &stranger, qp.qpn, group(1)), Err(Status::NOENT), "not its own");
    let av = Command::AhCreate { pdn: stranger.pd, av: driver::av(group(1)) };
    let refused = bench.world.execute(&stranger, stranger.ctx, av);
    assert_eq!(refused.unwrap_err(), Status::UNREACH);
    bench.world.modify(&guest, &connected, driver::init_attr(qpt::RC)).unwrap();
    let rtr = driver::rtr_attr(qpt::RC, (0x99, group(1)));
    assert_eq!(bench.world.modify(&guest, &connected, rtr), Err(Status::INVAL));
    faults.refuse(Call::AttachMcast, libc::ENOMEM);
    assert_eq!(join(&mut bench, &guest, qp.qpn, group(1)), Err(Status::NOMEM));
    faults.refuse(Call::AttachMcast, 0);
    assert_eq!(join(&mut bench, &guest, qp.qpn, group(1)), Ok(()));
    // Taken back, it is left.
    bench.directory.set_peers(1, Vec::new());
    bench.world.shard.peers_changed(guest.nic);
    bench.world.settle();
    assert_eq!(faults.live().0.attachments, 0);
    assert_eq!(leave(&mut bench, &guest, qp.qpn, group(1)), Err(Status::INVAL));
}

#[test]
fn no_queue_pair_of_a_guest_sends_to_those_of_the_hosts_management() {
    let (mut bench, mut guest, _) = scene();
    let av = Command::AhCreate { pdn: guest.pd, av: driver::av(group(1)) };
    let ctx = guest.ctx;
    let Reply::Object(ah) = bench.world.ok(&guest, ctx, av) else { panic!("an AH") };
    for (qpn, expected) in [(0, wc_status::LOC_QP_OP_ERR), (1, wc_status::LOC_QP_OP_ERR), (2, 0)] {
        let mut sender = datagrams(&mut bench, &mut guest);
        let mut datagram = wqe(opcode::SEND, SIGNALED, 1);
        (datagram.arg0, datagram.rkey) = (U64::new(ah.into()), U32::new(qpn));
        guest.post_send(&mut sender, datagram, &[guest.sge(0, 8)]);
        bench.world.settle();
        assert_eq!(guest.statuses(&mut sender.cq), [(1, expected)], "to QP {qpn}");
    }
}
