//! What is left of a queue pair's earlier life: completions in the host's CQ, and its serial.

use easy_ext::ext;
use vhost_rdma_engine::nic::budget::Budget;

use super::cq::CqVerbs as _;
use super::create::Create as _;
use super::nic::Nic;
use super::work::Drain;

#[ext(Drains)]
pub(super) impl Nic {
    /// A QP is in RESET: nothing of its earlier life may be mistaken for the next one's. The serial
    /// of the one that is over.
    fn begin_anew(&mut self, qpn: u32) -> Option<u32> {
        let serial = self.take_serial(qpn);
        let qp = self.qps.get_mut(&qpn)?;
        let old = std::mem::replace(&mut qp.own.serial, serial);
        qp.own.stopping = false;
        self.backing.serials.remove(&old);
        self.reset_qp(qpn);
        Some(old)
    }

    /// All that the host CQ may hold now.
    fn drain(&self) -> Drain {
        Drain { left: self.backing.host.cq_entries().max(1) }
    }

    /// Takes what the host CQ held when the drain began, so that no completion outlives what it is
    /// of; true: that was all. Peers may go on to complete receives of other QPs; those are none of
    /// ours.
    fn drain_host(&mut self, drain: &mut Drain, budget: &mut Budget) -> bool {
        loop {
            if drain.left == 0 || self.backing.host_gone {
                return true;
            }
            let taken = self.poll_host();
            drain.left = if taken == 0 { 0 } else { drain.left.saturating_sub(taken) };
            if drain.left > 0 && budget.is_over(&self.meter) {
                return false;
            }
        }
    }
}
