//! The vhost-rdma daemon and its command line.
fn main() {}
