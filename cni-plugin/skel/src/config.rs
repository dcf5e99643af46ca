//! The network configuration on stdin.
//!
//! What the specification names is typed here; everything else is kept as it came, for the plugin's
//! own fields live beside the known ones, and a delegate gets the whole document.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::environment::check_container_id;
use crate::error::undecodable;
use crate::result::{AddResult, Cidr, Dns};
use crate::{Code, Error, Version};

/// A network configuration as a plugin gets it: one entry of the list, with `cniVersion` and `name`
/// filled in by the runtime.
#[derive(Debug, Clone, Default)]
pub struct NetworkConfig {
    /// `name`: the network.
    pub name: String,
    /// `type`: the plugin's own file name.
    pub kind: String,
    /// `args`: of the administrator, by convention under `cni`.
    pub args: Map<String, Value>,
    /// `runtimeConfig`: what the runtime says about this container, for the capabilities that the
    /// configuration declares.
    pub runtime: RuntimeConfig,
    /// `ipam`: whom to ask for addresses.
    pub ipam: Option<Map<String, Value>>,
    /// `dns`.
    pub dns: Option<Dns>,
    /// `prevResult`, as it came. [`NetworkConfig::prev_result`] reads it.
    pub raw_prev_result: Option<Value>,
    /// `cni.dev/valid-attachments`: what GC must leave alone. `None` if the key is absent; libcni
    /// writes `null` for an empty list.
    pub valid_attachments: Option<Vec<ValidAttachment>>,
    document: Map<String, Value>,
}

/// An attachment that GC must leave alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValidAttachment {
    /// The container.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The interface that was asked for in ADD.
    pub ifname: String,
}

/// `runtimeConfig`: the capabilities by convention of CNI and of the Network Plumbing Working
/// Group.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct RuntimeConfig {
    /// `mac`.
    pub mac: Option<String>,
    /// `ips`.
    pub ips: Vec<Cidr>,
    /// `deviceID`: which device of the pool the pod was given.
    #[serde(rename = "deviceID")]
    pub device_id: Option<String>,
    /// `CNIDeviceInfoFile`: where the plugin shall write what it knows of the device.
    #[serde(rename = "CNIDeviceInfoFile")]
    pub device_info_file: Option<PathBuf>,
    /// All others.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl NetworkConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Code 6 if it is not JSON, no object, or a field of the specification has a wrong type.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let document: Map<String, Value> = serde_json::from_slice(bytes)
            .map_err(|error| undecodable("the network configuration on stdin", &error))?;
        let runtime: Option<RuntimeConfig> = field(&document, "runtimeConfig")?;
        let args: Option<Map<String, Value>> = field(&document, "args")?;
        Ok(Self {
            name: field::<Option<_>>(&document, "name")?.unwrap_or_default(),
            kind: field::<Option<_>>(&document, "type")?.unwrap_or_default(),
            args: args.unwrap_or_default(),
            runtime: runtime.unwrap_or_default(),
            ipam: field(&document, "ipam")?,
            dns: field(&document, "dns")?,
            raw_prev_result: document.get("prevResult").filter(|value| !value.is_null()).cloned(),
            valid_attachments: valid_attachments(&document)?,
            document,
        })
    }

    /// Checks what every command but VERSION needs.
    ///
    /// # Errors
    /// Code 7.
    pub fn validate(&self) -> Result<(), Error> {
        if self.name.is_empty() {
            return Err(Error::new(Code::INVALID_CONFIG, "the configuration has no name"));
        }
        check_container_id(&self.name).map_err(|why| {
            Error::new(Code::INVALID_CONFIG, format!("the network's name {:?}: {why}", self.name))
        })
    }

    /// `prevResult`, read as the version that it says it is, or else as `version`.
    ///
    /// # Errors
    /// Code 6 if it does not decode, 1 if its version is unknown.
    pub fn prev_result(&self, version: Version) -> Result<Option<AddResult>, Error> {
        self.raw_prev_result
            .as_ref()
            .map(|value| AddResult::from_json(value, version))
            .transpose()
            .map_err(|error| error.during("prevResult"))
    }

    /// The whole document.
    #[must_use]
    pub const fn document(&self) -> &Map<String, Value> {
        &self.document
    }

    /// The plugin's own fields.
    ///
    /// # Errors
    /// Code 7 if they do not fit the type.
    pub fn own<T: DeserializeOwned>(&self) -> Result<T, Error> {
        T::deserialize(Value::Object(self.document.clone())).map_err(|error| {
            Error::new(Code::INVALID_CONFIG, format!("the network configuration: {error}"))
        })
    }

    /// `ipam.type`, the plugin that gives addresses.
    ///
    /// # Errors
    /// Code 7 if there is an `ipam` with content but without a type.
    pub fn ipam_kind(&self) -> Result<Option<&str>, Error> {
        let Some(ipam) = self.ipam.as_ref().filter(|ipam| !ipam.is_empty()) else {
            return Ok(None);
        };
        match ipam.get("type").and_then(Value::as_str) {
            Some("") => Ok(None),
            Some(kind) => Ok(Some(kind)),
            None => Err(Error::new(Code::INVALID_CONFIG, "ipam.type is missing or no string")),
        }
    }
}

/// The specification of 1.1.0 first called the list `cni.dev/attachments`; libcni writes both.
fn valid_attachments(document: &Map<String, Value>) -> Result<Option<Vec<ValidAttachment>>, Error> {
    let key = ["cni.dev/valid-attachments", "cni.dev/attachments"]
        .into_iter()
        .find(|key| document.contains_key(*key));
    let Some(key) = key else { return Ok(None) };
    Ok(Some(field::<Option<Vec<_>>>(document, key)?.unwrap_or_default()))
}

fn field<T: DeserializeOwned + Default>(
    document: &Map<String, Value>,
    key: &str,
) -> Result<T, Error> {
    match document.get(key) {
        None => Ok(T::default()),
        Some(value) => T::deserialize(value).map_err(|error| undecodable(key, &error)),
    }
}
