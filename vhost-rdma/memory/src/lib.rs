//! Guest memory: the only crate that touches it, and the only one with raw pointers to it.
//!
//! Everything a guest gives the device by address (rings, doorbell pages, memory regions) is
//! resolved *once*, when the control command that names it executes, into a [`Translation`]: an
//! immutable table from offsets to host addresses that keeps the mapping behind it alive. From then
//! on the engine and the links hold translations and never a guest address, so a guest that
//! changes its page tables, or a VMM that unplugs memory, can make them read stale bytes but can
//! never make them read foreign ones.
//!
//! ```text
//! AddressSpace ──resolve──> Translation ──┬─ Ring     loads and stores of single words and
//!  (regions)                (Arc'ed)      │            entries, with their ordering
//!                                         └─ Segment  (translation, offset, length): what a copy
//!                                                     moves between
//! ```
//!
//! Guest memory changes under our feet at any time: no reference (`&[u8]`) to it is ever made,
//! bytes are copied out before they are looked at, and a value is read once. All writes to guest
//! memory pass [`copy`] and `ring`; that is where dirty pages will be logged for live migration.
//!
//! The crate knows nothing of vhost, of verbs, or of who asks. An address space is made from any
//! set of mappings, so tests use anonymous memory and a front end for container processes can use
//! theirs.

mod account;
mod contiguous_mapping;
mod copy;
mod fault;
mod in_order;
mod mapping;
mod maps;
pub mod ordering;
mod page_list;
mod reaper;
mod ring;
mod saved;
mod segment;
mod sigbus;
mod space;
mod tables;
mod translation;
mod usage;

pub use account::{Account, Charge};
pub use contiguous_mapping::{ContiguousError, ContiguousMapping};
pub use copy::{compare_swap, copy, fetch_add, read, store, write};
pub use fault::Fault;
pub use mapping::{Mapping, MappingError, page_size, unmap_elsewhere};
pub use page_list::{PageArray, PageList};
pub use ring::Ring;
pub use saved::SavedMap;
pub use segment::{Borrowed, Held, Segment, total_len};
pub use sigbus::vanished;
pub use space::{AddressSpace, AnonymousError, Missing, Region, SpaceError};
pub use translation::Translation;
pub use usage::{Usage, usage};

/// The page size of the ABI, in bytes (docs/virtio-rdma.md §6).
pub const PAGE_SIZE: u64 = 4096;

// Guest offsets are 64 bits; on a host with smaller addresses they would be cut.
const _: () = assert!(usize::BITS == 64, "vhost-rdma needs a 64-bit host");

/// An offset or length as the host counts it.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "usize has 64 bits: asserted above")]
const fn host(value: u64) -> usize {
    value as usize
}

/// A host address inside a mapping that the holder keeps alive.
#[derive(Clone, Copy, Debug)]
struct HostPtr(*mut u8);

// SAFETY: a `HostPtr` is a number; it is dereferenced only in this crate, where the holder keeps
// the mapping alive, and always as memory that other threads and the guest change at the same time.
unsafe impl Send for HostPtr {}
// SAFETY: as above; it has no interior state.
unsafe impl Sync for HostPtr {}

impl HostPtr {
    /// The address `offset` bytes further.
    const fn add(self, offset: usize) -> Self {
        // Wrapping arithmetic on the address alone makes no claim about what it points to.
        Self(self.0.wrapping_add(offset))
    }

    fn addr(self) -> usize {
        self.0.addr()
    }
}

/// Reads now what is read once and may not be readable later.
pub fn prepare() {
    maps::prepare();
    // Asked of the kernel at the first call, and of a file where that is not allowed any more.
    rustix::param::page_size();
}
