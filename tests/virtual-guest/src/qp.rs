//! Queue pairs: creation, state changes, posting (7.1, 7.2, 8).

use std::sync::Arc;

pub use crate::attr::{Attr, Av, Path};
use crate::control::{Ctx, Doorbell};
use crate::guest::Result;
use crate::pages::{Buf, PageList};
use crate::ram::View;
use crate::rings::{Cq, Sge, Srq, log2_stride, write_recv};
pub use crate::send::SendWr;
use crate::spec::{self, Put, Take, attr, cmd, qps, qpt};
use crate::witness;

/// What a queue pair shall be.
#[derive(Debug, Clone)]
pub struct QpSpec {
    /// One of [`qpt`].
    pub kind: u32,
    /// Send ring entries.
    pub sq: u32,
    /// Receive ring entries; 0 with an SRQ.
    pub rq: u32,
    /// Elements in a send.
    pub send_sge: u16,
    /// Elements in a receive.
    pub recv_sge: u16,
    /// Inline bytes in a send.
    pub inline: u16,
    /// The SRQ.
    pub srq: Option<u32>,
    /// Every send is signaled.
    pub sig_all: bool,
}

impl QpSpec {
    /// A usual queue pair of `kind`.
    pub fn new(kind: u32) -> Self {
        Self {
            kind,
            sq: 64,
            rq: 64,
            send_sge: 4,
            recv_sge: 4,
            inline: 64,
            srq: None,
            sig_all: false,
        }
    }

    /// Receives from `srq`.
    pub fn with_srq(mut self, srq: &Srq) -> Self {
        self.srq = Some(srq.srqn);
        self.rq = 0;
        self.recv_sge = 0;
        self
    }
}

#[derive(Debug)]
struct Ring {
    buf: Arc<Buf>,
    entries: u32,
    log2_stride: u8,
    producer: u32,
    doorbell: Doorbell,
}

impl Ring {
    fn at(&self, index: u32) -> u64 {
        u64::from(index & (self.entries - 1)) << self.log2_stride
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    ctx: Ctx,
    /// Its number.
    pub qpn: u32,
    /// One of [`qpt`].
    pub kind: u32,
    sq: Option<Ring>,
    rq: Option<Ring>,
}

impl Qp {
    /// QP_CREATE.
    pub fn create(ctx: &Ctx, pdn: u32, send_cq: &Cq, recv_cq: &Cq, spec: &QpSpec) -> Result<Self> {
        let sge_bytes = usize::from(spec.send_sge) * spec::SGE_SIZE;
        let data = sge_bytes.max(usize::from(spec.inline));
        let sq_stride = log2_stride(spec::SQ_DATA, data, 6);
        let rq_stride = log2_stride(spec::RQ_DATA, usize::from(spec.recv_sge) * spec::SGE_SIZE, 5);
        let ram = ctx.guest().ram();
        let ring = |entries: u32, stride: u8| {
            (entries > 0).then(|| Arc::new(Buf::scattered(ram, 0, u64::from(entries) << stride)))
        };
        let list = |buf: &Option<Arc<Buf>>| {
            buf.as_ref().map_or_else(PageList::none, |b| PageList::of(ram, b.pages(), 0))
        };
        let (sq, rq) = (ring(spec.sq, sq_stride), ring(spec.rq, rq_stride));
        let (sq_list, rq_list) = (list(&sq), list(&rq));
        let body = Put::new()
            .u32(pdn)
            .u32(spec.kind)
            .u32(if spec.sig_all { spec::QP_SIG_ALL } else { 0 })
            .u32(send_cq.cqn)
            .u32(recv_cq.cqn)
            .u32(spec.srq.unwrap_or(spec::NO_SRQ))
            .u32(spec.sq)
            .u32(spec.rq)
            .u32(spec.sq)
            .u32(spec.rq)
            .u16(spec.send_sge)
            .u16(spec.recv_sge)
            .u16(spec.inline)
            .u8(sq_stride)
            .u8(rq_stride)
            .bytes(&sq_list.bytes())
            .bytes(&rq_list.bytes())
            .done(96);
        let b = ctx.command(cmd::QP_CREATE, &body, 16)?;
        for buf in [&sq, &rq].into_iter().flatten() {
            ctx.guest().hold(ctx.id(), buf);
        }
        let ring = |buf: Option<Arc<Buf>>, entries, log2_stride, db| -> Result<Option<Ring>> {
            let doorbell = ctx.doorbell(db)?;
            Ok(buf.zip(doorbell).map(|(buf, doorbell)| Ring {
                buf,
                entries,
                log2_stride,
                producer: 0,
                doorbell,
            }))
        };
        Ok(Self {
            ctx: ctx.clone(),
            qpn: b.u32_at(0),
            kind: spec.kind,
            sq: ring(sq, spec.sq, sq_stride, b.u32_at(4))?,
            rq: ring(rq, spec.rq, rq_stride, b.u32_at(8))?,
        })
    }

