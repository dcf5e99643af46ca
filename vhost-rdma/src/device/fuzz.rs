//! Fuzz targets: descriptor chains, control commands, work queue rings and saved state, from bytes.
//!
//! Each target takes a string of bytes as a guest's doing, step by step, and drives the code that
//! ships: `chain`, `ctrl` with a real shard, the engine on rings in memory, and what reads a NIC
//! that another process saved (`saved`). There is nothing to compare with: what must not happen is
//! a panic (indices, arithmetic, in a build that checks them), an endless loop, or a chain that is
//! written beyond its room. The targets run for a bounded time in `cargo test`, with strings that
//! are made at random and those of `corpus/`; `cargo xtask fuzz` runs them for as long as one
//! likes, and libFuzzer takes them by `vhost-rdma/fuzz`, guided by coverage.

mod saved;

use std::cell::RefCell;

use virtio_queue::{Queue, QueueT};
use virtio_rdma_abi::{self as abi, attr_mask as m, cmd, db, qps, qpt};
use vm_memory::{Bytes as _, GuestAddress};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::chain::{self, Taken};
use super::ctrl::{Controller, Executor, Outcome, REQUEST_MAX, Request, clear_reserved};
use super::events::NoPort;
use super::queues::QueueLayout;
use crate::link::NicId;
use crate::memory::{AddressSpace, PageList, Ring};
use crate::shard::{Command, Limits, NicSettings, Random, Shard};

/// A target, by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 4] =
    [("chains", chains), ("commands", commands), ("rings", rings), ("saved", saved::saved)];

/// Bytes of guest memory.
const RAM: u64 = 1 << 20;
/// Steps of one string at most.
const STEPS: usize = 512;

/// The guest's doing, as it is taken from the string. What is over is zeroes.
struct Doing<'a>(&'a [u8]);

impl Doing<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let (now, later) = self.0.split_at(self.0.len().min(N));
        out[..now.len()].copy_from_slice(now);
        self.0 = later;
        out
    }

    fn byte(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn steps(&self) -> usize {
        self.0.len().min(STEPS)
    }
}

/// A virtqueue of sixteen entries in two pieces of memory, all of it from the string.
pub fn chains(doing: &[u8]) {
    const ENTRIES: u16 = 16;
    const TABLES: u64 = 0x1000;
    let mut doing = Doing(doing);
    let Ok(memory) = AddressSpace::anonymous(&[(0, 0x8000), (0x8000, 0x4000)]) else { return };
    // The table of the queue, and tables to point to.
    for at in (0..0x100).chain(TABLES..TABLES + 0x200).step_by(16) {
        let [kind, flags] = doing.bytes();
        let addr = match kind % 4 {
            0 => 0x7ff0 + u64::from(kind),
            1 => TABLES + 16 * u64::from(kind),
            2 => doing.long(),
            _ => u64::from(doing.half()),
        };
        let len = if kind & 0x40 == 0 { u32::from(doing.byte()) } else { doing.word() };
        let next = if kind & 0x80 == 0 { at / 16 % 16 + 1 } else { u64::from(doing.byte()) };
        let raw = [addr, u64::from(len) | u64::from(flags & 7) << 32 | next << 48];
        for (n, word) in raw.into_iter().enumerate() {
            let _ = memory.write_obj(word, GuestAddress(at + 8 * n as u64));
        }
    }
    let Ok(mut queue) = Queue::new(1024) else { return };
    queue.set_size(ENTRIES);
    let _ = queue.try_set_desc_table_address(GuestAddress(0));
    let _ = queue.try_set_avail_ring_address(GuestAddress(0x400));
    let _ = queue.try_set_used_ring_address(GuestAddress(0x600));
    queue.set_event_idx(doing.byte() & 1 != 0);
    queue.set_ready(true);
    let mut index = 0u16;
    for _ in 0..doing.steps() {
        let [heads, how] = doing.bytes();
        let slot = GuestAddress(0x404 + 2 * u64::from(index % ENTRIES));
        let _ = memory.write_obj(u16::from(heads) % 18, slot);
        index = if how == 0xff { doing.half() } else { index.wrapping_add(1) };
        let _ = memory.write_obj(index, GuestAddress(0x402));
        let most = if how & 1 == 0 { chain::DESCRIPTORS_MAX } else { 16 };
        match chain::take(&mut queue, &memory, most) {
            Taken::Chain(chain) => {
                assert!(chain.request().bytes.len() <= REQUEST_MAX);
                let response = vec![how; chain.room()];
                assert!(chain.respond(&memory, &response) as usize <= chain.room());
                let _ = queue.add_used(&memory, chain.head, 1);
                let _ = queue.needs_notification(&memory);
            }
            Taken::Malformed(head) => drop(queue.add_used(&memory, head, 0)),
            Taken::Empty => drop(queue.enable_notification(&memory)),
            Taken::Broken => {
                index = queue.next_avail();
                let _ = memory.write_obj(index, GuestAddress(0x402));
            }
        }
    }
}

