//! Control commands (5): one descriptor chain each, one at a time, with a deadline.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use crate::guest::{Error, Guest, Result};
use crate::pages::{Buf, PageList};
use crate::ram::{View, lock};
use crate::rings::Sge;
use crate::spec::{self, Put, Take, access, cmd, err};
use crate::witness;

/// What QUERY_DEVICE answers.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct DeviceAttr {
    pub guid: u64,
    pub caps: u64,
    pub max_mr_size: u64,
    pub max_mr_bytes: u64,
    pub page_size_cap: u64,
    pub clock_khz: u64,
    pub max_contexts: u32,
    pub max_pd: u32,
    pub max_mr: u32,
    pub max_mw: u32,
    pub max_ah: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_rd_sge: u32,
    pub max_inline: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_rd_atom: u32,
    pub max_init_rd_atom: u32,
    pub keepalive_ms: u32,
}

/// What QUERY_PORT answers.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PortAttr {
    pub max_msg_sz: u32,
    pub gid_tbl_len: u32,
    pub pkey_tbl_len: u32,
    pub state: u8,
    pub phys_state: u8,
    pub max_mtu: u8,
    pub active_mtu: u8,
}

/// What QUERY_COUNTERS answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counters {
    pub tx_bytes: u64,
    pub rx_bytes: u64,
    pub tx_messages: u64,
    pub rx_messages: u64,
    pub rnr_naks_sent: u64,
    pub rnr_naks_received: u64,
    pub ack_timeouts: u64,
    pub access_errors: u64,
    pub request_errors: u64,
    pub completion_errors: u64,
    pub receive_drops: u64,
    pub events_coalesced: u64,
    pub completions: u64,
    pub events: u64,
    pub commands: u64,
}

/// A context: the kernel's, or a process's with doorbell pages of its own.
#[derive(Debug, Clone)]
pub struct Ctx(Arc<CtxInner>);

#[derive(Debug)]
struct CtxInner {
    guest: Guest,
    id: u32,
    kick_queue: usize,
    /// What kicks it: one descriptor, however many queues there are.
    kick: OnceLock<Arc<EventFd>>,
    pages: RwLock<Vec<View>>,
}

/// A queue's doorbell, resolved once.
#[derive(Debug, Clone)]
pub struct Doorbell {
    page: View,
    index_at: u64,
    summary_at: u64,
    status: View,
    kick: Arc<EventFd>,
    /// The doorbell number that the device gave.
    pub number: u32,
}

impl Doorbell {
    /// Steps 2 to 5 of a post (6.4).
    #[inline]
    pub fn ring(&self, producer: u32) {
        self.ring_without_kick(producer);
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.status.load32(spec::STATUS_NEED_KICK, Ordering::Acquire) != 0 {
            self.kick();
        }
    }

    /// Steps 2 and 3: as if the host brought the kick late.
    #[inline]
    pub fn ring_without_kick(&self, producer: u32) {
        self.page.store32(self.index_at, producer, Ordering::Release);
        self.page.store8(self.summary_at, 1, Ordering::Release);
    }

    /// Stores the producer index alone, as the driver does when a QP went to RESET.
    pub fn store(&self, producer: u32) {
        self.page.store32(self.index_at, producer, Ordering::Release);
    }

    /// Notifies the kick queue.
    pub fn kick(&self) {
        // An eventfd counter that is full still wakes its reader.
        let _full = self.kick.write(1);
    }
}

/// A registered memory region with its buffer.
#[derive(Debug, Clone)]
pub struct Mr {
    /// The local key.
    pub lkey: u32,
    /// The remote key.
    pub rkey: u32,
    /// The address that the region's first byte has in work requests.
    pub iova: u64,
    /// The bytes.
    pub buf: Arc<Buf>,
}

impl Mr {
    /// The address of byte `offset` in work requests.
    pub fn addr(&self, offset: u64) -> u64 {
        self.iova + offset
    }

    /// A scatter-gather element.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.addr(offset), length, lkey: self.lkey }
    }

    /// The bytes.
    pub fn view(&self) -> &View {
        self.buf.view()
    }
}

/// Addresses that look like a process's and are never equal to guest-physical ones.
fn next_iova(len: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x7f12_3400_0000);
    NEXT.fetch_add((len + 3 * spec::PAGE).next_multiple_of(spec::PAGE), Ordering::Relaxed)
}

