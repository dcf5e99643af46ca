//! Does each step to the engine and to the model, and compares.

use std::sync::Arc;

use virtio_rdma_abi::{self as abi, access, qps, qpt};
use zerocopy::little_endian::U32;

use super::losses::{Call, Losses, Lost, Steps};
use super::model::{self, Action, LINES, Model, PIECE, REGIONS, Region, State, Window};
use super::ops::Op;
use crate::memory::PageList;
use crate::shard::testing::air::Air;
use crate::shard::testing::driver::{
    Cq, Guest, Qp, RQ_STRIDE, World, init_attr, rtr_attr, rts_attr, state_attr,
};
use crate::shard::{Command, Reply, Status, control_offset};

/// Entries of each queue; one less is used.
pub(super) const DEPTH: u32 = 16;
/// After how long a lost request is asked for again (`soft/mirror.rs`, `PATIENCE`), in nanoseconds,
/// and how often in a row: in less time than a receiver that is not ready is waited for.
const RETRY: u64 = 510_000_000;
const RETRIES: u32 = 4;
/// Each after 492 ms.
const RNR_RETRIES: u8 = 6;
/// Rights that regions are registered with.
const RIGHTS: [u32; 6] = [
    access::LOCAL_WRITE
        | access::REMOTE_WRITE
        | access::REMOTE_READ
        | access::REMOTE_ATOMIC
        | access::MW_BIND,
    access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC,
    access::LOCAL_WRITE,
    access::REMOTE_READ,
    0,
    access::LOCAL_WRITE | access::MW_BIND,
];
/// Rights that windows are bound with.
pub(super) const WINDOW_RIGHTS: [u32; 4] = [
    access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC,
    access::REMOTE_WRITE,
    access::REMOTE_READ,
    0,
];

pub(super) struct End {
    pub(super) qp: Qp,
    /// Requests and receives that are posted and not completed.
    pub(super) open: [u32; 2],
    pub(super) peer: (u32, [u8; 16]),
}

pub(super) struct Queue {
    pub(super) ring: (u64, u32, u32),
    pub(super) srqn: u32,
    pub(super) posted: u32,
    pub(super) open: u32,
}

/// What one guest's program holds.
pub(super) struct Side {
    pub(super) guest: Guest,
    pub(super) domains: [u32; 2],
    pub(super) cqs: [Option<Cq>; LINES],
    pub(super) ends: [Option<End>; LINES],
    /// The last that each line had.
    pub(super) qpns: [u32; LINES],
    pub(super) queue: Option<Queue>,
    pub(super) base: u64,
    pub(super) stale: u32,
}

/// Both worlds, side by side.
pub(super) struct Run {
    pub(super) world: World,
    pub(super) sides: [Side; 2],
    pub(super) model: Model,
    pub(super) next: u64,
    pub(super) steps: Steps,
    /// Moves and saves that come with the next step, each after so many rounds of it.
    meanwhile: Vec<(Change, u8)>,
    pub(super) met: Met,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Move(usize),
    /// At once, or when nothing is under way.
    HandOver(bool),
}

/// Pieces ahead of their turn (`soft/requester/flight.rs`): how many there were in all, and how
/// many were not settled when a NIC moved, or was saved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Met {
    pub(super) all: u64,
    /// What the wire repeated, what it let be overtaken, and what it lost.
    pub(super) repeated: u64,
    pub(super) reordered: u64,
    pub(super) lost: u64,
    pub(super) apart: Lost,
    /// Steps that came out as they do when answers are lost.
    pub(super) otherwise: u64,
    pub(super) moved: usize,
    pub(super) saved: usize,
}

impl Run {
    /// `air`: each guest has a shard of its own, and this is between them.
    pub(super) fn new(air: Option<Air>) -> Self {
        let apart = air.is_some();
        let piece = air.as_ref().map_or(u32::MAX, Air::mtu) as usize;
        let mut world = air.map_or_else(World::new, World::beside);
        let mut guests = [0, 1].map(|side: u8| {
            let on = if apart { side.into() } else { 0 };
            world.guest_on(on, 1, 1 + side)
        });
        let bases = [0, 1]
            .map(|side: usize| guests[side].pattern(REGIONS * PIECE as usize, 3 + side as u8).0);
        let model = Model {
            guests: [0, 1].map(|side: usize| {
                let bytes = guests[side].read(bases[side], REGIONS * PIECE as usize);
                model::Guest::new(bases[side], bytes)
            }),
            losses: Losses::default(),
            piece,
        };
        let mut bases = bases.into_iter();
        let sides = guests.map(|guest| Side {
            domains: [guest.pd, 0],
            guest,
            cqs: [None; LINES],
            ends: Default::default(),
            qpns: [0; LINES],
            queue: None,
            base: bases.next().unwrap(),
            stale: 0x00ab_cdef,
        });
        let mut run = Self {
            world,
            sides,
            model,
            next: 0,
            steps: Steps::default(),
            meanwhile: Vec::new(),
            met: Met::default(),
        };
        (0..2).for_each(|side| run.second_domain(side));
        run
    }

