//! The receiving side: copies receives from guest rings into bursts and posts them to the QP that
//! owns them.

use easy_ext::ext;
use vhost_rdma_engine::nic::receive::Receive;
use virtio_rdma_abi::{Cqe, cqe_flags, wc_opcode, wc_status};
use zerocopy::little_endian::{U16, U32, U64};

use super::nic::{HostSide, Nic, Qp};
use super::receives::{BURST, push};
use super::wr_id::{Queue, Tag};

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
