//! What a guest's memory is protected from: keys of others, keys that are dead, ranges and rights
//! that were never given (6.1, 8.3).
//!
//! Each case asks for WRITE, READ and both atomics where it makes sense. Each must end with an
//! error at the one who asked, who learns nothing; every byte of the victim's memory is as it was,
//! and the victim's own traffic goes on.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use virtual_guest::backing::rules;
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::{PAGE, access, qps, status, wr};
use virtual_guest::world::{Area, End, Node, World, pattern};

const VERBS: [u8; 4] =
    [wr::RDMA_WRITE, wr::RDMA_READ, wr::ATOMIC_FETCH_AND_ADD, wr::ATOMIC_CMP_AND_SWP];
/// What an attacker's buffer holds, before and after.
const BAIT: [u8; 8] = *b"nothing!";
const REGION: u64 = 3 * PAGE;

/// A guest with a region that holds a pattern, and with traffic of its own.
struct Victim {
    node: Node,
    region: Area,
    before: Vec<u8>,
    traffic: (End, End),
    rounds: u64,
}

impl Victim {
    fn new(world: &World, rights: u32) -> Self {
        let (node, friend) = (world.node(), world.node());
        let region = node.area_with(REGION, rights);
        region.set(&pattern(77, REGION as usize));
        let before = region.mr.view().vec(0, region.mr.view().len());
        let traffic = connected(&node, &friend);
        Self { node, region, before, traffic, rounds: 0 }
    }

    /// Nothing of its memory changed, guard bytes included, and it sends, writes and reads as
    /// before.
    #[track_caller]
    fn is_unharmed(&mut self, after: &str) {
        let view = self.region.mr.view();
        assert!(view.vec(0, view.len()) == self.before, "{after}: the memory changed");
        let (own, friend) = &mut self.traffic;
        self.rounds += 1;
        let data = pattern(self.rounds, 500);
        let (from, to, back) = (own.node.area_of(&data), friend.node.area(500), own.node.area(500));
        friend.qp.post_recv(self.rounds, &[to.sge()]);
        own.run_ok(&SendWr::send(1, &[from.sge()]));
        assert_eq!(friend.rcq.ok().wr_id, self.rounds, "{after}");
        own.run_ok(&SendWr::read(2, &[back.sge()], to.addr(0), to.rkey()));
        assert_eq!(back.bytes(), data, "{after}");
        friend.run_ok(&SendWr::write(3, &[to.sge()], from.addr(0), from.rkey()));
    }
}

fn connected(a: &Node, b: &Node) -> (End, End) {
    let (x, y) = (a.rc(), b.rc());
    x.connect(&y, &Path::default());
    y.connect(&x, &Path::default());
    (x, y)
}

/// Asks for eight bytes at `at`; it is an error of the remote key, and nothing is learnt.
#[track_caller]
fn is_refused(attacker: &mut End, verb: u8, (addr, rkey): (u64, u32), what: &str) {
    let bait = attacker.node.area_of(&BAIT);
    let mut request = SendWr::new(66, verb, &[bait.sge()]);
    (request.remote_addr, request.rkey) = (addr, rkey);
    (request.arg0, request.arg1) = (1, 2);
    let failed = attacker.run(&request);
    let refused = failed.status == status::REM_ACCESS_ERR
        || attacker.is_its_own_peer() && rules().own_error(failed.status, status::REM_ACCESS_ERR);
    assert!(refused, "{what}, opcode {verb}: {failed:?}");
    assert_eq!(attacker.qp.state().unwrap(), qps::ERR, "{what}");
    assert_eq!(bait.bytes(), BAIT, "{what}, opcode {verb}: something was learnt");
}

#[test]
fn a_key_of_another_guest_opens_nothing_over_ones_own_connections() {
    let world = World::new();
    let mut victim = Victim::new(&world, access::ALL);
    let (attacker, accomplice) = (world.node(), world.node());
    let target = (victim.region.addr(0), victim.region.rkey());
    for verb in VERBS {
        let mut own = attacker.rc();
        own.qp.connect(own.address(), &Path::default()).unwrap();
        is_refused(&mut own, verb, target, "connected to itself");
        let (mut out, _in) = connected(&attacker, &accomplice);
        is_refused(&mut out, verb, target, "connected to an accomplice");
    }
    victim.is_unharmed("keys of another guest");
}

