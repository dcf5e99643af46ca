//! The sending side: copies work requests from guest rings into bursts and posts them.
//!
//! Each work request is copied once, checked for what the hardware would not be asked (form,
//! opcode, whose address handle), and posted with the guest's own addresses and keys. The last of
//! every burst is signaled to *us* whatever the guest wants, so that it is known how many are under
//! way: a QP is never given more than it has room for, and what is flushed in software comes after
//! what the hardware flushes.

use easy_ext::ext;
use vhost_rdma_engine::nic::budget::cost;
use vhost_rdma_engine::nic::chunks::Chunks;
use vhost_rdma_engine::nic::limits::MAX_MSG;
use vhost_rdma_engine::nic::qp::{Kind, SendQueue, State};
use vhost_rdma_engine::nic::shape::{failed_send, flags_are_known};
use vhost_rdma_engine::nic::shards::Shards;
use vhost_rdma_engine::soft::window::with_low_byte;
use virtio_rdma_abi::{GSI_QPN, SqWqe, access, opcode, send_flags, wc_opcode, wc_status};

use super::nic::{Nic, Qp};
use super::receiver::Receiver as _;
use super::region::Mr;
use super::sends::Sent;
use super::verbs::{Data, HostAh, HostSge, SendBurst, SendWr, Subject};
use super::windows::{self, At, Denied, Windows};
use super::work::HOST_CALL;
use super::wr_id::{Queue, Tag};

/// Work requests of one burst.
const BURST: u32 = 32;
/// Flushed work requests of one turn.
const TURN_FLUSHES: u32 = 64;
/// Bytes of every atomic operation.
const ATOMIC_LEN: u64 = 8;

/// What a burst needs to know of its QP.
struct Poster<'a> {
    kind: Kind,
    signal_all: bool,
    qpn: u32,
    pdn: u32,
    serial: u32,
    qkey: u32,
    invalidate: bool,
    ahs: &'a Chunks<super::nic::Ah>,
    mrs: &'a Shards<Mr>,
    windows: &'a mut Windows,
}

#[ext(Requester)]
pub(super) impl Nic {
    /// Posts what the guest has posted, as much as the host QP takes.
    fn post_sends(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let Qp { send: Some(send), kind, signal_all, pdn, attrs, own, .. } = &mut **qp else {
            return;
        };
        let mut poster = Poster {
            kind: *kind,
            qpn,
            signal_all: *signal_all,
            pdn: *pdn,
            serial: own.serial,
            qkey: attrs.qkey(*kind),
            invalidate: self.backing.host.limits().invalidate,
            ahs: &self.ahs,
            mrs: &self.backing.mrs,
            windows: &mut self.backing.windows,
        };
        self.backing.sends.clear();
        let room = send.depth.saturating_sub(send.in_flight()).min(BURST);
        let first = send.posted;
        let mut cut = false;
        while !cut && send.fault.is_none() && send.posted.wrapping_sub(first) < room {
            let Some(wqe) = send.queue.take() else { break };
            let index = send.queue.current_index();
            self.meter.charge(cost::REQUEST + cost::ELEMENT * u64::from(wqe.num_sge.get().min(32)));
            let built = build(&mut poster, &mut send.queue, &wqe, &mut self.backing.sends);
            send.queue.retire();
            let sent = match built {
                Ok((mut wr, sent)) => {
                    wr.wr_id = Tag { queue: Queue::Send, serial: poster.serial, index }.to_wr_id();
                    cut = wr.opcode == opcode::BIND_MW;
                    self.backing.sends.wrs.push(wr);
                    send.posted = index.wrapping_add(1);
                    sent
                }
                Err(status) => {
                    send.fault = Some((status, index));
                    Sent { wr_id: wqe.wr_id.get(), ..Sent::default() }
                }
            };
            if let Some(slot) = send.slot(index) {
                *slot = sent;
            }
        }
        let full = send.posted.wrapping_sub(first) == room;
        let more = (cut || (full && room == BURST)) && send.queue.waiting() > 0;
        let failing = send.fault.is_some() && send.in_flight() == 0;
        if let Some(last) = self.backing.sends.wrs.last_mut() {
            last.flags |= send_flags::SIGNALED;
            self.meter.charge(HOST_CALL);
            if let Err(refused) = self.backing.host.post_send(own.host, &self.backing.sends) {
                tracing::debug!(qpn, %refused.error, refused.posted, "the RNIC refuses a send");
                // What was not taken will not complete. If the last that was taken is unsignaled,
                // nobody tells when it is done, and the rest waits for the end of the QP: only a
                // host that breaks its own promises comes here.
                let taken = u32::try_from(refused.posted).unwrap_or(u32::MAX);
                send.posted = first.wrapping_add(taken);
                send.fault = Some((wc_status::LOC_QP_OP_ERR, send.posted));
                if send.in_flight() == 0 {
                    self.fail_send(qpn);
                }
                return self.qp_fatal(qpn);
            }
        }
        if failing {
            self.fail_send(qpn);
        } else if more {
            self.schedule(qpn);
        }
    }

