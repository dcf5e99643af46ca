//! The end of much: a little at a time, or aside, and a neighbour that goes on meanwhile.

use std::sync::Arc;
use std::thread;

use vhost_rdma_engine::nic::{BlockingJob, Command, Limits, NicSettings, Reply, Status, Step};
use vhost_rdma_engine::shard::testing::driver::{self, Guest, Qp, limits, state_attr};
use vhost_rdma_memory::{AddressSpace, PageList, Ring};
use virtio_rdma_abi::{event, qps, qpt};

use super::Bench;
use super::registrations::goes_on;
use crate::{Faults, HostObjects, Peer};

/// Connects every QP that a guest may have to itself.
fn crowd(bench: &mut Bench, guest: &mut Guest) -> Vec<Qp> {
    let cq = bench.world.cq(guest, 1024);
    let qps: Vec<Qp> = (0..32).map(|_| bench.world.qp_on(guest, (qpt::RC, 16, None), cq)).collect();
    for qp in &qps {
        bench.world.connect(guest, qp, qpt::RC, (qp.qpn, guest.gid));
    }
    qps
}

/// How many of them the hardware runs.
fn running(faults: &Faults) -> usize {
    faults.running()
}

/// The events of a kind that a guest was told.
fn told(guest: &Guest, kind: u32) -> usize {
    guest.events.lock().unwrap().asynchronous.iter().filter(|event| event.0 == kind).count()
}

#[test]
fn a_context_ends_a_little_at_a_time() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (mut b, _) = bench.pair(&mut other);
    crowd(&mut bench, &mut one);
    let mut turns = 0;
    loop {
        let before = faults.live().0.qps;
        let end = if turns == 0 { Command::ContextDestroy } else { Command::Continue };
        let reply = bench.world.shard.execute(one.nic, one.ctx, end, bench.world.now).unwrap();
        assert!(before - faults.live().0.qps <= 8, "in one turn");
        drop(bench.world.shard.take_deferred_drops(one.nic));
        turns += 1;
        goes_on(&mut bench, &mut other, &mut b, turns);
        match reply {
            Step::More => {}
            Step::Done(Reply::Done) => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(turns > 4, "{turns} turns");
    assert_eq!(faults.live(), (HostObjects::default(), 1));
    let objects = bench.world.shard.status(one.nic).unwrap().objects;
    assert_eq!((objects.contexts, objects.qps, objects.mrs, objects.cqs), (0, 0, 0, 0));
}

#[test]
fn connections_that_are_forbidden_end_in_steps() {
    const QPS: usize = 32;
    const HANDLES: usize = 400;
    let mut bench = Bench::new();
    let (mut one, _) = bench.guest(1, 1);
    let settings = NicSettings {
        number: 0,
        vni: 1,
        mac: [2, 0, 0, 0, 0, 1],
        gids: Vec::new(),
        comp_vectors: 4,
        kick_queues: 2,
        limits: Limits { max_ahs: 512, ..limits() },
    };
    bench.world.shard.update_nic(one.nic, settings);
    let everybody = "10.0.0.0".parse().unwrap();
    let peer = Peer { address: everybody, prefix_len: 24, through: None, remote: None };
    bench.directory.set_peers(1, vec![peer]);
    let mut away = one.gid;
    away[15] = 200;
    let cq = bench.world.cq(&mut one, 1024);
    for _ in 0..QPS {
        let qp = bench.world.qp_on(&mut one, (qpt::RC, 16, None), cq);
        bench.world.connect(&one, &qp, qpt::RC, (0x99, away));
    }
    for _ in 0..HANDLES {
        let av = Command::AhCreate { pdn: one.pd, av: driver::av(away) };
        bench.world.ok(&one, one.ctx, av);
    }
    bench.world.settle();
    bench.directory.set_peers(1, Vec::new());
    let charged = |bench: &Bench| bench.world.shard.charged();
    let before = charged(&bench);
    bench.world.shard.peers_changed(one.nic);
    let (mut most, mut turns) = (charged(&bench) - before, 0);
    loop {
        let before = charged(&bench);
        let busy = bench.world.shard.poll(bench.world.now);
        most = most.max(charged(&bench) - before);
        turns += 1;
        if !busy {
            break;
        }
    }
    assert!(most <= 100_000, "a turn was charged {most} ns");
    assert!(turns >= 4, "{turns} turns");
    assert_eq!(told(&one, event::QP_FATAL), QPS);
}

#[test]
fn regions_of_memory_that_is_gone_are_let_go_in_steps() {
    const REGIONS: u64 = 1000;
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let limits = Limits { max_mrs: 4096, max_mr_bytes: 1 << 40, ..limits() };
    let settings = NicSettings {
        number: 0,
        vni: 1,
        mac: [2, 0, 0, 0, 0, 1],
        gids: Vec::new(),
        comp_vectors: 4,
        kick_queues: 2,
        limits,
    };
    bench.world.shard.update_nic(one.nic, settings);
    let at = one.alloc(4096);
    let list = PageList { addr: at, npages: 1, page_shift: 12, ..PageList::default() };
    for _ in 0..REGIONS {
        let map = Arc::new(list.resolve(&one.space, 4096).unwrap());
        bench.world.register(&one, at, map, 1).unwrap();
    }
    assert_eq!(faults.live().0.mrs as u64, REGIONS + 1);
    let (mut most, mut count) = (0, 0);
    bench.world.shard.memory_changed(one.nic, AddressSpace::default());
    loop {
        let before = bench.world.shard.charged();
        let more = bench.world.shard.follow_memory(one.nic);
        most = most.max(bench.world.shard.charged() - before);
        count += 1;
        if !more {
            break;
        }
    }
    assert!(most <= 60_000, "a step was charged {most} ns");
    assert!(count >= 4, "{count} steps");
    drop(bench.world.shard.take_deferred_drops(one.nic));
    assert_eq!(faults.live().0.mrs, 0);
}

#[test]
fn a_device_is_closed_and_opened_aside() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (mut b, _) = bench.pair(&mut other);
    crowd(&mut bench, &mut one);
    bench.world.shard.reset(one.nic);
    let objects = bench.world.shard.status(one.nic).unwrap().objects;
    assert_eq!((objects.contexts, objects.qps, objects.mrs, objects.cqs), (0, 0, 0, 0));
    let dropped = bench.world.shard.take_deferred_drops(one.nic);
    faults.hold(true);
    let closing = thread::spawn(move || drop(dropped));
    faults.await_held(1);
    goes_on(&mut bench, &mut other, &mut b, 1);
    faults.hold(false);
    closing.join().unwrap();
    assert_eq!(faults.live(), (HostObjects::default(), 0));

    let begun = bench.world.shard.execute(one.nic, 0, init(&one), bench.world.now);
    let Ok(Step::Blocking(job)) = begun else { panic!("not a blocking job: {begun:?}") };
    faults.hold(true);
    let opening = thread::spawn(|| BlockingJob::run(job));
    faults.await_held(1);
    goes_on(&mut bench, &mut other, &mut b, 2);
    let early = bench.world.shard.execute(one.nic, 0, Command::Keepalive, bench.world.now);
    assert_eq!(early.unwrap_err(), Status::STATE, "nothing has begun yet");
    faults.hold(false);
    let finish = opening.join().unwrap();
    assert!(matches!(bench.world.ok(&one, 0, finish), Reply::Init(_)));
    bench.world.start_again(&mut one);
    let (mut a, _) = bench.pair(&mut one);
    goes_on(&mut bench, &mut one, &mut a, 3);
}

