//! RDMA netlink and the SR-IOV inventory.
