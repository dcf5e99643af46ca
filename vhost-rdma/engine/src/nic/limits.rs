//! What one NIC may have: constants of the device, and limits that an operator sets.

use serde::{Deserialize, Serialize};
use virtio_rdma_abi as abi;
use zerocopy::little_endian::U64;

use crate::memory::AddressSpace;

/// Work requests in one queue.
pub const MAX_WR: u32 = 16 << 10;
/// Scatter-gather elements in one work request.
pub const MAX_SGE: u32 = 32;
/// Inline bytes in one send.
pub const MAX_INLINE: u32 = 512;
/// Entries of one CQ.
pub const MAX_CQE: u32 = 256 << 10;
/// Bytes in one message.
pub const MAX_MSG: u32 = 1 << 30;
/// Outstanding READ and atomic requests of one QP, each way.
pub const MAX_RD_ATOM: u8 = 128;
/// Entries of the port's GID table.
pub const GID_TABLE_LEN: u16 = 128;
/// Pages of a fast-register region.
pub const MAX_FAST_REG_PAGES: u32 = 512;
/// Multicast groups of one NIC.
pub const MAX_MCAST_GROUPS: u32 = 128;
/// QPs attached to one multicast group on one NIC.
pub const MAX_MCAST_QPS: u32 = 64;
/// Memory windows for each memory region that a NIC may have.
pub const WINDOWS_PER_MR: u32 = 1;
/// The port's MTU, in bytes.
pub const MTU: u32 = 4096;
/// `IB_MTU_4096`, the same as verbs encode it.
pub const MTU_ENUM: u8 = 5;
/// Milliseconds between KEEPALIVE commands of a driver with user contexts.
pub const KEEPALIVE_MS: u32 = 2000;
/// Doorbell pages of one context.
pub const MAX_DB_PAGES: usize = 256;
/// vendor_id that QUERY_DEVICE reports: the PCI vendor of virtio devices.
pub const VENDOR_ID: u32 = 0x1af4;

/// What the device offers.
pub const CAPS: u64 = abi::cap::ATOMIC
    | abi::cap::ATOMIC_GLOB
    | abi::cap::SRQ
    | abi::cap::UC
    | abi::cap::UD
    | abi::cap::DMA_MR
    | abi::cap::MR_REREG
    | abi::cap::ZERO_BASED
    | abi::cap::CQ_RESIZE
    | abi::cap::CQ_MODERATE
    | abi::cap::SRQ_RESIZE
    | abi::cap::MEM_MGT
    | abi::cap::MW_TYPE1
    | abi::cap::MW_TYPE2
    | abi::cap::MCAST
    | abi::cap::SQD
    | abi::cap::FLUSH
    | abi::cap::ATOMIC_WRITE;

/// Numbers of objects that one NIC may have. They are reported to the guest, honoured, and may
/// change while the NIC lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Limits {
    pub max_contexts: u32,
    pub max_pds: u32,
    pub max_mrs: u32,
    /// Registered bytes in all regions together; see [`Limits::mr_bytes`].
    pub max_mr_bytes: u64,
    pub max_cqs: u32,
    pub max_srqs: u32,
    pub max_qps: u32,
    pub max_ahs: u32,
}

/// How often a guest may register all of its memory: processes that share memory register it each.
const EACH_PAGE: u64 = 16;

/// Registered bytes that the guest with this memory may have, whatever the operator allows it.
#[must_use]
pub const fn registrable(max_mr_bytes: u64, space: &AddressSpace) -> u64 {
    let most = space.bytes().saturating_mul(EACH_PAGE);
    if most < max_mr_bytes { most } else { max_mr_bytes }
}

impl Limits {
    /// See [`registrable`].
    #[must_use]
    pub const fn mr_bytes(&self, space: &AddressSpace) -> u64 {
        registrable(self.max_mr_bytes, space)
    }
}

/// Objects that exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Objects {
    pub contexts: u32,
    pub pds: u32,
    pub mrs: u32,
    pub mr_bytes: u64,
    pub cqs: u32,
    pub srqs: u32,
    pub qps: u32,
    pub ahs: u32,
}

/// What happened on a NIC since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Payload bytes that left: sends, writes, atomics' operands, and what peers read.
    pub tx_bytes: u64,
    /// Payload bytes that arrived: receives, peers' writes and atomics, and what was read from
    /// peers.
    pub rx_bytes: u64,
    /// Messages whose request left this NIC.
    pub tx_messages: u64,
    /// Messages whose request this NIC executed.
    pub rx_messages: u64,
    /// Requests of peers that found no receive.
    pub rnr_naks_sent: u64,
    /// Own requests that found no receive.
    pub rnr_naks_received: u64,
    /// Own requests that nobody answered in time.
    pub ack_timeouts: u64,
    /// Requests of peers refused for key, range or right.
    pub access_errors: u64,
    /// Requests of peers refused as malformed.
    pub request_errors: u64,
    /// Completions with an error, flushes not counted.
    pub completion_errors: u64,
    /// Datagrams and unreliable messages dropped on arrival.
    pub receive_drops: u64,
    /// Events that found one of their kind still waiting for a buffer.
    pub events_coalesced: u64,
    /// Completions written.
    pub completions: u64,
    /// Events put on queues.
    pub events: u64,
    /// Control commands executed, refused ones too.
    pub commands: u64,
    /// Pages that were missing when the worker touched them for this NIC, by samples.
    pub page_faults: u64,
}

/// What QUERY_COUNTERS answers. The operator's counters outlive the guest's driver; what that is
/// told begins with it.
pub(crate) fn counters(now: &Counters, at_init: &Counters) -> abi::QueryCountersResp {
    let since = |count: fn(&Counters) -> u64| U64::new(count(now).wrapping_sub(count(at_init)));
    abi::QueryCountersResp {
        tx_bytes: since(|c| c.tx_bytes),
        rx_bytes: since(|c| c.rx_bytes),
        tx_messages: since(|c| c.tx_messages),
        rx_messages: since(|c| c.rx_messages),
        rnr_naks_sent: since(|c| c.rnr_naks_sent),
        rnr_naks_received: since(|c| c.rnr_naks_received),
        ack_timeouts: since(|c| c.ack_timeouts),
        access_errors: since(|c| c.access_errors),
        request_errors: since(|c| c.request_errors),
        completion_errors: since(|c| c.completion_errors),
        receive_drops: since(|c| c.receive_drops),
        events_coalesced: since(|c| c.events_coalesced),
        completions: since(|c| c.completions),
        events: since(|c| c.events),
        commands: since(|c| c.commands),
        ..abi::QueryCountersResp::default()
    }
}