    /// The work request that could not be posted is the oldest now: it completes with its error,
    /// and the QP stops sending.
    fn fail_send(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let (cqn, kind) = (qp.send_cqn, qp.kind);
        let Some(send) = &mut qp.send else { return };
        let Some((status, requests)) = send.take_fault() else { return };
        self.complete_fault(cqn, qpn, status, &requests);
        if kind == Kind::Rc {
            self.enter_error(qpn);
        } else if let Some(qp) = self.qps.get_mut(&qpn).filter(|qp| qp.state != State::Reset) {
            // IBTA 10.3.1.5: an unreliable QP goes on receiving. The hardware knows nothing of it:
            // it was not asked.
            qp.state = State::Sqe;
            self.schedule(qpn);
        }
    }

    fn complete_fault(&mut self, cqn: u32, qpn: u32, status: u8, requests: &[(Sent, u32)]) {
        let serial = self.qps.get(&qpn).map_or(0, |qp| qp.own.serial);
        for (n, &(sent, index)) in requests.iter().enumerate() {
            if let Some(window) = sent.window {
                self.backing.windows.failed(window, At { serial, index });
            }
            let status = if n == 0 { status } else { wc_status::WR_FLUSH_ERR };
            self.complete(cqn, &mut failed_send(qpn, (sent.wr_id, index), status), true);
        }
    }

    /// Flushes what the hardware never saw, a bounded number, once it has flushed what it had.
    fn flush(&mut self, qpn: u32) {
        self.flush_posted(
            qpn,
            TURN_FLUSHES,
            |nic, budget| nic.flush_sends(qpn, budget),
            |nic, budget| nic.flush_receives(qpn, budget),
        );
    }

    fn flush_sends(&mut self, qpn: u32, budget: &mut u32) -> bool {
        loop {
            let Some(qp) = self.qps.get_mut(&qpn) else { return false };
            let cqn = qp.send_cqn;
            let Some(send) = &mut qp.send else { return false };
            // Its completions schedule the QP again.
            if send.in_flight() > 0 || (send.fault.is_none() && send.queue.waiting() == 0) {
                return false;
            }
            if *budget == 0 {
                return true;
            }
            *budget -= 1;
            if let Some((_, requests)) = send.take_fault() {
                // A burst at most. Something else has ended the QP before its turn came.
                self.complete_fault(cqn, qpn, wc_status::WR_FLUSH_ERR, &requests);
                continue;
            }
            let Some(wqe) = send.queue.take() else { return false };
            let index = send.queue.current_index();
            send.queue.retire();
            send.posted = index.wrapping_add(1);
            send.done = send.posted;
            let request = (wqe.wr_id.get(), index);
            self.complete(cqn, &mut failed_send(qpn, request, wc_status::WR_FLUSH_ERR), true);
        }
    }
}

