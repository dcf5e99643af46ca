//! Atomics, and ATOMIC_WRITE and FLUSH (IBTA annex A19), executed for a peer.
//!
//! Writes are copied into guest memory by this host's CPUs, where everyone who has the memory sees
//! them in the order of the copies; what a FLUSH adds is that later readers cannot have looked
//! before, which one fence gives. Memory that survives a loss of power is unknown here, so nobody
//! gets the right to ask for that.

use std::sync::atomic::{Ordering, fence};

use virtio_rdma_abi::{access, flush};

use super::mirror::Task;
use super::mr::MrTable;
use super::nic::SoftNic;
use crate::link::{Nak, Operation, Outcome, Owner, Payload, Request};
use crate::memory;
use crate::nic::JobKind;

impl SoftNic {
    pub(super) fn serve_atomic(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        // IBTA 9.4.5: the address must be a multiple of 8, whatever the region looks like.
        if !request.remote_addr.is_multiple_of(8) {
            return self.refuse(qpn, request, Nak::InvalidRequest);
        }
        let target = match self.remote(qpn, request, access::REMOTE_ATOMIC) {
            Ok(target) => target,
            Err(nak) => return self.refuse(qpn, request, nak),
        };
        let [first, second] = request.operands;
        let adds = request.operation == Operation::FetchAdd;
        let atomic = if adds { JobKind::FetchAdd } else { JobKind::CompareSwap };
        if let Some(task) = self.task(atomic, request, &target) {
            return self.serve_owners_atomic(qpn, request, task);
        }
        let before = if adds {
            memory::fetch_add(&target, first)
        } else {
            memory::compare_swap(&target, first, second)
        };
        // A region whose host memory is not aligned like its addresses (iova ≠ va) cannot be
        // operated on atomically.
        let Ok(before) = before else { return self.refuse(qpn, request, Nak::InvalidRequest) };
        self.atomic_done(request, before)
    }

    fn atomic_done(&mut self, request: &Request<'_>, before: u64) -> Outcome {
        let found = before.to_le_bytes();
        match request.payload {
            Payload::Memory(result) if memory::write(result, 0, &found).is_ok() => {}
            Payload::Reply(bytes) => bytes.borrow_mut().extend_from_slice(&found),
            _ => return Outcome::LocalFault,
        }
        self.counters.rx_bytes += 8;
        self.counters.tx_bytes += 8;
        self.counters.rx_messages += 1;
        Outcome::Done
    }

    /// The memory is its owner's, whose processors alone are atomic against each other there.
    fn serve_owners_atomic(&mut self, qpn: u32, request: &Request<'_>, task: Task) -> Outcome {
        match self.owner_did(qpn, request, task) {
            Ok(before) => self.atomic_done(request, before),
            Err(outcome) => outcome,
        }
    }

    pub(super) fn serve_atomic_write(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        if !request.remote_addr.is_multiple_of(8) {
            return self.refuse(qpn, request, Nak::InvalidRequest);
        }
        let target = match self.remote(qpn, request, access::REMOTE_WRITE) {
            Ok(target) => target,
            Err(nak) => return self.refuse(qpn, request, nak),
        };
        // Else it was stored before its owner was asked, and another's word may be there by now.
        if request.owner == Owner::Unasked {
            let mut word = [0; 8];
            match request.payload {
                Payload::Inline(bytes) | Payload::Piece(bytes) if bytes.len() == word.len() => {
                    word.copy_from_slice(bytes);
                }
                Payload::Memory(source) if memory::read(source, 0, &mut word).is_ok() => {}
                _ => return Outcome::LocalFault,
            }
            // As with atomics, a region whose host memory is not aligned like its addresses cannot
            // be written at once.
            if memory::store(&target, u64::from_ne_bytes(word)).is_err() {
                return self.refuse(qpn, request, Nak::InvalidRequest);
            }
        }
        if let Some(task) = self.task(JobKind::Arrived, request, &target)
            && let Err(outcome) = self.owner_did(qpn, request, task)
        {
            return outcome;
        }
        self.counters.rx_bytes += 8;
        self.counters.rx_messages += 1;
        Outcome::Done
    }

    pub(super) fn serve_flush(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        let [length, kinds] = request.operands;
        let asked = |kind: u32| kinds & u64::from(kind) != 0;
        let mut rights = 0;
        for (kind, right) in
            [(flush::GLOBAL, access::FLUSH_GLOBAL), (flush::PERSISTENT, access::FLUSH_PERSISTENT)]
        {
            if asked(kind) {
                rights |= right;
            }
        }
        let range = (!asked(flush::MR)).then_some((request.remote_addr, length));
        let granted = rights != 0
            && self.qps.get(&qpn).is_some_and(|qp| {
                qp.attrs.has(rights)
                    && self.backing.mrs.admits_flush((qp.pdn, request.rkey), rights, range)
            });
        if !granted {
            return self.refuse(qpn, request, Nak::RemoteAccess);
        }
        fence(Ordering::SeqCst);
        self.counters.rx_messages += 1;
        Outcome::Done
    }
}

impl MrTable {
    /// Whether a key of a domain gives `rights` to a range, or to the whole region. No window gives
    /// them.
    fn admits_flush(&self, (pdn, key): (u32, u32), rights: u32, range: Option<(u64, u64)>) -> bool {
        self.get(key).is_some_and(|mr| {
            mr.pdn == pdn
                && mr.access & rights == rights
                && mr.map.is_some()
                && range.is_none_or(|(addr, len)| len == 0 || mr.offset(addr, len).is_some())
        })
    }
}
