//! Requests of all kinds against a real engine, without queues and threads.

use std::cell::RefCell;
use std::sync::Arc;

use proptest::prelude::*;
use virtio_rdma_abi::{self as abi, cmd, cmd_status};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::*;
use crate::device::events::NoPort;
use crate::device::queues::QueueLayout;
use crate::link::NicId;
use crate::rnic::{self, Call, Faults, HostError, HostVerbs, Null, Opener, Place};
use crate::shard::{Limits, NicSettings, Random, Shard};

const MEMORY: usize = 1 << 20;
const NONCE: u64 = 0x1234_5678_9abc_def0;
const STATUS_PAGE: u64 = 0x1000;
const ROOM: usize = 256;

struct Counting(u32);

impl Random for Counting {
    fn next_u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(0x9e37_79b1).wrapping_add(0x7f4a_7c15);
        self.0
    }
}

struct Device {
    shard: RefCell<Shard>,
    nic: NicId,
    space: AddressSpace,
    /// How many commands are turned down as stale before one is executed.
    stale: RefCell<usize>,
}

impl Executor for Device {
    fn space(&self) -> (AddressSpace, u64) {
        (self.space.clone(), 0)
    }

    fn execute(&self, _generation: u64, ctx: u32, command: Command) -> Outcome {
        let mut stale = self.stale.borrow_mut();
        if *stale > 0 {
            *stale -= 1;
            return Outcome::Stale;
        }
        Outcome::Done(self.shard.borrow_mut().execute(self.nic, ctx, command, 1))
    }

    fn decide(&self, goes_on: bool) {
        match goes_on {
            true => self.shard.borrow_mut().resume(self.nic),
            false => self.shard.borrow_mut().reset(self.nic),
        }
    }
}

fn device() -> (Device, Controller) {
    device_with(|shard, settings| shard.add_nic(settings, Box::new(NoPort)))
}

