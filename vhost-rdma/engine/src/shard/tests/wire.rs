//! A peer that is no NIC of this process speaks to queue pairs here, and they to it, by nothing but
//! what the trait of links has: no parcel crosses and no other shard is asked.

use virtio_rdma_abi::{self as abi, opcode, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::datagram::ready;
use super::mirror::{self, AT, SECOND};
use crate::link::{MULTICAST_QPN, Nak, Operation, Outcome, Service};
use crate::shard::Command;
use crate::shard::testing::air::Air;
use crate::shard::testing::driver::{Guest, Qp, World, wqe};
use crate::shard::testing::wire::{Peer, Wanted};

const SIGNALED: u8 = send_flags::SIGNALED;

/// A queue pair here that is connected to a peer's.
struct Scene {
    world: World,
    a: Guest,
    qa: Qp,
    peer: Peer,
}

fn scene() -> Scene {
    let mut world = World::beside(Air::still());
    let (mut peer, wire) = Peer::new(1, 99, 0x77);
    world.at(0).set_wire(Box::new(wire));
    let mut a = world.guest_on(0, 1, 1);
    let qa = world.qp(&mut a, qpt::RC, 16, None);
    world.connect(&a, &qa, qpt::RC, (peer.qpn, peer.gid));
    peer.to = (qa.qpn, a.gid);
    Scene { world, a, qa, peer }
}

impl Scene {
    /// Asks, and what was answered at once.
    fn ask(&mut self, wanted: Wanted<'_>) -> Vec<(Outcome, Vec<u8>)> {
        let number = self.peer.ask(wanted);
        self.answers_to(number)
    }

    fn answers_to(&mut self, number: u32) -> Vec<(Outcome, Vec<u8>)> {
        self.world.settle();
        let answers = self.peer.answers();
        assert!(answers.iter().all(|(answered, ..)| *answered == number), "{answers:?}");
        answers.into_iter().map(|(_, outcome, bytes)| (outcome, bytes)).collect()
    }
}

fn to(operation: Operation, len: u32, remote: (u64, u32)) -> Wanted<'static> {
    Wanted { len, remote, ..Wanted::of(operation) }
}

#[test]
fn it_writes_and_reads_and_sends_and_each_is_done_once() {
    let mut scene = scene();
    let (at, word, key) = (scene.a.alloc(4096), scene.a.alloc(8), scene.a.key);
    let bytes: Vec<u8> = (0..100).collect();
    let done = [(Outcome::Done, vec![])];
    let write = Wanted { bytes: &bytes, remote: (at, key), ..Wanted::of(Operation::Write) };
    assert_eq!(scene.ask(write), done);
    assert_eq!(scene.a.read(at, 100), bytes);
    assert_eq!(scene.ask(to(Operation::Read, 100, (at, key))), [(Outcome::Done, bytes.clone())]);
    // A sum is added once, however often it comes, and is found each time.
    scene.a.write(word, &40u64.to_le_bytes());
    let add = Wanted { operands: [2, 0], ..to(Operation::FetchAdd, 8, (word, key)) };
    let found = [(Outcome::Done, 40u64.to_le_bytes().to_vec())];
    let number = scene.peer.ask(add);
    assert_eq!(scene.answers_to(number), found);
    scene.peer.ask_as(number, add);
    assert_eq!(scene.answers_to(number), found);
    assert_eq!(scene.a.read(word, 8), 42u64.to_le_bytes());
    // Without a receive it is told so; then it tries the same again.
    let send = Wanted { bytes: &bytes, ..Wanted::of(Operation::Send) };
    let number = scene.peer.ask(send);
    let refused = scene.answers_to(number);
    assert!(matches!(refused[..], [(Outcome::NotReady(_), _)]), "{refused:?}");
    let sge = scene.a.sge(at + 1024, 100);
    scene.a.post_receive(&mut scene.qa, 5, &[sge]);
    scene.peer.ask_as(number, send);
    assert_eq!(scene.answers_to(number), done);
    assert_eq!((scene.a.statuses(&mut scene.qa.cq), scene.peer.asked().len()), (vec![(5, 0)], 0));
    assert_eq!(scene.a.read(at + 1024, 100), bytes);
}

