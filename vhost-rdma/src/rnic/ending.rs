//! The end of things, which takes a real RNIC its time: each QP that is stopped or destroyed is a command to its firmware, or a system call at least.
//!
//! The worker has other guests to serve, so it does a few of these in a turn. QPs that go to ERR wait in a queue for the hardware to be told; a guest's
//! command to destroy a context is carried out piece by piece; and a NIC that is reset gives its whole device context away, to be closed
//! by the thread that serves this NIC alone, before the guest gets its answer. The next INIT opens another, on the same thread.

use std::collections::VecDeque;
use std::mem;

use virtio_rdma_abi::{attr_mask, event, qps};
use zerocopy::little_endian::U32;

use super::gone::Gone;
use super::nic::{Life, Nic};
use super::verbs::{HostError, HostVerbs};
use crate::engine::contexts::KERNEL;
use crate::engine::qp::State;
use crate::engine::timer::Timers;
use crate::engine::{Errand, Remains, Reply, Status};
use crate::memory::{AddressSpace, Ring};

/// Host objects that are stopped or destroyed in one turn.
const AT_ONCE: usize = 8;
/// Regions that are let go of in one: their end is not the worker's.
const REGIONS_AT_ONCE: usize = 512;

/// QPs that are in ERR as far as the guest is concerned, and that the hardware has still to be told about.
#[derive(Debug, Default)]
pub(super) struct Stopping {
    /// QPNs and serials.
    waiting: VecDeque<(u32, u32)>,
    /// QPs that were stopped by a pause: their guest is told when it goes on.
    paused: Vec<(u32, u32)>,
    /// The guest of a NIC that failed is told when its hardware stands still.
    fatal: bool,
}

