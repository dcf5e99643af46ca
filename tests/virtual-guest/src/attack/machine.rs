//! What a monitor can do: its descriptors, its memory map, its rings.

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use vhost::VhostBackend;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Attack, Ground, Strike, alone, blind_cq, breathe, rc, take_events, with_ram};
use crate::guest::GuestConfig;
use crate::pages::PageList;
use crate::qp::SendWr;
use crate::spec::{self, ARM_ANY, PAGE, access};
use crate::world::{End, Node};

pub(super) const ALL: &[Attack] = &[
    Attack::new("waiters", "a call descriptor that 100 000 epoll entries wait for", waiters)
        .by_monitors(),
    Attack::new(
        "crowded_kicks",
        "kick descriptors of that kind, set again under signals",
        crowded_kicks,
    )
    .by_monitors(),
    Attack::new("unplug", "memory unplugged under 16 000 CQs", unplug).within(48),
    Attack::new("plug", "memory plugged and unplugged beside 60 000 regions", plug).within(64),
    Attack::new("tables", "the memory table sent again and again, 16 000 regions in it", tables)
        .by_monitors()
        .within(48),
    Attack::new("pauses", "all rings stopped and started without end", pauses).by_monitors(),
];

/// Where plugged memory lies.
const PLUGGED: u64 = 0x2_0000_0000;

/// An eventfd with many entries of epoll instances in its queue. Whoever signals it goes through
/// all of them with the queue's lock held, and whoever watches it waits for that lock.
#[derive(Debug)]
pub struct Crowded {
    /// One of many descriptors of it.
    pub file: EventFd,
    _copies: Vec<EventFd>,
    _waiting: Vec<Epoll>,
}

impl Crowded {
    /// With that many instances, and that many entries in each: an instance takes one of a
    /// descriptor, so there are copies of it.
    pub fn new([epolls, copies]: [usize; 2]) -> Self {
        let file = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let copy = |_| file.try_clone().expect("a descriptor");
        let copies: Vec<EventFd> = (0..copies).map(copy).collect();
        let instance = |_| {
            let epoll = Epoll::new().expect("an epoll instance");
            for copy in &copies {
                let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
                epoll.ctl(ControlOperation::Add, copy.as_raw_fd(), event).expect("an entry");
            }
            epoll
        };
        let waiting = (0..epolls).map(instance).collect();
        Self { file, _copies: copies, _waiting: waiting }
    }

    /// Does `act` while another thread signals it without end.
    pub fn signalled<R>(&self, act: impl FnOnce() -> R) -> R {
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // Full after 2^64 - 2 of them.
                    self.file.write(1).expect("room");
                }
            });
            let result = catch_unwind(AssertUnwindSafe(act));
            done.store(true, Ordering::Relaxed);
            result.unwrap_or_else(|cause| resume_unwind(cause))
        })
    }
}

fn waiters(ground: &Ground<'_>) -> Box<dyn Strike> {
    let crowd = Crowded::new(ground.sized([200, 500], [20, 100]));
    let node = ground.villain(GuestConfig { event_buffers: 60, ..with_ram(16) });
    // Vector 0, which all CQs of these guests are on.
    node.guest.front(|f| f.set_vring_call(spec::VQ_COMP, &crowd.file)).expect("SET_VRING_CALL");
    let word = node.mr(64);
    let mut end: End = alone(&node, &rc(16, 1), 64);
    let write = SendWr::write(1, &[word.sge(0, 8)], word.addr(8), word.rkey);
    Box::new(move || {
        end.scq.arm(ARM_ANY);
        end.qp.post_send(&write);
        for _ in 0..20 {
            if end.scq.drain() > 0 {
                break;
            }
            breathe();
        }
        let _signalled = crowd.file.read();
        take_events(&node);
    })
}

fn crowded_kicks(ground: &Ground<'_>) -> Box<dyn Strike> {
    let crowd = Crowded::new(ground.sized([200, 500], [20, 100]));
    let node = ground.villain(with_ram(16));
    // One that a connection's thread serves, and one that wakes the worker.
    let queues = [spec::VQ_CONTROL, node.guest.first_kick_queue()];
    Box::new(move || {
        crowd.signalled(|| {
            for queue in queues {
                let _slow = node.guest.front(|f| f.set_vring_kick(queue, &crowd.file));
            }
        });
        breathe();
    })
}

fn unplug(ground: &Ground<'_>) -> Box<dyn Strike> {
    let (node, place) = (ground.villain(with_ram(16)), ground.places[0].clone());
    let cqs = ground.sized(16_000, 800);
    Box::new(move || {
        // A process's memory is its session's.
        let inner = place.another(&node, with_ram(8)).expect("a context");
        inner.guest.add_memory(PLUGGED, 2 << 20).expect("memory");
        for _ in 0..cqs {
            let _refused = blind_cq(&inner, PLUGGED);
        }
        inner.guest.remove_memory(PLUGGED).expect("it is there");
        for _ in 0..20 {
            take_events(&inner);
            breathe();
        }
        place.leave(&inner).expect("the end of the context");
        take_events(&node);
    })
}

/// Registers one page many times.
pub(super) fn regions(node: &Node, count: usize) {
    let page = node.guest.ram().regions()[0].gpa();
    let list = PageList::contiguous(page, 1, 0, 12);
    for _ in 0..count {
        if node.ctx.mr_reg(node.pdn, access::ALL, (0, PAGE), &list).is_err() {
            return;
        }
    }
}

fn plug(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    regions(&node, ground.sized(60_000, 2000));
    Box::new(move || {
        if node.guest.add_memory(PLUGGED, 2 << 20).is_ok() {
            let _gone = node.guest.remove_memory(PLUGGED);
        }
    })
}

fn tables(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    regions(&node, ground.sized(16_000, 1000));
    Box::new(move || drop(node.guest.resend_memory()))
}

fn pauses(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    let word = node.mr(64);
    let mut end = alone(&node, &rc(64, 1), 128);
    let write = SendWr::write(1, &[word.sge(0, 8)], word.addr(8), word.rkey);
    Box::new(move || {
        (0..32).for_each(|_| end.qp.queue_send(&write));
        end.qp.ring_sq();
        let _paused = node.guest.pause_and_continue();
        for _ in 0..100 {
            if end.scq.drain() > 0 {
                break;
            }
            breathe();
        }
    })
}
