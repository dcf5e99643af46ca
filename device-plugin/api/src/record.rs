//! What the agent remembers, and what it says about itself.

use serde::{Deserialize, Serialize};

use crate::{AttachedNic, Attachment, Kind, Nic, Pod};

/// One change of the host, written down before it is made, with all that undoing it needs. Undoing
/// one that was never made must do nothing: a crash may come between the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// A link is made (tap, veth end); undone by removing it.
    MakeLink {
        /// Its name.
        name: String,
        /// The namespace that it is made in; absent: the host's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        netns: Option<String>,
    },
    /// A netdev goes from the host into the pod; undone by taking it back with its old name, MAC,
    /// MTU and state.
    MoveNetdev {
        /// Its name on the host.
        host_name: String,
        /// Its name in the pod.
        pod_name: String,
        /// On the host, before; what else names it for certain when both names are in doubt.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pci: Option<String>,
        /// Before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
        /// Before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mtu: Option<u32>,
        /// Was it up?
        #[serde(default)]
        up: bool,
        /// The software behind it; absent: none, it is hardware. A pod can give what it makes any
        /// name, address and description, but cannot make hardware.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kind: Option<String>,
        /// Other names that it had. Those that a pod gives it go along, and are taken away.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        altnames: Vec<String>,
    },
    /// An RDMA device goes into the pod; undone by taking it back under its old name.
    MoveRdma {
        /// Its name on the host.
        host_name: String,
        /// Its name in the pod.
        pod_name: String,
        /// The function behind it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pci: Option<String>,
        /// Its index, which stays when it goes elsewhere or is renamed there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        index: Option<u32>,
        /// The GUID of its node: whether it is still the device of that index.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node_guid: Option<String>,
    },
    /// IPAM gives addresses; undone by its `DEL`.
    Ipam {
        /// The plugin's name.
        plugin: String,
        /// The interface that was named to it.
        if_name: String,
    },
    /// Anything else that the binary knows how to undo.
    Other {
        /// What.
        name: String,
        /// With what.
        #[serde(default)]
        data: serde_json::Value,
    },
}

/// How far an attachment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// `attach` was answered; steps may or may not have been made.
    Attaching,
    /// `attached` was told.
    Attached,
    /// `detach` or `gc` was answered; steps may or may not have been undone.
    Detaching,
}

/// One NIC of one attachment, as the agent remembers it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Whose.
    pub pod: Pod,
    /// Which attachment.
    #[serde(flatten)]
    pub attachment: Attachment,
    /// The name of the CNI network configuration.
    pub network: String,
    /// The pod's namespace, as `ADD` was told.
    pub netns: String,
    /// How far.
    pub state: State,
    /// The NIC as `attach` gave it.
    pub nic: Nic,
    /// What was intended, oldest first.
    #[serde(default)]
    pub steps: Vec<Step>,
    /// What `attached` told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<AttachedNic>,
    /// The configuration that `attach` was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<serde_json::Value>,
}

/// What the agent sees of a NIC now.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Live {
    /// Usable, as the kubelet was told.
    pub healthy: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// vhost-user: `absent`, `connected`, `driver_ready` or `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// vhost-user: the limits that the daemon enforces now, by name.
    #[serde(default)]
    pub limits: std::collections::BTreeMap<String, u64>,
    /// vhost-user: limits and addresses that are not what the pool and this attachment say, in
    /// words; empty is good.
    #[serde(default)]
    pub differs: Vec<String>,
}

/// A record with its live state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// What was written down.
    pub record: Record,
    /// What is.
    pub live: Live,
}

/// The agent's state.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Status {
    /// The agent's version.
    pub version: String,
    /// Can it attach NICs now?
    pub ready: bool,
    /// Why not, or what else is wrong.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Every pool.
    #[serde(default)]
    pub pools: Vec<PoolStatus>,
    /// Every ID.
    #[serde(default)]
    pub devices: Vec<DeviceStatus>,
}

/// One pool in numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Its name.
    pub name: String,
    /// What pods ask for.
    pub resource: String,
    /// What it gives.
    pub kind: Kind,
    /// Its network in the daemon.
    #[serde(default)]
    pub network: String,
    /// Does the kubelet know it?
    pub registered: bool,
    /// IDs.
    pub total: u32,
    /// Of them usable.
    pub healthy: u32,
    /// Of them with a pod.
    pub granted: u32,
    /// Usable and without a pod.
    pub free: u32,
}

/// One ID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// The ID.
    pub id: String,
    /// Its pool.
    pub pool: String,
    /// `free`, `granted`, `attached`, `detaching` or `draining`.
    pub state: String,
    /// Usable, as the kubelet is told.
    pub healthy: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Taken out of service by the operator.
    pub cordoned: bool,
    /// Who has it, as far as the kubelet told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    /// The container of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Its attachments.
    #[serde(default)]
    pub attachments: Vec<Attachment>,
    /// vhost-user: how far the VMM and the guest have come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
}