impl Stopping {
    /// Whether the hardware may still be at work for a QP that is in ERR.
    pub(super) fn is_over(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// A device that was opened for an INIT.
pub(super) struct Opened {
    life: u64,
    status_page: Ring,
    host: Result<Box<dyn HostVerbs>, HostError>,
}

fn numbers(indices: impl Iterator<Item = usize>) -> Vec<u32> {
    indices.filter_map(|index| u32::try_from(index).ok()).collect()
}

impl Nic {
    /// Moves a QP to ERR, in the hardware too, soon; what is posted is flushed, there first.
    pub(super) fn enter_error(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if qp.state == State::Reset {
            return;
        }
        qp.state = State::Err;
        if !mem::replace(&mut qp.stopping, true) {
            self.stopping.waiting.push_back((qpn, qp.serial));
        }
    }

    /// Tells the hardware about some QPs in ERR; true if there were any.
    pub(super) fn stop_some(&mut self) -> bool {
        let found = !self.stopping.is_over();
        for _ in 0..AT_ONCE {
            let Some((qpn, serial)) = self.stopping.waiting.pop_front() else { break };
            let Some(qp) = self.qps.get_mut(&qpn).filter(|qp| qp.serial == serial) else {
                continue;
            };
            qp.stopping = false;
            let host = qp.host;
            let to_error = virtio_rdma_abi::QpAttr {
                mask: U32::new(attr_mask::STATE),
                qp_state: qps::ERR,
                ..virtio_rdma_abi::QpAttr::default()
            };
            // Also where it is there already: rdma_rxe flushes receives that were posted to a QP in ERR only when it is told again
            // (rxe_qp.c, rxe_qp_error), since a post of receives is no system call.
            self.forgo(|nic| nic.host.modify_qp(host, &to_error));
            self.schedule(qpn);
        }
        if self.stopping.is_over() && mem::take(&mut self.stopping.fatal) {
            self.tell_fatal();
        }
        found
    }

    /// Ends all that the hardware could do to guest memory: QPs in ERR neither send nor receive.
    fn stop_hardware(&mut self) {
        let running = |qp: &super::nic::Qp| !matches!(qp.state, State::Reset | State::Err);
        let ends: Vec<(u32, u32)> =
            self.qps.values().filter(|qp| running(qp)).map(|qp| (qp.qpn, qp.serial)).collect();
        ends.iter().for_each(|&(qpn, _)| self.enter_error(qpn));
        self.stopping.paused = ends;
        self.stop_some();
    }

    /// Hardware cannot be told to wait: a QP that could still write to guest memory ends here, and its guest finds it in ERR. True: not all have
    /// ended yet.
    pub(super) fn stand_still(&mut self) -> bool {
        if self.life == Life::Ready {
            self.life = Life::Paused;
            self.stop_hardware();
        } else {
            self.stop_some();
        }
        !self.stopping.is_over()
    }

    /// Goes on; QPs that ended meanwhile are told so.
    pub(super) fn go_on(&mut self) {
        if self.life != Life::Paused {
            return;
        }
        self.life = Life::Ready;
        self.outbox.wanted();
        for (qpn, serial) in mem::take(&mut self.stopping.paused) {
            let Some(qp) = self.qps.get(&qpn).filter(|qp| qp.serial == serial) else { continue };
            let ctx = qp.ctx;
            self.raise(event::QP_FATAL, qpn, ctx);
            self.schedule(qpn);
        }
        self.ask_host = true;
    }

    /// The whole NIC cannot go on.
    pub(super) fn fail_now(&mut self) {
        if matches!(self.life, Life::Ready | Life::Paused) {
            self.life = Life::Failed;
            // The hardware must not touch the memory of a guest that is told so.
            self.stopping.fatal = true;
            self.stop_hardware();
        }
    }

    fn tell_fatal(&mut self) {
        self.raise(event::DEVICE_FATAL, 0, KERNEL);
        self.outbox.deliver(&mut self.cqs, &mut self.counters);
    }

    /// The device context is of no use any more: the guest is told, and an INIT opens the device anew.
    pub(super) fn lost(&mut self) {
        if mem::replace(&mut self.host_gone, true) {
            return;
        }
        tracing::warn!(device = self.place.device, "the RNIC is gone or failed");
        // Its QPs end with it.
        self.stopping.waiting.clear();
        let alive = matches!(self.life, Life::Ready | Life::Paused);
        if alive {
            self.life = Life::Failed;
        }
        if mem::take(&mut self.stopping.fatal) || alive {
            self.tell_fatal();
        }
        // A removal may wait until the last one closes the device.
        let gone = Box::new(Gone::after(self.host.as_ref()));
        let context = mem::replace(&mut self.host, gone);
        super::events::end_aside((context, mem::take(&mut self.remains)));
    }

    /// Forgets every object and every guest address. From here on nothing is written to the guest's memory by this thread; the hardware stops
    /// when the remains are dropped.
    pub(super) fn forget_all(&mut self) {
        let used = self.life != Life::Idle;
        self.life = Life::Idle;
        self.lives += 1;
        self.release_addresses();
        self.place.directory.remove_qps(&self.place.device, self.qps.keys());
        self.inbox.clear();
        self.outbox = self.outbox.succeed();
        self.serials.clear();
        self.admitted = 0;
        self.mr_bytes = 0;
        self.run.clear();
        self.run_srqs.clear();
        self.dirty.clear();
        self.moderated = Timers::default();
        self.stopping = Stopping::default();
        let queues =
            (mem::take(&mut self.cqs), mem::take(&mut self.srqs), mem::take(&mut self.qps));
        let others = (mem::take(&mut self.pds), mem::take(&mut self.mrs), mem::take(&mut self.ahs));
        let more = (
            mem::take(&mut self.windows),
            mem::take(&mut self.groups),
            mem::take(&mut self.services),
        );
        let memory =
            (mem::take(&mut self.contexts), mem::take(&mut self.space), self.status_page.take());
        if !used {
            return;
        }
        // First of all the device context: nothing that it writes to may go before.
        let gone: Box<dyn HostVerbs> = Box::new(Gone::after(self.host.as_ref()));
        let host = mem::replace(&mut self.host, gone);
        self.host_gone = true;
        self.remains.insert(0, Remains::new((host, queues, others, more, memory)));
    }

    /// A driver begins: anew, and on a device that is open.
    pub(super) fn init(&mut self, space: AddressSpace, status_page: Ring) -> Result<Reply, Status> {
        self.forget_all();
        self.space = space;
        if !self.host_gone {
            return self.begin(status_page);
        }
        self.opening = true;
        let (life, opener) = (self.lives, self.place.opener.clone());
        Ok(Reply::Errand(Errand::new(move || Opened { life, status_page, host: opener() })))
    }

    /// The rest of an INIT.
    pub(super) fn opened(&mut self, opened: Opened) -> Result<Reply, Status> {
        let Opened { life, status_page, host } = opened;
        if life != self.lives || !mem::take(&mut self.opening) {
            self.remains.push(Remains::new(host));
            return Err(Status::STATE);
        }
        self.host = host.map_err(|error| {
            tracing::warn!(device = self.place.device, %error, "the RNIC cannot be opened again");
            Status::FATAL
        })?;
        self.host_gone = false;
        // Unplugged meanwhile.
        if status_page.lives_in(&self.space) { self.begin(status_page) } else { Err(Status::FAULT) }
    }

    fn begin(&mut self, status_page: Ring) -> Result<Reply, Status> {
        self.status_page = Some(status_page);
        self.contexts.begin();
        self.ask_host = true;
        self.life = Life::Ready;
        Ok(Reply::Init(virtio_rdma_abi::InitResp {
            abi_version: U32::new(virtio_rdma_abi::ABI_VERSION),
            reserved: U32::new(0),
        }))
    }

    /// Destroys some of what a context has, users before what they use.
    pub(super) fn destroy_context(&mut self, ctx: u32) -> Result<Reply, Status> {
        if ctx == KERNEL {
            return Err(Status::INVAL);
        }
        if !self.contexts.contains(ctx) {
            return Err(Status::NOENT);
        }
        let mut left = AT_ONCE;
        left -= self.remove_windows_of(ctx, left);
        let of_context = self.qps.values().filter(|qp| qp.ctx == ctx);
        let qpns: Vec<u32> = of_context.take(left).map(|qp| qp.qpn).collect();
        left -= qpns.len();
        if !qpns.is_empty() {
            qpns.into_iter().for_each(|qpn| self.remove_qp(qpn));
            self.drain_host();
        }
        let srqs =
            numbers(self.srqs.iter().filter(|(_, srq)| srq.ctx == ctx).take(left).map(|(n, _)| n));
        left -= srqs.len();
        srqs.into_iter().for_each(|srqn| self.remove_srq(srqn));
        let ahs =
            numbers(self.ahs.iter().filter(|(_, ah)| ah.ctx == ctx).take(left).map(|(n, _)| n));
        left -= ahs.len();
        ahs.into_iter().for_each(|number| self.remove_ah(number));
        let regions = if left > 0 { REGIONS_AT_ONCE } else { 0 };
        let keys =
            self.mrs.iter().filter(|(_, mr)| mr.ctx == ctx).take(regions).map(|(&key, _)| key);
        let keys: Vec<u32> = keys.collect();
        if keys.len() == regions {
            left = 0;
        }
        keys.into_iter().for_each(|key| self.remove_mr(key));
        let pds =
            numbers(self.pds.iter().filter(|(_, pd)| pd.ctx == ctx).take(left).map(|(n, _)| n));
        left -= pds.len();
        for pdn in pds {
            let pd = self.pds.remove(pdn as usize);
            self.forgo(|nic| nic.host.free_pd(pd.host));
        }
        if left == 0 {
            return Ok(Reply::More);
        }
        let cqs = numbers(self.cqs.iter().filter(|(_, cq)| cq.ctx == ctx).map(|(n, _)| n));
        cqs.into_iter().for_each(|cqn| self.remove_cq(cqn));
        self.contexts.remove(ctx);
        Ok(Reply::Done)
    }
}
