//! Page lists that lie, and memory that is not what it was.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;
use virtual_guest::backing::rules;
use virtual_guest::guest::GuestConfig;
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::{PAGE, access, err, status};
use virtual_guest::world::{Door, Node};

use crate::DOOR;
use crate::scene::{Scene, case, case_within, hasty};

pub(crate) const PLUGGED: u64 = 0x2_0000_0000;

pub(crate) fn list(addr: u64, npages: u32, offset: u32, page_shift: u8, levels: u8) -> PageList {
    let mut list = PageList::contiguous(addr, npages, offset, page_shift);
    list.levels = levels;
    list
}

#[test]
fn page_lists_that_lie_are_refused() {
    case(|scene| {
        let node = scene.villain();
        let base = node.guest.ram().regions()[0].gpa();
        let size = node.guest.ram().regions()[0].size();
        let root = node.guest.ram().alloc(1);
        let page = root.gpa(0);
        // Every entry of the list page is the list page itself.
        (0..512).for_each(|n| root.view(0, PAGE).store64(8 * n, page, Ordering::Relaxed));
        let reg = |iova, length, list: &PageList| {
            let answer = node.ctx.mr_reg(node.pdn, access::ALL, (iova, length), list);
            answer.map(|(lkey, _)| lkey).map_err(|e| e.status().expect("a status"))
        };
        let cases: [(&str, u64, u64, PageList, u32); 20] = [
            ("more pages than a level holds", 0, 4096, list(page, 513, 0, 12, 1), err::INVAL),
            ("than two hold", 0, 4096, list(page, (1 << 18) + 1, 0, 12, 2), err::INVAL),
            ("than three hold", 0, 4096, list(page, (1 << 27) + 1, 0, 12, 3), err::INVAL),
            ("outside memory", 0, 4096, list(0xdead_0000_0000, 1, 0, 12, 0), err::FAULT),
            ("half outside memory", 0, 8192, list(base + size - PAGE, 2, 0, 12, 0), err::FAULT),
            ("not aligned", 0, 4096, list(base + 8, 1, 0, 12, 0), err::FAULT),
            ("at the end of addresses", 0, 8192, list(!0xfff, 2, 0, 12, 0), err::FAULT),
            ("a list page outside", 0, 4096, list(0xdead_0000_0000, 1, 0, 12, 1), err::FAULT),
            ("a list page not aligned", 0, 4096, list(page + 8, 1, 0, 12, 2), err::FAULT),
            ("no pages", 0, 4096, list(base, 0, 0, 12, 0), err::INVAL),
            ("too few pages", 0, 8192, list(base, 1, 0, 12, 0), err::INVAL),
            ("an offset beyond the page", 0, 4096, list(base, 2, 4096, 12, 0), err::INVAL),
            ("pages of 2^255 bytes", 0, 4096, list(base, 1, 0, 255, 0), err::INVAL),
            ("pages of a byte", 0, 1, list(base, 1, 0, 0, 0), err::INVAL),
            ("200 levels", 0, 4096, list(page, 1, 0, 12, 200), err::INVAL),
            ("length 2^64-1", 0, u64::MAX, list(base, u32::MAX, 0, 30, 0), err::INVAL),
            ("iova and length wrap", u64::MAX - 10, 4096, list(base, 1, 0, 12, 0), err::INVAL),
            ("longer than the guest", 0, size + PAGE, list(page, u32::MAX, 0, 12, 4), err::NOMEM),
            ("2^32-1 pages of a GiB", 0, 8 * size, list(base, u32::MAX, 0, 30, 0), err::NOMEM),
            ("longer than any", 0, 17 * size, list(base, u32::MAX, 0, 30, 0), err::INVAL),
        ];
        for (what, iova, length, list, expected) in cases {
            // What a process names is contiguous [PDEV-MEM-3].
            let flat = DOOR == Door::Monitor || list.levels == 0;
            let expected = if flat { expected } else { err::INVAL };
            assert_eq!(scene.during(|| reg(iova, length, &list)), Err(expected), "{what}");
        }
        if DOOR == Door::Process {
            return;
        }
        // A list that is its own list page: the same page over and over, which is a guest's own
        // affair. All levels, and the whole guest.
        let size = if rules().regions_are_mapped { 8 << 20 } else { size };
        for levels in 1..=4 {
            let pages = 512u64.pow(levels.into()).min(u32::MAX.into());
            let all = list(page, pages as u32, 0, 12, levels);
            let lkey = scene.during(|| reg(0, size.min(pages * PAGE), &all));
            let lkey = lkey.unwrap_or_else(|status| {
                panic!("its own pages, if many times the same, {levels} levels: status {status}")
            });
            node.ctx.dereg(lkey).expect("MR_DEREG");
        }
    });
}