/// A work request as the host takes it, and what to remember of it; or the status that it fails
/// with.
fn build(
    poster: &mut Poster<'_>,
    queue: &mut SendQueue,
    wqe: &SqWqe,
    burst: &mut SendBurst,
) -> Result<(SendWr, Sent), u8> {
    if !flags_are_known(wqe) {
        return Err(wc_status::LOC_QP_OP_ERR);
    }
    if matches!(wqe.opcode, opcode::BIND_MW | opcode::LOCAL_INV) {
        return build_local(poster, queue.current_index(), wqe);
    }
    let done = allowed(poster, wqe.opcode).ok_or(wc_status::LOC_QP_OP_ERR)?;
    let inline = wqe.flags & send_flags::INLINE != 0;
    let count = u32::from(wqe.num_sge.get());
    let from_peer =
        matches!(done, wc_opcode::RDMA_READ | wc_opcode::COMP_SWAP | wc_opcode::FETCH_ADD);
    let most = if inline { queue.max_inline } else { queue.max_sge };
    if count > most || (inline && from_peer) {
        return Err(wc_status::LOC_QP_OP_ERR);
    }
    let (data, total) = if inline {
        queue.fetch_inline(count);
        let first = len32(burst.inline.len());
        burst.inline.extend_from_slice(&queue.inline);
        (Data::Inline { first, len: count }, u64::from(count))
    } else {
        queue.fetch_sges(count);
        let first = len32(burst.sges.len());
        burst.sges.extend(queue.sges.iter().map(|sge| HostSge {
            addr: sge.addr.get(),
            length: sge.length.get(),
            lkey: sge.lkey.get(),
        }));
        (
            Data::Sges { first, count },
            queue.sges.iter().map(|sge| u64::from(sge.length.get())).sum(),
        )
    };
    let atomic = matches!(done, wc_opcode::COMP_SWAP | wc_opcode::FETCH_ADD);
    // As in the engine: the length is wrong before the number of elements is.
    if atomic && total != ATOMIC_LEN {
        return Err(wc_status::LOC_LEN_ERR);
    }
    if atomic && count != 1 {
        return Err(wc_status::LOC_QP_OP_ERR);
    }
    // The responder would say so (IBTA 9.7.5.1.2); libibverbs does not let it come to that (rxe.c,
    // validate_send_wr).
    if atomic && !wqe.remote_addr.get().is_multiple_of(ATOMIC_LEN) {
        return Err(wc_status::REM_INV_REQ_ERR);
    }
    let len =
        u32::try_from(total).ok().filter(|&len| len <= MAX_MSG).ok_or(wc_status::LOC_LEN_ERR)?;
    let subject = match poster.kind {
        // QPs 0 and 1 of hosts are none of a guest's business; its own QP 1 goes by the daemon
        // (`gsi`).
        Kind::Ud | Kind::Gsi if wqe.rkey.get() <= GSI_QPN => return Err(wc_status::LOC_QP_OP_ERR),
        Kind::Ud | Kind::Gsi => Subject::Ah(address(poster, wqe).ok_or(wc_status::LOC_QP_OP_ERR)?),
        Kind::Rc | Kind::Uc => Subject::Peer,
    };
    // IBTA 10.2.5: the high bit asks for the QP's own Q_Key, which a user may not choose freely.
    let aux = if wqe.aux.get() >> 31 == 1 { poster.qkey } else { wqe.aux.get() };
    let wr = SendWr { data, subject, aux, ..plain(poster, wqe) };
    let sent = Sent { opcode: done, tells_peer: !from_peer, len, ..remembered(wqe, &wr) };
    Ok((wr, sent))
}

