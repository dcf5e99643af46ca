//! From completions of the host's one CQ to the guest's CQs.
//!
//! A host `wr_id` says all that is needed: which queue (by a serial, so that completions of a QP
//! that was reset or is gone are told from those of its successor) and which work request of it.
//! Every entry of a guest CQ is written here, on the worker's thread.

use easy_ext::ext;
use vhost_rdma_engine::nic::Nanos;
use vhost_rdma_engine::nic::NicState;
use vhost_rdma_engine::nic::budget::cost;
use vhost_rdma_engine::nic::qp::{Kind, State};
use vhost_rdma_engine::nic::timer::Waiting;
use virtio_rdma_abi::{Cqe, cqe_flags, wc_opcode, wc_status};
use zerocopy::little_endian::{U16, U32, U64};

use super::addresses::Addresses as _;
use super::nic::Nic;
use super::refusal::Control as _;
use super::srq::SharedReceives as _;
use super::srq::SrqVerbs as _;
use super::verbs::HostWc;
use super::windows::At;
use super::wr_id::{Queue, Tag};

/// Rounds of polling in one turn: what one NIC can make another wait for.
const POLLS: usize = 4;

#[ext(CqVerbs)]
pub(super) impl Nic {
    /// Takes completions from the host, a bounded number; how many there were.
    fn poll_host(&mut self) -> u32 {
        let mut found = 0;
        for _ in 0..POLLS {
            let mut wcs = std::mem::take(&mut self.backing.wcs);
            let polled = self.backing.host.poll(&mut wcs);
            found += u32::try_from(wcs.len()).unwrap_or(u32::MAX);
            self.meter.charge_each(cost::REQUEST, wcs.len());
            for wc in wcs.drain(..) {
                self.completed(&wc);
            }
            self.backing.wcs = wcs;
            match polled {
                Ok(true) => {}
                Ok(false) => return found,
                Err(error) => {
                    tracing::warn!(
                        device = self.backing.place.device,
                        %error,
                        "the RNIC's CQ cannot be polled"
                    );
                    self.lost();
                    return found.max(1);
                }
            }
        }
        found
    }

    /// Whether the host has completions; what it has is taken.
    fn peek_host(&mut self) -> bool {
        self.life == NicState::Ready && self.poll_host() > 0
    }

    fn completed(&mut self, wc: &HostWc) {
        let Some(tag) = Tag::from_wr_id(wc.wr_id) else { return };
        match tag.queue {
            Queue::Send => self.send_completed(tag, wc),
            Queue::Receive => self.receive_completed(tag, wc),
            Queue::Shared => self.shared_completed(tag, wc),
        }
    }

    fn send_completed(&mut self, tag: Tag, wc: &HostWc) {
        // A queue that is gone, or an earlier life of this one: nobody waits for it.
        let Some(&qpn) = self.backing.serials.get(&tag.serial) else { return };
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let cqn = qp.send_cqn;
        let Some(send) = &mut qp.send else { return };
        let Some((sent, mut moved)) = send.complete(tag.index) else { return };
        let ok = wc.status == wc_status::SUCCESS;
        let wanted = sent.signaled || !ok;
        let blocked = send.queue.waiting() > 0 || send.fault.is_some();
        if ok {
            moved.add(&sent, tag.index);
        } else if let Some(window) = sent.window {
            self.backing.windows.failed(window, At { serial: tag.serial, index: tag.index });
        }
        for (window, index) in moved.windows {
            self.backing.windows.done(window, At { serial: tag.serial, index });
        }
        self.counters.tx_messages += moved.messages;
        self.counters.tx_bytes += moved.out;
        self.counters.rx_bytes += moved.back;
        if wanted {
            let mut cqe = Cqe {
                wr_id: U64::new(sent.wr_id),
                qpn: U32::new(qpn),
                opcode: if ok { sent.opcode } else { 0 },
                status: wc.status,
                flags: U16::new(if ok { 0 } else { cqe_flags::SOLICITED }),
                byte_len: U32::new(if ok { sent.len } else { 0 }),
                wqe_index: U32::new(tag.index),
                vendor_err: U32::new(wc.vendor_err),
                ..Cqe::default()
            };
            self.complete(cqn, &mut cqe, !ok);
        }
        if ok {
            if blocked {
                self.schedule(qpn);
            }
        } else {
            self.failed(qpn, wc.status);
        }
    }

