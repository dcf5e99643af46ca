//! The virtio RDMA ABI.
