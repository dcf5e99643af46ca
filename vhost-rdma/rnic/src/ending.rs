//! The end of things, which takes a real RNIC its time: each QP that is stopped or destroyed is a
//! command to its firmware, or a system call at least.
//!
//! The worker has other guests to serve, so it does a few of these in a turn. QPs that go to ERR
//! wait in a queue for the hardware to be told; a guest's command to destroy a context is carried
//! out piece by piece; and a NIC that is reset gives its whole device context away, to be closed by
//! the thread that serves this NIC alone, before the guest gets its answer. The next INIT opens
//! another, on the same thread.

use std::mem;

use easy_ext::ext;
use vhost_rdma_engine::nic::NicState;
use vhost_rdma_engine::nic::STEP;
use vhost_rdma_engine::nic::budget::{Budget, cost};
use vhost_rdma_engine::nic::qp::State;
use vhost_rdma_engine::nic::work::Begun;
use vhost_rdma_engine::nic::{DeferredDrop, Reply, Status};
use vhost_rdma_memory::Ring;
use virtio_rdma_abi::{attr_mask, event, qps};
use zerocopy::little_endian::U32;

use super::addresses::Addresses as _;
use super::findings::{Finding, Opened};
use super::gone::Gone;
use super::mw::WindowVerbs as _;
use super::nic::{Nic, Rnic};
use super::refusal::Control as _;
use super::work::{END, HOST_CALL};

/// Host objects that are stopped in one turn.
const AT_ONCE: usize = 8;

#[ext(Endings)]
pub(super) impl Nic {
    /// A QP moved to ERR: the hardware is told soon, and flushes first.
    fn stop_soon(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if !mem::replace(&mut qp.own.stopping, true) {
            self.backing.stopping.waiting.push_back((qpn, qp.own.serial));
        }
    }

    /// Tells the hardware about some QPs in ERR; true if there were any.
    fn stop_some(&mut self) -> bool {
        let found = !self.backing.stopping.is_over();
        self.find_running();
        for _ in 0..AT_ONCE {
            let Some((qpn, serial)) = self.backing.stopping.waiting.pop_front() else { break };
            let Some(qp) = self.qps.get_mut(&qpn).filter(|qp| qp.own.serial == serial) else {
                continue;
            };
            qp.own.stopping = false;
            // It is on its way to a new life.
            if qp.state != State::Err {
                continue;
            }
            let host = qp.own.host;
            let to_error = virtio_rdma_abi::QpAttr {
                mask: U32::new(attr_mask::STATE),
                qp_state: qps::ERR,
                ..virtio_rdma_abi::QpAttr::default()
            };
            // Also where it is there already: rdma_rxe flushes receives that were posted to a QP in
            // ERR only when it is told again (rxe_qp.c, rxe_qp_error), since a post of receives is
            // no system call.
            self.meter.charge(HOST_CALL);
            self.forgo(|nic| nic.backing.host.modify_qp(host, &to_error));
            self.schedule(qpn);
        }
        if self.backing.stopping.is_over() && mem::take(&mut self.backing.stopping.fatal) {
            self.tell_fatal();
        }
        found
    }

    /// Ends all that the hardware could do to guest memory: QPs in ERR neither send nor receive.
    fn stop_hardware(&mut self) {
        self.backing.stopping.all = self.qp_numbers.walk();
        self.stop_some();
    }

    /// Moves some of the QPs to ERR that still run though the NIC stands still.
    fn find_running(&mut self) {
        let mut budget = self.meter.budget(STEP);
        while !self.backing.stopping.all.is_over() && !budget.is_over(&self.meter) {
            let Some(qpn) = self.backing.stopping.all.next(&self.qp_numbers) else { break };
            self.meter.charge(cost::VISIT);
            let Some(qp) = self.qps.get(&qpn) else { continue };
            let (serial, state) = (qp.own.serial, qp.state);
            if !matches!(state, State::Reset | State::Err) {
                self.enter_error(qpn);
                self.backing.stopping.paused.push((qpn, serial));
            }
        }
    }

