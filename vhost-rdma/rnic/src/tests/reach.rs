//! Peers that have to be found on the network first, and that may be silent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use vhost_rdma_engine::cm::Mad;
use vhost_rdma_engine::link::Gid;
use vhost_rdma_engine::nic::{BlockingJob, Command, Reply, Status, Step};
use vhost_rdma_engine::shard::testing::driver::{self, Guest, state_attr};
use virtio_rdma_abi::{qps, qpt};

use super::Bench;
use super::registrations::goes_on;
use crate::{Call, Far, Faults, HostObjects, Mac, NicQuota, Uplink};

/// Gives a command that looks for a peer, which does not answer yet.
fn look(
    bench: &mut Bench,
    guest: &Guest,
    faults: &Faults,
    command: Command,
) -> thread::JoinHandle<Command> {
    let begun = bench.world.shard.execute(guest.nic, guest.ctx, command, bench.world.now);
    let Ok(Step::Blocking(job)) = begun else { panic!("not a blocking job: {begun:?}") };
    faults.hold(true);
    let thread = thread::spawn(|| BlockingJob::run(job));
    faults.await_held(1);
    thread
}

fn handle(guest: &Guest) -> Command {
    Command::AhCreate { pdn: guest.pd, av: driver::av(guest.gid) }
}

#[test]
fn a_peer_that_is_silent_keeps_nobody_waiting() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (mut b, _) = bench.pair(&mut other);
    let (mut a, _) = bench.pair(&mut one);
    let before = faults.live().0;

    let searching = look(&mut bench, &one, &faults, handle(&one));
    goes_on(&mut bench, &mut other, &mut b, 1);
    goes_on(&mut bench, &mut one, &mut a, 2);
    faults.hold(false);
    let finish = searching.join().unwrap();
    let Reply::Object(number) = bench.world.ok(&one, one.ctx, finish) else { panic!("not an AH") };
    assert_eq!(faults.live().0, HostObjects { ahs: before.ahs + 1, ..before });
    bench.world.ok(&one, one.ctx, Command::AhDestroy(number));

    let c = bench.world.qp(&mut one, qpt::RC, 16, None);
    bench.world.modify(&one, &c, driver::init_attr(qpt::RC)).unwrap();
    let attr = Box::new(driver::rtr_attr(qpt::RC, (c.qpn, one.gid)));
    let connect = Command::QpModify { qpn: c.qpn, attr };
    let searching = look(&mut bench, &one, &faults, connect);
    goes_on(&mut bench, &mut other, &mut b, 3);
    goes_on(&mut bench, &mut one, &mut a, 4);
    assert_eq!(bench.world.query(&one, &c).qp_state, qps::INIT);
    faults.hold(false);
    let finish = searching.join().unwrap();
    bench.world.ok(&one, one.ctx, finish);
    assert_eq!(bench.world.query(&one, &c).qp_state, qps::RTR);
    assert_eq!(faults.live().0, HostObjects { qps: before.qps + 1, ..before }, "no handle is left");
}

#[test]
fn a_peer_that_is_not_there_is_unreachable_and_changes_nothing() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let a = bench.world.qp(&mut one, qpt::RC, 16, None);
    bench.world.modify(&one, &a, driver::init_attr(qpt::RC)).unwrap();
    let before = faults.live().0;
    for errno in [libc::EHOSTUNREACH, libc::ETIMEDOUT] {
        faults.refuse(Call::CreateAh, errno);
        let refused = bench.world.execute(&one, one.ctx, handle(&one));
        assert_eq!(refused.unwrap_err(), Status::UNREACH);
        let refused = bench.world.modify(&one, &a, driver::rtr_attr(qpt::RC, (a.qpn, one.gid)));
        assert_eq!(refused.unwrap_err(), Status::UNREACH);
        assert_eq!(bench.world.query(&one, &a).qp_state, qps::INIT);
    }
    faults.refuse(Call::CreateAh, 0);
    assert_eq!(faults.live().0, before);
    bench.world.modify(&one, &a, driver::rtr_attr(qpt::RC, (a.qpn, one.gid))).unwrap();
}

