//! What only a guest's kernel and its monitor can do: keys for all memory, registrations by work
//! requests, page lists of several levels, tables of memory and files that shrink.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtual_guest::backing::rules;
use virtual_guest::guest::GuestConfig;
use virtual_guest::pages::Buf;
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::{self, PAGE, Put, access, cmd, err, event, wr};
use virtual_guest::world::{End, Node};

use crate::memory::{PLUGGED, list, plugged};
use crate::scene::{SOON, case, case_within, hasty};

const TIME: Duration = Duration::from_secs(2);

/// Each registration by a work request looks 512 pages up.
#[test]
fn fast_registrations_without_end() {
    const PAGES: u64 = 512;
    case(|scene| {
        let node = scene.villain();
        let kernel = node.guest.kernel().expect("the kernel's context");
        let pdn = kernel.create_pd().expect("PD_CREATE");
        let kernel = Node { ctx: kernel, pdn, ..node.clone() };
        let buf = Buf::scattered(node.guest.ram(), 0, PAGES * PAGE);
        let list = Buf::contiguous(node.guest.ram(), PAGE);
        for (n, gpa) in buf.pages().gpas().iter().enumerate() {
            list.view().store64(8 * n as u64, *gpa, Ordering::Relaxed);
        }
        let alloc = Put::new().u32(pdn).u32(PAGES as u32).done(8);
        if node.guest.query_device().expect("QUERY_DEVICE").caps & spec::cap::MEM_MGT == 0 {
            // What is not offered is refused.
            let refused = kernel.ctx.command(cmd::MR_ALLOC, &alloc, 8).map(drop);
            assert_eq!(refused.expect_err("not offered").status(), Some(err::NOTSUPP));
            return;
        }
        let mut ends: Vec<(End, u32)> = (0..16)
            .map(|_| {
                let end = kernel.rc();
                end.qp.connect(end.address(), &hasty()).expect("to itself");
                let answer = kernel.ctx.command(cmd::MR_ALLOC, &alloc, 8).expect("MR_ALLOC");
                (end, u32::from_le_bytes(answer[..4].try_into().expect("a key")))
            })
            .collect();
        let deadline = Instant::now() + TIME;
        scene.during(|| {
            while Instant::now() < deadline {
                for (end, key) in &mut ends {
                    for _ in 0..30 {
                        end.qp.queue_send(&SendWr {
                            rkey: *key,
                            imm: access::ALL,
                            remote_addr: 0,
                            arg0: PAGES * PAGE,
                            arg1: list.pages().gpa(0) | 12 << 56,
                            aux: PAGES as u32,
                            ..SendWr::new(1, wr::REG_MR, &[])
                        });
                        let undo = SendWr { imm: *key, ..SendWr::new(2, wr::LOCAL_INV, &[]) };
                        end.qp.queue_send(&undo);
                    }
                    end.qp.ring_sq();
                }
                for (end, _) in &mut ends {
                    (0..60).for_each(|_| assert_eq!(end.scq.ok().status, 0));
                }
            }
        });
    });
}

/// Page lists cost the guest one page and the daemon eight bytes for each entry.
#[test]
fn tables_of_the_same_page_again_and_again_come_to_an_end() {
    case_within(48 << 20, |scene| {
        let node = scene.villain();
        let guest = node.guest.ram().regions()[0].size();
        let size = if rules().regions_are_mapped { 4 << 20 } else { guest };
        let root = node.guest.ram().alloc(1);
        (0..512).for_each(|n| root.view(0, PAGE).store64(8 * n, root.gpa(0), Ordering::Relaxed));
        let all = list(root.gpa(0), u32::MAX, 0, 12, 4);
        let mut held = Vec::new();
        let refused = scene.during(|| {
            loop {
                match node.ctx.mr_reg(node.pdn, access::ALL, (0, size), &all) {
                    Ok((lkey, _)) => held.push(lkey),
                    Err(refused) => break refused.status(),
                }
                assert!(held.len() < 5000, "there is no end to it");
            }
        });
        assert_eq!(refused, Some(err::NOMEM));
        assert!(held.len() > 8, "so much is allowed, not only {} times all of it", held.len());
        node.ctx.dereg(held[0]).expect("MR_DEREG");
        node.ctx.mr_reg(node.pdn, access::ALL, (0, size), &all).expect("there is room again");
    });
}

#[test]
fn a_table_without_the_pages_that_all_rests_on_is_fatal_for_that_guest() {
    case(|scene| {
        let node = scene.villain();
        node.guest.add_memory(PLUGGED, 2 << 20).expect("ADD_MEM_REG");
        let plugged = node.guest.ram().regions()[1].clone();
        let only = VhostUserMemoryRegionInfo {
            guest_phys_addr: PLUGGED,
            memory_size: plugged.size(),
            userspace_addr: plugged.host_addr(),
            mmap_offset: 0,
            mmap_handle: plugged.raw_fd(),
        };
        scene.during(|| node.guest.front(|f| f.set_mem_table(&[only])).expect("a table"));
        scene.await_state("failed");
    });
}

#[test]
fn memory_that_is_cut_off_is_fatal_for_that_guest() {
    case(|scene| {
        let node = scene.villain();
        let mr = plugged(&node, 2 << 20);
        let mut end = node.rc();
        end.qp.connect(end.address(), &Path::default()).expect("to itself");
        let word = node.area(8);
        let region = node.guest.ram().regions()[1].clone();
        rustix::fs::ftruncate(region.fd(), PAGE).expect("ftruncate");
        scene.during(|| {
            let write = SendWr::write(1, &[word.sge()], mr.addr(1 << 20), mr.rkey);
            if rules().memory_is_pinned {
                end.run_ok(&write);
                return node.guest.keepalive().expect("it is that guest's affair");
            }
            end.qp.post_send(&write);
            let fatal = node.guest.await_async(event::DEVICE_FATAL, 0, SOON);
            assert!(fatal.is_ok(), "{fatal:?}");
        });
        scene.await_state(if rules().memory_is_pinned { "driver_ready" } else { "failed" });
    });
}

/// A key for all of the guest's memory is a key, however many pieces the memory has.
#[test]
fn keys_for_all_of_a_memory_in_pieces_share_it() {
    const PIECES: u64 = 200;
    const KEYS: usize = 12_000;
    case_within(24 << 20, |scene| {
        let config = GuestConfig { memory_table: false, ..GuestConfig::default() };
        let node = scene.villain_with(config);
        // Gaps between them, so that each is a region of its own.
        for n in 0..PIECES {
            node.guest.add_memory(PLUGGED + n * 2 * PAGE, PAGE).expect("ADD_MEM_REG");
        }
        let kernel = node.guest.kernel().expect("the kernel's context");
        let pdn = kernel.create_pd().expect("PD_CREATE");
        let mut made = 0;
        scene.during(|| {
            while made < KEYS {
                match kernel.mr_dma(pdn, access::LOCAL_WRITE) {
                    Ok(_) => made += 1,
                    Err(refused) => {
                        assert_eq!(refused.status(), Some(err::NOMEM), "after {made} keys");
                        break;
                    }
                }
            }
        });
        assert!(made > 0, "a kernel needs one");
        scene.is_within_its_budget();
        node.guest.keepalive().expect("the NIC works");
    });
}