fn init(guest: &Guest) -> Command {
    let status_page = Ring::page(&guest.space, 0).unwrap();
    Command::Init { space: guest.space.clone(), status_page }
}

#[test]
fn an_init_that_waits_for_its_device_follows_resets_and_memory() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let begin = |bench: &mut Bench, one: &Guest| {
        bench.world.shard.reset(one.nic);
        let begun = bench.world.shard.execute(one.nic, 0, init(one), bench.world.now);
        drop(bench.world.shard.take_deferred_drops(one.nic));
        let Ok(Step::Blocking(job)) = begun else { panic!("not a blocking job: {begun:?}") };
        job.run()
    };
    let finish = begin(&mut bench, &one);
    bench.world.shard.reset(one.nic);
    assert_eq!(bench.world.execute(&one, 0, finish).unwrap_err(), Status::STATE);
    assert_eq!(faults.live(), (HostObjects::default(), 0), "nobody's");

    let finish = begin(&mut bench, &one);
    let other = AddressSpace::anonymous(&[(0, 1 << 20)]).unwrap();
    bench.world.shard.memory_changed(one.nic, other);
    assert_eq!(bench.world.execute(&one, 0, finish).unwrap_err(), Status::FAULT);

    // The device is open by now.
    bench.world.start_again(&mut one);
    faults.remove_device(true);
    let finish = begin(&mut bench, &one);
    assert_eq!(bench.world.execute(&one, 0, finish).unwrap_err(), Status::FATAL);
    faults.remove_device(false);
    bench.world.start_again(&mut one);
    let (mut a, _) = bench.pair(&mut one);
    goes_on(&mut bench, &mut one, &mut a, 1);
}

