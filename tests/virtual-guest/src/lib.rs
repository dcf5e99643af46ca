//! A guest without a VM: a virtio RDMA driver that speaks to the real daemon over its real
//! vhost-user socket.
//!
//! ```text
//!  tests, bench, soak, attack ── World ── Daemon (the real binary, its CLI) daemon.rs vitals.rs
//!        │
//!      Guest ─┬─ control commands, event queues                   guest.rs control.rs events.rs
//!             ├─ Cq, Srq, Qp: rings, doorbells, arming             rings.rs qp.rs attr.rs send.rs
//!             ├─ page lists, buffers                               pages.rs
//!             ├─ split virtqueues                                  virtq.rs
//!             └─ memfd RAM                                         ram.rs
//! ```
//!
//! It exists so that the whole stack runs in milliseconds, and so that somebody who only read
//! `docs/virtio-rdma.md` checks the daemon: nothing of the daemon is imported, not even its ABI
//! crate ([`spec`] says why). It can also misbehave: every ring, doorbell, page list and descriptor
//! is open to raw writes.

#![allow(
    clippy::panic,
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::missing_panics_doc,
    reason = "a driver for tests reports what must not happen by a panic, and runs on 64-bit hosts \
              only"
)]

pub mod attack;
pub mod attr;
pub mod backing;
pub mod bench;
pub mod bomb;
pub mod check;
pub mod control;
pub mod daemon;
pub mod events;
pub mod guest;
pub mod lingering;
pub mod own;
pub mod pages;
pub mod process;
pub mod qp;
pub mod ram;
pub mod rings;
pub mod send;
pub mod soak;
pub mod spec;
pub mod third_party;
pub mod third_party_cm;
pub mod trips;
pub mod virtq;
pub mod vitals;
mod witness;
pub mod world;
