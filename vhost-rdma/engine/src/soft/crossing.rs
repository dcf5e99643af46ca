//! Requests that cross to another shard of the network, and those that come from one.
//!
//! A requester has some pieces of a queue pair under way (`requester/flight.rs`) and waits for the
//! answer to the first as it would for one of the wire: with the QP's timeout, but never less than
//! [`PATIENCE`], since a shard that is busy is not gone. A piece keeps its number until it is done.
//! The responder executes pieces in the order of their numbers, sends back what comes too early,
//! and answers what it answered before where it finds a number again. So an answer may be lost,
//! late or repeated, and nothing is executed twice, or before its turn.
//!
//! An owner of mirrored memory ([`super::mirror`]) has its part in what comes from elsewhere too:
//! the request is held here meanwhile.
//!
//! The bytes of an answer are placed by the requester's own shard, after its keys were looked at
//! again. A NIC that stands still takes none: its memory may be another driver's. It asks again
//! when it goes on.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::engine::{Engine, Execution};
use super::network::{Arrivals, View};
use super::nic::{NicState, SoftNic};
use super::nics::Nics;
use super::stream::Stream;
use super::{Nanos, mirror::PATIENCE};
use crate::link::{
    Answer, Arrived, Ask, Awaited, Bus, Link, Outcome, Owner, Parcel, Request, Service, Ticket,
    Token, is_multicast,
};
use crate::nic::budget::cost;
use crate::nic::qp::{Landed, State};

/// Time for what other shards ask and answer, of which each round has its part.
const PARCELS: Nanos = 25_000;

/// What becomes of a request that arrived.
enum Taken {
    /// It was executed, or cannot be.
    Over(Outcome),
    /// It was executed before.
    Again(Option<[u8; 8]>),
    /// It is none of what the queue pair waits for.
    Stale,
    /// It was sent before its turn, and others are to be executed before it.
    Early,
    /// Its NIC has come from another process, and runs when all of its network are there.
    Soon,
}

impl Stream {
    fn is_of(&self, token: &Token) -> bool {
        self.life == token.ticket.life
    }

    /// Whether this is the request that is to be executed next.
    fn check(&mut self, request: &Request<'_>, token: &Token, is_held: bool) -> Result<(), Taken> {
        const WINDOW: u32 = crate::nic::qp::WINDOW as u32;
        let Ticket { life, number } = token.ticket;
        if !self.is_of(token) {
            match (is_held, request.ahead) {
                (true, _) => return Err(Taken::Stale),
                // What begins a connection is not one that was sent before its turn.
                (false, true) => return Err(Taken::Early),
                // Its connection is new.
                (false, false) => *self = Self { life, next: number, ..Self::default() },
            }
        }
        match (self.next.wrapping_sub(number), self.found) {
            (0, _) if self.held == is_held => Ok(()),
            (1, Some(found)) => Err(Taken::Again(Some(found))),
            // The first of a window, and all that went ahead of it: none of them finds a word.
            (2.., Some(_))
                if self.next.wrapping_sub(number) <= WINDOW + 1 && !request.operation.fetches() =>
            {
                Err(Taken::Again(None))
            }
            _ if request.ahead && (1..=WINDOW).contains(&number.wrapping_sub(self.next)) => {
                Err(Taken::Early)
            }
            _ => Err(Taken::Stale),
        }
    }
}

impl Engine {
    /// Lets requests cross to other shards. Before there are NICs.
    pub(crate) fn set_bus(&mut self, bus: Bus) {
        self.networks.book = Some(bus.book());
        self.ways.set_bus(bus);
    }

    /// Something came from another shard.
    pub(crate) fn arrive(&mut self, parcel: Parcel) {
        if let Some(bus) = self.ways.bus() {
            bus.count_come(&parcel);
        }
        self.deal_with(parcel);
    }

    /// The same of one that was counted.
    pub(super) fn deal_with(&mut self, parcel: Parcel) {
        match parcel {
            Parcel::Wake { vni, gid, qpn } => match self.networks.holder(vni, &gid) {
                Some(nic) => self.wakes.push_back((nic, qpn)),
                None => self.ways.follow(self.networks.elsewhere(vni, &gid), parcel),
            },
            Parcel::WakeNic { nic, qpn } => self.wakes.push_back((nic, qpn)),
            parcel => {
                if let Some(bus) = self.ways.bus() {
                    bus.arrive(parcel);
                }
            }
        }
    }

    /// Lets requests go to peers that are no NICs of this process, and come from them. Beside a
    /// bus.
    pub(crate) fn set_wire(&mut self, wire: Box<dyn Link>) {
        self.ways.set_wire(wire);
    }

    /// What leaves for each shard.
    pub(crate) fn outgoing(&mut self) -> &mut [VecDeque<Parcel>] {
        self.ways.bus().map_or(&mut [], Bus::outgoing)
    }

    /// Has nothing new leave, so that NICs can be saved; true: nothing is under way any more.
    pub(crate) fn close_bus(&mut self) -> bool {
        self.ways.bus().is_none_or(|bus| {
            bus.close();
            bus.is_quiet()
        })
    }

