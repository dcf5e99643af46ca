//! Mirrored regions: what peers may do to memory that its owner copies.

use std::sync::Arc;

use virtio_rdma_abi::{
    self as abi, access, event, mw_type, opcode, qps, qpt, rereg, send_flags, wc_status,
};
use zerocopy::little_endian::{U32, U64};

use crate::link::PIECE;
use crate::memory::PageList;
use crate::nic::budget::Looked;
use crate::shard::testing::driver::{
    Guest, Qp, World, init_attr, rtr_attr, rts_attr, state_attr, wqe,
};
use crate::shard::{Command, Job, JobKind, Reply, Status};

pub(super) const SIGNALED: u8 = send_flags::SIGNALED;
const RIGHTS: u32 = 0x1f | access::MIRRORED;
/// Where the region's memory is for its owner, and its half.
pub(super) const AT: u64 = 0x7f00_0000;
pub(super) const HALF: u64 = 512 << 10;
pub(super) const SECOND: u64 = 1_000_000_000;

/// A requester, and an owner of a mirrored region.
pub(super) struct Scene {
    pub(super) world: World,
    pub(super) a: Guest,
    pub(super) b: Guest,
    pub(super) qa: Qp,
    pub(super) qb: Qp,
    /// The shadow in the owner's shared memory.
    pub(super) shadow: u64,
    pub(super) key: u32,
}

pub(super) fn region(world: &mut World, owner: &mut Guest) -> (u64, u32) {
    let shadow = owner.alloc(2 * HALF);
    let npages = ((2 * HALF) >> 12) as u32;
    let list = PageList { addr: shadow, npages, page_shift: 12, ..PageList::default() };
    let map = Arc::new(list.resolve(&owner.space, 2 * HALF).unwrap());
    (shadow, world.register(owner, AT, map, RIGHTS).unwrap())
}

pub(super) fn scene(kind: u32) -> Scene {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (qa, qb) = world.pair(&mut a, &mut b, kind);
    world.shard.serve_mirrors(b.nic, b.ctx);
    let (shadow, key) = region(&mut world, &mut b);
    Scene { world, a, b, qa, qb, shadow, key }
}

pub(super) fn request(code: u8, key: u32, addr: u64) -> abi::SqWqe {
    let mut request = wqe(code, SIGNALED, 9);
    (request.remote_addr, request.rkey) = (U64::new(addr), U32::new(key));
    request
}

impl Scene {
    /// What the owner has been asked since the last look.
    pub(super) fn jobs(&mut self) -> Vec<Job> {
        self.world.settle();
        self.b.jobs()
    }

    pub(super) fn job(&mut self) -> Job {
        let jobs = self.jobs();
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        jobs[0]
    }

    pub(super) fn answer(&mut self, job: &Job, value: Option<u64>) {
        self.world.shard.owner_answered(self.b.nic, self.b.ctx, &[(job.number, value)]);
        self.world.settle();
    }

    pub(super) fn statuses(&mut self) -> Vec<u8> {
        self.world.settle();
        self.a.drain(&mut self.qa.cq).iter().map(|cqe| cqe.status).collect()
    }

    pub(super) fn post(&mut self, code: u8, offset: u64, local: (u64, u32)) {
        let sge = self.a.sge(local.0, local.1);
        self.a.post_send(&mut self.qa, request(code, self.key, AT + offset), &[sge]);
    }
}

