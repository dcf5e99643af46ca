//! The receiving side: copies receives from guest rings into bursts and posts them to the QP that
//! owns them.

use easy_ext::ext;
use vhost_rdma_engine::nic::provider::ReceiveSide;
use vhost_rdma_engine::nic::receive::{Receive, ReceiveRing};
use virtio_rdma_abi::{Cqe, cqe_flags, wc_opcode, wc_status};
use zerocopy::little_endian::{U16, U32, U64};

use super::cq::{Queue, Tag};
use super::nic::{HostSide, Nic, Qp};
use super::verbs::{HostSge, RecvBurst, RecvWr};

/// Work requests of one burst.
pub(super) const BURST: u32 = 32;

/// A receive queue: the guest's ring, and what of it the hardware holds.
#[derive(Debug)]
pub struct Receives {
    pub(super) ring: ReceiveRing,
    depth: u32,
    /// By index, modulo their number: as many as the hardware may have, whatever the guest's ring
    /// has room for.
    wr_ids: Box<[u64]>,
    posted: u32,
    done: u32,
}

impl Receives {
    const fn in_flight(&self) -> u32 {
        self.posted.wrapping_sub(self.done)
    }

    /// The next receive that the hardware never saw: refused by it, or still in the ring.
    fn take_unseen(&mut self, into: &mut Receive) -> Option<(u64, u32)> {
        let index = self.posted;
        let wr_id = if index == self.ring.taken() {
            self.ring.take(into).then_some(into.wr_id)?
        } else {
            *self.wr_ids.get(index as usize & (self.wr_ids.len() - 1))?
        };
        self.posted = index.wrapping_add(1);
        self.done = self.posted;
        Some((wr_id, index))
    }

    const fn has_unseen(&self) -> bool {
        self.posted != self.ring.taken() || self.ring.waiting() > 0
    }

    /// The receive at `index` is done; a receive queue completes in order. `None` if it is not with
    /// the hardware.
    pub(super) fn complete(&mut self, index: u32) -> Option<u64> {
        if index.wrapping_sub(self.done) >= self.in_flight() {
            return None;
        }
        self.done = index.wrapping_add(1);
        self.wr_ids.get(index as usize & (self.wr_ids.len() - 1)).copied()
    }
}

impl ReceiveSide for Receives {
    fn new(ring: ReceiveRing, max_wr: u32) -> Self {
        let wr_ids = vec![0; (max_wr as usize).next_power_of_two()].into();
        Self { ring, depth: max_wr, wr_ids, posted: 0, done: 0 }
    }

    fn ring(&self) -> &ReceiveRing {
        &self.ring
    }

    fn ring_mut(&mut self) -> &mut ReceiveRing {
        &mut self.ring
    }

    fn reset(&mut self) {
        self.ring.reset();
        self.posted = 0;
        self.done = 0;
    }
}

/// Appends a receive to a burst; one that names too many elements goes with one that no key opens,
/// and fails as the hardware fails that.
pub(super) fn push(burst: &mut RecvBurst, receive: &Receive, wr_id: u64) {
    let first = u32::try_from(burst.sges.len()).unwrap_or(u32::MAX);
    if receive.malformed {
        burst.sges.push(HostSge { addr: !0xfff, length: 0x1000, lkey: 0 });
    } else {
        burst.sges.extend(receive.sges.iter().map(|sge| HostSge {
            addr: sge.addr.get(),
            length: sge.length.get(),
            lkey: sge.lkey.get(),
        }));
    }
    let count = u32::try_from(burst.sges.len()).unwrap_or(u32::MAX) - first;
    burst.wrs.push(RecvWr { wr_id, first, count });
}

#[ext(Receiver)]
pub(super) impl Nic {
    /// Posts the receives that the guest has posted, as many as the host QP takes.
    fn post_receives(&mut self, qpn: u32) {
        // Bounded by the depth of the queue.
        while self.post_receive_burst(qpn) {}
    }

    /// Posts one burst; true if there are more, and room for them.
    fn post_receive_burst(&mut self, qpn: u32) -> bool {
        let Some(qp) = self.qps.get_mut(&qpn) else { return false };
        let Qp { receive: Some(receive), own: HostSide { serial, host, .. }, .. } = &mut **qp
        else {
            return false;
        };
        self.backing.receives.clear();
        let room = receive.depth.saturating_sub(receive.in_flight()).min(BURST);
        let first = receive.posted;
        let mut taken = Receive::default();
        for _ in 0..room {
            if !receive.ring.take(&mut taken) {
                break;
            }
            let wr_id =
                Tag { queue: Queue::Receive, serial: *serial, index: taken.index }.to_wr_id();
            push(&mut self.backing.receives, &taken, wr_id);
            let slot = taken.index as usize & (receive.wr_ids.len() - 1);
            if let Some(slot) = receive.wr_ids.get_mut(slot) {
                *slot = taken.wr_id;
            }
            receive.posted = taken.index.wrapping_add(1);
        }
        let more = receive.ring.waiting() > 0 && receive.in_flight() < receive.depth;
        if !self.backing.receives.wrs.is_empty()
            && let Err(refused) = self.backing.host.post_recv(*host, &self.backing.receives)
        {
            tracing::debug!(qpn, %refused.error, refused.posted, "the RNIC refuses a receive");
            let seen = u32::try_from(refused.posted).unwrap_or(u32::MAX);
            receive.posted = first.wrapping_add(seen);
            self.qp_fatal(qpn);
            return false;
        }
        more
    }

    /// Flushes receives that the hardware never saw, once it has flushed what it had; true if there
    /// are more.
    fn flush_receives(&mut self, qpn: u32, budget: &mut u32) -> bool {
        let mut taken = Receive::default();
        loop {
            let Some(qp) = self.qps.get_mut(&qpn) else { return false };
            let cqn = qp.recv_cqn;
            let Some(receive) = &mut qp.receive else { return false };
            if receive.in_flight() > 0 || !receive.has_unseen() {
                return false;
            }
            if *budget == 0 {
                return true;
            }
            *budget -= 1;
            let Some((wr_id, index)) = receive.take_unseen(&mut taken) else { return false };
            let mut cqe = Cqe {
                wr_id: U64::new(wr_id),
                qpn: U32::new(qpn),
                opcode: wc_opcode::RECV,
                status: wc_status::WR_FLUSH_ERR,
                flags: U16::new(cqe_flags::RECV | cqe_flags::SOLICITED),
                wqe_index: U32::new(index),
                ..Cqe::default()
            };
            self.complete(cqn, &mut cqe, true);
        }
    }
}