/// A device whose NIC `add` puts on the shard.
fn device_with(add: impl FnOnce(&mut Shard, NicSettings) -> NicId) -> (Device, Controller) {
    let mut shard = Shard::new(Box::new(Counting(1)));
    let layout = QueueLayout::default();
    let limits = Limits {
        max_contexts: 4,
        max_pds: 4,
        max_mrs: 4,
        max_mr_bytes: 1 << 40,
        max_cqs: 4,
        max_srqs: 4,
        max_qps: 4,
        max_ahs: 4,
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
    let nic = add(&mut shard, settings);
    let space = AddressSpace::anonymous(&[(0, MEMORY)]).expect("memory");
    let device = Device { shard: RefCell::new(shard), nic, space, stale: RefCell::default() };
    (device, Controller::new(layout.kick_base()))
}

fn request(opcode: u16, body: &(impl IntoBytes + Immutable + ?Sized)) -> Vec<u8> {
    let header = CmdHdr { opcode: U16::new(opcode), ..CmdHdr::default() };
    [header.as_bytes(), body.as_bytes()].concat()
}

fn serve(side: &mut (Device, Controller), request: &[u8]) -> (u32, Vec<u8>) {
    serve_in(side, request, ROOM).expect("there is room")
}

/// As [`serve`], with that much room for the answer; `None` if not even its header fits.
fn serve_in(side: &mut (Device, Controller), bytes: &[u8], room: usize) -> Option<(u32, Vec<u8>)> {
    let response = side.1.serve(&side.0, Request { bytes, whole: true }, room, 1 << 40)?;
    assert!(response.bytes().len() <= room);
    let (header, body) = RespHdr::read_from_prefix(response.bytes()).expect("a header");
    Some((header.status.get(), body.to_vec()))
}

fn init() -> Vec<u8> {
    let req = InitReq {
        abi_version: U32::new(1),
        nonce: U64::new(NONCE),
        status_page: U64::new(STATUS_PAGE),
        ..Default::default()
    };
    request(cmd::INIT, &req)
}

fn ready() -> (Device, Controller) {
    let mut side = device();
    assert_eq!(serve(&mut side, &init()).0, cmd_status::OK);
    side
}

#[test]
fn every_opcode_of_the_abi_has_a_size() {
    let mut known = 0;
    for &(name, opcode) in cmd::TABLE {
        let opcode = u16::try_from(opcode).expect("16 bits");
        assert!(lengths::of(opcode).is_some(), "{name}");
        known += 1;
    }
    let answered = (0..=u16::MAX).filter(|opcode| lengths::of(*opcode).is_some()).count();
    assert_eq!(answered, known, "and no other has");
}

#[test]
fn nothing_before_init() {
    let mut side = device();
    assert_eq!(serve(&mut side, &request(cmd::PD_CREATE, &())).0, cmd_status::STATE);
    // Also what would be refused for another reason.
    let page = abi::ContextCreateReq { db_page: U64::new(u64::MAX) };
    assert_eq!(serve(&mut side, &request(cmd::CONTEXT_CREATE, &page)).0, cmd_status::STATE);
    assert_eq!(serve(&mut side, &request(cmd::MR_REG, &())).0, cmd_status::STATE);
    assert_eq!(
        serve(&mut side, &request(cmd::KEEPALIVE, &NONCE.to_le_bytes())).0,
        cmd_status::STATE
    );

    assert_eq!(serve(&mut side, &init()).0, cmd_status::OK);
    let (status, body) = serve(&mut side, &request(cmd::PD_CREATE, &()));
    assert_eq!((status, body.len()), (cmd_status::OK, 8));
    assert_eq!(serve(&mut side, &request(cmd::SHUTDOWN, &())).0, cmd_status::OK);
    assert_eq!(serve(&mut side, &request(cmd::PD_CREATE, &())).0, cmd_status::STATE);
}

#[test]
fn init_checks_its_fields() {
    let cases = [
        (0, NONCE, STATUS_PAGE, cmd_status::NOTSUPP),
        (1, 0, STATUS_PAGE, cmd_status::INVAL),
        (1, 1 << 32, STATUS_PAGE, cmd_status::INVAL),
        (1, NONCE, STATUS_PAGE + 8, cmd_status::FAULT),
        (1, NONCE, MEMORY as u64, cmd_status::FAULT),
        (u32::MAX, NONCE, STATUS_PAGE, cmd_status::OK),
    ];
    for (version, nonce, status_page, expected) in cases {
        let req = InitReq {
            abi_version: version.into(),
            nonce: nonce.into(),
            status_page: status_page.into(),
            ..Default::default()
        };
        let (status, body) = serve(&mut device(), &request(cmd::INIT, &req));
        assert_eq!(status, expected, "{version} {nonce:#x} {status_page:#x}");
        assert!(
            status != cmd_status::OK || body[..4] == 1u32.to_le_bytes(),
            "the version to be used"
        );
    }
}

#[test]
fn a_keepalive_belongs_to_one_life() {
    let mut side = ready();
    let keepalive = |nonce: u64| request(cmd::KEEPALIVE, &nonce.to_le_bytes());
    assert_eq!(serve(&mut side, &keepalive(NONCE)).0, cmd_status::OK);
    assert_eq!(serve(&mut side, &keepalive(NONCE + 1)).0, cmd_status::STATE);
    assert_eq!(serve(&mut side, &request(cmd::SHUTDOWN, &())).0, cmd_status::OK);
    assert_eq!(serve(&mut side, &keepalive(NONCE)).0, cmd_status::STATE);
}

#[test]
fn short_requests_and_short_room() {
    for &(name, opcode) in cmd::TABLE {
        let opcode = u16::try_from(opcode).expect("16 bits");
        let known = lengths::of(opcode).expect("known");
        let mut side = ready();
        if known.request_base > 0 {
            let short = request(opcode, vec![0u8; known.request_base - 1].as_slice());
            assert_eq!(serve(&mut side, &short).0, cmd_status::INVAL, "{name}");
        }
        let whole = request(opcode, vec![0u8; known.request()].as_slice());
        if known.response_base > 0 {
            let tight = serve_in(&mut side, &whole, 8 + known.response_base - 1);
            assert_eq!(tight, Some((cmd_status::INVAL, Vec::new())), "{name}");
        }
        assert_eq!(serve_in(&mut side, &whole, 7), None, "{name}");
        let objects = side.0.shard.borrow().status(side.0.nic).expect("it exists").objects;
        assert_eq!(objects, Default::default(), "{name} had an effect");
    }
    assert_eq!(serve(&mut ready(), &[0x18]).0, cmd_status::INVAL);
    assert_eq!(serve(&mut ready(), &request(0x7777, &())).0, cmd_status::NOTSUPP);
}

/// What a driver asks for and would not get is refused, whatever the request is and wherever the
/// byte stands.
#[test]
fn what_the_device_does_not_know_must_be_zero() {
    for &(name, opcode) in cmd::TABLE {
        let opcode = u16::try_from(opcode).expect("16 bits");
        let known = lengths::of(opcode).expect("known");
        let whole = request(opcode, vec![0u8; known.request()].as_slice());
        let mut side = ready();
        let plain = serve(&mut ready(), &whole);
        let zeroes = [whole.as_slice(), &[0; 24]].concat();
        assert_eq!(serve(&mut ready(), &zeroes), plain, "{name}: zeroes ask for nothing");
        for byte in [0, 23] {
            let mut longer = zeroes.clone();
            longer[whole.len() + byte] = 1;
            assert_eq!(serve(&mut side, &longer).0, cmd_status::NOTSUPP, "{name}");
        }
        for byte in [2, 3, 8, 15] {
            let mut header = whole.clone();
            header[byte] = 1;
            assert_eq!(serve(&mut side, &header).0, cmd_status::NOTSUPP, "{name}");
        }
        let cut = Request { bytes: &whole, whole: false };
        let answer = side.1.serve(&side.0, cut, ROOM, 1 << 40).expect("there is room");
        assert_eq!(answer.bytes()[..4], cmd_status::NOTSUPP.to_le_bytes(), "{name}");
        let objects = side.0.shard.borrow().status(side.0.nic).expect("it exists").objects;
        assert_eq!(objects, Default::default(), "{name} had an effect");
    }
}

/// A device with one feature more: a capability, a label behind the requests of KEEPALIVE and
/// QP_CREATE, and 8 bytes behind their responses.
fn of_the_future() -> (Device, Controller) {
    let (device, controller) = device();
    (device, Controller { revision: later::REVISION, ..controller })
}

/// INIT as it was first, and as it is now with `caps`.
fn init_with(caps: Option<u64>) -> Vec<u8> {
    let mut bytes = init();
    match caps {
        Some(caps) => bytes.splice(40..48, caps.to_le_bytes()).for_each(drop),
        None => bytes.truncate(40),
    }
    bytes
}

#[test]
fn an_old_driver_finds_in_a_new_device_the_one_that_it_knows() {
    let mut side = of_the_future();
    let (status, body) = serve_in(&mut side, &init_with(None), 16).expect("a header fits");
    assert_eq!((status, body), (cmd_status::OK, [1u32, 0].map(u32::to_le_bytes).concat()));
    let keepalive = request(cmd::KEEPALIVE, &NONCE.to_le_bytes());
    assert_eq!(serve_in(&mut side, &keepalive, 8), Some((cmd_status::OK, Vec::new())));
}

#[test]
fn a_new_driver_finds_in_an_old_device_that_it_is_old() {
    let mut side = device();
    let (status, body) = serve(&mut side, &init_with(Some(later::CAP)));
    assert_eq!((status, &body[8..]), (cmd_status::OK, &[0; 8][..]), "nothing is in effect");
    let keepalive = |word: u64| request(cmd::KEEPALIVE, &[NONCE, word].map(U64::new));
    assert_eq!(serve(&mut side, &keepalive(0)), (cmd_status::OK, Vec::new()));
    assert_eq!(serve(&mut side, &keepalive(7)).0, cmd_status::NOTSUPP, "it would not get it");
}

#[test]
fn a_capability_is_in_effect_when_both_want_it() {
    let agreed = |caps| {
        let (status, body) = serve(&mut of_the_future(), &init_with(Some(caps)));
        assert_eq!((status, body.len()), (cmd_status::OK, 16));
        u64::from_le_bytes(body[8..].try_into().expect("eight"))
    };
    assert_eq!(agreed(0), 0);
    assert_eq!(agreed(later::CAP | 1 << 41 | 0xff), later::CAP);
    let mut side = of_the_future();
    let labelled = |label: u64| request(cmd::KEEPALIVE, &[NONCE, label].map(U64::new));
    assert_eq!(serve(&mut side, &init_with(Some(later::CAP))).0, cmd_status::OK);
    assert_eq!(serve(&mut side, &labelled(7)), (cmd_status::OK, vec![0; 8]));
    // The next driver does not want it.
    assert_eq!(serve(&mut side, &init_with(Some(1 << 41))).0, cmd_status::OK);
    assert_eq!(serve(&mut side, &labelled(7)).0, cmd_status::NOTSUPP, "not in effect");
    assert_eq!(serve(&mut side, &labelled(0)), (cmd_status::OK, vec![0; 8]));
}

#[test]
fn a_device_tells_what_it_has_whether_or_not_it_is_in_effect() {
    for (mut side, has) in [(device(), 0), (of_the_future(), later::CAP)] {
        assert_eq!(serve(&mut side, &init_with(None)).0, cmd_status::OK);
        let (_, body) = serve(&mut side, &request(cmd::QUERY_DEVICE, &()));
        let (device, _) = abi::QueryDeviceResp::read_from_prefix(&body).expect("what it is");
        assert_eq!(device.caps.get() & !abi::cap::BASE, has);
    }
}

#[test]
fn the_kick_queue_is_a_virtqueue() {
    let mut side = ready();
    let page = abi::ContextCreateReq { db_page: U64::new(0x2000) };
    let (status, body) = serve(&mut side, &request(cmd::CONTEXT_CREATE, &page));
    assert_eq!(status, cmd_status::OK);
    let (resp, _) = abi::ContextCreateResp::read_from_prefix(&body).expect("a context");
    assert_ne!(resp.ctx.get(), 0);
    assert!((6..8).contains(&resp.kick_queue.get()), "{}", resp.kick_queue.get());
}

#[test]
fn a_region_cannot_cost_more_than_the_guest_has() {
    let mut side = ready();
    let (_, pd) = serve(&mut side, &request(cmd::PD_CREATE, &()));
    let pdn = U32::read_from_prefix(&pd).expect("a number").0;
    let mut req = abi::MrRegReq { pdn, ..Default::default() };
    req.pages.page_shift = 12;
    req.pages.npages = u32::MAX.into();
    req.length = U64::new(MEMORY as u64 + 1);
    assert_eq!(serve(&mut side, &request(cmd::MR_REG, &req)).0, cmd_status::NOMEM);
    // Beyond what QUERY_DEVICE says of one.
    req.length = U64::new(16 * MEMORY as u64 + 1);
    assert_eq!(serve(&mut side, &request(cmd::MR_REG, &req)).0, cmd_status::INVAL);
    req.length = U64::ZERO;
    assert_eq!(serve(&mut side, &request(cmd::MR_REG, &req)).0, cmd_status::OK);
    req.length = U64::new(MEMORY as u64);
    assert_eq!(serve(&mut side, &request(cmd::MR_REG, &req)).0, cmd_status::OK);
}

#[test]
fn rings_are_aligned_and_sized() {
    let cq = |entries: u32, offset: u32, npages: u32| {
        let mut req = abi::CqCreateReq { entries: entries.into(), ..Default::default() };
        req.ring.addr = U64::new(0x4000);
        req.ring.npages = npages.into();
        req.ring.offset = offset.into();
        req.ring.page_shift = 12;
        serve(&mut ready(), &request(cmd::CQ_CREATE, &req)).0
    };
    // 64 entries of 64 bytes fill a page, the control block is in the next.
    assert_eq!(cq(64, 0, 2), cmd_status::OK);
    assert_eq!(cq(64, 0, 1), cmd_status::INVAL);
    assert_eq!(cq(32, 64, 1), cmd_status::OK);
    assert_eq!(cq(32, 32, 1), cmd_status::INVAL);
    assert_eq!(cq(0, 0, 1), cmd_status::INVAL);
    assert_eq!(cq(33, 0, 2), cmd_status::INVAL);
    assert_eq!(cq(1 << 31, 0, u32::MAX), cmd_status::INVAL);
    // Within the bounds of a CQ, outside the guest's memory.
    assert_eq!(cq(1 << 15, 0, 1 << 20), cmd_status::FAULT);
}

/// What follows the ring in its last page is none of the device's business.
#[test]
fn a_receive_queue_becomes_the_largest_by_a_list_of_whole_pages() {
    const LIST: u64 = 0x8000;
    let ring = |entries: u64| (entries << abi::WQE_MAX_LOG2_STRIDE) + abi::ctrl::SIZE as u64;
    let mut side = ready();
    let page = abi::DbPageAddReq { db_page: U64::new(0x2000) };
    assert_eq!(serve(&mut side, &request(cmd::DB_PAGE_ADD, &page)).0, cmd_status::OK);
    let (_, pd) = serve(&mut side, &request(cmd::PD_CREATE, &()));
    let pdn = U32::read_from_prefix(&pd).expect("a number").0;
    let mut create = abi::SrqCreateReq { pdn, entries: U32::new(1), ..Default::default() };
    (create.max_wr, create.max_sge) = (U32::new(1), U32::new(1));
    create.log2_stride = abi::WQE_MAX_LOG2_STRIDE;
    create.ring.addr = U64::new(0x4000);
    (create.ring.npages, create.ring.page_shift) = (U32::new(2), 12);
    let (status, srq) = serve(&mut side, &request(cmd::SRQ_CREATE, &create));
    assert_eq!(status, cmd_status::OK);
    let srqn = U32::read_from_prefix(&srq).expect("a number").0;
    // A list of a root page and one other, which names one page of memory as often as needed.
    let lists = [LIST, LIST + 0x1000].map(|at| crate::memory::Ring::page(&side.0.space, at));
    let [root, leaf] = lists.map(|list| list.expect("guest memory"));
    (0..512).for_each(|n| root.store_u32(n * 8, 0x9000));
    (0..512).for_each(|n| leaf.store_u32(n * 8, 0xa000));
    let entries = crate::nic::limits::MAX_WR;
    let mut modify = abi::SrqModifyReq { srqn, entries: entries.into(), ..Default::default() };
    (modify.mask, modify.max_wr) = (U32::new(abi::srq_mask::MAX_WR), entries.into());
    let pages = u32::try_from(ring(entries.into()).div_ceil(4096)).expect("few");
    modify.ring.addr = U64::new(LIST);
    (modify.ring.page_shift, modify.ring.levels) = (12, 2);
    for (npages, expected) in
        [(pages - 1, cmd_status::INVAL), (pages, cmd_status::OK), (pages + 1, cmd_status::OK)]
    {
        modify.ring.npages = npages.into();
        let status = serve(&mut side, &request(cmd::SRQ_MODIFY, &modify)).0;
        assert_eq!(status, expected, "{npages} pages");
    }
}

#[test]
fn a_command_that_was_overtaken_by_a_memory_change_is_resolved_again() {
    let mut side = ready();
    *side.0.stale.borrow_mut() = STALE_RETRIES - 1;
    assert_eq!(serve(&mut side, &request(cmd::PD_CREATE, &())).0, cmd_status::OK);
    *side.0.stale.borrow_mut() = usize::MAX;
    assert_eq!(serve(&mut side, &request(cmd::PD_CREATE, &())).0, cmd_status::FAULT);
}

/// A registration on an RNIC is made on the thread that asks, between two commands of the engine.
#[test]
fn a_command_with_a_blocking_job_is_answered_when_that_is_done() {
    let faults = Faults::default();
    let script = faults.clone();
    let opener: Opener = Arc::new(move || {
        let opened = Null::new(script.clone()).map_err(|_| HostError(libc::EMFILE))?;
        Ok(Box::new(opened) as Box<dyn HostVerbs>)
    });
    let mut side = device_with(|shard, settings| {
        let host = opener().expect("a context");
        let place = Place {
            device: "null".to_owned(),
            through: None,
            directory: Arc::default(),
            opener: opener.clone(),
            wake: Arc::new(|| ()),
        };
        shard.add_provided(Box::new(rnic::Rnic::nic(place, settings, host, Box::new(NoPort))))
    });
    assert_eq!(serve(&mut side, &init()).0, cmd_status::OK);
    let (_, pd) = serve(&mut side, &request(cmd::PD_CREATE, &()));
    let pdn = U32::read_from_prefix(&pd).expect("a number").0;
    let mut req = abi::MrRegReq { pdn, length: U64::new(0x3000), ..Default::default() };
    req.pages.page_shift = 12;
    req.pages.npages = 3.into();
    let (status, body) = serve(&mut side, &request(cmd::MR_REG, &req));
    assert_eq!((status, body.len()), (cmd_status::OK, 8));
    assert_eq!(faults.live().0.mrs, 1);
    faults.refuse(Call::Register, libc::ENOMEM);
    assert_eq!(serve(&mut side, &request(cmd::MR_REG, &req)).0, cmd_status::NOMEM);
    let (key, _) = U32::read_from_prefix(&body).expect("a key");
    let object = abi::ObjectReq { object: key, ..Default::default() };
    assert_eq!(serve(&mut side, &request(cmd::MR_DEREG, &object)).0, cmd_status::OK);
    let nic = side.0.nic;
    drop(side.0.shard.borrow_mut().take_deferred_drops(nic));
    assert_eq!(faults.live().0.mrs, 0);
}

proptest! {
    #[test]
    fn no_request_makes_trouble(
        commands in prop::collection::vec(
            (
                0usize..cmd::TABLE.len() + 1, 0u32..3, prop::collection::vec(any::<u8>(), 0..200),
                0usize..256
            ),
            1..20,
        ),
    ) {
        let mut side = ready();
        for (index, ctx, mut body, room) in commands {
            let opcode = cmd::TABLE.get(index)
                .map_or(0x99, |&(_, opcode)| u16::try_from(opcode).expect("16 bits"));
            let header = CmdHdr { opcode: opcode.into(), ctx: ctx.into(), ..CmdHdr::default() };
            if room % 4 != 0 {
                clear_reserved(opcode, &mut body);
            }
            let bytes = [header.as_bytes(), &body].concat();
            let answer = serve_in(&mut side, &bytes, room);
            prop_assert_eq!(answer.is_none(), room < 8);
            side.0.shard.borrow_mut().poll(2);
        }
    }

    /// Requests whose fields are nearly right get further than noise.
    #[test]
    fn no_page_list_makes_trouble(
        opcode in prop::sample::select(
            vec![cmd::MR_REG, cmd::CQ_CREATE, cmd::SRQ_CREATE, cmd::QP_CREATE, cmd::CQ_RESIZE]
        ),
        body in prop::collection::vec(prop_oneof![Just(0u8), Just(1), Just(12), any::<u8>()], 144),
        shape in (0u64..0x110_000, 0u32..600, 0u32..0x2000, 10u8..32, 0u8..6),
    ) {
        let mut side = ready();
        let mut bytes = body;
        let list = abi::PageList {
            addr: (shape.0 & !0xfff).into(),
            npages: shape.1.into(),
            offset: (shape.2 & !0x3f).into(),
            page_shift: shape.3,
            levels: shape.4,
            reserved: [0; 6],
        };
        // Every request that has page lists ends with them.
        let request_len = lengths::of(opcode).expect("known").request();
        let at = request_len - size_of::<abi::PageList>();
        bytes[at..request_len].copy_from_slice(list.as_bytes());
        if opcode == cmd::MR_REG {
            let length = u64::from(shape.1) << 12;
            bytes[16..24].copy_from_slice(&length.to_le_bytes());
        } else {
            bytes[4..8].copy_from_slice(&64u32.to_le_bytes());
        }
        clear_reserved(opcode, &mut bytes);
        serve(&mut side, &request(opcode, bytes.as_slice()));
    }
}
