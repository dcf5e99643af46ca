//! Registrations of the host that take their time, and what happens meanwhile.

use std::sync::Arc;
use std::thread;

use vhost_rdma_engine::nic::{BlockingJob, Command, Reply, Status, Step};
use vhost_rdma_engine::shard::testing::driver::{Guest, Qp};
use vhost_rdma_memory::PageList;
use virtio_rdma_abi::{self as abi, qps, send_flags};
use zerocopy::little_endian::{U32, U64};

use super::{Bench, send};
use crate::{Call, Faults, HostObjects};

fn pages(guest: &Guest, npages: u32) -> Command {
    let list = PageList { npages, page_shift: 12, ..PageList::default() };
    let map = Arc::new(list.resolve(&guest.space, u64::from(npages) << 12).unwrap());
    Command::MrReg { pdn: guest.pd, access: 1, iova: 0x1000, map }
}

/// Has a guest's registration begin, on a thread of its own; the shard is free again.
fn begin(bench: &mut Bench, guest: &Guest, faults: &Faults) -> thread::JoinHandle<Command> {
    let begun = bench.world.shard.execute(guest.nic, guest.ctx, pages(guest, 4), bench.world.now);
    let Ok(Step::Blocking(job)) = begun else { panic!("not a blocking job: {begun:?}") };
    faults.hold(true);
    let thread = thread::spawn(|| BlockingJob::run(job));
    faults.await_held(1);
    thread
}

/// Traffic of a guest.
pub(super) fn goes_on(bench: &mut Bench, guest: &mut Guest, qp: &mut Qp, wr_id: u64) {
    send(guest, qp, send_flags::SIGNALED, wr_id);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut qp.cq), [(wr_id, 0)]);
}

#[test]
fn a_registration_that_blocks_keeps_nobody_waiting() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (mut a, _) = bench.pair(&mut one);
    let (mut b, _) = bench.pair(&mut other);
    let thread = begin(&mut bench, &one, &faults);
    goes_on(&mut bench, &mut other, &mut b, 1);
    goes_on(&mut bench, &mut one, &mut a, 2);
    let (_, before) = (bench.world.ok(&other, 0, Command::QueryPort), faults.live().0);
    faults.hold(false);
    let finish = thread.join().unwrap();
    let Reply::Mr(mr) = bench.world.ok(&one, one.ctx, finish) else { panic!("not a region") };
    assert_eq!(faults.live().0.mrs, before.mrs + 1);
    // So does the end of one.
    let end = Command::MrDereg(mr.lkey.get());
    let ended = bench.world.shard.execute(one.nic, one.ctx, end, bench.world.now);
    assert!(matches!(ended, Ok(Step::Done(Reply::Done))), "{ended:?}");
    let dropped = bench.world.shard.take_deferred_drops(one.nic);
    faults.hold(true);
    let thread = thread::spawn(|| drop(dropped));
    faults.await_held(1);
    goes_on(&mut bench, &mut other, &mut b, 3);
    goes_on(&mut bench, &mut one, &mut a, 4);
    faults.hold(false);
    thread.join().unwrap();
    assert_eq!(faults.live().0, before);
}

#[test]
fn a_registration_that_comes_back_to_another_life_is_nobodys() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let thread = begin(&mut bench, &one, &faults);
    bench.world.shard.reset(one.nic);
    let dropped = bench.world.shard.take_deferred_drops(one.nic);
    faults.hold(false);
    drop(dropped);
    bench.world.start_again(&mut one);
    let finish = thread.join().unwrap();
    assert_eq!(faults.live().0.mrs, 1, "what nobody wants ended where it was found");
    assert_eq!(bench.world.execute(&one, one.ctx, finish).unwrap_err(), Status::STATE);
    assert_eq!(faults.live(), (HostObjects { pds: 1, mrs: 1, ..HostObjects::default() }, 1));
    let objects = bench.world.shard.status(one.nic).unwrap().objects;
    assert_eq!((objects.mrs, objects.mr_bytes), (1, 16 << 20));
    let (mut a, _) = bench.pair(&mut one);
    goes_on(&mut bench, &mut one, &mut a, 1);
}

#[test]
fn a_nic_may_go_while_it_registers() {
    let mut bench = Bench::new();
    let (one, faults) = bench.guest(1, 1);
    let thread = begin(&mut bench, &one, &faults);
    bench.world.shard.remove_nic(one.nic);
    let dropped = bench.world.shard.take_deferred_drops(one.nic);
    faults.hold(false);
    drop(dropped);
    let finish = thread.join().unwrap();
    assert_eq!(bench.world.execute(&one, one.ctx, finish).unwrap_err(), Status::FATAL);
    assert_eq!(faults.live(), (HostObjects::default(), 0), "its domain goes with its region");
}

