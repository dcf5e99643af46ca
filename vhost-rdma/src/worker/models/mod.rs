//! Models of the hand-over of work between threads: the files that ship, on loom's primitives, in
//! every order that the memory model allows.
//!
//! This module is `worker` once more, its loop with a real shard and a real bus among it. Others
//! stand in the place of the atomics, locks and parking ([`sync`]), the eventfd ([`kicks`]), the
//! clock ([`clock`]) and what is counted ([`turn_stats`]). The engine is tried in one order alone:
//! it has no threads. Doorbells and completions, whose other side is a guest, have models there
//! (`nic/models`).
//!
//! Each model is run as it is, and must hold, and then once for each [`sync::Without`] that matters
//! to it, and must fail in the way that is expected. What no primitive can leave out, a line of the
//! shipped code, is among the seeded bugs (`tests/virtual-guest/mutants.toml`).

#![allow(dead_code, unreachable_pub, reason = "the models use a part of what ships")]
#![allow(clippy::duplicate_mod, reason = "the same files on other primitives")]
#![allow(clippy::default_constructed_unit_structs, reason = "what ships is no unit")]

#[path = "../carrier.rs"]
mod carrier;
mod clock;
mod hand_over;
#[path = "../handle.rs"]
mod handle;
mod kicks;
#[path = "../mailbox.rs"]
mod mailbox;
#[path = "../reply.rs"]
mod reply;
#[path = "../shard_thread.rs"]
mod shard_thread;
mod sync;
mod turn_stats;
#[path = "../waker.rs"]
mod waker;

use super::{WorkerConfig, job_share};
