//! Memory that a program has made itself and may cut off at any time: memfds and files of tmpfs
//! without seals, huge pages.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use virtual_guest::pages::PageList;
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::{Put, access, cmd, err, status as wc};
use virtual_guest::world::{End, Node, pattern};

use crate::owners::sealed;
use crate::scene::{Scene, status};

/// Where such memory lies for the process.
const AT: u64 = 0x2_0000_0000;
const PAGE: u64 = 4096;
const SOON: Duration = Duration::from_secs(20);

fn memfd(len: u64) -> File {
    let file = memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, len).unwrap();
    file.into()
}

/// A file on tmpfs that nobody can seal: what shm_open(3) makes.
fn shm(len: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(len).unwrap();
    file
}

fn register(node: &Node, at: u64, len: u64) -> virtual_guest::guest::Result<(u32, u32)> {
    let list = PageList::contiguous(at, len.div_ceil(PAGE) as u32, 0, 12);
    node.ctx.mr_reg(node.pdn, access::ALL, (at, len), &list)
}

fn pair(a: &Node, b: &Node) -> (End, End) {
    let (a, b) = (a.rc(), b.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    (a, b)
}

fn bytes(file: &File, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

/// Writes to such memory and reads from it, by a peer.
fn exchange(scene: &Scene, file: &File, (offset, len): (u64, u64)) {
    let (mut a, b) = pair(&scene.red(), &scene.blue());
    let whole = len.next_multiple_of(PAGE);
    b.node.guest.process().add_memory((AT, whole, offset), file.as_fd()).unwrap();
    let (_, rkey) = register(&b.node, AT, len).unwrap();
    let data = pattern(len, len as usize);
    let (from, to) = (a.node.area_of(&data), a.node.area(len));
    a.run_ok(&SendWr::write(1, &[from.sge()], AT, rkey));
    assert!(bytes(file, offset, len) == data, "what arrived is in the file");
    let back = pattern(len + 1, len as usize);
    file.write_all_at(&back, offset).unwrap();
    a.run_ok(&SendWr::read(2, &[to.sge()], AT, rkey));
    assert!(to.bytes() == back, "what is in the file is read");
    let result = a.node.area(8);
    file.write_all_at(&40u64.to_le_bytes(), offset).unwrap();
    a.run_ok(&SendWr::faa(3, result.sge(), (AT, rkey), 2));
    assert_eq!(bytes(file, offset, 8), 42u64.to_le_bytes());
}

#[test]
fn shared_memory_without_seals_is_reached_as_it_is() {
    let scene = Scene::new();
    exchange(&scene, &memfd(64 << 10), (0, 64 << 10));
    exchange(&scene, &memfd(64 << 10), (2 * PAGE, 3 * PAGE));
    exchange(&scene, &shm(64 << 10), (PAGE, 15 * PAGE));
    // Programs rarely choose lengths by the page, and the last page is there as a whole.
    exchange(&scene, &shm(10_000), (0, 10_000));
    exchange(&scene, &memfd(10_000), (PAGE, 10_000 - PAGE));
    let beyond = scene.blue();
    let process = beyond.guest.process();
    let refused = process.add_memory((AT, 4 * PAGE, 0), shm(10_000).as_fd());
    assert_eq!(status(refused), err::INVAL, "a page that is not there");
}

/// Memory is cut off under a region: its requests fail from then on. The process, its other
/// regions, other processes of the NIC and the NIC go on.
#[test]
fn memory_that_is_cut_off_costs_its_regions_and_nothing_else() {
    let scene = Scene::new();
    let (red, blue) = (scene.red(), scene.blue());
    let (mut c, d) = pair(&scene.blue(), &scene.blue());
    let process = blue.guest.process();
    for (file, at) in [(memfd(4 << 20), AT), (shm(4 << 20), AT + (1 << 30))] {
        process.add_memory((at, 4 << 20, 0), file.as_fd()).unwrap();
        let (lkey, rkey) = register(&blue, at, 4 << 20).unwrap();
        let data = pattern(at, 8192);
        let from = red.area_of(&data);
        let write = |rkey: u32| SendWr::write(1, &[from.sge()], at + (1 << 20), rkey);
        let (mut a, _b) = pair(&red, &blue);
        a.run_ok(&write(rkey));
        file.set_len(PAGE).unwrap();
        // What finds it gone may end well or not; what comes later does not.
        let begin = Instant::now();
        loop {
            match a.run(&write(rkey)).status {
                wc::SUCCESS => assert!(begin.elapsed() < SOON, "it is never missed"),
                status => break assert_eq!(status, wc::REM_ACCESS_ERR),
            }
        }
        // It is as if the process had taken it back, and it can be given anew.
        assert_eq!(status(process.remove_memory(at, 4 << 20)), err::NOENT);
        blue.ctx.dereg(lkey).unwrap();
        assert_eq!(file.metadata().unwrap().len(), PAGE);
        file.set_len(4 << 20).unwrap();
        process.add_memory((at, 4 << 20, 0), file.as_fd()).unwrap();
        let (_, rkey) = register(&blue, at, 4 << 20).unwrap();
        let (mut a, mut b) = pair(&red, &blue);
        a.run_ok(&write(rkey));
        assert_eq!(bytes(&file, 1 << 20, 8192), data);
        // The process's other memory is what it was.
        let (own, there) = (blue.area_of(&data), red.area(8192));
        b.run_ok(&SendWr::write(2, &[own.sge()], there.addr(0), there.rkey()));
        assert_eq!(there.bytes(), data);
        let (from, to) = (c.node.area_of(&data), d.node.area(8192));
        c.run_ok(&SendWr::write(3, &[from.sge()], to.addr(0), to.rkey()));
        assert_eq!(to.bytes(), data, "another process of the NIC");
    }
    assert_eq!(scene.world.daemon.show_nic("blue")["session"], "driver_ready");
}

/// Holes are no loss: they are full of zeroes, as for whoever else has the file.
#[test]
fn memory_with_holes_is_read_as_zeroes() {
    let scene = Scene::new();
    let (mut a, b) = pair(&scene.red(), &scene.blue());
    let file = shm(1 << 20);
    b.node.guest.process().add_memory((AT, 1 << 20, 0), file.as_fd()).unwrap();
    let (_, rkey) = register(&b.node, AT, 1 << 20).unwrap();
    let (from, to) = (a.node.area_of(&[7; 4096]), a.node.area(4096));
    a.run_ok(&SendWr::write(1, &[from.sge()], AT, rkey));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 0, 1 << 20).unwrap();
    a.run_ok(&SendWr::read(2, &[to.sge()], AT, rkey));
    assert_eq!(to.bytes(), [0; 4096]);
    a.run_ok(&SendWr::write(3, &[from.sge()], AT, rkey));
    assert_eq!(bytes(&file, 0, 4096), [7; 4096]);
}

/// What the device itself rests on lies in memory that cannot be cut off.
#[test]
fn rings_and_doorbells_lie_in_memory_that_stays() {
    let scene = Scene::new();
    let node = scene.blue();
    let process = node.guest.process();
    process.add_memory((AT, 1 << 20, 0), memfd(1 << 20).as_fd()).unwrap();
    process.add_memory((AT + (1 << 30), 1 << 20, 0), sealed(1 << 20).as_fd()).unwrap();
    let ring = |at: u64| {
        let list = Put::new().u64(at).u32(2).u32(0).u8(12).zero(7).done(24);
        let head = Put::new().u32(16).u32(0).done(8);
        node.ctx.command(cmd::CQ_CREATE, &[head, list].concat(), 16)
    };
    let page = |at: u64| node.ctx.command(cmd::DB_PAGE_ADD, &at.to_le_bytes(), 8);
    assert_eq!(status(ring(AT)), err::FAULT);
    assert_eq!(status(page(AT)), err::FAULT);
    page(AT + (1 << 30)).unwrap();
    register(&node, AT, 1 << 20).unwrap();
    register(&node, AT + (1 << 30), 1 << 20).unwrap();
}

/// A file that only may be read, or is sealed against writing, is no memory of a device.
#[test]
fn memory_that_cannot_be_written_is_refused() {
    let scene = Scene::new();
    let node = scene.blue();
    let file = memfd(PAGE);
    let read_only = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
    let add = |file: &File| node.guest.process().add_memory((AT, PAGE, 0), file.as_fd());
    assert_eq!(status(add(&read_only.unwrap())), err::PERM);
    for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
        let file = memfd(PAGE);
        fcntl_add_seals(&file, seal).unwrap();
        assert_eq!(status(add(&file)), err::PERM, "{seal:?}");
    }
    add(&file).unwrap();
}

