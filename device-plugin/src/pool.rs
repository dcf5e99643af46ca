//! Pools: the IDs that a configuration and the hardware of a node make together.
//!
//! IDs are stable: they come from the pool's name and a number, or from the PCI address or name of
//! the hardware, never from an order of discovery. They have no `/`, because they become parts of
//! file names (device-info-spec 1.1.0 §4.1).

use std::collections::{BTreeMap, BTreeSet};

use vhost_rdma_agent_api::{Kind, NetnsMode};

use crate::config::{Config, ID_MAX, PoolConfig, Selector};
use crate::host::{Function, Inventory};

/// One ID that can be granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// What the kubelet knows it by.
    pub id: String,
    /// NUMA nodes, for the topology manager.
    pub numa: Vec<u32>,
    /// What it shares with its neighbours: the PF, the RDMA device; for vhost-user nothing.
    pub group: String,
    /// What is behind it; absent for vhost-user.
    pub hardware: Option<Function>,
    /// Why it cannot be used although it is there, in words.
    pub defect: Option<String>,
}

/// A pool with its IDs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// As configured.
    pub config: PoolConfig,
    /// What pods ask for.
    pub resource: String,
    /// By ID.
    pub devices: BTreeMap<String, Device>,
    /// How RDMA devices and network namespaces go together.
    pub netns_mode: NetnsMode,
}

impl Pool {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The domain of its resource.
    #[must_use]
    pub fn prefix(&self) -> &str {
        self.resource.rsplit_once('/').map_or(&self.resource, |(prefix, _)| prefix)
    }
}

/// All pools of a node, and what is wrong with them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pools {
    /// In the file's order.
    pub pools: Vec<Pool>,
    /// In words for the operator.
    pub problems: Vec<String>,
}

impl Pools {
    /// What `config` makes of this hardware.
    #[must_use]
    pub fn build(config: &Config, inventory: &Inventory) -> Self {
        let mut problems = Vec::new();
        let mut taken_ids = BTreeSet::new();
        let mut taken_functions = BTreeSet::new();
        let mut pools = Vec::new();
        let netns_mode = inventory.netns_mode.unwrap_or(NetnsMode::Shared);
        for pool in &config.pools {
            let devices = match pool.kind {
                Kind::VhostUser | Kind::Process => numbered(pool, inventory),
                kind => {
                    let mut found = Vec::new();
                    for function in &inventory.functions {
                        let key = (function.pci.clone(), function.rdma.clone());
                        if suits(kind, function)
                            && pool.selectors.iter().any(|selector| matches(selector, function))
                            && !taken_functions.contains(&key)
                        {
                            taken_functions.insert(key);
                            found.extend(hardware(pool, function, inventory));
                        }
                    }
                    if found.is_empty() {
                        problems.push(format!(
                            "pool {:?}: no hardware of this node matches its selectors",
                            pool.name
                        ));
                    }
                    found
                }
            };
            let mut by_id = BTreeMap::new();
            for device in devices {
                if device.id.len() > ID_MAX {
                    problems.push(format!(
                        "pool {:?}: the ID {:?} is longer than {ID_MAX} bytes; use a shorter pool \
                         name",
                        pool.name, device.id
                    ));
                } else if !taken_ids.insert(device.id.clone()) {
                    problems.push(format!(
                        "pool {:?}: the ID {:?} exists in another pool; rename one of them",
                        pool.name, device.id
                    ));
                } else {
                    by_id.insert(device.id.clone(), device);
                }
            }
            pools.push(Pool {
                resource: config.resource(&pool.name),
                config: pool.clone(),
                devices: by_id,
                netns_mode,
            });
        }
        Self { pools, problems }
    }

    /// A pool by name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.name() == name)
    }

    /// An ID with its pool.
    #[must_use]
    pub fn device(&self, id: &str) -> Option<(&Pool, &Device)> {
        self.pools.iter().find_map(|pool| Some((pool, pool.devices.get(id)?)))
    }
}

