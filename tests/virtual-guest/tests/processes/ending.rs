//! NICs that are removed while their network's process takes its time: to end, to come back, or to
//! answer.
//!
//! The kernel may need seconds for an end. Here it is held at its very end by a tracer (ptrace(2),
//! PTRACE_O_TRACEEXIT), for as long as the test likes.

use nix::sys::ptrace::{self, Options};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::*;

/// What waits for nobody may take so long.
const SOON: Duration = Duration::from_secs(3);

#[test]
fn a_process_that_takes_its_time_to_end_holds_up_nobody() {
    if !can_look("ptrace", rustix::process::geteuid().is_root()) {
        return;
    }
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "red"));
    let old = processes(&world.daemon)["red"];
    let tracee = Pid::from_raw(old.cast_signed());
    ptrace::seize(tracee, Options::PTRACE_O_TRACEEXIT).expect("it can be traced");
    b.guest.disconnect();
    let timed = |what: &str, work: &mut dyn FnMut()| {
        let begin = Instant::now();
        work();
        let took = begin.elapsed();
        println!("{what}: {took:?}");
        assert!(took < SOON * patience(), "{what} took {took:?}");
    };
    timed("the end of the NIC", &mut || drop(world.daemon.run(&["nic", "rm", &b.name])));
    let is_there = || std::fs::exists(format!("/proc/{old}")).is_ok_and(|is_there| is_there);
    assert!(is_there(), "nothing was held up");
    // A neighbour's NIC comes and goes, and so does one of the same network.
    let mut nodes = Vec::new();
    for network in ["net", "red", "red"] {
        timed("a NIC", &mut || nodes.push(node(&world, network)));
    }
    writes(&mut pair(&a, &nodes[0]), 1);
    writes(&mut pair(&nodes[1], &nodes[2]), 2);
    assert!(is_there(), "nothing was held up");
    assert_ne!(processes(&world.daemon)["red"], old);
    // It may end now, and takes nothing of its successor's along.
    waitpid(tracee, None).expect("it stands before its end");
    ptrace::detach(tracee, None).expect("it goes on");
    eventually("the old process is there", || !is_there());
    std::thread::sleep(Duration::from_millis(100));
    writes(&mut pair(&nodes[2], &nodes[1]), 3);
    replace(&world.daemon, "red");
    for node in &nodes[1..] {
        told_that_it_is_lost(&node.guest);
    }
    let (c, d) = (start_anew(&nodes[1]), start_anew(&nodes[2]));
    writes(&mut pair(&c, &d), 4);
}

/// Runs a command that must not take long.
fn soon(daemon: &Daemon, args: &[&str]) {
    let begin = Instant::now();
    daemon.run(args);
    let took = begin.elapsed();
    println!("{args:?}: {took:?}");
    assert!(took < SOON * patience(), "{args:?} took {took:?}");
}

/// Has the process of a network die, and is there when that is seen. The seventh time it is away
/// for six seconds.
fn have_away(daemon: &Daemon, network: &str) {
    let seen = || daemon.log().matches("it is started again").count();
    let before = seen();
    kill(processes(daemon)[network]);
    eventually("it is not seen", || seen() > before);
}

#[test]
fn who_waits_for_a_process_that_is_away_does_not_hold_up_the_end_of_a_nic() {
    let world = world();
    let daemon = &world.daemon;
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let c = world.vacancy_with("net", &SOFT);
    let p = daemon.add_process_nic("p", "net", &[]);
    b.guest.disconnect();
    eventually("it is not gone", || daemon.show_nic(&b.name)["session"] == "absent");
    for _ in 0..6 {
        replace(daemon, "net");
    }
    have_away(daemon, "net");
    // A VMM and a program wait to be let in.
    let _vmm = std::os::unix::net::UnixStream::connect(&b.socket).expect("it is let wait");
    let _program = virtual_guest::process::knock(&p).expect("it is let wait");
    std::thread::sleep(Duration::from_millis(100));
    // One with somebody waiting, one without, one with programs, one with a session.
    for name in [&b.name, &c.name, &"p".to_owned()] {
        soon(daemon, &["nic", "rm", name]);
    }
    eventually("it does not come back", || daemon.show_nic(&a.name)["error"].is_null());
    told_that_it_is_lost(&a.guest);
    let a = start_anew(&a);
    writes(&mut pair(&a, &a), 1);
    // It came back without them: their names are free there, too.
    let again = daemon.add_nic(&b.name, "net", &SOFT);
    let guest = Guest::connect(&again, virtual_guest::guest::GuestConfig::default());
    guest.expect("it gets in").init().expect("INIT");
    have_away(daemon, "net");
    soon(daemon, &["nic", "rm", &a.name]);
}

#[test]
fn a_process_that_answers_nothing_does_not_hold_up_the_end_of_its_last_nic() {
    let world = world();
    let daemon = &world.daemon;
    let (a, b) = (node(&world, "net"), node(&world, "red"));
    let red = processes(daemon)["red"];
    send(red, Signal::STOP);
    soon(daemon, &["nic", "rm", &b.name]);
    eventually("its process is there", || !processes(daemon).contains_key("red"));
    assert!(b.guest.query_device().is_err(), "its device is there");
    writes(&mut pair(&a, &a), 1);
    let b = node(&world, "red");
    writes(&mut pair(&b, &b), 2);
}