#[test]
fn a_write_is_done_when_the_owner_has_it() {
    let mut s = scene(qpt::RC);
    let (from, bytes) = s.a.pattern(100, 3);
    s.post(opcode::RDMA_WRITE, 8, (from, 100));
    let job = s.job();
    let wanted = (JobKind::Arrived, s.key, AT + 8, 100);
    assert_eq!((job.kind, job.key, job.address, job.length), wanted);
    assert_eq!(s.b.read(s.shadow + 8, 100), bytes);
    assert!(s.statuses().is_empty(), "nobody has answered");
    s.answer(&job, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    assert!(s.jobs().is_empty());
}

/// Nor is what follows it, which may not come before it.
#[test]
fn an_owner_is_not_asked_for_what_finds_no_receive() {
    let mut s = scene(qpt::RC);
    let (from, _) = s.a.pattern(100, 3);
    s.post(opcode::RDMA_WRITE_WITH_IMM, 8, (from, 100));
    s.post(opcode::RDMA_WRITE, 200, (from, 100));
    assert!(s.jobs().is_empty());
    assert_eq!(s.b.read(s.shadow, 300), [0; 300]);
    s.b.post_receive(&mut s.qb, 7, &[]);
    for offset in [8, 200] {
        let job = s.job();
        assert_eq!(job.address, AT + offset);
        s.answer(&job, Some(0));
    }
    assert_eq!(s.statuses(), [wc_status::SUCCESS; 2]);
    assert!(s.jobs().is_empty(), "each once");
}

#[test]
fn a_read_gets_what_the_owner_put_there() {
    let mut s = scene(qpt::RC);
    let to = s.a.alloc(64);
    s.b.write(s.shadow + 16, &[1; 64]);
    s.post(opcode::RDMA_READ, 16, (to, 64));
    let job = s.job();
    assert_eq!((job.kind, job.address, job.length), (JobKind::Wanted, AT + 16, 64));
    s.b.write(s.shadow + HALF + 16, &[7; 64]);
    s.answer(&job, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    assert_eq!(s.a.read(to, 64), [7; 64], "what arrives is not what leaves");
}

#[test]
fn long_messages_go_piece_by_piece() {
    let mut s = scene(qpt::RC);
    let len = 300 << 10;
    let (from, bytes) = s.a.pattern(len, 5);
    let to = s.a.alloc(len as u64);
    for (code, kind, local) in
        [(opcode::RDMA_WRITE, JobKind::Arrived, from), (opcode::RDMA_READ, JobKind::Wanted, to)]
    {
        s.post(code, 0, (local, len as u32));
        let mut done = 0;
        for job in s.jobs() {
            assert_eq!((job.kind, job.address), (kind, AT + done));
            assert!(job.length <= PIECE, "{}", job.length);
            let (at, part) = (s.shadow + done, job.length as usize);
            let bytes = s.b.read(at, part);
            s.b.write(at + HALF, &bytes);
            done += u64::from(job.length);
            s.answer(&job, Some(0));
        }
        assert_eq!(done, len as u64, "all pieces are asked for at once");
        assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    }
    assert!(s.b.read(s.shadow, len) == bytes && s.a.read(to, len) == bytes);
}

/// The requester's NIC may move larger pieces when the answer comes than when it asked.
#[test]
fn a_piece_stays_what_its_owner_was_asked_about() {
    let mut s = scene(qpt::RC);
    let (from, bytes) = s.a.pattern(16 << 10, 5);
    let to = s.a.alloc(16 << 10);
    for (code, local) in [(opcode::RDMA_WRITE, from), (opcode::RDMA_READ, to)] {
        let pace = |s: &mut Scene, lasted| {
            let nic = s.world.shard.nic_mut(s.a.nic).unwrap();
            (0..5).for_each(|_| nic.backing.pace.judge(Looked { charged: 1_000, lasted }));
        };
        pace(&mut s, SECOND);
        s.post(code, 0, (local, 16 << 10));
        s.b.write(s.shadow + HALF, &bytes);
        let jobs = s.jobs();
        assert_eq!((jobs[0].address, jobs[0].length), (AT, 4096));
        let mut end = AT;
        for job in &jobs {
            assert_eq!(job.address, end);
            end += u64::from(job.length);
        }
        assert_eq!(end, AT + (16 << 10));
        for (at, job) in jobs.iter().enumerate() {
            pace(&mut s, if at % 2 == 0 { 0 } else { SECOND });
            s.answer(job, Some(0));
            assert!(s.jobs().is_empty(), "the owner is asked again");
        }
        assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    }
    assert!(s.b.read(s.shadow, 16 << 10) == bytes && s.a.read(to, 16 << 10) == bytes);
}

/// A turn ends with the first piece, and its time counts all the same.
#[test]
fn pieces_for_an_owner_grow_again() {
    let mut s = scene(qpt::RC);
    let nic = s.world.shard.nic_mut(s.a.nic).unwrap();
    (0..5).for_each(|_| nic.backing.pace.judge(Looked { charged: 1_000, lasted: SECOND }));
    let to = s.a.alloc(512 << 10);
    s.post(opcode::RDMA_READ, 0, (to, 512 << 10));
    let mut lengths = Vec::new();
    loop {
        let jobs = s.jobs();
        if jobs.is_empty() {
            break;
        }
        for job in jobs {
            lengths.push(job.length);
            s.answer(&job, Some(0));
        }
    }
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    assert_eq!(lengths[0], 4096);
    assert!(lengths.contains(&PIECE), "{lengths:?}");
}

#[test]
fn atomics_are_the_owners_and_happen_once() {
    let mut s = scene(qpt::RC);
    let to = s.a.alloc(8);
    for (code, kind) in [
        (opcode::ATOMIC_FETCH_AND_ADD, JobKind::FetchAdd),
        (opcode::ATOMIC_CMP_AND_SWP, JobKind::CompareSwap),
    ] {
        let mut wanted = request(code, s.key, AT + 8);
        (wanted.arg0, wanted.arg1) = (U64::new(3), U64::new(4));
        let sge = s.a.sge(to, 8);
        s.a.post_send(&mut s.qa, wanted, &[sge]);
        let job = s.job();
        assert_eq!((job.kind, job.address, job.operands), (kind, AT + 8, [3, 4]));
        // The owner takes its time, and is asked nothing again.
        s.world.advance(SECOND);
        assert!(s.jobs().is_empty() && s.statuses().is_empty());
        s.answer(&job, Some(41));
        assert_eq!(s.statuses(), [wc_status::SUCCESS]);
        assert_eq!(s.a.read(to, 8), 41u64.to_le_bytes());
    }
    let (word, bytes) = s.a.pattern(8, 1);
    s.post(opcode::ATOMIC_WRITE, 16, (word, 8));
    let job = s.job();
    assert_eq!((job.kind, job.address, job.length), (JobKind::Arrived, AT + 16, 8));
    s.answer(&job, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    assert_eq!(s.b.read(s.shadow + 16, 8), bytes);
}

#[test]
fn an_owner_without_the_memory_is_a_remote_error() {
    for code in [opcode::RDMA_WRITE, opcode::RDMA_READ] {
        let mut s = scene(qpt::RC);
        let at = s.a.alloc(8);
        s.post(code, 0, (at, 8));
        let job = s.job();
        s.answer(&job, None);
        assert_eq!(s.statuses(), [wc_status::REM_OP_ERR]);
        let qb = s.qb.clone();
        assert_eq!(s.world.query(&s.b, &qb).qp_state, qps::ERR);
        assert_eq!(s.b.asynchronous(), [(event::QP_ACCESS_ERR, qb.qpn)]);
    }
}

#[test]
fn an_owner_that_does_not_answer_is_silence() {
    let mut s = scene(qpt::RC);
    let from = s.a.alloc(8);
    s.post(opcode::RDMA_WRITE, 0, (from, 8));
    let job = s.job();
    // Three tries of half a second.
    s.world.advance(14 * SECOND / 10);
    assert!(s.statuses().is_empty());
    s.world.advance(2 * SECOND / 10);
    assert_eq!(s.statuses(), [wc_status::RETRY_EXC_ERR]);
    assert!(s.jobs().is_empty(), "it was asked again");
    s.answer(&job, Some(0));
    assert!(s.statuses().is_empty());
}

#[test]
fn an_unreliable_write_waits_and_is_forgotten() {
    let mut s = scene(qpt::UC);
    let from = s.a.alloc(8);
    for answered in [true, false] {
        s.post(opcode::RDMA_WRITE, 0, (from, 8));
        let job = s.job();
        if answered {
            s.answer(&job, Some(0));
        } else {
            assert!(s.statuses().is_empty());
            s.world.advance(SECOND);
        }
        assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    }
}

#[test]
fn a_peer_knows_of_one_half() {
    for (offset, len) in [(HALF - 4, 8), (HALF, 8), (2 * HALF - 8, 8)] {
        for code in [opcode::RDMA_WRITE, opcode::RDMA_READ] {
            let mut s = scene(qpt::RC);
            let at = s.a.alloc(8);
            s.post(code, offset, (at, len));
            assert_eq!(s.statuses(), [wc_status::REM_ACCESS_ERR], "{offset:#x}");
            assert!(s.jobs().is_empty());
        }
    }
}

#[test]
fn an_answer_to_an_earlier_life_of_a_queue_pair_is_none() {
    let mut s = scene(qpt::RC);
    let (to, peer) = (s.a.alloc(8), (s.qb.qpn, s.b.gid));
    s.post(opcode::RDMA_READ, 0, (to, 8));
    let old = s.job();
    let qa = s.qa.clone();
    s.world.modify(&s.a, &qa, state_attr(qps::RESET)).unwrap();
    s.a.raw_reset(&qa);
    s.qa.posted = [0; 2];
    for attr in [init_attr(qpt::RC), rtr_attr(qpt::RC, peer), rts_attr(qpt::RC)] {
        s.world.modify(&s.a, &qa, attr).unwrap();
    }
    s.post(opcode::RDMA_READ, 8, (to, 8));
    let new = s.job();
    s.answer(&old, Some(0));
    assert!(s.statuses().is_empty());
    s.answer(&new, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
}

/// The requester has left an owner that has its first job, for another that has its first.
#[test]
fn an_owner_answers_for_no_other() {
    let mut s = scene(qpt::RC);
    let mut c = s.world.guest(1, 3);
    s.world.shard.serve_mirrors(c.nic, c.ctx);
    let (_, theirs) = region(&mut s.world, &mut c);
    let qc = s.world.qp(&mut c, qpt::RC, 16, None);
    s.world.connect(&c, &qc, qpt::RC, (s.qa.qpn, s.a.gid));
    let to = s.a.alloc(8);
    s.post(opcode::RDMA_READ, 0, (to, 8));
    let left = s.job();
    let qa = s.qa.clone();
    s.world.modify(&s.a, &qa, state_attr(qps::RESET)).unwrap();
    s.a.raw_reset(&qa);
    s.qa.posted = [0; 2];
    for attr in [init_attr(qpt::RC), rtr_attr(qpt::RC, (qc.qpn, c.gid)), rts_attr(qpt::RC)] {
        s.world.modify(&s.a, &qa, attr).unwrap();
    }
    let sge = s.a.sge(to, 8);
    s.a.post_send(&mut s.qa, request(opcode::RDMA_READ, theirs, AT), &[sge]);
    s.world.settle();
    let asked = c.jobs();
    assert_eq!(asked.len(), 1);
    s.answer(&left, Some(0));
    assert!(s.statuses().is_empty(), "an owner answered for another");
    s.world.shard.owner_answered(c.nic, c.ctx, &[(asked[0].number, Some(0))]);
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
}

#[test]
fn as_many_jobs_wait_as_may() {
    let mut s = scene(qpt::RC);
    let (to, peer) = (s.a.alloc(8), (s.qb.qpn, s.b.gid));
    let mut asked = 0;
    for _ in 0..300 {
        let qa = s.qa.clone();
        s.world.modify(&s.a, &qa, state_attr(qps::RESET)).unwrap();
        s.a.raw_reset(&qa);
        s.qa.posted = [0; 2];
        for attr in [init_attr(qpt::RC), rtr_attr(qpt::RC, peer), rts_attr(qpt::RC)] {
            s.world.modify(&s.a, &qa, attr).unwrap();
        }
        s.post(opcode::RDMA_READ, 0, (to, 8));
        asked += s.jobs().len();
    }
    assert_eq!(asked, 256);
    s.world.advance(10 * SECOND);
    assert_eq!(s.statuses().last(), Some(&wc_status::RETRY_EXC_ERR));
    // A context that ends takes its jobs along, and the next has none.
    s.world.ok(&s.b, s.b.ctx, Command::ContextDestroy);
    assert!(s.jobs().is_empty());
}

#[test]
fn another_context_answers_nothing() {
    let mut s = scene(qpt::RC);
    let to = s.a.alloc(8);
    s.post(opcode::RDMA_READ, 0, (to, 8));
    let job = s.job();
    s.world.shard.owner_answered(s.b.nic, s.b.ctx + 1, &[(job.number, Some(0))]);
    assert!(s.statuses().is_empty());
    s.answer(&job, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
}

#[test]
fn a_window_names_the_region() {
    let mut s = scene(qpt::RC);
    let command = Command::MwAlloc { pdn: s.b.pd, kind: mw_type::TYPE1 };
    let Reply::Object(key) = s.world.ok(&s.b, s.b.ctx, command) else { panic!("not a window") };
    let mut bind = wqe(opcode::BIND_MW, SIGNALED, 1);
    (bind.imm, bind.rkey) = (U32::new(key), U32::new(key ^ 1));
    (bind.remote_addr, bind.arg0) = (U64::new(AT + 64), U64::new(64));
    bind.arg1 = U64::new(u64::from(s.key));
    bind.aux = U32::new(access::REMOTE_WRITE | access::ZERO_BASED);
    s.b.post_send(&mut s.qb, bind, &[]);
    s.world.settle();
    assert_eq!(s.b.statuses(&mut s.qb.cq), [(1, wc_status::SUCCESS)]);
    let from = s.a.alloc(8);
    let sge = s.a.sge(from, 8);
    s.a.post_send(&mut s.qa, request(opcode::RDMA_WRITE, key ^ 1, 16), &[sge]);
    let job = s.job();
    assert_eq!((job.key, job.address), (s.key, AT + 64 + 16));
    s.answer(&job, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
}

#[test]
fn a_port_that_is_busy_is_asked_again() {
    let mut s = scene(qpt::RC);
    s.b.events.lock().unwrap().taken = 3;
    let from = s.a.alloc(8);
    s.post(opcode::RDMA_WRITE, 0, (from, 8));
    let job = s.job();
    s.answer(&job, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
}

#[test]
fn regions_that_cannot_be() {
    let mut world = World::new();
    let mut b = world.guest(1, 2);
    let at = b.alloc(8192);
    let register = |world: &mut World, len: u64, rights| {
        let list = PageList { addr: at, npages: 2, page_shift: 12, ..PageList::default() };
        let map = Arc::new(list.resolve(&b.space, len).unwrap());
        world.register(&b, AT, map, rights)
    };
    // Nobody would do its jobs.
    assert_eq!(register(&mut world, 8192, RIGHTS).unwrap_err(), Status::INVAL);
    world.shard.serve_mirrors(b.nic, b.ctx);
    assert_eq!(register(&mut world, 8191, RIGHTS).unwrap_err(), Status::INVAL);
    let key = register(&mut world, 8192, RIGHTS).unwrap();
    let plain = register(&mut world, 8192, 0xf).unwrap();
    for (lkey, access) in [(key, 0xf), (plain, RIGHTS)] {
        let mut req = abi::MrReregReq { flags: U32::new(rereg::ACCESS), ..Default::default() };
        (req.lkey, req.access) = (U32::new(lkey), U32::new(access));
        let command = Command::MrRereg { req, map: None };
        assert_eq!(world.execute(&b, b.ctx, command).unwrap_err(), Status::INVAL);
    }
}
