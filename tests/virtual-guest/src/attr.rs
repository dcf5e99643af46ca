//! Attributes of queue pairs: address vectors, masks, and how a connection behaves (8.2).

use crate::spec::{self, Put, Take, access, attr};

/// An address vector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Av {
    pub dgid: [u8; 16],
    pub dmac: [u8; 6],
    pub sgid_index: u16,
    pub flow_label: u32,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub sl: u8,
    pub port: u8,
    pub flags: u8,
    pub static_rate: u8,
}

impl Av {
    /// The usual way to `dgid`.
    pub fn to(dgid: [u8; 16]) -> Self {
        Self { dgid, port: 1, flags: spec::AV_GRH, hop_limit: 64, ..Self::default() }
    }

    /// The 40 bytes of `struct virtio_rdma_av`.
    pub fn bytes(&self) -> Vec<u8> {
        Put::new()
            .bytes(&self.dgid)
            .bytes(&self.dmac)
            .u16(self.sgid_index)
            .u32(self.flow_label)
            .u8(self.hop_limit)
            .u8(self.traffic_class)
            .u8(self.sl)
            .u8(self.port)
            .u8(self.flags)
            .u8(self.static_rate)
            .zero(6)
            .done(40)
    }

    pub(crate) fn parse(b: &[u8]) -> Self {
        let mut av = Self {
            sgid_index: b.u16_at(22),
            flow_label: b.u32_at(24),
            hop_limit: b[28],
            traffic_class: b[29],
            sl: b[30],
            port: b[31],
            flags: b[32],
            static_rate: b[33],
            ..Self::default()
        };
        av.dgid.copy_from_slice(&b[..16]);
        av.dmac.copy_from_slice(&b[16..22]);
        av
    }
}

/// Attributes of a queue pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Attr {
    pub mask: u32,
    pub state: u8,
    pub cur_state: u8,
    pub path_mtu: u8,
    pub path_mig_state: u8,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qpn: u32,
    pub access: u32,
    pub pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub av: Av,
}

impl Attr {
    /// Only a state.
    pub fn state(state: u8) -> Self {
        Self { mask: attr::STATE, state, ..Self::default() }
    }

    /// The 136 bytes of `struct virtio_rdma_qp_attr`.
    pub fn bytes(&self) -> Vec<u8> {
        Put::new()
            .u32(self.mask)
            .u8(self.state)
            .u8(self.cur_state)
            .u8(self.path_mtu)
            .u8(self.path_mig_state)
            .u32(self.qkey)
            .u32(self.rq_psn)
            .u32(self.sq_psn)
            .u32(self.dest_qpn)
            .u32(self.access)
            .u16(self.pkey_index)
            .u16(0)
            .u8(self.en_sqd_async_notify)
            .u8(self.sq_draining)
            .u8(self.max_rd_atomic)
            .u8(self.max_dest_rd_atomic)
            .u8(self.min_rnr_timer)
            .u8(self.port)
            .u8(self.timeout)
            .u8(self.retry_cnt)
            .u8(self.rnr_retry)
            .zero(3)
            .u32(0)
            .bytes(&self.av.bytes())
            .zero(40)
            .zero(8)
            .done(136)
    }

    pub(crate) fn parse(b: &[u8]) -> Self {
        Self {
            mask: b.u32_at(0),
            state: b[4],
            cur_state: b[5],
            path_mtu: b[6],
            path_mig_state: b[7],
            qkey: b.u32_at(8),
            rq_psn: b.u32_at(12),
            sq_psn: b.u32_at(16),
            dest_qpn: b.u32_at(20),
            access: b.u32_at(24),
            pkey_index: b.u16_at(28),
            en_sqd_async_notify: b[32],
            sq_draining: b[33],
            max_rd_atomic: b[34],
            max_dest_rd_atomic: b[35],
            min_rnr_timer: b[36],
            port: b[37],
            timeout: b[38],
            retry_cnt: b[39],
            rnr_retry: b[40],
            av: Av::parse(&b[48..88]),
        }
    }
}

/// How a connection behaves.
#[derive(Debug, Clone, Copy)]
pub struct Path {
    /// Access flags of both queue pairs.
    pub access: u32,
    /// ACK timeout exponent.
    pub timeout: u8,
    /// Retries after the first wait.
    pub retry_cnt: u8,
    /// Waits for a receiver that is not ready; 7 is for ever.
    pub rnr_retry: u8,
    /// The responder's RNR timer code.
    pub min_rnr_timer: u8,
    /// Outstanding reads and atomics.
    pub rd_atomic: u8,
}

impl Default for Path {
    fn default() -> Self {
        Self {
            access: access::ALL,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            rd_atomic: 4,
        }
    }
}

impl Path {
    /// A connection that gives up within 34 ms, or later where a machine is emulated.
    pub fn hasty() -> Self {
        let later = crate::daemon::patience().max(1).ilog2() as u8;
        Self { timeout: 12 + later, retry_cnt: 1, ..Self::default() }
    }
}
