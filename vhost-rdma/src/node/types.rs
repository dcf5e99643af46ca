//! The plain types of a node: networks, NICs, limits, status.
//!
//! They are shared by the registry, the admin API, the saved state and the device layer; so they
//! carry no behaviour beyond their defaults, and field names are the ones that users see in JSON.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{AclEntry, Backing, MacAddr};

/// The longest path of a unix socket: `sun_path` has 108 bytes and the last is the terminating zero
/// (unix(7)).
pub const SOCKET_PATH_MAX: usize = 107;

/// The network that always exists.
pub const DEFAULT_NETWORK: &str = "default";
/// Its virtual network identifier.
pub const DEFAULT_VNI: u32 = 1;
/// The greatest virtual network identifier: 24 bits, as in VXLAN and Geneve.
pub const VNI_MAX: u32 = (1 << 24) - 1;

/// Completion vectors of a NIC that names no number.
pub const DEFAULT_COMP_VECTORS: u16 = 4;
/// The most of them: a vhost-user backend stops at 64 queues, and control, events and kicks need
/// some.
pub const COMP_VECTORS_MAX: u16 = 32;
/// Kick queues of every NIC.
pub const KICK_QUEUES: u16 = 2;

/// A layer-2 domain: only NICs of one network can find or reach each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkConfig {
    /// Unique on the host.
    pub name: String,
    /// Virtual network identifier, 1 to [`VNI_MAX`], unique on the host.
    pub vni: u32,
    /// Named in the configuration file, which brings it back at every start.
    #[serde(default)]
    pub configured: bool,
}

/// The most that a guest may hold at one time. All of them can change on a live NIC: one that is
/// lowered below the present use keeps what exists and refuses more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NicLimits {
    /// Contexts (one for each process that opened the device, and one for the kernel).
    pub max_contexts: u32,
    /// Protection domains.
    pub max_pds: u32,
    /// Memory regions.
    pub max_mrs: u32,
    /// Sum of the lengths of all registered regions, in bytes; never more than sixteen times the
    /// guest's memory.
    pub max_mr_bytes: u64,
    /// What the daemon keeps for the guest, in bytes of its own memory: objects, and tables of the
    /// pages that they lie in.
    pub max_kept_bytes: u64,
    /// Memory that the VMM may share with the daemon, in bytes. A page of it is charged to whoever
    /// touches it first, so it is also what the daemon can be made to pay for.
    pub max_guest_bytes: u64,
    /// Completion queues.
    pub max_cqs: u32,
    /// Shared receive queues.
    pub max_srqs: u32,
    /// Queue pairs.
    pub max_qps: u32,
    /// Address handles.
    pub max_ahs: u32,
}

impl Default for NicLimits {
    /// A guest may share, and register, as much memory as the host has: more cannot be meant, and
    /// whoever means less says so.
    fn default() -> Self {
        let memory = crate::limits::host_memory();
        Self {
            max_contexts: 1024,
            max_pds: 4096,
            max_mrs: 65_536,
            max_mr_bytes: memory,
            max_kept_bytes: 512 << 20,
            max_guest_bytes: memory,
            max_cqs: 16_384,
            max_srqs: 4096,
            max_qps: 16_384,
            max_ahs: 65_536,
        }
    }
}

/// A change of limits: what is absent stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsPatch {
    /// See [`NicLimits::max_contexts`].
    pub max_contexts: Option<u32>,
    /// See [`NicLimits::max_pds`].
    pub max_pds: Option<u32>,
    /// See [`NicLimits::max_mrs`].
    pub max_mrs: Option<u32>,
    /// See [`NicLimits::max_mr_bytes`].
    pub max_mr_bytes: Option<u64>,
    /// See [`NicLimits::max_kept_bytes`].
    pub max_kept_bytes: Option<u64>,
    /// See [`NicLimits::max_guest_bytes`].
    pub max_guest_bytes: Option<u64>,
    /// See [`NicLimits::max_cqs`].
    pub max_cqs: Option<u32>,
    /// See [`NicLimits::max_srqs`].
    pub max_srqs: Option<u32>,
    /// See [`NicLimits::max_qps`].
    pub max_qps: Option<u32>,
    /// See [`NicLimits::max_ahs`].
    pub max_ahs: Option<u32>,
}

