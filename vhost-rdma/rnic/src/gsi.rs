//! QP 1 of a NIC on an RNIC: it lives in the daemon, since libibverbs gives the hardware's to
//! nobody.
//!
//! The guest's connection manager is the only one who uses it, for a few datagrams per connection,
//! so nothing here is fast. Each datagram is copied out of guest memory, looked up like any
//! destination, and carried by the daemon (`mad`); those that come in are copied into the receives
//! that the guest has posted.
//!
//! The guest's kernel names the buffers of these datagrams by a key for all of its memory. Such a
//! key is the daemon's and opens guest memory to *this* queue pair only: the hardware has never
//! heard of it, so on any other it fails as an unknown key does.

use easy_ext::ext;
use vhost_rdma_engine::cm::{MAD_LEN, Mad};
use vhost_rdma_engine::link::{Flow, GRH_LEN, NicId};
use vhost_rdma_engine::nic::contexts::KERNEL;
use vhost_rdma_engine::nic::doorbell::Owner;
use vhost_rdma_engine::nic::grh;
use vhost_rdma_engine::nic::qp::attrs::GSI_QKEY;
use vhost_rdma_engine::nic::qp::{Attrs, Kind, SendQueue, State, state};
use vhost_rdma_engine::nic::quota::Kind as Place;
use vhost_rdma_engine::nic::receive::{Receive, ReceiveRing};
use vhost_rdma_engine::nic::verb::NewQp;
use vhost_rdma_engine::nic::{Reply, Status, shape};
use vhost_rdma_memory::{self as memory, Segment, Translation};
use virtio_rdma_abi::{self as abi, Cqe, access, cqe_flags, event, opcode, send_flags};
use virtio_rdma_abi::{GSI_QPN, qp_flags, wc_opcode, wc_status};
use zerocopy::little_endian::{U16, U32, U64};

use super::addresses::Addresses as _;
use super::nic::Nic;
use super::refusal::Control as _;
use super::services::{DMA_KEYS, DmaKey, Gsi};

/// Datagrams of one round, each way, and flushed work requests.
const TURN: usize = 16;

/// A datagram's completion on the sending side.
pub(super) struct Done {
    wr_id: u64,
    index: u32,
    len: u32,
    status: u8,
    signaled: bool,
}

#[ext(GsiVerbs)]
pub(super) impl Nic {
    /// A key for all of guest memory, good for QP 1 only.
    fn register_all(&mut self, ctx: u32, pdn: u32, access: u32) -> Result<Reply, Status> {
        self.host_pd(ctx, pdn)?;
        if access & !(access::LOCAL_WRITE | access::OPTIONAL_MASK) != 0 {
            // Nobody else's hardware may be given a way to all of memory.
            return Err(Status::INVAL);
        }
        if self.backing.mrs.len() + self.backing.services.keys()
            >= self.settings.limits.max_mrs as usize
        {
            return Err(Status::NOMEM);
        }
        let number = u32::try_from(self.backing.services.dma_keys.vacant_key())
            .map_err(|_| Status::NOMEM)?;
        let key = DMA_KEYS.checked_add(number).ok_or(Status::NOMEM)?;
        if self.backing.mrs.contains_key(&key) {
            return Err(Status::NOMEM);
        }
        self.kept.place(Place::Region, self.backing.mrs.len() + self.backing.services.keys())?;
        self.backing.services.dma_keys.insert(DmaKey { pdn, access });
        Ok(Reply::Mr(abi::MrResp { lkey: U32::new(key), rkey: U32::new(key) }))
    }

    fn deregister_all(&mut self, ctx: u32, key: u32) -> Result<Reply, Status> {
        if ctx != KERNEL {
            return Err(Status::NOENT);
        }
        self.backing.services.dma_keys.remove((key - DMA_KEYS) as usize);
        Ok(Reply::Done)
    }

