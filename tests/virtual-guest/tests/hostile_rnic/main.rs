//! The cases of the hostile guest suite once more, the villain's NIC on an RNIC: the device
//! `rnic:null`, whose host verbs are everything of that backing but hardware. The bystanders are on
//! the daemon's own engine: in a process of their own, or on the same worker where one process
//! serves all networks (`VHOST_RDMA_SHAPE=one`).
//!
//! What a case asserts about bytes it does not assert here: the null device completes requests and
//! moves nothing. What only concerns the engine (guessed keys, which the hardware looks up) is left
//! to `hostile`.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

#[path = "../hostile/attacks.rs"]
mod attacks;
#[path = "../hostile/chains.rs"]
mod chains;
#[path = "../hostile/floods.rs"]
mod floods;
#[path = "../hostile/kernel.rs"]
mod kernel;
#[path = "../hostile/memory.rs"]
mod memory;
#[path = "../hostile/outspend.rs"]
mod outspend;
#[path = "../hostile/races.rs"]
mod races;
#[path = "../hostile/requests.rs"]
mod requests;
#[path = "../hostile/rings.rs"]
mod rings;
#[path = "../hostile/scene.rs"]
mod scene;
#[path = "../hostile/suffer.rs"]
mod suffer;
#[path = "../hostile/vmm.rs"]
mod vmm;

/// What carries the villain's NIC: any address of the guest's, behind the null device's only one
/// (RFC 5737).
pub(crate) const BACKING: Option<&str> = Some("rnic:null@192.0.2.1");

/// How the villain comes to its NIC.
pub(crate) const DOOR: virtual_guest::world::Door = virtual_guest::world::Door::Monitor;
