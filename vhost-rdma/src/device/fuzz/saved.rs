//! What an earlier process says it saved of a NIC: state that was really saved, bent.
//!
//! State comes from a process that guests talk to, and the checksum around it only tells what
//! changed on the way: who wrote the state wrote the checksum as well. So the string bends the
//! bytes within, and they are sealed anew before they are read. Numbers are replaced as a whole,
//! too, since a single byte that changes seldom leaves the rest in its form.
//!
//! What is read goes on: rounds, the guest's doing on top of it, being saved again, and a reset.

use serde::ser::{Serialize, SerializeTuple as _, Serializer};
use virtio_rdma_abi::{self as abi, arm, cmd, db, mw_type, opcode, qps, qpt, send_flags};
use zerocopy::IntoBytes as _;
use zerocopy::little_endian::{U16, U32, U64};

use super::{
    DOORBELLS, Doing, GID, Machine, QueueLayout, RAM, connect, list, queue_pair, shard, start,
    state,
};
use crate::nic::saved::{open, seal};
use crate::shard::{SavedNic, control_offset};

/// Where the rings are: as `connect` places them, then a shared one, and who receives from there.
const RINGS: u64 = 0x1_0000;
const CQ_BYTES: u64 = 64 * 64;
const SHARED: u64 = 0x2_0000;
const SHARERS: u64 = 0x2_2000;
/// Memory that no ring is in: four elements of this length.
const DATA: u64 = 0x3_0000;
const ELEMENT: u32 = 0x3_0000;
/// What the daemon may keep for the NIC.
const KEPT: u64 = 16 << 20;
const GROUP: [u8; 16] = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];

/// See the module.
pub(super) fn saved(doing: &[u8]) {
    let mut doing = Doing(doing);
    let Some((mut machine, qpns)) = busy() else { return };
    let Some(mut bytes) = saved_by(&machine) else { return };
    for _ in 0..=doing.byte() % 8 {
        bend(&mut bytes, &mut doing);
    }
    go_on(&mut machine, &bytes);
    for _ in 0..doing.steps() {
        if doing.0.is_empty() {
            break;
        }
        step(&mut machine, &qpns, &mut doing);
    }
    // Deadlines of whatever waits, as far as there are any.
    for _ in 0..32 {
        machine.poll(1 << 32);
    }
    let mut shard = machine.shard.borrow_mut();
    shard.reset(machine.nic);
    for _ in 0..4 {
        shard.poll(machine.now);
    }
    drop(shard.take_deferred_drops(machine.nic));
    shard.remove_nic(machine.nic);
}

/// What the guest does with a NIC that goes on.
fn step(machine: &mut Machine, qpns: &[u32], doing: &mut Doing<'_>) {
    let [what, how] = doing.bytes();
    let qpn = qpns[usize::from(how) % qpns.len()];
    match what % 8 {
        0 | 1 => {
            let slot = u64::from(how) % 24;
            machine.ram.store_u32(DOORBELLS + db::INDEX as u64 + 4 * slot, doing.byte().into());
            machine.ram.store_u8(DOORBELLS + db::SUMMARY as u64, 1);
        }
        2 => state(machine, qpn, if how < 128 { qps::ERR } else { qps::RESET }),
        3 => start(machine, qpn, qpt::RC),
        4 => drop(machine.request(cmd::QP_DESTROY, 1, &[qpn.to_le_bytes(), [0; 4]])),
        5 => arm_cq(machine, how.into()),
        6 => {
            if let Some(bytes) = saved_by(machine) {
                go_on(machine, &bytes);
            }
        }
        _ => machine.poll(u64::from(how) << 14),
    }
    machine.poll(0);
}

/// What is saved of the NIC; it stands still.
fn saved_by(machine: &Machine) -> Option<Vec<u8>> {
    let saved = machine.shard.borrow_mut().save(machine.nic)?;
    postcard::to_allocvec(&saved).ok()
}

/// Another process takes the NIC over.
fn go_on(machine: &mut Machine, bytes: &[u8]) {
    let Some(layout) = QueueLayout::new(4, 2) else { return };
    let (other, nic) = shard(&layout);
    // What the earlier one kept is its own, and goes with it.
    *machine.shard.borrow_mut() = other;
    machine.nic = nic;
    let Ok(saved) = seal(&Raw(bytes)).and_then(|sealed| open::<SavedNic>(&sealed)) else { return };
    let mut shard = machine.shard.borrow_mut();
    if shard.load(nic, saved, machine.space.clone()).is_ok() {
        shard.go_on_with(&[nic]);
    }
}

