//! A cgroup for each network's process: what it takes is known, and limited. On the build machine
//! cgroups are of version 1; `cargo xtask vm stock` and `vm rnic` run these tests on version 2.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use virtual_guest::daemon::{Daemon, DaemonOptions};
use virtual_guest::guest::GuestConfig;
use virtual_guest::pages::PageList;
use virtual_guest::spec::{PAGE, access, err};
use virtual_guest::world::{Node, World};

use super::{SOFT, can_look, eventually, node, pair, processes, start_anew, told_that_it_is_lost};
use super::{under_traffic, writes};

/// Version 2 counts the kernel's memory as well: stacks, page tables, sockets.
const MAX: u64 = 32 << 20;

fn world() -> World {
    let args = ["--network-memory-max", "32M", "--network-pids-max", "200"].map(str::to_owned);
    let options =
        DaemonOptions { processes: true, args: args.to_vec(), ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(300));
    world.daemon.add_network("red", 200);
    world
}

/// Whether this test may make cgroups.
fn may_make_cgroups() -> bool {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let memory = own.lines().find_map(|line| line.split_once(":memory:")).map(|(_, path)| path);
    let memory = memory.map(|path| PathBuf::from(format!("/sys/fs/cgroup/memory{path}")));
    let root = PathBuf::from("/sys/fs/cgroup");
    // Two tests may look at once.
    let thread = rustix::thread::gettid();
    let dir = memory.unwrap_or(root).join(format!("vhost-rdma-test-{}", thread.as_raw_nonzero()));
    fs::create_dir(&dir).is_ok() && fs::remove_dir(&dir).is_ok()
}

fn shown(daemon: &Daemon, network: &str) -> Value {
    let all: Value =
        serde_json::from_str(&daemon.run(&["--json", "network", "list"])).expect("JSON");
    let all = all.as_array().expect("networks");
    all.iter().find(|shown| shown["name"] == network).expect("it is there").clone()
}

/// The cgroup of a process that has to do with memory.
fn cgroup_of(pid: u32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it is there");
    let line = |what: &str| text.lines().find_map(|l| Some(l.split_once(what)?.1.to_owned()));
    line(":memory:").or_else(|| line("0::")).expect("one")
}

/// Where a cgroup is, of version 1 or 2.
fn folder(cgroup: &str) -> PathBuf {
    let memory = Path::new("/sys/fs/cgroup/memory");
    let tree = if memory.exists() { memory } else { Path::new("/sys/fs/cgroup") };
    tree.join(cgroup.trim_start_matches('/'))
}

/// Pages that each region of [`spend`] names: 256 KiB of table in the daemon.
const NAMED: usize = 32 << 10;

/// Registers regions until there is no process any more. Each names two pages again and again, so
/// that the guest pays for one list and the daemon for a table of each. All that a guest may have
/// in tables, 32 MiB and a 64th of its memory, is more than [`MAX`]; so is what it may register,
/// sixteen times its memory.
fn spend(node: &Node) {
    let ram = node.guest.ram();
    let page = ram.alloc_scattered(2);
    let named: Vec<u64> = page.gpas().iter().copied().cycle().take(NAMED).collect();
    let list = PageList::tree(ram, &named, 0, 12, 2);
    let len = NAMED as u64 * PAGE;
    for made in 0.. {
        if let Err(error) = node.ctx.mr_reg(node.pdn, access::LOCAL_WRITE, (0, len), &list) {
            println!("{made} regions were made");
            assert_eq!(error.status(), Some(err::FATAL), "{error} after {made}");
            return;
        }
    }
}

