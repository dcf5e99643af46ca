//! The receiving side: executes what peers ask, after every check that this NIC's QP and memory
//! demand.
//!
//! Nothing of a peer's request is trusted but its payload's bytes. Refusals follow IBTA 9.7.4 and
//! 9.9.2; statuses per cause are in docs/virtio-rdma.md §8.3.
//!
//! Who is at fault decides who pays (IBTA 9.9.3). What the receiver posted wrongly ends the
//! receiver's QP, on every service (class A). What an unreliable peer sent wrongly is dropped and
//! consumes nothing (class D): else any neighbour could take receives from their owner, and those
//! of a connection manager are not posted again.

use arrayvec::ArrayVec;
use virtio_rdma_abi::{Cqe, access, cqe_flags, event, wc_opcode, wc_status};
use zerocopy::little_endian::{U16, U32, U64};

use super::mr::Access;
use super::nic::{NicState, Qp, SoftNic};
use super::waiter::Waiter;
use crate::link::{
    Flow, GRH_LEN, MAD_LEN, MULTICAST_QPN, Nak, Operation, Outcome, Payload, Request, Responder,
    Service,
};
use crate::memory::{self, Borrowed};
use crate::nic::budget::cost;
use crate::nic::grh;
use crate::nic::limits::MAX_SGE;
use crate::nic::qp::State;
use crate::nic::qp::state::Kind;
use crate::nic::receive::Receive;

/// Requests of an unreliable connection that are dropped for a key, range or right before it ends.
const UNRELIABLE_REFUSALS: u32 = 256;

/// What the service level of a received datagram says of its header, as on ConnectX in an Ethernet
/// port: UCX knows by the low three bits alone where the addresses are (ud_verbs.c; 2: IPv4). RoCE
/// has no service levels that a receiver could miss.
const SL_OF_IPV4: u8 = 0xa;
const SL_OF_IPV6: u8 = 0x9;

/// The memory of a receive.
type Scattered<'a> = ArrayVec<Borrowed<'a>, { MAX_SGE as usize }>;

/// What became of the search for a receive.
pub(super) enum Opened {
    /// There is one, and it is this QP's.
    Taken,
    /// The oldest is too small for an unreliable message, and stays.
    TooSmall,
    /// None is posted.
    None,
}

/// What stands in the way of a receive.
enum Scatter {
    /// An element names memory that the receive may not write.
    Denied,
    /// The requester's memory faulted.
    Source,
}

impl Responder for SoftNic {
    fn receive(&mut self, request: &Request<'_>) -> Outcome {
        if self.life != NicState::Ready {
            return Outcome::NoAnswer;
        }
        let Some(qp) = self.qps.get(&request.flow.dest_qpn) else { return self.unheld(request) };
        if !qp.state.receives() || !self.is_addressed(qp, request) {
            return self.dropped(request);
        }
        let qpn = qp.qpn;
        if qp.kind.is_connected() && qp.state == State::Rtr {
            self.note_established(qpn);
        }
        match request.operation {
            Operation::Send if request.service == Service::Datagram => {
                self.receive_datagram(qpn, request)
            }
            Operation::Send => self.receive_send(qpn, request),
            Operation::Write => self.receive_write(qpn, request),
            Operation::Read => self.serve_read(qpn, request),
            Operation::CompareSwap | Operation::FetchAdd => self.serve_atomic(qpn, request),
            Operation::AtomicWrite => self.serve_atomic_write(qpn, request),
            Operation::Flush => self.serve_flush(qpn, request),
        }
    }

    fn ask_ahead(&mut self, request: &Request<'_>) -> Option<u64> {
        (self.life == NicState::Ready).then(|| self.ask_owner_ahead(request)).flatten()
    }

    fn receive_group(&mut self, request: &Request<'_>, first: u32, most: u32) -> (u32, bool) {
        match (self.life, request.flow.dest_qpn, first) {
            (NicState::Ready, MULTICAST_QPN, _) => self.receive_multicast(request, first, most),
            // IBTA 10.5.2: a group is reached by its own QPN only, and is no way to QPs that are
            // not in it.
            (NicState::Ready, _, 0) => {
                self.dropped(request);
                (1, false)
            }
            _ => (0, false),
        }
    }
}

