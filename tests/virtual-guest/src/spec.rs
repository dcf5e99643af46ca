//! The numbers and layouts of the device, written once more.
//!
//! Everything here was taken by hand from `docs/virtio-rdma.md` and from the C header that it
//! names, and from no Rust crate of the project: a layout that the daemon has wrong must not be
//! wrong here in the same way for the same reason. For the same reason structures are written field
//! by field into bytes ([`Put`]) and read from bytes at offsets ([`Take`]), not by casting a
//! `repr(C)` type.

/// A table of numbers, each also by its name.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident: $number:ty { $($key:ident = $value:expr,)* }) => {
        $(#[$doc])*
        pub mod $name {
            #![allow(missing_docs)]
            $(pub const $key: $number = $value;)*
            /// The names of all.
            pub const NAMES: &[($number, &str)] = &[$(($key, stringify!($key))),*];
        }
    };
}

/// `config.magic`.
pub const MAGIC: u32 = 0x414d_4452;
/// The ABI version that this driver speaks.
pub const ABI_VERSION: u32 = 1;
/// Bytes of the configuration space.
pub const CONFIG_SIZE: u32 = 64;
/// The page that list pages, doorbell pages and the status page have.
pub const PAGE: u64 = 4096;

/// Virtqueue of control requests.
pub const VQ_CONTROL: usize = 0;
/// Virtqueue of asynchronous events.
pub const VQ_EVENT: usize = 1;
/// First virtqueue of completion events.
pub const VQ_COMP: usize = 2;

/// Addresses in one list page.
pub const LIST_ENTRIES: usize = 512;

/// Status page: the device writes nonzero when it wants a kick.
pub const STATUS_NEED_KICK: u64 = 0;
/// Status page: the driver's sign of life.
pub const STATUS_ALIVE: u64 = 64;
/// Doorbell page: first summary byte.
pub const DB_SUMMARY: u64 = 0;
/// Doorbell page: first producer index.
pub const DB_INDEX: u64 = 256;
/// Slots that share a summary byte.
pub const DB_GROUP: u64 = 64;
/// Slots in a page.
pub const DB_SLOTS: u32 = 960;
/// "This queue pair has no such ring".
pub const DB_NONE: u32 = 0xffff_ffff;

/// Alignment of the control block behind a CQ's or SRQ's entries.
pub const CTRL_ALIGN: u64 = 128;
/// Bytes of a control block.
pub const CTRL_SIZE: u64 = 128;
/// CQ: the driver's consumer index.
pub const CTRL_CONSUMER: u64 = 0;
/// CQ: the driver's arm word.
pub const CTRL_ARM: u64 = 4;
/// CQ: the `seq` that the device fired last.
pub const CTRL_FIRED: u64 = 64;
/// SRQ: the number of receives that the device took.
pub const CTRL_TAKEN: u64 = 68;
/// Arm for a solicited completion or an error.
pub const ARM_SOLICITED: u32 = 1;
/// Arm for any completion.
pub const ARM_ANY: u32 = 2;
/// Position of `seq` in the arm word.
pub const ARM_SEQ_SHIFT: u32 = 2;
/// `seq` is compared in 30 bits.
pub const ARM_SEQ_MASK: u32 = 0x3fff_ffff;

/// Where elements or inline bytes begin in a send work request.
pub const SQ_DATA: usize = 48;
/// Where elements begin in a receive work request.
pub const RQ_DATA: usize = 16;
/// Bytes of one scatter-gather element.
pub const SGE_SIZE: usize = 16;
/// Bytes of a completion.
pub const CQE_SIZE: usize = 64;
/// Where `seq` is in a completion.
pub const CQE_SEQ: u64 = 60;
/// Where `status` is in a completion.
pub const CQE_STATUS: u64 = 13;

table! {
    /// Opcodes of send work requests (7.1).
    wr: u8 {
        RDMA_WRITE = 0,
        RDMA_WRITE_WITH_IMM = 1,
        SEND = 2,
        SEND_WITH_IMM = 3,
        RDMA_READ = 4,
        ATOMIC_CMP_AND_SWP = 5,
        ATOMIC_FETCH_AND_ADD = 6,
        LOCAL_INV = 7,
        BIND_MW = 8,
        SEND_WITH_INV = 9,
        REG_MR = 0x20,
    }
}

/// Flags of send work requests.
pub mod send {
    #![allow(missing_docs)]
    pub const FENCE: u8 = 1;
    pub const SIGNALED: u8 = 2;
    pub const SOLICITED: u8 = 4;
    pub const INLINE: u8 = 8;
}

/// Flags of completions (7.3).
pub mod cqe {
    #![allow(missing_docs)]
    pub const RECV: u16 = 0x01;
    pub const SRQ: u16 = 0x02;
    pub const GRH: u16 = 0x04;
    pub const IMM: u16 = 0x08;
    pub const INV: u16 = 0x10;
    pub const SMAC: u16 = 0x20;
    pub const IPV4: u16 = 0x40;
    pub const SOLICITED: u16 = 0x80;
}