    fn second_domain(&mut self, side: usize) {
        let guest = &self.sides[side].guest;
        let Reply::Object(pd) = self.world.ok(guest, guest.ctx, Command::PdCreate) else {
            panic!("not a PD")
        };
        self.sides[side].domains = [guest.pd, pd];
    }

    pub(super) fn apply(&mut self, op: &Op) {
        self.next += 1;
        match *op {
            Op::Connect { line, domains } => self.connect(line.into(), domains.map(usize::from)),
            Op::Reconnect { line } => self.reconnect(line.into()),
            Op::Destroy { side, line } => self.destroy(side.into(), line.into()),
            Op::Error { side, line } => {
                if self.modify(side.into(), line.into(), state_attr(qps::ERR)).is_some() {
                    self.call(Call::Error(side.into(), line.into()));
                }
            }
            Op::BadIndex { side, line } => self.bad_index(side.into(), line.into()),
            Op::Drain { side, line } => self.drain(side.into(), line.into()),
            Op::GoOn { side, line } => self.go_on(side.into(), line.into()),
            Op::Register { side, region, rights, domain } => {
                self.register(side.into(), region.into(), (rights, domain));
            }
            Op::Reregister { side, region, rights, domain } => {
                self.reregister(side.into(), region.into(), (rights, domain));
            }
            Op::Deregister { side, region } => self.deregister(side.into(), region.into()),
            Op::AllocateWindow { side, window, domain } => {
                self.allocate_window(side.into(), window.into(), domain.into());
            }
            Op::FreeWindow { side, window } => self.free_window(side.into(), window.into()),
            Op::Bind { side, line, window, place, len, rights } => {
                self.bind((side.into(), line.into()), window.into(), place, (len, rights));
            }
            Op::Invalidate { side, line, window } => {
                if let Some(key) = self.frees(side.into(), line.into(), window) {
                    let request = self.request(Action::Invalidate(key));
                    self.post(side.into(), line.into(), request);
                }
            }
            Op::CreateShared { side } => self.create_shared(side.into()),
            Op::Limit { side, limit } => self.limit(side.into(), limit),
            Op::Post { side, line, what, local, remote, len } => {
                let request = self.transfer((side.into(), line.into()), what, (local, remote), len);
                self.post(side.into(), line.into(), request);
            }
            Op::Burst { side, line, ref posts } => {
                for &(what, local, remote, len) in posts {
                    self.next += 1;
                    let at = (side.into(), line.into());
                    let request = self.transfer(at, what, (local, remote), len);
                    self.post(at.0, at.1, request);
                }
            }
            Op::Receive { side, line, into, len } => {
                self.receive(side.into(), line.into(), into, len);
            }
            Op::ReceiveShared { side, into, len } => self.receive_shared(side.into(), into, len),
            Op::ResizeCq { side, line } => self.resize(side.into(), line.into()),
            Op::TimePasses => self.time_passes(),
            // With the next step, whose work is begun then.
            Op::HandOver { at_once } => {
                self.meanwhile.push((Change::HandOver(at_once), (self.next % 6) as u8));
                return;
            }
            Op::Move { side, rounds } => {
                self.meanwhile.push((Change::Move(side.into()), rounds));
                return;
            }
            Op::ResetNic { side } => self.reset(side.into()),
        }
        for (change, rounds) in std::mem::take(&mut self.meanwhile) {
            (0..rounds).for_each(|_| _ = self.world.round());
            let shares = self.shares_a_queue();
            match change {
                Change::Move(side) if self.world.beside.is_some() && !shares => {
                    self.met.moved += self.flights();
                    assert!(self.world.change_shard(&mut self.sides[side].guest));
                }
                Change::Move(_) => {}
                Change::HandOver(at_once) => {
                    if shares {
                        self.world.settle_all();
                    }
                    let [a, b] = &mut self.sides;
                    let guests = &mut [&mut a.guest, &mut b.guest];
                    if at_once {
                        self.world.hand_over_at_once(guests);
                    } else {
                        self.world.hand_over(guests);
                    }
                    self.met.saved += self.flights();
                }
            }
        }
        self.compare(op);
    }