/// Numbers that repeat, and that fit into what a string can name.
struct Counting(u32);

impl Random for Counting {
    fn next_u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x100);
        self.0
    }
}

/// A NIC with a guest whose memory is all ours.
struct Machine {
    shard: RefCell<Shard>,
    nic: NicId,
    space: AddressSpace,
    ram: Ring,
    controller: RefCell<Controller>,
    now: u64,
    /// What the last answer said: numbers and keys that later requests name.
    said: [u32; 16],
    answers: usize,
}

impl Executor for Machine {
    fn space(&self) -> (AddressSpace, u64) {
        (self.space.clone(), 0)
    }

    fn execute(&self, _generation: u64, ctx: u32, command: Command) -> Outcome {
        Outcome::Done(self.shard.borrow_mut().execute(self.nic, ctx, command, self.now))
    }

    fn decide(&self, goes_on: bool) {
        match goes_on {
            true => self.shard.borrow_mut().resume(self.nic),
            false => self.shard.borrow_mut().reset(self.nic),
        }
    }
}

/// A shard with a NIC that nobody has begun to use.
fn shard(layout: &QueueLayout) -> (Shard, NicId) {
    let limits = Limits {
        max_contexts: 8,
        max_pds: 8,
        max_mrs: 64,
        max_mr_bytes: 1 << 40,
        max_cqs: 32,
        max_srqs: 8,
        max_qps: 32,
        max_ahs: 32,
    };
    let settings = NicSettings {
        number: 0,
        vni: 1,
        mac: [2; 6],
        gids: Vec::new(),
        comp_vectors: layout.comp_vectors().into(),
        kick_queues: layout.kick_queues().into(),
        limits,
    };
    let mut shard = Shard::new(Box::new(Counting(0x200)));
    let nic = shard.add_nic(settings, Box::new(NoPort));
    (shard, nic)
}