/// Opcodes of completions.
pub mod wc {
    #![allow(missing_docs)]
    pub const SEND: u8 = 0;
    pub const RDMA_WRITE: u8 = 1;
    pub const RDMA_READ: u8 = 2;
    pub const COMP_SWAP: u8 = 3;
    pub const FETCH_ADD: u8 = 4;
    pub const BIND_MW: u8 = 5;
    pub const LOCAL_INV: u8 = 6;
    pub const REG_MR: u8 = 10;
    pub const RECV: u8 = 128;
    pub const RECV_RDMA_WITH_IMM: u8 = 129;
}

table! {
    /// Statuses of completions (8.3).
    status: u8 {
        SUCCESS = 0,
        LOC_LEN_ERR = 1,
        LOC_QP_OP_ERR = 2,
        LOC_PROT_ERR = 4,
        WR_FLUSH_ERR = 5,
        MW_BIND_ERR = 6,
        BAD_RESP_ERR = 7,
        LOC_ACCESS_ERR = 8,
        REM_INV_REQ_ERR = 9,
        REM_ACCESS_ERR = 10,
        REM_OP_ERR = 11,
        RETRY_EXC_ERR = 12,
        RNR_RETRY_EXC_ERR = 13,
        FATAL_ERR = 19,
        GENERAL_ERR = 21,
        DISCARDED = 255,
    }
}

table! {
    /// Types of asynchronous events (7.5).
    event: u32 {
        CQ_ERR = 0,
        QP_FATAL = 1,
        QP_REQ_ERR = 2,
        QP_ACCESS_ERR = 3,
        COMM_EST = 4,
        SQ_DRAINED = 5,
        DEVICE_FATAL = 8,
        PORT_ACTIVE = 9,
        PORT_ERR = 10,
        SRQ_ERR = 14,
        SRQ_LIMIT_REACHED = 15,
        QP_LAST_WQE_REACHED = 16,
        GID_CHANGE = 18,
    }
}

table! {
    /// Opcodes of control commands (5).
    cmd: u16 {
        INIT = 0x01,
        SHUTDOWN = 0x02,
        KEEPALIVE = 0x03,
        QUERY_DEVICE = 0x04,
        QUERY_PORT = 0x05,
        GID_SET = 0x06,
        QUERY_COUNTERS = 0x07,
        CONTEXT_CREATE = 0x10,
        CONTEXT_DESTROY = 0x11,
        DB_PAGE_ADD = 0x12,
        PD_CREATE = 0x18,
        PD_DESTROY = 0x19,
        MR_REG = 0x20,
        MR_DMA = 0x21,
        MR_ALLOC = 0x22,
        MR_REREG = 0x23,
        MR_DEREG = 0x24,
        MW_ALLOC = 0x25,
        MW_DEALLOC = 0x26,
        CQ_CREATE = 0x28,
        CQ_DESTROY = 0x29,
        CQ_RESIZE = 0x2a,
        CQ_MODERATE = 0x2b,
        SRQ_CREATE = 0x30,
        SRQ_DESTROY = 0x31,
        SRQ_MODIFY = 0x32,
        SRQ_QUERY = 0x33,
        QP_CREATE = 0x38,
        QP_DESTROY = 0x39,
        QP_MODIFY = 0x3a,
        QP_QUERY = 0x3b,
        AH_CREATE = 0x40,
        AH_DESTROY = 0x41,
        MCAST_ATTACH = 0x44,
        MCAST_DETACH = 0x45,
    }
}

table! {
    /// Statuses of control commands.
    err: u32 {
        OK = 0,
        INVAL = 1,
        NOMEM = 2,
        NOTSUPP = 3,
        NOENT = 4,
        BUSY = 5,
        PERM = 6,
        FAULT = 7,
        EXIST = 8,
        STATE = 9,
        FATAL = 10,
        UNREACH = 11,
    }
}

/// Capabilities that QUERY_DEVICE reports.
pub mod cap {
    #![allow(missing_docs)]
    pub const ATOMIC: u64 = 1 << 0;
    pub const ATOMIC_GLOB: u64 = 1 << 1;
    pub const SRQ: u64 = 1 << 2;
    pub const UC: u64 = 1 << 3;
    pub const UD: u64 = 1 << 4;
    pub const MEM_MGT: u64 = 1 << 5;
    pub const MW_TYPE1: u64 = 1 << 6;
    pub const MW_TYPE2: u64 = 1 << 7;
    pub const CQ_RESIZE: u64 = 1 << 8;
    pub const CQ_MODERATE: u64 = 1 << 9;
    pub const SRQ_RESIZE: u64 = 1 << 10;
    pub const MCAST: u64 = 1 << 11;
    pub const MR_REREG: u64 = 1 << 12;
    pub const ZERO_BASED: u64 = 1 << 13;
    pub const DMA_MR: u64 = 1 << 14;
    pub const SQD: u64 = 1 << 15;
    pub const FLUSH: u64 = 1 << 16;
    pub const ATOMIC_WRITE: u64 = 1 << 17;
}

