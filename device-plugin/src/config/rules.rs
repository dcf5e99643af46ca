//! What a file may say, beyond what its types can hold.

use std::collections::BTreeSet;

use vhost_rdma_agent_api::Kind;

use super::{
    AddressPolicy, COUNT_MAX, Companion, Config, DEFAULT_PREFIX, IF_PREFIX_MAX, Limits,
    POOL_NAME_MAX, PoolConfig, Socket,
};

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        let prefix = &self.resource_prefix;
        let label = |part: &str| {
            !part.is_empty()
                && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && !part.starts_with('-')
                && !part.ends_with('-')
        };
        if prefix.len() > 100 || !prefix.contains('.') || !prefix.split('.').all(label) {
            return Err(format!(
                "resource_prefix {prefix:?} is not a DNS domain such as {DEFAULT_PREFIX:?}"
            ));
        }
        if prefix == "kubernetes.io" || prefix.ends_with(".kubernetes.io") {
            return Err(format!("resource_prefix {prefix:?} belongs to Kubernetes itself"));
        }
        let mut names = BTreeSet::new();
        for pool in &self.pools {
            pool.check()?;
            if !names.insert(&pool.name) {
                return Err(format!("two pools are called {:?}", pool.name));
            }
        }
        Ok(())
    }
}