    /// The context.
    pub fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    #[track_caller]
    fn sq(&mut self) -> &mut Ring {
        self.sq.as_mut().expect("this queue pair has no send ring")
    }

    #[track_caller]
    fn rq(&mut self) -> &mut Ring {
        self.rq.as_mut().expect("this queue pair has no receive ring")
    }

    /// Writes a send work request without ringing.
    #[track_caller]
    pub fn queue_send(&mut self, request: &SendWr) {
        witness::posted(self.qpn, self.kind, request);
        let sq = self.sq();
        request.encode(sq.buf.view(), sq.at(sq.producer));
        sq.producer = sq.producer.wrapping_add(1);
    }

    /// Announces what [`Self::queue_send`] wrote.
    #[inline]
    pub fn ring_sq(&mut self) {
        let sq = self.sq();
        sq.doorbell.ring(sq.producer);
    }

    /// Posts a send work request.
    #[track_caller]
    pub fn post_send(&mut self, request: &SendWr) {
        self.queue_send(request);
        self.ring_sq();
    }

    /// Writes a receive without ringing.
    #[track_caller]
    pub fn queue_recv(&mut self, wr_id: u64, sges: &[Sge]) {
        let rq = self.rq();
        write_recv(rq.buf.view(), rq.at(rq.producer), wr_id, sges);
        rq.producer = rq.producer.wrapping_add(1);
    }

    /// Announces what [`Self::queue_recv`] wrote.
    pub fn ring_rq(&mut self) {
        let rq = self.rq();
        rq.doorbell.ring(rq.producer);
    }

    /// Posts a receive.
    #[track_caller]
    pub fn post_recv(&mut self, wr_id: u64, sges: &[Sge]) {
        self.queue_recv(wr_id, sges);
        self.ring_rq();
    }

    /// The send ring's bytes, the byte offset of entry `index`, and the doorbell, for raw writes.
    #[track_caller]
    pub fn raw_sq(&mut self, index: u32) -> (View, u64, Doorbell) {
        let sq = self.sq();
        (sq.buf.view().clone(), sq.at(index), sq.doorbell.clone())
    }

    /// As [`Self::raw_sq`], for the receive ring.
    #[track_caller]
    pub fn raw_rq(&mut self, index: u32) -> (View, u64, Doorbell) {
        let rq = self.rq();
        (rq.buf.view().clone(), rq.at(index), rq.doorbell.clone())
    }

    /// Work requests ever queued on the send ring.
    pub fn sq_producer(&self) -> u32 {
        self.sq.as_ref().map_or(0, |r| r.producer)
    }

    /// Advances the send producer over entries that were written raw.
    pub fn skip_sq(&mut self, n: u32) {
        let sq = self.sq();
        sq.producer = sq.producer.wrapping_add(n);
    }

    /// QP_MODIFY.
    pub fn modify(&self, attributes: &Attr) -> Result<()> {
        let body = Put::new().u32(self.qpn).u32(0).bytes(&attributes.bytes()).done(144);
        self.ctx.command(cmd::QP_MODIFY, &body, 0).map(drop)
    }

    /// QP_QUERY.
    pub fn query(&self) -> Result<Attr> {
        let body = Put::new().u32(self.qpn).u32(0).done(8);
        Ok(Attr::parse(&self.ctx.command(cmd::QP_QUERY, &body, 136)?))
    }

    /// The present state.
    pub fn state(&self) -> Result<u8> {
        Ok(self.query()?.state)
    }

    /// The attributes of RESET to INIT.
    pub fn init_attr(&self, flags: u32, qkey: u32) -> Attr {
        let last = match self.kind {
            qpt::RC | qpt::UC => attr::ACCESS_FLAGS | attr::PORT,
            qpt::GSI => attr::QKEY,
            _ => attr::QKEY | attr::PORT,
        };
        let mask = attr::STATE | attr::PKEY_INDEX | last;
        Attr { mask, state: qps::INIT, port: 1, access: flags, qkey, ..Attr::default() }
    }

