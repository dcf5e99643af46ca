//! Requests and answers.

use serde::{Deserialize, Serialize};

use crate::{AttachedNic, Attachment, Checked, Nic, Pod, Record, Status, Step};

/// Asks for the NICs that one `ADD` has to attach, and writes down that this was asked.
///
/// With `device_id` (Multus, one call for each network) it is that NIC; without, all NICs of the
/// pod that no other attachment has. A pod without any gets an empty list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Whose NICs.
    pub pod: Pod,
    /// Which attachment.
    #[serde(flatten)]
    pub attachment: Attachment,
    /// `CNI_NETNS`.
    pub netns: String,
    /// The name of the CNI network configuration.
    pub network: String,
    /// `deviceID` of the configuration: an ID that the device plugin granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_id: Option<String>,
    /// The MAC address that the runtime wants the one NIC to have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// What of the network configuration a `DEL` needs: with it the agent can have a `DEL` made
    /// that nobody else will ask for (IPAM included).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<serde_json::Value>,
}

/// Writes down what is about to be done for one NIC; answered when it is on the disk. Steps add up
/// over several calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intend {
    /// Which attachment.
    #[serde(flatten)]
    pub attachment: Attachment,
    /// Which NIC of it.
    pub nic: String,
    /// In the order in which they will be done.
    pub steps: Vec<Step>,
}

/// `ADD` succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Which attachment.
    #[serde(flatten)]
    pub attachment: Attachment,
    /// Each NIC of it.
    pub nics: Vec<AttachedNic>,
}

/// Asks for what there is to undo: of one attachment, or, without `if_name`, of a whole sandbox.
/// Unknown ones give an empty list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detach {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_IFNAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_name: Option<String>,
    /// `deviceID` of the configuration: only this NIC of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_id: Option<String>,
}

/// Everything of these records is undone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detached {
    /// Which attachment.
    #[serde(flatten)]
    pub attachment: Attachment,
    /// The NICs of it; empty: all.
    #[serde(default)]
    pub nics: Vec<String>,
}

/// Asks for the records of one network that none of the valid attachments names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gc {
    /// The name of the CNI network configuration.
    pub network: String,
    /// `cni.dev/valid-attachments`.
    pub valid: Vec<Attachment>,
}

/// A NIC by ID, for the operator's commands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The ID.
    pub id: String,
}

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum Request {
    /// Is the agent ready, what does it have? → [`Reply::Status`]
    Status,
    /// → [`Reply::Nics`]
    Attach(Attach),
    /// → [`Reply::Done`]
    Intend(Intend),
    /// → [`Reply::Done`]
    Attached(Attached),
    /// → [`Reply::Checked`]
    Check(Attachment),
    /// → [`Reply::Records`]
    Detach(Detach),
    /// → [`Reply::Done`]
    Detached(Detached),
    /// All is undone but addresses, whose IPAM plugin does not take them back: the NICs are free,
    /// and it is asked again. → [`Reply::Done`]
    Owing(Detached),
    /// → [`Reply::Records`]
    Gc(Gc),
    /// Grant this ID to nobody until further notice. → [`Reply::Done`]
    Cordon(Target),
    /// Takes a cordon back. → [`Reply::Done`]
    Uncordon(Target),
    /// Attachments that no runtime will undo: whoever asks has the CNI plugin's `DEL` made for
    /// each. → [`Reply::Records`]
    Forgotten,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", content = "value", rename_all = "kebab-case")]
pub enum Reply {
    /// It is on the disk.
    Done,
    /// The state of the agent.
    Status(Box<Status>),
    /// NICs to attach, in the order of their interfaces.
    Nics(Vec<Nic>),
    /// Records to undo.
    Records(Vec<Record>),
    /// Records with the live state of their NICs.
    Checked(Vec<Checked>),
    /// It was refused.
    Fault(Fault),
}

/// Why a request was refused; the message says what to do next.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Fault {
    /// What kind of fault.
    pub kind: FaultKind,
    /// In words for a person.
    pub message: String,
}

/// Kinds of faults, with the CNI error code that fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// The request is malformed or of a version that is not spoken (CNI: 7).
    BadRequest,
    /// No such NIC, pod or attachment (CNI: 3).
    NotFound,
    /// Someone else has it (CNI: 100).
    Conflict,
    /// It may work in a moment: kubelet or daemon do not answer now (CNI: 11).
    TryAgain,
    /// The agent is not ready (CNI: 50).
    NotReady,
    /// A fault of the host; the agent's log has more (CNI: 999).
    Internal,
}

impl FaultKind {
    /// The CNI error code (SPEC 1.1.0, "Error"; codes from 100 are the plugin's own).
    #[must_use]
    pub const fn cni_code(self) -> u32 {
        match self {
            Self::NotFound => 3,
            Self::BadRequest => 7,
            Self::TryAgain => 11,
            Self::NotReady => 50,
            Self::Conflict => 100,
            Self::Internal => 999,
        }
    }
}