    fn flights(&mut self) -> usize {
        let Self { world, sides, .. } = self;
        sides.iter().map(|side| world.at(side.guest.on).flights(side.guest.nic)).sum()
    }

    /// Time and a reset of both leave nothing.
    pub(super) fn finish(mut self) -> Met {
        for op in [Op::TimePasses, Op::ResetNic { side: false }, Op::ResetNic { side: true }] {
            self.apply(&op);
        }
        for side in &self.sides {
            let objects = self.world.at(side.guest.on).status(side.guest.nic).unwrap().objects;
            assert_eq!((objects.qps, objects.srqs, objects.cqs, objects.mrs), (0, 0, 0, 1));
        }
        for on in [0, 1] {
            assert_eq!(self.world.at(on).waits(), 0, "nothing waits");
        }
        let Some((_, air)) = &self.world.beside else { return self.met };
        let (all, repeated, reordered) = (air.ahead, air.repeated, air.reordered);
        Met { all, repeated, reordered, lost: air.lost, ..self.met }
    }

    fn time_passes(&mut self) {
        self.part_those_who_wait_for_each_other();
        self.world.advance(10_000_000_000);
        self.call(Call::TimePasses);
    }

    fn lost(&self) -> u64 {
        self.world.beside.as_ref().map_or(0, |(_, air)| air.lost)
    }

    /// What was lost in this step comes again, before any other timer's time. Then all the others'
    /// is over as well, or it would add up; and what was lost meanwhile, of who waits for ever,
    /// comes again.
    pub(super) fn make_up_for_losses(&mut self) {
        if self.met.lost == self.lost() {
            return;
        }
        self.lost_comes_again();
        self.time_passes();
        self.lost_comes_again();
    }

    fn lost_comes_again(&mut self) {
        for _ in 0..RETRIES {
            if self.met.lost == self.lost() {
                break;
            }
            self.met.lost = self.lost();
            self.world.advance(RETRY);
        }
        self.call(Call::Again);
    }

    /// Ends lines of which both ends wait for a receive, where a wire delays: it decides who of
    /// them tries again first, and so whether what the one has moved meanwhile is sent, or refused,
    /// by the other. The model knows one order.
    fn part_those_who_wait_for_each_other(&mut self) {
        if self.world.beside.as_ref().is_none_or(|(_, air)| air.keeps_time()) {
            return;
        }
        for line in 0..LINES {
            if self.model.both_wait(line) {
                self.destroy(1, line);
            }
        }
    }

    /// Whether a request may wait for a receive that is also another line's. Who gets it is not
    /// said, and where one of them began to cross before a move, the other may be
    /// first; the model knows one order.
    fn shares_a_queue(&self) -> bool {
        let ends = self.sides.iter().flat_map(|side| side.ends.iter().skip(1).flatten());
        ends.into_iter().any(|end| end.open[0] > 0)
    }

    fn connect(&mut self, line: usize, domains: [usize; 2]) {
        if self.sides.iter().any(|side| side.ends[line].is_some()) {
            return;
        }
        let mut made = Vec::new();
        for (number, side) in self.sides.iter_mut().enumerate() {
            let Self { world, .. } = self;
            let cq = match side.cqs[line] {
                Some(cq) => cq,
                None => *side.cqs[line].insert(world.cq(&mut side.guest, 128)),
            };
            let shared = side.queue.as_ref().filter(|_| line > 0).map(|queue| queue.srqn);
            side.guest.pd = side.domains[domains[number]];
            made.push(world.qp_on(&mut side.guest, (qpt::RC, DEPTH, shared), cq));
            side.guest.pd = side.domains[0];
        }
        let (b, a) = (made.pop().unwrap(), made.pop().unwrap());
        let qpns = [a.qpn, b.qpn];
        let gids = [0, 1].map(|side: usize| self.sides[side].guest.gid);
        for (side, qp) in [a, b].into_iter().enumerate() {
            let peer = (qpns[1 - side], gids[1 - side]);
            self.sides[side].qpns[line] = qp.qpn;
            self.sides[side].ends[line] = Some(End { qp, open: [0; 2], peer });
        }
        (0..2).for_each(|side| self.bring_up(side, line));
        self.model.connect(line, qpns, domains);
    }

