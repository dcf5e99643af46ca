//! Datagrams: one request, many deliveries.

use super::{Attack, Ground, Pump, Strike, breathe, with_ram};
use crate::backing::rules;
use crate::daemon::backing;
use crate::qp::{Av, Qp, QpSpec, SendWr};
use crate::rings::Cq;
use crate::spec::{Put, cmd, qpt};
use crate::world::{End, Node};

pub(super) const ALL: &[Attack] = &[
    Attack::new("multicast", "datagrams of a byte to 64 receivers that take them", taken)
        .within(24),
    Attack::new("multicast_dropped", "the same by 16 QPs to 64 who have no receive", dropped)
        .within(24),
    Attack::new("multicast_by_8", "the same, eight NICs with 64 members each", dropped)
        .by(8)
        .within(64),
    Attack::new("ah_churn", "AH_CREATE and AH_DESTROY without end", ah_churn),
];

const QKEY: u32 = 5;
/// What villains send to, and its GID.
pub(super) const GROUP_NAME: &str = "239.6.6.6";
const GROUP: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 6, 6, 6];

fn datagrams(node: &Node, cqs: (Cq, Cq), sq: u32, rq: u32) -> End {
    let spec = QpSpec { sq, rq, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::UD) };
    let end = node.end_with(&spec, cqs.0, cqs.1);
    end.qp.start_datagrams(QKEY).expect("to RTS");
    end
}

fn join(node: &Node, qp: &Qp) {
    let body = Put::new().u32(qp.qpn).u32(0).bytes(&GROUP).done(24);
    node.ctx.command(cmd::MCAST_ATTACH, &body, 0).expect("MCAST_ATTACH");
}

/// How many members each of some NICs may have in a group. An RNIC counts those of all its NICs.
fn room(nics: usize) -> usize {
    let shared = if backing().starts_with("rnic:") { nics } else { 1 };
    rules().group_members / shared
}

/// Members of the group on one NIC, with a ring of receives each that was written once.
fn members(node: &Node, count: usize, rq: u32) -> (Vec<Qp>, Cq) {
    let rcq = node.cq((rq.max(4) * 2 * count as u32).next_power_of_two());
    let scq = node.cq(16);
    let spec = QpSpec {
        sq: 4,
        rq: rq.max(4),
        send_sge: 1,
        recv_sge: 1,
        inline: 0,
        ..QpSpec::new(qpt::UD)
    };
    let inbox = node.mr(64);
    let make = |_| {
        let mut qp = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec).expect("QP_CREATE");
        qp.start_datagrams(QKEY).expect("to RTS");
        join(node, &qp);
        for n in 0..rq {
            qp.queue_recv(u64::from(n), &[inbox.sge(0, 64)]);
        }
        qp
    };
    ((0..count).map(make).collect(), rcq)
}

fn taken(ground: &Ground<'_>) -> Box<dyn Strike> {
    const RECEIVES: u32 = 256;
    let node = ground.villain(with_ram(48));
    let count = room(1);
    let (mut qps, mut rcq) = members(&node, count, RECEIVES);
    let ah = node.ctx.create_ah(node.pdn, &Av::to(GROUP)).expect("AH_CREATE");
    let byte = node.mr(64);
    let send = SendWr::datagram(1, &[byte.sge(0, 1)], ah, 0xff_ffff, QKEY).unsignaled();
    let mut from: Vec<End> =
        (0..16).map(|_| datagrams(&node, (node.cq(16), node.cq(16)), 64, 4)).collect();
    let (mut posted, mut due) = (0u32, 0u32);
    Box::new(move || {
        // Every ring of receives is used up before it is announced anew: what is in it was written
        // once.
        if due == 0 {
            due = RECEIVES * count as u32;
            posted = posted.wrapping_add(RECEIVES);
            qps.iter_mut().for_each(|qp| qp.raw_rq(0).2.ring(posted));
            for end in &mut from {
                for _ in 0..RECEIVES / 16 {
                    end.qp.queue_send(&send);
                }
                end.qp.ring_sq();
            }
        }
        for _ in 0..200 {
            due = due.saturating_sub(rcq.drain());
            if due == 0 {
                break;
            }
            breathe();
        }
    })
}

fn dropped(ground: &Ground<'_>) -> Box<dyn Strike> {
    let mut crowds = Vec::new();
    let mut pumps = Vec::new();
    let nodes = ground.villains(&with_ram(16));
    let count = room(nodes.len());
    for node in nodes {
        crowds.push(members(&node, count, 0));
        let ah = node.ctx.create_ah(node.pdn, &Av::to(GROUP)).expect("AH_CREATE");
        let byte = node.mr(64);
        for _ in 0..16 {
            let end = datagrams(&node, (node.cq(64), node.cq(16)), 64, 4);
            pumps.push(Pump::new(end, 64, |_| {
                SendWr::datagram(1, &[byte.sge(0, 1)], ah, 0xff_ffff, QKEY)
            }));
        }
    }
    let mut pumps = super::Pumps(pumps);
    Box::new(move || {
        let _members = &crowds;
        pumps.strike();
    })
}

fn ah_churn(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    Box::new(move || {
        let made: Vec<u32> =
            (0..32).map_while(|_| node.ctx.create_ah(node.pdn, &Av::to(node.gid)).ok()).collect();
        made.into_iter().for_each(|ah| drop(node.ctx.destroy_ah(ah)));
    })
}
