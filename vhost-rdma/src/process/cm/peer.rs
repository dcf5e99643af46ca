//! What connection managers say to each other (IBTA 12.9): requests, answers, ends, and patience.
//!
//! Datagrams may be lost, come twice or late, and lie. A message is believed only from the address
//! that the connection is with, and its IP header only if it names the addresses that the datagram
//! itself came by. What waits for an answer is sent again at growing intervals; who is asked again
//! says again what it said. Identifiers whose program is gone live on until their peer knows, and
//! never longer than that patience.
//!
//! TIMEWAIT is there for programs that wait for its end: between NICs of one daemon no packet of an
//! old connection is under way, so no queue pair number has to rest (IBTA 12.9.8.4).

use super::id::{Kind, Said, Space, State};
use super::machine::{Machine, Whose};
use crate::cm::Mad;
use crate::cm::message::{Ends, Message, Offer, Parsed, build, parse, reason};
use crate::nic::{Nanos, Status};

const MILLI: Nanos = 1_000_000;
/// The longest wait for an answer.
const LONGEST: Nanos = 4000 * MILLI;
/// How long TIMEWAIT is.
const TIMEWAIT: Nanos = 1000 * MILLI;
/// The service timeout of our MRAs: 4.096 us << 22, some seventeen seconds; who is asked again
/// meanwhile says it again.
const SERVICE: u8 = 22;
/// `-ETIMEDOUT`.
const TIMED_OUT: i32 = -110;
/// Statuses of a SIDR_REP (IBTA 12.11.3).
const SIDR_UNSUPPORTED: u8 = 1;
const SIDR_REJECT: u8 = 2;

/// A datagram, and a number for the NIC that it came from.
type From<'a> = (&'a Mad, u64);

/// An offer as the other side sees it: what one begins, the other serves.
fn seen(offer: &Offer) -> Offer {
    Offer {
        responder_resources: offer.initiator_depth,
        initiator_depth: offer.responder_resources,
        ..*offer
    }
}

impl Machine {
    /// Sends a message of an identifier to its peer.
    pub(super) fn tell(&mut self, number: u32, message: &Message) {
        let session = self.session_of(self.ids.get(&number).and_then(|id| id.channel));
        self.tell_by(session.map_or(Whose::Nobody, Whose::Session), number, message);
    }

    fn tell_by(&mut self, whose: Whose, number: u32, message: &Message) {
        let Some(id) = self.ids.get(&number) else { return };
        let (way, class) = ((id.local, id.peer), id.traffic_class);
        self.send(whose, way, class, build(message, number));
    }

    /// Answers a datagram that belongs to nothing.
    fn reply(&mut self, (mad, whose): From<'_>, message: &Message) {
        let mut bytes = build(message, 0);
        // An answer is of its request's transaction.
        bytes[8..16].copy_from_slice(&mad.bytes[8..16]);
        self.send(Whose::Peer(whose), (mad.dest, mad.source), mad.traffic_class, bytes);
    }

    /// A datagram has come, from this NIC.
    pub(super) fn datagram(&mut self, from: From<'_>, now: Nanos) {
        let mad = from.0;
        let message = match parse(&mad.bytes) {
            Parsed::Message(message) => message,
            Parsed::Unserved(unserved) => {
                return self.reply(from, &rejection(unserved.local, reason::INVALID_SERVICE));
            }
            Parsed::Other => return,
        };
        match message {
            Message::Req { local, ends, offer, mtu, private } => {
                self.request(from, (local, ends, Some((offer, mtu))), private, now);
            }
            Message::SidrReq { id, space, ends, private } => {
                let Some(space) = Space::of(space) else { return };
                self.service_request(from, (id, space, ends), private);
            }
            Message::Rep { local, remote, offer, private } => {
                self.reply_came(from, (local, remote), offer, private);
            }
            Message::Rtu { remote, .. } => {
                if self.of_peer(mad, remote) == Some(State::Answered) {
                    self.established(remote);
                }
            }
            Message::Rej { local, remote, reason, private, .. } => {
                let found = (remote != 0).then_some(remote);
                let found =
                    found.or_else(|| self.by_peer.get(&(mad.source, local, false)).copied());
                if let Some(number) = found {
                    self.rejected(mad, number, reason, private);
                }
            }
            Message::Dreq { local, remote, qpn } => self.leaves(from, (local, remote, qpn), now),
            Message::Drep { remote, .. } => {
                if self.of_peer(mad, remote) == Some(State::Leaving) {
                    self.ended(remote, now);
                }
            }
            Message::Mra { remote, of, timeout, .. } => {
                let waits = matches!(
                    (self.of_peer(mad, remote), of),
                    (Some(State::Asked), 0) | (Some(State::Answered), 1)
                );
                if waits {
                    let wait = 4096u64 << timeout.min(24);
                    self.arm(remote, now.saturating_add(wait));
                }
            }
            Message::SidrRep { id, status, qpn, qkey, private } => {
                self.service_reply(mad, id, status, (qpn, qkey, private));
            }
        }
    }

