//! `CNI_ARGS`: what a runtime says about one container beyond the configuration.

use std::collections::BTreeMap;

use crate::{Code, Error};

/// The pairs of `CNI_ARGS`, as `K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=shop;IgnoreUnknown=1`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args(BTreeMap<String, String>);

/// The key by which the caller allows keys that the plugin does not know.
const IGNORE_UNKNOWN: &str = "IgnoreUnknown";

impl Args {
    /// Reads the pairs. An empty one (a trailing `;`) is skipped; only the first `=` divides, so
    /// that a value may hold others. Of a key that comes twice the last value holds, as in the
    /// reference reader (containernetworking/cni, pkg/types/args.go, `LoadArgs`): Multus puts the
    /// runtime's pairs behind its own, so that `IgnoreUnknown=true` and `IgnoreUnknown=1` come
    /// together.
    ///
    /// # Errors
    /// Code 4 if a part is no pair.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut pairs = BTreeMap::new();
        for part in text.split(';').filter(|part| !part.is_empty()) {
            let (key, value) = part
                .split_once('=')
                .filter(|(key, _)| !key.is_empty())
                .ok_or_else(|| bad(&format!("{part:?} is not of the form KEY=VALUE")))?;
            pairs.insert(key.to_owned(), value.to_owned());
        }
        Ok(Self(pairs))
    }

    /// What can be read; DEL uses it, since a container must not stay because of a part that its
    /// removal does not need.
    #[must_use]
    pub fn parse_lossy(text: &str) -> Self {
        let pairs = text.split(';').filter_map(|part| part.split_once('='));
        Self(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
    }

    /// A value that is there and not empty.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The pod's namespace.
    #[must_use]
    pub fn pod_namespace(&self) -> Option<&str> {
        self.get("K8S_POD_NAMESPACE")
    }

    /// The pod's name.
    #[must_use]
    pub fn pod_name(&self) -> Option<&str> {
        self.get("K8S_POD_NAME")
    }

    /// The pod's UID. Runtimes send it since 2021 or so; it is the only one that tells a pod from
    /// its successor of the same name.
    #[must_use]
    pub fn pod_uid(&self) -> Option<&str> {
        self.get("K8S_POD_UID")
    }

    /// The identifier of the pod's sandbox.
    #[must_use]
    pub fn pod_sandbox(&self) -> Option<&str> {
        self.get("K8S_POD_INFRA_CONTAINER_ID")
    }

    /// Refuses keys that are none of `known` or Kubernetes' own, unless the caller set
    /// `IgnoreUnknown`.
    ///
    /// # Errors
    /// Code 4.
    pub fn only(&self, known: &[&str]) -> Result<(), Error> {
        if self.ignores_unknown()? {
            return Ok(());
        }
        let kubernetes =
            ["K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_UID", "K8S_POD_INFRA_CONTAINER_ID"];
        let is_known =
            |key: &str| key == IGNORE_UNKNOWN || kubernetes.contains(&key) || known.contains(&key);
        let unknown: Vec<&str> =
            self.0.keys().map(String::as_str).filter(|key| !is_known(key)).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(bad(&format!("unknown {}; IgnoreUnknown=1 allows them", unknown.join(", "))))
    }

    fn ignores_unknown(&self) -> Result<bool, Error> {
        match self.0.get(IGNORE_UNKNOWN).map(|value| value.to_ascii_lowercase()).as_deref() {
            Some("1" | "true") => Ok(true),
            None | Some("" | "0" | "false") => Ok(false),
            Some(other) => {
                Err(bad(&format!("{IGNORE_UNKNOWN}={other:?} is none of 1, true, 0, false")))
            }
        }
    }
}

fn bad(why: &str) -> Error {
    Error::new(Code::INVALID_ENVIRONMENT, format!("CNI_ARGS: {why}"))
}
