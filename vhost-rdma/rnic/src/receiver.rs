//! The receiving side: copies receives from guest rings into bursts and posts them to the QP that
//! owns them.

use easy_ext::ext;
use vhost_rdma_engine::nic::Nanos;
use vhost_rdma_engine::nic::budget::cost;
use vhost_rdma_engine::nic::receive::Receive;
use virtio_rdma_abi::{Cqe, cqe_flags, wc_opcode, wc_status};
use zerocopy::little_endian::{U16, U32, U64};

use super::nic::{HostSide, Nic, Qp};
use super::receives::{BURST, push};
use super::work::HOST_CALL;
use super::wr_id::{Queue, Tag};

/// What a NIC may be charged between two of its rounds for receives that go to the hardware as soon
/// as they were rung for.
pub(super) const AT_ONCE: Nanos = 25_000;

#[ext(Receiver)]
pub(super) impl Nic {
    /// A QP's turn: posts some of the receives that the guest has posted, as many as the host QP
    /// takes.
    fn post_receives(&mut self, qpn: u32) {
        // A burst in each turn: what is left comes in the next.
        if self.post_receive_burst(qpn) {
            self.schedule(qpn);
        }
    }

    /// The guest has rung: they go at once, as far as there is time for it.
    fn post_receives_at_once(&mut self, qpn: u32) {
        if !self.at_once(|nic| nic.post_receive_burst(qpn)) {
            self.schedule(qpn);
        }
    }

    /// Posts bursts while there are more, and time; false if there is something left to do. It goes
    /// on while doorbells are looked at, which is no NIC's own time and has no look at the clock
    /// between two posts.
    fn at_once(&mut self, mut burst: impl FnMut(&mut Self) -> bool) -> bool {
        while self.backing.at_once < AT_ONCE {
            let before = self.meter.charged();
            let more = burst(self);
            let charged = self.meter.charged().wrapping_sub(before);
            self.backing.at_once = self.backing.at_once.saturating_add(charged);
            if !more {
                return true;
            }
        }
        false
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
        if !self.backing.receives.wrs.is_empty() {
            self.meter.charge_each(cost::REQUEST, self.backing.receives.wrs.len());
            self.meter.charge(HOST_CALL);
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