/// Bytes as they are, without a length before them.
struct Raw<'a>(&'a [u8]);

impl Serialize for Raw<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut tuple = to.serialize_tuple(self.0.len())?;
        self.0.iter().try_for_each(|byte| tuple.serialize_element(byte))?;
        tuple.end()
    }
}

/// Another byte, bit or number somewhere, a piece twice or gone.
fn bend(bytes: &mut Vec<u8>, doing: &mut Doing<'_>) {
    if bytes.is_empty() {
        return;
    }
    let at = usize::from(doing.half()) % bytes.len();
    let how = doing.byte();
    let piece = at..(at + usize::from(how >> 3)).min(bytes.len());
    match how % 8 {
        0 => bytes[at] = doing.byte(),
        1 => bytes[at] ^= 1 << (how >> 5),
        2 => {
            let piece = bytes[piece].to_vec();
            bytes.splice(at..at, piece);
        }
        3 => drop(bytes.drain(piece)),
        _ => replace_number(bytes, at, number(how >> 3, doing)),
    }
}

/// Another number in the place of the one that begins there.
fn replace_number(bytes: &mut Vec<u8>, at: usize, number: u64) {
    let end = bytes[at..].iter().position(|byte| byte & 0x80 == 0);
    let end = end.map_or(bytes.len(), |more| at + more + 1);
    bytes.splice(at..end, varint(number));
}

/// Numbers that are next to a boundary, small, or any.
fn number(kind: u8, doing: &mut Doing<'_>) -> u64 {
    match kind {
        0..=7 => kind.into(),
        8..=15 => 1 << (4 * (kind - 8)),
        16..=23 => (1 << (4 * (kind - 16))) - 1,
        24..=26 => doing.byte().into(),
        27 => doing.word().into(),
        28 => doing.long(),
        29 => 1 << 31,
        30 => u32::MAX.into(),
        _ => u64::MAX,
    }
}

/// As postcard writes it.
fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
    bytes
}

