//! The agent between a kubelet, a daemon and a CNI plugin that are played here.
//!
//! The kubelet's side speaks the real APIs over real sockets (registration, device plugin,
//! pod-resources) and wipes its directory as a kubelet does when it starts; the daemon is a table
//! that makes real directories, and can be told to fail at any call. What a real kubelet of version
//! 1.20 does is tested by `cargo xtask k8s test`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

mod allocation;
mod attachment;
mod channel;
mod cluster;
mod crash;
mod daemon;
mod debts;
mod events;
mod health;
mod kubelet;
mod named;
mod ownership;
mod registration;
mod silent;
mod start;
mod stuck;
mod world;
