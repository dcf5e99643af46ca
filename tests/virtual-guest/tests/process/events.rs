//! Completion and asynchronous events of processes.

use std::time::Duration;

use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::rings::Cq;
use virtual_guest::spec::{ARM_ANY, Put, cmd, err, event, qpt};
use virtual_guest::world::{End, Node};

use crate::scene::{Scene, status};

const SOON: Duration = Duration::from_secs(10);
const NEVER: Duration = Duration::from_millis(200);

/// A CQ that tells of its completions by a channel, and calls itself `cookie`.
fn cq(node: &Node, cookie: u64, channel: u32) -> Cq {
    node.guest.process().with((cookie, channel), || node.cq(64))
}

fn connected(node: &Node, recv_cq: Cq, peer: &Node) -> (End, End) {
    let a = node.end_with(&QpSpec::new(qpt::RC), node.cq(64), recv_cq);
    let b = peer.rc();
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    (a, b)
}

#[test]
fn each_channel_tells_of_its_own_queues_once_for_each_arm() {
    let scene = Scene::new();
    let (node, peer) = (scene.blue(), scene.red());
    let process = node.guest.process();
    let (one, two) = (process.channel().unwrap(), process.channel().unwrap());
    let (mut a, mut b) = connected(&node, cq(&node, 0xc0ffee, one.number), &peer);
    let (mut c, mut d) = connected(&node, cq(&node, 0xbeef, two.number), &peer);
    for (near, far, channel, other, cookie) in
        [(&mut a, &mut b, &one, &two, 0xc0ffee), (&mut c, &mut d, &two, &one, 0xbeef)]
    {
        let to = near.node.area(8);
        for _ in 0..3 {
            near.rcq.arm(ARM_ANY);
            assert_eq!(channel.event(NEVER), None, "nothing has come");
            near.qp.post_recv(1, &[to.sge()]);
            far.run_ok(&SendWr::send(1, &[]));
            assert_eq!(channel.event(SOON), Some(cookie));
            near.rcq.ok();
            near.qp.post_recv(1, &[to.sge()]);
            far.run_ok(&SendWr::send(1, &[]));
            assert_eq!(channel.event(NEVER), None, "it is not armed");
            near.rcq.ok();
        }
        assert_eq!(other.event(Duration::ZERO), None);
    }
}

#[test]
fn a_channel_lives_for_as_long_as_its_queues() {
    let scene = Scene::new();
    let node = scene.blue();
    let process = node.guest.process();
    let channel = process.channel().unwrap();
    let queue = cq(&node, 1, channel.number);
    assert_eq!(process.end_channel(channel.number).unwrap(), err::BUSY);
    queue.destroy().unwrap();
    assert_eq!(process.end_channel(channel.number).unwrap(), err::OK);
    assert_eq!(process.end_channel(channel.number).unwrap(), err::NOENT);
    let body = Put::new().u32(64).u32(0).zero(24).done(32);
    let header = Put::new().u16(cmd::CQ_CREATE).zero(2).u32(0).u64(0).done(16);
    let (refused, _) = process.command((1, channel.number), &[header, body].concat()).unwrap();
    assert_eq!(refused, err::NOENT);
}

