//! Networks on RNICs have processes as others have: on null host verbs, which are all of that
//! backing but hardware. They complete requests and move nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use virtual_guest::daemon::DaemonOptions;
use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::SendWr;
use virtual_guest::spec::status;
use virtual_guest::world::{End, Node, World};

use super::{eventually, node, pair, processes, replace, replace_supervisor};
use super::{start_anew, told_that_it_is_lost, writes};

const NULL: [&str; 2] = ["--backing", "rnic:null@192.0.2.1"];

fn options() -> DaemonOptions {
    DaemonOptions { processes: true, ..DaemonOptions::default() }
}

fn with(options: &DaemonOptions) -> World {
    let world = World::with(options, Duration::from_secs(120));
    world.daemon.add_network("red", 200);
    world
}

fn world() -> World {
    with(&options())
}

fn on_rnic(world: &World, network: &str) -> Node {
    world.node_with(network, &NULL, GuestConfig::default())
}

/// A request that completes.
fn completes(ends: &mut (End, End)) {
    let word = ends.1.node.area(8);
    ends.0.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[7; 8]));
}

#[test]
fn a_network_on_rnics_has_a_process_without_privilege_beside_the_others() {
    let world = world();
    let (a, b, c) = (on_rnic(&world, "net"), node(&world, "net"), on_rnic(&world, "red"));
    let of = processes(&world.daemon);
    assert_eq!(of.keys().collect::<Vec<_>>(), ["net", "net+rnic", "red+rnic"]);
    for pid in of.values() {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
        for task in tasks.flatten() {
            let status = std::fs::read_to_string(task.path().join("status")).expect("a thread");
            for line in status.lines().filter(|line| line.starts_with("Cap")) {
                assert!(line.ends_with("0000000000000000"), "{line}");
            }
            assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"));
        }
    }
    completes(&mut pair(&a, &a));
    writes(&mut pair(&b, &b), 1);
    completes(&mut pair(&c, &c));
    let metrics = world.daemon.metrics().expect("metrics");
    for label in ["net", "net+rnic", "red+rnic"] {
        let name = format!("vhost_rdma_process_up{{network=\"{label}\"}}");
        assert!(metrics[name.as_str()] > 0.5, "{label}");
    }
    // Each goes with its own last NIC.
    a.guest.disconnect();
    world.daemon.run(&["nic", "rm", &a.name]);
    let left = processes(&world.daemon);
    assert_eq!(left.keys().collect::<Vec<_>>(), ["net", "red+rnic"]);
    writes(&mut pair(&b, &b), 2);
}

#[test]
fn a_guest_whose_process_was_killed_starts_anew_and_another_network_notices_nothing() {
    let world = world();
    let (mut a, mut b) = (on_rnic(&world, "net"), on_rnic(&world, "net"));
    let soft = node(&world, "net");
    let (c, d) = (on_rnic(&world, "red"), on_rnic(&world, "red"));
    let mut there = pair(&c, &d);
    let word = d.area(8);
    let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let write = SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[7; 8]);
            while !over.load(Ordering::Relaxed) {
                assert_eq!(there.0.run(&write).status, status::SUCCESS);
                sent.fetch_add(1, Ordering::Relaxed);
            }
        });
        for _ in 0..3 {
            completes(&mut pair(&a, &b));
            let before = sent.load(Ordering::Relaxed);
            replace(&world.daemon, "net+rnic");
            told_that_it_is_lost(&a.guest);
            told_that_it_is_lost(&b.guest);
            (a, b) = (start_anew(&a), start_anew(&b));
            eventually("the neighbours stand still", || {
                sent.load(Ordering::Relaxed) > before + 100
            });
        }
        over.store(true, Ordering::Relaxed);
    });
    completes(&mut pair(&a, &b));
    writes(&mut pair(&soft, &soft), 3);
    let shown = world.daemon.show_nic(&a.name);
    assert_eq!(shown["session"], "driver_ready", "{shown}");
    let deaths = world.daemon.metrics().expect("metrics");
    assert!(deaths["vhost_rdma_process_deaths_total{network=\"net+rnic\"}"] > 2.5);
    assert!(deaths["vhost_rdma_process_deaths_total{network=\"red+rnic\"}"] < 0.5);
}

/// What is the hardware's cannot be handed on: who asks for it is told, and the VMs go on.
#[test]
fn a_restart_loses_the_devices_and_no_vm() {
    let world = world();
    let (a, soft) = (on_rnic(&world, "net"), node(&world, "net"));
    let mut ends = pair(&soft, &soft);
    writes(&mut ends, 1);
    completes(&mut pair(&a, &a));
    let before = processes(&world.daemon);
    let said = world.daemon.cli(&["network", "restart", "net", "--json"]);
    let why = said.expect_err("a device is lost, and the exit status tells");
    assert!(why.contains(&a.name) && !why.contains(&soft.name), "{why}");
    let after = processes(&world.daemon);
    assert!(before.iter().all(|(network, pid)| after[network] != *pid), "{after:?}");
    told_that_it_is_lost(&a.guest);
    completes(&mut {
        let a = start_anew(&a);
        pair(&a, &a)
    });
    writes(&mut ends, 2);
}

#[test]
fn sessions_survive_a_supervisor_that_is_killed() {
    let world = with(&DaemonOptions { kept: true, ..options() });
    let mut nodes = [on_rnic(&world, "net"), on_rnic(&world, "red"), node(&world, "net")];
    for round in 1..=2 {
        completes(&mut pair(&nodes[0], &nodes[0]));
        completes(&mut pair(&nodes[1], &nodes[1]));
        writes(&mut pair(&nodes[2], &nodes[2]), round);
        replace_supervisor(&world.daemon);
        for node in &mut nodes {
            told_that_it_is_lost(&node.guest);
            *node = start_anew(node);
        }
    }
    completes(&mut pair(&nodes[0], &nodes[0]));
    for node in &nodes {
        assert_eq!(world.daemon.show_nic(&node.name)["session"], "driver_ready");
    }
}

/// Peers of a network are its process's as well: also of one that comes later.
#[test]
fn who_may_be_reached_is_known_to_the_process_and_to_the_next() {
    let world = world();
    world.daemon.add_peer("10.9.0.0/16", "net");
    let mut a = on_rnic(&world, "net");
    let reaches = |node: &Node, last: u8| {
        let mut gid = node.gid;
        gid[13..].copy_from_slice(&[9, 0, last]);
        node.ctx.create_ah(node.pdn, &virtual_guest::qp::Av::to(gid)).is_ok()
    };
    assert!(reaches(&a, 1));
    replace(&world.daemon, "net+rnic");
    told_that_it_is_lost(&a.guest);
    a = start_anew(&a);
    assert!(reaches(&a, 2), "the next one knows them");
    world.daemon.run(&["peer", "rm", "10.9.0.0/16", "--network", "net"]);
    assert!(!reaches(&a, 3), "they are taken away at once");
    world.daemon.add_peer("10.9.0.4", "net");
    assert!(reaches(&a, 4) && !reaches(&a, 5));
}
