//! The options that give a VM a PCI function of the host, such as a virtual function that is bound
//! to vfio-pci.
//!
//! The guest's memory need not be shared with anybody, but the VMM locks all of it: its limit of
//! locked memory must cover the VM.

/// For QEMU. `function` is a full PCI address (`0000:3b:02.1`); `index` makes the id unique in one
/// VM.
#[must_use]
pub fn qemu_passthrough(function: &str, index: u32) -> Vec<String> {
    vec!["-device".to_owned(), format!("vfio-pci,host={function},id=vf{index}")]
}

/// For cloud-hypervisor.
#[must_use]
pub fn cloud_hypervisor_passthrough(function: &str, index: u32) -> Vec<String> {
    vec!["--device".to_owned(), format!("path=/sys/bus/pci/devices/{function}/,id=vf{index}")]
}