/// Finds whoever is looked for so many times, as the host does.
struct Finds {
    faults: Faults,
    left: AtomicU32,
}

impl Uplink for Finds {
    fn claim(&self, _: Mac, _: Gid) -> Option<bool> {
        Some(true)
    }

    fn repeat_claim(&self, _: Mac, _: Gid) {}

    fn release(&self, _: Mac, _: Gid) {}

    fn queue_pair(&self, _: &str, _: u32, _: bool) {}

    fn find(&self, _: Gid) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.faults.refuse(Call::CreateAh, 0);
        }
    }

    fn peer(&self, _: &str, _: Gid, _: u32) -> Option<Far> {
        Some(Far::default())
    }

    fn carry(&self, _: &NicQuota, _: Mac, _: Mad) -> bool {
        false
    }
}

#[test]
fn a_neighbour_is_found_by_the_host_where_the_process_may_not_look_for_it() {
    for (looks, outcome) in [(3, Ok(())), (100, Err(Status::UNREACH))] {
        let mut bench = Bench::new();
        let (one, faults) = bench.guest(1, 1);
        let finds = Arc::new(Finds { faults: faults.clone(), left: AtomicU32::new(looks) });
        bench.directory.set_uplink(finds.clone());
        faults.refuse(Call::CreateAh, libc::EPERM);
        let made = bench.world.execute(&one, one.ctx, handle(&one)).map(drop);
        assert_eq!(made, outcome);
        let asked = looks - finds.left.load(Ordering::Relaxed);
        assert!((1..=looks.min(7)).contains(&asked), "{asked}: once for each attempt that failed");
        // What no search helps against is said at once.
        faults.refuse(Call::CreateAh, libc::ENOMEM);
        bench.world.execute(&one, one.ctx, handle(&one)).unwrap_err();
        assert_eq!(looks - finds.left.load(Ordering::Relaxed), asked);
    }
}

#[test]
fn what_was_found_for_another_life_or_a_queue_that_is_gone_is_nobodys() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let searching = look(&mut bench, &one, &faults, handle(&one));
    bench.world.shard.reset(one.nic);
    faults.hold(false);
    let finish = searching.join().unwrap();
    drop(bench.world.shard.take_deferred_drops(one.nic));
    assert_eq!(bench.world.execute(&one, one.ctx, finish).unwrap_err(), Status::STATE);
    assert_eq!(faults.live(), (HostObjects::default(), 0));

    bench.world.start_again(&mut one);
    let a = bench.world.qp(&mut one, qpt::RC, 16, None);
    bench.world.modify(&one, &a, driver::init_attr(qpt::RC)).unwrap();
    let attr = Box::new(driver::rtr_attr(qpt::RC, (a.qpn, one.gid)));
    let searching = look(&mut bench, &one, &faults, Command::QpModify { qpn: a.qpn, attr });
    bench.world.shard.fail(one.nic);
    faults.hold(false);
    let finish = searching.join().unwrap();
    assert_eq!(bench.world.execute(&one, one.ctx, finish).unwrap_err(), Status::FATAL);
    assert_eq!(faults.live().0.ahs, 0);

    let (mut two, faults) = bench.guest(1, 2);
    let b = bench.world.qp(&mut two, qpt::RC, 16, None);
    bench.world.modify(&two, &b, driver::init_attr(qpt::RC)).unwrap();
    let attr = Box::new(driver::rtr_attr(qpt::RC, (b.qpn, two.gid)));
    let searching = look(&mut bench, &two, &faults, Command::QpModify { qpn: b.qpn, attr });
    bench.world.modify(&two, &b, state_attr(qps::ERR)).unwrap();
    faults.hold(false);
    let finish = searching.join().unwrap();
    assert_eq!(bench.world.execute(&two, two.ctx, finish).unwrap_err(), Status::INVAL);
}
