//! Where the daemon's settings come from: built-in defaults, then the configuration file, then the
//! command line.
//!
//! Nothing needs to be configured. The runtime directory is the only thing that daemon and command
//! line must agree on, so its default is found here for both.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};

use crate::node::{LimitsPatch, MacAddr};

/// The admin socket's name in the runtime directory.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// Connections with other daemons where nothing says how many.
pub const DEFAULT_DAEMONS: u32 = 1024;
/// The most of them that can be asked for.
pub const DAEMONS_MAX: u32 = 1 << 16;
/// The directory of root's daemon.
pub const SYSTEM_DIR: &str = "/run/vhost-rdma";
/// How long a worker polls before it sleeps, in microseconds.
pub const DEFAULT_POLL_US: u32 = 10;
/// The most workers that make sense: each is a thread that may poll a whole core.
pub const WORKERS_MAX: u32 = 256;

/// The first port that anybody may listen at (`PROT_SOCK`, Linux net/sock.h).
const PORT_MIN: u16 = 1024;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("the configuration file {path} is not valid: {source}")]
    Parse {
        /// The file.
        path: String,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// There is no default.
    #[error("no runtime directory: XDG_RUNTIME_DIR is not set; set it, or use --runtime-dir DIR")]
    NoRuntimeDir,
    /// Out of range.
    #[error(
        "{daemons} connections with other daemons are not possible: it must be 1 to {DAEMONS_MAX}"
    )]
    Daemons {
        /// As given.
        daemons: u32,
    },
    /// It takes a privilege.
    #[error(
        "rdma_cm cannot be served at port {port}: the process that listens there has no privilege; \
         choose ports from {PORT_MIN} on for --cm-port and cm_ports, or --one-process"
    )]
    Port {
        /// As given.
        port: u16,
    },
    /// Out of range.
    #[error("{workers} workers are not possible: it must be 1 to {WORKERS_MAX}")]
    Workers {
        /// As given.
        workers: u32,
    },
}

/// The configuration file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct File {
    /// Where sockets and state are.
    pub runtime_dir: Option<PathBuf>,
    /// Worker threads (engine shards).
    pub workers: Option<u32>,
    /// Worker threads of each network's own process.
    pub network_workers: Option<u32>,
    /// Bytes of memory of each network's own process.
    pub network_memory_max: Option<u64>,
    /// Threads of each network's own process.
    pub network_pids_max: Option<u64>,
    /// How long a worker polls before it sleeps, in microseconds; 0 never polls.
    pub poll_us: Option<u32>,
    /// Where metrics are served: `IP:PORT` or `unix:PATH`.
    pub metrics: Option<String>,
    /// The channel that carries rdma_cm between daemons.
    pub cm: Option<Cm>,
    /// Ports at which third-party hosts reach guests on RNICs by rdma_cm.
    pub cm_ports: Vec<u16>,
    /// Keep no state over a restart.
    pub ephemeral: bool,
    /// What is logged, such as `debug`; the environment's variable wins over it.
    pub log: Option<String>,
    /// Who may open the admin socket.
    pub admin: Access,
    /// Networks that exist at every start.
    pub networks: Vec<Network>,
    /// NICs that exist at every start.
    pub nics: Vec<NicEntry>,
}

/// The channel between daemons.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cm {
    /// Where other daemons connect.
    pub listen: SocketAddr,
    /// This daemon's certificate, in PEM.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority of all daemons; several while one takes the place of another.
    pub ca: PathBuf,
    /// Connections with other daemons, in each direction, at most.
    pub daemons: Option<u32>,
    /// Start although there is no certificate yet; it is read with the configuration.
    #[serde(default)]
    pub wait: bool,
}

/// Owner, group (names or numbers), octal mode and access control list of a socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Access {
    /// Absent: the daemon's own.
    pub owner: Option<String>,
    /// Absent: the daemon's own.
    pub group: Option<String>,
    /// Octal digits in a string, such as "0660".
    #[serde(deserialize_with = "octal")]
    pub mode: Option<u32>,
    /// Whom else it lets in: `u:USER:rw`, `g:GROUP:rw`.
    pub acl: Vec<String>,
}

/// A network in the configuration file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Unique on the host.
    pub name: String,
    /// Absent: a free one, kept over restarts.
    pub vni: Option<u32>,
    /// Whom its NICs on RNICs may reach beyond this host.
    #[serde(default)]
    pub peers: Vec<Peer>,
}

/// A peer of a network in the configuration file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// As guests name it: an address, or a prefix such as 10.0.0.0/24.
    pub address: String,
    /// The address of the host that has it; absent: the same.
    pub through: Option<String>,
    /// The daemon that serves it, as `HOST:PORT`.
    pub daemon: Option<String>,
}

/// A NIC in the configuration file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicEntry {
    /// Unique on the host.
    pub name: String,
    /// Absent: `default`.
    pub network: Option<String>,
    /// Absent: a random one, kept over restarts.
    pub mac: Option<MacAddr>,
    /// Empty: any address that no other NIC of the network holds.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// Absent: as the VMM needs it.
    pub virtio_id: Option<u32>,
    /// Absent: 4.
    pub comp_vectors: Option<u32>,
    /// Absent: `soft`.
    #[serde(default)]
    pub backing: crate::node::Backing,
    /// Absent: `vm`.
    #[serde(default, rename = "for")]
    pub guests: crate::node::Guests,
    /// Over the defaults.
    #[serde(default)]
    pub limits: LimitsPatch,
    /// Who may open the NIC's socket.
    #[serde(default)]
    pub access: Access,
}

