//! What a VMM is started with for a NIC, as the daemon's own command line prints it.

use vhost_rdma_proto::v1;

use super::{BadGift, container_socket};
use crate::pool::Pool;

/// Stands for the VM's memory size in option templates.
const SIZE: &str = "{size}";

/// What a VMM is started with for a NIC.
pub(super) struct Options {
    pub(super) qemu: Vec<String>,
    pub(super) qemu_memory: Vec<String>,
    pub(super) cloud_hypervisor: Vec<String>,
    pub(super) cloud_hypervisor_memory: Vec<String>,
}

impl Options {
    pub(super) fn new(pool: &Pool, id: &str, nic: &v1::Nic, tap: &str) -> Result<Self, BadGift> {
        let seen = vhost_rdma_vmm::Nic {
            name: id.to_owned(),
            mac: nic.mac.clone(),
            socket: container_socket(id),
            virtio_id: nic.virtio_id,
            comp_vectors: nic.comp_vectors,
            num_queues: nic.num_queues,
        };
        let companion = pool.config.companion.bridge.is_some();
        // Makes the options' ids differ between the NICs of one VM, whatever pools they are from.
        let index = crc32fast::hash(id.as_bytes());
        let netdev = Some(if companion { format!("tap:{tap}") } else { "none".to_owned() });
        let qemu = |memory: Option<&str>| {
            let args = vhost_rdma_vmm::QemuArgs {
                netdev: netdev.clone(),
                memory: memory.map(str::to_owned),
                index,
                ..vhost_rdma_vmm::QemuArgs::default()
            };
            vhost_rdma_vmm::qemu(&seen, &args).map_err(|error| BadGift(error.to_string()))
        };
        let cloud = |memory: Option<&str>| {
            let args = vhost_rdma_vmm::CloudHypervisorArgs {
                tap: Some(tap.to_owned()),
                memory: memory.map(str::to_owned),
                ..vhost_rdma_vmm::CloudHypervisorArgs::default()
            };
            vhost_rdma_vmm::cloud_hypervisor(&seen, &args)
                .map_err(|error| BadGift(error.to_string()))
        };
        let mut cloud_hypervisor = cloud(None)?;
        if !companion && let Some(net) = cloud_hypervisor.iter().position(|word| word == "--net") {
            cloud_hypervisor.drain(net..=net + 1);
        }
        Ok(Self {
            qemu_memory: memory_part(&qemu(Some("1G"))?, &qemu(None)?),
            qemu: qemu(None)?,
            cloud_hypervisor_memory: memory_part(&cloud(Some("1G"))?, &cloud(None)?),
            cloud_hypervisor,
        })
    }
}

/// The words that come first only when the memory is named, with its size left open.
fn memory_part(with: &[String], without: &[String]) -> Vec<String> {
    let count = with.len().saturating_sub(without.len());
    with.iter().take(count).map(|word| word.replace("1G", SIZE)).collect()
}
