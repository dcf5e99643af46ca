//! A QPN is one queue pair's on the host: of any network, process, worker and life of them.

use std::collections::BTreeMap;
use std::time::Duration;

use virtual_guest::daemon::{DaemonOptions, tries};
use virtual_guest::qp::{Qp, QpSpec};
use virtual_guest::spec::qpt;
use virtual_guest::world::{Node, World};

use super::upgrade::upgrade;
use super::{node, replace, start_anew, told_that_it_is_lost};

/// So many that numbers at random would meet: those of four workers that do not know of each other
/// in nineteen runs of twenty. Fewer where a machine is emulated.
fn many() -> usize {
    usize::try_from(tries(2800)).expect("a number of queue pairs")
}

/// Whose each QPN is.
#[derive(Default)]
struct Book(BTreeMap<u32, String>);

impl Book {
    /// Has a guest make queue pairs, which have no queues: numbers are all that matters.
    fn make(&mut self, node: &Node, count: usize) -> Vec<Qp> {
        let spec = QpSpec { sq: 0, rq: 0, ..QpSpec::new(qpt::RC) };
        let cq = node.cq(16);
        let make = |_| Qp::create(&node.ctx, node.pdn, &cq, &cq, &spec).expect("QP_CREATE");
        let made: Vec<Qp> = (0..count).map(make).collect();
        for qp in &made {
            let other = self.0.insert(qp.qpn, node.name.clone());
            assert_eq!(other, None, "{:#x} of {}", qp.qpn, node.name);
        }
        made
    }

    /// A NIC has lost what it had.
    fn lost(&mut self, node: &Node) {
        self.0.retain(|_, whose| *whose != node.name);
    }
}

#[test]
fn a_queue_pairs_number_is_nobody_elses_on_the_host() {
    let args = ["--network-workers", "2"].map(str::to_owned).to_vec();
    let options =
        DaemonOptions { processes: true, installed: true, args, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(240));
    world.daemon.add_network("red", 200);
    let nodes = ["net", "net", "red", "red"].map(|network| node(&world, network));
    let (mut book, many) = (Book::default(), many());
    let made = nodes.each_ref().map(|node| book.make(node, many));
    // Other processes go on with them: once of one network, once of all, with another supervisor.
    world.daemon.run(&["network", "restart", "net"]);
    nodes.iter().for_each(|node| drop(book.make(node, 200)));
    let said = upgrade(&world.daemon);
    assert_eq!((&said["ready_before"], &said["ready"]), (&4.into(), &4.into()), "{said}");
    nodes.iter().for_each(|node| drop(book.make(node, 200)));
    for qp in made.iter().flat_map(|made| [&made[0], &made[many - 1]]) {
        qp.query().expect("it is there");
    }
    // One network's process dies; what is new there is none of what goes on in the other.
    replace(&world.daemon, "red");
    for node in &nodes[2..] {
        told_that_it_is_lost(&node.guest);
        book.lost(node);
    }
    for node in nodes[2..].iter().map(start_anew) {
        book.make(&node, many);
    }
}
