//! A guest driver in a few lines: it lays rings out in anonymous memory and rings doorbells as
//! docs/virtio-rdma.md says.

use std::sync::{Arc, Mutex};

use virtio_rdma_abi as abi;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::air::{self, Air};
pub use super::attributes::{av, init_attr, rtr_attr, rts_attr, state_attr, wqe};
use super::port::TestPort;
pub use super::port::{Events, Lcg};
use crate::link::NicId;
use crate::memory::{AddressSpace, PageList, Ring, Translation};
use crate::shard::{
    Command, Job, Limits, NicSettings, NicSnapshot, Port, Reply, Shard, Status, Step,
    control_offset,
};

/// Bytes of guest memory, if a test says nothing else.
pub const RAM: usize = 16 << 20;

/// A guest and its NIC.
pub struct Guest {
    pub nic: NicId,
    /// The number of its shard.
    pub on: usize,
    pub gid: [u8; 16],
    pub events: Arc<Mutex<Events>>,
    pub space: AddressSpace,
    ram: Ring,
    whole: Arc<Translation>,
    next: u64,
    doorbells: u64,
    pub ctx: u32,
    pub pd: u32,
    pub key: u32,
    kicks: Kicks,
}

/// NICs whose guests kicked, as the worker hears of them.
type Kicks = Arc<Mutex<Vec<(usize, NicId)>>>;

/// Guests on one shard, or on two of one network.
pub struct World {
    pub shard: Shard,
    /// Another, and the way there.
    pub beside: Option<(Shard, Air)>,
    /// Whose guests are on both by turns: how many have come.
    come: Option<usize>,
    pub now: u64,
    /// Bytes of memory of the next guest.
    pub ram: usize,
    /// Shards that there have been.
    seeds: u64,
    kicks: Kicks,
}

/// A completion queue as its owner sees it.
#[derive(Clone, Copy, Debug)]
pub struct Cq {
    pub cqn: u32,
    at: u64,
    entries: u32,
    pub consumer: u32,
}

impl Cq {
    /// In the ring that it has moved to.
    pub const fn moved(self, at: u64, entries: u32) -> Self {
        Self { at, entries, ..self }
    }
}

/// A queue pair as its owner sees it.
#[derive(Clone, Debug)]
pub struct Qp {
    pub qpn: u32,
    pub cq: Cq,
    sq: u64,
    rq: u64,
    entries: u32,
    sq_db: u32,
    rq_db: u32,
    pub posted: [u32; 2],
}

impl Qp {
    /// Where its send ring is.
    pub const fn send_ring(&self) -> u64 {
        self.sq
    }
}

pub const SQ_STRIDE: u8 = 8;
pub const RQ_STRIDE: u8 = 7;

pub fn limits() -> Limits {
    Limits {
        max_contexts: 8,
        max_pds: 16,
        max_mrs: 64,
        max_mr_bytes: 64 << 20,
        max_cqs: 32,
        max_srqs: 8,
        max_qps: 32,
        max_ahs: 16,
    }
}

impl World {
    pub fn new() -> Self {
        Self::of(Shard::new(Box::new(Lcg(7))))
    }

    pub fn of(shard: Shard) -> Self {
        let kicks = Kicks::default();
        Self { shard, beside: None, come: None, now: 1, ram: RAM, seeds: 0, kicks }
    }

