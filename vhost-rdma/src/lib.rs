//! vhost-rdma.