#[test]
fn a_region_whose_memory_or_device_went_meanwhile_is_none() {
    let mut bench = Bench::new();
    let (one, faults) = bench.guest(1, 1);
    let thread = begin(&mut bench, &one, &faults);
    faults.hold(false);
    let finish = thread.join().unwrap();
    faults.remove_device(true);
    bench.world.advance(2_000_000);
    assert_eq!(bench.world.execute(&one, one.ctx, finish).unwrap_err(), Status::FATAL);
    // The device is closed on a thread of its own.
    while faults.live() != (HostObjects::default(), 0) {
        thread::yield_now();
    }

    let (two, faults) = bench.guest(1, 2);
    let before = faults.live().0;
    let thread = begin(&mut bench, &two, &faults);
    faults.hold(false);
    let finish = thread.join().unwrap();
    // The machine was given other memory, and this NIC's driver lost all of its own.
    let other = vhost_rdma_memory::AddressSpace::anonymous(&[(0, 1 << 20)]).unwrap();
    bench.world.shard.memory_changed(two.nic, other);
    while bench.world.shard.follow_memory(two.nic) {}
    assert!(bench.world.execute(&two, two.ctx, finish).is_err());
    assert_eq!(faults.live().0.mrs, before.mrs - 1, "the driver's first region went too");
}

#[test]
fn a_guest_that_is_paused_meanwhile_has_its_region_afterwards() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let (a, _) = bench.pair(&mut one);
    let thread = begin(&mut bench, &one, &faults);
    bench.world.shard.pause(one.nic);
    faults.hold(false);
    let finish = thread.join().unwrap();
    let Reply::Mr(mr) = bench.world.ok(&one, one.ctx, finish) else { panic!("not a region") };
    bench.world.shard.resume(one.nic);
    bench.world.ok(&one, one.ctx, Command::MrDereg(mr.lkey.get()));
    assert_eq!(bench.world.query(&one, &a).qp_state, qps::ERR, "as pauses end connections");
}

#[test]
fn a_region_that_is_registered_anew_ends_when_the_other_is_there() {
    let mut bench = Bench::new();
    let (mut guest, faults) = bench.guest(1, 1);
    let (at, pdn) = (guest.alloc(8192), guest.pd);
    let list = PageList { addr: at, npages: 2, page_shift: 12, ..PageList::default() };
    let map = Arc::new(list.resolve(&guest.space, 8192).unwrap());
    let ctx = guest.ctx;
    let Reply::Mr(first) =
        bench.world.ok(&guest, ctx, Command::MrReg { pdn, access: 7, iova: at, map: map.clone() })
    else {
        panic!("a region")
    };
    let bytes = bench.world.shard.status(guest.nic).unwrap().objects.mr_bytes;
    let mrs = faults.live().0.mrs;
    let rereg = |key: U32, flags, access| abi::MrReregReq {
        lkey: key,
        flags: U32::new(flags),
        pdn: U32::new(pdn),
        access: U32::new(access),
        iova: U64::new(at),
        ..abi::MrReregReq::default()
    };
    let rights = rereg(first.lkey, abi::rereg::ACCESS, 1);
    faults.refuse(Call::Register, libc::ENOMEM);
    let command = |req, map| Command::MrRereg { req, map };
    let refused = bench.world.execute(&guest, ctx, command(rights, None));
    assert_eq!(refused.unwrap_err(), Status::NOMEM);
    faults.refuse(Call::Register, 0);
    let Reply::Mr(second) = bench.world.ok(&guest, ctx, command(rights, None)) else {
        panic!("a region")
    };
    assert_ne!(first.lkey, second.lkey);
    assert_eq!(faults.live().0.mrs, mrs, "one came, one went");
    assert_eq!(bench.world.shard.status(guest.nic).unwrap().objects.mr_bytes, bytes);
    for (req, map, status) in [
        (rereg(first.lkey, abi::rereg::ACCESS, 1), None, Status::NOENT),
        (rereg(second.lkey, 0, 1), None, Status::INVAL),
        (rereg(second.lkey, 8, 1), None, Status::INVAL),
        (rereg(second.lkey, abi::rereg::TRANSLATION, 1), None, Status::INVAL),
        (rereg(second.lkey, abi::rereg::ACCESS, 2), None, Status::INVAL),
        (
            abi::MrReregReq { pdn: U32::new(99), ..rereg(second.lkey, abi::rereg::PD, 1) },
            None,
            Status::NOENT,
        ),
    ] {
        let refused = bench.world.execute(&guest, ctx, command(req, map));
        assert_eq!(refused.unwrap_err(), status);
    }
    let moved = rereg(second.lkey, abi::rereg::TRANSLATION | abi::rereg::PD, 0);
    let Reply::Mr(third) = bench.world.ok(&guest, ctx, command(moved, Some(map))) else {
        panic!("a region")
    };
    bench.world.ok(&guest, ctx, Command::MrDereg(third.lkey.get()));
    assert_eq!(faults.live().0.mrs, mrs - 1);
}