/// NICs of the daemon. Those that an RNIC carries are as well as it is, and as near: a node without
/// it must not attract pods.
fn numbered(pool: &PoolConfig, inventory: &Inventory) -> Vec<Device> {
    let rnic = pool.rnic().map(|name| {
        let found =
            inventory.functions.iter().find(|function| function.rdma.as_deref() == Some(name));
        found.ok_or_else(|| format!("this node has no RDMA device {name}"))
    });
    let defect = match &rnic {
        None => None,
        Some(Ok(function)) => function.fault.clone(),
        Some(Err(absent)) => Some(absent.clone()),
    };
    let near = rnic.and_then(Result::ok).and_then(|function| function.numa);
    let numa: Vec<u32> = match (&*pool.numa, near) {
        _ if pool.exclude_topology => Vec::new(),
        ([], near) => near.into_iter().collect(),
        (said, _) => said.to_vec(),
    };
    (0..pool.count.unwrap_or(0))
        .map(|n| Device {
            id: format!("{}-{n}", pool.name),
            numa: numa.clone(),
            group: String::new(),
            hardware: None,
            defect: defect.clone(),
        })
        .collect()
}

/// Is this function of a sort that this kind gives away? A PF with VFs stays with the host.
fn suits(kind: Kind, function: &Function) -> bool {
    match kind {
        Kind::VhostUser | Kind::Process => false,
        Kind::Vf => function.parent.is_some() && function.driver.as_deref() != Some("vfio-pci"),
        Kind::VfVfio => function.parent.is_some() && function.driver.as_deref() == Some("vfio-pci"),
        Kind::Shared => function.rdma.is_some() && function.parent.is_none(),
    }
}

fn hardware(pool: &PoolConfig, function: &Function, inventory: &Inventory) -> Vec<Device> {
    let device = |id: String, defect: Option<String>| Device {
        id,
        numa: if pool.exclude_topology { Vec::new() } else { function.numa.into_iter().collect() },
        group: function.group(),
        hardware: Some(function.clone()),
        defect: defect.or_else(|| function.fault.clone()),
    };
    match pool.kind {
        Kind::VhostUser | Kind::Process => Vec::new(),
        Kind::Vf => {
            let defect = function.rdma.is_none().then(|| "it has no RDMA device".to_owned());
            function.pci.iter().map(|pci| device(pci.clone(), defect.clone())).collect()
        }
        Kind::VfVfio => {
            let defect = undivided(function, inventory);
            function.pci.iter().map(|pci| device(pci.clone(), defect.clone())).collect()
        }
        Kind::Shared => {
            let name = function.rdma.clone().unwrap_or_default();
            // `rdma system`: in exclusive mode a pod sees only what was moved into it, and a share
            // cannot be moved.
            let exclusive = inventory.netns_mode == Some(NetnsMode::Exclusive);
            let defect = exclusive.then(|| {
                "the host is in RDMA exclusive mode, pods would not see it; set ib_core \
                 netns_mode=1"
                    .to_owned()
            });
            (0..pool.count.unwrap_or(0))
                .map(|n| device(format!("{}-{name}-{n}", pool.name), defect.clone()))
                .collect()
        }
    }
}

/// Why user space cannot have this function alone: the IOMMU does not tell those of one group
/// apart, and a group's node opens all of them.
fn undivided(function: &Function, inventory: &Inventory) -> Option<String> {
    let Some(group) = function.iommu_group else { return Some("it has no IOMMU group".to_owned()) };
    let mut others = inventory.functions.iter().filter(|other| {
        other.iommu_group == Some(group)
            && (&other.pci, &other.rdma) != (&function.pci, &function.rdma)
    });
    let other = others.next()?;
    let name = other.pci.as_deref().or(other.rdma.as_deref()).unwrap_or("another function");
    Some(format!("it shares the IOMMU group {group} with {name} (a slot without ACS)"))
}