    /// The state of an identifier, if this came from its peer.
    fn of_peer(&self, mad: &Mad, number: u32) -> Option<State> {
        let id = self.ids.get(&number)?;
        (id.peer == mad.source && id.local == mad.dest && !id.space.is_datagram())
            .then_some(id.state)
    }

    /// Somebody who asks again is told again.
    fn repeat(&mut self, number: u32, whose: u64) {
        let Some(id) = self.ids.get(&number) else { return };
        let remote = id.remote;
        let again = match id.state {
            State::Wanted if !id.space.is_datagram() => {
                Some(Message::Mra { local: number, remote, of: 0, timeout: SERVICE })
            }
            State::Wanted => None,
            _ => id.last.clone(),
        };
        if let Some(message) = again {
            self.tell_by(Whose::Peer(whose), number, &message);
        }
    }

    /// Makes an identifier for a request, if its listener has room.
    fn take_in(
        &mut self,
        (mad, whose): From<'_>,
        listener: u32,
        ends: &Ends,
    ) -> Result<u32, Status> {
        let id = self.ids.get(&listener).ok_or(Status::NOENT)?;
        let (space, channel) = (id.space, id.channel.ok_or(Status::NOENT)?);
        let full = id.unanswered >= id.backlog;
        let session = self.session_of(Some(channel)).ok_or(Status::NOENT)?;
        if !self.has_room_for(session, whose) || full && !self.make_room(listener, whose) {
            return Err(Status::BUSY);
        }
        let number = self.create(channel, space)?;
        let Some(id) = self.ids.get_mut(&number) else { return Err(Status::NOMEM) };
        id.state = State::Wanted;
        id.listener = Some(listener);
        // That of who asks, as in the kernel; the listener's is of its own messages.
        id.traffic_class = mad.traffic_class;
        (id.local, id.peer) = (mad.dest, mad.source);
        id.own = Some(super::layout::socket_address(&ends.dest, ends.dest_port));
        id.dest = Some(super::layout::socket_address(&ends.source, ends.source_port));
        self.opens(number, whose);
        Ok(number)
    }

    fn request(
        &mut self,
        from: From<'_>,
        (remote, ends, offered): (u32, Ends, Option<(Offer, u8)>),
        private: Vec<u8>,
        now: Nanos,
    ) {
        let mad = from.0;
        let Some((offer, mtu)) = offered else { return };
        if let Some(&known) = self.by_peer.get(&(mad.source, remote, false)) {
            return self.repeat(known, from.1);
        }
        if (ends.source, ends.dest) != (mad.source, mad.dest) {
            return self.reply(from, &rejection(remote, reason::INVALID_GID));
        }
        // A queue pair has one connection: its owner has forgotten the one that is known here (IBTA
        // 12.9.8.3.1).
        if let Some(&stale) = self.by_qpn.get(&(mad.source, offer.qpn)) {
            self.reply(from, &rejection(remote, reason::STALE));
            let _ = self.disconnect(stale, now);
            return;
        }
        let Some(listener) = self.listener(Space::Tcp, &mad.dest, ends.dest_port) else {
            return self.reply(from, &rejection(remote, reason::INVALID_SERVICE));
        };
        let number = match self.take_in(from, listener, &ends) {
            Ok(number) => number,
            // It asks again, and there may be room then.
            Err(Status::BUSY) => return,
            Err(_) => return self.reply(from, &rejection(remote, reason::NO_RESOURCES)),
        };
        let Some(id) = self.ids.get_mut(&number) else { return };
        id.remote = remote;
        id.theirs = offer;
        id.mtu = mtu;
        let theirs = seen(&offer);
        // The queue pair here begins where the peer is told to.
        id.mine = Offer { psn: number & 0xff_ffff, qpn: 0, ..theirs };
        self.by_peer.insert((mad.source, remote, false), number);
        self.by_qpn.insert((mad.source, offer.qpn), number);
        self.requested(listener, number, Said::Connection(theirs, private));
    }

