//! Completion queues and shared receive queues: rings in guest memory (7.2 to 7.4).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use crate::control::{Ctx, Doorbell};
use crate::guest::Result;
use crate::pages::{Buf, PageList};
use crate::ram::View;
use crate::spec::{self, Put, Take, cmd, status};
use crate::witness;

/// A completion that is under way is waited for without a pause for this long, then with pauses.
const SPIN: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(2);

/// A scatter-gather element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// The address within the region.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// The region's key.
    pub lkey: u32,
}

impl Sge {
    /// The 16 bytes of `struct virtio_rdma_sge`.
    pub fn bytes(&self) -> [u8; 16] {
        let mut b = [0; 16];
        b[..8].copy_from_slice(&self.addr.to_le_bytes());
        b[8..12].copy_from_slice(&self.length.to_le_bytes());
        b[12..].copy_from_slice(&self.lkey.to_le_bytes());
        b
    }
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Cqe {
    pub wr_id: u64,
    pub qpn: u32,
    pub opcode: u8,
    pub status: u8,
    pub flags: u16,
    pub byte_len: u32,
    pub imm: u32,
    pub src_qp: u32,
    pub wqe_index: u32,
    pub vendor_err: u32,
    pub sl: u8,
    pub timestamp: u64,
    pub smac: [u8; 6],
}

impl Cqe {
    fn parse(b: &[u8]) -> Self {
        Self {
            wr_id: b.u64_at(0),
            qpn: b.u32_at(8),
            opcode: b[12],
            status: b[13],
            flags: b.u16_at(14),
            byte_len: b.u32_at(16),
            imm: b.u32_at(20),
            src_qp: b.u32_at(24),
            wqe_index: b.u32_at(28),
            vendor_err: b.u32_at(32),
            sl: b[38],
            timestamp: b.u64_at(40),
            smac: [b[48], b[49], b[50], b[51], b[52], b[53]],
        }
    }
}

/// Bytes of a ring with a control block, and where that block is.
pub fn ring_with_control(entries: u32, log2_stride: u8) -> (u64, u64) {
    let ctrl = (u64::from(entries) << log2_stride).next_multiple_of(spec::CTRL_ALIGN);
    (ctrl + spec::CTRL_SIZE, ctrl)
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    ctx: Ctx,
    /// Its number.
    pub cqn: u32,
    /// Entries.
    pub entries: u32,
    buf: Arc<Buf>,
    ctrl: u64,
    consumer: u32,
    /// Store the consumer index after each entry. Off, the queue fills up.
    pub release: bool,
}

impl Cq {
    /// CQ_CREATE with a zeroed ring in scattered pages.
    pub fn create(ctx: &Ctx, entries: u32, vector: u32) -> Result<Self> {
        let (bytes, ctrl) = ring_with_control(entries, 6);
        let buf = Arc::new(Buf::scattered(ctx.guest().ram(), 0, bytes));
        buf.view().fill(0, bytes, 0);
        let list = PageList::of(ctx.guest().ram(), buf.pages(), 0);
        let body = Put::new().u32(entries).u32(vector).bytes(&list.bytes()).done(32);
        let cqn = ctx.command(cmd::CQ_CREATE, &body, 8)?.u32_at(0);
        ctx.guest().hold(ctx.id(), &buf);
        Ok(Self { ctx: ctx.clone(), cqn, entries, buf, ctrl, consumer: 0, release: true })
    }

    /// The context.
    pub fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    /// The ring's bytes.
    pub fn view(&self) -> &View {
        self.buf.view()
    }

    /// Where the control block is in [`Self::view`].
    pub fn control_block(&self) -> u64 {
        self.ctrl
    }

    /// Entries taken since creation.
    pub fn consumer(&self) -> u32 {
        self.consumer
    }

    #[inline]
    fn at(&self, index: u32) -> u64 {
        u64::from(index & (self.entries - 1)) * spec::CQE_SIZE as u64
    }

    /// Is an entry there?
    #[inline]
    pub fn ready(&self) -> bool {
        let seq = self.view().load32(self.at(self.consumer) + spec::CQE_SEQ, Ordering::Acquire);
        seq == self.consumer.wrapping_add(1)
    }

    /// Takes entries without looking at what is in them (for a benchmark's loop); how many.
    #[inline]
    pub fn drain(&mut self) -> u32 {
        let first = self.consumer;
        while self.ready() {
            self.consumer = self.consumer.wrapping_add(1);
        }
        if self.consumer != first {
            self.publish();
        }
        self.consumer.wrapping_sub(first)
    }

    /// Stores the consumer index.
    pub fn publish(&self) {
        self.view().store32(self.ctrl + spec::CTRL_CONSUMER, self.consumer, Ordering::Release);
    }

