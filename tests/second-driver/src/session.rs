//! The provider's part of a driver: one context with a PD, a region, a CQ and an RC queue pair.
//!
//! The first half of the region takes the messages that arrive, the second those that are sent.
//! Objects are destroyed in the other order than that in which they were made, since one that
//! others use is BUSY (5.7).

use std::time::Instant;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::exchange::Address;
use crate::layout::{
    ACCESS_LOCAL_WRITE, AV_GRH, CQE_RECV, NO_SRQ, PAGE, PAGE_SIZE, QP_TO_INIT, QP_TO_RTR,
    QP_TO_RTS, QPS_INIT, QPS_RTR, QPS_RTS, QPT_RC, Record, SEND_INLINE, SEND_SIGNALED, WC_RECV,
    WC_SEND, WR_SEND, cmd,
};
use crate::memory::Scattered;
use crate::rings::{CompletionQueue, Doorbell, WorkQueue};

const SEND_ENTRIES: u32 = 4;
const RECV_ENTRIES: u32 = 16;
const CQ_ENTRIES: u32 = 32;
/// So many inline bytes, or one element, fill a send queue entry of 64 bytes.
const MAX_INLINE: u16 = 16;
/// Where the region lies for its key: like a program's address, and no guest physical one.
const IOVA: u64 = 0x7f5a_0000_3000;
/// `ibv_rc_pingpong`'s path MTU, 1024 bytes.
const PATH_MTU: u8 = 3;
/// What `wr_id` carries above the index, to tell that it comes back.
const RECV_MARK: u64 = 1 << 40;
const SEND_MARK: u64 = 2 << 40;

#[derive(Debug)]
pub(crate) enum Done {
    Sent,
    /// So many bytes.
    Received(u32),
}

pub(crate) struct Session<'a> {
    pub(crate) device: &'a mut Device,
    ctx: u32,
    kick_queue: u32,
    pdn: u32,
    cqn: u32,
    cq: CompletionQueue,
    region: Scattered,
    lkey: u32,
    pub(crate) qpn: u32,
    send: (WorkQueue, Doorbell, u64),
    recv: (WorkQueue, Doorbell, u64),
    size: u32,
    max_inline: u16,
    /// How often it slept for an event.
    pub(crate) sleeps: u32,
}

/// Bytes of the region for messages of `size` bytes.
pub(crate) fn region_bytes(size: u32) -> u64 {
    2 * u64::from(size).next_multiple_of(PAGE_SIZE)
}

impl<'a> Session<'a> {
    /// Makes the objects for messages of `size` bytes. The QP is in state INIT, with receives.
    pub(crate) fn open(device: &'a mut Device, size: u32) -> Result<Self> {
        if size > device.port.get32(0) {
            return Err(Error::Argument("the port sends no such long message".to_owned()));
        }
        let memory = device.memory.clone();
        let page = memory.alloc(PAGE_SIZE)?;
        let context: Record<8> = device.command(cmd::CONTEXT_CREATE, 0, &page.to_le_bytes())?;
        let ctx = context.get32(0);
        let pdn = device.command::<8>(cmd::PD_CREATE, ctx, &[])?.get32(0);

        let region = Scattered::new(&memory, region_bytes(size))?;
        let request = Record::<48>::ZERO.u32(0, pdn).u32(4, ACCESS_LOCAL_WRITE).u64(8, IOVA);
        let request = request.u64(16, region_bytes(size)).bytes(24, &region.list);
        let lkey = device.command::<8>(cmd::MR_REG, ctx, &request.0)?.get32(0);

        let cq = CompletionQueue::new(&memory, CQ_ENTRIES)?;
        let request = Record::<32>::ZERO.u32(0, cq.entries).bytes(8, &cq.list());
        let cqn = device.command::<8>(cmd::CQ_CREATE, ctx, &request.0)?.get32(0);

        let send = WorkQueue::new(&memory, SEND_ENTRIES, 6)?;
        let recv = WorkQueue::new(&memory, RECV_ENTRIES, 5)?;
        let max_inline =
            u16::try_from(device.facts.get32(116)).unwrap_or(MAX_INLINE).min(MAX_INLINE);
        let request = Record::<96>::ZERO.u32(0, pdn).u32(4, QPT_RC).u32(12, cqn).u32(16, cqn);
        let request = request.u32(20, NO_SRQ).u32(24, send.entries).u32(28, recv.entries);
        let request = request.u32(32, send.entries).u32(36, recv.entries).u16(40, 1).u16(42, 1);
        let request = request.u16(44, max_inline).u8(46, send.log2_stride).u8(47, recv.log2_stride);
        let request = request.bytes(48, &send.list()).bytes(72, &recv.list());
        let qp: Record<16> = device.command(cmd::QP_CREATE, ctx, &request.0)?;
        let (qpn, kick_queue) = (qp.get32(0), context.get32(4));
        let send = (send, Doorbell::new(qp.get32(4), page, device.status_page)?, 0);
        let recv = (recv, Doorbell::new(qp.get32(8), page, device.status_page)?, 0);
        let mut this = Self {
            device,
            ctx,
            kick_queue,
            pdn,
            cqn,
            cq,
            region,
            lkey,
            qpn,
            send,
            recv,
            size,
            max_inline,
            sleeps: 0,
        };
        this.modify(Record::ZERO.u32(0, QP_TO_INIT).u8(4, QPS_INIT).u8(37, 1))?;
        (0..RECV_ENTRIES).try_for_each(|_| this.post_receive())?;
        Ok(this)
    }

