//! RDMA WRITE and RDMA READ, executed for a peer, and the memory that their keys open.

use virtio_rdma_abi::{access, wc_opcode};

use super::mr::Access;
use super::nic::SoftNic;
use super::responder::{Opened, same_memory};
use crate::link::{Nak, Outcome, Owner, Payload, Request};
use crate::memory::{self, Borrowed};
use crate::nic::JobKind;
use crate::nic::budget::cost;

impl SoftNic {
    /// The memory that an RDMA or atomic request names, the whole message's on its first piece.
    #[inline]
    pub(super) fn remote(
        &self,
        qpn: u32,
        request: &Request<'_>,
        rights: u32,
    ) -> Result<Borrowed<'_>, Nak> {
        self.meter.charge(cost::KEY);
        let qp = self.qps.get(&qpn).ok_or(Nak::RemoteOperation)?;
        if !qp.attrs.has(rights) {
            return Err(Nak::RemoteAccess);
        }
        let whole = Access {
            pdn: qp.pdn,
            qpn,
            key: request.rkey,
            addr: request.remote_addr,
            len: request.total,
            rights,
        };
        let memory = self.backing.mrs.segment(&whole).map_err(|_| Nak::RemoteAccess)?;
        let mirrored = self.backing.mrs.mirrored(request.rkey);
        let inside = mirrored.is_none_or(|mirrored| mirrored.admits(&memory));
        inside.then_some(memory).ok_or(Nak::RemoteAccess)
    }

    /// Whether a piece of a write or a read goes on with what the message began with, else how it
    /// ends.
    #[inline]
    fn goes_on(&mut self, qpn: u32, request: &Request<'_>) -> Result<(), Outcome> {
        if request.len == request.total { Ok(()) } else { self.is_the_same(qpn, request) }
    }

    fn is_the_same(&mut self, qpn: u32, request: &Request<'_>) -> Result<(), Outcome> {
        let Some(qp) = self.qps.get_mut(&qpn) else { return Err(Outcome::NoAnswer) };
        match same_memory(&mut qp.own.stamp, request, || self.backing.mrs.stamp(request.rkey)) {
            Some(true) => Ok(()),
            Some(false) => Err(self.refuse(qpn, request, Nak::RemoteAccess)),
            None => Err(Outcome::NoAnswer),
        }
    }

    /// Copies a piece of a write to the memory that the message names.
    #[inline]
    pub(super) fn place(
        &self,
        request: &Request<'_>,
        target: Borrowed<'_>,
    ) -> Result<(), memory::Fault> {
        let at = u64::from(request.offset);
        match request.payload {
            Payload::Inline(bytes) | Payload::Piece(bytes) => memory::write(&[target], at, bytes),
            Payload::Reply(_) => Ok(()),
            Payload::Memory(source) => {
                memory::copy(&[target], at, source, at, u64::from(request.len))
            }
        }
    }

    pub(super) fn receive_write(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        if !self.is_in_order(qpn, request) {
            return Outcome::NoAnswer;
        }
        if let Err(outcome) = self.goes_on(qpn, request) {
            return outcome;
        }
        let tells = request.is_last() && request.immediate.is_some();
        if tells && let Err(outcome) = self.open_for_immediate(qpn, request) {
            return outcome;
        }
        if request.len > 0 {
            let target = match self.remote(qpn, request, access::REMOTE_WRITE) {
                Ok(target) => target,
                Err(nak) => return self.refuse(qpn, request, nak),
            };
            // Else it was placed before its owner was asked.
            if request.owner == Owner::Unasked && self.place(request, target).is_err() {
                return Outcome::LocalFault;
            }
            if let Some(task) = self.task(JobKind::Arrived, request, &target)
                && let Err(outcome) = self.owner_did(qpn, request, task)
            {
                return outcome;
            }
        } else if let Err(nak) = self.may_write(qpn, request) {
            return self.refuse(qpn, request, nak);
        }
        if tells {
            self.receive_done(qpn, request, wc_opcode::RECV_RDMA_WITH_IMM, request.total);
        } else if request.is_last() {
            self.counters.rx_messages += 1;
        }
        self.counters.rx_bytes += u64::from(request.len);
        Outcome::Done
    }

    /// Takes the receive of an immediate, before a byte of its piece is stored: what finds none is
    /// sent again (IBTA 9.7.5.2.8), and would be stored again under a program that has seen it.
    fn open_for_immediate(&mut self, qpn: u32, request: &Request<'_>) -> Result<(), Outcome> {
        // What is refused takes none.
        self.may_write(qpn, request).map_err(|nak| self.refuse(qpn, request, nak))?;
        // Its bytes go elsewhere: any receive will do.
        match self.open_receive(qpn, request.service, 0) {
            Opened::Taken => Ok(()),
            _ => Err(self.not_ready(qpn, request)),
        }
    }

    /// Whether a peer may write what it names; where that is nothing, whether it may write at all.
    fn may_write(&self, qpn: u32, request: &Request<'_>) -> Result<(), Nak> {
        if request.len > 0 {
            return self.remote(qpn, request, access::REMOTE_WRITE).map(drop);
        }
        let opens = self.qps.get(&qpn).is_some_and(|qp| qp.attrs.has(access::REMOTE_WRITE));
        opens.then_some(()).ok_or(Nak::RemoteAccess)
    }

    pub(super) fn serve_read(&mut self, qpn: u32, request: &Request<'_>) -> Outcome {
        if let Err(outcome) = self.goes_on(qpn, request) {
            return outcome;
        }
        if request.len > 0 {
            let source = match self.remote(qpn, request, access::REMOTE_READ) {
                Ok(source) => source,
                Err(nak) => return self.refuse(qpn, request, nak),
            };
            let source = match self.task(JobKind::Wanted, request, &source) {
                None => [source],
                Some(task) => match self.owner_did(qpn, request, task) {
                    Ok(_) => match self.remote_source(qpn, request) {
                        Ok(source) => [source],
                        Err(nak) => return self.refuse(qpn, request, nak),
                    },
                    Err(outcome) => return outcome,
                },
            };
            if take(request, &source).is_err() {
                return Outcome::LocalFault;
            }
        } else if !self.qps.get(&qpn).is_some_and(|qp| qp.attrs.has(access::REMOTE_READ)) {
            return self.refuse(qpn, request, Nak::RemoteAccess);
        }
        self.counters.tx_bytes += u64::from(request.len);
        if request.is_last() {
            self.counters.rx_messages += 1;
        }
        Outcome::Done
    }
}

/// Copies a piece of what is read to where it goes.
fn take(request: &Request<'_>, source: &[Borrowed<'_>]) -> Result<(), memory::Fault> {
    let at = u64::from(request.offset);
    match request.payload {
        Payload::Memory(target) => memory::copy(target, at, source, at, u64::from(request.len)),
        Payload::Reply(bytes) => {
            let bytes = &mut *bytes.borrow_mut();
            bytes.resize(request.len as usize, 0);
            memory::read(source, at, bytes)
        }
        Payload::Inline(_) | Payload::Piece(_) => Err(memory::Fault::Shape),
    }
}
