//! Send work requests, and their bytes in the ring (7.1).

use std::sync::atomic::Ordering;

use crate::ram::View;
use crate::rings::Sge;
use crate::spec::{self, send, wr};

/// A send work request.
#[derive(Debug, Clone, Default)]
#[allow(missing_docs)]
pub struct SendWr {
    pub wr_id: u64,
    pub opcode: u8,
    pub flags: u8,
    pub imm: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub aux: u32,
    pub arg0: u64,
    pub arg1: u64,
    pub sges: Vec<Sge>,
    pub inline: Option<Vec<u8>>,
    /// Overrides what the elements or inline bytes say.
    pub num_sge: Option<u16>,
}

impl SendWr {
    /// A signaled work request of `opcode`.
    pub fn new(wr_id: u64, opcode: u8, sges: &[Sge]) -> Self {
        Self { wr_id, opcode, flags: send::SIGNALED, sges: sges.to_vec(), ..Self::default() }
    }

    /// SEND.
    pub fn send(wr_id: u64, sges: &[Sge]) -> Self {
        Self::new(wr_id, wr::SEND, sges)
    }

    /// RDMA WRITE to `remote_addr`.
    pub fn write(wr_id: u64, sges: &[Sge], remote_addr: u64, rkey: u32) -> Self {
        Self { remote_addr, rkey, ..Self::new(wr_id, wr::RDMA_WRITE, sges) }
    }

    /// RDMA READ from `remote_addr`.
    pub fn read(wr_id: u64, sges: &[Sge], remote_addr: u64, rkey: u32) -> Self {
        Self { remote_addr, rkey, ..Self::new(wr_id, wr::RDMA_READ, sges) }
    }

    /// COMPARE AND SWAP at `remote_addr`.
    pub fn cas(
        wr_id: u64,
        sge: Sge,
        (remote_addr, rkey): (u64, u32),
        compare: u64,
        swap: u64,
    ) -> Self {
        let base = Self::new(wr_id, wr::ATOMIC_CMP_AND_SWP, &[sge]);
        Self { remote_addr, rkey, arg0: compare, arg1: swap, ..base }
    }

    /// FETCH AND ADD at `remote_addr`.
    pub fn faa(wr_id: u64, sge: Sge, (remote_addr, rkey): (u64, u32), add: u64) -> Self {
        let base = Self::new(wr_id, wr::ATOMIC_FETCH_AND_ADD, &[sge]);
        Self { remote_addr, rkey, arg0: add, ..base }
    }

    /// A datagram through address handle `ah` to `qpn`.
    pub fn datagram(wr_id: u64, sges: &[Sge], ah: u32, qpn: u32, qkey: u32) -> Self {
        let base = Self::new(wr_id, wr::SEND, sges);
        Self { arg0: u64::from(ah), rkey: qpn, aux: qkey, ..base }
    }

    /// With immediate data; the opcode changes to the one that carries it.
    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = imm;
        self.opcode = match self.opcode {
            wr::SEND => wr::SEND_WITH_IMM,
            wr::RDMA_WRITE => wr::RDMA_WRITE_WITH_IMM,
            other => other,
        };
        self
    }

    /// With more flags.
    pub fn flag(mut self, flags: u8) -> Self {
        self.flags |= flags;
        self
    }

    /// Without a completion.
    pub fn unsignaled(mut self) -> Self {
        self.flags &= !send::SIGNALED;
        self
    }

    /// With inline data instead of elements.
    pub fn inline(mut self, bytes: &[u8]) -> Self {
        self.flags |= send::INLINE;
        self.inline = Some(bytes.to_vec());
        self
    }

    /// Writes the work request at `at`.
    #[inline]
    pub fn encode(&self, view: &View, at: u64) {
        let count = match (&self.num_sge, &self.inline) {
            (Some(n), _) => *n,
            (None, Some(bytes)) => bytes.len() as u16,
            (None, None) => self.sges.len() as u16,
        };
        let control = u64::from(self.opcode)
            | u64::from(self.flags) << 8
            | u64::from(count) << 16
            | u64::from(self.imm) << 32;
        view.store64(at, self.wr_id, Ordering::Relaxed);
        view.store64(at + 8, control, Ordering::Relaxed);
        view.store64(at + 16, self.remote_addr, Ordering::Relaxed);
        let keys = u64::from(self.rkey) | u64::from(self.aux) << 32;
        view.store64(at + 24, keys, Ordering::Relaxed);
        view.store64(at + 32, self.arg0, Ordering::Relaxed);
        view.store64(at + 40, self.arg1, Ordering::Relaxed);
        let data = at + spec::SQ_DATA as u64;
        if let Some(bytes) = &self.inline {
            view.write(data, bytes);
        } else {
            for (i, sge) in self.sges.iter().enumerate() {
                view.write(data + (i * spec::SGE_SIZE) as u64, &sge.bytes());
            }
        }
    }
}
