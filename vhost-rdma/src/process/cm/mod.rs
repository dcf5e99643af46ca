//! The connection manager of NICs for processes (docs/virtio-rdma-process.md, 8): rdma_cm without a
//! kernel.
//!
//! ```text
//!  process ── CM_COMMAND ──> Session ──┐                ┌── Inbox <── ProcessPort <── worker
//!          <── events: a bell ─────────┤                │
//!                              Manager: one Machine (a lock), one thread: datagrams, timers
//!                                                       └── job ──> worker: QP 1 sends
//! ```
//!
//! In a VM the guest's kernel is the connection manager: it speaks to its peers by datagrams of
//! QP 1 and to its programs by `/dev/infiniband/rdma_cm`. Here both are the daemon's. What peers
//! say is the same (IBTA chapter 12, annex A11), so a process and a VM of one network connect as
//! two VMs do; what programs say is the kernel's own commands (`rdma/rdma_user_cm.h`), without
//! pointers.
//!
//! `layout` reads and writes those, `commands` carries them out on the `machine`, `peer` is what is
//! said to and by peers. None of these waits, opens anything or knows a clock: time comes with each
//! call, datagrams and events lie ready to be taken. `manager` gives them a thread. That thread
//! touches no descriptor that a process has, and no worker waits for it.
//!
//! A connection is not a queue pair: nothing here opens memory or reaches one. Who lies about its
//! queue pair has lied to its peer, whose queue pair takes no request of another (IBTA 9.9).

mod commands;
mod fair;
mod id;
mod layout;
mod machine;
mod manager;
mod peer;
mod ports;
#[cfg(test)]
mod tests;

pub(super) use layout::{parse, write};
pub(super) use manager::Manager;
