//! Whose namespaces may have a NIC of a network.
//!
//! Admission may be off, older than the tenant or somebody else's; the node is where a NIC is
//! given, so the node looks itself. A network that no tenant may use is nobody's.

use std::collections::BTreeMap;

use vhost_rdma_cluster_api::{NodeTenant, RdmaNodeSpec};

/// May pods of a namespace with these labels have a NIC more of the network? The tenant by which
/// they may.
///
/// # Errors
/// Why they may not, for the pod's Event.
pub fn judge<'a>(
    spec: &'a RdmaNodeSpec,
    network: &str,
    namespace: &str,
    labels: &BTreeMap<String, String>,
) -> Result<&'a str, String> {
    let known = spec.networks.iter().find(|known| known.name == network);
    let Some(known) = known else {
        return Err(format!("this node does not host the network {network:?} any more"));
    };
    let is_theirs = |tenant: &&NodeTenant| {
        tenant.namespace_selector.matches(labels)
            && !tenant.except.iter().any(|other| other == namespace)
    };
    match known.tenants.iter().find(is_theirs) {
        None => Err(format!(
            "no tenant of the namespace {namespace:?} may use the network {network:?} (RdmaTenant)"
        )),
        Some(tenant) if tenant.full => Err(format!(
            "the tenant {:?} holds all that its quota allows; the pod gets its NIC when another \
             goes",
            tenant.name
        )),
        Some(tenant) => Ok(&tenant.name),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use vhost_rdma_cluster_api::RdmaNodeSpec;

    use super::judge;

    fn spec(tenants: &serde_json::Value) -> RdmaNodeSpec {
        let networks = json!([{"name": "blue", "uid": "u", "vni": 7, "tenants": tenants}]);
        serde_json::from_value(json!({"networks": networks})).unwrap()
    }

    fn labels(team: &str) -> BTreeMap<String, String> {
        [("team".to_owned(), team.to_owned())].into()
    }

    #[test]
    fn a_namespace_gets_what_its_tenant_may_and_nobody_else_does() {
        let physics =
            json!({"name": "physics", "namespaceSelector": {"matchLabels": {"team": "p"}}});
        let spec = spec(&json!([physics]));
        assert_eq!(judge(&spec, "blue", "lab", &labels("p")), Ok("physics"));
        assert!(judge(&spec, "blue", "lab", &labels("q")).unwrap_err().contains("blue"));
        assert!(judge(&spec, "red", "lab", &labels("p")).unwrap_err().contains("red"));
    }

    #[test]
    fn a_network_without_tenants_is_nobodys() {
        assert!(judge(&spec(&json!([])), "blue", "lab", &labels("p")).is_err());
    }

    #[test]
    fn a_tenant_that_is_full_gets_no_more() {
        let full = json!({"name": "t", "namespaceSelector": {}, "full": true});
        assert!(
            judge(&spec(&json!([full])), "blue", "lab", &labels("p"))
                .unwrap_err()
                .contains("quota")
        );
    }

    #[test]
    fn a_namespace_that_another_tenant_had_first_is_not_this_ones() {
        let late = json!({"name": "late", "namespaceSelector": {}, "except": ["lab"]});
        let spec = spec(&json!([late]));
        assert!(judge(&spec, "blue", "lab", &labels("p")).is_err());
        assert_eq!(judge(&spec, "blue", "office", &labels("p")), Ok("late"));
    }
}
