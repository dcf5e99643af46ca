//! The way to a peer, wherever it is: one link over the others.
//!
//! Who hands a request in knows neither shards nor hosts. An address that this shard holds is
//! reached by `local`; all others by the `bus`, if there are other shards. A datagram to a group
//! goes both ways, to the other shards first: once those have it, the rest is done here in steps.
//! What no shard holds is brought to the wire, if there is one. It stands beside a bus, since both
//! ask that queue pairs number what they send.
//!
//! What comes in from any of them is handed out here, with what waited ([`Waiting`]): first what is
//! over, then what can be gone on with, then what the links bring, by turns.

use super::{
    Answer, Ask, Bus, Fabric, Fanout, Inbound, Link, Local, OUTSIDE, Outcome, PIECE, Parcel,
    Request, Service, Ticket, Token, Waiting, is_multicast,
};
use crate::Nanos;

/// See the module.
#[derive(Debug, Default)]
pub struct Ways {
    local: Local,
    bus: Option<Bus>,
    wire: Option<Box<dyn Link>>,
    /// The wire is asked before the bus.
    wire_first: bool,
    /// Requests that came in and wait.
    pub waiting: Waiting,
}

/// What came in, or is over by now.
#[derive(Debug)]
pub enum Arrived {
    /// A request of a NIC that is here was answered.
    Answer(Answer),
    /// A peer that is no NIC here asks for something.
    Ask(Ask),
    /// The owner of memory that a request waits for has answered; it is to be gone on with.
    Held(Ask),
    /// That owner has not done the job of this number in time.
    Expired(u64, Ask),
}

impl From<Inbound> for Arrived {
    fn from(inbound: Inbound) -> Self {
        match inbound {
            Inbound::Answer(answer) => Self::Answer(answer),
            Inbound::Ask(ask) => Self::Ask(ask),
        }
    }
}

impl Ways {
    /// Lets requests go to peers that are no NICs of this process, and come from them. Beside a
    /// bus.
    pub fn set_wire(&mut self, wire: Box<dyn Link>) {
        self.wire = Some(wire);
    }

    /// The next of what came in, or is over by now.
    pub fn next(&mut self, now: Nanos) -> Option<Arrived> {
        if let Some((job, ask)) = self.waiting.take_due(now) {
            return Some(Arrived::Expired(job, ask));
        }
        if let Some(ask) = self.waiting.next_ready() {
            return Some(Arrived::Held(ask));
        }
        if let Some(ask) = self.waiting.next_begun() {
            return Some(Arrived::Ask(ask));
        }
        self.poll(now).map(Arrived::from)
    }

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
            Some(bus) => choose((bus, &mut self.local, &mut self.wire), fabric, request),
        }
    }

    fn ask_ahead(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Option<u64> {
        self.local.ask_ahead(fabric, request)
    }

    fn poll(&mut self, now: Nanos) -> Option<Inbound> {
        let Self { bus, wire, wire_first, .. } = self;
        let Some(wire) = wire else { return bus.as_mut()?.poll(now) };
        *wire_first = !*wire_first;
        let mut bus = || bus.as_mut()?.poll(now);
        if *wire_first { wire.poll(now).or_else(bus) } else { bus().or_else(|| wire.poll(now)) }
    }

    fn has_work(&self) -> bool {
        self.waiting.has_work()
            || self.bus.as_ref().is_some_and(Link::has_work)
            || self.wire.as_ref().is_some_and(|wire| wire.has_work())
    }

    fn deadline(&self) -> Option<Nanos> {
        let bus = self.bus.as_ref().and_then(Link::deadline);
        let wire = self.wire.as_ref().and_then(|wire| wire.deadline());
        [bus, wire, self.waiting.deadline()].into_iter().flatten().min()
    }

    fn answer(&mut self, token: Token, outcome: Option<Outcome>, given: (Vec<u8>, bool)) {
        match (&mut self.wire, &mut self.bus) {
            (Some(wire), _) if token.shard == OUTSIDE => wire.answer(token, outcome, given),
            (_, Some(bus)) => bus.answer(token, outcome, given),
            (_, None) => {}
        }
    }
}

fn choose(
    (bus, local, wire): (&mut Bus, &mut Local, &mut Option<Box<dyn Link>>),
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
    match wire {
        Some(wire) if !bus.reaches(vni, gid) => wire.submit(fabric, request),
        _ => bus.submit(fabric, request),
    }
}
