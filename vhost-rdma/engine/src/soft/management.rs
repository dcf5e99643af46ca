//! QP 1 of a NIC whose driver has none: management datagrams that the driver gets and sends without
//! a queue pair.
//!
//! A guest's kernel makes QP 1, and its connection manager speaks through that. The driver of a NIC
//! for processes is the daemon itself (`process`), whose connection manager is no process and has
//! no rings. So what is for QP 1 goes to the port, and what it says enters here as if QP 1 had sent
//! it: under an address that the NIC holds now, to the NIC's own network, and 256 bytes long (IBTA
//! 13.4.2). Nobody else can send from QP 1 here, as only the house makes such jobs.

use virtio_rdma_abi::GSI_QPN;

use super::engine::{Engine, Execution};
use super::network::View;
use super::nic::{NicState, SoftNic};
use super::nics::Nics;
use crate::cm::{MAD_LEN, Mad};
use crate::link::{
    Fanout, Flow, Gid, Operation, Outcome, Owner, Payload, Request, Service, Ticket,
};
use crate::link::{Link as _, NicId};
use crate::memory;
use crate::nic::budget::cost;
use crate::nic::qp::attrs::GSI_QKEY;

/// Hops of a datagram that leaves no host.
const HOP_LIMIT: u8 = 64;

/// Whether this is for QP 1, by the rules for datagrams, and from one: a process that could say
/// what connection managers say would speak for the others of its NIC.
fn is_management(request: &Request<'_>) -> bool {
    (request.flow.source_qpn, request.flow.dest_qpn) == (GSI_QPN, GSI_QPN)
        && request.service == Service::Datagram
        && request.operation == Operation::Send
        && request.qkey == GSI_QKEY
        && (request.total as usize, request.len as usize) == (MAD_LEN, MAD_LEN)
}

impl SoftNic {
    /// A request for a queue pair that there is not.
    #[cold]
    pub(super) fn unheld(&mut self, request: &Request<'_>) -> Outcome {
        if !is_management(request) {
            return self.dropped(request);
        }
        let mut bytes = [0; MAD_LEN];
        match request.payload {
            Payload::Inline(sent) | Payload::Piece(sent) => {
                for (to, from) in bytes.iter_mut().zip(sent) {
                    *to = *from;
                }
            }
            Payload::Memory(source) => {
                if memory::read(source, 0, &mut bytes).is_err() {
                    return Outcome::LocalFault;
                }
            }
            Payload::Reply(_) => return self.dropped(request),
        }
        self.meter.charge(cost::DELIVERY + cost::bytes(MAD_LEN as u64));
        if self.outbox.management(request.flow, &bytes) {
            Outcome::Done
        } else {
            self.dropped(request)
        }
    }
}

impl<N: Nics> Execution<'_, N> {
    /// Sends a datagram from QP 1 of a NIC that has none; false if it left not: the NIC is not
    /// ready, or does not hold the address.
    pub(crate) fn send_management(&mut self, id: NicId, mad: &Mad) -> bool {
        let Some(nic) = self.nic_mut(id) else { return false };
        let holds = nic.gids.iter().flatten().any(|gid| *gid == mad.source);
        if nic.life != NicState::Ready || !holds || nic.qps.contains_key(&GSI_QPN) {
            return false;
        }
        nic.meter.charge(cost::REQUEST + cost::bytes(MAD_LEN as u64));
        let flow = Flow {
            source: id,
            source_qpn: GSI_QPN,
            source_gid: mad.source,
            source_mac: nic.settings.mac,
            dest_gid: mad.dest,
            dest_qpn: GSI_QPN,
            traffic_class: mad.traffic_class,
            hop_limit: HOP_LIMIT,
            sl: mad.sl,
        };
        let length = crate::link::MAD_LEN;
        let request = Request {
            flow: &flow,
            service: Service::Datagram,
            operation: Operation::Send,
            payload: Payload::Inline(&mad.bytes),
            total: length,
            offset: 0,
            message: 0,
            len: length,
            remote_addr: 0,
            rkey: 0,
            immediate: None,
            invalidate: None,
            solicited: false,
            operands: [0; 2],
            qkey: GSI_QKEY,
            fanout: Fanout::default(),
            owner: Owner::Unasked,
            ticket: Ticket::default(),
            crossed: false,
            ahead: false,
        };
        let Self { nics, engine: Engine { networks, ways, .. }, .. } = self;
        ways.submit(&mut View { nics, networks }, &request);
        true
    }

    /// Whether a NIC of this NIC's network holds an address now.
    pub(crate) fn reaches(&self, id: NicId, gid: &Gid) -> bool {
        let nic = self.nics.seen(id);
        nic.is_some_and(|nic| self.engine.networks.reaches(nic.settings.vni, gid))
    }
}
