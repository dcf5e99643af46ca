//! What a backing needs of an RNIC of this host, and nothing more: [`HostVerbs`].
//!
//! One implementation is one opened device context, for one NIC of a guest; it owns every host
//! object of that guest and names each by a number of its own, so no pointer of libibverbs leaves
//! it. All calls are safe: memory comes as a [`ContiguousMapping`], which the registration keeps
//! alive, and everything else is checked by the hardware against keys and states.
//!
//! Attributes travel in the guest ABI's own structures with guest numbers already replaced by the
//! host's; numbers of access flags, opcodes, statuses, states and attribute masks are the same in
//! the ABI and in `infiniband/verbs.h` (the implementation on libibverbs tests that).

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vhost_rdma_engine::link::Gid;
use vhost_rdma_memory::ContiguousMapping;
use virtio_rdma_abi as abi;

/// A refusal of the host, as an errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", io::Error::from_raw_os_error(*.0))]
pub struct HostError(pub i32);

/// Results of host verbs.
pub type Result<T> = std::result::Result<T, HostError>;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub u32);
    )*};
}

handles!(
    /// A protection domain of the host.
    HostPd,
    /// A memory region of the host.
    HostMr,
    /// A memory window of the host.
    HostMw,
    /// A queue pair of the host.
    HostQp,
    /// A shared receive queue of the host.
    HostSrq,
    /// An address handle of the host.
    HostAh
);

/// What the RNIC can do (`ibv_query_device`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of ibv_device_attr")]
pub struct HostLimits {
    pub guid: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub page_size_cap: u64,
    pub max_mr_size: u64,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_sge_rd: u32,
    pub max_inline: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_mw: u32,
    pub max_pd: u32,
    pub max_ah: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_qp_rd_atom: u32,
    pub max_qp_init_rd_atom: u32,
    pub local_ca_ack_delay: u32,
    pub atomics: bool,
    pub invalidate: bool,
    /// Memory windows of type 1.
    pub windows_1: bool,
    /// Memory windows of type 2B, and what frees them.
    pub windows_2: bool,
    /// Multicast groups, and QPs in each; 0: none.
    pub max_mcast_groups: u32,
    pub max_mcast_qps: u32,
}

/// The RNIC's port (`ibv_query_port`), in the encoding of verbs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of ibv_port_attr")]
pub struct HostPort {
    pub state: u8,
    pub phys_state: u8,
    pub max_mtu: u8,
    pub active_mtu: u8,
    pub active_speed: u8,
    pub active_width: u8,
    pub max_msg_sz: u32,
}

/// An entry of the port's GID table; only those of RoCE v2 are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostGid {
    /// Its index.
    pub index: u16,
    /// The address.
    pub gid: Gid,
}

/// A registration. It ends when this is dropped, which may block for as long as the making of it;
/// its domain and its context outlive it.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Registered {
    pub lkey: u32,
    pub rkey: u32,
    /// What the implementation keeps of it.
    pub(crate) host: HostPart,
}

/// An address handle that has no number yet. It ends when this is dropped.
#[derive(Debug)]
pub struct MadeAh {
    /// Where it leads.
    pub destination: Gid,
    /// What the implementation keeps of it.
    pub(crate) host: HostPart,
}

/// What an implementation keeps of an object that was made on another thread. Dropping it is the
/// object's end.
#[derive(Debug)]
pub struct HostPart {
    /// The opened context that it was made in, and where it is there: addresses that mean something
    /// to that context alone.
    at: (usize, usize),
    _keeps: Box<dyn Keeps>,
}

/// What is there as long as somebody keeps it.
pub trait Keeps: Send + fmt::Debug {}

impl<T: Send + fmt::Debug> Keeps for T {}

impl HostPart {
    /// An object that is `object` in `context`, and ends with `keeps`.
    pub(crate) fn new((context, object): (usize, usize), keeps: impl Keeps + 'static) -> Self {
        Self { at: (context, object), _keeps: Box::new(keeps) }
    }

    /// Where it is in a context; `None` if it was made in another.
    pub(crate) fn address_in(&self, context: usize) -> Option<usize> {
        (self.at.0 == context).then_some(self.at.1)
    }
}

