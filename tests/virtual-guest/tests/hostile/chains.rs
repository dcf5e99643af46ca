//! Descriptor chains and rings of virtqueues that make no sense.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::SendWr;
use virtual_guest::spec::{self, Put, cmd, err};
use virtual_guest::world::Node;

use crate::scene::{SOON, Scene, case, hasty};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A descriptor: address, length, flags, next.
type Desc = (u64, u32, u16, u16);

/// Room for requests, answers and tables, and a queue that is written by hand.
struct Raw<'a> {
    guest: &'a Guest,
    at: u64,
    _pages: virtual_guest::ram::Pages,
}

impl<'a> Raw<'a> {
    fn new(guest: &'a Guest) -> Self {
        let pages = guest.ram().alloc(32);
        Self { guest, at: pages.gpa(0), _pages: pages }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.guest.ram().view(self.at + at, bytes.len() as u64).write(0, bytes);
    }

    fn table(&self, at: u64, table: &[Desc]) {
        for (n, (addr, len, flags, next)) in table.iter().enumerate() {
            let bytes = Put::new().u64(*addr).u32(*len).u16(*flags).u16(*next).done(16);
            self.write(at + 16 * n as u64, &bytes);
        }
    }

    /// Makes `head` available with this table; the length that the device gives it back with,
    /// `None` if it does not.
    fn offer(&self, table: &[Desc], head: u16, wait: Duration) -> Option<u32> {
        let used_at = self.guest.with_queue(spec::VQ_CONTROL, |q| {
            let (view, _, used) = q.raw();
            let before = view.load16(used + 2, Ordering::Acquire);
            for (n, (addr, len, flags, next)) in table.iter().enumerate() {
                let at = 16 * n as u64;
                view.store64(at, *addr, Ordering::Relaxed);
                view.store32(at + 8, *len, Ordering::Relaxed);
                view.store16(at + 12, *flags, Ordering::Relaxed);
                view.store16(at + 14, *next, Ordering::Relaxed);
            }
            q.publish(head);
            q.kick.write(1).expect("a kick");
            before
        });
        let deadline = Instant::now() + wait;
        loop {
            let got = self.guest.with_queue(spec::VQ_CONTROL, |q| {
                let (view, _, used) = q.raw();
                let now = view.load16(used + 2, Ordering::Acquire);
                let at = used + 4 + 8 * u64::from(used_at % q.size());
                (now != used_at).then(|| view.load32(at + 4, Ordering::Relaxed))
            });
            if got.is_some() || Instant::now() > deadline {
                return got;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// A KEEPALIVE with the wrong nonce: answered with STATE by a queue that works.
    fn request(&self) -> Vec<u8> {
        Put::new().u16(cmd::KEEPALIVE).zero(2).u32(0).u64(0).u64(1).done(24)
    }

    fn status(&self, at: u64) -> u32 {
        self.guest.ram().view(self.at + at, 4).load32(0, Ordering::Relaxed)
    }

    /// The queue still serves.
    #[track_caller]
    fn serves(&self) {
        self.write(0, &self.request());
        let table = [(self.at, 24, NEXT, 1), (self.at + 256, 8, WRITE, 0)];
        assert_eq!(self.offer(&table, 0, SOON), Some(8));
        assert_eq!(self.status(256), err::STATE);
    }
}

#[test]
fn malformed_chains_are_given_back_empty_and_the_queue_goes_on() {
    case(|scene| {
        let node = scene.villain();
        let raw = Raw::new(&node.guest);
        let (req, resp, table) = (raw.at, raw.at + 256, raw.at + 4096);
        raw.write(0, &raw.request());
        raw.table(4096, &[(req, 24, NEXT, 1), (table + 64, 16, INDIRECT, 0)]);
        raw.table(8192, &vec![(resp, 0, WRITE | NEXT, 1); 2000]);
        let outside = 0xffff_0000_0000;
        let cases: [(&str, Vec<Desc>, u16); 17] = [
            ("a descriptor that follows itself", vec![(req, 24, NEXT, 0)], 0),
            ("a loop of two", vec![(req, 24, NEXT, 1), (resp, 8, WRITE | NEXT, 0)], 0),
            ("next outside the table", vec![(req, 24, NEXT, 999)], 0),
            ("a head outside the table", vec![(req, 24, 0, 0)], 0xffff),
            ("writable before readable", vec![(resp, 8, WRITE | NEXT, 1), (req, 24, 0, 0)], 0),
            ("nothing readable", vec![(resp, 64, WRITE, 0)], 0),
            ("nothing writable", vec![(req, 24, 0, 0)], 0),
            ("everything empty", vec![(req, 0, NEXT, 1), (resp, 0, WRITE, 0)], 0),
            ("room for half a header", vec![(req, 24, NEXT, 1), (resp, 4, WRITE, 0)], 0),
            ("a request outside memory", vec![(outside, 24, NEXT, 1), (resp, 8, WRITE, 0)], 0),
            ("an answer outside memory", vec![(req, 24, NEXT, 1), (outside, 8, WRITE, 0)], 0),
            ("addresses that wrap", vec![(u64::MAX - 3, 24, NEXT, 1), (resp, 8, WRITE, 0)], 0),
            ("an answer that wraps", vec![(req, 24, NEXT, 1), (u64::MAX - 3, 8, WRITE, 0)], 0),
            ("a table of odd size", vec![(table, 17, INDIRECT, 0)], 0),
            ("a table in a table", vec![(table, 32, INDIRECT, 0)], 0),
            ("a table outside memory", vec![(outside, 32, INDIRECT, 0)], 0),
            ("an endless table", vec![(raw.at + 8192, !15, INDIRECT, 0)], 0),
        ];
        for (what, table, head) in cases {
            let given = scene.during(|| raw.offer(&table, head, SOON));
            match (what, given) {
                // What is not in the ring can not be given back.
                ("a head outside the table", None | Some(_)) => {}
                // Answered as far as there is room.
                ("nothing readable", Some(len)) => {
                    assert!(len == 8 && raw.status(256) == err::INVAL, "{what}: {len}");
                }
                (_, given) => assert_eq!(given, Some(0), "{what}"),
            }
            raw.serves();
        }
        // A request and its answer in the same bytes: read once, then written.
        let shared = [(req, 24, NEXT, 1), (req, 24, WRITE, 0)];
        raw.write(0, &raw.request());
        assert_eq!(raw.offer(&shared, 0, SOON), Some(8));
        assert_eq!(raw.status(0), err::STATE);
        raw.serves();
    });
}

#[test]
fn rings_with_wild_indices_stop_until_they_are_set_up_again() {
    case(|scene| {
        let node = scene.villain();
        for jump in [65, 1000, 0x8000, 0xffff] {
            node.guest.with_queue(spec::VQ_CONTROL, |q| {
                let (view, avail, _) = q.raw();
                let index = view.load16(avail + 2, Ordering::Relaxed).wrapping_add(jump);
                view.store16(avail + 2, index, Ordering::Release);
                q.kick.write(1).expect("a kick");
            });
            scene.others_go_on();
            node.guest.reset().expect("a reset");
            node.guest.init().expect("INIT");
        }
        for queue in 1..node.guest.queue_count() {
            node.guest.with_queue(queue, |q| {
                let (view, avail, _) = q.raw();
                for (at, value) in [(avail + 2, 0x7fff), (avail + 4, 0xffff), (avail, 0xffff)] {
                    view.store16(at, value, Ordering::Release);
                }
                q.kick.write(1).expect("a kick");
            });
        }
        // An event for each queue that has none to take.
        node.guest.set_gid(0, spec::GID_ROCE_V2, node.gid).expect("GID_SET");
        let context = node.guest.open().expect("CONTEXT_CREATE");
        let pdn = context.create_pd().expect("PD_CREATE");
        let broken = Node { ctx: context, pdn, ..node.clone() };
        let mut end = broken.rc();
        end.qp.connect(end.address(), &hasty()).expect("to itself");
        end.scq.arm(spec::ARM_ANY);
        let (_, _, doorbell) = end.qp.raw_sq(0);
        doorbell.ring(0x1234_5678);
        scene.others_go_on();
        node.guest.reset().expect("a reset");
        node.guest.init().expect("INIT");
    });
}

/// A ring full of chains that are as long as they can be and take nothing, offered to the worker
/// itself.
#[test]
fn event_buffers_that_take_nothing_hold_nobody_up() {
    case(|scene| {
        let config = GuestConfig { queue_size: 1024, event_buffers: 0, ..GuestConfig::default() };
        let node = scene.villain_with(config);
        let raw = Raw::new(&node.guest);
        let pieces: Vec<Desc> = (0..1024u16)
            .map(|n| (raw.at, 0, WRITE | if n < 1023 { NEXT } else { 0 }, n + 1))
            .collect();
        raw.table(4096, &pieces);
        let refill = |queue: usize| {
            node.guest.with_queue(queue, |q| {
                let (view, avail, _) = q.raw();
                for n in 0..1024u64 {
                    view.store64(16 * n, raw.at + 4096, Ordering::Relaxed);
                    view.store32(16 * n + 8, 16 * 1024, Ordering::Relaxed);
                    view.store16(16 * n + 12, INDIRECT, Ordering::Relaxed);
                    view.store16(avail + 4 + 2 * n, n as u16, Ordering::Relaxed);
                }
                let index = view.load16(avail + 2, Ordering::Relaxed);
                let (_, _, used) = q.raw();
                let taken = view.load16(used + 2, Ordering::Acquire);
                let full = taken.wrapping_add(1024);
                if full != index {
                    view.store16(avail + 2, full, Ordering::Release);
                }
                q.kick.write(1).expect("a kick");
            });
        };
        let mut end = node.rc();
        end.qp.connect(end.address(), &hasty()).expect("to itself");
        let word = node.area(8);
        scene.during(|| {
            for n in 0..100 {
                refill(spec::VQ_EVENT);
                refill(spec::VQ_COMP);
                end.scq.arm(spec::ARM_ANY);
                end.run_ok(&SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
                let (_, _, doorbell) = node.rc().qp.raw_sq(0);
                doorbell.ring(1);
            }
        });
    });
}

#[test]
fn virtqueues_at_the_end_of_memory_and_outside_are_refused_or_left_alone() {
    use vhost::VhostBackend;
    case(|scene: &Scene| {
        let node = scene.villain();
        let region = node.guest.ram().regions()[0].clone();
        let end = region.host_addr() + region.size();
        for at in [end - 16, end, end + 4096, 0, u64::MAX - 15, region.host_addr() + 1] {
            for queue in 0..node.guest.queue_count() {
                let data = vhost::VringConfigData {
                    queue_max_size: 1024,
                    queue_size: 1024,
                    flags: 0,
                    desc_table_addr: at,
                    avail_ring_addr: at,
                    used_ring_addr: at,
                    log_addr: None,
                };
                // Refused, or found to be nonsense when it is used; a refusal may end the
                // connection, which is this guest's own.
                let _refused = node.guest.front(|f| f.set_vring_addr(queue, &data));
                let kick = node.guest.kick_fd(queue).expect("an eventfd");
                kick.write(1).expect("a kick");
            }
            scene.others_go_on();
        }
        let mut end = node.rc_if_possible();
        if let Some(end) = &mut end {
            let (_, _, doorbell) = end.qp.raw_sq(0);
            doorbell.ring(77);
        }
        scene.others_go_on();
        node.guest.disconnect();
    });
}

trait Attempt {
    fn rc_if_possible(&self) -> Option<virtual_guest::world::End>;
}

impl Attempt for Node {
    /// A queue pair, if the control queue still answers.
    fn rc_if_possible(&self) -> Option<virtual_guest::world::End> {
        self.guest.keepalive().ok().map(|()| self.rc())
    }
}
