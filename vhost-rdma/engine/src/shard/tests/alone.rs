//! What can be seen where nothing crosses: whoever looks finds all of it done, and nothing of the
//! link's own left.

use virtio_rdma_abi::{opcode, qpt, send_flags};

use super::connected::{Moderated, US};
use crate::shard::testing::driver::{World, wqe};
use crate::shard::{Command, Status};

#[test]
fn a_moderated_event_leaves_no_timer_behind() {
    let mut moderated = Moderated::new(100, 50);
    moderated.send(1);
    assert!(moderated.world.next_deadline().is_some());
    moderated.world.advance(1_000 * US);
    assert_eq!(moderated.events(), 1);
    assert_eq!(moderated.world.next_deadline(), None);
}

#[test]
fn posted_work_counts_when_a_cq_shrinks() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    for n in 0..6 {
        b.post_receive(&mut qb, n, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, send_flags::SIGNALED, n), &[]);
    }
    let (_, ring) = a.ring(1024);
    let shrink = Command::CqResize { cqn: qa.cq.cqn, entries: 4, requested: 4, ring };
    assert_eq!(world.execute(&a, a.ctx, shrink).unwrap_err(), Status::INVAL);
}