    /// The attributes of INIT to RTR towards `qpn` at `gid`.
    pub fn rtr_attr(&self, (gid, qpn): ([u8; 16], u32), path: &Path) -> Attr {
        let mut a = Attr { mask: attr::STATE, state: qps::RTR, ..Attr::default() };
        if matches!(self.kind, qpt::RC | qpt::UC) {
            a.mask |= attr::AV | attr::PATH_MTU | attr::DEST_QPN | attr::RQ_PSN;
            a.av = Av::to(gid);
            a.path_mtu = 5;
            a.dest_qpn = qpn;
            a.rq_psn = 0x1234;
        }
        if self.kind == qpt::RC {
            a.mask |= attr::MAX_DEST_RD_ATOMIC | attr::MIN_RNR_TIMER;
            a.max_dest_rd_atomic = path.rd_atomic;
            a.min_rnr_timer = path.min_rnr_timer;
        }
        a
    }

    /// The attributes of RTR to RTS.
    pub fn rts_attr(&self, path: &Path) -> Attr {
        let mut a = Attr {
            mask: attr::STATE | attr::SQ_PSN,
            state: qps::RTS,
            sq_psn: 0x1234,
            ..Attr::default()
        };
        if self.kind == qpt::RC {
            a.mask |= attr::TIMEOUT | attr::RETRY_CNT | attr::RNR_RETRY | attr::MAX_QP_RD_ATOMIC;
            a.timeout = path.timeout;
            a.retry_cnt = path.retry_cnt;
            a.rnr_retry = path.rnr_retry;
            a.max_rd_atomic = path.rd_atomic;
        }
        a
    }

    /// RESET to INIT.
    pub fn to_init(&self, path: &Path) -> Result<()> {
        self.modify(&self.init_attr(path.access, 0x1111_1111))
    }

    /// INIT to RTR.
    pub fn to_rtr(&self, peer: ([u8; 16], u32), path: &Path) -> Result<()> {
        self.modify(&self.rtr_attr(peer, path))
    }

    /// RTR to RTS.
    pub fn to_rts(&self, path: &Path) -> Result<()> {
        self.modify(&self.rts_attr(path))
    }

    /// RESET to RTS towards `peer`.
    pub fn connect(&self, peer: ([u8; 16], u32), path: &Path) -> Result<()> {
        self.to_init(path)?;
        self.to_rtr(peer, path)?;
        self.to_rts(path)
    }

    /// RESET to RTS of a datagram queue pair.
    pub fn start_datagrams(&self, qkey: u32) -> Result<()> {
        self.modify(&self.init_attr(0, qkey))?;
        self.modify(&self.rtr_attr(([0; 16], 0), &Path::default()))?;
        self.modify(&self.rts_attr(&Path::default()))
    }

    /// Any state to RESET, with the driver's duties of 8.1.
    pub fn reset(&mut self, cqs: &[&Cq]) -> Result<()> {
        self.modify(&Attr::state(qps::RESET))?;
        for ring in [&mut self.sq, &mut self.rq].into_iter().flatten() {
            ring.producer = 0;
            ring.doorbell.store(0);
        }
        for cq in cqs {
            cq.discard(self.qpn);
        }
        Ok(())
    }

    /// Any state to ERR.
    pub fn fail(&self) -> Result<()> {
        self.modify(&Attr::state(qps::ERR))
    }

    /// QP_DESTROY.
    pub fn destroy(&self) -> Result<()> {
        self.ctx.object(cmd::QP_DESTROY, self.qpn)?;
        for ring in [&self.sq, &self.rq].into_iter().flatten() {
            self.ctx.guest().release(&ring.buf);
        }
        Ok(())
    }
}

impl Ctx {
    /// AH_CREATE.
    pub fn create_ah(&self, pdn: u32, av: &Av) -> Result<u32> {
        let body = Put::new().u32(pdn).u32(0).bytes(&av.bytes()).done(48);
        Ok(self.command(cmd::AH_CREATE, &body, 8)?.u32_at(0))
    }

    /// AH_DESTROY.
    pub fn destroy_ah(&self, ah: u32) -> Result<()> {
        self.object(cmd::AH_DESTROY, ah)
    }
}
