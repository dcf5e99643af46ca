//! What a container gets for an ID: environment, mounts, devices; and the documents that describe a
//! NIC to others.
//!
//! All of it is made here from plain data, so that the answer to `Allocate`, the CDI specification
//! and the NIC's own JSON file cannot say different things.

mod cdi;
mod document;
mod options;

use std::collections::HashMap;

use serde_json::{Value, json};
use vhost_rdma_agent_api::Kind;
use vhost_rdma_proto::v1;

use crate::pool::{Device, Pool};
use crate::v1beta1;

pub use cdi::{CDI_CLASS, cdi_file, cdi_name, cdi_spec};
pub use document::nic_document;
use options::Options;

/// Where containers find the directory of a NIC: `<this>/<ID>`.
pub const CONTAINER_DIR: &str = "/run/vhost-rdma";
/// The longest path of a unix socket: `sun_path` has 108 bytes and the last is the terminating zero
/// (unix(7)).
pub const SOCKET_PATH_MAX: usize = 107;
/// The NIC's description in its directory.
pub const NIC_FILE: &str = "nic.json";

/// One ID of a container, ready to be handed over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gift {
    /// The ID.
    pub id: String,
    /// Variables without their common prefix: `MAC`, `SOCKET`, …
    pub env: Vec<(&'static str, String)>,
    /// Variables of the whole container.
    pub common: Vec<(&'static str, String)>,
    /// Directories: host, container; read-only, and nothing in them can be run.
    pub mounts: Vec<(String, String)>,
    /// The directory of the libraries: host, container; read-only. NICs of a container share it.
    pub libraries: Option<(String, String)>,
    /// Device nodes, the same path on both sides.
    pub devices: Vec<String>,
}

/// The VMM options of a NIC cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadGift(String);

/// The name of a NIC in the daemon. The agent owns all names that begin so: what it does not know
/// there is a leftover.
#[must_use]
pub fn nic_name(id: &str) -> String {
    format!("{NIC_PREFIX}{id}")
}

/// What the agent's NICs begin with in the daemon.
pub const NIC_PREFIX: &str = "k8s.";

/// The companion's interface name when nobody asks for another: no two IDs of a node have the same.
#[must_use]
pub fn tap_name(id: &str) -> String {
    if id.len() <= 12 {
        format!("vr-{id}")
    } else {
        format!("vr{:08x}", crc32fast::hash(id.as_bytes()))
    }
}

/// The directory of a NIC in its container.
#[must_use]
pub fn container_dir(id: &str) -> String {
    format!("{CONTAINER_DIR}/{id}")
}

/// The socket of a NIC in its container.
#[must_use]
pub fn container_socket(id: &str) -> String {
    format!("{CONTAINER_DIR}/{id}/vhost.sock")
}

/// Where containers find the sockets of NICs for processes: the libraries look here of themselves
/// (docs/virtio-rdma-process.md).
const PROCESS_DIR: &str = "/run/vhost-rdma/process";
/// Where containers find the libraries of such NICs.
const PROCESS_LIBRARIES: &str = "/run/vhost-rdma/lib";
/// What makes memory of programs shared memory, where the pool says so.
const HEAP: &str = "libvhost_rdma_heap.so";
/// What shows them the files that they look for.
const FILES: &str = "libvhost_rdma_files.so";

/// The directory of a NIC for processes in its container.
#[must_use]
pub fn process_dir(id: &str) -> String {
    format!("{PROCESS_DIR}/{id}")
}

/// The socket of a NIC for processes in its container.
#[must_use]
pub fn process_socket(id: &str) -> String {
    format!("{PROCESS_DIR}/{id}/process.sock")
}

/// The directory of a NIC's socket on the host.
#[must_use]
pub fn host_dir(nic: &v1::Nic) -> String {
    nic.socket.rsplit_once('/').map_or_else(String::new, |(dir, _)| dir.to_owned())
}

/// What a container gets for a vhost-user NIC.
///
/// # Errors
/// The daemon told something that no VMM option can say, or a path is too long.
pub fn vhost_user(pool: &Pool, id: &str, nic: &v1::Nic) -> Result<Gift, BadGift> {
    let socket = container_socket(id);
    check_paths([&socket, &nic.socket])?;
    let options = Options::new(pool, id, nic, &tap_name(id))?;
    let line = |args: &[String]| {
        vhost_rdma_vmm::shell_line(args).map_err(|error| BadGift(error.to_string()))
    };
    let mut devices = Vec::new();
    if pool.config.companion.bridge.is_some() {
        // A VMM opens the companion tap through it; the tap's owner decides who may.
        devices.push("/dev/net/tun".to_owned());
    }
    Ok(Gift {
        id: id.to_owned(),
        env: vec![
            ("ID", id.to_owned()),
            ("DIR", container_dir(id)),
            ("SOCKET", socket),
            ("NETWORK", nic.network.clone()),
            ("MAC", nic.mac.clone()),
            ("ADDRESSES", nic.addresses.join(",")),
            ("MTU", pool.config.mtu.map_or_else(String::new, |mtu| mtu.to_string())),
            ("QEMU_ARGS", line(&options.qemu)?),
            ("CLOUD_HYPERVISOR_ARGS", line(&options.cloud_hypervisor)?),
        ],
        mounts: vec![(host_dir(nic), container_dir(id))],
        devices,
        ..Gift::default()
    })
}

fn check_paths(paths: [&String; 2]) -> Result<(), BadGift> {
    match paths.into_iter().find(|path| path.len() > SOCKET_PATH_MAX) {
        None => Ok(()),
        Some(path) => Err(BadGift(format!(
            "the socket path {path} has {} bytes, a unix socket allows {SOCKET_PATH_MAX}; use a \
             shorter pool name or runtime directory",
            path.len()
        ))),
    }
}

/// What a container gets for a NIC that its processes use: the socket, the libraries, and the
/// environment in which unmodified programs find both. The library lists what is in its directory,
/// so NICs of several pools come together without knowing of each other.
///
/// # Errors
/// A path is too long.
pub fn process(pool: &Pool, id: &str, nic: &v1::Nic) -> Result<Gift, BadGift> {
    let socket = process_socket(id);
    check_paths([&socket, &nic.socket])?;
    let heap = pool.config.shared_heap.unwrap_or(false).then_some(HEAP);
    let preloaded: Vec<_> =
        heap.into_iter().chain([FILES]).map(|name| format!("{PROCESS_LIBRARIES}/{name}")).collect();
    Ok(Gift {
        id: id.to_owned(),
        env: vec![
            ("ID", id.to_owned()),
            ("DIR", process_dir(id)),
            ("SOCKET", socket),
            ("NETWORK", nic.network.clone()),
            ("MAC", nic.mac.clone()),
            ("ADDRESSES", nic.addresses.join(",")),
        ],
        common: vec![
            ("LD_LIBRARY_PATH", PROCESS_LIBRARIES.to_owned()),
            ("LD_PRELOAD", preloaded.join(":")),
        ],
        mounts: vec![(host_dir(nic), process_dir(id))],
        libraries: Some((pool.config.libraries().to_owned(), PROCESS_LIBRARIES.to_owned())),
        devices: Vec::new(),
    })
}

/// What a container gets for an ID with hardware.
#[must_use]
pub fn hardware(pool: &Pool, device: &Device) -> Gift {
    let Some(function) = &device.hardware else {
        return Gift { id: device.id.clone(), ..Gift::default() };
    };
    let mut env = vec![("ID", device.id.clone())];
    env.extend(function.pci.iter().map(|pci| ("PCI", pci.clone())));
    let mut devices: Vec<String> = Vec::new();
    if pool.config.kind == Kind::VfVfio {
        devices.push("/dev/vfio/vfio".to_owned());
        devices.extend(function.iommu_group.map(|group| format!("/dev/vfio/{group}")));
    } else {
        env.extend(function.rdma.iter().map(|rdma| ("RDMA_DEVICE", rdma.clone())));
        let umad = function.umad.iter().filter(|_| pool.config.umad);
        let nodes = function.char_devices.iter().chain(umad);
        devices.extend(nodes.map(|path| path.display().to_string()));
    }
    Gift { id: device.id.clone(), env, devices, ..Gift::default() }
}

/// The device information of an ID (device-info-spec 1.1.0 §3). There is no type for an emulated
/// RDMA device; `vhost-user` in mode `client` says what matters: the host makes the socket and the
/// container connects.
#[must_use]
pub fn device_info(pool: &Pool, device: &Device) -> Option<Value> {
    match pool.config.kind {
        Kind::VhostUser => Some(json!({
            "type": "vhost-user",
            "version": "1.1.0",
            "vhost-user": { "mode": "client", "path": container_socket(&device.id) },
        })),
        // The specification has no word for it, and nobody but the container needs one.
        Kind::Process => None,
        Kind::Vf | Kind::VfVfio | Kind::Shared => {
            let function = device.hardware.as_ref()?;
            let mut pci = serde_json::Map::new();
            pci.insert("pci-address".to_owned(), json!(function.pci.as_ref()?));
            if let Some(parent) = &function.parent {
                pci.insert("pf-pci-address".to_owned(), json!(parent.pci));
            }
            if let Some(rdma) = function.rdma.as_ref().filter(|_| pool.config.kind != Kind::VfVfio)
            {
                pci.insert("rdma-device".to_owned(), json!(rdma));
            }
            Some(json!({ "type": "pci", "version": "1.1.0", "pci": pci }))
        }
    }
}

/// The file name of an ID's device information (device-info-spec 1.1.0 §4.1).
#[must_use]
pub fn device_info_name(pool: &Pool, id: &str) -> String {
    format!("{}-{id}-device.json", pool.resource.replace('/', "-"))
}

/// The answer for one container. Environment is always told to the kubelet: the number of a NIC in
/// its container is not a property of the NIC, so CDI cannot say it.
#[must_use]
pub fn answer(
    pool: &Pool,
    prefix: &str,
    gifts: &[Gift],
    cdi: bool,
) -> v1beta1::ContainerAllocateResponse {
    let mut response = v1beta1::ContainerAllocateResponse {
        envs: environment(pool, gifts),
        ..v1beta1::ContainerAllocateResponse::default()
    };
    if cdi {
        response.cdi_devices = gifts
            .iter()
            .map(|gift| v1beta1::CdiDevice { name: cdi_name(prefix, &gift.id) })
            .collect();
        return response;
    }
    for gift in gifts {
        for (host, container) in gift.mounts.iter().chain(&gift.libraries) {
            // As with devices below: NICs of one container share the libraries.
            if !response.mounts.iter().any(|mount| mount.container_path == *container) {
                response.mounts.push(v1beta1::Mount {
                    container_path: container.clone(),
                    host_path: host.clone(),
                    read_only: true,
                });
            }
        }
        for path in &gift.devices {
            // Two NICs of one container share rdma_cm or tun: a path that is named twice is an
            // error to some runtimes.
            if !response.devices.iter().any(|device| device.host_path == *path) {
                response.devices.push(v1beta1::DeviceSpec {
                    container_path: path.clone(),
                    host_path: path.clone(),
                    permissions: "rw".to_owned(),
                });
            }
        }
    }
    response
}

/// `VHOST_RDMA_<POOL>` lists the IDs, `VHOST_RDMA_<POOL>_<n>_<WHAT>` describes the n-th;
/// `PCIDEVICE_<RESOURCE>` is what programs written for the SR-IOV device plugin look at.
fn environment(pool: &Pool, gifts: &[Gift]) -> HashMap<String, String> {
    let upper = |text: &str| {
        text.chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' })
            .collect::<String>()
    };
    let name = upper(pool.name());
    let ids = gifts.iter().map(|gift| gift.id.as_str()).collect::<Vec<_>>().join(",");
    let mut env = HashMap::from([
        (format!("PCIDEVICE_{}", upper(&pool.resource)), ids.clone()),
        (format!("VHOST_RDMA_{name}"), ids),
    ]);
    for (n, gift) in gifts.iter().enumerate() {
        for (what, value) in &gift.env {
            env.insert(format!("VHOST_RDMA_{name}_{n}_{what}"), value.clone());
        }
        env.extend(gift.common.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    }
    env
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;

    use serde_json::json;
    use vhost_rdma_proto::v1;

    use super::{
        answer, cdi_name, cdi_spec, device_info, device_info_name, process, tap_name, vhost_user,
    };
    use crate::config::Config;
    use crate::host::{Function, Inventory, Parent};
    use crate::pool::{Pool, Pools};

    pub(in crate::grant) fn pool(more: &str) -> Pool {
        let text = format!("[[pools]]\nname='blue-1'\nkind='vhost-user'\ncount=2\n{more}");
        Pools::build(&Config::parse(&text, Path::new("f")).unwrap(), &Inventory::default())
            .pools
            .remove(0)
    }

    pub(in crate::grant) fn nic() -> v1::Nic {
        v1::Nic {
            name: "k8s.blue-1-0".to_owned(),
            network: "blue".to_owned(),
            mac: "02:00:00:00:00:01".to_owned(),
            socket: "/run/vhost-rdma/nics/k8s.blue-1-0/vhost.sock".to_owned(),
            comp_vectors: 4,
            num_queues: 8,
            ..v1::Nic::default()
        }
    }

    #[test]
    fn a_container_gets_the_directory_and_never_the_socket_file() {
        let pool = pool("mtu=9000\ncompanion={bridge='br0'}");
        let gift = vhost_user(&pool, "blue-1-0", &nic()).unwrap();
        let response = answer(&pool, "vhost-rdma.io", std::slice::from_ref(&gift), false);
        assert_eq!(response.mounts.len(), 1);
        assert_eq!(response.mounts[0].host_path, "/run/vhost-rdma/nics/k8s.blue-1-0");
        assert_eq!(response.mounts[0].container_path, "/run/vhost-rdma/blue-1-0");
        assert!(response.mounts[0].read_only);
        assert_eq!(response.devices[0].host_path, "/dev/net/tun");
        assert_eq!(response.envs["VHOST_RDMA_BLUE_1"], "blue-1-0");
        assert_eq!(response.envs["PCIDEVICE_VHOST_RDMA_IO_BLUE_1"], "blue-1-0");
        assert_eq!(
            response.envs["VHOST_RDMA_BLUE_1_0_SOCKET"],
            "/run/vhost-rdma/blue-1-0/vhost.sock"
        );
        assert_eq!(response.envs["VHOST_RDMA_BLUE_1_0_MAC"], "02:00:00:00:00:01");
        let line = &response.envs["VHOST_RDMA_BLUE_1_0_QEMU_ARGS"];
        assert!(line.contains("path=/run/vhost-rdma/blue-1-0/vhost.sock"), "{line}");
        assert!(line.contains("ifname=vr-blue-1-0,") && !line.contains("memory"), "{line}");
    }

    #[test]
    fn a_container_with_nics_for_its_processes_gets_libraries_once() {
        let text = "[[pools]]\nname='p'\nkind='process'\ncount=2";
        let config = Config::parse(text, Path::new("f")).unwrap();
        let pool = Pools::build(&config, &Inventory::default()).pools.remove(0);
        let gifts = ["p-0", "p-1"].map(|id| {
            let socket = format!("/run/vhost-rdma/nics/k8s.{id}/process.sock");
            process(&pool, id, &v1::Nic { socket, ..nic() }).unwrap()
        });
        let response = answer(&pool, "vhost-rdma.io", &gifts, false);
        let mounts: Vec<_> = response
            .mounts
            .iter()
            .map(|mount| (mount.host_path.as_str(), mount.container_path.as_str(), mount.read_only))
            .collect();
        assert_eq!(
            mounts,
            [
                ("/run/vhost-rdma/nics/k8s.p-0", "/run/vhost-rdma/process/p-0", true),
                ("/usr/lib/vhost-rdma", "/run/vhost-rdma/lib", true),
                ("/run/vhost-rdma/nics/k8s.p-1", "/run/vhost-rdma/process/p-1", true),
            ]
        );
        assert!(response.devices.is_empty(), "no device of the host's");
        assert_eq!(response.envs["LD_LIBRARY_PATH"], "/run/vhost-rdma/lib");
        assert_eq!(response.envs["LD_PRELOAD"], "/run/vhost-rdma/lib/libvhost_rdma_files.so");
        assert_eq!(
            response.envs["VHOST_RDMA_P_1_SOCKET"],
            "/run/vhost-rdma/process/p-1/process.sock"
        );
        // Libraries are mapped for execution; a directory of sockets need not be.
        let spec = cdi_spec("vhost-rdma.io", &gifts[0]);
        let mounts = spec["devices"][0]["containerEdits"]["mounts"].as_array().unwrap();
        let noexec =
            |at: usize| mounts[at]["options"].as_array().unwrap().contains(&json!("noexec"));
        assert_eq!((mounts.len(), noexec(0), noexec(1)), (2, true, false));
        assert!(device_info(&pool, &pool.devices["p-0"]).is_none());
    }

    #[test]
    fn a_pool_says_whether_its_containers_have_the_shared_heap() {
        let preloaded = |more: &str| {
            let text = format!("[[pools]]\nname='p'\nkind='process'\ncount=1\n{more}");
            let config = Config::parse(&text, Path::new("f")).unwrap();
            let pool = Pools::build(&config, &Inventory::default()).pools.remove(0);
            let socket = "/run/vhost-rdma/nics/k8s.p-0/process.sock".to_owned();
            let gift = process(&pool, "p-0", &v1::Nic { socket, ..nic() }).unwrap();
            answer(&pool, "vhost-rdma.io", &[gift], false).envs["LD_PRELOAD"].clone()
        };
        let (heap, files) = ("libvhost_rdma_heap.so", "libvhost_rdma_files.so");
        let both = format!("/run/vhost-rdma/lib/{heap}:/run/vhost-rdma/lib/{files}");
        assert_eq!(preloaded("shared_heap=true"), both);
        let files = format!("/run/vhost-rdma/lib/{files}");
        assert_eq!(preloaded("shared_heap=false"), files);
        assert_eq!(preloaded(""), files);
    }

    #[test]
    fn cdi_says_the_same_as_classic() {
        let pool = pool("");
        let gift = vhost_user(&pool, "blue-1-0", &nic()).unwrap();
        let response = answer(&pool, "vhost-rdma.io", std::slice::from_ref(&gift), true);
        assert!(response.mounts.is_empty() && response.devices.is_empty());
        assert_eq!(response.cdi_devices[0].name, cdi_name("vhost-rdma.io", "blue-1-0"));
        let spec = cdi_spec("vhost-rdma.io", &gift);
        assert_eq!(spec["kind"], "vhost-rdma.io/nic");
        let mount = &spec["devices"][0]["containerEdits"]["mounts"][0];
        assert_eq!(mount["hostPath"], gift.mounts[0].0.as_str());
        assert_eq!(mount["containerPath"], gift.mounts[0].1.as_str());
        assert!(mount["options"].as_array().unwrap().contains(&json!("ro")));
    }

    #[test]
    fn device_information_follows_its_specification() {
        let pool = pool("");
        let device = &pool.devices["blue-1-0"];
        assert_eq!(
            device_info(&pool, device).unwrap(),
            json!({"type": "vhost-user", "version": "1.1.0",
                   "vhost-user": {"mode": "client", "path": "/run/vhost-rdma/blue-1-0/vhost.sock"}})
        );
        assert_eq!(
            device_info_name(&pool, "blue-1-0"),
            "vhost-rdma.io-blue-1-blue-1-0-device.json"
        );
        let vf = Function {
            pci: Some("0000:03:00.1".to_owned()),
            parent: Some(Parent { pci: "0000:03:00.0".to_owned(), netdev: None, vf: 0 }),
            rdma: Some("mlx5_1".to_owned()),
            vendor: "15b3".to_owned(),
            ..Function::default()
        };
        let inventory = Inventory { functions: vec![vf], netns_mode: None };
        let text = "[[pools]]\nname='v'\nkind='vf'\nselectors=[{vendor=['15b3']}]";
        let pools = Pools::build(&Config::parse(text, Path::new("f")).unwrap(), &inventory);
        let pool = &pools.pools[0];
        assert_eq!(
            device_info(pool, &pool.devices["0000:03:00.1"]).unwrap(),
            json!({"type": "pci", "version": "1.1.0",
                   "pci": {"pci-address": "0000:03:00.1", "pf-pci-address": "0000:03:00.0",
                           "rdma-device": "mlx5_1"}})
        );
    }

    #[test]
    fn taps_have_short_names_of_their_own() {
        assert_eq!(tap_name("blue-0"), "vr-blue-0");
        let long = ["a-rather-long-pool-name-1", "b-rather-long-pool-name-1"].map(tap_name);
        assert!(long.iter().all(|name| name.len() <= 15) && long[0] != long[1]);
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused() {
        let nic = v1::Nic { socket: format!("/{}/vhost.sock", "x".repeat(120)), ..nic() };
        assert!(vhost_user(&pool(""), "blue-1-0", &nic).unwrap_err().to_string().contains("107"));
    }
}
