//! A network whose last NIC is gone, and whose process takes its time to end.
//!
//! The kernel may need seconds for it. Here it is held at its very end by a tracer (ptrace(2),
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
