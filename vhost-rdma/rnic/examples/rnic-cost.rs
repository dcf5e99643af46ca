//! What a work request of a NIC on an RNIC costs the daemon, without a guest, a thread or an RNIC:
//! for counting instructions, as `request-cost` of the engine does.
//!
//! The RNIC is [`Null`], which copies work requests and completes them. docs/PERFORMANCE.md says
//! how it is used, and what came out.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "it ends where something is wrong")]

use std::sync::Arc;

use vhost_rdma_engine::shard::Shard;
use vhost_rdma_engine::shard::testing::driver::{Guest, SQ_STRIDE, World, wqe};
use vhost_rdma_rnic::{
    Directory, Faults, HostError, HostGid, HostVerbs, Null, Opener, Place, Rnic,
};
use virtio_rdma_abi::{self as abi, opcode, qpt, send_flags};
use zerocopy::IntoBytes as _;
use zerocopy::little_endian::U16;

/// Entries of the send ring.
const ENTRIES: u32 = 128;

fn guest(world: &mut World) -> Guest {
    let faults = Faults::default();
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
    faults.set_gids(vec![HostGid { index: 1, gid }]);
    let opener: Opener = Arc::new(move || {
        let opened = Null::new(faults.clone()).map_err(|_| HostError(libc::EMFILE))?;
        Ok(Box::new(opened) as Box<dyn HostVerbs>)
    });
    world.guest_with(1, 1, |shard, settings, port| {
        let host = opener().expect("null host verbs");
        let (directory, wake) = (Arc::<Directory>::default(), Arc::new(|| {}));
        let place = Place { device: "null".to_owned(), through: None, directory, opener, wake };
        shard.add_provided(Box::new(Rnic::nic(place, settings, host, port)))
    })
}

/// Rounds until nothing is left to do.
#[inline(never)]
fn measured(shard: &mut Shard, now: &mut u64) {
    while shard.poll(*now) {
        *now += 1000;
    }
}

/// `rnic-cost BATCH REQUESTS`: one of BATCH is signaled.
fn main() {
    let mut arguments = std::env::args().skip(1).map(|n| n.parse::<u32>().expect("a number"));
    let (batch, requests) = (arguments.next().unwrap_or(32), arguments.next().unwrap_or(1 << 20));
    assert!(batch > 0 && ENTRIES.is_multiple_of(batch), "a power of two, {ENTRIES} at most");
    let mut world = World::new();
    let mut guest = guest(&mut world);
    let mut qp = world.qp(&mut guest, qpt::RC, ENTRIES, None);
    world.connect(&guest, &qp, qpt::RC, (qp.qpn, guest.gid));
    for index in 0..ENTRIES {
        let flags = if index % batch == batch - 1 { send_flags::SIGNALED } else { 0 };
        let mut request = wqe(opcode::RDMA_WRITE, flags, index.into());
        request.num_sge = U16::new(1);
        let at = qp.send_ring() + (u64::from(index) << SQ_STRIDE);
        guest.write(at, request.as_bytes());
        guest.write(at + abi::SQ_WQE_DATA as u64, guest.sge(0, 64).as_bytes());
    }
    let (mut done, mut completed) = (0, 0);
    while done < requests {
        done += ENTRIES;
        guest.raw_doorbell(&qp, done);
        measured(&mut world.shard, &mut world.now);
        completed += guest.drain(&mut qp.cq).len();
    }
    assert_eq!(completed, (done / batch) as usize, "of {done} requests");
    println!("{done} requests, {completed} completions");
}
