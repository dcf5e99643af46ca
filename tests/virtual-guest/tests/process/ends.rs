//! Processes end in every way, and leave nothing.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use virtual_guest::guest::Guest;
use virtual_guest::process;
use virtual_guest::qp::{Av, Path, SendWr};
use virtual_guest::spec::err;
use virtual_guest::world::{Node, ipv4_gid};

use crate::scene::Scene;

const SOCKET: &str = "VHOST_RDMA_TEST_PROCESS";

/// What a child does: it writes to itself without end. A second process that is killed is the
/// subject.
#[test]
#[ignore = "run by the tests below, as a process of its own"]
fn write_without_end() {
    let socket = std::env::var_os(SOCKET).expect("the socket of a NIC");
    let node = Node::process("blue", socket.as_ref(), ipv4_gid(9, 1));
    let (mut a, b) = (node.rc(), node.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let (from, to) = (node.area(1 << 20), node.area(1 << 20));
    println!("writing");
    loop {
        a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
    }
}

fn writer(scene: &Scene) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ends::write_without_end", "--ignored", "--nocapture"])
        .env(SOCKET, scene.blue_socket())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("writing")));
    child
}

#[test]
fn a_process_that_is_killed_in_the_middle_leaves_nothing() {
    let scene = Scene::new();
    let (stays, peer) = (scene.blue(), scene.red());
    let before = scene.objects("blue");
    for round in 0..3 {
        let mut children = [writer(&scene), writer(&scene)];
        let sent = || scene.world.daemon.show_nic("blue")["counters"]["tx_bytes"].as_u64().unwrap();
        let (begin, at) = (Instant::now(), sent());
        while sent() < at + (8 << 20) {
            assert!(begin.elapsed() < Duration::from_secs(20), "no traffic");
        }
        assert_eq!(scene.objects("blue")["contexts"], 3);
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let begin = Instant::now();
        loop {
            let mut left = scene.objects("blue");
            // What the tables had to grow to is kept for as long as there is a driver.
            let kept = left["kept_bytes"].take().as_u64().unwrap();
            let mut wanted = before.clone();
            wanted["kept_bytes"].take();
            if left == wanted {
                assert!(kept < before["kept_bytes"].as_u64().unwrap() + (1 << 20), "{kept}");
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "round {round}: {left}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    // Who stayed goes on.
    let (mut a, b) = (stays.rc(), peer.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let (from, to) = (stays.area_of(&[3; 99]), peer.area(99));
    a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
    assert_eq!(to.bytes(), [3; 99]);
}

#[test]
fn nothing_grows_however_many_processes_come_and_go() {
    let scene = Scene::new();
    let daemon = &scene.world.daemon;
    let visit = || {
        let node = scene.blue();
        let _ends = (node.rc(), node.mr(4096), node.guest.process().channel().unwrap());
        node.guest.disconnect();
    };
    visit();
    scene.awaits_nothing("blue");
    let before = (daemon.open_files(), daemon.threads());
    for _ in 0..50 {
        visit();
    }
    scene.awaits_nothing("blue");
    let begin = Instant::now();
    while (daemon.open_files(), daemon.threads()) > before {
        assert!(begin.elapsed() < Duration::from_secs(20), "{before:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(scene.objects("blue")["kept_bytes"].as_u64().unwrap() < 1 << 20);
}

#[test]
fn one_process_too_many_is_told_so_and_the_others_stay() {
    let scene = Scene::with(&["--max-contexts", "2"]);
    let (one, two) = (scene.blue(), scene.blue());
    let socket = process::knock(scene.blue_socket()).unwrap();
    let request = process::request(process::op::HELLO, &[1, 0, 0, 0, 0, 0, 0, 0]);
    // It is told whether it asks or not.
    let _ = process::send(&socket, &request, &[]);
    let (status, ..) = process::ask_none(&socket).unwrap();
    assert_eq!(status, err::NOMEM);
    drop(one);
    let begin = Instant::now();
    while Guest::of_process(scene.blue_socket()).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the place is not free");
    }
    two.mr(4096);
}

#[test]
fn a_nic_that_is_removed_takes_its_sessions_along() {
    let scene = Scene::new();
    let node = scene.blue();
    let end = node.rc();
    scene.world.daemon.run(&["nic", "rm", "blue"]);
    assert!(node.ctx.create_pd().is_err());
    assert!(end.qp.query().is_err());
    assert!(Guest::of_process(scene.blue_socket()).is_err());
    assert!(!scene.blue_socket().exists());
    scene.red().mr(4096);
}

/// The network's process dies: its processes are told by their sockets, and can begin anew.
#[test]
fn when_the_networks_process_dies_its_processes_can_begin_anew() {
    let scene = Scene::new();
    let Some(pid) = scene.world.daemon.pid_of("net") else {
        // All networks are the daemon's own: there is nothing to kill.
        assert_eq!(std::env::var("VHOST_RDMA_SHAPE").as_deref(), Ok("one"));
        return;
    };
    let node = scene.blue();
    Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(node.ctx.create_pd().is_err());
    let begin = Instant::now();
    let again = loop {
        match Guest::of_process(scene.blue_socket()) {
            Ok(guest) => break guest,
            Err(error) => assert!(begin.elapsed() < Duration::from_secs(30), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    again.open().unwrap().create_pd().unwrap();
}

/// Contexts that take long to end, and end one after the other.
fn have_handles(nodes: &[Node], count: usize) {
    std::thread::scope(|scope| {
        for node in nodes {
            scope.spawn(move || {
                for _ in 0..count {
                    node.ctx.create_ah(node.pdn, &Av::to(node.gid)).expect("a handle");
                }
            });
        }
    });
}

/// An operator gives the NIC another address while processes end whose objects take long to end.
#[test]
fn addresses_that_change_meanwhile_cost_nobody_anything() {
    const PROCESSES: usize = 8;
    const HANDLES: usize = 4000;
    let scene = Scene::with(&["--max-ahs", "100000"]);
    let (stays, peer) = (scene.blue(), scene.red());
    let (mut a, b) = (stays.rc(), peer.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let (from, to) = (stays.area(4096), peer.area(4096));
    for round in 0..2 {
        let all: Vec<Node> = (0..PROCESSES).map(|_| scene.blue()).collect();
        have_handles(&all, HANDLES);
        // The first address is the one that is connected.
        let second = format!("10.0.9.{}", 100 + round);
        let set = ["nic", "set", "blue", "--address", "10.0.9.1", "--address", &second];
        std::thread::scope(|scope| {
            scope.spawn(|| scene.world.daemon.run(&set));
            std::thread::sleep(Duration::from_millis(4));
            all.iter().for_each(|node| node.guest.disconnect());
        });
        let begin = Instant::now();
        while scene.objects("blue")["ahs"] != 0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "{}", scene.objects("blue"));
            std::thread::sleep(Duration::from_millis(20));
        }
        a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
    }
}

/// The processor of whoever waits is not given away: what comes next shows at once.
fn hangs_up(node: &Node) {
    let socket = node.guest.process().socket();
    loop {
        let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
        if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready == 1) {
            return;
        }
    }
}

/// A process takes its memory back as soon as it knows that its device is gone.
#[test]
fn who_is_told_that_the_device_is_gone_is_written_to_no_more() {
    const OTHERS: usize = 8;
    const HANDLES: usize = 3000;
    for round in 0..3 {
        let scene = Scene::with(&["--max-ahs", "100000"]);
        let (victim, peer) = (scene.blue(), scene.red());
        let others: Vec<Node> = (0..OTHERS).map(|_| scene.blue()).collect();
        have_handles(&others, HANDLES);
        let (mut a, b) = (peer.rc(), victim.rc());
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        let (from, to) = (peer.area(8), victim.area(8));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for count in 1.. {
                    from.set_word(0, count);
                    a.qp.post_send(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
                    let done = a.scq.wait(Duration::from_secs(5));
                    if over.load(Ordering::Relaxed) || done.is_none_or(|cqe| cqe.status != 0) {
                        break;
                    }
                }
            });
            while to.word(0) < 100 {
                std::hint::spin_loop();
            }
            scope.spawn(|| scene.world.daemon.run(&["nic", "rm", "blue"]));
            hangs_up(&victim);
            let told = to.word(0);
            std::thread::sleep(Duration::from_millis(100));
            over.store(true, Ordering::Relaxed);
            assert_eq!(to.word(0), told, "round {round}: it was written to after it was told");
        });
    }
}
