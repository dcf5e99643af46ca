//! A guest and a VMM that try everything, over the real socket, beside a pair of guests that must
//! not notice.
//!
//! Each case has a villain and two bystanders on the same network, hence on the same worker, whose
//! connection moves data all the while and compares it. A case asserts what its villain is
//! answered; the scene (`scene`) asserts what all cases have in common: the bystanders' traffic
//! went on, no turn of a worker was charged more than a bound, none is stuck, the daemon's memory
//! stayed in its budget, and when the villain is gone nothing is left of it. No time is asserted:
//! this build is not the one that serves guests, and this machine has other things to do.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

mod attacks;
mod chains;
mod descriptors;
mod floods;
mod kernel;
mod keys;
mod mapping;
mod memory;
mod outspend;
mod races;
mod requests;
mod rings;
mod scene;
mod suffer;
mod turns;
mod vmm;

/// What carries the villain's NIC, if not what carries all.
pub(crate) const BACKING: Option<&str> = None;

/// How the villain comes to its NIC.
pub(crate) const DOOR: virtual_guest::world::Door = virtual_guest::world::Door::Monitor;
