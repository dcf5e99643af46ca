//! The way to a peer, wherever it is: one link over the others.
//!
//! Who hands a request in knows neither shards nor hosts. An address that this shard holds is
//! reached by `local`; all others by the `bus`, if there are other shards. A datagram to a group
//! goes both ways, to the other shards first: once those have it, the rest is done here in steps.

use super::{
    Bus, Fabric, Fanout, Inbound, Link, Local, Outcome, PIECE, Parcel, Request, Service, Ticket,
    Token, is_multicast,
};
use crate::Nanos;

/// See the module.
#[derive(Debug, Default)]
pub struct Ways {
    local: Local,
    bus: Option<Bus>,
}

impl Ways {
    /// Lets requests cross to other shards.
    pub fn set_bus(&mut self, bus: Bus) {
        self.bus = Some(bus);
    }

    /// The way to other shards, if there are any.
    pub const fn bus(&mut self) -> Option<&mut Bus> {
        self.bus.as_mut()
    }

    /// The same, to look at.
    #[must_use]
    pub const fn bus_ref(&self) -> Option<&Bus> {
        self.bus.as_ref()
    }

    /// Bytes of a piece of a connection's message, at most.
    #[inline]
    #[must_use]
    pub const fn mtu(&self) -> u32 {
        match &self.bus {
            Some(bus) => bus.mtu(),
            None => PIECE,
        }
    }

    /// Numbers a queue pair's requests, where a responder elsewhere has to know them.
    #[inline]
    pub fn number(&mut self, ticket: &mut Ticket) -> Ticket {
        let Some(bus) = &mut self.bus else { return Ticket { life: 0, number: 0 } };
        if ticket.life == 0 {
            ticket.life = bus.begin_life();
        }
        *ticket
    }

    /// Sends what came for a NIC that is not here after it.
    pub fn follow(&mut self, shard: Option<usize>, parcel: Parcel) {
        if let Some(bus) = &mut self.bus {
            bus.follow(shard, parcel);
        }
    }

    /// Brings a request that came from another shard to its responder, which is here.
    pub fn deliver(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Outcome {
        self.local.submit(fabric, request)
    }
}

impl Link for Ways {
    #[inline]
    fn submit(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Outcome {
        match &mut self.bus {
            None => self.local.submit(fabric, request),
            Some(bus) => choose((bus, &mut self.local), fabric, request),
        }
    }

    fn ask_ahead(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Option<u64> {
        self.local.ask_ahead(fabric, request)
    }

    fn poll(&mut self, now: Nanos) -> Option<Inbound> {
        self.bus.as_mut()?.poll(now)
    }

    fn deadline(&self) -> Option<Nanos> {
        self.bus.as_ref()?.deadline()
    }

    fn answer(&mut self, token: Token, outcome: Option<Outcome>, given: (Vec<u8>, bool)) {
        if let Some(bus) = &mut self.bus {
            bus.answer(token, outcome, given);
        }
    }
}

fn choose(
    (bus, local): (&mut Bus, &mut Local),
    fabric: &mut dyn Fabric,
    request: &Request<'_>,
) -> Outcome {
    let Some(vni) = fabric.network(request.flow.source) else { return Outcome::NoAnswer };
    let gid = &request.flow.dest_gid;
    if request.service == Service::Datagram && is_multicast(gid) {
        let begins = request.fanout == Fanout::default();
        let sent = if begins { bus.submit(fabric, request) } else { Outcome::Done };
        return if sent == Outcome::Done { local.submit(fabric, request) } else { sent };
    }
    if !request.crossed && fabric.holds(vni, gid) {
        return local.submit(fabric, request);
    }
    bus.submit(fabric, request)
}
