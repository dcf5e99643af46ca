//! What the supervisor says to the process, and what that answers: plain data, as between the
//! supervisor and a network's process, and in the same form (`network_process::encode`).
//!
//! Orders are carried out as they come and not answered, but for the first. The process is the less
//! trusted side: all that it can say is that a network's process talks nonsense.

use serde::{Deserialize, Serialize};

use crate::node::NicConfig;
use crate::telemetry::LogFormat;

/// Both sides are one program, but not one build, while it is being replaced on the disk.
pub const VERSION: u32 = 1;

/// What the process begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// [`VERSION`] of the supervisor.
    pub version: u32,
    /// Where third-party hosts reach guests by rdma_cm.
    pub ports: Vec<u16>,
    /// Connections with other daemons, in each direction, at most. The socket that they connect to
    /// comes along. None: there is no channel.
    pub daemons: Option<usize>,
    /// Form of the log.
    pub log_format: LogFormat,
    /// What is logged.
    pub log: Option<String>,
}

/// What the supervisor says. Networks have numbers, no number twice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Order {
    /// The first of all.
    Start(Start),
    /// The channel's certificates are those in the file that comes along.
    Identity,
    /// The peers of a VNI are those in the file that comes along.
    Peers(u32),
    /// There is no network of this VNI any more.
    Forget(u32),
    /// There is a network, of this VNI.
    Open(u64, u32),
    /// A NIC of it has come, or has changed.
    Put(u64, NicConfig),
    /// It is gone.
    TakeAway(u64, NicConfig),
    /// Its process speaks by the socket that comes along. What an earlier one had told is void.
    Attach(u64),
    /// It is gone.
    Close(u64),
    /// Log by this filter.
    Log(Option<String>),
    /// Try what is denied, and say what came of it; a build for tests only (`sandbox::tests`).
    #[cfg(test)]
    Attempt(String),
}

/// What the process says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Said {
    /// It is shut in, and begins.
    Started,
    /// It cannot.
    Refused(String),
    /// What the process of this network says makes no sense.
    Nonsense(u64),
    /// What came of an attempt.
    #[cfg(test)]
    Tried(Result<(), String>),
}
