//! NICs that go on in another process: their guests cannot tell. The reference model does the same
//! at random steps ([`super::reference`]).

use proptest::prelude::*;
use virtio_rdma_abi::{self as abi, opcode, qpt, send_flags, wc_status};

use super::datagram::{datagram, handle, ready};
use crate::nic::saved::{open, seal};
use crate::shard::testing::driver::{Guest, Lcg, World, av, wqe};
use crate::shard::{Command, SavedNic, Shard};

/// A message that takes many rounds.
const LONG: u32 = 3 << 20;

fn world() -> (World, Guest, Guest) {
    let mut world = World::new();
    let (a, b) = (world.guest(1, 1), world.guest(1, 2));
    (world, a, b)
}

#[test]
fn a_message_goes_on_with_its_next_piece() {
    for code in [opcode::RDMA_WRITE, opcode::RDMA_READ, opcode::SEND] {
        let (mut world, mut a, mut b) = world();
        let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        let (from, bytes) = if code == opcode::RDMA_READ {
            let (at, bytes) = b.pattern(LONG as usize, 9);
            (a.alloc(LONG.into()), (at, bytes))
        } else {
            let (at, bytes) = a.pattern(LONG as usize, 9);
            (at, (b.alloc(LONG.into()), bytes))
        };
        let (remote, bytes) = bytes;
        let request = abi::SqWqe {
            remote_addr: remote.into(),
            rkey: b.key.into(),
            ..wqe(code, send_flags::SIGNALED, 77)
        };
        if code == opcode::SEND {
            b.post_receive(&mut qb, 5, &[b.sge(remote, LONG)]);
        }
        a.post_send(&mut qa, request, &[a.sge(from, LONG)]);
        let mut handed = 0;
        let statuses = loop {
            world.shard.poll(world.now);
            let statuses = a.statuses(&mut qa.cq);
            if !statuses.is_empty() {
                break statuses;
            }
            world.hand_over(&mut [&mut a, &mut b]);
            handed += 1;
            assert!(handed < 1000, "it never ends");
        };
        assert!(handed > 2, "it was over at once");
        assert_eq!(statuses, [(77, wc_status::SUCCESS)]);
        let (reader, at) = if code == opcode::RDMA_READ { (&a, from) } else { (&b, remote) };
        assert!(reader.read(at, bytes.len()) == bytes, "opcode {code}");
        if code == opcode::SEND {
            assert_eq!(b.statuses(&mut qb.cq), [(5, wc_status::SUCCESS)]);
        }
    }
}

#[test]
fn what_was_posted_and_not_seen_is_found() {
    let (mut world, mut a, mut b) = world();
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    world.settle();
    let (from, bytes) = a.pattern(100, 1);
    let to = b.alloc(100);
    b.post_receive(&mut qb, 1, &[b.sge(to, 100)]);
    a.post_send(&mut qa, wqe(opcode::SEND, send_flags::SIGNALED, 2), &[a.sge(from, 100)]);
    world.hand_over(&mut [&mut a, &mut b]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(2, wc_status::SUCCESS)]);
    assert_eq!(b.read(to, 100), bytes);
}

/// An event that waits for a buffer, one that waits for company, and an arm that nothing has
/// answered yet.
#[test]
fn events_and_arms_are_not_lost() {
    let (mut world, mut a, mut b) = world();
    let (mut qa, _) = world.pair(&mut a, &mut b, qpt::RC);
    let (at, _) = a.pattern(8, 1);
    let to = b.alloc(8);
    let request = abi::SqWqe {
        remote_addr: to.into(),
        rkey: b.key.into(),
        ..wqe(opcode::RDMA_WRITE, send_flags::SIGNALED, 1)
    };
    a.events.lock().unwrap().buffers = 0;
    a.arm(&qa.cq, abi::arm::ANY);
    a.post_send(&mut qa, request, &[a.sge(at, 8)]);
    world.settle();
    world.hand_over(&mut [&mut a, &mut b]);
    world.settle();
    assert!(a.completion_events().is_empty());
    a.events.lock().unwrap().buffers = 10;
    world.shard.events_wanted(a.nic);
    world.settle();
    assert_eq!(a.completion_events().len(), 1, "it waited for a buffer");

    let moderate = Command::CqModerate { cqn: qa.cq.cqn, count: 9, period_us: 500 };
    world.ok(&a, a.ctx, moderate);
    a.arm(&qa.cq, abi::arm::ANY);
    a.post_send(&mut qa, request, &[a.sge(at, 8)]);
    world.settle();
    world.hand_over(&mut [&mut a, &mut b]);
    world.settle();
    assert!(a.completion_events().is_empty(), "it waits for company");
    world.advance(600_000);
    assert_eq!(a.completion_events().len(), 1, "but not for long");

    world.ok(&a, a.ctx, Command::CqModerate { cqn: qa.cq.cqn, count: 0, period_us: 0 });
    a.arm(&qa.cq, abi::arm::ANY);
    world.hand_over(&mut [&mut a, &mut b]);
    a.post_send(&mut qa, request, &[a.sge(at, 8)]);
    world.settle();
    assert_eq!(a.completion_events().len(), 1);
}

