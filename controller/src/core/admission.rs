//! What a pod that asks for NICs would have, and whose it would be.
//!
//! This is asked of the copy, which is old: it says which tenant and how much, and never whether
//! there is room. That is decided on the tenant's object itself.

use std::collections::{BTreeMap, BTreeSet};

use vhost_rdma_cluster_api::{Quantity, Usage};

use super::World;

/// A question: a pod's namespace, and how many NICs of which pools it asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Asks {
    /// The namespace.
    pub namespace: String,
    /// NICs by pool.
    pub pools: BTreeMap<String, u32>,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// No policy has such pools: they are none of the controller's.
    Foreign,
    /// The namespace is not in the copy yet.
    Unknown,
    /// It may not have them, and why.
    Refused(String),
    /// It may, if the tenant has room for this.
    Counts {
        /// The tenant.
        tenant: String,
        /// What it would hold more.
        usage: Usage,
    },
}

/// The larger of both, in each kind.
fn larger(a: Usage, b: Usage) -> Usage {
    Usage {
        nics: a.nics.max(b.nics),
        qps: Quantity(a.qps.0.max(b.qps.0)),
        mr_bytes: Quantity(a.mr_bytes.0.max(b.mr_bytes.0)),
        bandwidth: Quantity(a.bandwidth.0.max(b.bandwidth.0)),
    }
}

fn times(usage: Usage, count: u32) -> Usage {
    let product = |q: Quantity| Quantity(q.0.saturating_mul(count.into()).min(i64::MAX as u64));
    Usage {
        nics: usage.nics.saturating_mul(count),
        qps: product(usage.qps),
        mr_bytes: product(usage.mr_bytes),
        bandwidth: product(usage.bandwidth),
    }
}

/// An object that somebody wants to delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leaving {
    /// A network.
    Network(String),
    /// A named NIC: namespace, name.
    Nic(String, String),
}

impl World {
    /// Pods that use what is to be deleted: some of them, `namespace/name`.
    #[must_use]
    pub fn users_of(&self, leaving: &Leaving) -> Vec<String> {
        match leaving {
            Leaving::Network(name) => self.users(name).into_iter().collect(),
            Leaving::Nic(namespace, name) => {
                let found = self.nics_named.get(&(namespace.clone(), name.clone()));
                let pod = found.and_then(|nic| nic.status.as_ref()?.pod.as_ref());
                pod.map(|pod| format!("{namespace}/{pod}")).into_iter().collect()
            }
        }
    }