    /// Connects to a peer, with the values of `ibv_rc_pingpong`.
    pub(crate) fn connect(&mut self, psn: u32, gid_index: u16, peer: &Address) -> Result<()> {
        let mtu = PATH_MTU.min(self.device.port.get8(23));
        let path = Record::<40>::ZERO.bytes(0, &peer.gid.octets()).u16(22, gid_index);
        let path = path.u8(28, 1).u8(31, 1).u8(32, AV_GRH);
        let rtr = Record::ZERO.u32(0, QP_TO_RTR).u8(4, QPS_RTR).u8(6, mtu).u32(12, peer.psn);
        self.modify(rtr.u32(20, peer.qpn).u8(35, 1).u8(36, 12).bytes(48, &path.0))?;
        let rts = Record::ZERO.u32(0, QP_TO_RTS).u8(4, QPS_RTS).u32(16, psn).u8(34, 1);
        self.modify(rts.u8(38, 14).u8(39, 7).u8(40, 7))
    }

    pub(crate) fn send(&mut self, message: &[u8]) -> Result<()> {
        let (queue, bell, count) = &mut self.send;
        let request = Record::<64>::ZERO.u64(0, SEND_MARK | *count).u8(8, WR_SEND);
        let request = if self.size <= u32::from(self.max_inline) {
            let flags = SEND_SIGNALED | SEND_INLINE;
            let bytes = u16::try_from(self.size).unwrap_or_default();
            request.u8(9, flags).u16(10, bytes).bytes(48, message)
        } else {
            let half = region_bytes(self.size) / 2;
            self.region.write(&self.device.memory, message.len().div_ceil(PAGE), message)?;
            let request = request.u8(9, SEND_SIGNALED).u16(10, 1).u64(48, IOVA + half);
            request.u32(56, self.size).u32(60, self.lkey)
        };
        *count = (*count + 1) & u64::from(u32::MAX);
        if queue.post(&request.0, bell)? { self.device.kick(self.kick_queue) } else { Ok(()) }
    }

    fn post_receive(&mut self) -> Result<()> {
        let (queue, bell, count) = &mut self.recv;
        let request = Record::<32>::ZERO.u64(0, RECV_MARK | *count).u16(8, 1).u64(16, IOVA);
        let request = request.u32(24, self.size).u32(28, self.lkey);
        *count = (*count + 1) & u64::from(u32::MAX);
        if queue.post(&request.0, bell)? { self.device.kick(self.kick_queue) } else { Ok(()) }
    }

    /// The bytes where messages arrive.
    pub(crate) fn arrived(&self, bytes: &mut [u8]) -> Result<()> {
        self.region.read(&self.device.memory, 0, bytes)
    }

    /// Overwrites the place where messages arrive, so that an old one is not taken for a new one.
    pub(crate) fn blot(&self, bytes: &[u8]) -> Result<()> {
        self.region.write(&self.device.memory, 0, bytes)
    }

    /// The next completion. Sleeps for its event, as 7.4 says.
    pub(crate) fn next(&mut self, deadline: Instant) -> Result<Done> {
        loop {
            if let Some(entry) = self.cq.poll()? {
                return self.complete(&entry);
            }
            if !self.device.is_alive()? {
                return Err(Error::Lost);
            }
            self.cq.arm()?;
            if let Some(entry) = self.cq.poll()? {
                return self.complete(&entry);
            }
            self.sleeps += 1;
            self.device.wait_for(self.cqn, deadline)?;
        }
    }

    fn complete(&mut self, entry: &Record<64>) -> Result<Done> {
        let (wr_id, index, opcode) = (entry.get64(0), entry.get32(28), entry.get8(12));
        let receive = entry.get16(14) & CQE_RECV != 0;
        let mark = if receive { RECV_MARK } else { SEND_MARK };
        if entry.get32(8) != self.qpn || wr_id != mark | u64::from(index) {
            return Err(Error::Device(format!("a completion of nothing posted: {wr_id:#x}")));
        }
        let queue = if receive { &mut self.recv.0 } else { &mut self.send.0 };
        queue.complete(index)?;
        match (entry.get8(13), receive, opcode) {
            (0, false, WC_SEND) => Ok(Done::Sent),
            (0, true, WC_RECV) => {
                self.post_receive()?;
                Ok(Done::Received(entry.get32(16)))
            }
            (0, ..) => Err(Error::Device(format!("a completion of opcode {opcode}"))),
            (status, ..) => Err(Error::Failed(wr_id, u32::from(status))),
        }
    }

    fn modify(&mut self, attributes: Record<136>) -> Result<()> {
        let request = Record::<144>::ZERO.u32(0, self.qpn).bytes(8, &attributes.0);
        self.device.command::<0>(cmd::QP_MODIFY, self.ctx, &request.0).map(drop)
    }

    /// Destroys the objects, users before what they use.
    pub(crate) fn close(self) -> Result<()> {
        let users = [(cmd::QP_DESTROY, self.qpn), (cmd::CQ_DESTROY, self.cqn)];
        let used = [(cmd::MR_DEREG, self.lkey), (cmd::PD_DESTROY, self.pdn)];
        for (opcode, number) in users.into_iter().chain(used) {
            let request = Record::<8>::ZERO.u32(0, number);
            self.device.command::<0>(opcode, self.ctx, &request.0)?;
        }
        self.device.command::<0>(cmd::CONTEXT_DESTROY, self.ctx, &[]).map(drop)
    }
}