impl SoftNic {
    /// Delivers to attached QPs that the datagram may reach.
    fn receive_multicast(&mut self, request: &Request<'_>, first: u32, most: u32) -> (u32, bool) {
        // Taken out so that delivering can borrow the NIC; a QP cannot leave meanwhile.
        let groups = std::mem::take(&mut self.backing.groups);
        let members = groups.get(&request.flow.dest_gid).map_or(&[][..], Vec::as_slice);
        let (mut reached, mut faulted) = (0, false);
        for &qpn in members.iter().skip(first as usize).take(most as usize) {
            reached += 1;
            self.meter.charge(cost::VISIT);
            let listens = |qp: &Qp| qp.state.receives() && self.is_addressed(qp, request);
            if self.qps.get(&qpn).is_some_and(|qp| listens(qp)) {
                faulted |= self.receive_datagram(qpn, request) == Outcome::LocalFault;
            }
        }
        self.backing.groups = groups;
        (reached, faulted)
    }

    pub(super) fn dropped(&mut self, request: &Request<'_>) -> Outcome {
        if request.service != Service::Reliable {
            self.counters.receive_drops += 1;
        }
        Outcome::NoAnswer
    }

    /// Whether the QP takes requests of this service from this sender.
    pub(super) fn is_addressed(&self, qp: &Qp, request: &Request<'_>) -> bool {
        let from_peer = || self.is_from_peer(qp, request.flow);
        match (qp.kind, request.service) {
            (Kind::Rc, Service::Reliable) | (Kind::Uc, Service::Unreliable) => from_peer(),
            (Kind::Ud, Service::Datagram) => request.qkey == qp.attrs.qkey(qp.kind),
            // IBTA 13.4.2: what is not as long as a MAD is none, and who reads MADs need not find
            // out.
            (Kind::Gsi, Service::Datagram) => {
                request.qkey == qp.attrs.qkey(qp.kind) && request.total == MAD_LEN
            }
            _ => false,
        }
    }

    /// Whether a sender is whom the QP is connected to.
    #[inline]
    pub(super) fn is_from_peer(&self, qp: &Qp, flow: &Flow) -> bool {
        let av = qp.attrs.av();
        qp.attrs.dest_qpn() == flow.source_qpn
            && av.dgid == flow.source_gid
            && self.gid(av.sgid_index.get()).is_some_and(|own| own == flow.dest_gid)
    }

    fn note_established(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if !std::mem::replace(&mut qp.own.established, true) {
            let ctx = qp.ctx;
            self.raise(event::COMM_EST, qpn, ctx);
        }
    }

    /// Finds a receive for `needed` bytes of a message: one that a dropped message left, or the
    /// oldest that is posted, which is taken. Too small a one is not taken for what nobody may
    /// answer: the sender is at fault (IBTA 9.9.3, class D), and the receives of an SRQ are also
    /// others'.
    pub(super) fn open_receive(&mut self, qpn: u32, service: Service, needed: u64) -> Opened {
        match self.take_receive(qpn, service, needed) {
            // Rounds look at doorbells in turn. What was posted before the message was sent is
            // there for it, whoever's doorbell a round saw first.
            Opened::None if self.has_posted(qpn) => self.take_receive(qpn, service, needed),
            opened => opened,
        }
    }

    /// Whether a queue pair's receives have become more since a round looked.
    #[cold]
    fn has_posted(&mut self, qpn: u32) -> bool {
        self.meter.charge(cost::POST);
        let Some(qp) = self.qps.get(&qpn) else { return false };
        let (ctx, doorbell) = match qp.srqn.map(|srqn| self.srqs.get(srqn as usize)) {
            None => (qp.ctx, qp.doorbells[1]),
            Some(Some(srq)) => (srq.ctx, srq.doorbell),
            Some(None) => return false,
        };
        let post = self.contexts.look_at(ctx, doorbell);
        post.map(|post| self.posted(post)).is_some()
    }

    fn take_receive(&mut self, qpn: u32, service: Service, needed: u64) -> Opened {
        let Some(qp) = self.qps.get_mut(&qpn) else { return Opened::None };
        let is_refused = |open: &Receive| service != Service::Reliable && open.is_short_of(needed);
        if qp.own.open_taken {
            let refused = is_refused(&qp.own.open);
            return if refused { Opened::TooSmall } else { Opened::Taken };
        }
        let mut srq = qp.srqn.and_then(|srqn| self.srqs.get_mut(srqn as usize));
        let found = match (&srq, &qp.receive) {
            (Some(srq), _) => srq.peek(&mut qp.own.open),
            (None, Some(ring)) => ring.peek(&mut qp.own.open),
            (None, None) => false,
        };
        if !found {
            return Opened::None;
        }
        if is_refused(&qp.own.open) {
            return Opened::TooSmall;
        }
        let limit = match (&mut srq, &mut qp.receive) {
            (Some(srq), _) => srq.advance(),
            (None, Some(ring)) => {
                ring.advance();
                false
            }
            (None, None) => false,
        };
        qp.own.open_taken = true;
        if let (true, Some(srqn)) = (limit, qp.srqn) {
            let ctx = qp.ctx;
            self.raise(event::SRQ_LIMIT_REACHED, srqn, ctx);
        }
        Opened::Taken
    }

