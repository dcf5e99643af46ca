//! Models of the lock-free protocols: the shipped code on loom's atomics, in every order that the
//! memory model allows.
//!
//! The device's side is the code that runs in the daemon:
//! [`DoorbellPage`](super::doorbell::DoorbellPage), [`Cq`](super::cq::Cq) and the steps of
//! [`crate::ordering`], over [`memory::Memory`] instead of guest memory. The guest's side is C;
//! [`guest`] says the same steps in Rust and names the functions that it copies.
//!
//! What goes between threads of the daemon has its models there (`worker/models`): jobs, parcels,
//! answers, and a deregistration beside a copy. Where a worker's sleep is part of a model here, it
//! stands in a few lines of [`workers`].
//!
//! Each model is run as it is, and must hold, and then once for each [`Without`] that matters to
//! it, and must fail in the way that is expected: a fence that can go without a model noticing is a
//! fence that nobody tests.
//!
//! Loom's memory model is C++'s, with two differences. It does not let a load see a store that is
//! executed later, so "a load must be over before this store" is checked by cells that must not be
//! written while they may be read ([`memory::Memory::touch`]). And words of different sizes at one
//! place do not exist: a load of 64 bits is eight loads of bytes, which is weaker than what the
//! hardware does.

mod completions;
mod doorbells;
mod guest;
mod memory;
mod moves;
mod workers;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::ordering::Fence;

/// What is left out of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// A full fence of the device.
    Device(Fence),
    /// The full fence of the guest, of both its protocols.
    GuestFence,
    /// The release order of stores to the word at this offset.
    Release(u64),
    /// The acquire order of loads of the word at this offset.
    Acquire(u64),
    /// What C++ does not promise and the processors that we run on do: see [`guest::Guest::ring`].
    MultiCopyAtomicity,
}

/// How a wake-up that is lost shows: everyone waits.
const LOST_WAKE: &str = "deadlock";
/// How a missing order between accesses to plain bytes shows.
const RACE: &str = "ausality violation";

type Model = fn(Without);

/// Preemptions in the models that are too large to be tried in full. Loom's authors find hardly a
/// bug that needs more than two.
const PREEMPTIONS: usize = 3;

fn check(model: Model, without: Without, preemptions: Option<usize>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || model(without));
}

/// The protocol works, in every execution.
fn holds(model: Model) {
    check(model, Without::Nothing, None);
}

/// The protocol works, in every execution with so many preemptions.
fn holds_within_bound(model: Model) {
    check(model, Without::Nothing, Some(PREEMPTIONS));
}

/// The protocol does not work `without` something, and this is how it ends.
#[track_caller]
fn fails(model: Model, without: Without, how: &str) {
    let panic = catch_unwind(AssertUnwindSafe(|| check(model, without, Some(PREEMPTIONS))))
        .expect_err("the model does not notice what is missing");
    let message = panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_default();
    assert!(message.contains(how), "{without:?}: fails, but by {message:?}");
}