/// Access flags of regions, windows and queue pairs (6.2).
pub mod access {
    #![allow(missing_docs)]
    pub const LOCAL_WRITE: u32 = 0x01;
    pub const REMOTE_WRITE: u32 = 0x02;
    pub const REMOTE_READ: u32 = 0x04;
    pub const REMOTE_ATOMIC: u32 = 0x08;
    pub const MW_BIND: u32 = 0x10;
    pub const ZERO_BASED: u32 = 0x20;
    pub const FLUSH_GLOBAL: u32 = 0x100;
    pub const OPTIONAL_MASK: u32 = 0x3ff0_0000;
    pub const MIRRORED: u32 = 0x4000_0000;
    /// Everything that a test buffer usually allows.
    pub const ALL: u32 = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
}

/// The Q_Key of every QP 1.
pub const GSI_QKEY: u32 = 0x8001_0000;
/// Types of queue pairs.
pub mod qpt {
    #![allow(missing_docs)]
    pub const GSI: u32 = 1;
    pub const RC: u32 = 2;
    pub const UC: u32 = 3;
    pub const UD: u32 = 4;
}
/// "No SRQ" in QP_CREATE.
pub const NO_SRQ: u32 = 0xffff_ffff;
/// QP_CREATE flag: every send is signaled.
pub const QP_SIG_ALL: u32 = 1;
/// SRQ_MODIFY: `max_wr`, `entries` and `ring` count.
pub const SRQ_MAX_WR: u32 = 1;
/// SRQ_MODIFY: `limit` counts.
pub const SRQ_LIMIT: u32 = 2;
/// GID_SET: removes the entry.
pub const GID_NONE: u8 = 0;
/// GID_SET: a RoCE v2 address.
pub const GID_ROCE_V2: u8 = 2;
/// Address vector flag: it has a GRH.
pub const AV_GRH: u8 = 1;
/// MR_REREG: addresses change.
pub const REREG_TRANSLATION: u32 = 1;
/// MR_REREG: the protection domain changes.
pub const REREG_PD: u32 = 2;
/// MR_REREG: the access flags change.
pub const REREG_ACCESS: u32 = 4;

/// States of a queue pair (8.1).
pub mod qps {
    #![allow(missing_docs)]
    pub const RESET: u8 = 0;
    pub const INIT: u8 = 1;
    pub const RTR: u8 = 2;
    pub const RTS: u8 = 3;
    pub const SQD: u8 = 4;
    pub const SQE: u8 = 5;
    pub const ERR: u8 = 6;
}

/// Attribute mask of QP_MODIFY.
pub mod attr {
    #![allow(missing_docs)]
    pub const STATE: u32 = 1 << 0;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    pub const CAP: u32 = 1 << 19;
    pub const DEST_QPN: u32 = 1 << 20;
    pub const RATE_LIMIT: u32 = 1 << 25;
}

/// A structure being written, field after field.
#[derive(Debug, Default, Clone)]
pub struct Put(Vec<u8>);

impl Put {
    /// An empty structure.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends one byte.
    pub fn u8(mut self, v: u8) -> Self {
        self.0.push(v);
        self
    }

    /// Appends a little-endian 16-bit field.
    pub fn u16(mut self, v: u16) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    /// Appends a little-endian 32-bit field.
    pub fn u32(mut self, v: u32) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    /// Appends a little-endian 64-bit field.
    pub fn u64(mut self, v: u64) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    /// Appends bytes as they are.
    pub fn bytes(mut self, v: &[u8]) -> Self {
        self.0.extend_from_slice(v);
        self
    }

    /// Appends `n` reserved bytes.
    pub fn zero(mut self, n: usize) -> Self {
        self.0.resize(self.0.len() + n, 0);
        self
    }

    /// The structure, which must have exactly `size` bytes.
    #[track_caller]
    pub fn done(self, size: usize) -> Vec<u8> {
        assert_eq!(self.0.len(), size, "a layout in this driver disagrees with the specified size");
        self.0
    }
}

/// Reads of little-endian fields at offsets.
pub trait Take {
    /// The 16-bit field at `at`.
    fn u16_at(&self, at: usize) -> u16;
    /// The 32-bit field at `at`.
    fn u32_at(&self, at: usize) -> u32;
    /// The 64-bit field at `at`.
    fn u64_at(&self, at: usize) -> u64;
}

impl Take for [u8] {
    fn u16_at(&self, at: usize) -> u16 {
        u16::from_le_bytes([self[at], self[at + 1]])
    }

    fn u32_at(&self, at: usize) -> u32 {
        u32::from(self.u16_at(at)) | u32::from(self.u16_at(at + 2)) << 16
    }

    fn u64_at(&self, at: usize) -> u64 {
        u64::from(self.u32_at(at)) | u64::from(self.u32_at(at + 4)) << 32
    }
}
