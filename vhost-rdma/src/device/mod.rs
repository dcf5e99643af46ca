//! The virtio device: NICs behind vhost-user sockets.
//!
//! ```text
//!  LocalDataplane (`dataplane`) ── one Nic per configured NIC: its place on a worker
//!                                       │
//!                    VMM ──stream── Frontend ──> Session (one per connection)
//!                                       ├─ control queue ── chain ── ctrl ──job──> worker (engine)
//!                                       ├─ kick queues (it sleeps on them) ────> worker
//!                                       └─ event queues <── EventPort <───────── worker
//! ```
//!
//! The whole byte layout of control requests (`ctrl`) and of virtqueues (`chain`, `events`) lives
//! here and the engine sees none of it. Page lists are resolved here too, on the connection's own
//! thread, so that a huge registration costs other NICs nothing.
//!
//! What a guest does wrong is a status in its response. What a VMM does wrong ends its own
//! connection. Neither ends a thread that serves others, and no thread that serves others ever
//! waits for either: a worker only ever tries a lock that is held for nanoseconds, and its file
//! descriptors never block.
//!
//! The front end for processes (`process`) takes the NIC's place (`nic`), control requests (`ctrl`)
//! and files that are memory (`memory`) from here; nothing here knows of it.
//!
//! What vhost-user hides and how we live with it: a virtio reset is not visible (a control queue
//! that starts again at index 0 is one, `gate`), and a kick may come before any buffer and stand
//! for many.

#![forbid(unsafe_code)]

mod chain;
mod config;
pub(crate) mod connection;
pub(crate) mod ctrl;
pub(crate) mod events;
mod frontend;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod gate;
mod home;
mod journal;
mod kicks;
pub(crate) mod memory;
pub(crate) mod nic;
mod notifier;
pub(crate) mod queues;
mod restore;
pub(crate) mod saved;
mod session;
mod trust;
mod vring;

pub use journal::{Change, Forgetful, Journal, Kept, Piece, Place};

/// Reads now what is read once and may not be readable later, in a sandbox.
pub fn prepare() {
    memory::prepare();
    crate::memory::prepare();
    crate::eventfd::prepare();
}