    /// An unreliable message is dropped; nobody is told, and it consumed nothing.
    fn dropped_here(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        self.drop_message(qpn, request);
        Outcome::Done
    }

    /// No receive is posted: remembers who asked, and says so.
    pub(super) fn not_ready(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        if request.service != Service::Reliable {
            return self.dropped_here(qpn, request);
        }
        let Some(qp) = self.qps.get_mut(&qpn) else { return Outcome::NoAnswer };
        self.counters.rnr_naks_sent += 1;
        let waiter = Waiter::of(request.flow);
        match qp.srqn.and_then(|srqn| self.srqs.get_mut(srqn as usize)) {
            Some(srq) => srq.remember(waiter),
            None => qp.own.waiter = Some(waiter),
        }
        Outcome::NotReady(qp.attrs.min_rnr_timer())
    }

    fn receive_send(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        let continues = request.is_first() || self.continues(qpn, request);
        if !self.is_in_order(qpn, request) || !continues {
            return Outcome::NoAnswer;
        }
        if request.is_first() {
            match self.open_receive(qpn, request.service, u64::from(request.total)) {
                Opened::Taken => {}
                Opened::TooSmall => return self.dropped_here(qpn, request),
                Opened::None => return self.not_ready(qpn, request),
            }
        }
        let Some(qp) = self.qps.get_mut(&qpn) else { return Outcome::NoAnswer };
        if qp.own.open.malformed {
            return self.receive_failed(qpn, wc_status::LOC_QP_OP_ERR, Nak::RemoteOperation);
        }
        if u64::from(request.total) > qp.own.open.capacity() {
            return self.receive_failed(qpn, wc_status::LOC_LEN_ERR, Nak::InvalidRequest);
        }
        qp.own.arrived = request.offset + request.len;
        let stamp = || self.backing.mrs.stamp_of(&qp.own.open.sges);
        if !same_memory(&mut qp.own.stamp, request, stamp).unwrap_or(false) {
            return self.scatter_failed(qpn, &Scatter::Denied);
        }
        if let Err(fault) = self.scatter(qpn, request, 0) {
            return self.scatter_failed(qpn, &fault);
        }
        self.counters.rx_bytes += u64::from(request.len);
        if request.is_last() && self.invalidate_for(qpn, request) {
            self.receive_done(qpn, request, wc_opcode::RECV, request.total);
        }
        Outcome::Done
    }

    /// Invalidates the key that a SEND_WITH_INV names, after its data is placed and before its
    /// receive completes.
    ///
    /// A key that cannot be invalidated is an error of the responder alone (IBTA 9.9.3, class J).
    fn invalidate_for(&mut self, qpn: u32, request: &Request<'_>) -> bool {
        let (Some(key), Some(pdn)) = (request.invalidate, self.qps.get(&qpn).map(|qp| qp.pdn))
        else {
            return true;
        };
        let done = self.backing.mrs.invalidate(key, pdn, qpn).is_ok();
        if !done {
            self.complete_receive_error(qpn, wc_status::LOC_PROT_ERR);
            self.enter_error(qpn);
        }
        done
    }

    /// Whether this piece follows what has arrived; a QP that was reset meanwhile knows nothing of
    /// it.
    fn continues(&self, qpn: u32, request: &Request<'_>) -> bool {
        self.qps.get(&qpn).is_some_and(|qp| qp.own.open_taken && qp.own.arrived == request.offset)
    }

    /// Copies a piece to the open receive, `skip` bytes in.
    fn scatter(&self, qpn: u32, request: &Request<'_>, skip: u32) -> Result<(), Scatter> {
        if request.len == 0 {
            return Ok(());
        }
        let needed = u64::from(skip) + u64::from(request.total);
        let segments = self.receive_segments(qpn, needed).ok_or(Scatter::Denied)?;
        let at = u64::from(skip) + u64::from(request.offset);
        let moved = match request.payload {
            Payload::Inline(bytes) | Payload::Piece(bytes) => memory::write(&segments, at, bytes),
            Payload::Reply(_) => return Err(Scatter::Denied),
            Payload::Memory(source) => memory::copy(
                &segments,
                at,
                source,
                u64::from(request.offset),
                u64::from(request.len),
            ),
        };
        moved.map_err(|_| Scatter::Source)
    }