impl PoolConfig {
    /// Whether a node can offer it, as far as the configuration can tell.
    ///
    /// # Errors
    /// Which rule is broken, and what to do.
    pub(crate) fn check(&self) -> Result<(), String> {
        let bad = |what: String| Err(format!("pool {:?}: {what}", self.name));
        let named = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b);
        let ends = |name: &str| name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
        if self.name.len() > POOL_NAME_MAX
            || !self.name.bytes().all(named)
            || !ends(&self.name)
            || self.name.ends_with(['-', '_'])
        {
            return bad(format!(
                "the name must have 1 to {POOL_NAME_MAX} characters of a-z, 0-9, '-' and '_', the \
                 first and the last a letter or digit"
            ));
        }
        match self.kind {
            Kind::VhostUser | Kind::Process | Kind::Shared => match self.count {
                Some(count) if (1..=COUNT_MAX).contains(&count) => {}
                Some(count) => return bad(format!("count {count} must be 1 to {COUNT_MAX}")),
                None => return bad("it needs a count".to_owned()),
            },
            Kind::Vf | Kind::VfVfio if self.count.is_some() => {
                return bad("VFs are counted, not chosen: leave count away".to_owned());
            }
            Kind::Vf | Kind::VfVfio => {}
        }
        if self.kind.is_served() && !self.selectors.is_empty() {
            return bad(format!("a {} NIC has no hardware: leave selectors away", self.kind));
        }
        if self.kind == Kind::Process {
            if let Some(field) = self.vm_field() {
                return bad(format!("{field} is only for pools of kind \"vhost-user\""));
            }
        } else if let Some(path) = &self.libraries {
            return bad(format!("libraries = {path:?} is only for pools of kind \"process\""));
        } else if self.shared_heap.is_some() {
            return bad("shared_heap is only for pools of kind \"process\"".to_owned());
        }
        if !self.libraries().starts_with('/') {
            return bad("libraries must be an absolute path".to_owned());
        }
        if !self.kind.is_served() {
            if self.selectors.is_empty() {
                return bad("it needs selectors that say which hardware it gives away".to_owned());
            }
            if let Some(field) = self.served_field() {
                return bad(format!(
                    "{field} is only for pools of kind \"vhost-user\" or \"process\""
                ));
            }
        }
        if self.umad && !matches!(self.kind, Kind::Vf | Kind::Shared) {
            return bad("umad is only for pools of kind \"vf\" or \"shared\"".to_owned());
        }
        for selector in &self.selectors {
            if selector.is_empty() {
                return bad("an empty selector would match all hardware: name something".to_owned());
            }
        }
        let odd =
            |b: u8| b <= b' ' || b == b'/' || b == b',' || b == b'=' || b == b':' || b >= 0x7f;
        if self.if_prefix.is_empty()
            || self.if_prefix.len() > IF_PREFIX_MAX
            || self.if_prefix.bytes().any(odd)
        {
            return bad(format!(
                "if_prefix {:?} must have 1 to {IF_PREFIX_MAX} plain characters",
                self.if_prefix
            ));
        }
        if let Some(bridge) = &self.companion.bridge
            && (bridge.is_empty() || bridge.len() > 15 || bridge.bytes().any(odd))
        {
            return bad(format!("companion.bridge {bridge:?} is not an interface name"));
        }
        if self.addresses == AddressPolicy::Ipam && self.companion.bridge.is_none() {
            return bad("addresses = \"ipam\" needs companion.bridge: without a companion netdev \
                        nobody asks IPAM"
                .to_owned());
        }
        // Whether there is such a device is for the daemon to say; only what can never be one ends
        // here.
        if let Some(backing) = &self.backing
            && backing != "soft"
            && backing.strip_prefix("rnic:").is_none_or(str::is_empty)
        {
            return bad(format!(
                "backing {backing:?} is not known: write soft, rnic:DEVICE or rnic:DEVICE@ADDRESS"
            ));
        }
        match self.mtu {
            Some(mtu) if !(68..=65_535).contains(&mtu) => {
                bad(format!("mtu {mtu} must be 68 to 65535"))
            }
            _ => Ok(()),
        }
    }

    /// What only a NIC of the daemon's has.
    fn served_field(&self) -> Option<&'static str> {
        [
            (self.network.is_some(), "network"),
            (self.vni.is_some(), "vni"),
            (!self.numa.is_empty(), "numa"),
            (self.comp_vectors.is_some(), "comp_vectors"),
            (self.limits != Limits::default(), "limits"),
            (self.socket != Socket::default(), "socket"),
        ]
        .into_iter()
        .find_map(|(set, name)| set.then_some(name))
        .or_else(|| self.vm_field())
    }

    /// What only a VM's NIC has.
    fn vm_field(&self) -> Option<&'static str> {
        [
            (self.addresses != AddressPolicy::Any, "addresses"),
            (self.virtio_id.is_some(), "virtio_id"),
            // An RNIC's NICs are VMs' only (docs/virtio-rdma-process.md).
            (self.backing.is_some(), "backing"),
            (self.companion != Companion::default(), "companion"),
        ]
        .into_iter()
        .find_map(|(set, name)| set.then_some(name))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("f.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn rules_are_kept() {
        let cases = [
            ("name='a/b'\nkind='vhost-user'\ncount=1", "must have 1 to"),
            ("name='A'\nkind='vhost-user'\ncount=1", "must have 1 to"),
            ("name='a'\nkind='vhost-user'", "needs a count"),
            ("name='a'\nkind='vhost-user'\ncount=0", "must be 1 to"),
            ("name='a'\nkind='vf'\ncount=1\nselectors=[{vendor=['15b3']}]", "counted"),
            ("name='a'\nkind='vf'", "needs selectors"),
            ("name='a'\nkind='vf'\nselectors=[{}]", "empty selector"),
            ("name='a'\nkind='vf'\nnetwork='x'\nselectors=[{vendor=['15b3']}]", "only for pools"),
            ("name='a'\nkind='vhost-user'\ncount=1\nselectors=[{vendor=['15b3']}]", "no hardware"),
            ("name='a'\nkind='vhost-user'\ncount=1\naddresses='ipam'", "needs companion.bridge"),
            ("name='a'\nkind='vhost-user'\ncount=1\nif_prefix='0123456789abc'", "if_prefix"),
            ("name='a'\nkind='vhost-user'\ncount=1\nmtu=1", "mtu"),
            ("name='a'\nkind='process'", "needs a count"),
            ("name='a'\nkind='process'\ncount=1\nbacking='soft'", "backing is only for"),
            ("name='a'\nkind='process'\ncount=1\nvirtio_id=42", "virtio_id is only for"),
            ("name='a'\nkind='process'\ncount=1\nlibraries='x'", "absolute"),
            ("name='a'\nkind='process'\ncount=1\nselectors=[{vendor=['15b3']}]", "no hardware"),
            ("name='a'\nkind='vhost-user'\ncount=1\nlibraries='/x'", "only for pools of kind"),
            ("name='a'\nkind='vhost-user'\ncount=1\nshared_heap=true", "only for pools of kind"),
            ("name='a'\nkind='vhost-user'\ncount=1\nbacking='rnic:'", "backing"),
            ("name='a'\nkind='vhost-user'\ncount=1\nbacking='mlx5_0'", "backing"),
            (
                "name='a'\nkind='vf'\nbacking='soft'\nselectors=[{vendor=['15b3']}]",
                "only for pools",
            ),
        ];
        for (pool, expected) in cases {
            let error = parse(&format!("[[pools]]\n{pool}")).unwrap_err();
            assert!(error.contains(expected), "{pool}: {error}");
        }
        let twice = "[[pools]]\nname='a'\nkind='vhost-user'\ncount=1\n".repeat(2);
        assert!(parse(&twice).unwrap_err().contains("two pools"));
        assert!(parse("resource_prefix='nodot'").is_err());
        assert!(parse("resource_prefix='x.kubernetes.io'").is_err());
        assert!(parse("").is_ok());
    }
}
