//! Memory that a VMM gives, takes and pulls away: descriptors, sizes, slots, holes, and the moments
//! between.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::pages::PageList;
use virtual_guest::spec::{self, PAGE, Put, access, err};
use virtual_guest::world::Node;

use crate::scene::{SOON, Scene, case, case_within};

const HUGE: u64 = 2 << 20;
const PLUGGED: u64 = 0x2_0000_0000;
/// Where the VMM says that it has what it plugs.
const VMM: u64 = 0x7000_0000_0000;

fn memfd(name: &str, flags: MemfdFlags, size: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | flags).expect("memfd");
    rustix::fs::ftruncate(&fd, size).expect("room");
    fd
}

/// A file of more huge pages of 2 MiB than the host has.
fn huge() -> (OwnedFd, u64) {
    let read = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    let size = (read("nr_hugepages") + read("nr_overcommit_hugepages") + 1) * HUGE;
    (memfd("villain-huge", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, size), size)
}

fn region(fd: &OwnedFd, start: u64, size: u64, offset: u64) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: start,
        memory_size: size,
        userspace_addr: VMM + start,
        mmap_offset: offset,
        mmap_handle: fd.as_raw_fd(),
    }
}

/// Has the daemon read a used ring at the end of the guest's memory at `start`.
fn look_at_ring(node: &Node, start: u64, size: u64) -> bool {
    let at = VMM + start;
    let data = VringConfigData {
        queue_max_size: 64,
        queue_size: 64,
        flags: 0,
        desc_table_addr: at,
        avail_ring_addr: at + 2048,
        used_ring_addr: at + size - PAGE,
        log_addr: None,
    };
    node.guest.front(|f| f.set_vring_addr(0, &data)).is_ok()
}

/// Mappings of the daemon that have `name` in their path.
fn mapped(scene: &Scene, name: &str) -> usize {
    let all = scene.world.daemon.mappings();
    all.iter().filter(|(path, _)| path.contains(name)).map(|(_, count)| count).sum()
}

