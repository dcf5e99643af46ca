//! The plugin's own fields in the network configuration, and what the runtime says about one
//! container.

use cni_skel::{Attachment, Code, Error, Network};
use rdma_netlink::HardwareAddress;
use serde::Deserialize;
use serde_json::Value;

use crate::host::Host;

/// What a call is told beyond what CNI names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The host's own paths.
    pub(crate) host: Host,
    /// The one NIC to attach; without it, all of the pod.
    pub(crate) device_id: Option<String>,
    /// The MAC address that the runtime wants.
    pub(crate) mac: Option<HardwareAddress>,
}

#[derive(Debug, Deserialize)]
struct Own {
    #[serde(rename = "agentSocket")]
    agent_socket: Option<String>,
    #[serde(rename = "deviceID")]
    device_id: Option<String>,
}

impl Settings {
    /// Reads and checks them.
    ///
    /// # Errors
    /// Code 7 for values that make no sense; 2 for a capability that the runtime uses and nothing
    /// here enforces.
    pub(crate) fn of(network: &Network, host: &Host) -> Result<Self, Error> {
        let own: Own = network.config.own()?;
        let runtime = &network.config.runtime;
        if let Some((key, value)) = runtime.rest.iter().next() {
            return Err(unsupported(key, value).details(
                "take the capability out of the network configuration: this plugin does not \
                 enforce it",
            ));
        }
        let mac = runtime.mac.as_deref().filter(|mac| !mac.is_empty());
        let mac = mac
            .map(str::parse::<HardwareAddress>)
            .transpose()
            .map_err(|error| invalid(format!("runtimeConfig.mac: {error}")))?;
        // It was a field once; whoever still has it, with the usual value, means the agent that is
        // asked anyhow.
        if let Some(socket) = own.agent_socket.filter(|socket| *host.agent != **socket) {
            let msg = format!(
                "agentSocket={socket:?}: a network configuration does not choose the node agent"
            );
            return Err(invalid(msg).details(
                "take it out; where the agent listens is said by VHOST_RDMA_AGENT_SOCKET in the \
                 runtime's environment",
            ));
        }
        Ok(Self {
            host: host.clone(),
            device_id: non_empty(own.device_id).or(non_empty(runtime.device_id.clone())),
            mac,
        })
    }

    /// As much as can be read, for what removes: a container must not stay because of a field that
    /// its removal does not need.
    pub(crate) fn lenient(network: &Network, host: &Host) -> Self {
        let document = network.config.document();
        let text = |key| document.get(key).and_then(Value::as_str).map(str::to_owned);
        Self {
            host: host.clone(),
            device_id: non_empty(text("deviceID"))
                .or(non_empty(network.config.runtime.device_id.clone())),
            mac: None,
        }
    }
}

/// The name of the device information file that the runtime wants.
///
/// # Errors
/// Code 7 if it is not a file of this container in the one directory for them.
pub(crate) fn device_info(
    network: &Network,
    attachment: &Attachment,
    host: &Host,
) -> Result<Option<String>, Error> {
    let Some(file) = network.config.runtime.device_info_file.as_deref() else { return Ok(None) };
    match host.device_info_name(file, &attachment.container_id) {
        Some(name) => Ok(Some(name)),
        None => {
            let msg = format!(
                "runtimeConfig.CNIDeviceInfoFile={file:?} is no file of this container in {}",
                host.device_info.display()
            );
            Err(invalid(msg))
        }
    }
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