    fn bring_up(&mut self, side: usize, line: usize) {
        let Side { guest, ends, .. } = &self.sides[side];
        let Some(end) = &ends[line] else { return };
        let mut rtr = rtr_attr(qpt::RC, end.peer);
        // 492 ms: what a wire takes adds up, and is to be no timer's time (IBTA table 45).
        rtr.min_rnr_timer = 31;
        let mut rts = rts_attr(qpt::RC);
        rts.retry_cnt = 7;
        rts.rnr_retry = if model::is_patient(side, line) { 7 } else { RNR_RETRIES };
        for attr in [init_attr(qpt::RC), rtr, rts] {
            self.world.modify(guest, &end.qp, attr).unwrap();
        }
    }

    fn reconnect(&mut self, line: usize) {
        if self.sides.iter().any(|side| side.ends[line].is_none()) {
            return;
        }
        for side in &mut self.sides {
            let Some(end) = &mut side.ends[line] else { continue };
            self.world.modify(&side.guest, &end.qp, state_attr(qps::RESET)).unwrap();
            end.qp.posted = [0; 2];
            side.guest.raw_reset(&end.qp);
            end.open = [0; 2];
        }
        self.world.settle();
        (0..2).for_each(|side| self.bring_up(side, line));
        self.model.reconnect(line);
    }

    fn destroy(&mut self, side: usize, line: usize) {
        let Some(end) = self.sides[side].ends[line].take() else { return };
        let guest = &self.sides[side].guest;
        self.world.ok(guest, guest.ctx, Command::QpDestroy(end.qp.qpn));
        self.call(Call::Destroy(side, line));
    }

    /// Modifies a QP that exists; what came of it.
    fn modify(
        &mut self,
        side: usize,
        line: usize,
        attr: abi::QpAttr,
    ) -> Option<Result<(), Status>> {
        let Side { guest, ends, .. } = &self.sides[side];
        let end = ends[line].as_ref()?;
        Some(self.world.modify(guest, &end.qp, attr))
    }

    fn state(&self, side: usize, line: usize) -> Option<State> {
        self.model.guests[side].qps[line].as_ref().map(|qp| qp.state)
    }

    fn bad_index(&mut self, side: usize, line: usize) {
        let Side { guest, ends, .. } = &self.sides[side];
        let Some(end) = &ends[line] else { return };
        guest.raw_doorbell(&end.qp, end.qp.posted[0].wrapping_add(1000 + self.next as u32));
        self.call(Call::BadIndex(side, line));
    }

    fn drain(&mut self, side: usize, line: usize) {
        if self.state(side, line) != Some(State::Rts) {
            return;
        }
        let mut attr = state_attr(qps::SQD);
        attr.mask = U32::new(abi::attr_mask::STATE | abi::attr_mask::EN_SQD_ASYNC_NOTIFY);
        attr.en_sqd_async_notify = 1;
        assert_eq!(self.modify(side, line, attr), Some(Ok(())));
        self.call(Call::Drain(side, line));
    }

    fn go_on(&mut self, side: usize, line: usize) {
        if self.state(side, line) != Some(State::Sqd) {
            return;
        }
        let went = self.modify(side, line, state_attr(qps::RTS)).is_some_and(|r| r.is_ok());
        let drains = self.model.guests[side].qps[line].as_ref().is_some_and(|qp| qp.draining);
        assert_eq!(went, !drains, "SQD to RTS");
        self.call(Call::GoOn(side, line));
    }

    fn register(&mut self, side: usize, region: usize, how: (u8, bool)) {
        let rights = RIGHTS[usize::from(how.0)];
        let domain = usize::from(how.1);
        if self.model.guests[side].regions[region].is_some() {
            return;
        }
        let at = self.model.guests[side].piece(region);
        let Side { guest, domains, .. } = &mut self.sides[side];
        let list = PageList {
            addr: at & !4095,
            offset: (at & 4095) as u32,
            npages: 1,
            page_shift: 12,
            ..PageList::default()
        };
        let map = Arc::new(list.resolve(&guest.space, PIECE).unwrap());
        guest.pd = domains[domain];
        let key = self.world.register(guest, at, map, rights).unwrap();
        guest.pd = domains[0];
        self.model.guests[side].regions[region] = Some(Region { key, domain, rights });
    }