/// A work request on this NIC's own keys: checked here, executed by the hardware in its turn.
fn build_local(poster: &mut Poster<'_>, index: u32, wqe: &SqWqe) -> Result<(SendWr, Sent), u8> {
    if !matches!(poster.kind, Kind::Rc | Kind::Uc) {
        return Err(wc_status::LOC_QP_OP_ERR);
    }
    let at = At { serial: poster.serial, index };
    let who = windows::Poster { qpn: poster.qpn, pdn: poster.pdn, at };
    let key = wqe.imm.get();
    let (opcode, subject) = if wqe.opcode == opcode::BIND_MW {
        let bound = poster.windows.bind(who, wqe, poster.mrs);
        (wc_opcode::BIND_MW, bound.map_err(|Denied| wc_status::MW_BIND_ERR)?)
    } else {
        let freed = poster.windows.invalidate(who, key);
        freed.map_err(|Denied| wc_status::LOC_QP_OP_ERR)?;
        (wc_opcode::LOCAL_INV, Subject::Peer)
    };
    let aux = wqe.aux.get() & !access::OPTIONAL_MASK;
    let rkey = with_low_byte(key, wqe.rkey.get());
    let wr = SendWr { subject, aux, rkey, ..plain(poster, wqe) };
    let window = Some(Windows::number(key));
    let sent = Sent { opcode, tells_peer: true, window, ..remembered(wqe, &wr) };
    Ok((wr, sent))
}

/// What a work request says by itself.
fn plain(poster: &Poster<'_>, wqe: &SqWqe) -> SendWr {
    let flags = wqe.flags & (send_flags::FENCE | send_flags::SOLICITED | send_flags::SIGNALED);
    SendWr {
        wr_id: 0,
        opcode: wqe.opcode,
        flags: if poster.signal_all { flags | send_flags::SIGNALED } else { flags },
        data: Data::Sges { first: 0, count: 0 },
        imm: wqe.imm.to_bytes(),
        remote_addr: wqe.remote_addr.get(),
        rkey: wqe.rkey.get(),
        arg0: wqe.arg0.get(),
        arg1: wqe.arg1.get(),
        subject: Subject::Peer,
        aux: 0,
    }
}

fn remembered(wqe: &SqWqe, wr: &SendWr) -> Sent {
    let signaled = wr.flags & send_flags::SIGNALED != 0;
    Sent { wr_id: wqe.wr_id.get(), signaled, ..Sent::default() }
}

/// The host's handle of a datagram's destination, if it is of the QP's domain and may still be
/// reached.
fn address(poster: &Poster<'_>, wqe: &SqWqe) -> Option<HostAh> {
    let number = usize::try_from(wqe.arg0.get()).ok()?;
    let ah = poster.ahs.get(number).filter(|ah| ah.pdn == poster.pdn && !ah.own.revoked)?;
    Some(ah.own.host)
}

fn len32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// The completion opcode of a work request, if QPs of this kind may do it and the RNIC passes it on
/// (docs/virtio-rdma.md §7.1).
fn allowed(poster: &Poster<'_>, code: u8) -> Option<u8> {
    match (code, poster.kind) {
        (opcode::SEND | opcode::SEND_WITH_IMM, _) => Some(wc_opcode::SEND),
        (opcode::SEND_WITH_INV, Kind::Rc) if poster.invalidate => Some(wc_opcode::SEND),
        (opcode::RDMA_WRITE | opcode::RDMA_WRITE_WITH_IMM, Kind::Rc | Kind::Uc) => {
            Some(wc_opcode::RDMA_WRITE)
        }
        (opcode::RDMA_READ, Kind::Rc) => Some(wc_opcode::RDMA_READ),
        (opcode::ATOMIC_CMP_AND_SWP, Kind::Rc) => Some(wc_opcode::COMP_SWAP),
        (opcode::ATOMIC_FETCH_AND_ADD, Kind::Rc) => Some(wc_opcode::FETCH_ADD),
        _ => None,
    }
}
