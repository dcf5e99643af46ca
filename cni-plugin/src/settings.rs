//! The plugin's own fields in the network configuration, and what the runtime says about one container.

use std::path::{Path, PathBuf};

use cni_skel::{Code, Error, Network};
use rdma_netlink::HardwareAddress;
use serde::Deserialize;
use serde_json::Value;
use vhost_rdma_agent_api::DEFAULT_SOCKET;

/// What a call is told beyond what CNI names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Where the node agent listens.
    pub(crate) agent: PathBuf,
    /// The one NIC to attach; without it, all of the pod.
    pub(crate) device_id: Option<String>,
    /// The MAC address that the runtime wants.
    pub(crate) mac: Option<HardwareAddress>,
    /// Where to write what is known of the device.
    pub(crate) device_info: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Own {
    #[serde(rename = "agentSocket")]
    agent_socket: Option<PathBuf>,
    #[serde(rename = "deviceID")]
    device_id: Option<String>,
}

impl Settings {
    /// Reads and checks them.
    ///
    /// # Errors
    /// Code 7 for values that make no sense; 2 for a capability that the runtime uses and nothing here enforces.
    pub(crate) fn of(network: &Network) -> Result<Self, Error> {
        let own: Own = network.config.own()?;
        let runtime = &network.config.runtime;
        if let Some((key, value)) = runtime.rest.iter().next() {
            return Err(unsupported(key, value).details(
                "take the capability out of the network configuration: this plugin does not enforce it",
            ));
        }
        if let (false, None) = (runtime.ips.is_empty(), network.config.ipam_kind()?) {
            let ips: Vec<String> = runtime.ips.iter().map(ToString::to_string).collect();
            return Err(unsupported("ips", &Value::from(ips))
                .details("the network configuration has no ipam that would give these addresses"));
        }
        let mac = runtime.mac.as_deref().filter(|mac| !mac.is_empty());
        let mac = mac
            .map(str::parse::<HardwareAddress>)
            .transpose()
            .map_err(|error| invalid(format!("runtimeConfig.mac: {error}")))?;
        if let Some(file) = runtime.device_info_file.as_deref().filter(|file| !file.is_absolute()) {
            let msg = format!("runtimeConfig.CNIDeviceInfoFile={file:?} is no absolute path");
            return Err(invalid(msg));
        }
        Ok(Self {
            agent: socket(own.agent_socket)?,
            device_id: non_empty(own.device_id).or(non_empty(runtime.device_id.clone())),
            mac,
            device_info: runtime.device_info_file.clone(),
        })
    }

    /// As much as can be read, for what removes: a container must not stay because of a field that its removal does not need.
    pub(crate) fn lenient(network: &Network) -> Self {
        let document = network.config.document();
        let text = |key| document.get(key).and_then(Value::as_str).map(str::to_owned);
        let agent = text("agentSocket").map(PathBuf::from);
        Self {
            agent: socket(agent).unwrap_or_else(|_| PathBuf::from(DEFAULT_SOCKET)),
            device_id: non_empty(text("deviceID"))
                .or(non_empty(network.config.runtime.device_id.clone())),
            mac: None,
            device_info: None,
        }
    }

    /// The directory of the locks, beside the agent's socket: root's, and gone after a reboot.
    pub(crate) fn locks(&self) -> PathBuf {
        self.agent.parent().unwrap_or(Path::new("/run")).join("locks")
    }
}

fn socket(given: Option<PathBuf>) -> Result<PathBuf, Error> {
    let path = given.unwrap_or_else(|| PathBuf::from(DEFAULT_SOCKET));
    if path.is_absolute() {
        return Ok(path);
    }
    Err(invalid(format!("agentSocket={path:?} is no absolute path")))
}

fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

fn invalid(msg: String) -> Error {
    Error::new(Code::INVALID_CONFIG, msg)
}

fn unsupported(key: &str, value: &Value) -> Error {
    Error::new(Code::UNSUPPORTED_FIELD, format!("runtimeConfig.{key}={value} is not supported"))
}