    /// What answers of other shards say that no round has looked at.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn unheard(&self) -> Vec<Outcome> {
        self.ways.bus_ref().map_or_else(Vec::new, Bus::unheard)
    }

    /// Whether anything waits that came from another shard, or is on its way to one.
    pub(super) fn has_parcels(&self) -> bool {
        self.ways.has_work()
    }
}

impl<N: Nics> Execution<'_, N> {
    /// Executes what came from other shards and settles their answers, as far as there is time.
    pub(crate) fn serve_parcels(&mut self, now: Nanos) -> bool {
        if self.engine.ways.bus_ref().is_none() {
            return false;
        }
        let began = self.meter.now();
        let budget = &mut self.meter.budget_at(began, PARCELS);
        let mut found = false;
        while !budget.is_over(self.meter)
            && let Some(arrived) = self.engine.ways.next(now)
        {
            found = true;
            match arrived {
                Arrived::Expired(job, ask) => self.expire(job, ask, now),
                Arrived::Answer(answer) => self.settle_answer(answer, now),
                Arrived::Held(ask) => self.execute_ask(ask, true, now),
                Arrived::Ask(ask) => self.execute_ask(ask, false, now),
            }
        }
        if found {
            self.count_carried(began);
        }
        found
    }

    /// Says of the time since then whose it was: each NIC's part is as its charges are.
    fn count_carried(&mut self, began: Nanos) {
        let lasted = self.meter.now().saturating_sub(began);
        let mut carried = std::mem::take(&mut self.engine.carried);
        let all: Nanos = carried.iter().map(|(_, charged)| *charged).sum();
        for (nic, charged) in carried.drain(..) {
            let part = u128::from(lasted) * u128::from(charged) / u128::from(all.max(1));
            self.nics.count(nic, charged.max(u64::try_from(part).unwrap_or(lasted)));
        }
        self.engine.carried = carried;
    }

    fn execute_ask(&mut self, mut ask: Ask, is_held: bool, now: Nanos) {
        self.meter.charge(cost::REQUEST + cost::bytes(ask.size().into()));
        let before = self.meter.charged();
        let (vni, gid) = (ask.vni, ask.flow().dest_gid);
        let reply = RefCell::new(self.engine.ways.bus().map_or_else(Vec::new, Bus::spare));
        let target = self.engine.networks.holder(vni, &gid);
        if target.is_none()
            && !is_multicast(&gid)
            && let elsewhere @ Some(_) = self.engine.networks.elsewhere(vni, &gid)
        {
            return self.engine.ways.follow(elsewhere, Parcel::Ask(ask));
        }
        *self.serving = target;
        let Self { nics, engine: Engine { networks, ways, .. }, .. } = self;
        let mut arrivals = Arrivals { view: View { nics, networks }, vni };
        let request = ask.request(&reply);
        let taken = if is_multicast(&gid) {
            Taken::Over(ways.deliver(&mut arrivals, &request))
        } else if let Some(nic) = arrivals.view.ready_nic(target) {
            nic.now = now;
            nic.take_from_elsewhere(&request, ask.token, is_held)
        } else if arrivals.view.goes_on(target) {
            Taken::Soon
        } else {
            Taken::Over(Outcome::NoAnswer)
        };
        if let Some(id) = target {
            let charged = self.meter.charged().wrapping_sub(before);
            self.nics.account(id, charged);
            let carried = charged + cost::REQUEST + cost::bytes(ask.size().into());
            self.engine.carried.push((id, carried));
            let from = ask.flow().source_gid;
            if let Some(nic) = self.nic_mut(id) {
                nic.backing.talks.note(&from, carried);
            }
        }
        let mut reply = reply.into_inner();
        let token = ask.token;
        let outcome = match taken {
            Taken::Over(Outcome::Later(Awaited::Owner(job))) => {
                let until = now.saturating_add(PATIENCE);
                if !is_held {
                    self.engine.ways.answer(token, None, (reply, true));
                }
                // What goes to memory has been placed.
                if let Some(bus) = self.engine.ways.bus() {
                    bus.keep(ask.take_bytes());
                }
                self.engine.ways.waiting.hold(until, job, ask);
                return;
            }
            Taken::Over(Outcome::Partly(fanout)) => {
                ask.fanout = fanout;
                if let Some(bus) = self.engine.ways.bus() {
                    bus.keep(reply);
                }
                self.engine.ways.waiting.put_back(ask);
                return;
            }
            Taken::Soon => {
                if let Some(bus) = self.engine.ways.bus() {
                    bus.keep(reply);
                    bus.await_nic(Parcel::Ask(ask));
                }
                return;
            }
            Taken::Over(outcome) => Some(outcome),
            Taken::Again(found) => {
                reply.extend_from_slice(found.as_ref().map_or(&[], |found| &found[..]));
                Some(Outcome::Done)
            }
            Taken::Stale => None,
            Taken::Early => Some(Outcome::Full),
        };
        let outcome = outcome.filter(|_| ask.is_reliable());
        if let Some(bus) = self.engine.ways.bus() {
            bus.keep(ask.take_bytes());
        }
        if !is_held || outcome.is_some() {
            self.engine.ways.answer(token, outcome, (reply, !is_held));
        }
    }

    /// The owner that a request waits for has not done its part in time.
    ///
    /// It may still do it, and is not asked again: what is asked twice is done twice. So the
    /// request goes on to wait while the job is under way, whoever has given up at the other end.
    /// Its requester has a time limit of its own, and all that it says meanwhile is this request.
    /// An unreliable one is not said again, and is dropped.
    fn expire(&mut self, job: u64, ask: Ask, now: Nanos) {
        self.meter.charge(cost::TIMER);
        if let Some(nic) = self.engine.networks.holder(ask.vni, &ask.flow().dest_gid)
            && let Some(nic) = self.nic_mut(nic)
        {
            let is_asked = ask.is_reliable() && nic.is_asked(ask.key(), job);
            if !ask.is_reliable() {
                let message = (ask.token.ticket.life, ask.message());
                nic.lose_piece(ask.flow().dest_qpn, message);
            }
            if let Some(qp) = nic.qps.get_mut(&ask.flow().dest_qpn)
                && qp.own.stream.is_of(&ask.token)
            {
                if is_asked {
                    self.engine.ways.waiting.hold(now.saturating_add(PATIENCE), job, ask);
                    return;
                }
                qp.own.stream.held = false;
            }
        }
        if ask.is_reliable() {
            let nothing = (Vec::new(), false);
            self.engine.ways.answer(ask.token, Some(Outcome::NoAnswer), nothing);
        }
    }

    /// An owner has done a job that a request from elsewhere waits for, or could not.
    pub(super) fn owner_answered_elsewhere(&mut self, number: u64, owner: Owner) {
        self.engine.ways.waiting.owner_answered(number, owner);
    }

    fn settle_answer(&mut self, answer: Answer, now: Nanos) {
        let nic = answer.token.nic;
        if self.nics.seen(nic).is_none() {
            // It has moved. What it has under way was counted where it was sent.
            let seat = self.engine.ways.bus_ref().and_then(|bus| bus.seat(nic));
            let answer = Answer { gives_back: false, ..answer };
            return self.engine.ways.follow(seat, Parcel::Answer(answer));
        }
        let charged = cost::WAKE + cost::bytes(answer.bytes.len() as u64);
        self.meter.charge(charged);
        self.engine.carried.push((nic, charged));
        *self.serving = Some(nic);
        if let Some(outcome) = answer.outcome {
            self.answered(&answer.token, outcome, &answer.bytes, now);
        }
        if let Some(bus) = self.engine.ways.bus() {
            bus.keep(answer.bytes);
        }
    }

    /// What this answer says of the piece that a queue pair waits for, if it may take that now. Of
    /// a NIC that stands still it notes what must not be done twice, and a refusal: the responder
    /// says it once, and is in an error then.
    pub(super) fn awaits(&mut self, token: &Token, answer: (Outcome, &[u8])) -> Option<Outcome> {
        let nic = self.nic_mut(token.nic)?;
        let life = nic.life;
        let qp = nic.qps.get_mut(&token.qpn)?;
        let runs = matches!(qp.state, State::Rts | State::Sqd);
        let send = qp.send.as_mut().filter(|_| runs)?;
        let outcome = if send.crosses && send.ticket == token.ticket {
            answer.0
        } else if send.flight_landed(token.ticket, answer.0) {
            Outcome::Done
        } else {
            return None;
        };
        // A read that was asked for twice may be done once and refused then.
        let refused = matches!(send.landed, Some(Landed::Refused(_)));
        if life == NicState::Paused && !refused {
            let word = answer.1.first_chunk().copied().unwrap_or_default();
            send.landed = Landed::of(outcome, word).or(send.landed);
        }
        (life == NicState::Ready).then_some(outcome)
    }
}

