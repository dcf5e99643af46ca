//! Objects that are made, used and destroyed, in every allowed order and with every error that is a
//! guest's own.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Dice, Shared};
use crate::pages::PageList;
use crate::qp::{Av, Path, QpSpec, SendWr};
use crate::rings::{Cq, Srq};
use crate::spec::{self, access, attr, cmd, event, qps, qpt, status};
use crate::world::{End, Node, pattern};

/// A connection that gives up soon.
const HASTY: Path = Path {
    access: access::ALL,
    timeout: 4,
    retry_cnt: 1,
    rnr_retry: 1,
    min_rnr_timer: 1,
    rd_atomic: 4,
};
const WAIT: Duration = Duration::from_secs(60);

/// One round after the other.
pub(super) fn run(a: &Node, b: &Node, shared: &Shared, mut dice: Dice) {
    while shared.goes_on() {
        shared.round(|| round(a, b, &mut dice));
        shared.rounds.fetch_add(1, Ordering::Relaxed);
    }
}

fn round(a: &Node, b: &Node, dice: &mut Dice) {
    let (x, y) = (process(a), process(b));
    match dice.roll(4) {
        0 => datagrams(&x, &y, dice),
        1 => shared_receives(&x, &y, dice),
        _ => connected(&x, &y, dice),
    }
    refused(&x, dice);
    x.ctx.destroy().expect("CONTEXT_DESTROY");
    y.ctx.destroy().expect("CONTEXT_DESTROY");
    for node in [a, b] {
        while node.guest.async_event(Duration::ZERO).expect("the event queue").is_some() {}
    }
}

/// A process of a guest: a context of its own.
fn process(node: &Node) -> Node {
    let ctx = node.guest.open().expect("CONTEXT_CREATE");
    let pdn = ctx.create_pd().expect("PD_CREATE");
    Node { ctx, pdn, ..node.clone() }
}

/// Destroys in order, or leaves it to the end of the context.
fn end(end: &End, dice: &mut Dice) {
    if dice.coin() {
        end.qp.destroy().expect("QP_DESTROY");
        end.scq.destroy().expect("CQ_DESTROY");
        end.rcq.destroy().expect("CQ_DESTROY");
    }
}

fn pair(x: &Node, y: &Node, spec: &QpSpec, cqes: u32) -> (End, End) {
    let (a, b) = (x.end_with(spec, x.cq(cqes), x.cq(256)), y.end_with(spec, y.cq(256), y.cq(256)));
    a.connect(&b, &HASTY);
    b.connect(&a, &HASTY);
    (a, b)
}

fn connected(x: &Node, y: &Node, dice: &mut Dice) {
    let kind = if dice.roll(4) == 0 { qpt::UC } else { qpt::RC };
    let len = 1 + dice.roll(20_000);
    let (mut a, mut b) = pair(x, y, &QpSpec::new(kind), 64);
    let (source, target) = (x.area_of(&pattern(dice.0, len as usize)), y.area(len));
    b.qp.post_recv(1, &target.parts(3));
    a.run_ok(&SendWr::send(1, &source.parts(2)));
    b.rcq.ok();
    assert_eq!(target.bytes(), source.bytes());
    a.run_ok(&SendWr::write(2, &[source.sge()], target.addr(0), target.rkey()));
    if kind == qpt::RC {
        misfortune(&mut a, &mut b, (&source, &target), dice);
    }
    if dice.coin() {
        x.ctx.dereg(source.mr.lkey).expect("MR_DEREG");
    }
    end(&a, dice);
    end(&b, dice);
}

/// One thing goes wrong, or none.
fn misfortune(
    a: &mut End,
    b: &mut End,
    (source, target): (&crate::world::Area, &crate::world::Area),
    dice: &mut Dice,
) {
    let write = |rkey| SendWr::write(3, &[source.sge()], target.addr(0), rkey);
    match dice.roll(8) {
        0 => {
            let refused = a.run(&write(target.rkey() ^ 0x100));
            assert_eq!(refused.status, status::REM_ACCESS_ERR);
            assert_eq!(a.run(&write(target.rkey())).status, status::WR_FLUSH_ERR);
        }
        1 => {
            let alone = a.run(&SendWr::send(4, &[source.sge()]));
            assert_eq!(alone.status, status::RNR_RETRY_EXC_ERR);
        }
        2 => {
            b.node.ctx.dereg(target.mr.lkey).expect("MR_DEREG");
            assert_eq!(a.run(&write(target.rkey())).status, status::REM_ACCESS_ERR);
        }
        3 => {
            b.qp.destroy().expect("QP_DESTROY");
            assert_eq!(a.run(&write(target.rkey())).status, status::RETRY_EXC_ERR);
            // The second destruction is the one that fails.
            assert!(b.qp.destroy().is_err());
            b.qp = b.node.rc().qp;
        }
        4 => {
            a.scq.release = false;
            let empty = SendWr::write(5, &[], target.addr(0), target.rkey());
            for _ in 0..a.scq.entries {
                a.run_ok(&empty);
            }
            a.qp.post_send(&empty);
            let overrun = a.node.guest.await_async(event::CQ_ERR, a.scq.cqn, WAIT);
            assert!(overrun.is_ok(), "no CQ_ERR: {overrun:?}");
        }
        5 => {
            let (_, _, doorbell) = a.qp.raw_sq(0);
            doorbell.ring(dice.roll(1 << 31) as u32 | 0x4000_0000);
            let fatal = a.node.guest.await_async(event::QP_FATAL, a.qp.qpn, WAIT);
            assert!(fatal.is_ok(), "no QP_FATAL: {fatal:?}");
        }
        6 => {
            // Left alone with everything posted.
            for n in 0..20 {
                b.qp.post_recv(n, &[target.sge()]);
                a.qp.post_send(&write(target.rkey()).unsignaled());
            }
        }
        _ => {
            a.qp.reset(&[&a.scq, &a.rcq]).expect("to RESET");
            a.connect(b, &HASTY);
        }
    }
}

