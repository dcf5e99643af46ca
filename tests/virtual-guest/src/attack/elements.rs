//! Many elements that say little: work that the bytes of a message do not tell of.

use super::{Attack, Ground, Pump, Pumps, Strike, alone, rc, with_ram};
use crate::pages::PageList;
use crate::qp::SendWr;
use crate::rings::Sge;
use crate::spec::access;

pub(super) const ALL: &[Attack] = &[
    Attack::new("elements", "16 QPs, 64 writes each, 32 elements of a byte each", write),
    Attack::new("elements_cold", "the same, each in another of 60 000 regions", cold).within(48),
    Attack::new("elements_read", "16 QPs, 64 reads each, scattered to 32 elements of a byte", read),
    Attack::new("elements_empty", "16 QPs, 64 writes each, 32 elements of no byte", empty),
];

const QPS: usize = 16;
const ENTRIES: u32 = 64;
const SGES: u32 = 32;

/// A prime, so that neighbours in a request are no neighbours in any table.
const STRIDE: usize = 7919;

fn write(ground: &Ground<'_>) -> Box<dyn Strike> {
    one_byte_elements(ground, 1)
}

fn cold(ground: &Ground<'_>) -> Box<dyn Strike> {
    one_byte_elements(ground, ground.sized(60_000, 2000))
}

fn one_byte_elements(ground: &Ground<'_>, regions: usize) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(48));
    let target = node.mr(64);
    let page = node.guest.ram().alloc(1);
    let list = PageList::contiguous(page.gpa(0), 1, 0, 12);
    let keys: Vec<u32> = (0..regions)
        .map_while(|_| Some(node.ctx.mr_reg(node.pdn, access::ALL, (0, 4096), &list).ok()?.0))
        .collect();
    let element = |n: usize| Sge {
        addr: (n * 61 % 4096) as u64,
        length: 1,
        lkey: keys[n * STRIDE % keys.len()],
    };
    let pump = |qp: usize| {
        Pump::new(alone(&node, &rc(ENTRIES, SGES as u16), 64), ENTRIES, |i| {
            let first = (qp * ENTRIES as usize + i as usize) * SGES as usize;
            let sges: Vec<Sge> = (first..first + SGES as usize).map(element).collect();
            SendWr::write(u64::from(i), &sges, target.addr(0), target.rkey)
        })
    };
    let pumps = Pumps((0..QPS).map(pump).collect());
    Box::new(Kept(pumps, page))
}

/// Pumps, and the memory that they work on.
struct Kept<T>(Pumps, T);

impl<T: Send> Strike for Kept<T> {
    fn strike(&mut self) {
        self.0.strike();
    }
}

fn pumps(
    ground: &Ground<'_>,
    make: impl Fn(&crate::control::Mr, u32) -> SendWr,
) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(32));
    let target = node.mr(4096);
    let pump = |_| {
        let end = alone(&node, &rc(ENTRIES, SGES as u16), 64);
        Pump::new(end, ENTRIES, |i| make(&target, i))
    };
    Box::new(Kept(Pumps((0..QPS).map(pump).collect()), target.clone()))
}

fn read(ground: &Ground<'_>) -> Box<dyn Strike> {
    pumps(ground, |mr, i| {
        let sges: Vec<Sge> = (0..SGES).map(|n| mr.sge(u64::from(n) * 100, 1)).collect();
        SendWr::read(u64::from(i), &sges, mr.addr(0), mr.rkey)
    })
}

fn empty(ground: &Ground<'_>) -> Box<dyn Strike> {
    pumps(ground, |mr, i| {
        let sges: Vec<Sge> = (0..SGES).map(|n| mr.sge(u64::from(n) * 100, 0)).collect();
        SendWr::write(u64::from(i), &sges, mr.addr(0), mr.rkey)
    })
}