fn octal<'de, D: Deserializer<'de>>(input: D) -> Result<Option<u32>, D::Error> {
    let text = String::deserialize(input)?;
    parse_mode(&text).map(Some).map_err(serde::de::Error::custom)
}

/// Octal permission bits.
///
/// # Errors
/// A message that shows how to write them.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text.strip_prefix("0o").unwrap_or(text), 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| {
            format!("mode {text:?} is not valid: write octal permission bits such as 0660")
        })
}

impl File {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// It cannot be read, or says something that is not known.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: shown.clone(), source })?;
        toml::from_str(&text)
            .map_err(|source| ConfigError::Parse { path: shown, source: Box::new(source) })
    }
}

/// Where this user's daemon has its sockets: `/run/vhost-rdma` for root,
/// `$XDG_RUNTIME_DIR/vhost-rdma` for others.
///
/// # Errors
/// [`ConfigError::NoRuntimeDir`].
pub fn default_runtime_dir() -> Result<PathBuf, ConfigError> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from(SYSTEM_DIR));
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !dir.is_empty() => Ok(Path::new(&dir).join("vhost-rdma")),
        _ => Err(ConfigError::NoRuntimeDir),
    }
}

/// Where the command line looks for the daemon: this user's, or else the system's.
#[must_use]
pub fn default_admin_socket() -> PathBuf {
    let system = Path::new(SYSTEM_DIR).join(ADMIN_SOCKET);
    match default_runtime_dir() {
        Ok(dir) if dir.join(ADMIN_SOCKET).exists() || !system.exists() => dir.join(ADMIN_SOCKET),
        _ => system,
    }
}

/// Worker threads when nothing says how many: a quarter of the machine, since the rest belongs to
/// the guests.
#[must_use]
pub fn default_workers() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u32::try_from(cores / 4).unwrap_or(WORKERS_MAX).clamp(1, WORKERS_MAX)
}

/// Checks the number of connections with other daemons.
///
/// # Errors
/// [`ConfigError::Daemons`].
pub const fn check_daemons(daemons: u32) -> Result<u32, ConfigError> {
    if daemons == 0 || daemons > DAEMONS_MAX {
        return Err(ConfigError::Daemons { daemons });
    }
    Ok(daemons)
}

/// Checks the ports of rdma_cm, for a process without privilege.
///
/// # Errors
/// [`ConfigError::Port`].
pub fn check_ports(ports: &[u16]) -> Result<(), ConfigError> {
    match ports.iter().find(|port| **port < PORT_MIN) {
        Some(&port) => Err(ConfigError::Port { port }),
        None => Ok(()),
    }
}

/// Checks the number of workers.
///
/// # Errors
/// [`ConfigError::Workers`].
pub const fn check_workers(workers: u32) -> Result<u32, ConfigError> {
    if workers == 0 || workers > WORKERS_MAX {
        return Err(ConfigError::Workers { workers });
    }
    Ok(workers)
}

#[cfg(test)]
mod tests {
    use super::{File, parse_mode};

    #[test]
    fn a_full_file_is_understood() {
        let file: File = toml::from_str(
            r#"
            runtime_dir = "/run/x"
            workers = 2
            poll_us = 0
            metrics = "127.0.0.1:9745"
            cm_ports = [7471]
            cm.listen = "0.0.0.0:4790"
            cm.cert = "c.pem"
            cm.key = "k.pem"
            cm.ca = "ca.pem"
            cm.daemons = 9
            cm.wait = true
            ephemeral = true
            log = "vhost_rdma::admin=debug,info"
            admin = { group = "kvm", mode = "0660" }
            [[networks]]
            name = "blue"
            vni = 7
            peers = [
                { address = "10.1.0.0/16" },
                { address = "10.2.0.5", through = "192.0.2.1", daemon = "192.0.2.1:4790" },
            ]
            [[nics]]
            name = "n1"
            network = "blue"
            mac = "02:00:00:00:00:01"
            addresses = ["10.0.0.1", "fd00::1"]
            virtio_id = 21
            comp_vectors = 2
            backing = "soft"
            limits = { max_qps = 5 }
            access = { owner = "qemu", mode = "600" }
            "#,
        )
        .unwrap();
        assert_eq!(file.admin.mode, Some(0o660));
        assert_eq!(file.nics[0].limits.max_qps, Some(5));
        assert_eq!(file.nics[0].addresses.len(), 2);
        assert_eq!(file.networks[0].peers.len(), 2);
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for text in [
            "worker = 2",
            "[[nics]]\nname='a'\nlimits={max_qp=1}",
            "[[nics]]\nmac='x'",
            "admin={mode='99'}",
            "cm={listen='0.0.0.0:1'}",
            "[[networks]]\nvni=3",
            "[[networks]]\nname='a'\npeers=['10.0.0.1']",
            "[[networks]]\nname='a'\npeers=[{address='10.0.0.1', source='hand'}]",
        ] {
            assert!(toml::from_str::<File>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn modes_are_octal_permission_bits() {
        assert_eq!(parse_mode("0660"), Ok(0o660));
        assert_eq!(parse_mode("0o600"), Ok(0o600));
        for text in ["", "8", "1777", "rw", "-1"] {
            assert!(parse_mode(text).is_err(), "{text}");
        }
    }
}