    /// Hardware cannot be told to wait: a QP that could still write to guest memory ends here, and
    /// its guest finds it in ERR. True: not all have ended yet.
    fn stand_still(&mut self, begins: bool) -> bool {
        if begins {
            self.stop_hardware();
        } else {
            self.stop_some();
        }
        !self.backing.stopping.is_over()
    }

    /// Goes on; QPs that ended meanwhile are told so.
    fn go_on(&mut self) {
        self.backing.stopping.tell.append(&mut self.backing.stopping.paused);
        self.backing.ask_host = true;
    }

    /// Tells a guest that goes on of some of the QPs that ended meanwhile.
    fn tell_some(&mut self, budget: &mut Budget) {
        while !budget.is_over(&self.meter)
            && let Some((qpn, serial)) = self.backing.stopping.tell.pop()
        {
            self.meter.charge(cost::OBJECT);
            let Some(qp) = self.qps.get(&qpn).filter(|qp| qp.own.serial == serial) else {
                continue;
            };
            let ctx = qp.ctx;
            self.raise(event::QP_FATAL, qpn, ctx);
            self.schedule(qpn);
        }
    }

    /// The whole NIC cannot go on.
    fn fail_now(&mut self) {
        if matches!(self.life, NicState::Ready | NicState::Paused) {
            self.life = NicState::Failed;
            // The hardware must not touch the memory of a guest that is told so.
            self.backing.stopping.fatal = true;
            self.stop_hardware();
        }
    }

    /// Forgets every object and every guest address. From here on nothing is written to the guest's
    /// memory by this thread; the hardware stops when what is returned to be dropped is dropped.
    fn forget_all(&mut self) {
        self.release_addresses();
        self.backing.inbox.clear();
        let dropped = mem::take(&mut self.deferred_drops);
        let old = self.clear();
        // First of all the device context, which goes with the old one: nothing that it writes to
        // may go before.
        self.deferred_drops.push(DeferredDrop::new(old));
        self.deferred_drops.extend(dropped);
    }

    /// The device context ends, and before it the QPNs are out of the directory: the host can give
    /// them again.
    fn close(&mut self) {
        self.release_addresses();
        let qpns = mem::take(&mut self.qp_numbers);
        let mut all = qpns.walk();
        let place = &self.backing.place;
        while let Some(qpn) = all.next(&qpns) {
            place.directory.remove_qp(&place.device, qpn, self.settings.vni);
        }
        let gone = Box::new(Gone::after(self.backing.host.as_ref()));
        drop(mem::replace(&mut self.backing.host, gone));
    }

    /// A driver begins, on a device that is open, or is opened for it.
    fn open_host(&mut self, status_page: Ring) -> Begun<Rnic> {
        if !self.backing.host_gone {
            return Begun::Done(self.begin_on_host(status_page));
        }
        self.backing.opening = true;
        let opener = self.backing.place.opener.clone();
        self.aside(move || Finding::Opened(Opened { status_page, host: opener() }))
    }

    /// The rest of an INIT.
    fn opened(&mut self, opened: Opened) -> Result<Begun<Rnic>, Status> {
        let Opened { status_page, host } = opened;
        self.backing.opening = false;
        self.backing.host = host.map_err(|error| {
            tracing::warn!(
                device = self.backing.place.device,
                %error,
                "the RNIC cannot be opened again"
            );
            Status::FATAL
        })?;
        self.backing.host_gone = false;
        // Unplugged meanwhile.
        if status_page.lives_in(&self.space) {
            Ok(Begun::Done(self.begin_on_host(status_page)))
        } else {
            Err(Status::FAULT)
        }
    }

    fn begin_on_host(&mut self, status_page: Ring) -> Reply {
        self.backing.ask_host = true;
        self.begin(status_page)
    }

    /// Ends the windows of a context, and looks at no others; true: that was all.
    fn end_windows(&mut self, ctx: u32, budget: &mut Budget) -> bool {
        while let Some(number) = self.backing.windows.first_of(ctx) {
            self.meter.charge(cost::VISIT + END);
            self.remove_window(number);
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }
}