    fn reregister(&mut self, side: usize, region: usize, how: (u8, bool)) {
        let rights = RIGHTS[usize::from(how.0)];
        let domain = usize::from(how.1);
        let Some(old) = self.model.guests[side].regions[region] else { return };
        let Side { guest, domains, .. } = &self.sides[side];
        let req = abi::MrReregReq {
            lkey: U32::new(old.key),
            flags: U32::new(abi::rereg::ACCESS | abi::rereg::PD),
            pdn: U32::new(domains[domain]),
            access: U32::new(rights),
            ..abi::MrReregReq::default()
        };
        let command = Command::MrRereg { req, map: None };
        let result = self.world.execute(guest, guest.ctx, command).map(|_| ());
        if self.model.guests[side].is_in_use(region) {
            assert_eq!(result, Err(Status::BUSY));
        } else {
            result.unwrap();
            let new = Region { key: old.key, domain, rights };
            self.model.guests[side].regions[region] = Some(new);
        }
    }

    fn deregister(&mut self, side: usize, region: usize) {
        let Some(old) = self.model.guests[side].regions[region] else { return };
        let guest = &self.sides[side].guest;
        let result = self.world.execute(guest, guest.ctx, Command::MrDereg(old.key)).map(|_| ());
        if self.model.guests[side].is_in_use(region) {
            assert_eq!(result, Err(Status::BUSY));
        } else {
            result.unwrap();
            self.sides[side].stale = old.key;
            self.model.guests[side].regions[region] = None;
        }
    }

    fn allocate_window(&mut self, side: usize, window: usize, domain: usize) {
        if self.model.guests[side].windows[window].is_some() {
            return;
        }
        let Side { guest, domains, .. } = &self.sides[side];
        let command = Command::MwAlloc { pdn: domains[domain], kind: abi::mw_type::TYPE2 };
        let Reply::Object(key) = self.world.ok(guest, guest.ctx, command) else {
            panic!("not a window")
        };
        self.model.guests[side].windows[window] = Some(Window::new(key, domain));
    }

    fn free_window(&mut self, side: usize, window: usize) {
        let Some(old) = self.model.guests[side].windows[window].take() else { return };
        let guest = &self.sides[side].guest;
        self.world.ok(guest, guest.ctx, Command::MwDealloc(old.key));
    }

    fn create_shared(&mut self, side: usize) {
        if self.sides[side].queue.is_some() {
            return;
        }
        let guest = &mut self.sides[side].guest;
        let (at, ring) = guest.ring(control_offset(u64::from(DEPTH) << RQ_STRIDE) + 128);
        let req = abi::SrqCreateReq {
            pdn: U32::new(guest.pd),
            entries: U32::new(DEPTH),
            max_wr: U32::new(DEPTH),
            max_sge: U32::new(1),
            log2_stride: RQ_STRIDE,
            ..abi::SrqCreateReq::default()
        };
        let Reply::Srq(srq) = self.world.ok(guest, guest.ctx, Command::SrqCreate { req, ring })
        else {
            panic!("not an SRQ")
        };
        self.sides[side].queue = Some(Queue {
            ring: (at, DEPTH, srq.db.get()),
            srqn: srq.srqn.get(),
            posted: 0,
            open: 0,
        });
        self.model.guests[side].shared = Some(model::Shared::default());
    }

    fn limit(&mut self, side: usize, limit: u8) {
        let Side { guest, queue: Some(queue), .. } = &self.sides[side] else { return };
        let req = abi::SrqModifyReq {
            srqn: U32::new(queue.srqn),
            mask: U32::new(abi::srq_mask::LIMIT),
            limit: U32::new(limit.into()),
            ..abi::SrqModifyReq::default()
        };
        self.world.ok(guest, guest.ctx, Command::SrqModify { req, ring: None });
        self.model.set_limit(side, limit.into());
    }

    fn resize(&mut self, side: usize, line: usize) {
        let Side { guest, cqs, ends, .. } = &mut self.sides[side];
        let Some(cq) = &mut cqs[line] else { return };
        *cq = self.world.resize(guest, cq, 128);
        if let Some(end) = &mut ends[line] {
            end.qp.cq = *cq;
        }
    }

    /// The VM of a guest starts anew: all objects are gone, memory is as it was.
    fn reset(&mut self, side: usize) {
        let Side { guest, cqs, ends, queue, .. } = &mut self.sides[side];
        self.world.at(guest.on).reset(guest.nic);
        self.world.start_again(guest);
        (*cqs, *ends, *queue) = Default::default();
        self.model.guests[side].reset();
        self.second_domain(side);
    }
}