    fn receive_completed(&mut self, tag: Tag, wc: &HostWc) {
        let Some(&qpn) = self.backing.serials.get(&tag.serial) else { return };
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let cqn = qp.recv_cqn;
        let Some(receive) = &mut qp.receive else { return };
        let Some(wr_id) = receive.complete(tag.index) else { return };
        let blocked = receive.ring.waiting() > 0;
        let flags = 0;
        self.received(cqn, qpn, (wr_id, tag.index, flags), wc);
        if wc.status != wc_status::SUCCESS {
            self.failed(qpn, wc.status);
        } else if blocked {
            self.schedule(qpn);
        }
    }

    fn shared_completed(&mut self, tag: Tag, wc: &HostWc) {
        let Some(&srqn) = self.backing.serials.get(&tag.serial) else { return };
        let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
        let Some((wr_id, index)) = srq.complete(tag.index) else { return };
        if srq.ring.waiting() > 0 {
            self.schedule_shared(srqn);
        }
        self.look_at_limit(srqn);
        // The QP may be gone; its receive is used up all the same.
        let Some(qp) = self.qps.get(&wc.qpn) else { return };
        let cqn = qp.recv_cqn;
        self.received(cqn, wc.qpn, (wr_id, index, cqe_flags::SRQ), wc);
        if wc.status != wc_status::SUCCESS {
            self.failed(wc.qpn, wc.status);
        }
    }

    /// A receive's entry. Whether the message was solicited is not passed on by libibverbs, so each
    /// one counts as that: an event too many costs a look, one too few costs a program its life.
    fn received(&mut self, cqn: u32, qpn: u32, receive: (u64, u32, u16), wc: &HostWc) {
        let (wr_id, index, mut flags) = receive;
        flags |= cqe_flags::RECV | cqe_flags::SOLICITED;
        let ok = wc.status == wc_status::SUCCESS;
        if ok {
            self.counters.rx_messages += 1;
            self.counters.rx_bytes += u64::from(wc.byte_len);
            flags |= if wc.grh { cqe_flags::GRH } else { 0 };
            flags |= if wc.with_imm { cqe_flags::IMM } else { 0 };
            if wc.with_inv {
                flags |= cqe_flags::INV;
                self.backing.windows.freed_by_peer(u32::from_le_bytes(wc.imm));
            }
            if wc.grh && self.qps.get(&qpn).is_some_and(|qp| qp.kind == Kind::Ud) && self.is_ipv4()
            {
                flags |= cqe_flags::IPV4;
            }
        }
        let opcode = if wc.opcode == wc_opcode::RECV_RDMA_WITH_IMM {
            wc_opcode::RECV_RDMA_WITH_IMM
        } else {
            wc_opcode::RECV
        };
        let mut cqe = Cqe {
            wr_id: U64::new(wr_id),
            qpn: U32::new(qpn),
            opcode,
            status: wc.status,
            flags: U16::new(flags),
            byte_len: U32::new(if ok { wc.byte_len } else { 0 }),
            imm: U32::from_bytes(wc.imm),
            src_qp: U32::new(wc.src_qp),
            wqe_index: U32::new(index),
            vendor_err: U32::new(wc.vendor_err),
            pkey_index: U16::new(wc.pkey_index),
            sl: wc.sl,
            ..Cqe::default()
        };
        self.complete(cqn, &mut cqe, true);
    }

    /// A work request failed: the hardware says what that makes of the QP.
    fn failed(&mut self, qpn: u32, status: u8) {
        let Some(qp) = self.qps.get(&qpn) else { return };
        if qp.state == State::Err {
            return self.schedule(qpn);
        }
        let state = self
            .backing
            .host
            .query_qp(qp.own.host)
            .ok()
            .and_then(|(state, _)| State::from_abi(state));
        match state {
            Some(State::Sqe) => {
                if let Some(qp) = self.qps.get_mut(&qpn) {
                    qp.state = State::Sqe;
                }
                self.schedule(qpn);
            }
            Some(State::Err) | None => self.enter_error(qpn),
            // The error was of one receive only, or it is the flush of an earlier life.
            Some(_) if status == wc_status::WR_FLUSH_ERR => self.enter_error(qpn),
            Some(_) => {}
        }
    }

    /// Has the events looked at that have waited long enough; true if there were any.
    fn end_waits(&mut self, now: Nanos) -> bool {
        let mut found = false;
        while let Some((_, waiting)) = self.timers.pop(now) {
            self.meter.charge(cost::TIMER);
            let Waiting::Event(cqn) = waiting else { continue };
            self.event_timer_fired(cqn, now);
            found = true;
        }
        found
    }
}
