//! Pools as the controller says them, beside those of the file.
//!
//! A pool of the file counts before one of the same name that the controller offers: what an
//! administrator writes on the node itself is meant for that node. What cannot be offered here is
//! told in words and leaves the rest alone.

use vhost_rdma_agent_api::Kind;
use vhost_rdma_cluster_api::{
    Addressing, Consumer, NodeNetwork, NodePool, PolicyRnic, RdmaNicClassSpec, RdmaNodeSpec,
    RnicSelector,
};

use crate::config::{
    AclEntry, AddressPolicy, ClusterPool, Companion, Config, DEFAULT_IF_PREFIX, Limits, PoolConfig,
    Socket,
};
use crate::host::{Function, Inventory};

/// What the file and the controller say together, and what of it cannot be offered.
#[must_use]
pub fn render(file: &Config, spec: &RdmaNodeSpec, inventory: &Inventory) -> (Config, Vec<String>) {
    let mut config = file.clone();
    let mut problems = Vec::new();
    for pool in &spec.pools {
        if file.pools.iter().any(|own| own.name == pool.name) {
            problems.push(format!(
                "pool {:?}: the configuration file has one of this name, which counts",
                pool.name
            ));
            continue;
        }
        match offered(pool, spec, inventory) {
            Ok(pool) => config.pools.push(pool),
            Err(why) => problems.push(format!("pool {:?}: {why}", pool.name)),
        }
    }
    (config, problems)
}

fn offered(
    pool: &NodePool,
    spec: &RdmaNodeSpec,
    inventory: &Inventory,
) -> Result<PoolConfig, String> {
    let network =
        spec.networks.iter().find(|network| network.name == pool.network).ok_or_else(|| {
            format!("the controller says nothing of its network {:?}", pool.network)
        })?;
    let nic = &pool.nic;
    let kind = match nic.consumer {
        Consumer::Vm => Kind::VhostUser,
        Consumer::Process if network.fabric.is_some() => {
            return Err("processes have no NICs on RNICs".to_owned());
        }
        Consumer::Process => Kind::Process,
    };
    let of_vms = kind == Kind::VhostUser;
    let mut taken = PoolConfig {
        name: pool.name.clone(),
        kind,
        count: Some(pool.count),
        network: Some(network.name.clone()),
        vni: Some(network.vni),
        numa: pool.numa.clone(),
        mtu: network.mtu,
        addresses: match nic.addresses {
            // The agent gives them, not the pod network.
            _ if network.ipam || !of_vms => AddressPolicy::Any,
            vhost_rdma_cluster_api::AddressPolicy::Any => AddressPolicy::Any,
            vhost_rdma_cluster_api::AddressPolicy::Ipam => AddressPolicy::Ipam,
        },
        comp_vectors: nic.vectors,
        backing: None,
        virtio_id: None,
        limits: limits(&nic.limits),
        socket: socket(nic)?,
        companion: Companion {
            bridge: network
                .companion
                .as_ref()
                .filter(|_| of_vms)
                .map(|companion| companion.bridge.clone()),
            ..Companion::default()
        },
        libraries: None,
        shared_heap: nic.shared_heap.then_some(true),
        if_prefix: DEFAULT_IF_PREFIX.to_owned(),
        selectors: Vec::new(),
        exclude_topology: false,
        umad: false,
        cluster: Some(ClusterPool {
            network_uid: network.uid.clone(),
            ipam: network.ipam,
            class: pool.class.clone(),
            revision: pool.revision.clone(),
        }),
    };
    taken.check()?;
    taken.backing = backing(network, spec, inventory)?;
    Ok(taken)
}

/// Limits as the configuration has them.
#[must_use]
pub fn limits(limits: &vhost_rdma_cluster_api::Limits) -> Limits {
    Limits {
        max_contexts: limits.max_contexts,
        max_pds: limits.max_pds,
        max_mrs: limits.max_mrs,
        max_mr_bytes: limits.max_mr_bytes.map(|bytes| bytes.0),
        max_kept_bytes: limits.max_kept_bytes.map(|bytes| bytes.0),
        max_guest_bytes: limits.max_guest_bytes.map(|bytes| bytes.0),
        max_cqs: limits.max_cqs,
        max_srqs: limits.max_srqs,
        max_qps: limits.max_qps,
        max_ahs: limits.max_ahs,
    }
}