/// A protection domain, for what may take its time, on whatever thread.
#[allow(clippy::missing_errors_doc, reason = "every error is the host's errno")]
pub trait HostDomain: Send + fmt::Debug {
    /// Registers a window of guest memory at the guest's own address; pins its pages.
    fn register(
        &self,
        mapping: Arc<ContiguousMapping>,
        iova: u64,
        access: u32,
    ) -> Result<Registered>;
    /// Makes an address handle; the host asks the network for the neighbour's MAC address and waits
    /// for the answer, up to a second (Linux drivers/infiniband/core/addr.c,
    /// rdma_addr_find_l2_eth_by_grh).
    fn create_ah(&self, av: &abi::Av) -> Result<MadeAh>;
}

/// What a new QP is made of. All QPs of a context complete to its one CQ.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct QpInit {
    pub pd: HostPd,
    /// One of `virtio_rdma_abi::qpt`.
    pub kind: u32,
    pub srq: Option<HostSrq>,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
}

/// A scatter-gather element: addresses and keys are the guest's, which are the hardware's.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct HostSge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// Where a work request's data stands in its burst.
#[allow(missing_docs, reason = "the variants' texts say it")]
#[derive(Clone, Copy, Debug)]
pub enum Data {
    /// Elements `first` to `first + count` of the burst's.
    Sges { first: u32, count: u32 },
    /// Bytes `first` to `first + len` of the burst's inline bytes.
    Inline { first: u32, len: u32 },
}

/// What a work request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The peer that the QP is connected to, or a key of the QP's own.
    Peer,
    /// The peer of an address handle.
    Ah(HostAh),
    /// A window, and the region that it is to show; none with length 0.
    Window(HostMw, Option<HostMr>),
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of ibv_send_wr")]
pub struct SendWr {
    pub wr_id: u64,
    /// One of `virtio_rdma_abi::opcode`.
    pub opcode: u8,
    /// Of `virtio_rdma_abi::send_flags`; INLINE is told by `data`.
    pub flags: u8,
    pub data: Data,
    /// Immediate as opaque bytes; the key to invalidate, or the present one of a window,
    /// little-endian.
    pub imm: [u8; 4],
    pub remote_addr: u64,
    pub rkey: u32,
    pub arg0: u64,
    pub arg1: u64,
    pub subject: Subject,
    /// The Q_Key of a datagram, or the access flags of a window.
    pub aux: u32,
}

/// Send work requests that are posted at once; a BIND_MW is the last of them.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct SendBurst {
    pub wrs: Vec<SendWr>,
    pub sges: Vec<HostSge>,
    pub inline: Vec<u8>,
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct RecvWr {
    pub wr_id: u64,
    pub first: u32,
    pub count: u32,
}

/// Receive work requests that are posted at once.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct RecvBurst {
    pub wrs: Vec<RecvWr>,
    pub sges: Vec<HostSge>,
}

impl SendBurst {
    /// Forgets what was posted.
    pub fn clear(&mut self) {
        self.wrs.clear();
        self.sges.clear();
        self.inline.clear();
    }
}

impl RecvBurst {
    /// Forgets what was posted.
    pub fn clear(&mut self) {
        self.wrs.clear();
        self.sges.clear();
    }
}

/// A post that was cut short: `posted` work requests were taken before the one that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct PostError {
    pub posted: usize,
    pub error: HostError,
}

/// A completion of the host (`ibv_wc`), in the numbers of verbs.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of ibv_wc")]
pub struct HostWc {
    pub wr_id: u64,
    pub status: u8,
    /// One of `virtio_rdma_abi::wc_opcode`; of successes only.
    pub opcode: u8,
    pub sl: u8,
    pub pkey_index: u16,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm: [u8; 4],
    pub qpn: u32,
    pub src_qp: u32,
    pub grh: bool,
    pub with_imm: bool,
    pub with_inv: bool,
}

/// An asynchronous event of the host (`ibv_async_event`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// Of a QP: one of `virtio_rdma_abi::event`.
    Qp(HostQp, u32),
    /// Of an SRQ: likewise.
    Srq(HostSrq, u32),
    /// The CQ overran or failed.
    Cq,
    /// The port came up or went down.
    Port {
        /// It is up.
        active: bool,
    },
    /// The port's GID table changed.
    Gids,
    /// The device is gone.
    Fatal,
}

/// Host objects that exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct HostObjects {
    pub pds: usize,
    pub mrs: usize,
    pub mws: usize,
    pub qps: usize,
    pub srqs: usize,
    pub ahs: usize,
    /// QPs in multicast groups.
    pub attachments: usize,
}