#[test]
fn a_pause_is_over_when_the_hardware_stands_still() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let qps = crowd(&mut bench, &mut one);
    let mut turns = 1;
    while bench.world.shard.pause(one.nic) {
        assert!(running(&faults) >= 32 - 8 * turns, "{turns} turns");
        assert!(running(&faults) > 0, "it says that it goes on");
        turns += 1;
    }
    assert_eq!((turns, running(&faults)), (4, 0));
    bench.world.settle();
    assert_eq!(told(&one, event::QP_FATAL), 0, "a guest that stands still is told nothing");
    bench.world.shard.resume(one.nic);
    bench.world.settle();
    assert_eq!(told(&one, event::QP_FATAL), qps.len());
    for qp in &qps {
        assert_eq!(bench.world.query(&one, qp).qp_state, qps::ERR);
    }
    // What a pause ends can be used again.
    bench.world.modify(&one, &qps[0], state_attr(qps::RESET)).unwrap();
    let mut first = qps[0].clone();
    bench.world.connect(&one, &first, qpt::RC, (first.qpn, one.gid));
    goes_on(&mut bench, &mut one, &mut first, 1);
}

#[test]
fn a_guest_is_told_that_all_is_over_when_it_is() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (mut b, _) = bench.pair(&mut other);
    crowd(&mut bench, &mut one);
    bench.world.shard.fail(one.nic);
    assert!(running(&faults) > 0);
    while running(&faults) > 0 {
        assert_eq!(
            told(&one, event::DEVICE_FATAL),
            0,
            "hardware that runs may write to its memory"
        );
        let before = running(&faults);
        bench.world.shard.poll(bench.world.now);
        assert!(before - running(&faults) <= 8, "in one turn");
    }
    goes_on(&mut bench, &mut other, &mut b, 1);
    assert_eq!(told(&one, event::DEVICE_FATAL), 1);
    let refused = bench.world.execute(&one, one.ctx, Command::PdCreate);
    assert_eq!(refused.unwrap_err(), Status::FATAL);
}

#[test]
fn an_overrun_under_all_qps_stops_them_a_few_at_a_time() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let qps = crowd(&mut bench, &mut one);
    bench.world.resize(&mut one, &qps[0].cq, 1);
    let mut first = qps[0].clone();
    for n in 0..3 {
        super::send(&one, &mut first, virtio_rdma_abi::send_flags::SIGNALED, n);
    }
    let mut least = running(&faults);
    while bench.world.shard.poll(bench.world.now) {
        assert!(least - running(&faults) <= 8, "in one turn");
        least = running(&faults);
    }
    assert_eq!(least, 0, "all of them were on that CQ");
    for qp in &qps {
        assert_eq!(bench.world.query(&one, qp).qp_state, qps::ERR);
    }
}

#[test]
fn a_device_that_goes_while_its_guest_is_stopped_is_told_once() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    crowd(&mut bench, &mut one);
    bench.world.shard.fail(one.nic);
    faults.remove_device(true);
    bench.world.advance(2_000_000);
    assert_eq!(told(&one, event::DEVICE_FATAL), 1);
    // A thread of its own closes it.
    while faults.live() != (HostObjects::default(), 0) {
        thread::yield_now();
    }
}

/// As many windows as there may be of one QP, each of them a command to the hardware.
#[test]
fn a_queue_pair_with_many_windows_ends_in_steps() {
    const WINDOWS: u64 = 200;
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let settings = NicSettings {
        number: 0,
        vni: 1,
        mac: [2, 0, 0, 0, 0, 1],
        gids: Vec::new(),
        comp_vectors: 4,
        kick_queues: 2,
        limits: Limits { max_mrs: 4096, ..limits() },
    };
    bench.world.shard.update_nic(one.nic, settings);
    let (mut a, _) = bench.pair(&mut one);
    let (at, region) = bench.bindable(&mut one);
    for n in 0..WINDOWS {
        let status = bench.bind_one(&one, &mut a, (at, region), n);
        assert_eq!(status, [(n, 0)]);
    }
    assert_eq!(faults.live().0.mws as u64, WINDOWS);
    let (mut most, mut turns) = (0, 0);
    let mut command = Command::QpDestroy(a.qpn);
    loop {
        let before = bench.world.shard.charged();
        let reply = bench.world.shard.execute(one.nic, one.ctx, command, bench.world.now);
        most = most.max(bench.world.shard.charged() - before);
        turns += 1;
        match reply.unwrap() {
            Step::More => command = Command::Continue,
            Step::Done(Reply::Done) => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(most <= 60_000, "a step was charged {most} ns");
    assert!(turns >= 4, "{turns} steps");
    assert_eq!(faults.live().0.mws, 0, "hardware keeps QPs that have windows");
}