fn socket(nic: &RdmaNicClassSpec) -> Result<Socket, String> {
    let socket = &nic.socket;
    let mode = socket.mode.as_deref().map(|text| u32::from_str_radix(text, 8)).transpose();
    let acl: Result<Vec<AclEntry>, String> =
        socket.acl.iter().map(|entry| AclEntry::try_from(entry.clone())).collect();
    Ok(Socket {
        owner: socket.owner,
        group: socket.group,
        mode: mode.map_err(|_| format!("{:?} is no mode of a socket", socket.mode))?,
        acl: acl?,
        selinux: socket.selinux.clone(),
    })
}

/// What carries the network's NICs here: the daemon itself, or the first RNIC on the fabric.
fn backing(
    network: &NodeNetwork,
    spec: &RdmaNodeSpec,
    inventory: &Inventory,
) -> Result<Option<String>, String> {
    let Some(fabric) = &network.fabric else { return Ok(None) };
    let rules = spec.rnics.iter().filter(|rule| rule.fabric == *fabric);
    let found = rules.flat_map(|rule| inventory.functions.iter().map(move |f| (rule, f)));
    let (rule, function) = found
        .filter(|(rule, function)| selects(&rule.selector, function))
        .min_by_key(|(_, function)| function.rdma.clone())
        .ok_or_else(|| format!("no RDMA device of this node is on the fabric {fabric:?}"))?;
    let device = function.rdma.clone().unwrap_or_default();
    match network.addressing.unwrap_or_default() {
        Addressing::Flat => Ok(Some(format!("rnic:{device}"))),
        Addressing::Translated => {
            let address = host_address(rule, function).ok_or_else(|| {
                format!("{device} has no address in {} (hostAddress)", rule.host_address)
            })?;
            Ok(Some(format!("rnic:{device}@{address}")))
        }
    }
}

/// The node's address on the fabric: the one of the port that is in the range of the rule.
#[must_use]
pub fn host_address(rule: &PolicyRnic, function: &Function) -> Option<std::net::IpAddr> {
    function.addresses.iter().copied().find(|address| rule.host_address.contains(*address))
}