    /// QP 1 of the kernel, of which there is none yet.
    fn create_gsi(&mut self, ctx: u32, new: NewQp) -> Result<Reply, Status> {
        let NewQp { req, sq, rq, .. } = new;
        if req.srqn.get() != abi::NO_SRQ {
            return Err(Status::INVAL);
        }
        let rings = (sq.is_some(), rq.is_some());
        let doorbells = self.contexts.take_doorbells(ctx, GSI_QPN, rings).ok_or(Status::NOMEM)?;
        let shape = shape::sends(&req);
        let gsi = Gsi {
            pdn: req.pdn.get(),
            state: State::Reset,
            attrs: Attrs::default(),
            signal_all: req.flags.get() & qp_flags::SIG_ALL != 0,
            send_cqn: req.send_cqn.get(),
            recv_cqn: req.recv_cqn.get(),
            send: sq.map(|ring| SendQueue::new(ring, shape)),
            receive: rq.map(|ring| {
                let sges = u32::from(req.max_recv_sge.get());
                ReceiveRing::new(ring, req.rq_entries.get(), req.rq_log2_stride, sges)
            }),
            doorbells,
        };
        for cqn in [gsi.send_cqn, gsi.recv_cqn] {
            if let Some(cq) = self.cqs.get_mut(cqn as usize) {
                cq.users += 1;
            }
        }
        self.backing.services.gsi = Some(Box::new(gsi));
        // What was sent to an earlier one is not this one's.
        self.backing.inbox.clear();
        let [sq_db, rq_db] = doorbells.map(U32::new);
        let qpn = U32::new(GSI_QPN);
        Ok(Reply::Qp(abi::QpCreateResp { qpn, sq_db, rq_db, reserved: U32::new(0) }))
    }

    fn modify_gsi(&mut self, ctx: u32, attr: &abi::QpAttr) -> Result<Reply, Status> {
        let gsi =
            self.backing.services.gsi.as_deref().filter(|_| ctx == KERNEL).ok_or(Status::NOENT)?;
        let (_, to) = state::change(Kind::Gsi, gsi.state, attr)?;
        let mut attrs = gsi.attrs.clone();
        attrs.set(attr, |index| self.holds(index))?;
        if to == State::Reset {
            attrs = Attrs::default();
        }
        let Some(gsi) = &mut self.backing.services.gsi else { return Ok(Reply::Done) };
        gsi.state = to;
        gsi.attrs = attrs;
        self.backing.services.pending = true;
        if to == State::Reset {
            self.begin_gsi_anew();
        }
        Ok(Reply::Done)
    }

    fn begin_gsi_anew(&mut self) {
        let Some(gsi) = &mut self.backing.services.gsi else { return };
        if let Some(send) = &mut gsi.send {
            send.reset();
        }
        if let Some(receive) = &mut gsi.receive {
            receive.reset();
        }
        for doorbell in gsi.doorbells.into_iter().filter(|&doorbell| doorbell != abi::db::NONE) {
            self.contexts.reset_doorbell(KERNEL, doorbell);
        }
        self.outbox.forget(&[event::QP_FATAL], GSI_QPN);
        self.backing.inbox.clear();
    }

    fn query_gsi(&self, ctx: u32) -> Result<Reply, Status> {
        let gsi =
            self.backing.services.gsi.as_deref().filter(|_| ctx == KERNEL).ok_or(Status::NOENT)?;
        let attr = gsi.attrs.report(gsi.state, false);
        Ok(Reply::QpAttr(Box::new(abi::QpQueryResp { attr })))
    }

    fn destroy_gsi(&mut self, ctx: u32) -> Result<Reply, Status> {
        if ctx != KERNEL || !self.backing.services.exists() {
            return Err(Status::NOENT);
        }
        self.remove_gsi();
        Ok(Reply::Done)
    }

    fn remove_gsi(&mut self) {
        let Some(gsi) = self.backing.services.gsi.take() else { return };
        for cqn in [gsi.send_cqn, gsi.recv_cqn] {
            if let Some(cq) = self.cqs.get_mut(cqn as usize) {
                cq.users -= 1;
            }
        }
        for doorbell in gsi.doorbells.into_iter().filter(|&doorbell| doorbell != abi::db::NONE) {
            self.contexts.free_doorbell(KERNEL, doorbell);
        }
        self.outbox.forget(&[event::QP_FATAL], GSI_QPN);
        self.backing.inbox.clear();
    }

    /// QP 1 cannot go on.
    fn gsi_fatal(&mut self) {
        let Some(gsi) = &mut self.backing.services.gsi else { return };
        if gsi.state != State::Reset {
            gsi.state = State::Err;
            self.backing.services.pending = true;
        }
        self.raise(event::QP_FATAL, GSI_QPN, KERNEL);
    }

