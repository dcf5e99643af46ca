//! Descriptor chains, walked with suspicion.
//!
//! The queue library ends a chain early where a descriptor cannot be read, loops or nests, and does
//! not say so; and it does not mind writable parts before readable ones. A control request must be
//! whole, so the walk here refuses what is not. What is readable is copied once, and nothing is
//! read from the guest again while the request is served.

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use std::sync::atomic::Ordering;

use super::ctrl::{REQUEST_MAX, RESPONSE_MAX, Request};
use crate::memory::AddressSpace;

/// Descriptors in one chain: no ring is longer, and an indirect table must not be longer than the
/// ring.
pub(super) const DESCRIPTORS_MAX: usize = 1024;

/// A chain that was taken from the available ring.
#[derive(Debug)]
pub(super) struct Chain {
    pub(super) head: u16,
    request: [u8; REQUEST_MAX],
    request_len: usize,
    /// No readable byte came behind those.
    whole: bool,
    /// Where a response goes, [`RESPONSE_MAX`] bytes of it at most.
    writable: Vec<(GuestAddress, u32)>,
    room: usize,
}

/// What the available ring holds.
#[derive(Debug)]
pub(super) enum Taken {
    /// A chain that can be served.
    Chain(Box<Chain>),
    /// A chain that can only be given back with length 0.
    Malformed(u16),
    /// Nothing.
    Empty,
    /// The ring itself makes no sense or is not in guest memory; there is no way on before the
    /// queue is set up anew.
    Broken,
}

/// Whether the ring holds something that can be taken.
pub(super) fn available(queue: &Queue, memory: &AddressSpace) -> Option<bool> {
    let index = queue.avail_idx(memory, Ordering::Acquire).ok()?.0;
    let ahead = index.wrapping_sub(queue.next_avail());
    (ahead <= queue.size()).then_some(ahead > 0)
}

/// Takes the next chain, which must not have more than `most` descriptors.
pub(super) fn take(queue: &mut Queue, memory: &AddressSpace, most: usize) -> Taken {
    match available(queue, memory) {
        Some(true) => {}
        Some(false) => return Taken::Empty,
        None => return Taken::Broken,
    }
    let Some(descriptors) = queue.pop_descriptor_chain(memory) else { return Taken::Broken };
    let head = descriptors.head_index();
    let mut chain = Chain {
        head,
        request: [0; REQUEST_MAX],
        request_len: 0,
        whole: true,
        writable: Vec::new(),
        room: 0,
    };
    let mut complete = false;
    for (count, descriptor) in descriptors.enumerate() {
        let (addr, len) = (descriptor.addr(), descriptor.len());
        let taken = count < most
            && if descriptor.is_write_only() {
                chain.add_writable(memory, addr, len)
            } else {
                chain.writable.is_empty() && chain.add_readable(memory, addr, len)
            };
        if !taken {
            return Taken::Malformed(head);
        }
        complete = !descriptor.has_next();
    }
    if complete { Taken::Chain(Box::new(chain)) } else { Taken::Malformed(head) }
}

impl Chain {
    fn add_readable(&mut self, memory: &AddressSpace, addr: GuestAddress, len: u32) -> bool {
        let rest = &mut self.request[self.request_len..];
        let copied = rest.len().min(len as usize);
        self.request_len += copied;
        self.whole &= copied == len as usize;
        copied == 0 || memory.read_slice(&mut rest[..copied], addr).is_ok()
    }

    /// An empty descriptor is kept as well: it decides that no readable one may follow.
    fn add_writable(&mut self, memory: &AddressSpace, addr: GuestAddress, len: u32) -> bool {
        let kept = (RESPONSE_MAX - self.room).min(len as usize);
        if kept > 0 || self.writable.is_empty() {
            if kept > 0 && !GuestMemoryBackend::check_range(memory, addr, kept) {
                return false;
            }
            // `kept` is at most RESPONSE_MAX.
            #[allow(clippy::cast_possible_truncation)]
            self.writable.push((addr, kept as u32));
            self.room += kept;
        }
        true
    }

    /// The readable bytes.
    pub(super) fn request(&self) -> Request<'_> {
        Request { bytes: &self.request[..self.request_len], whole: self.whole }
    }

    /// How many bytes can be answered, [`RESPONSE_MAX`] at most.
    pub(super) const fn room(&self) -> usize {
        self.room
    }

    /// Writes a response, which must fit, and returns the length for the used ring. 0 if the
    /// guest's memory went away meanwhile.
    pub(super) fn respond(&self, memory: &AddressSpace, response: &[u8]) -> u32 {
        let mut rest = response;
        for &(addr, len) in &self.writable {
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            if !now.is_empty() && memory.write_slice(now, addr).is_err() {
                return 0;
            }
            rest = later;
        }
        u32::try_from(response.len() - rest.len()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
