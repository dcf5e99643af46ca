//! Connections end whose peer may not be reached any more: after a change of peers or addresses.

use easy_ext::ext;
use vhost_rdma_engine::link::is_multicast;
use vhost_rdma_engine::nic::Nanos;
use vhost_rdma_engine::nic::budget::Budget;
use vhost_rdma_engine::nic::qp::State;
use vhost_rdma_engine::nic::roster::Slots;

use super::addresses::Addresses as _;
use super::mcast::Mcast as _;
use super::nic::{Nic, PeerCheck, Qp};
use super::work::HOST_CALL;

/// What one look at who may be reached takes.
const CHECK: Nanos = 500;

#[ext(PeerChecks)]
pub(super) impl Nic {
    /// Has the connections to peers that may not be reached any more end: a guest has as many as it
    /// likes, so in steps. What is made from now on is checked where it is made.
    fn check_peers(&mut self) {
        let (qps, ahs) = (self.qp_numbers.walk(), Slots::of(&self.ahs));
        // From the beginning, if it had begun already.
        self.backing.peer_check = PeerCheck { qps, ahs, groups: true };
    }

    /// Goes on with it.
    fn check_peers_on(&mut self, budget: &mut Budget) {
        let mut check = std::mem::take(&mut self.backing.peer_check);
        self.check_some_peers(&mut check, budget);
        self.backing.peer_check = check;
    }

    fn check_some_peers(&mut self, check: &mut PeerCheck, budget: &mut Budget) {
        while let Some(qpn) = check.qps.next(&self.qp_numbers) {
            self.meter.charge(CHECK);
            if self.qps.get(&qpn).is_some_and(|qp| self.is_cut_off(qp)) {
                self.meter.charge(HOST_CALL);
                self.qp_fatal(qpn);
            }
            if budget.is_over(&self.meter) {
                return;
            }
        }
        while let Some(number) = check.ahs.sweep(&self.ahs, (&self.meter, budget), |_| true) {
            self.meter.charge(CHECK);
            let Some(dgid) = self.ahs.get(number as usize).map(|ah| ah.av.dgid) else { continue };
            let revoked = if is_multicast(&dgid) {
                self.group(&dgid).is_err()
            } else {
                self.reach(&dgid).is_none()
            };
            if let Some(ah) = self.ahs.get_mut(number as usize) {
                ah.own.revoked = revoked;
            }
        }
        if !budget.is_over(&self.meter) && std::mem::take(&mut check.groups) {
            self.leave_forbidden();
        }
    }

    /// Whether a QP is connected to a peer that may not be reached.
    fn is_cut_off(&self, qp: &Qp) -> bool {
        qp.kind.is_connected()
            && !matches!(qp.state, State::Reset | State::Init | State::Err)
            && self.reach(&qp.attrs.av().dgid).is_none()
    }
}
