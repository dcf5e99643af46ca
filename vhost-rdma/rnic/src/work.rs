//! How far commands and walks are that go in steps, and what a step of them counts.

use vhost_rdma_engine::nic::Nanos;
use vhost_rdma_engine::nic::roster::Walk;

/// A call of the host's verbs: a system call at least.
pub(super) const HOST_CALL: Nanos = 1_000;

/// What the end of a host object counts: a few to a step, since it is a command to firmware.
pub(super) const END: Nanos = 8 * HOST_CALL;

/// How far the walk over keys is that follows a change of memory. Regions are looked at first, then
/// windows, and only then the regions go: hardware keeps a region that a window shows.
#[derive(Debug, Default)]
pub struct Keys {
    pub(super) gsi: bool,
    pub(super) lost: Walk,
    pub(super) windows: Walk,
    pub(super) keys: Walk,
}

/// A command that has begun, as far as it is not the same on every backing.
#[derive(Debug)]
pub enum Work {
    /// A QP, once its windows are gone; then what the host CQ has of it.
    EndQp(u32),
    Drain(Drain),
    /// A QP that is in RESET, when the host CQ has nothing of it; then its changes of windows.
    BeginAnew(u32, Drain),
    ForgetChanges((u32, u32), Walk),
}

/// The end of a context, as far as it is the RNIC's.
#[derive(Debug)]
pub struct Ending {
    /// What the host CQ has of QPs that are gone.
    pub(super) drain: Option<Drain>,
}

/// What is left of the host CQ to be taken.
#[derive(Debug)]
pub struct Drain {
    pub(super) left: u32,
}
