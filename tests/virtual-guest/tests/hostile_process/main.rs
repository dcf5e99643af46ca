//! Cases of the hostile guest suite once more, the villain a process (docs/virtio-rdma-process.md),
//! the bystanders guests on the same worker. What is particular to a process's door is in `process`:
//! its messages, its descriptors, its end. What only a monitor or a guest's kernel can do (memory
//! tables, virtqueues, rings that stop) is left to `hostile`.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

mod attacks;
#[path = "../hostile/keys.rs"]
mod keys;
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
