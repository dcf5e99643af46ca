//! Identity of the device, its virtqueues and its configuration space (sections 1, 2 and 4).

use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U16, U32};

abi_consts! {
    /// What the device is and which ABI this is. Re-exported at the root of the crate.
    pub mod identity = "VIRTIO_RDMA_" {
        /// Virtio device ID of an RDMA device.
        DEVICE_ID: u32 = 42;
        /// Device ID behind a monitor that refuses 42; only `MAGIC` tells what it is.
        LAB_DEVICE_ID: u32 = 21;
        /// Value of `config.magic`: "RDMA" in ASCII.
        MAGIC: u32 = 0x414d_4452;
        /// The version of the ABI that this text describes.
        ABI_VERSION: u32 = 1;
        /// Bytes in a status page, a doorbell page and a list page.
        PAGE_SIZE: usize = 4096;
    }
}

abi_consts! {
    /// Indices of the virtqueues; kick queues follow the completion-event queues.
    pub mod vq = "VIRTIO_RDMA_VQ_" {
        /// Control commands.
        CONTROL: u16 = 0;
        /// Asynchronous events.
        EVENT: u16 = 1;
        /// Completion events of vector 0; vector v has index `COMP_BASE` + v.
        COMP_BASE: u16 = 2;
    }
}

abi_struct! {
    /// The configuration space, read once in probe.
    pub struct Config = "config", 64 {
        /// `MAGIC`, else this is no RDMA device.
        pub magic: U32,
        /// The highest ABI version that the device speaks.
        pub abi_version: U32,
        /// Completion vectors and completion-event queues, at least 1.
        pub num_comp_vectors: U16,
        /// Kick queues, at least 1.
        pub num_kick_queues: U16,
        /// MAC address of the network interface to which this device belongs.
        pub mac: [u8; 6],
        /// Zero.
        pub reserved: [u8; 46],
    }
}
