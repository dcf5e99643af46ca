//! Sockets that take as long to close as their process likes: whoever closes them waits alone.
//!
//! A process sends a descriptor of one and keeps none, so that the daemon has the last, whether or
//! not it has looked at the packet.

use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::lingering::{let_go, lingering};
use virtual_guest::process;

use crate::scene::Scene;

/// What may take some milliseconds, on a machine that does much else.
const SOON: Duration = Duration::from_secs(10);
/// Connects, and says something with such a socket before anybody has looked; false if it was not
/// quick enough.
fn knock_with_one(scene: &Scene, kept: &mut Vec<(OwnedFd, TcpStream)>) -> bool {
    let (slow, peer) = lingering();
    let Ok(socket) = process::knock(scene.blue_socket()) else { return false };
    let sent = process::send(&socket, &[1; 8], &[slow.as_fd()]);
    kept.push((socket, peer));
    let_go(slow);
    sent.is_ok()
}

/// Others of the network are served: a NIC is added, a VM connects and is heard.
#[track_caller]
fn others_are_served(scene: &Scene, nic: &str) {
    let begin = Instant::now();
    scene.world.daemon.add_process_nic(nic, "net", &[]);
    let node = scene.world.node_with("net", &[], GuestConfig::default());
    let (a, b) = (node.rc(), node.rc());
    a.connect(&b, &virtual_guest::qp::Path::default());
    let took = begin.elapsed();
    assert!(took < SOON, "{took:?}");
}

#[test]
fn who_is_turned_away_and_slow_to_close_keeps_nobody_waiting() {
    let scene = Scene::with(&["--max-contexts", "1"]);
    let there = scene.blue();
    let mut kept = Vec::new();
    let slow = (0..8).filter(|_| knock_with_one(&scene, &mut kept)).count();
    assert!(slow > 0, "nobody was quick enough");
    others_are_served(&scene, "green");
    drop(there);
    // Nor does the end of its NIC wait for it.
    let begin = Instant::now();
    scene.world.daemon.run(&["nic", "rm", "blue"]);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    others_are_served(&scene, "yellow");
}

#[test]
fn a_session_that_is_slow_to_close_ends_with_its_nic() {
    let scene = Scene::new();
    let guest = Guest::of_process(scene.blue_socket()).unwrap();
    let mut peers = Vec::new();
    for _ in 0..3 {
        let (slow, peer) = lingering();
        // No message has a descriptor like this one, and none so many.
        let _ = process::send(guest.process().socket(), &[0xff; 8], &[slow.as_fd()]);
        peers.push(peer);
        let_go(slow);
    }
    std::thread::sleep(Duration::from_millis(200));
    others_are_served(&scene, "green");
    let begin = Instant::now();
    scene.world.daemon.run(&["nic", "rm", "blue"]);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    others_are_served(&scene, "yellow");
}
