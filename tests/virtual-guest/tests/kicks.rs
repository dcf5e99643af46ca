//! Posts and the device's sleep: one that nobody polls for is heard by its kick (6.4).

#![allow(clippy::expect_used, reason = "a test")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtual_guest::daemon::{DaemonOptions, backing, tries};
use virtual_guest::qp::SendWr;
use virtual_guest::spec::status;
use virtual_guest::world::{Node, World};

fn eventually(what: &str, mut f: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !f() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn an_idle_daemon_asks_for_kicks_and_wakes_by_one() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    for i in 0..20u64 {
        eventually("the device never sleeps", || a.node.guest.need_kick());
        a.run_ok(&SendWr::write(i, &[], word.addr(0), word.rkey()).inline(&i.to_le_bytes()));
    }
}

#[test]
fn posts_that_race_with_the_device_going_to_sleep_are_never_lost() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    for i in 0..tries(20_000) {
        // Around the default of 50 us that a worker polls before it sleeps.
        let pause = Duration::from_nanos(i * 7919 % 120_000);
        let start = Instant::now();
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
        a.qp.post_send(&SendWr::write(i, &[], word.addr(0), word.rkey()).inline(&i.to_le_bytes()));
        let cqe = a.scq.wait(Duration::from_secs(3)).expect("a post was lost");
        assert_eq!((cqe.wr_id, cqe.status), (i, status::SUCCESS));
    }
}

#[test]
fn posts_that_race_with_a_nic_being_parked_are_never_lost() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    // More than the device visits in any case.
    let _idle: Vec<Node> = (0..6).map(|_| world.node()).collect();
    let (mut c, d) = world.rc_pair();
    let other = d.node.area(8);
    let stop = AtomicBool::new(false);
    let busy = SendWr::write(1, &[], other.addr(0), other.rkey()).inline(&[1; 8]);
    let kicked = std::thread::scope(|scope| {
        // These keep the worker awake, so that it is the NIC that rests.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                c.run_ok(&busy);
            }
        });
        let done = (0..tries(4_000)).take_while(|i| {
            // Around the 100 us that a NIC is visited after its last work.
            let pause = Duration::from_nanos(i * 7919 % 300_000);
            let start = Instant::now();
            while start.elapsed() < pause {
                std::hint::spin_loop();
            }
            let request = SendWr::write(*i, &[], word.addr(0), word.rkey());
            a.qp.post_send(&request.inline(&i.to_le_bytes()));
            a.scq.wait(Duration::from_secs(3)).is_some_and(|cqe| cqe.status == status::SUCCESS)
        });
        let done = done.count() as u64;
        stop.store(true, Ordering::Relaxed);
        assert_eq!(done, tries(4_000), "a post was lost");
        world.daemon.show_nic(&a.node.name)["counters"]["kicks"].as_u64().expect("a count")
    });
    // What comes from outside is an RNIC's own to look for: its NICs are not parked.
    assert!(kicked > 0 || backing() != "soft", "the NIC was never parked");
}

#[test]
fn a_nic_that_is_parked_is_heard_while_its_neighbours_keep_the_worker_awake() {
    // The worker looks around for so long after its last work, and visits a NIC for as long.
    const PATIENCE: Duration = Duration::from_millis(50);
    let args = vec!["--poll-us".to_owned(), PATIENCE.as_micros().to_string()];
    let options = DaemonOptions { args, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(60));
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    let _idle: Vec<Node> = (0..6).map(|_| world.node()).collect();
    let (mut c, d) = world.rc_pair();
    let other = d.node.area(8);
    let stop = AtomicBool::new(false);
    let busy = SendWr::write(1, &[], other.addr(0), other.rkey()).inline(&[1; 8]);
    let heard = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                c.run_ok(&busy);
            }
        });
        let heard = (0..10u64).take_while(|i| {
            std::thread::sleep(3 * PATIENCE);
            let request = SendWr::write(*i, &[], word.addr(0), word.rkey());
            a.qp.post_send(&request.inline(&i.to_le_bytes()));
            a.scq.wait(Duration::from_secs(5)).is_some_and(|cqe| cqe.status == status::SUCCESS)
        });
        let heard = heard.count();
        stop.store(true, Ordering::Relaxed);
        heard
    });
    assert_eq!(heard, 10, "a parked NIC waits for its neighbours");
}