    fn scatter_failed(&mut self, qpn: u32, fault: &Scatter) -> Outcome {
        match fault {
            Scatter::Source => Outcome::LocalFault,
            Scatter::Denied => {
                self.receive_failed(qpn, wc_status::LOC_PROT_ERR, Nak::RemoteOperation)
            }
        }
    }

    /// The memory behind the first `needed` bytes of the open receive.
    fn receive_segments(&self, qpn: u32, needed: u64) -> Option<Scattered<'_>> {
        let qp = self.qps.get(&qpn)?;
        let pdn = match qp.srqn {
            Some(srqn) => self.srqs.get(srqn as usize)?.pdn,
            None => qp.pdn,
        };
        self.meter.charge_each(cost::ELEMENT, qp.own.open.sges.len());
        let mut segments = Scattered::new();
        let mut left = needed;
        for sge in &qp.own.open.sges {
            if left == 0 {
                break;
            }
            if sge.length.get() == 0 {
                continue;
            }
            let access = Access::own(pdn, sge, access::LOCAL_WRITE);
            segments.push(self.backing.mrs.segment(&access).ok()?);
            left = left.saturating_sub(u64::from(access.len));
        }
        Some(segments)
    }

    /// Completes the open receive.
    pub(super) fn receive_done(
        &mut self,
        qpn: u32,
        request: &Request<'_>,
        opcode: u8,
        byte_len: u32,
    ) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.own.open_taken = false;
        qp.own.arrived = 0;
        let mut flags = cqe_flags::RECV | qp.srqn.map_or(0, |_| cqe_flags::SRQ);
        let immediate = request.immediate.map_or(0, |bytes| {
            flags |= cqe_flags::IMM;
            u32::from_le_bytes(bytes)
        });
        let immediate = request.invalidate.map_or(immediate, |key| {
            flags |= cqe_flags::INV;
            key
        });
        if request.solicited {
            flags |= cqe_flags::SOLICITED;
        }
        let mut cqe = Cqe {
            wr_id: U64::new(qp.own.open.wr_id),
            qpn: U32::new(qpn),
            opcode,
            status: wc_status::SUCCESS,
            byte_len: U32::new(byte_len),
            imm: U32::new(immediate),
            src_qp: U32::new(request.flow.source_qpn),
            wqe_index: U32::new(qp.own.open.index),
            sl: request.flow.sl,
            ..Cqe::default()
        };
        if request.service == Service::Datagram {
            flags |= cqe_flags::GRH | cqe_flags::SMAC;
            let ipv4 = grh::is_ipv4(&request.flow.source_gid);
            if ipv4 {
                flags |= cqe_flags::IPV4;
            }
            // Who reads QP 1 goes by the flag, and answers with the service level.
            if qp.kind != Kind::Gsi {
                cqe.sl = if ipv4 { SL_OF_IPV4 } else { SL_OF_IPV6 };
            }
            cqe.smac = request.flow.source_mac;
        }
        cqe.flags = U16::new(flags);
        let cqn = qp.recv_cqn;
        self.counters.rx_messages += 1;
        self.complete(cqn, &mut cqe, request.solicited);
    }

    /// The open receive fails, and its QP with it: at a fault of its own on every service, and on
    /// RC also for a message that is longer.
    fn receive_failed(&mut self, qpn: u32, status: u8, nak: Nak) -> Outcome {
        self.complete_receive_error(qpn, status);
        self.enter_error(qpn);
        Outcome::Refused(nak)
    }

    fn complete_receive_error(&mut self, qpn: u32, status: u8) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.own.open_taken = false;
        qp.own.arrived = 0;
        let mut cqe = Cqe {
            wr_id: U64::new(qp.own.open.wr_id),
            qpn: U32::new(qpn),
            opcode: wc_opcode::RECV,
            status,
            // Whoever waits for solicited events hears of errors (IBTA 11.4.2.2).
            flags: U16::new(
                cqe_flags::RECV | cqe_flags::SOLICITED | qp.srqn.map_or(0, |_| cqe_flags::SRQ),
            ),
            wqe_index: U32::new(qp.own.open.index),
            ..Cqe::default()
        };
        let cqn = qp.recv_cqn;
        self.complete(cqn, &mut cqe, true);
    }

    fn receive_datagram(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        let needed = u64::from(GRH_LEN) + u64::from(request.total);
        match self.open_receive(qpn, request.service, needed) {
            Opened::Taken => {}
            Opened::TooSmall => return self.dropped_here(qpn, request),
            Opened::None => return self.not_ready(qpn, request),
        }
        self.meter.charge(cost::DELIVERY + cost::bytes(request.total.into()));
        let Some(qp) = self.qps.get(&qpn) else { return Outcome::NoAnswer };
        if qp.own.open.malformed {
            return self.receive_failed(qpn, wc_status::LOC_QP_OP_ERR, Nak::RemoteOperation);
        }
        let header = grh::build(request.flow, request.total);
        let segments = self.receive_segments(qpn, needed);
        let written = segments.map(|segments| memory::write(&segments, 0, &header));
        if !matches!(written, Some(Ok(()))) {
            return self.receive_failed(qpn, wc_status::LOC_PROT_ERR, Nak::RemoteOperation);
        }
        if let Err(fault) = self.scatter(qpn, request, GRH_LEN) {
            return self.scatter_failed(qpn, &fault);
        }
        self.counters.rx_bytes += u64::from(request.total);
        self.receive_done(qpn, request, wc_opcode::RECV, GRH_LEN + request.total);
        Outcome::Done
    }

    /// Refuses a request that broke the rules; on RC that is the end of the connection.
    pub(super) fn refuse(&mut self, qpn: u32, request: &Request<'_>, nak: Nak) -> Outcome {
        if request.service != Service::Reliable {
            self.drop_message(qpn, request);
            // The peer of an unreliable connection is never told and could guess keys as fast as it
            // can post: not for ever.
            let Some(qp) = self.qps.get_mut(&qpn) else { return Outcome::Done };
            qp.own.refused += 1;
            if qp.own.refused == UNRELIABLE_REFUSALS {
                let ctx = qp.ctx;
                self.counters.access_errors += 1;
                self.raise(event::QP_ACCESS_ERR, qpn, ctx);
                self.enter_error(qpn);
            }
            return Outcome::Done;
        }
        let kind = match nak {
            Nak::InvalidRequest => {
                self.counters.request_errors += 1;
                event::QP_REQ_ERR
            }
            Nak::RemoteAccess | Nak::RemoteOperation => {
                self.counters.access_errors += 1;
                event::QP_ACCESS_ERR
            }
        };
        if let Some(ctx) = self.qps.get(&qpn).map(|qp| qp.ctx) {
            self.raise(kind, qpn, ctx);
        }
        self.enter_error(qpn);
        Outcome::Refused(nak)
    }

    /// Completes up to `budget` receives with a flush; true if some are left.
    pub(super) fn flush_receives(&mut self, qpn: u32, budget: &mut u32) -> bool {
        loop {
            let Some(qp) = self.qps.get_mut(&qpn) else { return false };
            // Receives of an SRQ stay there (IBTA 10.2.9.4); only one that was taken is this QP's.
            let taken = qp.own.open_taken
                || (qp.srqn.is_none()
                    && qp.receive.as_mut().is_some_and(|ring| ring.waiting() > 0));
            if !taken {
                break;
            }
            if *budget == 0 {
                return true;
            }
            *budget -= 1;
            self.meter.charge(cost::FLUSH);
            if !qp.own.open_taken
                && let Some(ring) = &mut qp.receive
            {
                ring.take(&mut qp.own.open);
            }
            self.complete_receive_error(qpn, wc_status::WR_FLUSH_ERR);
        }
        if let Some(qp) = self.qps.get_mut(&qpn)
            && qp.srqn.is_some()
            && !std::mem::replace(&mut qp.own.last_wqe_raised, true)
        {
            let ctx = qp.ctx;
            self.raise(event::QP_LAST_WQE_REACHED, qpn, ctx);
        }
        false
    }
}

/// Whether the keys of a message in pieces open what they opened at its first; `None`: that was in
/// another life of the QP, so that this piece belongs to nothing. Messages of one piece keep no
/// stamp.
pub(super) fn same_memory(
    kept: &mut Option<u64>,
    request: &Request<'_>,
    stamp: impl FnOnce() -> u64,
) -> Option<bool> {
    if request.len == request.total {
        return Some(true);
    }
    let now = stamp();
    if request.is_first() {
        *kept = Some(now);
    }
    kept.map(|began| began == now)
}
