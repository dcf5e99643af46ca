//! The cases of the hostile guest suite once more, the villain a process
//! (docs/virtio-rdma-process.md) and one of the bystanders, too, on the same worker. `left` says
//! which are not here, and why: a process has no virtqueues, no vhost-user messages and no kernel.
//! What is particular to a process's door is in `process`: its messages, its descriptors, its end.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

mod attacks;
#[path = "../hostile/floods.rs"]
mod floods;
#[path = "../hostile/keys.rs"]
mod keys;
mod left;
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
#[path = "../hostile/turns.rs"]
mod turns;

/// What carries the villain's NIC, if not what carries all.
pub(crate) const BACKING: Option<&str> = None;

/// How the villain comes to its NIC.
pub(crate) const DOOR: virtual_guest::world::Door = virtual_guest::world::Door::Process;