/// Does the selector mean this function?
fn matches(selector: &Selector, function: &Function) -> bool {
    fn one_of<T: PartialEq<U>, U: ?Sized>(wanted: &[T], has: Option<&U>) -> bool {
        wanted.is_empty() || has.is_some_and(|has| wanted.iter().any(|wanted| wanted == has))
    }
    let parent = function.parent.as_ref();
    let pf = || {
        parent.is_some_and(|parent| {
            selector
                .pf
                .iter()
                .any(|pf| Some(&pf.netdev) == parent.netdev.as_ref() && pf.has(parent.vf))
        })
    };
    one_of(&selector.vendor, Some(function.vendor.as_str()))
        && one_of(&selector.device, Some(function.device.as_str()))
        && one_of(&selector.driver, function.driver.as_deref())
        && one_of(&selector.pci, function.pci.as_deref())
        && one_of(&selector.pf_pci, parent.map(|parent| parent.pci.as_str()))
        && one_of(&selector.rdma, function.rdma.as_deref())
        && one_of(&selector.link, function.link.as_deref())
        && one_of(&selector.numa, function.numa.as_ref())
        && (selector.netdev.is_empty()
            || function.netdevs.iter().any(|netdev| selector.netdev.contains(netdev)))
        && (selector.pf.is_empty() || pf())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vhost_rdma_agent_api::NetnsMode;

    use super::Pools;
    use crate::config::Config;
    use crate::host::{Function, Inventory, Parent};

    fn vf(n: u32, driver: &str) -> Function {
        Function {
            pci: Some(format!("0000:03:00.{}", n + 1)),
            parent: Some(Parent {
                pci: "0000:03:00.0".to_owned(),
                netdev: Some("ens1".to_owned()),
                vf: n,
            }),
            vendor: "15b3".to_owned(),
            device: "101e".to_owned(),
            driver: Some(driver.to_owned()),
            rdma: (driver != "vfio-pci").then(|| format!("mlx5_{}", n + 1)),
            iommu_group: Some(40 + n),
            numa: Some(1),
            ..Function::default()
        }
    }

    fn inventory() -> Inventory {
        let pf = Function {
            pci: Some("0000:03:00.0".to_owned()),
            vendor: "15b3".to_owned(),
            rdma: Some("mlx5_0".to_owned()),
            ..Function::default()
        };
        let functions = vec![pf, vf(0, "mlx5_core"), vf(1, "mlx5_core"), vf(2, "vfio-pci")];
        Inventory { functions, netns_mode: Some(NetnsMode::Shared) }
    }

    fn build(text: &str) -> Pools {
        Pools::build(&Config::parse(text, Path::new("f")).unwrap(), &inventory())
    }

    fn ids(pools: &Pools, name: &str) -> Vec<String> {
        pools.get(name).unwrap().devices.keys().cloned().collect()
    }

    #[test]
    fn ids_are_stable_and_have_no_slash() {
        let pools = build(
            "[[pools]]\nname='a'\nkind='vhost-user'\ncount=3\n\
             [[pools]]\nname='s'\nkind='shared'\ncount=2\nselectors=[{rdma=['mlx5_0']}]\n\
             [[pools]]\nname='v'\nkind='vf'\nselectors=[{vendor=['15b3']}]\n\
             [[pools]]\nname='x'\nkind='vf-vfio'\nselectors=[{pf=['ens1']}]",
        );
        assert_eq!(ids(&pools, "a"), ["a-0", "a-1", "a-2"]);
        assert_eq!(ids(&pools, "s"), ["s-mlx5_0-0", "s-mlx5_0-1"]);
        assert_eq!(ids(&pools, "v"), ["0000:03:00.1", "0000:03:00.2"]);
        assert_eq!(ids(&pools, "x"), ["0000:03:00.3"]);
        assert_eq!(pools.problems, Vec::<String>::new());
        assert!(
            pools.pools.iter().flat_map(|pool| pool.devices.keys()).all(|id| !id.contains('/'))
        );
    }

    #[test]
    fn an_rnic_pool_is_as_well_and_as_near_as_its_rnic() {
        let text =
            "[[pools]]\nname='a'\nkind='vhost-user'\ncount=2\nbacking='rnic:mlx5_0@192.0.2.7'";
        let config = |text: &str| Config::parse(text, Path::new("f")).unwrap();
        let looked = |text: &str, inventory: &Inventory| {
            let pools = Pools::build(&config(text), inventory);
            let device = pools.get("a").unwrap().devices["a-1"].clone();
            (device.defect, device.numa)
        };
        let mut inventory = inventory();
        inventory.functions[0].numa = Some(1);
        assert_eq!(looked(text, &inventory), (None, vec![1]));
        let said = format!("{text}\nnuma=[0]");
        assert_eq!(looked(&said, &inventory).1, [0]);
        let silent = format!("{text}\nexclude_topology=true");
        assert!(looked(&silent, &inventory).1.is_empty());
        inventory.functions[0].fault = Some("the port of mlx5_0 is down".to_owned());
        assert!(looked(text, &inventory).0.unwrap().contains("down"));
        inventory.functions.clear();
        assert!(looked(text, &inventory).0.unwrap().contains("no RDMA device mlx5_0"));
        assert_eq!(looked(&text.replace("rnic:mlx5_0@192.0.2.7", "soft"), &inventory).0, None);
    }

    #[test]
    fn the_first_pool_that_selects_a_function_has_it() {
        let pools = build(
            "[[pools]]\nname='a'\nkind='vf'\nselectors=[{pf=['ens1#0']}]\n\
             [[pools]]\nname='b'\nkind='vf'\nselectors=[{vendor=['15b3']}]",
        );
        assert_eq!(ids(&pools, "a"), ["0000:03:00.1"]);
        assert_eq!(ids(&pools, "b"), ["0000:03:00.2"]);
    }

    #[test]
    fn fields_are_a_conjunction_and_values_a_choice() {
        let pools =
            build("[[pools]]\nname='a'\nkind='vf'\nselectors=[{vendor=['8086','15b3'],numa=[0]}]");
        assert!(ids(&pools, "a").is_empty());
        assert!(pools.problems[0].contains("no hardware"), "{:?}", pools.problems);
        let pools =
            build("[[pools]]\nname='a'\nkind='vf'\nselectors=[{vendor=['8086','15b3'],numa=[1]}]");
        assert_eq!(ids(&pools, "a").len(), 2);
    }

    #[test]
    fn an_id_that_two_pools_make_belongs_to_the_first_and_is_told() {
        let pools = build(
            "[[pools]]\nname='a-mlx5_0'\nkind='vhost-user'\ncount=1\n\
             [[pools]]\nname='a'\nkind='shared'\ncount=2\nselectors=[{rdma=['mlx5_0']}]",
        );
        assert_eq!(ids(&pools, "a"), ["a-mlx5_0-1"]);
        assert_eq!(pools.problems.len(), 1);
    }

    /// The IOMMU does not tell functions of one group apart, and its node is all of theirs.
    #[test]
    fn functions_of_one_iommu_group_go_to_nobody() {
        let text = "[[pools]]\nname='x'\nkind='vf-vfio'\nselectors=[{pf=['ens1']}]";
        let config = Config::parse(text, Path::new("f")).unwrap();
        let defects = |inventory: &Inventory| {
            let pools = Pools::build(&config, inventory);
            let devices = pools.pools[0].devices.values();
            devices.map(|device| device.defect.clone()).collect::<Vec<_>>()
        };
        let mut inventory = inventory();
        inventory.functions.push(vf(3, "vfio-pci"));
        assert_eq!(defects(&inventory), [None, None]);
        inventory.functions[4].iommu_group = inventory.functions[3].iommu_group;
        for defect in defects(&inventory) {
            assert!(
                defect.as_ref().is_some_and(|why| why.contains("IOMMU group 42")),
                "{defect:?}"
            );
        }
        // Whoever has the other: it is the host's, or a pod's by another pool.
        for other in [0, 1] {
            inventory.functions[4].iommu_group = Some(43);
            inventory.functions[other].iommu_group = Some(42);
            let found = defects(&inventory);
            assert!(found[0].is_some() && found[1].is_none(), "{other}: {found:?}");
            inventory.functions[other].iommu_group = None;
        }
    }

    /// Whoever has it speaks for the port, to the fabric's manager too.
    #[test]
    fn management_datagrams_are_given_only_where_the_pool_says_so() {
        let shared = Function {
            rdma: Some("mlx5_0".to_owned()),
            char_devices: vec!["/dev/infiniband/uverbs0".into()],
            umad: vec!["/dev/infiniband/umad0".into()],
            ..Function::default()
        };
        let inventory = Inventory { functions: vec![shared], netns_mode: None };
        let nodes = |more: &str| {
            let text = format!(
                "[[pools]]\nname='s'\nkind='shared'\ncount=1\n\
                 selectors=[{{rdma=['mlx5_0']}}]\n{more}"
            );
            let pools = Pools::build(&Config::parse(&text, Path::new("f")).unwrap(), &inventory);
            crate::grant::hardware(&pools.pools[0], &pools.pools[0].devices["s-mlx5_0-0"]).devices
        };
        assert_eq!(nodes(""), ["/dev/infiniband/uverbs0"]);
        assert_eq!(nodes("umad=true"), ["/dev/infiniband/uverbs0", "/dev/infiniband/umad0"]);
        let raw = "[[pools]]\nname='x'\nkind='vf-vfio'\numad=true\nselectors=[{vendor=['15b3']}]";
        let refused = Config::parse(raw, Path::new("f")).unwrap_err().to_string();
        assert!(refused.contains("umad is only for"), "{refused}");
    }
}
