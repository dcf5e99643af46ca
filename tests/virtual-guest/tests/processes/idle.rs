//! A NIC whose guest does nothing: it has no thread, and is there when it is wanted.

use std::os::unix::net::UnixStream;

use virtual_guest::guest::GuestConfig;

use super::*;

#[test]
fn a_nic_whose_guest_is_idle_has_no_thread_and_is_heard_all_the_same() {
    let world = world();
    let daemon = &world.daemon;
    // The first bring what all share.
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let mut ends = pair(&a, &b);
    let settled = || {
        // Longer than a thread stays that nobody wants.
        std::thread::sleep(Duration::from_secs(2));
        daemon.threads()
    };
    let before = settled();
    let more: Vec<Node> = (0..8).map(|_| node(&world, "net")).collect();
    assert!(daemon.threads() > before, "they had something to say");
    eventually("there are threads for guests that are idle", || settled() <= before);
    // A request, a command, a message: all three come back.
    writes(&mut ends, 1);
    for node in &more {
        writes(&mut pair(node, &a), 2);
        node.guest.disconnect();
    }
    for node in &more {
        eventually("its end is not heard", || daemon.show_nic(&node.name)["session"] == "absent");
        let again = Guest::connect(&node.socket, GuestConfig::default()).expect("it gets in");
        let again = Node::start(node.name.clone(), node.socket.clone(), again, node.gid);
        writes(&mut pair(&again, &b), 3);
    }
}

#[test]
fn a_vmm_that_goes_after_another_was_refused_makes_room() {
    let world = world();
    let a = node(&world, "net");
    for round in 0..3 {
        let mut second = UnixStream::connect(&a.socket).expect("it connects");
        let refused = std::io::Read::read(&mut second, &mut [0; 1]);
        assert!(matches!(refused, Ok(0) | Err(_)), "{round}: {refused:?}");
        std::thread::sleep(Duration::from_millis(1500));
    }
    a.guest.disconnect();
    eventually("its end is not heard", || world.daemon.show_nic(&a.name)["session"] == "absent");
    let again = Guest::connect(&a.socket, GuestConfig::default()).expect("it gets in");
    let again = Node::start(a.name.clone(), a.socket.clone(), again, a.gid);
    writes(&mut pair(&again, &again), 1);
}
