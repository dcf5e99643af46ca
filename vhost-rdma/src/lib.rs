//! vhost-rdma.

pub mod admin;
pub mod cli;
pub mod config;
pub mod device;
pub mod engine;
pub mod memory;
pub mod node;
mod protocol;
pub mod socket;
pub mod telemetry;
pub mod transport;
pub mod worker;