impl LimitsPatch {
    /// The limits that `base` becomes.
    #[must_use]
    pub fn apply(&self, base: NicLimits) -> NicLimits {
        NicLimits {
            max_contexts: self.max_contexts.unwrap_or(base.max_contexts),
            max_pds: self.max_pds.unwrap_or(base.max_pds),
            max_mrs: self.max_mrs.unwrap_or(base.max_mrs),
            max_mr_bytes: self.max_mr_bytes.unwrap_or(base.max_mr_bytes),
            max_kept_bytes: self.max_kept_bytes.unwrap_or(base.max_kept_bytes),
            max_guest_bytes: self.max_guest_bytes.unwrap_or(base.max_guest_bytes),
            max_cqs: self.max_cqs.unwrap_or(base.max_cqs),
            max_srqs: self.max_srqs.unwrap_or(base.max_srqs),
            max_qps: self.max_qps.unwrap_or(base.max_qps),
            max_ahs: self.max_ahs.unwrap_or(base.max_ahs),
        }
    }
}

/// Who may open a NIC's socket: whoever may open it owns the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketAccess {
    /// Numeric user; `None` is the daemon's own.
    pub uid: Option<u32>,
    /// Numeric group; `None` is the daemon's own.
    pub gid: Option<u32>,
    /// Permission bits.
    pub mode: u32,
    /// Whom else it lets in.
    #[serde(default)]
    pub acl: Vec<AclEntry>,
}

impl Default for SocketAccess {
    fn default() -> Self {
        Self { uid: None, gid: None, mode: 0o660, acl: Vec::new() }
    }
}

/// Whose device a NIC is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guests {
    /// One virtual machine's, behind vhost-user.
    #[default]
    Vm,
    /// Any number of processes', which share it as those of one machine would.
    Process,
}

impl Guests {
    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Process => "process",
        }
    }

    /// The name of the NIC's socket.
    #[must_use]
    pub const fn socket(self) -> &'static str {
        match self {
            Self::Vm => "vhost.sock",
            Self::Process => "process.sock",
        }
    }
}

impl std::str::FromStr for Guests {
    type Err = BadGuests;

    /// Nothing is a VM's.
    fn from_str(text: &str) -> Result<Self, BadGuests> {
        match text {
            "" | "vm" => Ok(Self::Vm),
            "process" => Ok(Self::Process),
            _ => Err(BadGuests { text: text.to_owned() }),
        }
    }
}

/// Not whom a NIC can be for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a NIC cannot be for {text:?}: write vm or process")]
pub struct BadGuests {
    /// As given.
    pub text: String,
}

/// All that the device layer needs to serve one NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicConfig {
    /// Unique on the host.
    pub name: String,
    /// Unique on the host, as long as the NIC is there and after it: no other NIC gets it. It is
    /// what the NIC's process knows it by, and the same after a restart.
    #[serde(default)]
    pub number: u32,
    /// The network's name, for people and labels.
    pub network: String,
    /// The network's identifier: what the engine separates by.
    pub vni: u32,
    /// Unique in the network; the companion netdev in the guest has the same.
    pub mac: MacAddr,
    /// The addresses (GIDs) that the NIC may use; empty is any address that no other NIC of the
    /// network holds.
    pub addresses: Vec<IpAddr>,
    /// The virtio device type told to the VMM, if the user chose one.
    pub virtio_id: Option<u32>,
    /// Completion vectors, 1 to [`COMP_VECTORS_MAX`]: one completion-event virtqueue each, fixed at
    /// creation because the VMM's options name the number of queues.
    #[serde(default = "default_comp_vectors")]
    pub comp_vectors: u16,
    /// What the guest may hold.
    pub limits: NicLimits,
    /// What carries the verbs.
    pub backing: Backing,
    /// Whose device it is.
    #[serde(default)]
    pub guests: Guests,
    /// Where the VMM or the processes connect.
    pub socket: PathBuf,
    /// Who may connect.
    pub access: SocketAccess,
    /// Named in the configuration file, which brings it back at every start.
    #[serde(default)]
    pub configured: bool,
}

const fn default_comp_vectors() -> u16 {
    DEFAULT_COMP_VECTORS
}

impl NicConfig {
    /// Virtqueues of the device: control, asynchronous events, one for each completion vector,
    /// kicks.
    #[must_use]
    pub const fn num_queues(&self) -> u16 {
        self.comp_vectors.saturating_add(2 + KICK_QUEUES)
    }
}

/// How far the other side of a NIC's socket has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Session {
    /// No VMM is connected.
    #[default]
    Absent,
    /// A VMM is connected; no guest driver has initialised the device.
    Connected,
    /// The guest driver has initialised the device.
    DriverReady,
    /// The device stopped after a fault; other NICs are not affected.
    Failed,
}