#[test]
fn a_process_that_takes_too_much_memory_ends_alone() {
    if !can_look("cgroup", may_make_cgroups()) {
        return;
    }
    let world = world();
    // Most are as much as the host has unless they are said.
    let generous =
        [["--max-kept-bytes", "4G"], ["--max-guest-bytes", "4G"], ["--max-mr-bytes", "64G"]];
    let generous = [&SOFT[..], generous.as_flattened()].concat();
    // No page of it is there before it is touched.
    let ram_bytes = 2 << 30;
    let config = GuestConfig { ram_bytes, ..GuestConfig::default() };
    let villain = world.node_with("net", &generous, config);
    let victim = node(&world, "net");
    let (c, d) = (node(&world, "red"), node(&world, "red"));
    writes(&mut pair(&villain, &victim), 1);
    let before = shown(&world.daemon, "net");
    let now = before["memory_bytes"].as_u64().expect("a number");
    println!("{now} bytes to begin with");
    assert!((1 << 18..MAX).contains(&now), "{before}");
    assert_eq!((&before["memory_max"], &before["memory_kills"]), (&MAX.into(), &0.into()));
    let own = processes(&world.daemon);
    let (net, red) = (cgroup_of(own["net"]), cgroup_of(own["red"]));
    assert!(net.ends_with("net") && red.ends_with("red"), "{net} {red}");
    let (longest, _) = under_traffic(&mut pair(&c, &d), |_| spend(&villain));
    println!("longest write of the neighbour: {longest:?}");
    eventually("the killer is not seen", || shown(&world.daemon, "net")["memory_kills"] != 0);
    assert_eq!(shown(&world.daemon, "red")["memory_kills"], 0);
    told_that_it_is_lost(&villain.guest);
    told_that_it_is_lost(&victim.guest);
    let (villain, victim) = (start_anew(&villain), start_anew(&victim));
    writes(&mut pair(&villain, &victim), 2);
    assert!(world.daemon.log().contains("the memory killer"), "{}", world.daemon.log());
    let metrics = world.daemon.metrics().expect("metrics");
    assert!(metrics["vhost_rdma_process_memory_kills_total{network=\"net\"}"] > 0.5);
    assert!(metrics["vhost_rdma_process_memory_max_bytes{network=\"red\"}"] > 1.0);
    let new = processes(&world.daemon);
    assert_eq!((cgroup_of(new["net"]), new["red"]), (net.clone(), own["red"]));
    // Those of networks that end, and of a daemon that ends, are gone.
    let (net, red) = (folder(&net), folder(&red));
    for node in [&c, &d] {
        node.guest.disconnect();
        world.daemon.run(&["nic", "rm", &node.name]);
    }
    eventually("the cgroup of a network that is gone is there", || !red.exists());
    drop((villain, victim, world));
    eventually("the cgroup of a daemon that has ended is there", || !net.exists());
}

#[test]
fn what_a_killed_daemon_left_is_removed_or_taken_up() {
    if !can_look("cgroup", may_make_cgroups()) {
        return;
    }
    let args = ["--network-memory-max", "1G"].map(str::to_owned).to_vec();
    let options = DaemonOptions { processes: true, kept: true, args, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(120));
    world.daemon.add_network("red", 200);
    let a = node(&world, "net");
    let own = processes(&world.daemon);
    let cgroup = cgroup_of(own["net"]);
    let dir = folder(&cgroup);
    let left = dir.with_file_name(dir.file_name().unwrap().to_str().unwrap().replace("net", "red"));
    fs::create_dir(&left).expect("what a network that has no NIC any more would have left");
    super::replace_supervisor(&world.daemon);
    told_that_it_is_lost(&a.guest);
    let a = start_anew(&a);
    writes(&mut pair(&a, &a), 1);
    assert_eq!(cgroup_of(processes(&world.daemon)["net"]), cgroup);
    assert!(!left.exists(), "it is left");
    drop((a, world));
    eventually("the cgroup of a daemon that has ended is there", || !dir.exists());
}

#[test]
fn a_cgroup_that_somebody_removed_is_made_again_with_its_limit() {
    if !can_look("cgroup", may_make_cgroups()) {
        return;
    }
    let world = world();
    let a = node(&world, "net");
    let old = processes(&world.daemon)["net"];
    let cgroup = cgroup_of(old);
    let dir = folder(&cgroup);
    super::kill(old);
    // It cannot be removed before the process is gone, and the next one comes in a moment.
    eventually("the next process is too quick", || {
        let removed = fs::remove_dir(&dir).is_ok();
        if !removed && let Some(next) = processes(&world.daemon).get("net") {
            let next = rustix::process::Pid::from_raw(next.cast_signed()).expect("a process");
            // It may have gone by itself.
            let _ = rustix::process::kill_process(next, rustix::process::Signal::KILL);
        }
        removed
    });
    eventually("it does not come back", || world.daemon.show_nic(&a.name)["error"].is_null());
    told_that_it_is_lost(&a.guest);
    let a = start_anew(&a);
    writes(&mut pair(&a, &a), 1);
    assert_eq!(cgroup_of(processes(&world.daemon)["net"]), cgroup);
    assert_eq!(shown(&world.daemon, "net")["memory_max"], MAX);
}
