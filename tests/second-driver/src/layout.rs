//! Numbers and layouts, typed from section 12 of `docs/virtio-rdma.md`, with its names.
//!
//! A struct is a [`Record`]: bytes that are written and read at the offsets of its table, so that a
//! reader can hold the table against each place of use. Offsets are constants; one outside its
//! record is a slip of this crate, which the first use shows.

pub(crate) const MAGIC: u32 = 0x414d_4452;
pub(crate) const ABI_VERSION: u32 = 1;
pub(crate) const PAGE_SIZE: u64 = 4096;
pub(crate) const PAGE: usize = 4096;
pub(crate) const LIST_PAGE_ENTRIES: usize = 512;

pub(crate) const STATUS_NEED_KICK: u64 = 0;
pub(crate) const STATUS_ALIVE: u64 = 64;
pub(crate) const DB_INDEX: u64 = 256;
pub(crate) const DB_GROUP_SLOTS: u64 = 64;
pub(crate) const DB_SLOTS: u32 = 960;

pub(crate) const CTRL_SIZE: u64 = 128;
pub(crate) const CTRL_CONSUMER: u64 = 0;
pub(crate) const CTRL_ARM: u64 = 4;
pub(crate) const CTRL_FIRED: u64 = 64;
pub(crate) const ARM_ANY: u32 = 2;
pub(crate) const ARM_SEQ_SHIFT: u32 = 2;

pub(crate) const WR_SEND: u8 = 2;
pub(crate) const SEND_SIGNALED: u8 = 2;
pub(crate) const SEND_INLINE: u8 = 8;
pub(crate) const CQE_RECV: u16 = 1;
pub(crate) const WC_SEND: u8 = 0;
pub(crate) const WC_RECV: u8 = 128;
pub(crate) const COMPLETION_STATUSES: &str = "SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR - LOC_PROT_ERR \
    WR_FLUSH_ERR MW_BIND_ERR BAD_RESP_ERR LOC_ACCESS_ERR REM_INV_REQ_ERR REM_ACCESS_ERR \
    REM_OP_ERR RETRY_EXC_ERR RNR_RETRY_EXC_ERR - - - - - FATAL_ERR - GENERAL_ERR";

/// Events that end what this driver does: CQ_ERR, QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR,
/// DEVICE_FATAL.
pub(crate) const FATAL_EVENTS: [u32; 5] = [0, 1, 2, 3, 8];

pub(crate) const STATUSES: &str = "OK ERR_INVAL ERR_NOMEM ERR_NOTSUPP ERR_NOENT ERR_BUSY ERR_PERM \
    ERR_FAULT ERR_EXIST ERR_STATE ERR_FATAL ERR_UNREACH";

pub(crate) mod cmd {
    pub(crate) const INIT: u16 = 0x01;
    pub(crate) const SHUTDOWN: u16 = 0x02;
    pub(crate) const KEEPALIVE: u16 = 0x03;
    pub(crate) const QUERY_DEVICE: u16 = 0x04;
    pub(crate) const QUERY_PORT: u16 = 0x05;
    pub(crate) const GID_SET: u16 = 0x06;
    pub(crate) const CONTEXT_CREATE: u16 = 0x10;
    pub(crate) const CONTEXT_DESTROY: u16 = 0x11;
    pub(crate) const PD_CREATE: u16 = 0x18;
    pub(crate) const PD_DESTROY: u16 = 0x19;
    pub(crate) const MR_REG: u16 = 0x20;
    pub(crate) const MR_DEREG: u16 = 0x24;
    pub(crate) const CQ_CREATE: u16 = 0x28;
    pub(crate) const CQ_DESTROY: u16 = 0x29;
    pub(crate) const QP_CREATE: u16 = 0x38;
    pub(crate) const QP_DESTROY: u16 = 0x39;
    pub(crate) const QP_MODIFY: u16 = 0x3a;
}

pub(crate) const GID_ROCE_V2: u8 = 2;
pub(crate) const PORT_ACTIVE: u8 = 4;
pub(crate) const ACCESS_LOCAL_WRITE: u32 = 1;
pub(crate) const QPT_RC: u32 = 2;
pub(crate) const NO_SRQ: u32 = 0xffff_ffff;
pub(crate) const AV_GRH: u8 = 1;
pub(crate) const QPS_INIT: u8 = 1;
pub(crate) const QPS_RTR: u8 = 2;
pub(crate) const QPS_RTS: u8 = 3;

/// STATE, ACCESS_FLAGS, PKEY_INDEX, PORT.
pub(crate) const QP_TO_INIT: u32 = 1 | 1 << 3 | 1 << 4 | 1 << 5;
/// STATE, AV, PATH_MTU, RQ_PSN, MIN_RNR_TIMER, MAX_DEST_RD_ATOMIC, DEST_QPN.
pub(crate) const QP_TO_RTR: u32 = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20;
/// STATE, TIMEOUT, RETRY_CNT, RNR_RETRY, MAX_QP_RD_ATOMIC, SQ_PSN.
pub(crate) const QP_TO_RTS: u32 = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16;

/// For each type what writes it and what reads it, in the terms of the tables: u8, le16, le32,
/// le64.
macro_rules! integers {
    ($($put:ident $get:ident),*) => {$(
        pub(crate) fn $put(self, offset: usize, value: $put) -> Self {
            self.bytes(offset, &value.to_le_bytes())
        }
        pub(crate) fn $get(&self, offset: usize) -> $put {
            $put::from_le_bytes(self.get(offset))
        }
    )*};
}

/// A struct of section 12 in little-endian bytes; all zero at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record<const N: usize>(pub(crate) [u8; N]);

impl<const N: usize> Record<N> {
    pub(crate) const ZERO: Self = Self([0; N]);

    pub(crate) fn bytes(mut self, offset: usize, value: &[u8]) -> Self {
        self.0[offset..offset + value.len()].copy_from_slice(value);
        self
    }

    pub(crate) fn get<const M: usize>(&self, offset: usize) -> [u8; M] {
        let mut value = [0; M];
        value.copy_from_slice(&self.0[offset..offset + M]);
        value
    }

    integers!(u8 get8, u16 get16, u32 get32, u64 get64);
}

/// `struct page_list` over so many 4 KiB pages, whose object begins with the first.
pub(crate) fn page_list(addr: u64, npages: u64, levels: u8) -> [u8; 24] {
    // More pages than fit are more than a device has: it refuses them.
    let npages = u32::try_from(npages).unwrap_or(u32::MAX);
    Record::ZERO.u64(0, addr).u32(8, npages).u8(16, 12).u8(17, levels).0
}
