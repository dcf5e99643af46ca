//! The device information file of the Network Plumbing Working Group (device-info-spec 1.1.0),
//! which Multus copies into the pod's `network-status`. The agent writes one when a device is
//! granted; this one, at the path that the runtime names, says what became of it.

use cni_skel::{Code, Error};
use serde_json::{Value, json};
use vhost_rdma_agent_api::{Nic, Personality};

use crate::host::Host;

/// Writes the file, all or nothing.
///
/// # Errors
/// Code 5.
pub(crate) fn write(host: &Host, name: &str, nic: &Nic) -> Result<(), Error> {
    let mut text = document(nic).to_string();
    text.push('\n');
    host.write_device_info(name, &text)
        .map_err(|error| Error::new(Code::IO, format!("CNIDeviceInfoFile {name}: {error}")))
}

/// In the specification's words; it has no type for an emulated RDMA NIC, so that is `vhost-user`,
/// with the pod as the client.
fn document(nic: &Nic) -> Value {
    let pci = |pci: &str, rdma: Option<&str>| {
        let mut pci = json!({ "pci-address": pci });
        if let (Some(rdma), Some(map)) = (rdma, pci.as_object_mut()) {
            map.insert("rdma-device".to_owned(), Value::from(rdma));
        }
        json!({ "type": "pci", "version": "1.1.0", "pci": pci })
    };
    match &nic.personality {
        // What Multus passes on must have a type; this one says where the socket is.
        Personality::Process { container_socket, .. }
        | Personality::VhostUser { container_socket, .. } => json!({
            "type": "vhost-user",
            "version": "1.1.0",
            "vhost-user": { "mode": "client", "path": container_socket },
        }),
        Personality::Vf { pci: address, rdma_device, .. } => pci(address, Some(rdma_device)),
        Personality::VfVfio { pci: address } => pci(address, None),
        Personality::Shared { pci: address, rdma_device, .. } => {
            pci(address.as_deref().unwrap_or_default(), Some(rdma_device))
        }
    }
}