    /// The next completion, discarded ones skipped.
    #[inline]
    pub fn poll(&mut self) -> Option<Cqe> {
        while self.ready() {
            let mut bytes = [0; spec::CQE_SIZE];
            self.view().read(self.at(self.consumer), &mut bytes);
            self.consumer = self.consumer.wrapping_add(1);
            if self.release {
                self.publish();
            }
            if bytes[spec::CQE_STATUS as usize] != status::DISCARDED {
                let cqe = Cqe::parse(&bytes);
                witness::completed(&cqe);
                return Some(cqe);
            }
        }
        None
    }

    /// The next completion within `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Option<Cqe> {
        let begin = Instant::now();
        loop {
            if let Some(cqe) = self.poll() {
                return Some(cqe);
            }
            let waited = begin.elapsed();
            if waited >= timeout {
                return None;
            }
            // What is not there at once is some other thread's work, which may want this processor.
            // The longer it takes, the less often is looked: on an emulated machine a look costs
            // as much as a request, and several that wait would leave the workers nothing.
            let nap = (waited / 8).clamp(NAP, LONGEST_NAP);
            if waited < SPIN { std::thread::yield_now() } else { std::thread::sleep(nap) }
        }
    }

    /// The next completion, which must come.
    #[track_caller]
    pub fn one(&mut self) -> Cqe {
        let limit = Duration::from_secs(30) * crate::daemon::patience();
        self.wait(limit).unwrap_or_else(|| panic!("no completion within {limit:?}"))
    }

    /// The next completion, which must come and be a success.
    #[track_caller]
    pub fn ok(&mut self) -> Cqe {
        let cqe = self.one();
        assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
        cqe
    }

    /// Fails if a completion comes within `time`.
    #[track_caller]
    pub fn silent(&mut self, time: Duration) {
        if let Some(cqe) = self.wait(time) {
            panic!("a completion that nobody expected: {cqe:?}");
        }
    }

    /// Marks the unconsumed entries of a queue pair as stale (7.3).
    pub fn discard(&self, qpn: u32) {
        let mut index = self.consumer;
        while self.view().load32(self.at(index) + spec::CQE_SEQ, Ordering::Acquire)
            == index.wrapping_add(1)
        {
            if self.view().load32(self.at(index) + 8, Ordering::Relaxed) == qpn {
                let at = self.at(index) + spec::CQE_STATUS;
                self.view().store8(at, status::DISCARDED, Ordering::Relaxed);
            }
            index = index.wrapping_add(1);
        }
    }

