//! Verbs objects that live on a device, and who made them.

use std::net::SocketAddr;

use super::code::{CmState, PathMigration, PortSpace, QpState, QpType};
use super::codec::{Element, messages};
use super::constants::{attribute, command};

/// A kind of verbs object that can be listed.
#[expect(private_bounds, reason = "the element number is a detail of the encoding")]
pub trait Resource: Element {
    /// Lists them.
    #[doc(hidden)]
    const COMMAND: u16;
    /// Holds the list.
    #[doc(hidden)]
    const TABLE: u16;
    /// For messages.
    #[doc(hidden)]
    const NAME: &'static str;
}

macro_rules! resources {
    ($($name:ident: $command:ident $table:ident $text:literal,)*) => {$(
        impl Resource for $name {
            const COMMAND: u16 = command::$command;
            const TABLE: u16 = attribute::$table;
            const NAME: &'static str = $text;
        }
    )*};
}

resources! {
    QueuePair: RES_QP_GET RES_QP "queue pairs",
    ConnectionId: RES_CM_ID_GET RES_CM_ID "connection identifiers",
    CompletionQueue: RES_CQ_GET RES_CQ "completion queues",
    MemoryRegion: RES_MR_GET RES_MR "memory regions",
    ProtectionDomain: RES_PD_GET RES_PD "protection domains",
    Context: RES_CTX_GET RES_CTX "contexts",
    SharedReceiveQueue: RES_SRQ_GET RES_SRQ "shared receive queues",
}

messages! {
    /// How many objects of a kind there are.
    ResourceCount in RES_SUMMARY_ENTRY {
        /// `pd`, `cq`, `qp`, `cm_id`, `mr`, `ctx`, `srq`.
        name: String = RES_SUMMARY_ENTRY_NAME,
        /// Now.
        current: u64 = RES_SUMMARY_ENTRY_CURR,
        ;
        /// At most, where the kernel says so.
        limit: u64 = RES_SUMMARY_ENTRY_MAX,
    }

    /// A queue pair.
    QueuePair in RES_QP_ENTRY {
        /// Its number.
        number: u32 = RES_LQPN,
        ;
        /// Port that it is bound to.
        port: u32 = PORT_INDEX,
        /// Transport service.
        kind: QpType = RES_TYPE,
        /// The driver's name for its kind.
        subtype: String = RES_SUBTYPE,
        /// Its state.
        state: QpState = RES_STATE,
        /// The peer's number (RC, UC).
        remote_number: u32 = RES_RQPN,
        /// Next expected PSN.
        receive_psn: u32 = RES_RQ_PSN,
        /// Next PSN to send.
        send_psn: u32 = RES_SQ_PSN,
        /// Path migration.
        path_migration: PathMigration = RES_PATH_MIG_STATE,
        /// Its protection domain.
        pd: u32 = RES_PDN,
        /// The process that made it.
        pid: u32 = RES_PID,
        /// The kernel's user that made it.
        kernel_user: String = RES_KERN_NAME,
    }

    /// An identifier of the connection manager.
    ConnectionId in RES_CM_ID_ENTRY {
        /// Its number.
        number: u32 = RES_CM_IDN,
        ;
        /// Port that it is bound to.
        port: u32 = PORT_INDEX,
        /// Its queue pair.
        qp: u32 = RES_LQPN,
        /// Transport service of its queue pair.
        kind: QpType = RES_TYPE,
        /// Its state.
        state: CmState = RES_STATE,
        /// Port space.
        port_space: PortSpace = RES_PS,
        /// Own address.
        source: SocketAddr = RES_SRC_ADDR,
        /// The peer's address.
        destination: SocketAddr = RES_DST_ADDR,
        /// The process that made it.
        pid: u32 = RES_PID,
        /// The kernel's user that made it.
        kernel_user: String = RES_KERN_NAME,
    }

    /// A completion queue.
    CompletionQueue in RES_CQ_ENTRY {
        /// Its number.
        number: u32 = RES_CQN,
        ;
        /// Entries.
        entries: u32 = RES_CQE,
        /// Objects that use it.
        users: u64 = RES_USECNT,
        /// How the kernel polls it.
        poll_context: u8 = RES_POLL_CTX,
        /// Moderation adapts itself.
        adaptive_moderation: bool = DEV_DIM,
        /// Its context.
        context: u32 = RES_CTXN,
        /// The process that made it.
        pid: u32 = RES_PID,
        /// The kernel's user that made it.
        kernel_user: String = RES_KERN_NAME,
    }

    /// A memory region. Keys are told only to those with `CAP_NET_ADMIN`.
    MemoryRegion in RES_MR_ENTRY {
        /// Its number.
        number: u32 = RES_MRN,
        ;
        /// Its length in bytes.
        length: u64 = RES_MRLEN,
        /// Its address.
        iova: u64 = RES_IOVA,
        /// Local key.
        lkey: u32 = RES_LKEY,
        /// Remote key.
        rkey: u32 = RES_RKEY,
        /// Its protection domain.
        pd: u32 = RES_PDN,
        /// The process that made it.
        pid: u32 = RES_PID,
        /// The kernel's user that made it.
        kernel_user: String = RES_KERN_NAME,
    }

    /// A protection domain.
    ProtectionDomain in RES_PD_ENTRY {
        /// Its number.
        number: u32 = RES_PDN,
        ;
        /// Objects in it.
        users: u64 = RES_USECNT,
        /// The kernel's key for all memory.
        local_dma_lkey: u32 = RES_LOCAL_DMA_LKEY,
        /// The kernel's remote key for all memory.
        unsafe_global_rkey: u32 = RES_UNSAFE_GLOBAL_RKEY,
        /// Its context.
        context: u32 = RES_CTXN,
        /// The process that made it.
        pid: u32 = RES_PID,
        /// The kernel's user that made it.
        kernel_user: String = RES_KERN_NAME,
    }

    /// A process that has the device open.
    Context in RES_CTX_ENTRY {
        /// Its number.
        number: u32 = RES_CTXN,
        ;
        /// The process that made it.
        pid: u32 = RES_PID,
        /// The kernel's user that made it.
        kernel_user: String = RES_KERN_NAME,
    }

    /// A shared receive queue.
    SharedReceiveQueue in RES_SRQ_ENTRY {
        /// Its number.
        number: u32 = RES_SRQN,
        ;
        /// `enum ib_srq_type`.
        kind: u8 = RES_TYPE,
        /// Its protection domain.
        pd: u32 = RES_PDN,
        /// Its completion queue (XRC).
        cq: u32 = RES_CQN,
        /// The process that made it.
        pid: u32 = RES_PID,
        /// The kernel's user that made it.
        kernel_user: String = RES_KERN_NAME,
    }
}
