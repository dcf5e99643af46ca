//! NICs of processes: the same device as a VM's, without a VM (docs/virtio-rdma-process.md).
//!
//! ```text
//!  process ── socket ── Session (a thread each) ──job──> worker (engine)
//!     │                    │  ^
//!     │ rings, doorbells   │  └── Routes <── ProcessPort <── worker: events
//!     └── its memory ──> House: one NIC's processes, the windows of its memory map
//! ```
//!
//! In a VM the guest's kernel stands between a process and the device: it says which objects are
//! whose, makes page lists, pins memory, and cleans up. Here that is this module, and the engine
//! below sees one driver with many contexts as ever. A process names only objects of its own
//! context, and memory only by its own addresses; its addresses are a *window* of the NIC's memory
//! map, and are looked up in a map that has nothing else in it.
//!
//! A process can do to its own thread here what it likes, and to nobody else's: a worker never
//! waits for it, never touches a descriptor that it gave, and its events leave a worker by a list
//! and a descriptor of our own.

#![forbid(unsafe_code)]

mod cm;
mod commands;
mod entry;
mod events;
mod house;
mod memory;
mod messages;
mod mirror;
mod session;
mod socket;

pub(crate) use entry::enter;
pub(crate) use house::House;
