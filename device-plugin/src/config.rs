//! The configuration file: which pools a node offers.
//!
//! TOML, as the daemon's; in a cluster it is one key of a ConfigMap. What is not known is an error
//! that names its line, and a file with an error changes nothing: the agent goes on with the last
//! good one. The types know no TOML, so that a cluster API can write the same structure.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};
use vhost_rdma_agent_api::Kind;

mod access;
mod rules;
mod selector;

pub use access::AclEntry;
pub use selector::{PfSelector, Selector};

/// The domain of all resources, unless the file says otherwise.
pub const DEFAULT_PREFIX: &str = "vhost-rdma.io";
/// The most IDs in one pool: a list of them is sent to the kubelet at each change, and gRPC stops
/// at 4 MiB.
pub const COUNT_MAX: u32 = 8192;
/// The kubelet refuses longer IDs (device plugin API, `Device.ID`).
pub const ID_MAX: usize = 63;
/// The longest name of a pool: an ID is made of it and a number or a device name.
const POOL_NAME_MAX: usize = 40;
/// IFNAMSIZ without the terminating zero (linux/if.h), less three digits for the number of the NIC
/// in its pod.
const IF_PREFIX_MAX: usize = 12;

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
    /// It is not TOML, or says something that is not known.
    #[error("the configuration file {path} is not valid: {source}")]
    Parse {
        /// The file.
        path: String,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A rule is broken.
    #[error("the configuration file {path} is not valid: {rule}")]
    Rule {
        /// The file.
        path: String,
        /// Which, and what to do.
        rule: String,
    },
}

/// How pods get at their NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Injection {
    /// Mounts, devices and environment in the answer to `Allocate`; every kubelet knows it.
    Classic,
    /// CDI names in the answer, and specifications on the host: kubelet ≥ 1.29, containerd ≥ 1.7,
    /// CRI-O ≥ 1.23.
    Cdi,
    /// CDI if the node object says that the kubelet knows it, else classic.
    #[default]
    Auto,
}

/// The configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The domain of all resources.
    pub resource_prefix: String,
    /// How pods get at their NICs.
    pub injection: Injection,
    /// In their order: a function that two pools select belongs to the first.
    pub pools: Vec<PoolConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            resource_prefix: DEFAULT_PREFIX.to_owned(),
            injection: Injection::default(),
            pools: Vec::new(),
        }
    }
}

/// Which addresses a NIC may use as GIDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressPolicy {
    /// Any that no other NIC of the network holds.
    #[default]
    Any,
    /// None but those that IPAM gave the companion netdev (and the link-local one): needs the CNI
    /// plugin.
    Ipam,
}

/// One pool.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// Its name; pods ask for `<resource_prefix>/<name>`.
    pub name: String,
    /// What it gives.
    pub kind: Kind,
    /// `vhost-user`: how many NICs; `shared`: how many shares of each RDMA device. Not for VFs,
    /// which are counted.
    #[serde(default)]
    pub count: Option<u32>,
    /// `vhost-user`: the daemon's network, made if it does not exist.
    #[serde(default)]
    pub network: Option<String>,
    /// `vhost-user`: its virtual network identifier, if it is made.
    #[serde(default)]
    pub vni: Option<u32>,
    /// `vhost-user`: the NUMA nodes that are told to the kubelet; absent: those of no device.
    #[serde(default)]
    pub numa: Vec<u32>,
    /// The MTU of the pod's interface.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// `vhost-user`: which addresses a NIC may use.
    #[serde(default)]
    pub addresses: AddressPolicy,
    /// `vhost-user`: completion vectors.
    #[serde(default)]
    pub comp_vectors: Option<u32>,
    /// `vhost-user`: what carries the NICs' verbs, in the daemon's words: `soft`, `rnic:DEVICE` or
    /// `rnic:DEVICE@ADDRESS`; absent: `soft`.
    #[serde(default)]
    pub backing: Option<String>,
    /// `vhost-user`: the virtio device type.
    #[serde(default)]
    pub virtio_id: Option<u32>,
    /// `vhost-user`: limits over the daemon's defaults.
    #[serde(default)]
    pub limits: Limits,
    /// `vhost-user`: who may open the socket.
    #[serde(default)]
    pub socket: Socket,
    /// `vhost-user`: the netdev beside the NIC.
    #[serde(default)]
    pub companion: Companion,
    /// `process`: the directory of the libraries on the host; absent: /usr/lib/vhost-rdma.
    #[serde(default)]
    pub libraries: Option<String>,
    /// `process`: whether `malloc` of containers gives memory that is shared; absent: it does not,
    /// since `fork` copies that memory instead of sharing it until somebody writes.
    #[serde(default)]
    pub shared_heap: Option<bool>,
    /// Interfaces in pods are called this and a number.
    #[serde(default = "default_if_prefix")]
    pub if_prefix: String,
    /// Other kinds: a function that any of these matches is taken.
    #[serde(default)]
    pub selectors: Vec<Selector>,
    /// Do not tell the kubelet NUMA nodes.
    #[serde(default)]
    pub exclude_topology: bool,
    /// `vf`, `shared`: pods get the device node for management datagrams as well.
    #[serde(default)]
    pub umad: bool,
    /// What the controller says of it, if it is a pool of the controller's: no file says that.
    #[serde(skip)]
    pub cluster: Option<ClusterPool>,
}

