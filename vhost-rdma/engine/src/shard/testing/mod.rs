//! Shards driven without a device: NICs in anonymous guest memory, and a clock that a test turns.
//!
//! [`driver`] is a guest driver in a few lines, and [`air`] what lies between two shards: requests
//! that are lost, repeated, late or out of order, as a test says; [`time`] has how time passes. In
//! `wire` is a peer that is no NIC at all. Tests of backings (the crate `vhost-rdma-rnic`) drive
//! theirs by the same, by the feature `testing`. No release has it.

pub mod air;
mod attributes;
pub mod driver;
mod port;
pub mod time;
#[cfg(test)]
pub mod wire;
