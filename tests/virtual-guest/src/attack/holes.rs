//! Memory whose first touch takes long: holes of 4 KiB and of 2 MiB, and holes that are being made.
//!
//! A hole costs its toucher the allocation and the clearing of a page, and a wait for whoever
//! changes the file at that moment. The toucher here is the daemon: each request has elements of a
//! byte, each in another page.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate};

use super::{Attack, Ground, Strike, alone, breathe, rc, with_ram};
use crate::guest::GuestConfig;
use crate::pages::PageList;
use crate::qp::SendWr;
use crate::ram::{Ram, Region};
use crate::rings::Sge;
use crate::spec::access;
use crate::world::{End, Node};

pub(super) const ALL: &[Attack] = &[
    Attack::new("holes", "elements of a byte in holes of 4 KiB", small_holes).blocking(),
    Attack::new("cold_writes", "writes of 1 MiB into holes of 4 KiB", cold_writes).blocking(),
    Attack::new("punching", "holes in 1 GiB that is being punched meanwhile", punching).blocking(),
    Attack::new("cuts", "memory that is cut off under writes, and given anew", cuts)
        .by_processes()
        .blocking(),
    Attack::new("huge_holes", "elements of a byte in holes of 2 MiB", huge_holes)
        .blocking()
        .beside("own_holes"),
    Attack::new("hugetlb_holes", "elements of a byte in holes of huge pages", hugetlb_holes)
        .blocking()
        .beside("own_holes"),
    Attack::new("own_holes", "the same holes, filled by the villain's own CPU", own_holes)
        .by_monitors(),
];

const PLUGGED: u64 = 0x2_0000_0000;
const SHIFT_2M: u8 = 21;
const SGES: usize = 32;
/// A request that was not answered for so long is the device's affair.
const PATIENCE: Duration = Duration::from_secs(20);

/// A villain with a file for memory that is registered as a whole.
struct Sparse {
    _node: Node,
    end: End,
    region: Arc<Region>,
    lkey: u32,
    rkey: u32,
    size: u64,
}

impl Sparse {
    fn new(ground: &Ground<'_>, size: u64, file: OwnedFd) -> Self {
        let node = ground.villain(GuestConfig { memory_table: false, ..with_ram(16) });
        let region = node.guest.add_file(PLUGGED, size, file).expect("ADD_MEM_REG");
        let list = PageList::contiguous(PLUGGED, (size >> SHIFT_2M) as u32, 0, SHIFT_2M);
        let (lkey, rkey) =
            node.ctx.mr_reg(node.pdn, access::ALL, (0, size), &list).expect("MR_REG");
        let end = alone(&node, &rc(64, SGES as u16), 128);
        Self { end, region, lkey, rkey, size, _node: node }
    }

    /// Makes a hole of all of it.
    fn punch(&self) {
        punch(&self.region, self.size);
    }

    /// Posts requests whose elements lie `step` apart; as many as there is memory for, or room.
    fn touch(&mut self, step: u64) -> u32 {
        let elements = (self.size / step).min(64 * SGES as u64) as usize;
        let requests = elements / SGES;
        for n in 0..requests {
            let sge = |i: usize| Sge {
                // The first page is the target of all.
                addr: self.size - step * (n * SGES + i + 1) as u64 + 8,
                length: 1,
                lkey: self.lkey,
            };
            let sges: Vec<Sge> = (0..SGES).map(sge).collect();
            // A READ writes to the elements, which a hole must be filled for.
            self.end.qp.queue_send(&SendWr::read(n as u64, &sges, 0, self.rkey));
        }
        self.end.qp.ring_sq();
        requests as u32
    }

    fn settle(&mut self, due: u32) {
        settle(&mut self.end, due);
    }
}

/// Waits for so many completions. Failed ones end the queue pair: it begins anew.
fn settle(end: &mut End, mut due: u32) {
    let begin = std::time::Instant::now();
    while due > 0 && begin.elapsed() < PATIENCE {
        match end.scq.poll() {
            Some(cqe) if cqe.status == 0 => due -= 1,
            Some(_) => {
                let _state = end.qp.reset(&[&end.scq]);
                let _state = end.qp.connect(end.address(), &super::Path::default());
                return;
            }
            None => breathe(),
        }
    }
}

fn punch(region: &Region, size: u64) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(region.fd(), flags, 0, size).expect("a hole");
}