    /// The guest rang for QP 1.
    fn gsi_posted(&mut self, owner: Owner, producer: u32) {
        let Some(gsi) = &mut self.backing.services.gsi else { return };
        let send = matches!(owner, Owner::Send(_));
        if gsi.state == State::Reset {
            let doorbell = gsi.doorbells[usize::from(!send)];
            return self.contexts.reset_doorbell(KERNEL, doorbell);
        }
        let posted = match (send, &mut gsi.send, &mut gsi.receive) {
            (true, Some(queue), _) => queue.posted(producer),
            (false, _, Some(ring)) => ring.posted(producer),
            _ => return,
        };
        self.backing.services.pending = true;
        if posted.is_err() {
            self.gsi_fatal();
        }
    }

    /// One round of QP 1; true if there was anything to do.
    fn run_gsi(&mut self) -> bool {
        if !self.backing.services.has_work(&self.backing.inbox) {
            return false;
        }
        let pending = std::mem::take(&mut self.backing.services.pending);
        if pending {
            self.run_gsi_queues();
        }
        for _ in 0..TURN {
            let Some(mad) = self.backing.inbox.take() else { break };
            self.receive_mad(&mad);
        }
        true
    }

    fn run_gsi_queues(&mut self) {
        for _ in 0..TURN {
            let more = match self.backing.services.state() {
                State::Rts => self.send_mad(),
                State::Sqe => self.flush_gsi_send(),
                State::Err => self.flush_gsi_send() || self.flush_gsi_receive(),
                State::Reset | State::Init | State::Rtr | State::Sqd => false,
            };
            if !more {
                return;
            }
        }
        self.backing.services.pending = true;
    }

    /// Executes the oldest send; false if there is none.
    fn send_mad(&mut self) -> bool {
        let Some(gsi) = &mut self.backing.services.gsi else { return false };
        let Some(send) = &mut gsi.send else { return false };
        let Some(wqe) = send.take() else { return false };
        let index = send.current_index();
        let count = u32::from(wqe.num_sge.get());
        let inline = wqe.flags & send_flags::INLINE != 0;
        let most = if inline { send.max_inline } else { send.max_sge };
        let fits = count <= most && matches!(wqe.opcode, opcode::SEND | opcode::SEND_WITH_IMM);
        if fits && inline {
            send.fetch_inline(count);
        } else if fits {
            send.fetch_sges(count);
        }
        let signaled = gsi.signal_all || wqe.flags & send_flags::SIGNALED != 0;
        let read = if fits { self.read_mad(inline) } else { Err(wc_status::LOC_QP_OP_ERR) };
        let ah = self.ahs.get(usize::try_from(wqe.arg0.get()).unwrap_or(usize::MAX));
        let pdn = self.backing.services.gsi.as_ref().map(|gsi| gsi.pdn);
        let to = ah.filter(|ah| Some(ah.pdn) == pdn && !ah.own.revoked).map(|ah| ah.av);
        let status = match (read, to) {
            (Ok(bytes), Some(av)) => {
                // IBTA 10.2.5: the high bit asks for the QP's own Q_Key, which every other QP 1 has
                // as well.
                let qkey_ok = wqe.aux.get() == GSI_QKEY || wqe.aux.get() >> 31 == 1;
                if wqe.rkey.get() == GSI_QPN && qkey_ok {
                    self.carry(&av, bytes);
                }
                wc_status::SUCCESS
            }
            (Err(status), _) => status,
            (Ok(_), None) => wc_status::LOC_QP_OP_ERR,
        };
        let len = u32::try_from(MAD_LEN).unwrap_or(0);
        self.gsi_sent(&Done { wr_id: wqe.wr_id.get(), index, len, status, signaled });
        true
    }

