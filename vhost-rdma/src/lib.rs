//! vhost-rdma.

pub mod node;