#[test]
fn datagrams_find_their_groups_and_handles() {
    let (mut world, mut a, mut b) = world();
    let group = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
    let (mut qa, mut qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    world.ok(&b, b.ctx, Command::McastAttach { qpn: qb.qpn, mgid: group });
    let to = b.alloc(4096);
    let (from, bytes) = a.pattern(64, 3);
    for (dgid, qpn) in [(b.gid, qb.qpn), (group, crate::link::MULTICAST_QPN)] {
        let ah = handle(&mut world, &a, dgid);
        b.write(to, &[0; 200]);
        b.post_receive(&mut qb, 4, &[b.sge(to, 200)]);
        world.settle();
        world.hand_over(&mut [&mut a, &mut b]);
        a.post_send(&mut qa, datagram(ah, qpn, 0x1111), &[a.sge(from, 64)]);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::SUCCESS)]);
        assert_eq!(b.statuses(&mut qb.cq), [(4, wc_status::SUCCESS)], "to {dgid:?}");
        assert_eq!(b.read(to + 40, 64), bytes);
    }
}

/// Numbers that rest go on resting, and an address or a QPN has one holder.
#[test]
fn nothing_is_given_twice() {
    let (mut world, mut a, mut b) = world();
    let (qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    world.ok(&a, a.ctx, Command::QpDestroy(qa.qpn));
    let resting = world.shard.resting();
    assert_eq!(resting, [qa.qpn]);
    world.hand_over(&mut [&mut a, &mut b]);
    assert_eq!(world.shard.resting(), resting);

    // The same state twice on one shard: the second has nothing of the first's.
    let saved = world.shard.save(b.nic).unwrap();
    let again = open::<SavedNic>(&seal(&saved).unwrap()).unwrap();
    let mut other = Shard::new(Box::new(Lcg(1)));
    let mut nics = [saved, again].into_iter().map(|saved| {
        let nic =
            other.add_nic(world.shard.settings(b.nic).unwrap(), Box::new(crate::nic::Nowhere));
        (nic, other.load(nic, saved, b.space.clone()))
    });
    let (first, loaded) = nics.next().unwrap();
    loaded.unwrap();
    let (second, refused) = nics.next().unwrap();
    assert!(refused.is_err(), "the QPN is the first one's");
    drop(nics);
    assert_eq!(other.status(first).unwrap().gids, [b.gid]);
    assert!(other.status(second).unwrap().gids.is_empty());
    for _ in 0..5000 {
        other.poll(1);
    }
    assert!(other.resting().is_empty(), "what was never its own is not given back");
}

/// A guest with one of everything.
fn furnished() -> (World, Guest, Guest) {
    let (mut world, mut a, mut b) = world();
    let (mut qa, _) = world.pair(&mut a, &mut b, qpt::RC);
    let (_, mut qu) = world.pair(&mut b, &mut a, qpt::UC);
    a.post_receive(&mut qu, 1, &[a.sge(0, 64)]);
    world.ok(&a, a.ctx, Command::MwAlloc { pdn: a.pd, kind: abi::mw_type::TYPE2 });
    world.ok(&a, a.ctx, Command::AhCreate { pdn: a.pd, av: av(b.gid) });
    a.events.lock().unwrap().buffers = 0;
    a.arm(&qa.cq, abi::arm::ANY);
    a.post_send(&mut qa, wqe(opcode::SEND, send_flags::SIGNALED, 1), &[a.sge(0, 64)]);
    world.settle();
    (world, a, b)
}

/// What the version stands for: who changes these bytes changes that, too, and says what a reader
/// does with the old ones.
#[test]
fn the_bytes_of_a_version_do_not_change() {
    let (mut world, a, _b) = furnished();
    let bytes = seal(&world.shard.save(a.nic).unwrap()).unwrap();
    assert_eq!((bytes.len(), crc32fast::hash(&bytes)), (928, 3_569_631_572), "see `nic::saved`");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// State comes from a process that guests talk to: whatever it says, reading it and going on
    /// with it end.
    #[test]
    fn bent_state_harms_nobody(
        bends in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (mut world, a, _b) = furnished();
        let bytes = seal(&world.shard.save(a.nic).unwrap()).unwrap();
        let mut body = bytes[24..].to_vec();
        for (at, byte) in bends {
            let at = at.index(body.len());
            body[at] = byte;
        }
        let mut shard = Shard::new(Box::new(Lcg(1)));
        let nowhere = Box::new(crate::nic::Nowhere);
        let nic = shard.add_nic(world.shard.settings(a.nic).unwrap(), nowhere);
        if let Ok(saved) = postcard::from_bytes::<SavedNic>(&body) {
            let loaded = shard.load(nic, saved, a.space);
            if loaded.is_ok() {
                shard.go_on_with(&[nic]);
            }
        }
        for now in 1..200 {
            shard.poll(now * 1_000_000);
        }
        shard.reset(nic);
        drop(shard.take_deferred_drops(nic));
        shard.remove_nic(nic);
    }
}