    /// The datagram that the current send names, out of guest memory.
    fn read_mad(&self, inline: bool) -> Result<[u8; MAD_LEN], u8> {
        let Some(gsi) = &self.backing.services.gsi else { return Err(wc_status::WR_FLUSH_ERR) };
        let Some(send) = &gsi.send else { return Err(wc_status::WR_FLUSH_ERR) };
        let mut bytes = [0; MAD_LEN];
        if inline {
            bytes = send.inline[..].try_into().map_err(|_| wc_status::LOC_LEN_ERR)?;
            return Ok(bytes);
        }
        let source = self.gsi_memory(gsi.pdn, &send.sges, 0).ok_or(wc_status::LOC_PROT_ERR)?;
        if memory::total_len(&source) != MAD_LEN as u64 {
            return Err(wc_status::LOC_LEN_ERR);
        }
        memory::read(&source, 0, &mut bytes).map_err(|_| wc_status::LOC_PROT_ERR)?;
        Ok(bytes)
    }

    /// The memory that elements of QP 1 name, if every key opens it.
    fn gsi_memory(&self, pdn: u32, sges: &[abi::Sge], rights: u32) -> Option<Vec<Segment>> {
        let mut all = None;
        let mut segments = Vec::new();
        for sge in sges.iter().filter(|sge| sge.length.get() > 0) {
            let (addr, len, key) = (sge.addr.get(), sge.length.get(), sge.lkey.get());
            let segment = if let Some(dma) = self.backing.services.dma_key(key) {
                if dma.pdn != pdn || rights & !dma.access != 0 {
                    return None;
                }
                let map =
                    all.get_or_insert_with(|| Translation::identity(self.space.clone()).into());
                Segment { map: std::sync::Arc::clone(map), offset: addr, len }
            } else {
                self.backing.mrs.get(&key)?.segment(pdn, rights, (addr, len))?
            };
            if !segment.map.covers(segment.offset, u64::from(len)) {
                return None;
            }
            segments.push(segment);
        }
        Some(segments)
    }

    /// Sends a datagram on its way. What cannot be carried is lost, as on a wire.
    fn carry(&self, av: &abi::Av, bytes: [u8; MAD_LEN]) {
        let Some(source) = self.guest_address(av.sgid_index.get()) else { return };
        let mad = Mad { source, dest: av.dgid, traffic_class: av.traffic_class, sl: av.sl, bytes };
        let place = &self.backing.place;
        let from = (self.settings.mac, &self.backing.quotas);
        place.directory.carry(&place.device, self.settings.vni, from, mad);
    }

    fn gsi_sent(&mut self, done: &Done) {
        let Some(gsi) = &mut self.backing.services.gsi else { return };
        let cqn = gsi.send_cqn;
        if let Some(send) = &mut gsi.send {
            send.retire();
        }
        let ok = done.status == wc_status::SUCCESS;
        if !ok && gsi.state == State::Rts {
            gsi.state = State::Sqe;
        }
        if ok {
            self.counters.tx_messages += 1;
            self.counters.tx_bytes += u64::from(done.len);
            if !done.signaled {
                return;
            }
        }
        let mut cqe = Cqe {
            wr_id: U64::new(done.wr_id),
            qpn: U32::new(GSI_QPN),
            opcode: if ok { wc_opcode::SEND } else { 0 },
            status: done.status,
            flags: U16::new(if ok { 0 } else { cqe_flags::SOLICITED }),
            byte_len: U32::new(if ok { done.len } else { 0 }),
            wqe_index: U32::new(done.index),
            ..Cqe::default()
        };
        self.complete(cqn, &mut cqe, !ok);
    }

    fn flush_gsi_send(&mut self) -> bool {
        let Some(gsi) = &mut self.backing.services.gsi else { return false };
        let Some(send) = &mut gsi.send else { return false };
        let Some(wqe) = send.take() else { return false };
        let index = send.current_index();
        let (wr_id, status) = (wqe.wr_id.get(), wc_status::WR_FLUSH_ERR);
        self.gsi_sent(&Done { wr_id, index, len: 0, status, signaled: true });
        true
    }

    fn flush_gsi_receive(&mut self) -> bool {
        let mut receive = Receive::default();
        if !self.take_gsi_receive(&mut receive) {
            return false;
        }
        self.gsi_received(&receive, wc_status::WR_FLUSH_ERR, None);
        true
    }

    fn peek_gsi_receive(&self, into: &mut Receive) -> bool {
        let gsi = self.backing.services.gsi.as_ref();
        gsi.and_then(|gsi| gsi.receive.as_ref()).is_some_and(|ring| ring.peek(into))
    }