/// What only a pool of the controller's has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterPool {
    /// The UID of its network: one that was deleted and made again is another.
    pub network_uid: String,
    /// Its NICs have addresses of the node's blocks.
    pub ipam: bool,
    /// Its class.
    pub class: Option<String>,
    /// Stands for all that is fixed when a NIC is made.
    pub revision: String,
}

/// What interfaces in pods are called, unless the pool says otherwise.
pub const DEFAULT_IF_PREFIX: &str = "rdma";

fn default_if_prefix() -> String {
    DEFAULT_IF_PREFIX.to_owned()
}

/// Limits over the daemon's defaults; the names are the daemon's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the daemon's documentation has them")]
pub struct Limits {
    pub max_contexts: Option<u32>,
    pub max_pds: Option<u32>,
    pub max_mrs: Option<u32>,
    pub max_mr_bytes: Option<u64>,
    pub max_kept_bytes: Option<u64>,
    pub max_guest_bytes: Option<u64>,
    pub max_cqs: Option<u32>,
    pub max_srqs: Option<u32>,
    pub max_qps: Option<u32>,
    pub max_ahs: Option<u32>,
}

impl Limits {
    /// Of each limit that either has the smaller one.
    #[must_use]
    pub fn least(&self, other: &Self) -> Self {
        fn of<T: Ord + Copy>(a: Option<T>, b: Option<T>) -> Option<T> {
            a.zip(b).map(|(a, b)| a.min(b)).or(a).or(b)
        }
        Self {
            max_contexts: of(self.max_contexts, other.max_contexts),
            max_pds: of(self.max_pds, other.max_pds),
            max_mrs: of(self.max_mrs, other.max_mrs),
            max_mr_bytes: of(self.max_mr_bytes, other.max_mr_bytes),
            max_kept_bytes: of(self.max_kept_bytes, other.max_kept_bytes),
            max_guest_bytes: of(self.max_guest_bytes, other.max_guest_bytes),
            max_cqs: of(self.max_cqs, other.max_cqs),
            max_srqs: of(self.max_srqs, other.max_srqs),
            max_qps: of(self.max_qps, other.max_qps),
            max_ahs: of(self.max_ahs, other.max_ahs),
        }
    }
}

/// Who may open a NIC's socket: numbers, since names of the pod's users mean nothing on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Socket {
    /// The user; absent: the daemon's.
    pub owner: Option<u32>,
    /// The group; absent: the daemon's.
    pub group: Option<u32>,
    /// Octal digits in a string; absent: 0660.
    #[serde(deserialize_with = "octal")]
    pub mode: Option<u32>,
    /// Whom else it lets in: `u:NUMBER:rw`, `g:NUMBER:rw`.
    pub acl: Vec<AclEntry>,
    /// An SELinux context for directory and socket, such as
    /// `system_u:object_r:container_file_t:s0`.
    pub selinux: Option<String>,
}

/// The netdev beside a VM's NIC.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Companion {
    /// The bridge of the host that is the network's L2. Absent: no companion is made, and rdma_cm
    /// finds nobody.
    pub bridge: Option<String>,
    /// The user that may open the tap; absent: the socket's owner.
    pub owner: Option<u32>,
    /// The group that may open the tap; absent: the socket's group.
    pub group: Option<u32>,
}

fn octal<'de, D: Deserializer<'de>>(input: D) -> Result<Option<u32>, D::Error> {
    let text = String::deserialize(input)?;
    let mode = u32::from_str_radix(text.strip_prefix("0o").unwrap_or(&text), 8).ok();
    mode.filter(|mode| *mode <= 0o777).map(Some).ok_or_else(|| {
        serde::de::Error::custom(format!(
            "mode {text:?} is not valid: write octal permission bits such as \"0660\""
        ))
    })
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.display().to_string(), source })?;
        Self::parse(&text, path)
    }

    /// Understands and checks the text of a file.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let path = path.display().to_string();
        let config: Self = toml::from_str(text).map_err(|source| ConfigError::Parse {
            path: path.clone(),
            source: Box::new(source),
        })?;
        config.check().map_err(|rule| ConfigError::Rule { path, rule })?;
        Ok(config)
    }

    /// The name that pods use for a pool.
    #[must_use]
    pub fn resource(&self, pool: &str) -> String {
        format!("{}/{pool}", self.resource_prefix)
    }
}

impl PoolConfig {
    /// Whether NICs have the addresses that the CNI plugin names: those of processes, which no
    /// guest sets, unless the controller's network has addresses of its own; and VMs' where the
    /// pool says so.
    #[must_use]
    pub fn has_cnis_addresses(&self) -> bool {
        match self.kind {
            Kind::Process => !self.cluster.as_ref().is_some_and(|of| of.ipam),
            kind => kind.is_served() && self.addresses == AddressPolicy::Ipam,
        }
    }

