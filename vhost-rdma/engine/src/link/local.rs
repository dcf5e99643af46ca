//! The link between NICs of one shard: no packets, no acknowledgements, one copy.
//!
//! The responder runs on the requester's thread, which is sound without locks because both ends
//! belong to the caller's shard. Delivery is in order and never loses anything, so what is left of
//! the protocol is what verbs programs can see: receiver not ready, refusal, and silence.

use super::{
    DELIVERIES, Fabric, Fanout, Flow, Inbound, Link, Outcome, Request, Service, Token, is_multicast,
};
use crate::Nanos;

/// See the module.
#[derive(Debug, Default)]
pub struct Local;

impl Link for Local {
    #[inline]
    fn submit(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Outcome {
        if request.service == Service::Datagram && is_multicast(&request.flow.dest_gid) {
            return multicast(fabric, request);
        }
        let outcome = fabric
            .responder(request.flow.source, &request.flow.dest_gid)
            .map_or(Outcome::NoAnswer, |responder| responder.receive(request));
        match (request.service, outcome) {
            // Nobody tells the sender of an unreliable message what became of it; its own memory is
            // its own matter.
            (Service::Unreliable | Service::Datagram, outcome)
                if !matches!(outcome, Outcome::LocalFault | Outcome::Later(_)) =>
            {
                Outcome::Done
            }
            _ => outcome,
        }
    }

    fn ask_ahead(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Option<u64> {
        fabric.responder(request.flow.source, &request.flow.dest_gid)?.ask_ahead(request)
    }

    /// Both ends are here: nothing ever comes in.
    fn poll(&mut self, _: Nanos) -> Option<Inbound> {
        None
    }

    fn has_work(&self) -> bool {
        false
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }

    fn answer(&mut self, _: Token, _: Option<Outcome>, _: (Vec<u8>, bool)) {}
}

/// Gives a datagram to some members of its group. Who joins or leaves meanwhile may get it or not,
/// as on a wire.
fn multicast(fabric: &mut dyn Fabric, request: &Request<'_>) -> Outcome {
    let Flow { source, dest_gid, .. } = *request.flow;
    let Fanout { mut member, mut queue } = request.fanout;
    let mut room = DELIVERIES;
    while let Some(nic) = fabric.member(source, &dest_gid, member as usize) {
        // Also where nobody listens: the look costs something.
        let (reached, faulted) =
            nic.map_or((0, false), |nic| nic.receive_group(request, queue, room));
        if faulted {
            return Outcome::LocalFault;
        }
        if reached >= room {
            return Outcome::Partly(Fanout { member, queue: queue + reached });
        }
        room = (room - reached).saturating_sub(1);
        (member, queue) = (member + 1, 0);
        if room == 0 {
            return Outcome::Partly(Fanout { member, queue });
        }
    }
    Outcome::Done
}