    fn advance_gsi_receive(&mut self) {
        if let Some(ring) = self.backing.services.gsi.as_mut().and_then(|gsi| gsi.receive.as_mut())
        {
            ring.advance();
        }
    }

    fn take_gsi_receive(&mut self, into: &mut Receive) -> bool {
        let gsi = self.backing.services.gsi.as_mut();
        gsi.and_then(|gsi| gsi.receive.as_mut()).is_some_and(|ring| ring.take(into))
    }

    /// A datagram has come for this NIC.
    fn receive_mad(&mut self, mad: &Mad) {
        let listens = matches!(
            self.backing.services.state(),
            State::Rtr | State::Rts | State::Sqd | State::Sqe
        );
        // The address may have been given back since it was looked up.
        let ours = self.gids.iter().flatten().any(|entry| entry.guest == mad.dest);
        let mut receive = Receive::default();
        let needed = u64::from(GRH_LEN) + MAD_LEN as u64;
        // One that finds no room is dropped and consumes nothing (IBTA 9.9.3, class D).
        let wanted = listens && ours && self.peek_gsi_receive(&mut receive);
        if !wanted || receive.is_short_of(needed) {
            self.counters.receive_drops += 1;
            return;
        }
        self.advance_gsi_receive();
        match self.write_mad(&receive, mad) {
            Ok(()) => self.gsi_received(&receive, wc_status::SUCCESS, Some(mad)),
            Err(status) => {
                self.gsi_received(&receive, status, None);
                // IBTA 10.3.1.6: an error of a receive is one of the queue pair.
                if let Some(gsi) = &mut self.backing.services.gsi {
                    gsi.state = State::Err;
                }
                self.backing.services.pending = true;
            }
        }
    }

    fn write_mad(&self, receive: &Receive, mad: &Mad) -> Result<(), u8> {
        let pdn = self.backing.services.gsi.as_ref().map_or(0, |gsi| gsi.pdn);
        if receive.malformed {
            return Err(wc_status::LOC_QP_OP_ERR);
        }
        let target = self
            .gsi_memory(pdn, &receive.sges, access::LOCAL_WRITE)
            .ok_or(wc_status::LOC_PROT_ERR)?;
        let len = u32::try_from(MAD_LEN).unwrap_or(u32::MAX);
        let header = grh::build(&flow(mad), len);
        memory::write(&target, 0, &header)
            .and_then(|()| memory::write(&target, GRH_LEN.into(), &mad.bytes))
            .map_err(|_| wc_status::LOC_PROT_ERR)
    }

    fn gsi_received(&mut self, receive: &Receive, status: u8, mad: Option<&Mad>) {
        let Some(cqn) = self.backing.services.gsi.as_ref().map(|gsi| gsi.recv_cqn) else { return };
        let mut flags = cqe_flags::RECV | cqe_flags::SOLICITED;
        let len = GRH_LEN + u32::try_from(MAD_LEN).unwrap_or(0);
        if let Some(mad) = mad {
            self.counters.rx_messages += 1;
            self.counters.rx_bytes += u64::from(len - GRH_LEN);
            flags |= cqe_flags::GRH;
            flags |= if grh::is_ipv4(&mad.source) { cqe_flags::IPV4 } else { 0 };
        }
        let mut cqe = Cqe {
            wr_id: U64::new(receive.wr_id),
            qpn: U32::new(GSI_QPN),
            opcode: wc_opcode::RECV,
            status,
            flags: U16::new(flags),
            byte_len: U32::new(if mad.is_some() { len } else { 0 }),
            src_qp: U32::new(if mad.is_some() { GSI_QPN } else { 0 }),
            sl: mad.map_or(0, |mad| mad.sl),
            wqe_index: U32::new(receive.index),
            ..Cqe::default()
        };
        self.complete(cqn, &mut cqe, true);
    }
}

/// The packet that a datagram would have been.
fn flow(mad: &Mad) -> Flow {
    Flow {
        source: NicId(0),
        source_qpn: GSI_QPN,
        source_gid: mad.source,
        source_mac: [0; 6],
        dest_gid: mad.dest,
        dest_qpn: GSI_QPN,
        traffic_class: mad.traffic_class,
        hop_limit: 64,
        sl: mad.sl,
    }
}