/// Plugs memory in and registers all of it.
pub(crate) fn plugged(node: &Node, size: u64) -> virtual_guest::control::Mr {
    node.guest.add_memory(PLUGGED, size).expect("ADD_MEM_REG");
    let buf = Arc::new(Buf::contiguous_in(node.guest.ram(), PLUGGED, size));
    node.ctx.register(node.pdn, buf, access::ALL).expect("MR_REG")
}

#[test]
fn memory_removed_under_a_region_in_traffic_ends_the_access() {
    case(|scene| {
        let node = scene.villain();
        for _ in 0..10 {
            let mr = plugged(&node, 2 << 20);
            let mut end = node.rc();
            end.qp.connect(end.address(), &hasty()).expect("to itself");
            for n in 0..60 {
                let half = mr.sge(0, 1 << 20);
                end.qp.queue_send(&SendWr::write(n, &[half], mr.addr(1 << 20), mr.rkey));
            }
            end.qp.ring_sq();
            scene.during(|| node.guest.remove_memory(PLUGGED).expect("REM_MEM_REG"));
            let mut last = status::SUCCESS;
            while last == status::SUCCESS {
                match end.scq.wait(Duration::from_millis(500)) {
                    Some(cqe) => last = cqe.status,
                    None => break,
                }
            }
            let expected = [status::SUCCESS, status::LOC_PROT_ERR, status::REM_ACCESS_ERR];
            let own = rules().own_error(last, status::REM_ACCESS_ERR);
            assert!(own || expected.contains(&last), "status {last}");
            node.ctx.dereg(mr.lkey).expect("MR_DEREG");
        }
    });
}

#[test]
fn holes_in_memory_are_zeroes_or_what_was_pinned() {
    case(|scene| {
        let node = scene.villain();
        let mr = plugged(&node, 2 << 20);
        let mut end = node.rc();
        end.qp.connect(end.address(), &Path::default()).expect("to itself");
        let back = node.area(64);
        let region = node.guest.ram().regions()[1].clone();
        scene.during(|| {
            for n in 0..200 {
                mr.view().fill(0, PAGE, 0x77);
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(region.fd(), punch, 0, 2 << 20).expect("a hole");
                end.run_ok(&SendWr::read(n, &[back.sge()], mr.addr(0), mr.rkey));
                let kept = if rules().memory_is_pinned { 0x77 } else { 0 };
                if rules().moves_data {
                    assert_eq!(back.bytes(), [kept; 64]);
                }
            }
        });
    });
}

/// `fd` as a second piece of memory; whether it is taken.
fn offer(node: &Node, fd: &OwnedFd, size: u64) -> bool {
    if DOOR == Door::Process {
        return node.guest.process().add_memory((PLUGGED, size, 0), fd.as_fd()).is_ok();
    }
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: PLUGGED,
        memory_size: size,
        userspace_addr: 0x7000_0000_0000,
        mmap_offset: 0,
        mmap_handle: fd.as_raw_fd(),
    };
    node.guest.front(|f| f.add_mem_region(&region).map(drop)).is_ok()
}

fn memfd(flags: MemfdFlags, size: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("villain", MemfdFlags::CLOEXEC | flags).expect("memfd");
    rustix::fs::ftruncate(&fd, size).expect("room");
    fd
}

#[test]
fn descriptors_that_are_no_memory_are_refused() {
    const SIZE: u64 = 1 << 20;
    let open = |path: &str| OwnedFd::from(File::open(path).expect(path));
    let sealed = memfd(MemfdFlags::ALLOW_SEALING, SIZE);
    rustix::fs::fcntl_add_seals(&sealed, SealFlags::WRITE).expect("seals");
    let (pipe, _other) = std::io::pipe().expect("a pipe");
    let cases: Vec<(&str, OwnedFd)> = vec![
        ("a file on a disk", virtual_guest::attack::on_disk(SIZE).into()),
        ("a file that is too short", memfd(MemfdFlags::empty(), SIZE - PAGE)),
        ("a file that may not be written", sealed),
        ("a device", open("/dev/zero")),
        ("a directory", open("/")),
        ("a file of procfs", open("/proc/self/status")),
        ("a pipe", pipe.into()),
        ("a socket", std::os::unix::net::UnixDatagram::unbound().expect("a socket").into()),
        (
            "an eventfd",
            rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("it"),
        ),
    ];
    for (what, fd) in cases {
        case(|scene| {
            let node = scene.villain();
            assert!(!scene.during(|| offer(&node, &fd, SIZE)), "{what} was taken");
            scene.others_go_on();
        });
    }
}

