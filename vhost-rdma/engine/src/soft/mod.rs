//! Verbs in software: the provider whose work requests the daemon executes itself.
//!
//! ```text
//!  command ──> control ──> Nic<Soft> {pd, mr, cq, srq, qp, ah}
//!  send queue ──> requester ──> Link ──────> responder (a peer's NIC) ──> memory copy
//! ```
//!
//! A NIC of this kind (`Soft`) keeps keys, groups and what each QP waits for. What the NICs of one
//! shard share is the `Engine`: addresses, QPNs, requests that cross to other shards. Who runs
//! when, and for how long, is not decided here: the shard lends its NICs for one call, and this
//! module knows nothing of it (`Nics`).
//!
//! What a guest does wrong is a `Status`, a completion status or an event; it is never an `Err`
//! that ends anything here. All loops are bounded by time (`nic::budget`), not by numbers that a
//! guest writes; what is many goes in steps. No thread, clock, socket or file: time is an
//! argument, randomness comes from a [`Random`], events leave through a port.

#![forbid(unsafe_code)]

mod attributes;
mod binding;
mod control;
mod create;
mod crossing;
mod engine;
mod fastreg;
mod jobs;
mod local;
mod management;
mod mcast;
mod mirror;
mod modify;
mod moves;
mod mr;
mod network;
mod nic;
mod nics;
mod numbers;
mod pace;
mod placement;
mod provider;
mod qp;
mod quota;
mod remote;
mod requester;
mod responder;
mod saved;
mod settle;
mod srq;
mod stream;
mod talks;
mod turns;
mod unreliable;
mod waiter;
pub mod window;
mod work;

use crate::nic::{DeferredDrop, Nanos};

pub(crate) use engine::{Engine, Execution};
#[cfg(test)]
pub(crate) use nic::Qp;
pub(crate) use nic::SoftNic;
pub(crate) use nics::Nics;
pub use numbers::Random;
#[cfg(test)]
pub(crate) use requester::WENT;
pub use saved::SavedNic;