/// Huge pages of the host's pool that nobody has (proc(5), /proc/meminfo).
fn free_huge_pages() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    free.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// A file of the host's huge pages; where it has too few, one on a tmpfs that does as well as it
/// can.
fn hugetlb_file(size: u64) -> OwnedFd {
    let (free, wanted) = (free_huge_pages(), size >> SHIFT_2M);
    if free < wanted {
        println!("{free} huge pages of {wanted} are free; tmpfs with huge=always in their place");
        return huge_file(size);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let fd = rustix::fs::memfd_create("villain", flags).expect("memfd");
    ftruncate(&fd, size).expect("its size");
    fd
}

fn memfd(size: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("villain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .expect("memfd");
    ftruncate(&fd, size).expect("its size");
    fd
}

/// A file on a tmpfs of its own, whose pages are as large as can be. The mount is in a namespace
/// that ends at once; the file goes on.
fn huge_file(size: u64) -> OwnedFd {
    const MADE: &str = "mount -t tmpfs -o huge=always villain /mnt && : > /mnt/memory && echo made \
                        && read end";
    let mut maker = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", MADE])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("unshare (util-linux) runs");
    let mut said = [0; 4];
    let made = maker.stdout.take().is_some_and(|mut out| out.read_exact(&mut said).is_ok());
    let path = format!("/proc/{}/root/mnt/memory", maker.id());
    let file = File::options().read(true).write(true).open(path);
    drop(maker.stdin.take());
    let _ended = maker.wait();
    assert!(made, "no tmpfs with huge pages, which takes CAP_SYS_ADMIN");
    let file = file.expect("the file on it");
    file.set_len(size).expect("its size");
    file.into()
}

fn small_holes(ground: &Ground<'_>) -> Box<dyn Strike> {
    let size = 64 << 20;
    let mut sparse = Sparse::new(ground, size, memfd(size));
    Box::new(move || {
        sparse.punch();
        let due = sparse.touch(4096);
        sparse.settle(due);
    })
}

fn cold_writes(ground: &Ground<'_>) -> Box<dyn Strike> {
    let size = 64 << 20;
    let mut sparse = Sparse::new(ground, size, memfd(size));
    Box::new(move || {
        sparse.punch();
        for n in 1..33u64 {
            let from = Sge { addr: 0, length: 1 << 20, lkey: sparse.lkey };
            sparse.end.qp.queue_send(&SendWr::write(n, &[from], n << 20, sparse.rkey));
        }
        sparse.end.qp.ring_sq();
        sparse.settle(32);
    })
}

fn punching(ground: &Ground<'_>) -> Box<dyn Strike> {
    let size = ground.sized(1 << 30, 64 << 20);
    let mut sparse = Sparse::new(ground, size, memfd(size));
    Box::new(move || {
        // Pages that are there make it long.
        fallocate(sparse.region.fd(), FallocateFlags::KEEP_SIZE, 0, size).expect("memory");
        let due = sparse.touch(size / 2048 / 4096 * 4096);
        sparse.punch();
        sparse.settle(due);
    })
}

/// The last page of a file goes, and all that the device has touched before it with it.
fn cuts(ground: &Ground<'_>) -> Box<dyn Strike> {
    let size = ground.sized(64 << 20, 8 << 20);
    let node = ground.villain(with_ram(16));
    let file = memfd(size);
    let mut end = alone(&node, &rc(64, 1), 128);
    Box::new(move || {
        let process = node.guest.process();
        ftruncate(&file, size).expect("its size");
        process.add_memory((PLUGGED, size, 0), file.as_fd()).expect("memory");
        let list = PageList::contiguous(PLUGGED, (size >> 12) as u32, 0, 12);
        let (lkey, rkey) =
            node.ctx.mr_reg(node.pdn, access::ALL, (0, size), &list).expect("MR_REG");
        let part = |at: u64| Sge { addr: at, length: 1 << 20, lkey };
        for at in (0..size).step_by(1 << 20) {
            let to = (at + (1 << 20)) % size;
            end.qp.queue_send(&SendWr::write(at, &[part(at)], to, rkey));
        }
        end.qp.ring_sq();
        // Before they are all done, or behind them.
        breathe();
        ftruncate(&file, size - 4096).expect("its end goes");
        let last = part(size - (1 << 20));
        end.qp.queue_send(&SendWr::write(1, &[last], size - (1 << 20), rkey));
        end.qp.ring_sq();
        settle(&mut end, (size >> 20) as u32 + 1);
        node.ctx.dereg(lkey).expect("MR_DEREG");
        // Gone by itself, as soon as it is missed.
        let _gone = process.remove_memory(PLUGGED, size);
    })
}

fn huge_holes(ground: &Ground<'_>) -> Box<dyn Strike> {
    let size = ground.sized(1 << 30, 256 << 20);
    let mut sparse = Sparse::new(ground, size, huge_file(size));
    Box::new(move || {
        let due = sparse.touch(2 << 20);
        sparse.settle(due);
        sparse.punch();
    })
}

/// As [`huge_holes`]: a page of the pool comes cleared, and goes back to it when it is punched out.
fn hugetlb_holes(ground: &Ground<'_>) -> Box<dyn Strike> {
    let size = 128 << 20;
    let mut sparse = Sparse::new(ground, size, hugetlb_file(size));
    Box::new(move || {
        let due = sparse.touch(2 << 20);
        sparse.settle(due);
        sparse.punch();
    })
}

/// No attack on the device, which sees nothing of it: what the host's memory costs a neighbour,
/// whoever clears its pages. What rows of holes cost beyond this is the device's.
fn own_holes(_: &Ground<'_>) -> Box<dyn Strike> {
    let size = 128 << 20;
    let ram = Ram::new(0, 4096).expect("memory");
    let region = ram.add_file(PLUGGED, size, hugetlb_file(size)).expect("the file");
    let memory = ram.view(PLUGGED, size);
    Box::new(move || {
        for page in 0..size >> SHIFT_2M {
            memory.store64(page << SHIFT_2M, 1, Ordering::Relaxed);
        }
        punch(&region, size);
    })
}