    /// For the chance of another shard. The shards of a process share a pool of QPNs; these do not,
    /// so no two may draw the same numbers: a NIC that moves would meet its own.
    pub(super) const fn seed(&mut self) -> u64 {
        self.seeds += 1;
        self.seeds.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// One with two shards.
    pub fn beside(air: Air) -> Self {
        let [shard, other] = air::pair([7, 8], &air);
        Self { beside: Some((other, air)), ..Self::of(shard) }
    }

    /// One whose guests are on two shards by turns, and which waits for all that is on its way.
    pub fn over(air: Air) -> Self {
        Self { come: Some(0), ..Self::beside(air) }
    }

    /// Whether it waits for what is on its way.
    pub(super) const fn is_over_a_link(&self) -> bool {
        self.come.is_some()
    }

    /// What the shard of a guest says of its NIC.
    pub fn status(&mut self, guest: &Guest) -> NicSnapshot {
        self.at(guest.on).status(guest.nic).unwrap()
    }

    /// A shard by its number.
    pub fn at(&mut self, on: usize) -> &mut Shard {
        match &mut self.beside {
            Some((other, _)) if on == 1 => other,
            _ => &mut self.shard,
        }
    }

    /// Adds a guest as [`Self::guest`] does, on the shard of this number.
    pub fn guest_on(&mut self, on: usize, vni: u32, host: u8) -> Guest {
        self.guest_at(on, vni, host, Shard::add_nic)
    }

    /// Adds a guest on network `vni` whose address ends in `host`, with a context, a PD and one
    /// region over all its memory.
    pub fn guest(&mut self, vni: u32, host: u8) -> Guest {
        self.guest_with(vni, host, Shard::add_nic)
    }

    /// The same on a NIC that `add` puts on the shard.
    pub fn guest_with(
        &mut self,
        vni: u32,
        host: u8,
        add: impl FnOnce(&mut Shard, NicSettings, Box<dyn Port>) -> NicId,
    ) -> Guest {
        let on = self.come.map_or(0, |come| come % 2);
        self.come = self.come.map(|come| come + 1);
        self.guest_at(on, vni, host, add)
    }

    fn guest_at(
        &mut self,
        on: usize,
        vni: u32,
        host: u8,
        add: impl FnOnce(&mut Shard, NicSettings, Box<dyn Port>) -> NicId,
    ) -> Guest {
        let events = Arc::new(Mutex::new(Events { buffers: 1000, ..Events::default() }));
        let settings = NicSettings {
            number: 0,
            vni,
            mac: [2, 0, 0, 0, 0, host],
            gids: Vec::new(),
            comp_vectors: 4,
            kick_queues: 2,
            limits: limits(),
        };
        let nic = add(self.at(on), settings, Box::new(TestPort(Arc::clone(&events))));
        let space = AddressSpace::anonymous(&[(0, self.ram)]).unwrap();
        let npages = (self.ram >> 12) as u32;
        let whole = PageList { npages, page_shift: 12, ..PageList::default() };
        let map = Arc::new(whole.resolve(&space, self.ram as u64).unwrap());
        let ram = Ring::new(Arc::clone(&map));
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, host]);
        let mut guest = Guest {
            nic,
            on,
            gid,
            events,
            space,
            ram,
            whole: Arc::clone(&map),
            next: 0x4000,
            doorbells: 0x1000,
            ctx: 0,
            pd: 0,
            key: 0,
            kicks: Arc::clone(&self.kicks),
        };
        self.start(&mut guest, map);
        guest
    }

    /// What a driver does on a NIC that was reset.
    pub fn start_again(&mut self, guest: &mut Guest) {
        self.start(guest, Arc::clone(&guest.whole));
    }

    fn start(&mut self, guest: &mut Guest, map: Arc<Translation>) {
        let page = |addr| Ring::page(&guest.space, addr).unwrap();
        let init = Command::Init { space: guest.space.clone(), status_page: page(0) };
        self.ok(guest, 0, init);
        let Reply::Context(context) =
            self.ok(guest, 0, Command::ContextCreate { db_page: page(0x1000) })
        else {
            panic!("not a context")
        };
        guest.ctx = context.ctx.get();
        self.ok(guest, 0, Command::GidSet { index: 1, gid: Some(guest.gid) });
        let Reply::Object(pd) = self.ok(guest, guest.ctx, Command::PdCreate) else {
            panic!("not a PD")
        };
        guest.pd = pd;
        guest.key = self.register(guest, 0, map, 0xf).unwrap();
    }

    pub fn register(
        &mut self,
        guest: &Guest,
        iova: u64,
        map: Arc<Translation>,
        access: u32,
    ) -> Result<u32, Status> {
        match self.execute(guest, guest.ctx, Command::MrReg { pdn: guest.pd, access, iova, map })? {
            Reply::Mr(mr) => Ok(mr.lkey.get()),
            other => panic!("{other:?}"),
        }
    }

    pub fn execute(&mut self, guest: &Guest, ctx: u32, command: Command) -> Result<Reply, Status> {
        let mut command = command;
        loop {
            let now = self.now;
            let shard = self.at(guest.on);
            let reply = shard.execute(guest.nic, ctx, command, now);
            drop(shard.take_deferred_drops(guest.nic));
            command = match reply? {
                Step::Blocking(job) => job.run(),
                Step::More => Command::Continue,
                Step::Done(reply) => return Ok(reply),
            };
        }
    }

    pub fn ok(&mut self, guest: &Guest, ctx: u32, command: Command) -> Reply {
        self.execute(guest, ctx, command).unwrap()
    }

    pub fn cq(&mut self, guest: &mut Guest, entries: u32) -> Cq {
        let bytes = control_offset(u64::from(entries) * 64) + 128;
        let (at, ring) = guest.ring(bytes);
        let command = Command::CqCreate { entries, vector: 1, ring };
        let Reply::Object(cqn) = self.ok(guest, guest.ctx, command) else { panic!("not a CQ") };
        Cq { cqn, at, entries, consumer: 0 }
    }

    /// Moves a CQ to a larger ring.
    pub fn resize(&mut self, guest: &mut Guest, cq: &Cq, entries: u32) -> Cq {
        let (at, ring) = guest.ring(control_offset(u64::from(entries) * 64) + 128);
        let command = Command::CqResize { cqn: cq.cqn, entries, requested: entries, ring };
        self.ok(guest, guest.ctx, command);
        Cq { at, entries, ..*cq }
    }

    pub fn qp(&mut self, guest: &mut Guest, kind: u32, entries: u32, srqn: Option<u32>) -> Qp {
        let cq = self.cq(guest, 256);
        self.qp_on(guest, (kind, entries, srqn), cq)
    }

    pub fn qp_on(&mut self, guest: &mut Guest, shape: (u32, u32, Option<u32>), cq: Cq) -> Qp {
        let (kind, entries, srqn) = shape;
        let (sq_at, sq) = guest.ring(u64::from(entries) << SQ_STRIDE);
        let (rq_at, rq) = guest.ring(u64::from(entries) << RQ_STRIDE);
        let rq_entries = if srqn.is_some() { 0 } else { entries };
        let req = abi::QpCreateReq {
            pdn: U32::new(guest.pd),
            r#type: U32::new(kind),
            send_cqn: U32::new(cq.cqn),
            recv_cqn: U32::new(cq.cqn),
            srqn: U32::new(srqn.unwrap_or(abi::NO_SRQ)),
            sq_entries: U32::new(entries),
            rq_entries: U32::new(rq_entries),
            max_send_wr: U32::new(entries),
            max_recv_wr: U32::new(rq_entries),
            max_send_sge: U16::new(4),
            max_recv_sge: U16::new(4),
            max_inline: U16::new(128),
            sq_log2_stride: SQ_STRIDE,
            rq_log2_stride: RQ_STRIDE,
            ..abi::QpCreateReq::default()
        };
        let command = Command::QpCreate {
            req: Box::new(req),
            sq: Some(sq),
            rq: srqn.is_none().then_some(rq),
        };
        let Reply::Qp(qp) = self.ok(guest, guest.ctx, command) else { panic!("not a QP") };
        let (sq_db, rq_db) = (qp.sq_db.get(), qp.rq_db.get());
        Qp { qpn: qp.qpn.get(), cq, sq: sq_at, rq: rq_at, entries, sq_db, rq_db, posted: [0; 2] }
    }

    pub fn modify(&mut self, guest: &Guest, qp: &Qp, attr: abi::QpAttr) -> Result<(), Status> {
        let command = Command::QpModify { qpn: qp.qpn, attr: Box::new(attr) };
        self.execute(guest, guest.ctx, command).map(|_| ())
    }

    pub fn query(&mut self, guest: &Guest, qp: &Qp) -> abi::QpAttr {
        match self.ok(guest, guest.ctx, Command::QpQuery(qp.qpn)) {
            Reply::QpAttr(reply) => reply.attr,
            other => panic!("{other:?}"),
        }
    }

    /// Brings a connected QP to RTS towards `peer` at `peer_gid`.
    pub fn connect(&mut self, guest: &Guest, qp: &Qp, kind: u32, peer: (u32, [u8; 16])) {
        self.modify(guest, qp, init_attr(kind)).unwrap();
        self.modify(guest, qp, rtr_attr(kind, peer)).unwrap();
        self.modify(guest, qp, rts_attr(kind)).unwrap();
    }

    /// A connected pair of QPs.
    pub fn pair(&mut self, a: &mut Guest, b: &mut Guest, kind: u32) -> (Qp, Qp) {
        let qa = self.qp(a, kind, 16, None);
        let qb = self.qp(b, kind, 16, None);
        self.connect(a, &qa, kind, (qb.qpn, b.gid));
        self.connect(b, &qb, kind, (qa.qpn, a.gid));
        (qa, qb)
    }
}