impl Guest {
    /// Sends a chain cut as the caller says; the number of bytes that the device wrote and the
    /// writable bytes.
    pub fn raw_control(
        &self,
        readable: &[&[u8]],
        writable: &[u32],
        timeout: Duration,
    ) -> Result<Option<(u32, Vec<u8>)>> {
        let mut control = lock(&self.0.control);
        let control = &mut *control;
        let request = control.request.view(0, control.request.len());
        let mut at = 0;
        let mut parts_in = Vec::new();
        for part in readable {
            request.write(at, part);
            parts_in.push((control.request.gpa(at), part.len() as u32));
            at += part.len() as u64;
        }
        let mut at = 0;
        let mut parts_out = Vec::new();
        for len in writable {
            parts_out.push((control.response.gpa(at), *len));
            at += u64::from(*len);
        }
        let response = control.response.view(0, at);
        response.fill(0, at, 0xee);
        let head = control
            .vq
            .add(&parts_in, &parts_out)
            .ok_or_else(|| Error::Broken("the control queue is full".into()))?;
        control.vq.kick()?;
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match control.vq.wait(left)? {
                None => return Ok(None),
                Some((h, len)) if h == head => return Ok(Some((len, response.vec(0, at)))),
                // The late answer to a command that was given up.
                Some(_) => {}
            }
        }
    }

    /// Sends a command with its header; the response body.
    pub fn command(&self, opcode: u16, ctx: u32, body: &[u8], response: u32) -> Result<Vec<u8>> {
        let header = Put::new().u16(opcode).zero(2).u32(ctx).u64(0).done(16);
        if let Some(process) = &self.0.process {
            let given = process.given();
            let bytes = process.command(given, &[&header, body].concat())?;
            let status = bytes.0;
            witness::answered(opcode, status);
            return match status {
                err::OK if bytes.1.len() == response as usize => {
                    if matches!(opcode, cmd::CQ_CREATE | cmd::QP_CREATE | cmd::SRQ_CREATE) {
                        process.made(given.0, bytes.1.u32_at(0));
                    }
                    Ok(bytes.1)
                }
                err::OK => Err(Error::Broken(format!("command {opcode:#x}: another response"))),
                status => Err(Error::Status { opcode, status }),
            };
        }
        let answer = self.raw_control(&[&header, body], &[8 + response], self.0.config.timeout)?;
        let (len, bytes) = answer.ok_or(Error::Timeout(opcode))?;
        if len < 8 {
            return Err(Error::Broken(format!("command {opcode:#x}: {len} bytes of response")));
        }
        witness::answered(opcode, bytes.u32_at(0));
        match bytes.u32_at(0) {
            err::OK if len >= 8 + response => Ok(bytes[8..].to_vec()),
            err::OK => Err(Error::Broken(format!("command {opcode:#x}: short response, {len}"))),
            status => Err(Error::Status { opcode, status }),
        }
    }

    /// Begins a life: zeroes the status page, stores the nonce, sends INIT.
    pub fn init(&self) -> Result<u32> {
        static NEXT: AtomicU64 = AtomicU64::new(0x1234_5678_0000_0001);
        let nonce = NEXT.fetch_add(0x1_0000_0001, Ordering::Relaxed);
        let status = &self.0.status_view;
        status.fill(0, spec::PAGE, 0);
        status.store32(spec::STATUS_ALIVE, nonce as u32, Ordering::Release);
        *lock(&self.0.nonce) = nonce;
        let body =
            Put::new().u32(spec::ABI_VERSION).u32(0).u64(nonce).u64(self.0.status.gpa(0)).done(24);
        let version = self.command(cmd::INIT, 0, &body, 8)?.u32_at(0);
        self.release_all();
        Ok(version)
    }

    /// Ends the life.
    pub fn shutdown(&self) -> Result<()> {
        self.command(cmd::SHUTDOWN, 0, &[], 0)?;
        self.release_all();
        Ok(())
    }

    /// The NIC answers a command of this guest's.
    #[track_caller]
    pub fn works(&self) {
        match self.0.process {
            Some(_) => drop(self.query_port().expect("QUERY_PORT")),
            None => self.keepalive().expect("KEEPALIVE"),
        }
    }

    /// Shows and asks for a sign of life.
    pub fn keepalive(&self) -> Result<()> {
        let nonce = *lock(&self.0.nonce);
        self.command(cmd::KEEPALIVE, 0, &Put::new().u64(nonce).done(8), 0).map(drop)
    }

    /// QUERY_DEVICE.
    pub fn query_device(&self) -> Result<DeviceAttr> {
        let b = self.command(cmd::QUERY_DEVICE, 0, &[], 168)?;
        let word = |i: usize| b.u32_at(56 + 4 * i);
        Ok(DeviceAttr {
            guid: b.u64_at(0),
            caps: b.u64_at(8),
            max_mr_size: b.u64_at(16),
            max_mr_bytes: b.u64_at(24),
            page_size_cap: b.u64_at(32),
            clock_khz: b.u64_at(48),
            max_contexts: word(3),
            max_pd: word(4),
            max_mr: word(5),
            max_mw: word(6),
            max_ah: word(7),
            max_cq: word(8),
            max_cqe: word(9),
            max_qp: word(10),
            max_qp_wr: word(11),
            max_send_sge: word(12),
            max_recv_sge: word(13),
            max_rd_sge: word(14),
            max_inline: word(15),
            max_srq: word(16),
            max_srq_wr: word(17),
            max_srq_sge: word(18),
            max_rd_atom: word(19),
            max_init_rd_atom: word(20),
            keepalive_ms: word(25),
        })
    }

    /// QUERY_PORT.
    pub fn query_port(&self) -> Result<PortAttr> {
        let b = self.command(cmd::QUERY_PORT, 0, &[], 32)?;
        Ok(PortAttr {
            max_msg_sz: b.u32_at(0),
            gid_tbl_len: b.u32_at(4),
            pkey_tbl_len: b.u32_at(8),
            state: b[20],
            phys_state: b[21],
            max_mtu: b[22],
            active_mtu: b[23],
        })
    }

    /// QUERY_COUNTERS.
    pub fn query_counters(&self) -> Result<Counters> {
        let b = self.command(cmd::QUERY_COUNTERS, 0, &[], 128)?;
        let word = |i: usize| b.u64_at(8 * i);
        Ok(Counters {
            tx_bytes: word(0),
            rx_bytes: word(1),
            tx_messages: word(2),
            rx_messages: word(3),
            rnr_naks_sent: word(4),
            rnr_naks_received: word(5),
            ack_timeouts: word(6),
            access_errors: word(7),
            request_errors: word(8),
            completion_errors: word(9),
            receive_drops: word(10),
            events_coalesced: word(11),
            completions: word(12),
            events: word(13),
            commands: word(14),
        })
    }

    /// GID_SET.
    pub fn set_gid(&self, index: u16, kind: u8, gid: [u8; 16]) -> Result<()> {
        let body = Put::new().u16(index).u8(kind).zero(5).bytes(&gid).done(24);
        self.command(cmd::GID_SET, 0, &body, 0)?;
        if index == 0 {
            *lock(&self.0.gid) = gid;
        }
        Ok(())
    }

    /// The kernel's context with its first doorbell page; to be called once in a life.
    pub fn kernel(&self) -> Result<Ctx> {
        let ctx = Ctx(Arc::new(CtxInner {
            guest: self.clone(),
            id: 0,
            kick_queue: self.first_kick_queue(),
            kick: OnceLock::new(),
            pages: RwLock::new(Vec::new()),
        }));
        ctx.add_doorbell_page()?;
        Ok(ctx)
    }

    /// CONTEXT_CREATE: what a process gets when it opens the device.
    pub fn open(&self) -> Result<Ctx> {
        let page = Arc::new(Buf::contiguous(self.ram(), spec::PAGE));
        page.view().fill(0, spec::PAGE, 0);
        let gpa = page.pages().gpa(0);
        let b = self.command(cmd::CONTEXT_CREATE, 0, &Put::new().u64(gpa).done(8), 8)?;
        self.hold(b.u32_at(0), &page);
        // A process kicks by a descriptor of its own.
        let own = self.0.process.is_some().then(|| self.first_kick_queue());
        let kick_queue = own.unwrap_or(b.u32_at(4) as usize);
        if !(self.first_kick_queue()..self.queue_count()).contains(&kick_queue) {
            return Err(Error::Broken(format!("kick queue {kick_queue}")));
        }
        Ok(Ctx(Arc::new(CtxInner {
            guest: self.clone(),
            id: b.u32_at(0),
            kick_queue,
            kick: OnceLock::new(),
            pages: RwLock::new(vec![page.view().clone()]),
        })))
    }
}