/// One opened device context of an RNIC, with all that is in it when it is dropped. See the module.
#[allow(clippy::missing_errors_doc, reason = "every error is the host's errno")]
pub trait HostVerbs: Send + fmt::Debug {
    /// What the device can do; constant.
    fn limits(&self) -> &HostLimits;
    /// The port now.
    fn port(&mut self) -> Result<HostPort>;
    /// The port's RoCE v2 addresses now.
    fn gids(&mut self) -> Result<Vec<HostGid>>;

    /// Makes a protection domain.
    fn alloc_pd(&mut self) -> Result<HostPd>;
    /// Frees one; the last of what is in it does, if something is still ending.
    fn free_pd(&mut self, pd: HostPd) -> Result<()>;
    /// What makes objects in a domain on other threads.
    fn domain(&mut self, pd: HostPd) -> Result<Box<dyn HostDomain>>;
    /// Takes a registration in, under a number.
    fn adopt(&mut self, region: Registered) -> HostMr;
    /// Gives one back, to be dropped where nobody waits.
    fn release(&mut self, mr: HostMr) -> Result<Registered>;
    /// Makes a memory window (`virtio_rdma_abi::mw_type`); also its first key.
    fn alloc_mw(&mut self, pd: HostPd, kind: u32) -> Result<(HostMw, u32)>;
    /// Destroys one, bound or not.
    fn dealloc_mw(&mut self, mw: HostMw) -> Result<()>;
    /// Takes an address handle in, under a number.
    fn adopt_ah(&mut self, ah: MadeAh) -> Result<HostAh>;
    /// Destroys one.
    fn destroy_ah(&mut self, ah: HostAh) -> Result<()>;
    /// Makes a shared receive queue.
    fn create_srq(&mut self, pd: HostPd, max_wr: u32, max_sge: u32) -> Result<HostSrq>;
    /// Arms the limit of one.
    fn arm_srq(&mut self, srq: HostSrq, limit: u32) -> Result<()>;
    /// Destroys one.
    fn destroy_srq(&mut self, srq: HostSrq) -> Result<()>;
    /// Makes a queue pair; its number is the hardware's.
    fn create_qp(&mut self, init: &QpInit) -> Result<(HostQp, u32)>;
    /// Changes one; `attr.mask` says what.
    fn modify_qp(&mut self, qp: HostQp, attr: &abi::QpAttr) -> Result<()>;
    /// The state that the hardware has it in (`virtio_rdma_abi::qps`), and whether it still drains.
    fn query_qp(&mut self, qp: HostQp) -> Result<(u8, bool)>;
    /// Has a QP for datagrams receive those of a group, on the interface that has the address
    /// `own`.
    fn attach_mcast(&mut self, qp: HostQp, group: &Gid, own: &Gid) -> Result<()>;
    /// Ends that; a QP is in no group when it is destroyed.
    fn detach_mcast(&mut self, qp: HostQp, group: &Gid) -> Result<()>;
    /// Destroys one.
    fn destroy_qp(&mut self, qp: HostQp) -> Result<()>;

    /// Entries of the one CQ.
    fn cq_entries(&self) -> u32;
    /// Posts sends.
    fn post_send(&mut self, qp: HostQp, burst: &SendBurst) -> std::result::Result<(), PostError>;
    /// Posts receives.
    fn post_recv(&mut self, qp: HostQp, burst: &RecvBurst) -> std::result::Result<(), PostError>;
    /// Posts receives to an SRQ.
    fn post_srq(&mut self, srq: HostSrq, burst: &RecvBurst) -> std::result::Result<(), PostError>;
    /// Appends completions, a bounded number; returns whether there may be more.
    fn poll(&mut self, into: &mut Vec<HostWc>) -> Result<bool>;
    /// Asks for an event at the next completion.
    fn arm(&mut self) -> Result<()>;
    /// The next asynchronous event, if there is one. Also empties the channel of completion events.
    fn next_event(&mut self) -> Option<HostEvent>;
    /// Descriptors that become readable (edge) with completions after [`arm`](Self::arm) and with
    /// asynchronous events.
    fn wake_fds(&self) -> io::Result<Vec<OwnedFd>>;
    /// Whoever waits for these, for as long as this context is open: their copies keep it open as
    /// well.
    fn keep(&mut self, watch: Box<dyn Keeps>);
    /// What exists.
    fn objects(&self) -> HostObjects;
}
