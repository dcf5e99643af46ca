//! The NIC's JSON file: what a container, and who starts a VM in it, reads of its NIC.

use serde_json::{Value, json};
use vhost_rdma_proto::v1;

use super::options::Options;
use super::{BadGift, container_dir, container_socket};
use crate::pool::Pool;

/// The NIC's JSON file.
///
/// # Errors
/// As [`vhost_user`](super::vhost_user).
pub fn nic_document(pool: &Pool, id: &str, nic: &v1::Nic, tap: &str) -> Result<Value, BadGift> {
    let options = Options::new(pool, id, nic, tap)?;
    let tap = pool.config.companion.bridge.is_some().then_some(tap);
    Ok(json!({
        "version": 1,
        "id": id,
        "pool": pool.name(),
        "resource": pool.resource,
        "kind": pool.config.kind,
        "nic": nic.name,
        "network": nic.network,
        "vni": nic.vni,
        "mac": nic.mac,
        "addresses": nic.addresses,
        "mtu": pool.config.mtu,
        "dir": container_dir(id),
        "socket": container_socket(id),
        "virtio": { "comp_vectors": nic.comp_vectors, "num_queues": nic.num_queues },
        "tap": tap,
        "qemu": { "memory": options.qemu_memory, "args": options.qemu },
        "cloud_hypervisor": {
            "memory": options.cloud_hypervisor_memory,
            "args": options.cloud_hypervisor,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{nic, pool};
    use super::*;

    #[test]
    fn the_document_has_whole_option_lists() {
        let document = nic_document(&pool(""), "blue-1-0", &nic(), "net1").unwrap();
        let words = |value: &Value| {
            value
                .as_array()
                .unwrap()
                .iter()
                .map(|word| word.as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let memory = words(&document["qemu"]["memory"]).join(" ");
        assert_eq!(
            memory,
            "-machine q35,memory-backend=mem -m {size} \
             -object memory-backend-memfd,id=mem,size={size},share=on"
        );
        assert_eq!(
            words(&document["cloud_hypervisor"]["memory"]),
            ["--memory", "size={size},shared=on"]
        );
        // No companion: nothing that needs a tap.
        assert!(!words(&document["cloud_hypervisor"]["args"]).contains(&"--net".to_owned()));
        assert!(!words(&document["qemu"]["args"]).join(" ").contains("tap"));
        let with =
            nic_document(&pool("companion={bridge='b'}"), "blue-1-0", &nic(), "net1").unwrap();
        assert!(words(&with["qemu"]["args"]).join(" ").contains("ifname=net1,"));
        assert_eq!(with["tap"], "net1");
    }
}