#[test]
fn memory_with_seals_against_shrinking_is_taken() {
    case(|scene| {
        let node = scene.villain();
        let fd = memfd(MemfdFlags::ALLOW_SEALING, 1 << 20);
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
        assert!(offer(&node, &fd, 1 << 20));
        node.guest.works();
    });
}

/// Each change of the memory map looks at every object and every piece of memory that it lies in.
#[test]
fn hundreds_of_pieces_of_memory_under_hundreds_of_objects_hold_nobody_up() {
    case_within(24 << 20, |scene| {
        let config = GuestConfig { memory_table: false, ..GuestConfig::default() };
        let node = scene.villain_with(config);
        // With gaps between them each is a region of its own; a process has few, and a list of its
        // pages has no gaps.
        let (pieces, step) = match DOOR {
            Door::Monitor => (200u64, 2 * PAGE),
            Door::Process => (60, PAGE),
        };
        for n in 0..pieces {
            node.guest.add_memory(PLUGGED + n * step, PAGE).expect("ADD_MEM_REG");
        }
        let gpas: Vec<u64> = (0..pieces).map(|n| PLUGGED + n * step).collect();
        let all = match DOOR {
            Door::Monitor => PageList::tree(node.guest.ram(), &gpas, 0, 12, 1),
            Door::Process => PageList::contiguous(PLUGGED, pieces as u32, 0, 12),
        };
        // 200 mappings each, where they are mapped.
        let regions = if rules().regions_are_mapped { 60 } else { 400 };
        for _ in 0..regions {
            node.ctx
                .mr_reg(node.pdn, access::ALL, (0, pieces * PAGE), &all)
                .expect("a region over all pieces");
        }
        scene.during(|| {
            for n in 0..20 {
                node.guest.remove_memory(PLUGGED + n * step).expect("REM_MEM_REG");
            }
        });
        node.guest.works();
    });
}

/// Punches holes into a region until told to stop.
fn punch(file: &File, size: u64, step: u64, stop: &AtomicBool) -> u64 {
    let mut holes = 0;
    while !stop.load(Ordering::Relaxed) {
        for at in (0..size).step_by(step as usize) {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, how, at, step).expect("a hole");
            holes += 1;
        }
    }
    holes
}

/// Runs requests whose every element lies in a page of its own, while these pages are taken away.
fn holes(scene: &Scene, size: u64, page: u64, step: u64) {
    let node = scene.villain();
    node.guest.add_memory(PLUGGED, size).expect("ADD_MEM_REG");
    let buf = Arc::new(Buf::contiguous_in(node.guest.ram(), PLUGGED, size));
    let mr = node.ctx.register(node.pdn, buf, access::ALL).expect("MR_REG");
    let plugged = node.guest.ram().regions()[1].clone();
    let file = File::from(plugged.fd().try_clone_to_owned().expect("dup"));
    let mut end = node.rc();
    end.qp.connect(end.address(), &Path::default()).expect("to itself");
    let word = node.area(8);
    let stop = AtomicBool::new(false);
    let (rounds, holes) = std::thread::scope(|scope| {
        let puncher = scope.spawn(|| punch(&file, size, step, &stop));
        let rounds = scene.during(|| {
            let (begin, mut rounds) = (Instant::now(), 0);
            while begin.elapsed() < Duration::from_secs(2) {
                for at in (0..size).step_by(page as usize).take(32) {
                    let write = SendWr::write(at, &[], mr.addr(at), mr.rkey).inline(&[7; 8]);
                    end.qp.queue_send(&write);
                }
                end.qp.ring_sq();
                let posted = (size / page).min(32);
                (0..posted).for_each(|_| assert_eq!(end.scq.ok().status, 0));
                rounds += 1;
            }
            rounds
        });
        stop.store(true, Ordering::Relaxed);
        (rounds, puncher.join().expect("the puncher"))
    });
    assert!(rounds > 0 && holes > 0, "{rounds} rounds, {holes} holes");
    end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    node.guest.works();
}

#[test]
fn small_holes_under_requests_cost_their_own_guest_only() {
    case_within(24 << 20, |scene| holes(scene, 4 << 20, PAGE * 7, 64 << 10));
}
