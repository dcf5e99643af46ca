//! What the daemon keeps for one NIC because its guest asked for it: all of it is charged to the
//! NIC's account ([`Account`], `max_kept_bytes`), and a command that would make the daemon keep
//! more is refused with NOMEM. Nothing grows by what a guest writes, posts or sends.
//!
//! What is kept, in brackets what it grows with, and its bound:
//!
//! - contexts, PDs, regions, windows, CQs, SRQs, QPs, AHs (creations): the account, and the NIC's
//!   `Limits`; a window for each region
//! - translations of page lists and rings, and their tables (registrations, rings): the account;
//!   tables also 32 MiB and a 64th of the guest's memory (`memory::tables`)
//! - the map behind keys for all of memory: one (`mr::WholeGuest`)
//! - doorbell pages and their slots (DB_PAGE_ADD): the account; four for each context, and as many
//!   as its queues fill
//! - elements and inline bytes of the request under way (posts): those of one request of a QP, made
//!   with it
//! - requests taken before their turn, pieces under way (posts): 16 of a QP; requests charged while
//!   there are any, or none is taken
//! - requesters to be woken by a receive (peers): one of a QP, 128 of an SRQ
//! - events that wait for a buffer (errors): one of a kind and object
//! - timers (waits): one of a QP, one of a CQ
//! - numbers that rest (destroys): 4096 keys; two bytes of each slot of a table
//! - GIDs, groups and their members (GID_SET, MCAST_ATTACH): 128, 128 and 64 of each
//! - what an RNIC has under way (posts): as many as the host CQ has entries, in all QPs
//!   (`rnic::create`), charged with the QP
//! - datagrams for QP 1 on an RNIC (peers): 128
//!
//! An object is charged in two parts. Its *place* is what it takes in tables, and in queues of
//! waiting events and deadlines: those never shrink, so places that were once needed stay charged
//! until the driver begins anew. What lies *beside* the tables is charged in the object, and given
//! back where that ends. Whoever adds something that is kept adds a line here, and its size below
//! or beside what it measures.

use super::command::Status;
use super::limits::{GID_TABLE_LEN, MAX_MCAST_GROUPS, MAX_MCAST_QPS};
use crate::link::Gid;
use crate::memory::{Account, AddressSpace, Charge, Region};

/// An entry of a table or map, which may be half empty, with its bookkeeping.
pub const fn entry(bytes: usize) -> usize {
    2 * (bytes + 16)
}

/// An event or a timer that waits: its place, and where it is found.
pub const WAITING: usize = entry(48);

/// What has places.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A context.
    Context,
    /// A doorbell page.
    Page,
    /// A protection domain.
    Pd,
    /// A memory region.
    Region,
    /// A memory window.
    Window,
    /// A CQ.
    Cq,
    /// An SRQ.
    Srq,
    /// A QP.
    Qp,
    /// An address handle.
    Ah,
}

pub(crate) const KINDS: usize = 9;

/// Bytes of a place of each kind, and of what a NIC has in any case.
#[derive(Debug)]
pub struct Places {
    /// Of each kind.
    pub each: [usize; KINDS],
    /// Of the NIC itself.
    pub always: usize,
}

/// Those of every backing: addresses, groups, numbers that rest, and regions of memory twice, in
/// the space and in the map of all of it.
pub const ALWAYS: usize = GID_TABLE_LEN as usize * (size_of::<Gid>() + 16)
    + MAX_MCAST_GROUPS as usize * (entry(64) + MAX_MCAST_QPS as usize * 4)
    + 4096 * entry(8)
    + 512 * (2 * size_of::<Region>() + 256);
/// A context and the numbers of its pages.
pub const CONTEXT: usize = entry(64) + 64;

/// What one NIC's objects take of its account. See the module.
#[derive(Debug)]
pub struct Kept {
    account: Account,
    places: &'static Places,
    /// Places that were ever needed at one time.
    most: [usize; KINDS],
    held: Charge,
}

impl Kept {
    /// A driver begins, whose memory this is.
    pub(crate) fn begin(space: &AddressSpace, places: &'static Places) -> Self {
        let account = space.account().clone();
        let held = account.hold(places.always as u64);
        Self { account, places, most: [0; KINDS], held }
    }

    /// Room for another object beside so many.
    pub fn place(&mut self, kind: Kind, present: usize) -> Result<(), Status> {
        let (Some(most), Some(&bytes)) =
            (self.most.get_mut(kind as usize), self.places.each.get(kind as usize))
        else {
            return Err(Status::NOMEM);
        };
        if present >= *most {
            if !self.held.grow(bytes as u64) {
                return Err(Status::NOMEM);
            }
            *most = present.saturating_add(1);
        }
        Ok(())
    }

    /// What an object takes beside its place, to be kept in it.
    pub(crate) fn beside(&self, bytes: usize) -> Result<Charge, Status> {
        self.account.charge(bytes as u64).ok_or(Status::NOMEM)
    }
}
