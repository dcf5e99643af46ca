//! A network whose NICs are on several workers.

use std::sync::atomic::Ordering;
use std::time::Duration;

use virtual_guest::daemon::{DaemonOptions, patience};
use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::SendWr;
use virtual_guest::world::{World, pattern};

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