impl Machine {
    /// With a driver that has begun, an address, a process and a domain.
    fn new() -> Option<Self> {
        let layout = QueueLayout::new(4, 2)?;
        let (shard, nic) = shard(&layout);
        let space = AddressSpace::anonymous(&[(0, usize::try_from(RAM).ok()?)]).ok()?;
        let all = PageList { addr: 0, npages: 256, offset: 0, page_shift: 12, levels: 0 };
        let ram = Ring::new(all.resolve(&space, RAM).ok()?.into());
        let mut machine = Self {
            shard: RefCell::new(shard),
            nic,
            space,
            ram,
            controller: RefCell::new(Controller::new(layout.kick_base())),
            now: 1,
            said: [0; 16],
            answers: 0,
        };
        let init = abi::InitReq {
            abi_version: U32::new(abi::ABI_VERSION),
            nonce: U64::new(1),
            status_page: U64::new(0),
            ..Default::default()
        };
        machine.request(cmd::INIT, 0, &init);
        let gid = abi::GidSetReq { r#type: abi::gid_type::ROCE_V2, gid: GID, ..Default::default() };
        machine.request(cmd::GID_SET, 0, &gid);
        let page = abi::ContextCreateReq { db_page: U64::new(DOORBELLS) };
        machine.request(cmd::CONTEXT_CREATE, 0, &page);
        machine.request(cmd::PD_CREATE, 1, &());
        Some(machine)
    }

    fn raw(&mut self, request: &[u8], room: usize) {
        let answer = self.controller.borrow_mut().serve(
            self,
            Request { bytes: request, whole: true },
            room,
            1 << 40,
        );
        if let Some(answer) = answer {
            let body = answer.bytes().get(8..12).and_then(|b| b.try_into().ok());
            if let Some(body) = body {
                self.said[self.answers % 16] = u32::from_le_bytes(body);
                self.answers += 1;
            }
        }
        drop(self.shard.borrow_mut().take_deferred_drops(self.nic));
    }

    /// The first word of the answer's body.
    fn request(
        &mut self,
        opcode: u16,
        ctx: u32,
        body: &(impl IntoBytes + Immutable + ?Sized),
    ) -> u32 {
        let header =
            abi::CmdHdr { opcode: U16::new(opcode), ctx: U32::new(ctx), ..Default::default() };
        let before = self.answers;
        self.raw(&[header.as_bytes(), body.as_bytes()].concat(), 256);
        if self.answers == before { 0 } else { self.said[before % 16] }
    }

    fn poll(&mut self, ahead: u64) {
        self.now = self.now.saturating_add(ahead);
        let mut shard = self.shard.borrow_mut();
        for _ in 0..4 {
            if !shard.poll(self.now) {
                break;
            }
        }
        let _ = shard.next_deadline();
    }
}

const GID: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const DOORBELLS: u64 = 0x1000;

/// Requests of all opcodes, whose fields are small numbers, pages, what was answered before, or
/// anything.
pub fn commands(doing: &[u8]) {
    let mut doing = Doing(doing);
    let Some(mut machine) = Machine::new() else { return };
    for _ in 0..doing.steps() {
        if doing.0.is_empty() {
            return;
        }
        let [opcode, shape] = doing.bytes();
        let mut request = vec![opcode % 0x48, 0, 0, 0];
        let ctx = if shape & 0xc0 == 0xc0 { u32::from(doing.byte()) } else { 1 };
        request.extend(ctx.to_le_bytes());
        request.extend([0; 8]);
        for _ in 0..shape & 0x3f {
            let kind = doing.byte();
            let word = match kind % 8 {
                0..=2 => u32::from(kind >> 3),
                3 => machine.said[usize::from(kind >> 4)],
                4 => u32::from(kind >> 3) << 12,
                5 => 1 << (kind >> 3),
                6 => doing.word(),
                _ => u32::MAX,
            };
            request.extend(word.to_le_bytes());
        }
        // One in four says what no device knows, and is refused for it.
        if shape & 0x30 != 0x30 {
            clear_reserved(u16::from(opcode % 0x48), &mut request[16..]);
        }
        machine.raw(&request, if shape == 0xff { doing.byte().into() } else { 256 });
        machine.poll(u64::from(opcode) << 12);
    }
}

/// Queue pairs of all kinds that are connected with themselves, and a guest that writes to their
/// rings, doorbells and control blocks.
pub fn rings(doing: &[u8]) {
    const RINGS: u64 = 0x10000;
    let mut doing = Doing(doing);
    let Some(mut machine) = Machine::new() else { return };
    let Some(qpns) = connect(&mut machine, RINGS) else { return };
    for _ in 0..doing.steps() {
        if doing.0.is_empty() {
            return;
        }
        let [what, how] = doing.bytes();
        match what % 8 {
            // A work request: its slot, its fields, what it names.
            0..=2 => {
                let at = RINGS + u64::from(how) * 128 % 0x8000;
                let word = |doing: &mut Doing<'_>, machine: &Machine| match doing.byte() {
                    kind @ 0..=63 => u64::from(kind),
                    kind @ 64..=127 => u64::from(machine.said[usize::from(kind) % 16]),
                    kind @ 128..=159 => 0x8_0000 + u64::from(kind) * 8,
                    160..=191 => doing.long(),
                    192..=207 => u64::MAX,
                    kind => u64::from(machine.said[usize::from(kind) % 16]) << 32 | 64,
                };
                for n in 0..u64::from(how % 12) {
                    let value = word(&mut doing, &machine);
                    machine.ram.write(at + 8 * n, &value.to_le_bytes());
                }
                let head = u64::from(doing.half()) | u64::from(doing.byte() % 6) << 16;
                machine.ram.write(at + 8, &head.to_le_bytes());
            }
            3 => machine.ram.write(RINGS + u64::from(doing.half()), &doing.bytes::<8>()),
            4 | 5 => {
                let slot = u64::from(how) % 24;
                let index = if how < 250 { u32::from(doing.byte() % 80) } else { doing.word() };
                machine.ram.store_u32(DOORBELLS + db::INDEX as u64 + 4 * slot, index);
                machine.ram.store_u8(DOORBELLS + db::SUMMARY as u64, 1);
            }
            6 => {
                let qpn = qpns[usize::from(how) % qpns.len()];
                match how % 5 {
                    0 => drop(machine.request(cmd::QP_DESTROY, 1, &[qpn.to_le_bytes(), [0; 4]])),
                    1 => state(&mut machine, qpn, qps::RESET),
                    2 => state(&mut machine, qpn, qps::ERR),
                    3 => start(&mut machine, qpn, qpt::RC),
                    _ => {
                        let key = machine.said[usize::from(how) % 16];
                        machine.request(cmd::MR_DEREG, 1, &[key.to_le_bytes(), [0; 4]]);
                    }
                }
            }
            _ => machine.poll(u64::from(how) << 14),
        }
        machine.poll(0);
    }
    machine.request(cmd::CONTEXT_DESTROY, 1, &());
    machine.poll(1 << 40);
}

