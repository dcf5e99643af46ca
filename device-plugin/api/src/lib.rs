//! What the CNI binary and the node agent say to each other.
//!
//! The CNI binary has no state: a runtime may kill it between any two of its system calls and calls
//! it again with nothing but names. So the agent keeps the memory: what a pod was given, what the
//! binary is *about to do* to the host ([`Step`]s, written down before they are done), and what it
//! did. The binary does all netlink work, in the pod's network namespace, and the agent never
//! enters one.
//!
//! ```text
//!  ADD    attach ──> NICs of this pod    intend ──> (journal, fsync)    … netlink …    attached
//!  DEL    detach ──> records with steps  … undo, newest first …         detached
//!  CHECK  check  ──> records and the live state of each NIC
//!  GC     gc     ──> records that no valid attachment names            … undo …  detached
//!  STATUS status
//! ```
//!
//! Every call is safe to repeat. One connection carries one request and one answer, each a JSON
//! object on one line of at most [`MESSAGE_MAX`] bytes; the sender may also shut its direction down
//! instead of ending the line. Unknown fields are ignored and absent ones have defaults, so either
//! side may be newer; [`VERSION`] grows only when that is not enough.
//!
//! There is no asynchronous runtime here: the binary must stay small, and [`call`] is three
//! blocking system calls.

mod attachment;
mod call;
mod checkpoint;
mod message;
mod nic;
mod record;

pub use attachment::{AttachedNic, Attachment, Pod};
pub use call::{CallError, MESSAGE_MAX, call, decode, encode, read_message};
pub use checkpoint::{CHECKPOINT, Checkpoint, checkpoint};
pub use message::{
    Attach, Attached, Detach, Detached, Fault, FaultKind, Gc, Intend, Reply, Request, Target,
};
pub use nic::{Companion, Kind, NetnsMode, Nic, Personality};
pub use record::{Checked, DeviceStatus, Live, PoolStatus, Record, State, Status, Step};

/// The version of the conversation that this crate speaks.
pub const VERSION: u32 = 1;

/// Where the agent listens unless its `--socket` says otherwise. Only root can open it: whoever can
/// may take NICs from pods.
pub const DEFAULT_SOCKET: &str = "/run/vhost-rdma-agent/agent.sock";

/// A file beside the socket: the resources of this node that are the agent's, one a line.
pub const RESOURCES: &str = "resources";

/// The variable that says where else it listens, to the agent's commands and to the CNI plugin. It
/// is the host's word: nothing that a tenant writes becomes a variable of a runtime.
pub const SOCKET_ENV: &str = "VHOST_RDMA_AGENT_SOCKET";