/// A NIC with one of everything, in the midst of work; its QPs.
fn busy() -> Option<(Machine, Vec<u32>)> {
    let mut machine = Machine::new()?;
    machine.space.account().allow(KEPT);
    let first = machine.answers;
    let mut qpns = connect(&mut machine, RINGS)?;
    let cqn = machine.said[first % 16];
    let all = abi::MrRegReq {
        access: U32::new(0x1f),
        length: U64::new(RAM),
        pages: list(0, 256),
        ..Default::default()
    };
    let key = machine.request(cmd::MR_REG, 1, &all);
    let window = abi::MwAllocReq { r#type: U32::new(mw_type::TYPE2), ..Default::default() };
    machine.request(cmd::MW_ALLOC, 1, &window);
    let srq = abi::SrqCreateReq {
        entries: U32::new(16),
        max_wr: U32::new(16),
        max_sge: U32::new(4),
        limit: U32::new(1),
        log2_stride: 7,
        ring: list(SHARED, 1),
        ..Default::default()
    };
    let srqn = machine.request(cmd::SRQ_CREATE, 1, &srq);
    qpns.push(queue_pair(&mut machine, qpt::RC, (cqn, srqn), SHARERS));
    let av = abi::Av { dgid: GID, port_num: 1, flags: 1, hop_limit: 64, ..Default::default() };
    let handle = abi::AhCreateReq { av, ..Default::default() };
    let ah = machine.request(cmd::AH_CREATE, 1, &handle);
    let group = abi::McastReq { qpn: U32::new(qpns[3]), mgid: GROUP, ..Default::default() };
    machine.request(cmd::MCAST_ATTACH, 1, &group);
    arm_cq(&machine, arm::ANY);
    work(&machine, key, (qpns[3], ah));
    machine.shard.borrow_mut().poll(machine.now);
    Some((machine, qpns))
}

/// The first thing that is completed raises an event, for which there is no buffer.
fn arm_cq(machine: &Machine, what: u32) {
    let control = RINGS + 0xe000 + control_offset(CQ_BYTES);
    let fired = machine.ram.load_u32(control + abi::ctrl::FIRED as u64);
    let word = fired.wrapping_add(1) << arm::SEQ_SHIFT | what & arm::WHAT_MASK;
    machine.ram.store_u32(control + abi::ctrl::ARM as u64, word);
}

/// Long writes, a message that nobody receives, one that is received in pieces, datagrams.
fn work(machine: &Machine, key: u32, (ud, ah): (u32, u32)) {
    let sge = |n: u32, length: u32| abi::Sge {
        addr: U64::new(DATA + u64::from(n * ELEMENT)),
        length: U32::new(length),
        lkey: U32::new(key),
    };
    let long: Vec<abi::Sge> = (0..4).map(|n| sge(n, ELEMENT)).collect();
    let short = [sge(0, 64), sge(1, 32)];
    let wqe = |code: u8| abi::SqWqe {
        wr_id: U64::new(code.into()),
        opcode: code,
        flags: send_flags::SIGNALED,
        remote_addr: U64::new(DATA),
        rkey: U32::new(key),
        ..Default::default()
    };
    let datagram =
        abi::SqWqe { arg0: U64::new(ah.into()), rkey: U32::new(ud), ..wqe(opcode::SEND) };
    let sends: [(u64, u64, abi::SqWqe, &[abi::Sge]); 5] = [
        (RINGS, 0, wqe(opcode::RDMA_WRITE), &long),
        (RINGS + 0x2000, 2, wqe(opcode::SEND), &short),
        (RINGS + 0x4000, 4, wqe(opcode::RDMA_WRITE_WITH_IMM), &short),
        (RINGS + 0x6000, 6, datagram, &short),
        (SHARERS, 9, wqe(opcode::SEND), &long),
    ];
    for (ring, doorbell, mut wqe, sges) in sends {
        wqe.num_sge = U16::new(u16::try_from(sges.len()).unwrap_or_default());
        for slot in 0..8 {
            machine.ram.write(ring + 128 * slot, &[wqe.as_bytes(), sges.as_bytes()].concat());
        }
        machine.ram.store_u32(DOORBELLS + db::INDEX as u64 + 4 * doorbell, 8);
    }
    let receive = abi::RqWqe { wr_id: U64::new(9), num_sge: U16::new(4), ..Default::default() };
    for (ring, doorbell) in [(RINGS + 0x5000, 5), (RINGS + 0x7000, 7), (SHARED, 8)] {
        for slot in 0..8 {
            machine.ram.write(ring + 128 * slot, &[receive.as_bytes(), long.as_bytes()].concat());
        }
        machine.ram.store_u32(DOORBELLS + db::INDEX as u64 + 4 * doorbell, 8);
    }
    machine.ram.store_u8(DOORBELLS + db::SUMMARY as u64, 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Fault;
    use crate::nic::saved::BadState;

    /// The scene is worth something: there is one of everything, and work is under way.
    #[test]
    fn what_is_saved_is_busy() {
        let (machine, qpns) = busy().unwrap();
        let saved = machine.shard.borrow_mut().save(machine.nic).unwrap();
        let text = format!("{saved:#?}");
        assert_eq!(qpns.len(), 5);
        for part in [
            // The long write, half done, and the message that is received half.
            "done: 131072",
            "arrived: 131072",
            // The message that nobody receives, and who is told when somebody does.
            "wait: Receiver(",
            "waiter: Some(",
            "SavedWindow {",
            "SavedAh {",
            "SavedSrq {",
            "kind: Rc",
            "kind: Uc",
            "kind: Ud",
            "event_pending: true",
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(!text.contains("state: Sqe") && !text.contains("state: Err"), "{text}");
    }

    /// What the target found: a number makes a table with all slots below it, and a counter that is
    /// about to overflow is added to.
    #[test]
    fn numbers_that_cost_more_than_they_say_are_refused() {
        let (machine, _) = busy().unwrap();
        let body = saved_by(&machine).unwrap();
        let room = BadState::Memory(Fault::Room);
        let mut left = vec![
            ("pds: [(16777215", room.clone()),
            ("ahs: [(16777215", room),
            ("tx_bytes: 9223372036854775808", BadState::Content("a counter")),
        ];
        for at in 0..body.len() {
            for number in [(1 << 24) - 1, 1 << 63] {
                let mut bent = body.clone();
                replace_number(&mut bent, at, number);
                let Ok(saved) = postcard::from_bytes::<SavedNic>(&bent) else { continue };
                let text = format!("{saved:?}");
                let Some(found) = left.iter().position(|(part, _)| text.contains(part)) else {
                    continue;
                };
                let (mut other, nic) = shard(&QueueLayout::new(4, 2).unwrap());
                let loaded = other.load(nic, saved, machine.space.clone());
                let (part, why) = left.remove(found);
                assert_eq!(loaded, Err(why), "{part}");
            }
        }
        assert!(left.is_empty(), "never tried: {left:?}");
    }
}