fn state(machine: &mut Machine, qpn: u32, state: u8) {
    let attr = abi::QpAttr { mask: U32::new(m::STATE), qp_state: state, ..Default::default() };
    modify(machine, qpn, attr);
}

fn modify(machine: &mut Machine, qpn: u32, attr: abi::QpAttr) {
    let req = abi::QpModifyReq { qpn: U32::new(qpn), attr, ..Default::default() };
    machine.request(cmd::QP_MODIFY, 1, &req);
}

/// RESET to RTS, towards itself.
fn start(machine: &mut Machine, qpn: u32, kind: u32) {
    let connected = matches!(kind, qpt::RC | qpt::UC);
    let access = U32::new(0x0f);
    let last = if connected { m::ACCESS_FLAGS | m::PORT } else { m::QKEY | m::PORT };
    let mut attr = abi::QpAttr {
        mask: U32::new(m::STATE | m::PKEY_INDEX | last),
        qp_state: qps::INIT,
        port_num: 1,
        qp_access_flags: access,
        ..Default::default()
    };
    modify(machine, qpn, attr);
    (attr.qp_state, attr.mask) = (qps::RTR, U32::new(m::STATE));
    if connected {
        attr.mask = U32::new(m::STATE | m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN);
        attr.ah = abi::Av { dgid: GID, port_num: 1, flags: 1, hop_limit: 64, ..Default::default() };
        (attr.path_mtu, attr.dest_qpn) = (5, U32::new(qpn));
    }
    if kind == qpt::RC {
        attr.mask = U32::new(attr.mask.get() | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER);
        (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (4, 1);
    }
    modify(machine, qpn, attr);
    (attr.qp_state, attr.mask) = (qps::RTS, U32::new(m::STATE | m::SQ_PSN));
    if kind == qpt::RC {
        let mask = m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::MAX_QP_RD_ATOMIC;
        attr.mask = U32::new(attr.mask.get() | mask);
        (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic) = (8, 1, 1, 4);
    }
    modify(machine, qpn, attr);
}

/// Pages that follow each other.
fn list(addr: u64, npages: u32) -> abi::PageList {
    abi::PageList {
        addr: U64::new(addr),
        npages: U32::new(npages),
        page_shift: 12,
        ..Default::default()
    }
}

/// A QP with rings of 16 entries, a page each, which is connected with itself.
fn queue_pair(machine: &mut Machine, kind: u32, (cqn, srqn): (u32, u32), at: u64) -> u32 {
    let mut req = abi::QpCreateReq {
        r#type: U32::new(kind),
        send_cqn: U32::new(cqn),
        recv_cqn: U32::new(cqn),
        srqn: U32::new(srqn),
        sq_entries: U32::new(16),
        max_send_wr: U32::new(16),
        max_send_sge: U16::new(4),
        max_inline: U16::new(64),
        sq_log2_stride: 7,
        sq: list(at, 1),
        ..Default::default()
    };
    if srqn == abi::NO_SRQ {
        (req.rq_entries, req.max_recv_wr) = (U32::new(16), U32::new(16));
        (req.max_recv_sge, req.rq_log2_stride) = (U16::new(4), 7);
        req.rq = list(at + 0x1000, 1);
    }
    let qpn = machine.request(cmd::QP_CREATE, 1, &req);
    start(machine, qpn, kind);
    qpn
}

/// Two QPs of each kind, one CQ, and two regions whose keys have been said.
fn connect(machine: &mut Machine, rings: u64) -> Option<Vec<u32>> {
    let cq = abi::CqCreateReq {
        entries: U32::new(64),
        ring: list(rings + 0xe000, 2),
        ..Default::default()
    };
    let cqn = machine.request(cmd::CQ_CREATE, 1, &cq);
    let mut qpns = Vec::new();
    for (n, kind) in [qpt::RC, qpt::RC, qpt::UC, qpt::UD].into_iter().enumerate() {
        let at = rings + n as u64 * 0x2000;
        qpns.push(queue_pair(machine, kind, (cqn, abi::NO_SRQ), at));
    }
    for page in [0x80u64, 0x90] {
        let req = abi::MrRegReq {
            access: U32::new(0x1f),
            iova: U64::new(page << 12),
            length: U64::new(0x8000),
            pages: list(page << 12, 8),
            ..Default::default()
        };
        machine.request(cmd::MR_REG, 1, &req);
    }
    (!qpns.is_empty()).then_some(qpns)
}

#[cfg(test)]
mod tests;
