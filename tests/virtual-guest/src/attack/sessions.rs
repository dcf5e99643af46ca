//! What a process can do that no guest can: sessions that come and go, memory that it shares and
//! takes back, channels that it never reads, and jobs that it never does
//! (docs/virtio-rdma-process.md).

use super::{Attack, Ground, Strike, alone, breathe, rc, with_ram};
use crate::process::{Channel, op, piece};
use crate::qp::{Path, SendWr};
use crate::rings::Cq;
use crate::spec::{ARM_ANY, PAGE, Put, access};
use crate::world::{End, Node};

pub(super) const ALL: &[Attack] = &[
    Attack::new("sessions", "processes that come, make a queue pair and end", sessions)
        .by_processes(),
    Attack::new("messages", "requests that nobody waits for an answer to", messages).by_processes(),
    Attack::new("shares", "memory shared and taken back beside 60 000 regions", shares)
        .within(64)
        .by_processes(),
    Attack::new("channels", "completion channels that nobody reads, under 60 CQs", channels)
        .by_processes(),
    Attack::new("jobs", "peers that write to memory whose owner never does its part", jobs)
        .by(2)
        .by_processes(),
    Attack::new("connects", "connection requests to ports where nobody listens", connects)
        .by(2)
        .by_processes(),
];

/// Where memory is shared.
const SHARED: u64 = 0x2_0000_0000;

fn sessions(ground: &Ground<'_>) -> Box<dyn Strike> {
    let place = ground.places[0].clone();
    Box::new(move || {
        let Ok(node) = place.enter(with_ram(8)) else { return };
        let end = node.rc();
        let _state = end.qp.connect(end.address(), &Path::default());
        node.guest.disconnect();
    })
}

fn messages(ground: &Ground<'_>) -> Box<dyn Strike> {
    let place = ground.places[0].clone();
    let request = crate::process::request(op::ADDRESS, &Put::new().u32(0).u32(0).done(8));
    let mut node: Option<Node> = None;
    Box::new(move || {
        // A session ends when nobody reads its answers.
        let Some(there) = node.take().or_else(|| place.enter(with_ram(8)).ok()) else { return };
        for _ in 0..200 {
            if crate::process::send_now(there.guest.process().socket(), &request).is_err() {
                return;
            }
        }
        node = Some(there);
    })
}

fn shares(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    super::machine::regions(&node, ground.sized(60_000, 2000));
    Box::new(move || {
        for n in 0..8 {
            if node.guest.add_memory(SHARED + n * 2 * PAGE, PAGE).is_err() {
                break;
            }
        }
        for n in 0..8 {
            let _gone = node.guest.remove_memory(SHARED + n * 2 * PAGE);
        }
        // What is not there.
        let _refused = node.guest.process().ask(op::MEMORY_REMOVE, &piece((PAGE, PAGE, 0)), &[]);
    })
}

fn channels(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(32));
    let word = node.mr(64);
    let write = SendWr::write(1, &[word.sge(0, 8)], word.addr(8), word.rkey);
    let count = ground.sized(60, 20);
    let mut ends: Vec<(Channel, End)> = (0..count)
        .map(|n| {
            let channel = node.guest.process().channel().expect("CHANNEL_ADD");
            let given = (n, channel.number);
            let make = || Cq::create(&node.ctx, 64, 0).expect("CQ_CREATE");
            let cq = node.guest.process().with(given, make);
            let end = node.end_with(&rc(16, 1), cq, node.cq(16));
            end.qp.connect(end.address(), &Path::default()).expect("to itself");
            (channel, end)
        })
        .collect();
    Box::new(move || {
        for (_, end) in &mut ends {
            end.scq.arm(ARM_ANY);
            end.qp.post_send(&write);
        }
        breathe();
        ends.iter_mut().for_each(|(_, end)| {
            end.scq.drain();
        });
    })
}

/// The owner takes its jobs and does none of them: each keeps its peer waiting, and a new queue
/// pair asks for the next.
fn jobs(ground: &Ground<'_>) -> Box<dyn Strike> {
    let [owner, peer] = [ground.nth(0, with_ram(16)), ground.nth(1, with_ram(16))];
    let channel = owner.guest.process().mirrors().expect("MIRROR_ADD");
    let flags = access::ALL | access::MIRRORED;
    let mirrored = owner.ctx.mr(owner.pdn, 128 << 10, flags).expect("MR_REG");
    let from = peer.mr(64 << 10);
    let path = Path { timeout: 1, retry_cnt: 0, ..Path::default() };
    let count = ground.sized(64, 16);
    let mut pairs: Vec<(End, End)> = (0..count).map(|_| (peer.rc(), owner.rc())).collect();
    let write = SendWr::write(1, &[from.sge(0, 64 << 10)], mirrored.addr(0), mirrored.rkey);
    Box::new(move || {
        let _held = &channel;
        for (asks, serves) in &mut pairs {
            let _state = (asks.qp.reset(&[&asks.scq]), serves.qp.reset(&[&serves.scq]));
            let there = serves.qp.connect(asks.address(), &path).is_ok();
            if there && asks.qp.connect(serves.address(), &path).is_ok() {
                (0..8).for_each(|_| asks.qp.queue_send(&write));
                asks.qp.ring_sq();
            }
        }
        breathe();
    })
}

fn connects(ground: &Ground<'_>) -> Box<dyn Strike> {
    let villain = ground.nth(0, with_ram(16));
    let other = ground.nth(1, with_ram(16));
    let mut word = alone(&villain, &rc(16, 1), 64);
    Box::new(move || {
        let _held = &other;
        // What names nobody is answered, and kept by nobody.
        let process = villain.guest.process();
        let Ok(channel) = process.cm_channel() else { return };
        for number in 0..64 {
            let _refused = process.cm(channel.number, number, &[0; 64]);
        }
        let _gone = process.end_cm(channel.number);
        word.scq.drain();
    })
}