#[test]
fn a_wrong_key_is_refused_and_ends_the_connection() {
    let mut scene = scene();
    let (at, key) = (scene.a.alloc(8), scene.a.key);
    let refused = [(Outcome::Refused(Nak::RemoteAccess), vec![])];
    let mut said = scene.ask(to(Operation::Read, 8, (at, key ^ 0x100)));
    said.iter_mut().for_each(|(_, bytes)| bytes.clear());
    assert_eq!(said, refused);
    let state = scene.world.query(&scene.a, &scene.qa).qp_state;
    assert_eq!(state, abi::qps::ERR);
    let left = scene.ask(to(Operation::Read, 8, (at, key)));
    assert!(matches!(left[..], [(Outcome::NoAnswer, _)]), "{left:?}");
}

/// It is answered when the owner has done its part, and meanwhile may have more under way.
#[test]
fn what_it_asks_of_mirrored_memory_waits_for_the_owner() {
    let mut scene = scene();
    let (nic, ctx) = (scene.a.nic, scene.a.ctx);
    scene.world.at(0).serve_mirrors(nic, ctx);
    let (shadow, key) = mirror::region(&mut scene.world, &mut scene.a);
    let bytes = [7; 64];
    let write = Wanted { bytes: &bytes, remote: (AT + 8, key), ..Wanted::of(Operation::Write) };
    assert_eq!(scene.ask(write), [], "the owner has not done its part");
    let jobs = scene.a.jobs();
    assert_eq!(jobs.len(), 1);
    scene.world.at(0).owner_answered(nic, ctx, &[(jobs[0].number, Some(0))]);
    assert_eq!(scene.answers_to(1), [(Outcome::Done, vec![])]);
    assert_eq!(scene.a.read(shadow + 8, 64), bytes);
    // One that is late is not asked again, whatever the peer says meanwhile.
    let number = scene.peer.ask(write);
    scene.world.settle();
    assert_eq!(scene.peer.given_back(), 1, "it may ask for more");
    scene.world.advance(SECOND);
    scene.peer.ask_as(number, write);
    assert_eq!(scene.answers_to(number), []);
    let jobs = scene.a.jobs();
    assert_eq!(jobs.len(), 1);
    scene.world.at(0).owner_answered(nic, ctx, &[(jobs[0].number, Some(0))]);
    assert_eq!(scene.answers_to(number), [(Outcome::Done, vec![])]);
    // One that is gone answers no more, and nothing else has to come for the end.
    let number = scene.peer.ask(write);
    assert_eq!(scene.answers_to(number), []);
    scene.world.ok(&scene.a, ctx, Command::ContextDestroy);
    assert!(scene.world.next_deadline().is_some());
    scene.world.advance(SECOND);
    assert_eq!(scene.peer.answers(), [(number, Outcome::NoAnswer, vec![])]);
}

/// More than are served in one go: the rest goes on in further steps.
#[test]
fn a_datagram_of_its_for_a_group_reaches_all() {
    let mut scene = scene();
    let mut group = [0; 16];
    group[..2].copy_from_slice(&[0xff, 0x0e]);
    let mut qps: Vec<Qp> = (0..20).map(|_| ready(&mut scene.world, &mut scene.a)).collect();
    let at = scene.a.alloc(4096 * 20);
    for (qp, n) in qps.iter_mut().zip(0..) {
        scene.world.ok(&scene.a, scene.a.ctx, Command::McastAttach { qpn: qp.qpn, mgid: group });
        let sge = scene.a.sge(at + 4096 * n, 4096);
        scene.a.post_receive(qp, n, &[sge]);
    }
    scene.peer.to = (MULTICAST_QPN, group);
    let send =
        Wanted { service: Service::Datagram, bytes: &[9; 32], ..Wanted::of(Operation::Send) };
    assert_eq!(scene.ask(send), [], "nobody answers a datagram");
    for (qp, n) in qps.iter_mut().zip(0..) {
        assert_eq!(scene.a.statuses(&mut qp.cq), [(n, 0)]);
        assert_eq!(scene.a.read(at + 4096 * n + 40, 32), [9; 32]);
    }
}