    fn service_request(
        &mut self,
        from: From<'_>,
        (remote, space, ends): (u32, Space, Ends),
        private: Vec<u8>,
    ) {
        let mad = from.0;
        if let Some(&known) = self.by_peer.get(&(mad.source, remote, true)) {
            return self.repeat(known, from.1);
        }
        let refused =
            |status| Message::SidrRep { id: remote, status, qpn: 0, qkey: 0, private: Vec::new() };
        let true_ends = (ends.source, ends.dest) == (mad.source, mad.dest);
        let listener = self.listener(space, &mad.dest, ends.dest_port).filter(|_| true_ends);
        let Some(listener) = listener else {
            return self.reply(from, &refused(SIDR_UNSUPPORTED));
        };
        let number = match self.take_in(from, listener, &ends) {
            Ok(number) => number,
            Err(Status::BUSY) => return,
            Err(_) => return self.reply(from, &refused(SIDR_REJECT)),
        };
        if let Some(id) = self.ids.get_mut(&number) {
            id.remote = remote;
        }
        self.by_peer.insert((mad.source, remote, true), number);
        let said = Said::Datagram(0, 0, self.way_of(number), private);
        self.requested(listener, number, said);
    }

    /// A REP: the peer takes the connection.
    fn reply_came(
        &mut self,
        from: From<'_>,
        (local, number): (u32, u32),
        offer: Offer,
        private: Vec<u8>,
    ) {
        let (mad, whose) = from;
        match self.of_peer(mad, number) {
            Some(State::Asked) => {
                self.calm(number);
                let Some(id) = self.ids.get_mut(&number) else { return };
                id.remote = local;
                id.theirs = offer;
                id.state = State::Heard;
                let theirs = seen(&offer);
                id.mine.responder_resources = theirs.responder_resources;
                id.mine.initiator_depth = theirs.initiator_depth;
                self.by_peer.insert((mad.source, local, false), number);
                self.by_qpn.insert((mad.source, offer.qpn), number);
                self.happened(number, Kind::Response, 0, Said::Connection(theirs, private));
            }
            Some(State::Heard) => {
                let message =
                    Message::Mra { local: number, remote: local, of: 1, timeout: SERVICE };
                self.tell_by(Whose::Peer(whose), number, &message);
            }
            Some(State::Up) => self.repeat(number, whose),
            // Who asked is gone, and cannot be told by it.
            None => {
                let message = Message::Rej {
                    local: number,
                    remote: local,
                    of_rep: true,
                    reason: reason::INVALID_ID,
                    private: Vec::new(),
                };
                self.reply(from, &message);
            }
            Some(_) => {}
        }
    }

    fn service_reply(
        &mut self,
        mad: &Mad,
        number: u32,
        status: u8,
        (qpn, qkey, private): (u32, u32, Vec<u8>),
    ) {
        let Some(id) = self.ids.get_mut(&number) else { return };
        let asked = id.state == State::Asked && id.space.is_datagram();
        if !asked || (id.peer, id.local) != (mad.source, mad.dest) {
            return;
        }
        id.state = State::Over;
        self.calm(number);
        // Also who refuses may say something.
        let said = Said::Datagram(qpn, qkey, self.way_of(number), private);
        let kind = if status == 0 { Kind::Established } else { Kind::Unreachable };
        self.happened(number, kind, status.into(), said);
        self.forget_if_orphan(number);
    }

    /// The peer's RTU came, or data that is as good.
    pub(super) fn established(&mut self, number: u32) {
        self.calm(number);
        if let Some(id) = self.ids.get_mut(&number) {
            id.state = State::Up;
            self.opened(number);
            self.happened(number, Kind::Established, 0, Said::Connection(Offer::default(), vec![]));
        }
    }

    fn rejected(&mut self, mad: &Mad, number: u32, reason: u16, private: Vec<u8>) {
        let known = matches!(
            self.of_peer(mad, number),
            Some(
                State::Asked
                    | State::Wanted
                    | State::Answered
                    | State::Heard
                    | State::Up
                    | State::Leaving
            )
        );
        if !known {
            return;
        }
        self.over(number);
        let said = Said::Connection(Offer::default(), private);
        self.happened(number, Kind::Rejected, reason.into(), said);
        self.forget_if_orphan(number);
    }

    /// A DREQ: the peer hangs up. It is answered whatever is known here, so that it finds its end.
    fn leaves(&mut self, from: From<'_>, (local, number, qpn): (u32, u32, u32), now: Nanos) {
        let mad = from.0;
        let known = self.of_peer(mad, number);
        let mine = self.ids.get(&number).map(|id| (id.mine.qpn, id.remote));
        if known.is_some() && mine != Some((qpn, local)) {
            return;
        }
        self.reply(from, &Message::Drep { local: number, remote: local });
        if matches!(known, Some(State::Answered | State::Up | State::Leaving | State::Heard)) {
            self.ended(number, now);
        }
    }

    /// Nothing is said again.
    fn calm(&mut self, number: u32) {
        self.disarm(number);
        if let Some(id) = self.ids.get_mut(&number) {
            id.again = None;
        }
    }