impl SoftNic {
    /// Executes a request from another shard, if it has not been.
    fn take_from_elsewhere(&mut self, request: &Request<'_>, token: Token, is_held: bool) -> Taken {
        use crate::link::Responder as _;
        let qpn = request.flow.dest_qpn;
        let addressed = request.service == Service::Reliable
            && self
                .qps
                .get(&qpn)
                .is_some_and(|qp| qp.state.receives() && self.is_addressed(qp, request));
        if !addressed {
            return Taken::Over(self.receive(request));
        }
        let Some(qp) = self.qps.get_mut(&qpn) else { return Taken::Stale };
        match qp.own.stream.check(request, &token, is_held) {
            Ok(()) => {}
            // What is read again changes nothing.
            Err(Taken::Again(_)) if request.operation == crate::link::Operation::Read => {
                return Taken::Over(self.receive(request));
            }
            Err(taken) => return taken,
        }
        let outcome = self.receive(request);
        if let Some(qp) = self.qps.get_mut(&qpn) {
            let stream = &mut qp.own.stream;
            stream.held = matches!(outcome, Outcome::Later(_));
            if outcome == Outcome::Done {
                stream.next = stream.next.wrapping_add(1);
                stream.found = Some(request.payload.word());
            }
        }
        Taken::Over(outcome)
    }
}