/// Huge pages that the host does not have are refused where they are registered, and cost nothing.
#[test]
fn huge_pages_are_memory_if_the_host_has_them() {
    const HUGE: u64 = 2 << 20;
    let scene = Scene::new();
    let (mut a, b) = pair(&scene.red(), &scene.blue());
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(file) = memfd_create("huge", flags) else {
        return println!("this kernel has no huge pages");
    };
    ftruncate(&file, HUGE).unwrap();
    let process = b.node.guest.process();
    assert_eq!(status(process.add_memory((AT, PAGE, 0), file.as_fd())), err::INVAL);
    process.add_memory((AT, HUGE, 0), file.as_fd()).unwrap();
    let from = a.node.area_of(&[5; 4096]);
    match register(&b.node, AT, HUGE) {
        Ok((_, rkey)) => {
            a.run_ok(&SendWr::write(1, &[from.sge()], AT + PAGE, rkey));
        }
        Err(refused) => {
            println!("the host has no huge page");
            assert_eq!(refused.status(), Some(err::NOMEM));
        }
    }
    let (own, there) = (b.node.area_of(&[6; 64]), a.node.area(64));
    let mut b = b;
    b.run_ok(&SendWr::write(2, &[own.sge()], there.addr(0), there.rkey()));
    assert_eq!(there.bytes(), [6; 64]);
}