/// Counted since the NIC was attached; they never go back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Payload bytes sent (SEND, WRITE, READ responses, atomics).
    pub tx_bytes: u64,
    /// Payload bytes received.
    pub rx_bytes: u64,
    /// Messages sent.
    pub tx_messages: u64,
    /// Messages received.
    pub rx_messages: u64,
    /// Receiver-not-ready NAKs sent.
    pub rnr_naks: u64,
    /// Requests tried again.
    pub retries: u64,
    /// Requests refused for a key, range or access flag.
    pub access_errors: u64,
    /// Commands on the control queue.
    pub control_commands: u64,
    /// Kicks received from the guest.
    pub kicks: u64,
    /// Events put into the guest's buffers, completion events and asynchronous ones.
    pub events: u64,
    /// Completions written.
    pub completions: u64,
    /// Pages that were missing when the daemon touched them for this NIC, by samples.
    #[serde(default)]
    pub page_faults: u64,
    /// Moves to another worker, if its network has several.
    pub moves: u64,
}

impl Counters {
    /// What both count together.
    #[must_use]
    pub const fn plus(&self, more: &Self) -> Self {
        Self {
            tx_bytes: self.tx_bytes.saturating_add(more.tx_bytes),
            rx_bytes: self.rx_bytes.saturating_add(more.rx_bytes),
            tx_messages: self.tx_messages.saturating_add(more.tx_messages),
            rx_messages: self.rx_messages.saturating_add(more.rx_messages),
            rnr_naks: self.rnr_naks.saturating_add(more.rnr_naks),
            retries: self.retries.saturating_add(more.retries),
            access_errors: self.access_errors.saturating_add(more.access_errors),
            control_commands: self.control_commands.saturating_add(more.control_commands),
            kicks: self.kicks.saturating_add(more.kicks),
            events: self.events.saturating_add(more.events),
            completions: self.completions.saturating_add(more.completions),
            page_faults: self.page_faults.saturating_add(more.page_faults),
            moves: self.moves.saturating_add(more.moves),
        }
    }
}

/// What the guest holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Objects {
    /// Contexts.
    pub contexts: u32,
    /// Protection domains.
    pub pds: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Sum of their lengths in bytes.
    pub mr_bytes: u64,
    /// Completion queues.
    pub cqs: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Address handles.
    pub ahs: u32,
    /// Bytes that the daemon keeps for all that.
    #[serde(default)]
    pub kept_bytes: u64,
}

/// What the device layer reports of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NicStatus {
    /// How far the VMM and the guest driver have come.
    pub session: Session,
    /// A VMM was connected when the daemon before this one ended, and none has been since.
    pub interrupted: bool,
    /// Why the session failed, in words for the operator.
    pub error: Option<String>,
    /// The process that serves it does not answer.
    pub silent: bool,
    /// Since the NIC was attached.
    pub counters: Counters,
    /// Now.
    pub objects: Objects,
    /// The GIDs that the guest has set now.
    pub gids: Vec<IpAddr>,
    /// The number of the worker that serves it now, of those of its process.
    pub worker: u32,
}

/// What is known of the process that serves a network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProcessStatus {
    /// The network's name.
    pub network: String,
    /// The process, if there is one now.
    pub pid: Option<u32>,
    /// How often one has ended since the first NIC of the network.
    pub deaths: u64,
    /// Again and again, in the last minute.
    pub failing: bool,
    /// Its memory, where it has a cgroup of its own.
    pub memory: Option<MemoryStatus>,
}

/// Memory of the processes in a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryStatus {
    /// Bytes now.
    pub now: u64,
    /// Bytes at most.
    pub max: Option<u64>,
    /// How often the memory killer has ended one.
    pub kills: u64,
}

/// What the device layer reports of one of its worker threads. A turn is what one guest can make
/// another wait; its length is the worker's own time, without what it waited for a processor.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WorkerStatus {
    /// The network whose process it is in; empty: the daemon's own process.
    pub network: String,
    /// Turns by length: the upper bound of each class in seconds, infinite for the last, and how
    /// many there were.
    pub turns: Vec<(f64, u64)>,
    /// All turns together, in seconds.
    pub busy: f64,
    /// The longest turn, in seconds.
    pub longest: f64,
    /// The most that a turn was charged by the engine's cost model, in seconds: the same on a
    /// machine of any speed.
    pub charged: f64,
    /// For how many seconds the present turn has lasted; 0 between turns.
    pub stalled: f64,
}

impl WorkerStatus {
    /// Two workers of one process, as one.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        let turns = self.turns.into_iter().zip(other.turns);
        Self {
            network: self.network,
            turns: turns.map(|((bound, a), (_, b))| (bound, a + b)).collect(),
            busy: self.busy + other.busy,
            longest: self.longest.max(other.longest),
            charged: self.charged.max(other.charged),
            stalled: self.stalled.max(other.stalled),
        }
    }
}
