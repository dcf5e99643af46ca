//! NICs of processes (docs/virtio-rdma-process.md), over the real socket of a real daemon.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test on a 64-bit host"
)]

mod cm;
mod crowds;
mod data;
mod ends;
mod events;
mod hostile;
mod loose;
mod mirrors;
mod owners;
mod scene;
mod slow;