impl Ctx {
    /// The guest.
    pub fn guest(&self) -> &Guest {
        &self.0.guest
    }

    /// The context's number.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// The virtqueue that this context kicks.
    pub fn kick_queue(&self) -> usize {
        self.0.kick_queue
    }

    /// A command in this context.
    pub fn command(&self, opcode: u16, body: &[u8], response: u32) -> Result<Vec<u8>> {
        self.0.guest.command(opcode, self.0.id, body, response)
    }

    /// A command that names an object.
    pub fn object(&self, opcode: u16, object: u32) -> Result<()> {
        self.command(opcode, &Put::new().u32(object).u32(0).done(8), 0).map(drop)
    }

    /// DB_PAGE_ADD.
    pub fn add_doorbell_page(&self) -> Result<u32> {
        let page = Arc::new(Buf::contiguous(self.0.guest.ram(), spec::PAGE));
        page.view().fill(0, spec::PAGE, 0);
        let gpa = page.pages().gpa(0);
        let b = self.command(cmd::DB_PAGE_ADD, &Put::new().u64(gpa).done(8), 8)?;
        self.0.guest.hold(self.0.id, &page);
        let number = b.u32_at(0) as usize;
        let mut pages = self.0.pages.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if pages.len() != number {
            return Err(Error::Broken(format!("doorbell page {number} follows {}", pages.len())));
        }
        pages.push(page.view().clone());
        Ok(b.u32_at(0))
    }

