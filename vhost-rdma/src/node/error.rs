//! What can be wrong with a request, each with what to do next. The command line prints these
//! messages as they are.

use std::fmt::Write as _;
use std::io;
use std::net::IpAddr;

use super::backing::BadBacking;
use super::mac::{BadMac, MacAddr};
use super::types::{BadGuests, COMP_VECTORS_MAX, SOCKET_PATH_MAX, VNI_MAX};

/// Why the device layer cannot serve a NIC, with what to do next.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Someone else listens on the socket.
    #[error(
        "the socket {path} is in use by another process; stop that process, or use another name or \
         --runtime-dir"
    )]
    SocketInUse {
        /// The socket.
        path: String,
    },
    /// The operating system forbids it.
    #[error(
        "no permission to {action}: {source}; run the daemon as a user who may, or choose another \
         --runtime-dir, owner or group"
    )]
    Permission {
        /// What was tried ("create /run/…").
        action: String,
        /// What it said.
        source: io::Error,
    },
    /// Any other fault of the host.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: String,
        /// What it said.
        source: io::Error,
    },
    /// What shall carry the NIC cannot be used.
    #[error("{0}")]
    Backing(String),
    /// The device layer is out of something.
    #[error("{0}")]
    Resources(String),
}

impl AttachError {
    /// Sorts an I/O error; `action` completes "cannot …".
    #[must_use]
    pub fn io(action: impl Into<String>, source: io::Error) -> Self {
        let action = action.into();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Permission { action, source },
            _ => Self::Io { action, source },
        }
    }

    /// Whoever serves NICs does not say what became of one.
    pub(crate) fn untold() -> Self {
        Self::Resources("nobody says what became of it; see the daemon's log".to_owned())
    }
}