/// A process has as many channels as a server has connections, and a NIC's processes together have
/// no more descriptors of the daemon's than a few of them might ask for.
#[test]
fn channels_have_a_limit_for_a_process_and_for_all_of_a_nic() {
    const OF_ONE: u32 = 1024;
    const OF_ALL: u32 = 4096;
    let scene = Scene::new();
    let (first, peer) = (scene.blue(), scene.red());
    let process = first.guest.process();
    let mut numbers: Vec<u32> = (0..OF_ONE).map(|_| process.channel().unwrap().number).collect();
    assert_eq!(status(process.channel()), err::NOMEM, "one too many");
    let tokens: Vec<u32> = (0..OF_ONE).map(|_| process.cm_channel().unwrap().number).collect();
    assert_eq!(status(process.cm_channel()), err::NOMEM, "one too many");
    // Another process finds the rest of what the NIC may have.
    let second = scene.blue();
    let (all, other) = (OF_ALL - 2 * OF_ONE, second.guest.process());
    for _ in 0..all / 2 {
        other.channel().unwrap();
        other.cm_channel().unwrap();
    }
    let third = scene.blue();
    assert_eq!(status(third.guest.process().channel()), err::NOMEM);
    assert_eq!(status(third.guest.process().cm_channel()), err::NOMEM);
    // That is no other NIC's affair, and who has so many is served.
    let channel = peer.guest.process().channel().unwrap();
    let last = process.end_channel(numbers.pop().unwrap()).unwrap();
    assert_eq!(last, err::OK);
    let own = process.channel().unwrap();
    for (near, far, of) in [(&first, &peer, &own), (&peer, &first, &channel)] {
        let (mut a, mut b) = connected(near, cq(near, 7, of.number), far);
        let to = a.node.area(8);
        a.rcq.arm(ARM_ANY);
        a.qp.post_recv(1, &[to.sge()]);
        b.run_ok(&SendWr::send(1, &[]));
        assert_eq!(of.event(SOON), Some(7));
    }
    assert_eq!(process.end_cm(tokens[0]).unwrap(), err::OK);
    third.guest.process().channel().unwrap();
    // With a process go its channels.
    drop(second);
    let begin = std::time::Instant::now();
    let found =
        || third.guest.process().channel().is_ok() && third.guest.process().channel().is_ok();
    while !found() {
        assert!(begin.elapsed() < SOON, "they stay");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that does not read its events loses none, and delays no other's. One that comes while
/// the one before is still on its way is merged with it, and counted (docs/virtio-rdma.md,
/// `events_coalesced`).
#[test]
fn events_that_nobody_reads_wait() {
    const MANY: u32 = 600;
    let scene = Scene::new();
    let (node, peer) = (scene.blue(), scene.red());
    let (mute, heard) =
        (node.guest.process().channel().unwrap(), node.guest.process().channel().unwrap());
    let (mut a, mut b) = connected(&node, cq(&node, 5, mute.number), &peer);
    let to = a.node.area(8);
    for _ in 0..MANY {
        a.rcq.arm(ARM_ANY);
        a.qp.post_recv(1, &[to.sge()]);
        b.run_ok(&SendWr::send(1, &[]));
        a.rcq.ok();
        let begin = std::time::Instant::now();
        while a.rcq.armed() {
            assert!(begin.elapsed() < SOON, "the arm does not fire");
        }
    }
    let (mut c, mut d) = connected(&node, cq(&node, 6, heard.number), &peer);
    c.rcq.arm(ARM_ANY);
    c.qp.post_recv(1, &[to.sge()]);
    d.run_ok(&SendWr::send(1, &[]));
    assert_eq!(heard.event(SOON), Some(6));
    let merged = node.guest.query_counters().unwrap().events_coalesced;
    assert!(merged < u64::from(MANY / 2), "{merged} were merged");
    for n in merged..MANY.into() {
        assert_eq!(mute.event(SOON), Some(5), "event {n}, {merged} merged");
    }
    assert_eq!(mute.event(NEVER), None);
}

#[test]
fn asynchronous_events_reach_the_process_whose_object_it_is() {
    let scene = Scene::new();
    let (node, other, peer) = (scene.blue(), scene.blue(), scene.red());
    let make = |cookie: u64| {
        let queue = node.cq(64);
        let spec = QpSpec::new(qpt::RC);
        let made = node.guest.process().with((cookie, 0), || {
            virtual_guest::qp::Qp::create(&node.ctx, node.pdn, &queue, &queue, &spec)
        });
        (made.unwrap(), queue)
    };
    let (qp, _queue) = make(0xabcd);
    let far = peer.rc();
    qp.connect(far.address(), &Path::default()).unwrap();
    far.qp.connect((node.gid, qp.qpn), &Path::default()).unwrap();
    let mut far = far;
    // A write by a key that there is not.
    far.run(&SendWr::write(1, &[], 0, 0xdead));
    far.run(&SendWr::write(1, &[peer.area(8).sge()], 0, 0xdead));
    let (element, kind) = node.guest.process().event(SOON).expect("an event");
    assert_eq!((element, kind), (0xabcd, event::QP_ACCESS_ERR));
    assert_eq!(other.guest.process().event(NEVER), None);
    // What happened to a queue pair that is gone is nobody's.
    qp.destroy().unwrap();
    assert_eq!(status(qp.query().map(drop)), err::NOENT);
}