fn datagrams(x: &Node, y: &Node, dice: &mut Dice) {
    let spec = QpSpec::new(qpt::UD);
    let (mut a, mut b) = (x.end(&spec), y.end(&spec));
    a.qp.start_datagrams(7).expect("to RTS");
    b.qp.start_datagrams(7).expect("to RTS");
    let inbox = y.area(40 + 4096);
    let handle = x.ctx.create_ah(x.pdn, &Av::to(y.gid)).expect("AH_CREATE");
    for n in 0..1 + dice.roll(8) {
        let bytes = pattern(n, 1 + dice.roll(512) as usize);
        b.qp.post_recv(n, &[inbox.sge()]);
        let out = x.area_of(&bytes);
        a.run_ok(&SendWr::datagram(n, &[out.sge()], handle, b.qp.qpn, 7));
        b.rcq.ok();
        assert_eq!(&inbox.bytes()[40..40 + bytes.len()], &bytes[..]);
    }
    if dice.coin() {
        x.ctx.destroy_ah(handle).expect("AH_DESTROY");
        let lost = a.run(&SendWr::datagram(9, &[], handle, b.qp.qpn, 7).inline(&[1]));
        assert_eq!(lost.status, status::LOC_QP_OP_ERR);
    }
    end(&a, dice);
    end(&b, dice);
}

fn shared_receives(x: &Node, y: &Node, dice: &mut Dice) {
    let mut srq = Srq::create(&y.ctx, y.pdn, 16, 2, 4).expect("SRQ_CREATE");
    let (scq, rcq) = (y.cq(64), y.cq(64));
    let mut b = y.end_with(&QpSpec::new(qpt::RC).with_srq(&srq), scq, rcq);
    let mut a = x.rc();
    a.connect(&b, &HASTY);
    b.connect(&a, &HASTY);
    let inbox = y.area(16 * 64);
    for n in 0..8 {
        srq.post(n, &[inbox.part(n * 64, 64)]);
    }
    if dice.coin() {
        srq.resize(32).expect("SRQ_MODIFY");
    }
    for n in 0..8 {
        a.run_ok(&SendWr::send(n, &[]).inline(&[n as u8; 40]));
        let taken = b.rcq.ok();
        assert_eq!(inbox.bytes()[taken.wr_id as usize * 64], n as u8);
    }
    let limit = y.guest.await_async(event::SRQ_LIMIT_REACHED, srq.srqn, WAIT);
    assert!(limit.is_ok(), "no SRQ_LIMIT_REACHED: {limit:?}");
    if dice.coin() {
        b.qp.fail().expect("to ERR");
        let last = y.guest.await_async(event::QP_LAST_WQE_REACHED, b.qp.qpn, WAIT);
        assert!(last.is_ok(), "no QP_LAST_WQE_REACHED: {last:?}");
    }
    if dice.coin() {
        assert!(srq.destroy().is_err(), "it is in use");
        b.qp.destroy().expect("QP_DESTROY");
        srq.destroy().expect("SRQ_DESTROY");
    }
    end(&a, dice);
}

/// Commands that fail and leave nothing behind.
fn refused(node: &Node, dice: &mut Dice) {
    let ctx = &node.ctx;
    let outside = PageList::contiguous(0xdead_0000_0000, 4, 0, 12);
    assert!(ctx.mr_reg(node.pdn, access::ALL, (0, 4096), &outside).is_err());
    let inside = PageList::contiguous(node.guest.ram().regions()[0].gpa(), 1, 0, 12);
    assert!(ctx.mr_reg(node.pdn, access::ALL, (u64::MAX - 10, 4096), &inside).is_err());
    assert!(ctx.mr_reg(node.pdn + 77, access::ALL, (0, 4096), &inside).is_err());
    assert!(Cq::create(ctx, 64, 999).is_err());
    let nonsense = crate::qp::Attr { mask: attr::STATE, state: qps::RTS, ..Default::default() };
    let end = node.rc();
    assert!(end.qp.modify(&nonsense).is_err());
    assert!(ctx.object(cmd::CQ_DESTROY, end.scq.cqn).is_err(), "in use");
    let mut request = [0u8; 16 + 96];
    request.iter_mut().for_each(|byte| *byte = dice.roll(256) as u8);
    let opcode = [cmd::MR_REG, cmd::QP_CREATE, cmd::CQ_CREATE, cmd::SRQ_CREATE, cmd::QP_MODIFY]
        [dice.roll(5) as usize];
    request[..2].copy_from_slice(&opcode.to_le_bytes());
    request[4..8].copy_from_slice(&ctx.id().to_le_bytes());
    let room = spec::PAGE as u32 / 8;
    let answer = node.guest.raw_control(&[&request], &[room], WAIT).expect("the control queue");
    assert!(answer.is_some(), "even nonsense is answered");
}