/// Does the selector mean this RDMA device? Each field that is there must match.
#[must_use]
pub fn selects(selector: &RnicSelector, function: &Function) -> bool {
    let one_of = |wanted: &[String], has: Option<&str>| {
        wanted.is_empty() || has.is_some_and(|has| wanted.iter().any(|wanted| wanted == has))
    };
    function.rdma.is_some()
        && function.parent.is_none()
        && one_of(&selector.devices, function.rdma.as_deref())
        && one_of(&selector.vendors, Some(function.vendor.as_str()))
        && one_of(&selector.drivers, function.driver.as_deref())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;
    use vhost_rdma_cluster_api::RdmaNodeSpec;

    use super::{Kind, render};
    use crate::config::{AddressPolicy, Config};
    use crate::host::{Function, Inventory};

    fn spec(network: &serde_json::Value, class: &serde_json::Value) -> RdmaNodeSpec {
        serde_json::from_value(json!({
            "networks": [network],
            "pools": [{
                "name": "blue", "network": "blue", "count": 4, "policy": "p", "class": "small",
                "nic": class, "revision": "r1", "numa": [1],
            }],
            "rnics": [{
                "selector": {"drivers": ["rxe"]}, "fabric": "east", "hostAddress": "192.0.2.0/24",
            }],
        }))
        .unwrap()
    }

    fn blue() -> serde_json::Value {
        json!({"name": "blue", "uid": "u", "vni": 7, "companion": {"bridge": "br0"}, "mtu": 1400})
    }

    fn rendered(spec: &RdmaNodeSpec, inventory: &Inventory) -> (Config, Vec<String>) {
        let file =
            Config::parse("[[pools]]\nname='own'\nkind='vhost-user'\ncount=1", Path::new("file"));
        render(&file.unwrap(), spec, inventory)
    }

    #[test]
    fn a_pool_is_what_network_and_class_say() {
        let class = json!({
            "limits": {
                "maxQps": 7, "maxMrBytes": "1Gi", "maxKeptBytes": "1Mi", "maxGuestBytes": "4Gi"
            },
            "vectors": 2, "addresses": "Ipam",
            "socket": {"owner": 107, "mode": "0660", "acl": ["u:108:rw"]},
        });
        let (config, problems) = rendered(&spec(&blue(), &class), &Inventory::default());
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(
            config.pools.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(),
            ["own", "blue"]
        );
        let pool = &config.pools[1];
        assert_eq!((pool.network(), pool.vni, pool.count), ("blue", Some(7), Some(4)));
        assert_eq!((pool.mtu, pool.comp_vectors, pool.backing()), (Some(1400), Some(2), "soft"));
        assert_eq!(pool.limits.max_qps, Some(7));
        assert_eq!(pool.limits.max_mr_bytes, Some(1 << 30));
        assert_eq!(pool.limits.max_kept_bytes, Some(1 << 20));
        assert_eq!(pool.limits.max_guest_bytes, Some(4 << 30));
        assert_eq!((pool.socket.owner, pool.socket.mode), (Some(107), Some(0o660)));
        assert_eq!(pool.addresses, AddressPolicy::Ipam);
        let cluster = pool.cluster.as_ref().unwrap();
        assert_eq!((cluster.revision.as_str(), cluster.network_uid.as_str()), ("r1", "u"));
        assert_eq!(config.pools[0].cluster, None);
    }

    #[test]
    fn a_class_for_processes_makes_a_pool_without_a_vms_things() {
        let class = json!({"consumer": "Process", "addresses": "Ipam", "limits": {"maxQps": 7}});
        for ipam in [false, true] {
            let mut network = blue();
            network["ipam"] = ipam.into();
            let (config, problems) = rendered(&spec(&network, &class), &Inventory::default());
            assert_eq!(problems, Vec::<String>::new());
            let pool = &config.pools[1];
            assert_eq!((pool.kind, pool.limits.max_qps), (Kind::Process, Some(7)));
            assert_eq!((pool.companion.bridge.as_deref(), pool.backing.as_deref()), (None, None));
            assert_eq!(pool.has_cnis_addresses(), !ipam, "a network's blocks come first");
            assert_eq!(pool.shared_heap, None);
        }
        let heap = json!({"consumer": "Process", "sharedHeap": true});
        let (config, _) = rendered(&spec(&blue(), &heap), &Inventory::default());
        assert_eq!(config.pools[1].shared_heap, Some(true));
        let (config, problems) =
            rendered(&spec(&blue(), &json!({"sharedHeap": true})), &Inventory::default());
        assert!(config.pools.len() == 1 && problems[0].contains("shared_heap"), "{problems:?}");
        let fabric = json!({"name": "blue", "uid": "u", "vni": 7, "fabric": "east"});
        let (config, problems) = rendered(&spec(&fabric, &class), &Inventory::default());
        assert!(config.pools.len() == 1 && problems[0].contains("RNICs"), "{problems:?}");
    }

    #[test]
    fn what_cannot_be_offered_is_told_and_harms_nobody_else() {
        let none = Inventory::default();
        let told = |spec: &RdmaNodeSpec, inventory: &Inventory, word: &str| {
            let (config, problems) = rendered(spec, inventory);
            assert_eq!(config.pools.len(), 1);
            assert!(problems.len() == 1 && problems[0].contains(word), "{problems:?}");
        };
        let mut same = spec(&blue(), &json!({}));
        same.pools[0].name = "own".to_owned();
        told(&same, &none, "file");
        let mut lost = spec(&blue(), &json!({}));
        lost.networks.clear();
        told(&lost, &none, "network");
        let alone = json!({"name": "blue", "uid": "u", "vni": 7});
        told(&spec(&alone, &json!({"addresses": "Ipam"})), &none, "companion");
        let fabric = json!({"name": "blue", "uid": "u", "vni": 7, "fabric": "east"});
        told(&spec(&fabric, &json!({})), &none, "fabric");
        told(&spec(&blue(), &json!({"socket": {"mode": "x"}})), &none, "mode");
    }

    #[test]
    fn a_network_of_a_fabric_is_on_the_rnic_that_the_policy_selects() {
        let of = |driver: &str, rdma: &str, address: &str| Function {
            rdma: Some(rdma.to_owned()),
            driver: Some(driver.to_owned()),
            addresses: vec![address.parse().unwrap()],
            ..Function::default()
        };
        let functions = vec![
            of("mlx5_core", "mlx5_0", "192.0.2.1"),
            of("rxe", "rxe1", "192.0.2.9"),
            of("rxe", "rxe0", "192.0.2.7"),
        ];
        let inventory = Inventory { functions, ..Inventory::default() };
        let mut fabric = json!({"name": "blue", "uid": "u", "vni": 7, "fabric": "east"});
        let (config, _) = rendered(&spec(&fabric, &json!({})), &inventory);
        assert_eq!(config.pools[1].backing(), "rnic:rxe0@192.0.2.7");
        fabric["addressing"] = "Flat".into();
        let (config, _) = rendered(&spec(&fabric, &json!({})), &inventory);
        assert_eq!(config.pools[1].backing(), "rnic:rxe0");
    }
}