    /// The directory of the libraries for processes on the host.
    #[must_use]
    pub fn libraries(&self) -> &str {
        self.libraries.as_deref().unwrap_or("/usr/lib/vhost-rdma")
    }

    /// The daemon's network of a vhost-user pool.
    #[must_use]
    pub fn network(&self) -> &str {
        self.network.as_deref().unwrap_or("default")
    }

    /// The backing of a vhost-user pool's NICs.
    #[must_use]
    pub fn backing(&self) -> &str {
        self.backing.as_deref().unwrap_or("soft")
    }

    /// The RDMA device of the host that carries the NICs, if one does.
    #[must_use]
    pub fn rnic(&self) -> Option<&str> {
        let device = self.backing().strip_prefix("rnic:")?;
        // The daemon's own stand-in, for tests, is no device.
        let name = device.split_once('@').map_or(device, |(name, _)| name);
        Some(name).filter(|name| *name != "null")
    }

    /// Does what it offers depend on the node's hardware?
    #[must_use]
    pub fn needs_hardware(&self) -> bool {
        !self.kind.is_served() || self.rnic().is_some()
    }

    /// The user and group of the companion tap.
    #[must_use]
    pub fn tap_owner(&self) -> (Option<u32>, Option<u32>) {
        (self.companion.owner.or(self.socket.owner), self.companion.group.or(self.socket.group))
    }
}

/// Where the agent and the kubelet meet; all of it follows the kubelet's root directory unless it
/// is said otherwise.
#[derive(Debug, Clone)]
pub struct KubeletPaths {
    /// Sockets of device plugins and `kubelet.sock`.
    pub device_plugins: PathBuf,
    /// The pod-resources socket.
    pub pod_resources: PathBuf,
}

impl KubeletPaths {
    /// Below the kubelet's `--root-dir`.
    #[must_use]
    pub fn new(root: &Path, device_plugins: Option<PathBuf>) -> Self {
        Self {
            device_plugins: device_plugins.unwrap_or_else(|| root.join("device-plugins")),
            pod_resources: root.join("pod-resources/kubelet.sock"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Config, KubeletPaths};

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("f.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn whose_addresses_the_cni_plugin_names() {
        let pools = "[[pools]]\nname = \"a\"\nkind = \"process\"\ncount = 1\n\
                     [[pools]]\nname = \"b\"\nkind = \"vhost-user\"\ncount = 1\n\
                     [[pools]]\nname = \"c\"\nkind = \"vhost-user\"\ncount = 1\n\
                     companion = { bridge = \"br0\" }\naddresses = \"ipam\"\n";
        let config = parse(pools).unwrap();
        let named: Vec<bool> =
            config.pools.iter().map(super::PoolConfig::has_cnis_addresses).collect();
        assert_eq!(named, [true, false, true]);
    }

    #[test]
    fn a_full_file_is_understood() {
        let config = parse(
            r#"
            resource_prefix = "rdma.example.org"
            injection = "classic"
            [[pools]]
            name = "blue"
            kind = "vhost-user"
            count = 16
            network = "blue"
            vni = 7
            numa = [0, 1]
            mtu = 1500
            addresses = "ipam"
            comp_vectors = 2
            virtio_id = 42
            backing = "rnic:mlx5_0@192.0.2.7"
            limits = { max_qps = 64, max_mr_bytes = 1073741824 }
            socket = { owner = 107, group = 107, mode = "0660", acl = ["u:108:rw", "g:36:rw"] }
            companion = { bridge = "br0" }
            [[pools]]
            name = "fast"
            kind = "vf"
            selectors = [{ pf = ["ens1f0#0-3,7"], vendor = ["15b3"], link = ["ethernet"] }]
            [[pools]]
            name = "some"
            kind = "shared"
            count = 8
            selectors = [{ rdma = ["mlx5_0"] }]
            "#,
        )
        .unwrap();
        assert_eq!(config.resource("blue"), "rdma.example.org/blue");
        assert_eq!(config.pools[0].socket.mode, Some(0o660));
        assert_eq!(config.pools[0].backing(), "rnic:mlx5_0@192.0.2.7");
        assert_eq!(config.pools[0].socket.acl[1].as_str(), "g:36:rw");
        assert_eq!(config.pools[0].tap_owner(), (Some(107), Some(107)));
    }

    #[test]
    fn an_unknown_field_is_an_error_that_names_its_line() {
        let error =
            parse("[[pools]]\nname = \"a\"\nkind = \"vhost-user\"\ncuont = 3\n").unwrap_err();
        assert!(error.contains("line 4") && error.contains("cuont"), "{error}");
    }

    #[test]
    fn paths_follow_the_kubelets_root() {
        let paths = KubeletPaths::new(Path::new("/k"), None);
        assert_eq!(paths.device_plugins, Path::new("/k/device-plugins"));
        assert_eq!(paths.pod_resources, Path::new("/k/pod-resources/kubelet.sock"));
    }
}
