//! ATOMIC_WRITE and FLUSH: what they do, and each right without which they do not.

use std::sync::Arc;

use virtio_rdma_abi::{
    SqWqe, access, attr_mask, event, flush, opcode, qps, qpt, send_flags, wc_opcode, wc_status,
};
use zerocopy::little_endian::{U16, U32, U64};

use crate::memory::PageList;
use crate::shard::testing::driver::{Guest, Qp, World, state_attr, wqe};

const SIZE: u64 = 4096;

/// A connected pair and, in guest b, a page that its key and QP let peers flush.
struct Setup {
    world: World,
    a: Guest,
    b: Guest,
    qa: Qp,
    page: u64,
    key: u32,
}

impl Setup {
    fn new(region: u32, qp: u32) -> Self {
        let mut world = World::new();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (qa, qb) = world.pair(&mut a, &mut b, qpt::RC);
        let page = b.alloc(SIZE);
        let list = PageList { npages: 1, page_shift: 12, addr: page, ..PageList::default() };
        let map = Arc::new(list.resolve(&b.space, SIZE).unwrap());
        let key = world.register(&b, page, map, region).unwrap();
        let mut attr = state_attr(qps::RTS);
        attr.mask = U32::new(attr.mask.get() | attr_mask::ACCESS_FLAGS);
        attr.qp_access_flags = U32::new(qp);
        world.modify(&b, &qb, attr).unwrap();
        Self { world, a, b, qa, page, key }
    }

    fn post(&mut self, mut request: SqWqe, data: &[u8]) -> (u8, u8) {
        request.rkey = U32::new(self.key);
        self.a.post_raw(&mut self.qa, request, data);
        self.world.settle();
        let done = self.a.drain(&mut self.qa.cq);
        assert_eq!(done.len(), 1);
        (done[0].opcode, done[0].status)
    }

    fn flush(&mut self, (addr, len): (u64, u64), kinds: u32) -> u8 {
        let mut request = wqe(opcode::FLUSH, send_flags::SIGNALED, 1);
        (request.remote_addr, request.arg0) = (U64::new(addr), U64::new(len));
        request.aux = U32::new(kinds);
        let (code, status) = self.post(request, &[]);
        if status == wc_status::SUCCESS {
            assert_eq!(code, wc_opcode::FLUSH);
        } else {
            assert_eq!(self.b.asynchronous().first().map(|e| e.0), Some(event::QP_ACCESS_ERR));
        }
        status
    }

    fn atomic_write(&mut self, addr: u64, word: &[u8]) -> (u8, u8) {
        let inline = send_flags::SIGNALED | send_flags::INLINE;
        let mut request = wqe(opcode::ATOMIC_WRITE, inline, 2);
        request.remote_addr = U64::new(addr);
        request.num_sge = U16::new(word.len() as u16);
        self.post(request, word)
    }
}

const WRITE: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE;
const ALL: u32 = WRITE | access::FLUSH_GLOBAL;

#[test]
fn an_atomic_write_stores_its_word() {
    let mut s = Setup::new(WRITE, WRITE);
    assert_eq!(
        s.atomic_write(s.page + 8, b"12345678"),
        (wc_opcode::ATOMIC_WRITE, wc_status::SUCCESS)
    );
    assert_eq!(s.b.read(s.page, 24), *b"\0\0\0\0\0\0\0\x0012345678\0\0\0\0\0\0\0\0");
    // From memory too, and for any inline limit of the QP.
    let (from, bytes) = s.a.pattern(8, 9);
    let mut request = wqe(opcode::ATOMIC_WRITE, send_flags::SIGNALED, 3);
    (request.remote_addr, request.rkey) = (U64::new(s.page), U32::new(s.key));
    s.a.post_send(&mut s.qa, request, &[s.a.sge(from, 8)]);
    s.world.settle();
    assert_eq!(s.a.statuses(&mut s.qa.cq), [(3, wc_status::SUCCESS)]);
    assert_eq!(s.b.read(s.page, 8), bytes);
}

#[test]
fn an_atomic_write_needs_shape_place_and_right() {
    for (region, at, word, status) in [
        (WRITE, 4, &b"12345678"[..], wc_status::REM_INV_REQ_ERR),
        (WRITE, SIZE, b"12345678", wc_status::REM_ACCESS_ERR),
        (access::LOCAL_WRITE | access::REMOTE_READ, 0, b"12345678", wc_status::REM_ACCESS_ERR),
        (WRITE, 0, b"1234567", wc_status::LOC_LEN_ERR),
    ] {
        let mut s = Setup::new(region, WRITE);
        assert_eq!(s.atomic_write(s.page + at, word).1, status);
        assert_eq!(s.b.read(s.page, 16), [0; 16]);
    }
}

#[test]
fn a_flush_covers_a_range_or_the_region() {
    let mut s = Setup::new(ALL, ALL);
    for range in [(s.page, SIZE), (s.page + SIZE - 1, 1), (s.page, 0)] {
        assert_eq!(s.flush(range, flush::GLOBAL), wc_status::SUCCESS);
    }
    // With the region as level the range is not looked at.
    assert_eq!(s.flush((0, u64::MAX), flush::GLOBAL | flush::MR), wc_status::SUCCESS);
}

#[test]
fn a_flush_needs_range_kind_and_right() {
    for (region, qp, shift, kinds) in [
        (WRITE, ALL, 0, flush::GLOBAL),
        (ALL, WRITE, 0, flush::GLOBAL),
        (ALL, ALL, 1, flush::GLOBAL),
        (ALL, ALL, 0, flush::PERSISTENT),
        (ALL, ALL, 0, flush::GLOBAL | flush::PERSISTENT),
        (ALL, ALL, 0, 0),
    ] {
        let mut s = Setup::new(region, qp);
        let range = (s.page + shift, SIZE);
        assert_eq!(s.flush(range, kinds), wc_status::REM_ACCESS_ERR, "{region:x} {qp:x} {kinds}");
    }
    let mut s = Setup::new(ALL, ALL);
    s.key ^= 1;
    assert_eq!(s.flush((s.page, 8), flush::GLOBAL | flush::MR), wc_status::REM_ACCESS_ERR);
}