impl World {
    /// Kicks of the guests since the last look.
    pub fn kicks(&self) -> Vec<(usize, NicId)> {
        self.kicks.lock().unwrap().drain(..).collect()
    }
}

impl Guest {
    /// A way out for its events, to where they went before.
    pub fn port(&self) -> Box<dyn Port> {
        Box::new(TestPort(Arc::clone(&self.events)))
    }

    /// Another who speaks for the same guest.
    pub fn again(&self) -> Self {
        Self {
            events: Arc::clone(&self.events),
            space: self.space.clone(),
            ram: Ring::new(Arc::clone(&self.whole)),
            whole: Arc::clone(&self.whole),
            kicks: Arc::clone(&self.kicks),
            ..*self
        }
    }

    /// Goes on as context 0, with a doorbell page and a PD of its own.
    pub fn become_kernel(&mut self, world: &mut World) {
        self.doorbells = self.alloc(4096);
        let db_page = Ring::page(&self.space, self.doorbells).unwrap();
        world.ok(self, 0, Command::DbPageAdd { db_page });
        let Reply::Object(pd) = world.ok(self, 0, Command::PdCreate) else { panic!("not a PD") };
        (self.ctx, self.pd) = (0, pd);
        let Reply::Mr(mr) = world.ok(self, 0, Command::MrDma { pdn: pd, access: 1 }) else {
            panic!("not a key")
        };
        self.key = mr.lkey.get();
    }