    /// A connection has ended.
    fn ended(&mut self, number: u32, now: Nanos) {
        self.calm(number);
        self.unlink(number);
        let Some(id) = self.ids.get_mut(&number) else { return };
        id.state = State::Waiting;
        if id.channel.is_none() {
            return self.forget(number);
        }
        self.happened(number, Kind::Disconnected, 0, Said::Connection(Offer::default(), vec![]));
        self.arm(number, now.saturating_add(TIMEWAIT));
    }

    /// Nothing comes of it any more.
    fn over(&mut self, number: u32) {
        self.calm(number);
        self.unlink(number);
        if let Some(id) = self.ids.get_mut(&number) {
            id.state = State::Over;
        }
    }

    fn forget_if_orphan(&mut self, number: u32) {
        if self.ids.get(&number).is_some_and(|id| id.channel.is_none()) {
            self.forget(number);
        }
    }

    /// Refuses what the peer asks for, or offers.
    pub(super) fn refuse(
        &mut self,
        number: u32,
        reason: u16,
        private: Vec<u8>,
    ) -> Result<(), Status> {
        let id = self.ids.get_mut(&number).ok_or(Status::NOENT)?;
        let datagram = id.space.is_datagram();
        if private.len() > if datagram { 136 } else { 148 } {
            return Err(Status::INVAL);
        }
        let (remote, of_rep) = (id.remote, id.state == State::Heard);
        if id.state != State::Wanted && !of_rep {
            return Err(Status::INVAL);
        }
        let message = if datagram {
            Message::SidrRep { id: remote, status: SIDR_REJECT, qpn: 0, qkey: 0, private }
        } else {
            Message::Rej { local: number, remote, of_rep, reason, private }
        };
        id.last = Some(message.clone());
        id.state = State::Over;
        self.tell(number, &message);
        Ok(())
    }

    /// Hangs up.
    pub(super) fn disconnect(&mut self, number: u32, now: Nanos) -> Result<(), Status> {
        let id = self.ids.get_mut(&number).ok_or(Status::NOENT)?;
        match id.state {
            _ if id.space.is_datagram() => return Err(Status::INVAL),
            State::Up | State::Answered | State::Heard => {
                id.state = State::Leaving;
                let (remote, qpn) = (id.remote, id.theirs.qpn);
                self.tell_again(number, Message::Dreq { local: number, remote, qpn }, now);
            }
            State::Leaving | State::Waiting | State::Over => {}
            _ => return Err(Status::INVAL),
        }
        Ok(())
    }

    /// An identifier's program has let go of it: the peer is told as its state wants it, and what
    /// needs an answer stays until that comes.
    pub(super) fn leave(&mut self, number: u32, now: Nanos) {
        let Some(id) = self.ids.get(&number) else { return };
        match id.state {
            State::Asked if !id.space.is_datagram() => {
                // The peer may know it by our number alone.
                let message = Message::Rej {
                    local: number,
                    remote: 0,
                    of_rep: false,
                    reason: reason::TIMEOUT,
                    private: Vec::new(),
                };
                self.tell(number, &message);
                self.forget(number);
            }
            State::Wanted | State::Heard => {
                // It is in a state to be refused, and says nothing that is too long.
                let _ = self.refuse(number, reason::CONSUMER, Vec::new());
                self.forget(number);
            }
            State::Up | State::Answered => {
                let _ = self.disconnect(number, now);
                if !self.may_stay() {
                    // Its peer was told, and is not told again.
                    self.forget(number);
                }
            }
            State::Leaving => {}
            _ => self.forget(number),
        }
    }

    /// Does what is due by now: one thing for each identifier.
    pub(super) fn tick(&mut self, now: Nanos) {
        while let Some(&(at, number)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            if let Some(id) = self.ids.get_mut(&number) {
                id.deadline = None;
                self.due(number, now);
            }
        }
    }

    fn due(&mut self, number: u32, now: Nanos) {
        let Some(id) = self.ids.get_mut(&number) else { return };
        if id.state == State::Waiting {
            id.state = State::Over;
            self.happened(number, Kind::TimewaitExit, 0, Said::Nothing);
            return;
        }
        let Some(again) = &mut id.again else { return };
        if again.left > 1 {
            again.left -= 1;
            again.wait = again.wait.saturating_mul(2).min(LONGEST);
            let (message, wait) = (again.message.clone(), again.wait);
            self.tell(number, &message);
            return self.arm(number, now.saturating_add(wait));
        }
        match id.state {
            State::Leaving => self.ended(number, now),
            _ => {
                self.over(number);
                self.happened(number, Kind::Unreachable, TIMED_OUT, Said::Nothing);
                self.forget_if_orphan(number);
            }
        }
    }
}

/// A REJ of a REQ that nobody here will serve.
fn rejection(remote: u32, reason: u16) -> Message {
    Message::Rej { local: 0, remote, of_rep: false, reason, private: Vec::new() }
}