#[test]
fn a_key_of_another_guest_is_no_local_key() {
    let world = World::new();
    let mut victim = Victim::new(&world, access::ALL);
    let (attacker, accomplice) = (world.node(), world.node());
    let loot = accomplice.area(8);
    // Out of the victim's memory by a write or a send, and into it by a read or a receive.
    for verb in [wr::RDMA_WRITE, wr::SEND, wr::RDMA_READ] {
        let (mut out, mut inn) = connected(&attacker, &accomplice);
        inn.qp.post_recv(1, &[loot.sge()]);
        let mut request = SendWr::new(66, verb, &[victim.region.part(0, 8)]);
        (request.remote_addr, request.rkey) = (loot.addr(0), loot.rkey());
        // What a read brings finds no place to go only when it is there.
        let expected =
            if verb == wr::RDMA_READ { status::LOC_PROT_ERR } else { rules().local_protection };
        assert_eq!(out.run(&request).status, expected, "opcode {verb}");
        assert_eq!(loot.bytes(), [0; 8], "opcode {verb}");
    }
    let (mut out, mut inn) = connected(&attacker, &accomplice);
    inn.qp.post_recv(1, &[victim.region.part(0, 8)]);
    assert_eq!(out.run(&SendWr::send(2, &[]).inline(&BAIT)).status, status::REM_OP_ERR);
    assert_eq!(inn.rcq.one().status, rules().bad_receive);
    victim.is_unharmed("local keys of another guest");
}

#[test]
fn a_key_is_dead_once_its_region_is() {
    let world = World::new();
    let mut victim = Victim::new(&world, access::ALL);
    let peer = world.node();
    let (old, iova) = (victim.region.rkey(), victim.region.addr(0));
    victim.node.ctx.dereg(victim.region.mr.lkey).unwrap();
    for verb in VERBS {
        let (mut a, _b) = connected(&peer, &victim.node);
        is_refused(&mut a, verb, (iova, old), "a stale key");
    }
    victim.is_unharmed("a stale key");
    // Its successor's key is another one.
    let again = victim.node.area(REGION);
    for verb in VERBS {
        let (mut a, _b) = connected(&peer, &victim.node);
        is_refused(&mut a, verb, (again.addr(0), old), "a stale key on the next region");
    }
    assert!(again.bytes().iter().all(|byte| *byte == 0));
    victim.is_unharmed("a stale key on the next region");
}

#[test]
fn a_key_ends_where_its_region_does() {
    let world = World::new();
    let mut victim = Victim::new(&world, access::ALL);
    let peer = world.node();
    let rkey = victim.region.rkey();
    let (first, len) = (victim.region.mr.iova, victim.region.mr.view().len());
    let places = [
        ("all of it below", first - 8),
        ("a page below", first - PAGE),
        ("all of it above", first + len),
        ("pages above", first + len.next_multiple_of(PAGE) + PAGE),
        ("at the end of all addresses", u64::MAX - 7),
        ("at address 0", 0),
    ];
    for (what, addr) in places {
        // Atomics where they would be aligned: a misaligned one is another error.
        let verbs = if addr % 8 == 0 { &VERBS[..] } else { &VERBS[..2] };
        for &verb in verbs {
            let (mut a, _b) = connected(&peer, &victim.node);
            is_refused(&mut a, verb, (addr, rkey), what);
        }
    }
    for straddling in [first - 1, first + len - 7] {
        for verb in [wr::RDMA_WRITE, wr::RDMA_READ] {
            let (mut a, _b) = connected(&peer, &victim.node);
            is_refused(&mut a, verb, (straddling, rkey), "across its border");
        }
    }
    victim.is_unharmed("out of range");
}

#[test]
fn a_region_is_open_to_what_it_was_given_and_to_nothing_else() {
    let world = World::new();
    let peer = world.node();
    let cases = [
        (
            access::REMOTE_READ,
            &[wr::RDMA_WRITE, wr::ATOMIC_FETCH_AND_ADD, wr::ATOMIC_CMP_AND_SWP][..],
        ),
        (access::LOCAL_WRITE, &VERBS[..]),
        (0, &VERBS[..]),
        (
            access::LOCAL_WRITE | access::REMOTE_WRITE,
            &[wr::RDMA_READ, wr::ATOMIC_FETCH_AND_ADD, wr::ATOMIC_CMP_AND_SWP][..],
        ),
        (access::LOCAL_WRITE | access::REMOTE_ATOMIC, &[wr::RDMA_WRITE, wr::RDMA_READ][..]),
    ];
    for (rights, verbs) in cases {
        let mut victim = Victim::new(&world, rights);
        let target = (victim.region.addr(0), victim.region.rkey());
        for &verb in verbs {
            let (mut a, _b) = connected(&peer, &victim.node);
            is_refused(&mut a, verb, target, &format!("a region with the rights {rights:#x}"));
        }
        victim.is_unharmed("rights that were not given");
    }
}