    /// What a pod would have.
    #[must_use]
    pub fn admits(&self, asks: &Asks) -> Answer {
        let mut usage = Usage::default();
        let mut networks = Vec::new();
        for (pool, count) in &asks.pools {
            let mut one = None;
            let mut of_pool = BTreeSet::new();
            for policy in self.index.policies_with_pool(pool) {
                let pools = self.policies.get(policy).into_iter().flat_map(|p| &p.spec.pools);
                for found in pools.filter(|found| found.name == *pool) {
                    of_pool.insert(found.network.as_str());
                    let class = found.class.as_ref().and_then(|class| self.classes.get(class));
                    let held = class.map_or(Usage { nics: 1, ..Usage::default() }, |class| Usage {
                        nics: 1,
                        qps: Quantity(class.spec.limits.max_qps.unwrap_or(0).into()),
                        mr_bytes: class.spec.limits.max_mr_bytes.unwrap_or_default(),
                        bandwidth: class.spec.rates.bandwidth.unwrap_or_default(),
                    });
                    // On which node it will be nobody knows: the most that it can be counts.
                    one = Some(larger(one.unwrap_or_default(), held));
                }
            }
            if let Some(one) = one {
                usage = usage.plus(times(one, *count));
                networks.push((pool, of_pool));
            }
        }
        if networks.is_empty() {
            return Answer::Foreign;
        }
        if !self.namespaces.contains_key(&asks.namespace) {
            return Answer::Unknown;
        }
        let tenant = self.index.tenant_of(&asks.namespace);
        for (pool, of_pool) in networks {
            let may = tenant.and_then(|tenant| self.tenants.get(tenant)).is_some_and(|tenant| {
                tenant.spec.networks.iter().any(|network| of_pool.contains(network.as_str()))
            });
            if !may {
                let who = tenant.map_or_else(
                    || "no tenant".to_owned(),
                    |tenant| format!("the tenant {tenant:?}"),
                );
                let of_pool: Vec<&str> = of_pool.into_iter().collect();
                return Answer::Refused(format!(
                    "the namespace {:?} belongs to {who}, which does not have the network of the \
                     pool {pool:?} ({})",
                    asks.namespace,
                    of_pool.join(", "),
                ));
            }
        }
        match tenant {
            Some(tenant) => Answer::Counts { tenant: tenant.to_owned(), usage },
            None => Answer::Foreign,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Mono, NamespaceInfo, Object};
    use vhost_rdma_cluster_api::{
        Limits, PolicyPool, RdmaNicClass, RdmaNicClassSpec, RdmaNodePolicy, RdmaNodePolicySpec,
        RdmaTenant, RdmaTenantSpec,
    };

    fn world() -> World {
        let mut world = World::new(false);
        for (name, qps) in [("small", 8), ("large", 64)] {
            let limits = Limits { max_qps: Some(qps), ..Limits::default() };
            let spec = RdmaNicClassSpec { limits, ..RdmaNicClassSpec::default() };
            world.apply(Object::Class(RdmaNicClass::new(name, spec)), Mono::ZERO);
        }
        // The same pool on two kinds of node; one pool of another network.
        for (policy, pool, network, class) in [
            ("p", "blue", "blue", "small"),
            ("q", "blue", "blue", "large"),
            ("q", "red", "red", "small"),
        ] {
            let mut spec = RdmaNodePolicySpec::default();
            if let Some(found) = world.policies.get(policy) {
                spec = found.spec.clone();
            }
            spec.pools.push(PolicyPool {
                name: pool.to_owned(),
                network: network.to_owned(),
                class: Some(class.to_owned()),
                count: 1,
                numa: Vec::new(),
            });
            world.apply(Object::Policy(RdmaNodePolicy::new(policy, spec)), Mono::ZERO);
        }
        let spec = RdmaTenantSpec { networks: vec!["blue".to_owned()], ..Default::default() };
        world.apply(Object::Tenant(RdmaTenant::new("t", spec)), Mono::ZERO);
        let namespace = NamespaceInfo { name: "a".to_owned(), ..NamespaceInfo::default() };
        world.apply(Object::Namespace(namespace), Mono::ZERO);
        world
    }

    fn says(world: &World, namespace: &str, pools: &[(&str, u32)]) -> Answer {
        let pools = pools.iter().map(|(pool, count)| ((*pool).to_owned(), *count)).collect();
        world.admits(&Asks { namespace: namespace.to_owned(), pools })
    }

    #[test]
    fn a_pod_counts_as_the_most_that_it_can_be() {
        let world = world();
        let Answer::Counts { tenant, usage } = says(&world, "a", &[("blue", 3)]) else {
            panic!("it counts");
        };
        assert_eq!((tenant.as_str(), usage.nics, usage.qps), ("t", 3, Quantity(192)));
    }

    #[test]
    fn whoever_uses_what_is_to_be_deleted_is_named() {
        use vhost_rdma_cluster_api::{
            NicStatus, RdmaNic, RdmaNicSpec, RdmaNicStatus, RdmaNode, RdmaNodeSpec, RdmaNodeStatus,
        };
        let mut world = world();
        let network = |name: &str| Leaving::Network(name.to_owned());
        let named = Leaving::Nic("a".to_owned(), "db".to_owned());
        assert!(world.users_of(&network("blue")).is_empty() && world.users_of(&named).is_empty());
        let nic = NicStatus {
            network: "blue".to_owned(),
            namespace: "a".to_owned(),
            pod: "p".to_owned(),
            ..NicStatus::default()
        };
        let mut node = RdmaNode::new("one", RdmaNodeSpec::default());
        node.status = Some(RdmaNodeStatus { nics: vec![nic], ..RdmaNodeStatus::default() });
        world.apply(Object::RdmaNode(node), Mono::ZERO);
        let mut nic = RdmaNic::new("db", RdmaNicSpec::default());
        nic.metadata.namespace = Some("a".to_owned());
        nic.status = Some(RdmaNicStatus { pod: Some("q".to_owned()), ..Default::default() });
        world.apply(Object::Nic(nic), Mono::ZERO);
        assert_eq!(world.users_of(&network("blue")), ["a/p"]);
        assert!(world.users_of(&network("red")).is_empty());
        assert_eq!(world.users_of(&named), ["a/q"]);
    }

    #[test]
    fn who_may_not_is_told_so() {
        let mut world = world();
        assert_eq!(says(&world, "a", &[("of-a-file", 1)]), Answer::Foreign);
        assert_eq!(says(&world, "b", &[("blue", 1)]), Answer::Unknown);
        let Answer::Refused(why) = says(&world, "a", &[("blue", 1), ("red", 1)]) else {
            panic!("red is not its network");
        };
        assert!(why.contains("\"t\"") && why.contains("red"), "{why}");
        world.remove(crate::core::Kind::Tenant, "t", Mono::ZERO);
        let Answer::Refused(why) = says(&world, "a", &[("blue", 1)]) else {
            panic!("it has no tenant");
        };
        assert!(why.contains("no tenant"), "{why}");
    }
}