/// A request that the registry or the device layer refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not `[a-z0-9][a-z0-9._-]{0,62}`.
    #[error(
        "{what} name {name:?} is not valid: {why}; use 1 to 63 characters of a-z, 0-9, '.', '_' \
         and '-', the first a letter or digit"
    )]
    BadName {
        /// "NIC" or "network".
        what: &'static str,
        /// As given.
        name: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// A name that is in use.
    #[error(
        "{what} {name:?} already exists; choose another name, or remove the old one with \
         `vhost-rdma {verb} rm {name}`"
    )]
    NameTaken {
        /// "NIC" or "network".
        what: &'static str,
        /// The command's noun.
        verb: &'static str,
        /// As given.
        name: String,
    },
    /// No such network.
    #[error(
        "there is no network {name:?}{}; `vhost-rdma network list` shows all, `vhost-rdma network \
         add {name}` makes it",
        did_you_mean(near)
    )]
    NoSuchNetwork {
        /// As given.
        name: String,
        /// Names it may have meant.
        near: Vec<String>,
    },
    /// No such NIC.
    #[error("there is no NIC {name:?}{}; `vhost-rdma nic list` shows all", did_you_mean(near))]
    NoSuchNic {
        /// As given.
        name: String,
        /// Names it may have meant.
        near: Vec<String>,
    },
    /// A network that still has NICs.
    #[error("network {name:?} is not empty: it has {count} NIC(s) ({}); remove them first with \
             `vhost-rdma nic rm NAME`", nics.join(", "))]
    NetworkNotEmpty {
        /// The network.
        name: String,
        /// How many.
        count: usize,
        /// The first few.
        nics: Vec<String>,
    },
    /// The network that always exists.
    #[error(
        "network \"default\" always exists and cannot be removed; NICs that should not use it name \
         another with --network"
    )]
    DefaultNetwork,
    /// Out of range.
    #[error(
        "VNI {vni} is not valid: it must be 1 to {VNI_MAX}; leave --vni away to get a free one"
    )]
    BadVni {
        /// As given.
        vni: u32,
    },
    /// Used by another network.
    #[error(
        "VNI {vni} belongs to network {network:?}; choose another, or leave --vni away to get a \
         free one"
    )]
    VniTaken {
        /// As given.
        vni: u32,
        /// Its owner.
        network: String,
    },
    /// All are in use.
    #[error("no virtual network identifier is free; remove a network that nobody needs")]
    NoFreeVni,
    /// Not whom a NIC can be for.
    #[error(transparent)]
    BadGuests(#[from] BadGuests),
    /// A NIC for processes on an RNIC.
    #[error(
        "a NIC for processes cannot be on {backing:?}: only the daemon's own engine serves \
         processes; leave --backing away"
    )]
    ProcessBacking {
        /// As given.
        backing: String,
    },
    /// Malformed.
    #[error(transparent)]
    BadMac(#[from] BadMac),
    /// Used by another NIC of the network.
    #[error(
        "MAC address {mac} belongs to NIC {nic:?} of the same network; choose another, or leave \
         --mac away to get a free one"
    )]
    MacTaken {
        /// As given.
        mac: MacAddr,
        /// Its owner.
        nic: String,
    },
    /// Malformed.
    #[error(
        "address {text:?} is not valid: {why}; write an IPv4 or IPv6 address without a prefix \
         length, such as 10.0.0.5 or fd00::5"
    )]
    BadAddress {
        /// As given.
        text: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// Used by another NIC of the network.
    #[error(
        "address {address} belongs to NIC {nic:?} of the same network; choose another, or take it \
         away there with `vhost-rdma nic set {nic} --address …`"
    )]
    AddressTaken {
        /// As given.
        address: IpAddr,
        /// Its owner.
        nic: String,
    },
    /// A limit that would make the device useless.
    #[error(
        "limit {field} must be at least 1; to take the NIC out of use, remove it with `vhost-rdma \
         nic rm`"
    )]
    ZeroLimit {
        /// Its name.
        field: &'static str,
    },
    /// Not a device type.
    #[error(
        "virtio id {id} is not valid: it must be 1 to 63; 42 is RDMA, 21 the lab id that a stock \
         QEMU accepts"
    )]
    BadVirtioId {
        /// As given.
        id: u32,
    },
    /// Out of range.
    #[error("{vectors} completion vectors are not possible: it must be 1 to {}", COMP_VECTORS_MAX)]
    BadVectors {
        /// As given.
        vectors: u32,
    },
    /// More than permission bits.
    #[error(
        "socket mode {mode:o} is not valid: it must be octal permission bits such as 0660, at most \
         0777"
    )]
    BadMode {
        /// As given.
        mode: u32,
    },
    /// Not known.
    #[error(transparent)]
    BadBacking(#[from] BadBacking),
    /// Not an address or prefix.
    #[error(
        "peer {text:?} is not valid: {why}; write an address such as 10.0.0.5 or a prefix such as \
         10.0.0.0/24"
    )]
    BadPeer {
        /// As given.
        text: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// Not a host and a port.
    #[error(
        "daemon {text:?} is not valid: write HOST:PORT, such as 192.0.2.8:4790 or [fd00::8]:4790"
    )]
    BadDaemon {
        /// As given.
        text: String,
    },
    /// Not there.
    #[error(
        "network {network:?} has no peer {peer}; `vhost-rdma peer list` shows all, each as it was \
         added"
    )]
    NoSuchPeer {
        /// As given.
        peer: String,
        /// The network.
        network: String,
    },
    /// Somebody else named it.
    #[error(
        "peer {peer} of network {network:?} was not added by hand, but {by}; it can be taken away \
         only there"
    )]
    PeerOfAnother {
        /// As given.
        peer: String,
        /// The network.
        network: String,
        /// Who named it, in words.
        by: &'static str,
    },
    /// Twice in one set.
    #[error("peer {peer} is in the set twice; leave one of them out")]
    PeerTwice {
        /// The prefix.
        peer: String,
    },
    /// Too many.
    #[error(
        "network {network:?} cannot have {count} peers: {most} are the most; name larger prefixes"
    )]
    TooManyPeers {
        /// The network.
        network: String,
        /// It would have.
        count: usize,
        /// It may have.
        most: usize,
    },
    /// Older than what is there.
    #[error(
        "the peers of network {network:?} are of generation {held} already, and {given} is not \
         after it; nothing has changed"
    )]
    OldPeers {
        /// The network.
        network: String,
        /// What is there.
        held: u64,
        /// What came.
        given: u64,
    },
    /// A change of a set that is not there.
    #[error(
        "the daemon does not have the set of network {network:?} that this is a change of; give \
         the whole set"
    )]
    UnknownBase {
        /// The network.
        network: String,
    },
    /// Longer than `sun_path`.
    #[error(
        "the socket path {path} has {length} bytes, a unix socket allows {}; use a shorter NIC \
         name, or a shorter --runtime-dir for the daemon",
        SOCKET_PATH_MAX
    )]
    PathTooLong {
        /// The path that the NIC would get.
        path: String,
        /// Its length.
        length: usize,
    },
    /// The device layer still has something of a network.
    #[error("network {name:?} cannot be removed: {source}")]
    Network {
        /// The network.
        name: String,
        /// Why.
        source: AttachError,
    },
    /// The device layer turned the NIC down.
    #[error("NIC {name:?}: {source}")]
    Attach {
        /// The NIC.
        name: String,
        /// Why.
        source: AttachError,
    },
}

fn did_you_mean(near: &[String]) -> String {
    let mut text = String::new();
    for (i, name) in near.iter().enumerate() {
        let lead = if i == 0 { "; did you mean " } else { " or " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{lead}{name:?}");
    }
    if !text.is_empty() {
        text.push('?');
    }
    text
}