/// What comes at a time is taken then, though nothing else is to be done.
#[test]
fn a_shard_asks_the_wire_when_that_says_so() {
    let mut scene = scene();
    let (at, key) = (scene.a.alloc(8), scene.a.key);
    scene.peer.at = scene.world.now + SECOND;
    scene.peer.ask(Wanted { bytes: &[1; 8], remote: (at, key), ..Wanted::of(Operation::Write) });
    scene.world.advance(SECOND / 2);
    assert_eq!(scene.a.read(at, 8), [0; 8]);
    assert_eq!(scene.world.next_deadline(), Some(scene.peer.at));
    scene.world.advance(SECOND);
    assert_eq!(scene.a.read(at, 8), [1; 8]);
    assert_eq!(scene.peer.answers().len(), 1);
}

#[test]
fn it_is_asked_and_its_answer_settles_what_it_was_asked() {
    let mut scene = scene();
    let Scene { world, a, qa, peer } = &mut scene;
    let (from, bytes) = a.pattern(64, 3);
    let into = a.alloc(64);
    let remote = |code: u8, id: u64| {
        let mut request = wqe(code, SIGNALED, id);
        (request.remote_addr, request.rkey) = (U64::new(0x5000), U32::new(0x1234));
        request
    };
    a.post_send(qa, remote(opcode::RDMA_WRITE, 1), &[a.sge(from, 64)]);
    world.settle();
    let mut asked = peer.asked();
    assert_eq!((asked.len(), asked[0].flow().dest_qpn), (1, peer.qpn));
    assert_eq!((asked[0].size(), asked[0].take_bytes()), (64, bytes.clone()));
    assert!(a.statuses(&mut qa.cq).is_empty(), "it waits for the answer");
    peer.answer(asked[0].token, Outcome::Done, &[]);
    a.post_send(qa, remote(opcode::RDMA_READ, 2), &[a.sge(into, 64)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)]);
    let read = peer.asked();
    // What it says once more of the first says nothing of the second.
    peer.answer(asked[0].token, Outcome::Done, &[0xee; 64]);
    world.settle();
    assert!(a.statuses(&mut qa.cq).is_empty());
    peer.answer(read[0].token, Outcome::Done, &bytes);
    world.settle();
    assert_eq!((a.statuses(&mut qa.cq), a.read(into, 64)), (vec![(2, 0)], bytes));
    // A refusal, after which nothing leaves.
    a.post_send(qa, remote(opcode::RDMA_WRITE, 3), &[a.sge(from, 64)]);
    world.settle();
    peer.answer(peer.asked()[0].token, Outcome::Refused(Nak::RemoteAccess), &[]);
    a.post_send(qa, remote(opcode::RDMA_WRITE, 4), &[a.sge(from, 64)]);
    world.settle();
    let ended = [(3, wc_status::REM_ACCESS_ERR), (4, wc_status::WR_FLUSH_ERR)];
    assert_eq!(a.statuses(&mut qa.cq), ended);
}

/// Whoever gets no answer asks by the same number again, and gives up in the end.
#[test]
fn one_that_is_silent_is_asked_as_often_as_retries_say() {
    let mut scene = scene();
    let Scene { world, a, qa, peer } = &mut scene;
    let from = a.alloc(8);
    a.post_send(qa, wqe(opcode::RDMA_WRITE, SIGNALED, 1), &[a.sge(from, 8)]);
    world.advance(20 * SECOND);
    let numbers: Vec<_> = peer.asked().iter().map(|ask| ask.token.ticket).collect();
    assert!(
        numbers.len() == 3 && numbers.iter().all(|number| *number == numbers[0]),
        "{numbers:?}"
    );
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::RETRY_EXC_ERR)]);
}

/// What a shard of this process holds does not go over the wire, and what nobody holds does.
#[test]
fn peers_of_this_process_are_reached_as_without_it() {
    let mut scene = scene();
    let Scene { world, a, peer, .. } = &mut scene;
    let (mut b, mut c) = (world.guest_on(0, 1, 2), world.guest_on(1, 1, 3));
    for (other, id) in [(&mut b, 1), (&mut c, 2)] {
        let (mut qa, _qb) = world.pair(a, other, qpt::RC);
        let (from, bytes) = a.pattern(64, 5);
        let far = other.alloc(64);
        let mut write = wqe(opcode::RDMA_WRITE, SIGNALED, id);
        (write.remote_addr, write.rkey) = (U64::new(far), U32::new(other.key));
        a.post_send(&mut qa, write, &[a.sge(from, 64)]);
        world.settle();
        assert_eq!((a.statuses(&mut qa.cq), other.read(far, 64)), (vec![(id, 0)], bytes));
    }
    assert!(peer.asked().is_empty());
}