    /// A zeroed piece of memory for a ring.
    pub fn ring(&mut self, bytes: u64) -> (u64, Ring) {
        let at = self.alloc(bytes);
        let npages = bytes.div_ceil(4096) as u32;
        let list = PageList { addr: at, npages, page_shift: 12, ..PageList::default() };
        (at, Ring::new(Arc::new(list.resolve(&self.space, bytes).unwrap())))
    }

    /// Page-aligned memory that nobody else uses.
    pub fn alloc(&mut self, bytes: u64) -> u64 {
        let at = self.next;
        self.next += bytes.next_multiple_of(4096);
        assert!(self.next <= self.whole.len(), "guest memory is used up");
        at
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.ram.write(at, bytes);
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read(at, &mut bytes);
        bytes
    }

    /// A buffer with bytes that depend on `seed`.
    pub fn pattern(&mut self, len: usize, seed: u8) -> (u64, Vec<u8>) {
        let at = self.alloc(len.max(1) as u64);
        let bytes: Vec<u8> =
            (0..len).map(|n| (n as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        self.write(at, &bytes);
        (at, bytes)
    }

    pub fn sge(&self, addr: u64, length: u32) -> abi::Sge {
        abi::Sge { addr: U64::new(addr), length: U32::new(length), lkey: U32::new(self.key) }
    }

    fn ring_doorbell(&self, number: u32, index: u32) {
        let slot = u64::from(number & 0xffff);
        self.ram.store_u32(self.doorbells + abi::db::INDEX as u64 + 4 * slot, index);
        self.ram.store_u8(self.doorbells + slot / 64, 1);
        if self.asked_to_kick() {
            self.kicks.lock().unwrap().push((self.on, self.nic));
        }
    }

    /// What NEED_KICK says.
    pub fn asked_to_kick(&self) -> bool {
        self.ram.load_u32(abi::status_page::NEED_KICK as u64) != 0
    }

    /// Posts a send with elements, or with inline bytes.
    pub fn post_send(&self, qp: &mut Qp, mut wqe: abi::SqWqe, sges: &[abi::Sge]) {
        wqe.num_sge = U16::new(sges.len() as u16);
        self.post_raw(qp, wqe, sges.as_bytes());
    }

    pub fn post_raw(&self, qp: &mut Qp, wqe: abi::SqWqe, data: &[u8]) {
        let at = qp.sq + (u64::from(qp.posted[0] & (qp.entries - 1)) << SQ_STRIDE);
        self.write(at, wqe.as_bytes());
        self.write(at + abi::SQ_WQE_DATA as u64, data);
        qp.posted[0] = qp.posted[0].wrapping_add(1);
        self.ring_doorbell(qp.sq_db, qp.posted[0]);
    }

    pub fn post_receive(&self, qp: &mut Qp, wr_id: u64, sges: &[abi::Sge]) {
        let at = qp.rq + (u64::from(qp.posted[1] & (qp.entries - 1)) << RQ_STRIDE);
        let wqe = abi::RqWqe {
            wr_id: U64::new(wr_id),
            num_sge: U16::new(sges.len() as u16),
            ..Default::default()
        };
        self.write(at, wqe.as_bytes());
        self.write(at + abi::RQ_WQE_DATA as u64, sges.as_bytes());
        qp.posted[1] = qp.posted[1].wrapping_add(1);
        self.ring_doorbell(qp.rq_db, qp.posted[1]);
    }

    /// Posts to an SRQ whose ring is at `at`.
    pub fn post_shared(&self, ring: (u64, u32, u32), index: u32, sge: abi::Sge) {
        let (at, entries, doorbell) = ring;
        let slot = at + (u64::from(index & (entries - 1)) << RQ_STRIDE);
        let wqe = abi::RqWqe {
            wr_id: U64::new(u64::from(index)),
            num_sge: U16::new(1),
            ..Default::default()
        };
        self.write(slot, wqe.as_bytes());
        self.write(slot + abi::RQ_WQE_DATA as u64, sge.as_bytes());
        self.ring_doorbell(doorbell, index.wrapping_add(1));
    }

    pub fn raw_doorbell(&self, qp: &Qp, send: u32) {
        self.ring_doorbell(qp.sq_db, send);
    }

    /// What a driver does after RESET: both producer indices are zero again.
    pub fn raw_reset(&self, qp: &Qp) {
        for number in [qp.sq_db, qp.rq_db] {
            let slot = u64::from(number & 0xffff);
            self.ram.store_u32(self.doorbells + abi::db::INDEX as u64 + 4 * slot, 0);
        }
    }

    /// Takes the next completion, if there is one.
    pub fn poll(&self, cq: &mut Cq) -> Option<abi::Cqe> {
        let at = cq.at + u64::from(cq.consumer & (cq.entries - 1)) * 64;
        let cqe = abi::Cqe::read_from_bytes(&self.read(at, 64)).unwrap();
        if cqe.seq.get() != cq.consumer.wrapping_add(1) {
            return None;
        }
        cq.consumer = cq.consumer.wrapping_add(1);
        self.ram.store_u32(self.control(cq) + abi::ctrl::CONSUMER as u64, cq.consumer);
        Some(cqe)
    }

    /// All completions there are.
    pub fn drain(&self, cq: &mut Cq) -> Vec<abi::Cqe> {
        std::iter::from_fn(|| self.poll(cq)).collect()
    }

    /// The statuses of all completions there are.
    pub fn statuses(&self, cq: &mut Cq) -> Vec<(u64, u8)> {
        self.drain(cq).iter().map(|cqe| (cqe.wr_id.get(), cqe.status)).collect()
    }

    pub fn arm(&self, cq: &Cq, what: u32) {
        let fired = self.ram.load_u32(self.control(cq) + abi::ctrl::FIRED as u64);
        let word = (fired + 1) << abi::arm::SEQ_SHIFT | what;
        self.ram.store_u32(self.control(cq) + abi::ctrl::ARM as u64, word);
    }

    fn control(&self, cq: &Cq) -> u64 {
        cq.at + control_offset(u64::from(cq.entries) * 64)
    }

    pub fn asynchronous(&self) -> Vec<(u32, u32)> {
        self.events.lock().unwrap().asynchronous.drain(..).collect()
    }

    /// Jobs of this context.
    pub fn jobs(&self) -> Vec<Job> {
        let mut events = self.events.lock().unwrap();
        let jobs = events.jobs.drain(..);
        jobs.inspect(|(ctx, _)| assert_eq!(*ctx, self.ctx)).map(|(_, job)| job).collect()
    }

    pub fn completion_events(&self) -> Vec<(u32, u32)> {
        self.events.lock().unwrap().completions.drain(..).collect()
    }
}
