//! Asynchronous events of the host, as the guest's.

use easy_ext::ext;
use vhost_rdma_engine::nic::NicState;
use vhost_rdma_engine::nic::contexts::KERNEL;
use vhost_rdma_engine::shard::Nanos;
use virtio_rdma_abi::event;

use super::addresses::Addresses as _;
use super::ending::Endings as _;
use super::nic::Nic;
use super::refusal::Control as _;
use super::verbs::HostEvent;

/// Events taken in one turn.
const TURN: usize = 64;
/// How often a worker that never sleeps asks for events, in nanoseconds: each look is a system
/// call.
const INTERVAL: Nanos = 1_000_000;

#[ext(Events)]
pub(super) impl Nic {
    /// Takes the host's events, if it is time; true if there were any.
    fn take_events(&mut self, now: Nanos) -> bool {
        if self.backing.host_gone
            || (!self.backing.ask_host && now.saturating_sub(self.backing.asked_at) < INTERVAL)
        {
            return false;
        }
        self.backing.ask_host = false;
        self.backing.asked_at = now;
        let mut found = false;
        for _ in 0..TURN {
            let Some(event) = self.backing.host.next_event() else { return found };
            found = true;
            self.happened(event);
        }
        self.backing.ask_host = true;
        found
    }

    fn happened(&mut self, event: HostEvent) {
        if !matches!(self.life, NicState::Ready | NicState::Paused) && event != HostEvent::Fatal {
            return;
        }
        match event {
            HostEvent::Qp(host, kind) => {
                let found = self.qps.values().find(|qp| qp.own.host == host);
                let Some((qpn, ctx)) = found.map(|qp| (qp.qpn, qp.ctx)) else { return };
                self.raise(kind, qpn, ctx);
                if matches!(kind, event::QP_FATAL | event::QP_REQ_ERR | event::QP_ACCESS_ERR) {
                    self.enter_error(qpn);
                }
            }
            HostEvent::Srq(host, kind) => {
                let found = self.srqs.iter_mut().find(|(_, srq)| srq.own.host == host);
                let Some((number, srq)) = found else { return };
                let srqn = u32::try_from(number).unwrap_or(u32::MAX);
                let ctx = srq.ctx;
                if kind == event::SRQ_LIMIT_REACHED {
                    srq.limit = 0;
                    self.raise(kind, srqn, ctx);
                } else {
                    self.srq_failed(srqn);
                }
            }
            // It has room for whatever was admitted: the hardware is at fault, and nobody's
            // completions can be trusted.
            HostEvent::Cq => self.fail_now(),
            HostEvent::Port { active } => {
                let kind = if active { event::PORT_ACTIVE } else { event::PORT_ERR };
                self.raise(kind, 1, KERNEL);
            }
            HostEvent::Gids => self.host_addresses_changed(),
            HostEvent::Fatal => self.lost(),
        }
    }
}