    /// Arms the queue (7.4); the caller polls once more.
    pub fn arm(&self, what: u32) {
        let view = self.view();
        let fired =
            view.load32(self.ctrl + spec::CTRL_FIRED, Ordering::Acquire) & spec::ARM_SEQ_MASK;
        let word = view.load32(self.ctrl + spec::CTRL_ARM, Ordering::Relaxed);
        let (seq, old) = (word >> spec::ARM_SEQ_SHIFT, word & 3);
        let word = if seq == fired {
            (fired.wrapping_add(1) & spec::ARM_SEQ_MASK) << spec::ARM_SEQ_SHIFT | what
        } else {
            seq << spec::ARM_SEQ_SHIFT | what.max(old)
        };
        view.store32(self.ctrl + spec::CTRL_ARM, word, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Is the queue armed?
    pub fn armed(&self) -> bool {
        let view = self.view();
        let fired = view.load32(self.ctrl + spec::CTRL_FIRED, Ordering::Acquire);
        let word = view.load32(self.ctrl + spec::CTRL_ARM, Ordering::Relaxed);
        word >> spec::ARM_SEQ_SHIFT != fired & spec::ARM_SEQ_MASK
    }

    /// CQ_MODERATE.
    pub fn moderate(&self, count: u16, period_us: u16) -> Result<()> {
        let body = Put::new().u32(self.cqn).u16(count).u16(period_us).done(8);
        self.ctx.command(cmd::CQ_MODERATE, &body, 0).map(|_| ())
    }

    /// CQ_RESIZE to a new ring: the device moves the entries that were not consumed (7.3).
    pub fn resize_request(&self, entries: u32, requested: u32, ring: &PageList) -> Vec<u8> {
        Put::new().u32(self.cqn).u32(entries).u32(requested).u32(0).bytes(&ring.bytes()).done(40)
    }

    /// Goes on with the ring that CQ_RESIZE moved the queue to.
    pub fn moved_to(&mut self, entries: u32, ring: Arc<Buf>) {
        self.ctrl = ring_with_control(entries, 6).1;
        self.entries = entries;
        self.ctx.guest().hold(self.ctx.id(), &ring);
        self.ctx.guest().release(&self.buf);
        self.buf = ring;
    }

    /// CQ_DESTROY.
    pub fn destroy(&self) -> Result<()> {
        self.ctx.object(cmd::CQ_DESTROY, self.cqn)?;
        self.ctx.guest().release(&self.buf);
        Ok(())
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    ctx: Ctx,
    /// Its number.
    pub srqn: u32,
    entries: u32,
    log2_stride: u8,
    buf: Arc<Buf>,
    ctrl: u64,
    producer: u32,
    doorbell: Doorbell,
}

/// Writes a receive work request at `at`.
pub(crate) fn write_recv(view: &View, at: u64, wr_id: u64, sges: &[Sge]) {
    view.store64(at, wr_id, Ordering::Relaxed);
    view.store64(at + 8, sges.len() as u64, Ordering::Relaxed);
    for (i, sge) in sges.iter().enumerate() {
        view.write(at + (spec::RQ_DATA + i * spec::SGE_SIZE) as u64, &sge.bytes());
    }
}

/// The stride that holds `header` and `bytes`, at least `min`.
pub(crate) fn log2_stride(header: usize, bytes: usize, min: u8) -> u8 {
    ((header + bytes).next_power_of_two().trailing_zeros() as u8).max(min)
}

impl Srq {
    /// SRQ_CREATE.
    pub fn create(ctx: &Ctx, pdn: u32, entries: u32, max_sge: u32, limit: u32) -> Result<Self> {
        let stride = log2_stride(spec::RQ_DATA, max_sge as usize * spec::SGE_SIZE, 5);
        let (bytes, ctrl) = ring_with_control(entries, stride);
        let buf = Arc::new(Buf::scattered(ctx.guest().ram(), 0, bytes));
        buf.view().fill(0, bytes, 0);
        let list = PageList::of(ctx.guest().ram(), buf.pages(), 0);
        let body = Put::new()
            .u32(pdn)
            .u32(entries)
            .u32(entries)
            .u32(max_sge)
            .u32(limit)
            .u8(stride)
            .zero(3)
            .bytes(&list.bytes())
            .done(48);
        let b = ctx.command(cmd::SRQ_CREATE, &body, 8)?;
        ctx.guest().hold(ctx.id(), &buf);
        let doorbell = ctx
            .doorbell(b.u32_at(4))?
            .ok_or_else(|| crate::guest::Error::Broken("an SRQ without a doorbell".into()))?;
        Ok(Self {
            ctx: ctx.clone(),
            srqn: b.u32_at(0),
            entries,
            log2_stride: stride,
            buf,
            ctrl,
            producer: 0,
            doorbell,
        })
    }

    /// Posts a receive.
    pub fn post(&mut self, wr_id: u64, sges: &[Sge]) {
        let at = u64::from(self.producer & (self.entries - 1)) << self.log2_stride;
        write_recv(self.buf.view(), at, wr_id, sges);
        self.producer = self.producer.wrapping_add(1);
        self.doorbell.ring(self.producer);
    }

    /// How many receives the device took.
    pub fn taken(&self) -> u32 {
        self.buf.view().load32(self.ctrl + spec::CTRL_TAKEN, Ordering::Acquire)
    }

    /// The doorbell.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// SRQ_MODIFY of the limit.
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        let body = Put::new()
            .u32(self.srqn)
            .u32(spec::SRQ_LIMIT)
            .u32(0)
            .u32(0)
            .u32(limit)
            .u32(0)
            .bytes(&PageList::none().bytes())
            .done(48);
        self.ctx.command(cmd::SRQ_MODIFY, &body, 0).map(drop)
    }

    /// SRQ_MODIFY to a ring of `entries`: the device moves the receives that wait.
    pub fn resize(&mut self, entries: u32) -> Result<()> {
        let (bytes, ctrl) = ring_with_control(entries, self.log2_stride);
        let ram = self.ctx.guest().ram();
        let buf = Arc::new(Buf::scattered(ram, 0, bytes));
        buf.view().fill(0, bytes, 0);
        let body = Put::new()
            .u32(self.srqn)
            .u32(spec::SRQ_MAX_WR)
            .u32(entries)
            .u32(entries)
            .u32(0)
            .u32(0)
            .bytes(&PageList::of(ram, buf.pages(), 0).bytes())
            .done(48);
        self.ctx.command(cmd::SRQ_MODIFY, &body, 0)?;
        self.ctx.guest().hold(self.ctx.id(), &buf);
        self.ctx.guest().release(&self.buf);
        (self.entries, self.buf, self.ctrl) = (entries, buf, ctrl);
        Ok(())
    }

    /// SRQ_QUERY: (max_wr, max_sge, limit).
    pub fn query(&self) -> Result<(u32, u32, u32)> {
        let b = self.ctx.command(cmd::SRQ_QUERY, &Put::new().u32(self.srqn).u32(0).done(8), 16)?;
        Ok((b.u32_at(0), b.u32_at(4), b.u32_at(8)))
    }

    /// SRQ_DESTROY.
    pub fn destroy(&self) -> Result<()> {
        self.ctx.object(cmd::SRQ_DESTROY, self.srqn)?;
        self.ctx.guest().release(&self.buf);
        Ok(())
    }
}
