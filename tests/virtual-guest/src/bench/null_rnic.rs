//! What the daemon does for a work request of a NIC on an RNIC, apart from what the RNIC and its
//! provider do.
//!
//! The NIC is backed by `rnic:null` (vhost-rdma/rnic/src/null.rs): host verbs that copy each work
//! request and complete it. The reference reads the same work requests from the same ring and
//! writes the same completions to a ring of that size, and does nothing else. Work requests are
//! written once and go round, so that the daemon always finds bursts of 32.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Effort;
use super::data::{BATCH, RING, Stream, own_cpu};
use super::report::{Better, Row, Target};
use crate::guest::{Guest, GuestConfig};
use crate::pages::Buf;
use crate::qp::{Path, QpSpec, SendWr};
use crate::spec::{CQE_SEQ, CQE_SIZE, SGE_SIZE, SQ_DATA, qps, qpt};
use crate::world::{End, Node, World};

/// The null device's only address (RFC 5737).
const ADDRESS: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];

/// Work of the daemon ÷ work of the bare loop.
const TARGET: f64 = 6.0;

/// A guest whose queue pair is connected to itself: nobody else can be reached through the null
/// device, and writes need nobody.
fn end(world: &World) -> End {
    let socket = world.daemon.add_nic("null", "net", &["--backing", "rnic:null"]);
    let guest = Guest::connect(&socket, GuestConfig::default())
        .unwrap_or_else(|e| panic!("no guest: {e}\n{}", world.daemon.log()));
    let node = Node::start("null".to_owned(), socket, guest, ADDRESS);
    let cqs = (node.cq(2 * RING), node.cq(64));
    let spec = QpSpec { sq: RING, send_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
    let end = node.end_with(&spec, cqs.0, cqs.1);
    end.qp.connect(end.address(), &Path::default()).expect("RESET to RTS");
    end
}

/// Copies the work requests of the ring and a completion for one of `batch`; seconds of processor
/// time for each.
fn bare_loop(end: &mut End, batch: u32, slice: Duration) -> f64 {
    let (ring, _, _) = end.qp.raw_sq(0);
    let (_, stride, _) = end.qp.raw_sq(1);
    let completions = Buf::contiguous(end.node.guest.ram(), u64::from(2 * RING) * CQE_SIZE as u64);
    let (mut wqe, mut cqe) = ([0; SQ_DATA + SGE_SIZE], [0; CQE_SIZE]);
    let (start, cpu, mut n, mut done) = (Instant::now(), own_cpu(), 0u32, 0u32);
    loop {
        for _ in 0..RING {
            ring.read(u64::from(n % RING) * stride, &mut wqe);
            std::hint::black_box(&wqe);
            n = n.wrapping_add(1);
            if n.is_multiple_of(batch) {
                let at = u64::from(done % (2 * RING)) * CQE_SIZE as u64;
                done = done.wrapping_add(1);
                cqe[..8].copy_from_slice(&wqe[..8]);
                completions.view().write(at, &cqe);
                completions.view().store32(at + CQE_SEQ, done, Ordering::Release);
            }
        }
        if start.elapsed() >= slice {
            return (own_cpu() - cpu) / f64::from(n);
        }
    }
}

/// The daemon's work for each write of which one in `batch` is signaled.
pub(super) fn work(name: &str, batch: u32, effort: Effort) -> Row {
    let world = super::world();
    let mut end = end(&world);
    let region = end.node.mr(4096);
    for i in 0..RING {
        let at = u64::from(i % 64) * 64;
        let mut request =
            SendWr::write(u64::from(i), &[region.sge(at, 64)], region.addr(at), region.rkey);
        if i % batch != batch - 1 {
            request = request.unsignaled();
        }
        let (ring, at, _) = end.qp.raw_sq(i);
        request.encode(&ring, at);
    }
    let mut stream = Stream::new(&mut end, batch);
    stream.run(&mut end, &world, effort.slice / 4);
    let samples: Vec<_> = (0..effort.samples)
        .map(|_| {
            let reference = bare_loop(&mut end, batch, effort.slice) * 1e9;
            (stream.run(&mut end, &world, effort.slice) * 1e9, reference)
        })
        .collect();
    assert_eq!(end.qp.state().expect("QP_QUERY"), qps::RTS, "the queue pair failed");
    debug_assert!(batch <= BATCH);
    Row::best(name, "ns/WR", Better::Less, Some(Target::Ratio(TARGET)), &samples)
}
