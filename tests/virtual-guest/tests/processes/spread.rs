//! A network whose NICs are on several workers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use virtual_guest::daemon::{DaemonOptions, patience};
use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::SendWr;
use virtual_guest::spec::wr;
use virtual_guest::world::{End, Node, World, pattern};

use super::{SOFT, eventually, node, pair, processes, replace, start_anew};
use super::{told_that_it_is_lost, under_traffic, writes};

fn world() -> World {
    let args = ["--network-workers", "2"].map(str::to_owned).to_vec();
    let options = DaemonOptions { processes: true, args, ..DaemonOptions::default() };
    World::with(&options, Duration::from_secs(120))
}

/// Processor time of each worker of a network's process, in clock ticks.
fn workers(pid: u32) -> Vec<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    let stat = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        let (name, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_whitespace().skip(11).map(|field| field.parse::<u64>());
        name.contains("vrdma-shard").then(|| Some(fields.next()?.ok()? + fields.next()?.ok()?))?
    };
    tasks.flatten().filter_map(stat).collect()
}

#[test]
fn requests_cross_between_the_workers_of_a_network() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let (mut near, mut far) = pair(&a, &b);
    let bytes = pattern(5, 1 << 20);
    let (from, to) = (a.area_of(&bytes), b.area(1 << 20));
    for round in 0..20 {
        near.run_ok(&SendWr::write(round, &[from.sge()], to.addr(0), to.rkey()));
        assert!(to.bytes() == bytes);
        far.qp.post_recv(round, &[to.sge()]);
        near.run_ok(&SendWr::send(round, &[from.sge()]));
        far.rcq.wait(Duration::from_secs(10) * patience()).expect("its completion");
    }
    let (longest, sent) = under_traffic(&mut (near, far), |sent| {
        eventually("it is slow", || sent.load(Ordering::Relaxed) > 5_000);
    });
    assert!(longest < Duration::from_secs(1) * patience(), "{longest:?} of {sent}");
    let times = workers(processes(&world.daemon)["net"]);
    assert_eq!(times.len(), 2, "{times:?}");
    assert!(times.iter().all(|&time| time > 0), "one of them has done nothing: {times:?}");
}

/// Its process is replaced, and dies, as that of any other.
#[test]
fn it_is_handed_on_under_traffic_and_starts_anew_after_a_death() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let (c, d) = (node(&world, "net"), node(&world, "net"));
    let (mut here, mut there) = (pair(&a, &b), pair(&c, &b));
    under_traffic(&mut there, |_| {
        under_traffic(&mut here, |sent| {
            for _ in 0..5 {
                let said = world.daemon.run(&["network", "restart", "net", "--json"]);
                let said: serde_json::Value = serde_json::from_str(&said).expect("JSON");
                assert_eq!(said["kept"].as_array().map(Vec::len), Some(4), "{said}");
                let before = sent.load(Ordering::Relaxed);
                eventually("nothing goes on", || sent.load(Ordering::Relaxed) > before + 20);
            }
        });
    });
    writes(&mut pair(&d, &a), 3);
    replace(&world.daemon, "net");
    for node in [&a, &b] {
        told_that_it_is_lost(&node.guest);
    }
    let (a, b) = (start_anew(&a), start_anew(&b));
    writes(&mut pair(&a, &b), 4);
    let late = world.node_with("net", &SOFT, GuestConfig::default());
    writes(&mut pair(&late, &a), 5);
}

/// What `nic show` says of a NIC: its worker, and how often it has moved.
fn seat(world: &World, nic: &Node) -> (u64, u64) {
    let shown = world.daemon.run(&["nic", "show", &nic.name, "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let of = |value: &serde_json::Value| value.as_u64().expect("a number");
    (of(&shown["worker"]), of(&shown["counters"]["moves"]))
}

/// Two busy pairs, placed so that all that they say crosses, come to have a worker each. Nothing
/// fails meanwhile, every byte is there, and then they stay.
#[test]
fn busy_pairs_come_together_and_nothing_fails_meanwhile() {
    let world = world();
    let nodes = [(); 4].map(|()| node(&world, "net"));
    let [a, b, c, d] = &nodes;
    assert_eq!(nodes.each_ref().map(|nic| seat(&world, nic).0), [0, 1, 0, 1], "placed in turn");
    // With several a worker has something to do while one waits.
    let mut pairs: Vec<_> =
        [(a, b), (c, d), (a, b), (c, d), (a, b), (c, d)].map(|(near, far)| pair(near, far)).into();
    let together = || {
        // NICs move once a second at most, and a look is four programs that take the time of who is
        // to be busy.
        std::thread::sleep(Duration::from_secs(1));
        let on = nodes.each_ref().map(|nic| seat(&world, nic).0);
        on[0] == on[1] && on[2] == on[3] && on[0] != on[2]
    };
    under_load(&mut pairs, || eventually("they cross", together));
    let moves = || nodes.iter().map(|nic| seat(&world, nic).1).sum::<u64>();
    let before = moves();
    assert!(before >= 2, "{before} moves");
    under_load(&mut pairs, || std::thread::sleep(Duration::from_secs(8)));
    assert_eq!(moves(), before, "what is balanced stays");
    // What a guest had from before, and what it makes now.
    for (near, far) in [(a, b), (b, c), (c, d), (d, a)] {
        writes(&mut pair(near, far), 7);
    }
    let metrics = world.daemon.run(&["nic", "show", &a.name]);
    assert!(metrics.contains("worker") && metrics.contains("moves"), "{metrics}");
}

/// Keeps pairs busy with long messages, whose bytes are looked at, while something happens.
fn under_load(pairs: &mut [(End, End)], meanwhile: impl FnOnce()) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy: Vec<_> = pairs
            .iter_mut()
            .enumerate()
            .map(|(number, pair)| {
                let over = &over;
                scope.spawn(move || {
                    let (near, far) = pair;
                    let bytes = pattern(number as u64, 1 << 20);
                    let (from, to) = (near.node.area_of(&bytes), far.node.area(1 << 20));
                    let (word, found) = (far.node.area(8), near.node.area(8));
                    let write = SendWr::write(1, &[from.sge()], to.addr(0), to.rkey());
                    let add = SendWr {
                        arg0: 1,
                        remote_addr: word.addr(0),
                        rkey: word.rkey(),
                        ..SendWr::new(2, wr::ATOMIC_FETCH_AND_ADD, &[found.sge()])
                    };
                    for round in 0u64.. {
                        if over.load(Ordering::Relaxed) {
                            return round;
                        }
                        // The worker is to have more to do than the guest.
                        (0..48).for_each(|_| near.qp.queue_send(&write.clone().unsignaled()));
                        near.run_ok(&write);
                        assert!(to.bytes() == bytes, "round {round}");
                        near.run_ok(&add);
                        assert_eq!(found.bytes(), round.to_le_bytes(), "added once each");
                    }
                    unreachable!()
                })
            })
            .collect();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(meanwhile));
        over.store(true, Ordering::Relaxed);
        for thread in busy {
            assert!(thread.join().expect("no request fails") > 0);
        }
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
}