#[track_caller]
fn soon_unmapped(scene: &Scene, name: &str) {
    let deadline = Instant::now() + SOON;
    while mapped(scene, name) > 0 {
        assert!(Instant::now() < deadline, "{:?}", scene.world.daemon.mappings());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn parts_of_huge_pages_are_refused() {
    case(|scene| {
        for (size, offset) in [(PAGE, 0), (HUGE - PAGE, 0), (HUGE, PAGE), (PAGE, HUGE - PAGE)] {
            let node = scene.villain();
            let (fd, _) = huge();
            let table = [region(&fd, 0, size, offset)];
            let taken = scene.during(|| node.guest.front(|f| f.set_mem_table(&table)).is_ok());
            if taken {
                look_at_ring(&node, 0, size);
            }
            scene.others_go_on();
            assert!(!taken, "{size} bytes at {offset} of a huge page");
        }
        soon_unmapped(scene, "villain-huge");
    });
}

#[test]
fn huge_pages_that_the_host_does_not_have_are_that_guests_affair() {
    case(|scene| {
        let node = scene.villain();
        let (fd, size) = huge();
        let table = [region(&fd, 0, size, 0)];
        scene.during(|| {
            node.guest.front(|f| f.set_mem_table(&table)).expect("memory like any other");
            // Its last page is one too many if the first ones are there.
            look_at_ring(&node, 0, size);
            for page in 0..size / HUGE {
                look_at_ring(&node, 0, (page + 1) * HUGE);
            }
        });
        scene.await_state("failed");
        drop(node);
        soon_unmapped(scene, "villain-huge");
        soon_unmapped(scene, "vanished-guest-memory");
    });
}

/// What a command names in huge pages comes when it is named, or the command fails and nothing
/// else.
#[test]
fn huge_pages_that_do_not_come_are_refused_where_they_are_named() {
    case(|scene| {
        let node = scene.villain();
        let (fd, size) = huge();
        let table = region(&fd, PLUGGED, size, 0);
        node.guest.front(|f| f.add_mem_region(&table)).expect("memory like any other");
        let list = PageList::contiguous(PLUGGED, (size / HUGE) as u32, 0, 21);
        for _ in 0..3 {
            let refused = node.ctx.mr_reg(node.pdn, access::ALL, (0, size), &list);
            assert_eq!(refused.map_err(|e| e.status()), Err(Some(err::NOMEM)));
        }
        node.guest.keepalive().expect("the NIC works");
        node.guest.front(|f| f.remove_mem_region(&table)).expect("it is there");
        node.guest.keepalive().expect("the NIC works");
    });
}

/// Each refusal, and each table of which only a part is refused, leaves nothing mapped.
#[test]
fn memory_that_is_refused_is_not_mapped() {
    case(|scene| {
        let (fd, _) = huge();
        let small = memfd("villain-small", MemfdFlags::empty(), 1 << 20);
        for _ in 0..20 {
            for table in [
                // The second overlaps the first.
                [region(&fd, 0, HUGE, 0), region(&small, HUGE - PAGE, 1 << 20, 0)],
                // The second is longer than its file.
                [region(&small, 0, 1 << 20, 0), region(&fd, PLUGGED, 1 << 40, 0)],
                [region(&small, 0, 1 << 20, 0), region(&fd, PLUGGED, PAGE, 0)],
            ] {
                let node = scene.villain();
                let refused = node.guest.front(|f| f.set_mem_table(&table));
                assert!(refused.is_err(), "a table whose second region makes no sense");
            }
        }
        scene.others_go_on();
        soon_unmapped(scene, "villain-");
    });
}

/// Files are sparse; addresses are the daemon's.
#[test]
fn memory_of_terabytes_takes_no_neighbours_addresses() {
    case(|scene| {
        let fd = memfd("villain-sparse", MemfdFlags::empty(), 1 << 46);
        for size in [1 << 46, 1 << 45] {
            let node = scene.villain();
            let plugged = node.guest.front(|f| f.add_mem_region(&region(&fd, PLUGGED, size, 0)));
            assert!(plugged.is_err(), "{size:#x} bytes of memory were taken");
        }
        let error = &scene.world.daemon.show_nic(&scene.place.name)["error"];
        assert!(error.to_string().contains("bytes of guest memory"), "{error}");
        soon_unmapped(scene, "villain-sparse");
    });
}

#[test]
fn every_slot_can_be_plugged_and_no_more() {
    case_within(24 << 20, |scene| {
        let config = GuestConfig { memory_table: false, ..GuestConfig::default() };
        let node = scene.villain_with(config);
        let slots = node.guest.front(|f| f.get_max_mem_slots()).expect("an answer");
        assert_eq!(slots, 509);
        let fd = memfd("villain-slots", MemfdFlags::empty(), PAGE);
        let at = |n: u64| region(&fd, PLUGGED + n * 2 * PAGE, PAGE, 0);
        let begin = Instant::now();
        scene.during(|| {
            for n in 1..slots {
                node.guest.front(|f| f.add_mem_region(&at(n))).expect("a slot");
            }
        });
        let took = begin.elapsed();
        assert!(took < SOON, "{slots} regions took {took:?}");
        node.guest.front(|f| f.remove_mem_region(&at(5))).expect("it is there");
        node.guest.front(|f| f.add_mem_region(&at(5))).expect("a slot again");
        node.guest.keepalive().expect("the NIC works");
        let more = node.guest.front(|f| f.add_mem_region(&at(slots)));
        assert!(more.is_err(), "one region too many was taken");
        let error = &scene.world.daemon.show_nic(&scene.place.name)["error"];
        assert!(error.to_string().contains("509 memory regions"), "{error}");
        drop(node);
        soon_unmapped(scene, "villain-slots");
    });
}

/// The answer to a command goes to the memory that the command came from, whatever has become of
/// it. Nobody else holds that memory: there was no INIT.
#[test]
fn memory_that_is_replaced_and_cut_off_under_a_command() {
    const BEYOND: u64 = 0x10_0000_0000;
    case_within(64 << 20, |scene| {
        // Which is the memory of a small host.
        let name = &scene.place.name;
        scene.world.daemon.run(&["nic", "set", name, "--max-guest-bytes", "16G"]);
        for n in 0..15 {
            // Of which it has touched next to nothing.
            let config = GuestConfig { ram_bytes: 8 << 30, ..GuestConfig::default() };
            let guest = Guest::connect(&scene.place.socket, config).expect("a connection");
            // Every entry is the list page itself; to resolve it takes a while. It is not in the
            // memory that is cut off, which nothing but the queue is in.
            guest.add_memory(BEYOND, 1 << 20).expect("ADD_MEM_REG");
            let root = guest.ram().alloc_in(Some(BEYOND), 1, PAGE);
            let entry = root.gpa(0);
            (0..512).for_each(|n| root.view(0, PAGE).store64(8 * n, entry, Ordering::Relaxed));
            let mut list = PageList::contiguous(entry, u32::MAX, 0, 12);
            list.levels = 4;
            let header = Put::new().u16(spec::cmd::MR_REG).zero(14).done(16);
            let region_of = Put::new().u32(0).u32(access::ALL).u64(0).u64(8 << 30);
            let body = region_of.bytes(&list.bytes()).done(48);
            let buffer = guest.ram().alloc(1);
            buffer.view(0, PAGE).write(0, &[header, body].concat());
            let old = guest.ram().regions()[0].clone();
            let other = memfd("villain-other", MemfdFlags::empty(), 1 << 20);
            scene.during(|| {
                guest.with_queue(spec::VQ_CONTROL, |queue| {
                    let (request, answer) = ((buffer.gpa(0), 64), (buffer.gpa(1024), 64));
                    queue.add(&[request], &[answer]).expect("room in the queue");
                    queue.kick().expect("a kick");
                });
                std::thread::sleep(Duration::from_millis(2 * n));
                let table = [region(&other, 0, 1 << 20, 0)];
                guest.front(|f| f.set_mem_table(&table)).expect("a table");
                // From here on this test does not touch that memory either.
                rustix::fs::ftruncate(old.fd(), 0).expect("ftruncate");
                std::thread::sleep(Duration::from_millis(200));
                guest.disconnect();
            });
            scene.others_go_on();
            scene.await_state("absent");
        }
    });
}