    /// The doorbell with `number`.
    pub fn doorbell(&self, number: u32) -> Result<Option<Doorbell>> {
        if number == spec::DB_NONE {
            return Ok(None);
        }
        let (page, slot) = (number >> 16, u64::from(number & 0xffff));
        let pages = self.0.pages.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(view) = pages.get(page as usize) else {
            return Err(Error::Broken(format!("doorbell {number:#x}: no such page")));
        };
        if slot >= u64::from(spec::DB_SLOTS) {
            return Err(Error::Broken(format!("doorbell {number:#x}: no such slot")));
        }
        Ok(Some(Doorbell {
            page: view.clone(),
            index_at: spec::DB_INDEX + 4 * slot,
            summary_at: spec::DB_SUMMARY + slot / spec::DB_GROUP,
            status: self.0.guest.0.status_view.clone(),
            kick: self.kick_fd()?,
            number,
        }))
    }

    fn kick_fd(&self) -> Result<Arc<EventFd>> {
        if let Some(kick) = self.0.kick.get() {
            return Ok(Arc::clone(kick));
        }
        let made = Arc::new(self.0.guest.kick_fd(self.0.kick_queue)?);
        Ok(Arc::clone(self.0.kick.get_or_init(|| made)))
    }

    /// The doorbell page `number`, for tests that misbehave.
    pub fn doorbell_page(&self, number: usize) -> View {
        let pages = self.0.pages.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        pages[number].clone()
    }

    /// CONTEXT_DESTROY.
    pub fn destroy(&self) -> Result<()> {
        self.command(cmd::CONTEXT_DESTROY, &[], 0)?;
        self.0.guest.release_context(self.0.id);
        Ok(())
    }

    /// PD_CREATE.
    pub fn create_pd(&self) -> Result<u32> {
        Ok(self.command(cmd::PD_CREATE, &[], 8)?.u32_at(0))
    }

    /// PD_DESTROY.
    pub fn destroy_pd(&self, pdn: u32) -> Result<()> {
        self.object(cmd::PD_DESTROY, pdn)
    }

    /// MR_REG with everything chosen by the caller; (lkey, rkey).
    pub fn mr_reg(
        &self,
        pdn: u32,
        flags: u32,
        (iova, length): (u64, u64),
        pages: &PageList,
    ) -> Result<(u32, u32)> {
        let body =
            Put::new().u32(pdn).u32(flags).u64(iova).u64(length).bytes(&pages.bytes()).done(48);
        let b = self.command(cmd::MR_REG, &body, 8)?;
        Ok((b.u32_at(0), b.u32_at(4)))
    }

    /// Registers all of `buf` at an address of its own.
    pub fn register(&self, pdn: u32, buf: Arc<Buf>, flags: u32) -> Result<Mr> {
        let iova =
            if flags & access::ZERO_BASED != 0 { 0 } else { next_iova(buf.len()) + buf.offset() };
        let list = PageList::of(self.0.guest.ram(), buf.pages(), buf.offset() as u32);
        let (lkey, rkey) = self.mr_reg(pdn, flags, (iova, buf.len()), &list)?;
        Ok(Mr { lkey, rkey, iova, buf })
    }

    /// A new region of `len` bytes in scattered pages that begins in the middle of a page.
    pub fn mr(&self, pdn: u32, len: u64, flags: u32) -> Result<Mr> {
        let buf = Buf::scattered(self.0.guest.ram(), 1024, len);
        buf.view().fill(0, len, 0);
        self.register(pdn, Arc::new(buf), flags)
    }

    /// MR_DMA: a key for guest-physical addresses.
    pub fn mr_dma(&self, pdn: u32, flags: u32) -> Result<(u32, u32)> {
        let b = self.command(cmd::MR_DMA, &Put::new().u32(pdn).u32(flags).done(8), 8)?;
        Ok((b.u32_at(0), b.u32_at(4)))
    }

    /// MR_DEREG.
    pub fn dereg(&self, lkey: u32) -> Result<()> {
        self.object(cmd::MR_DEREG, lkey)
    }

    /// The device's attributes, asked once.
    pub fn limits(&self) -> Result<DeviceAttr> {
        self.0.guest.query_device()
    }
}

/// Serialises tests that measure time against each other within one test program.
pub fn quiet() -> std::sync::MutexGuard<'static, ()> {
    static QUIET: OnceLock<Mutex<()>> = OnceLock::new();
    lock(QUIET.get_or_init(|| Mutex::new(())))
}
