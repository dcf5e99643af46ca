//! What a connection manager has: channels, identifiers, timers, and what waits to be told.
//!
//! An identifier belongs to a channel, a channel to a session, and a command names only those of
//! its own session. What a program may have is counted (identifiers, groups, events that it has not
//! taken) and charged to the NIC's account, so that no request of a peer and no program can make
//! this grow without bound. Each command is a bounded amount of work.
//!
//! Whatever has an end is shared by whose it is (`Whose`, `fair`): who takes all that there is gets
//! no more than half of it, and who comes then finds some.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rustc_hash::FxHashMap;

use super::fair::Fair;
use super::id::{Again, Event, Id, Kind, Said, Space};
use crate::cm::Mad;
use crate::cm::message::Message;
use crate::link::Gid;
use crate::memory::Account;
use crate::nic::{Nanos, Status};
use crate::process::events::Bell;

/// Identifiers of a NIC, and of a session.
const IDS: usize = 8192;
const SESSION_IDS: u32 = 1024;
/// Identifiers whose programs are gone and whose peers have yet to answer; beyond, they are told
/// once.
const ORPHANS: u32 = 1024;
/// What is kept for an identifier, its events included.
const ID: u64 = 2048;
/// Datagrams that wait to be sent; what comes beyond is lost, as on a wire.
const SENDS: usize = 512;
/// The first wait for an answer.
const FIRST: Nanos = 250_000_000;
/// How often a request is said, and an end.
const TRIES: u32 = 15;
const END_TRIES: u32 = 8;

/// Whose something is that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Whose {
    /// A session's.
    Session(u64),
    /// An answer to a peer's NIC.
    Peer(u64),
    /// Of programs that are gone.
    Nobody,
}

/// A channel of events.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) session: u64,
    pub(super) bell: Bell,
    pub(super) events: VecDeque<Event>,
    /// Requests of peers, which wait for each other by whose they are and for nothing else.
    pub(super) requests: Fair<u64, Event>,
    /// Events that the session has not put a token of into the process's channel.
    pub(super) untold: u32,
    pub(super) ids: u32,
}

/// Who gives a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asker {
    pub(super) session: u64,
    pub(super) channel: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) guid: [u8; 8],
    pub(super) gids: Vec<Gid>,
    account: Account,
    pub(super) channels: BTreeMap<u32, Channel>,
    pub(super) ids: FxHashMap<u32, Id>,
    /// The last number that was given to a channel, an identifier or a group.
    pub(super) last: u32,
    pub(super) sessions: FxHashMap<u64, u32>,
    /// Identifiers that are bound to a port.
    pub(super) ports: BTreeMap<(Space, u16), Vec<u32>>,
    /// Whose a group is.
    pub(super) groups: FxHashMap<u32, u32>,
    /// Passive identifiers, and those whose REP has come, by peer and how it calls them.
    pub(super) by_peer: FxHashMap<(Gid, u32, bool), u32>,
    /// Connections by the peer's queue pair.
    pub(super) by_qpn: FxHashMap<(Gid, u32), u32>,
    /// Queue pairs of this NIC that connections have named, by whom, how often.
    pub(super) claims: FxHashMap<u32, (u64, u32)>,
    pub(super) timers: BTreeSet<(Nanos, u32)>,
    /// Passive identifiers of a session that are not up, by the peer's NIC.
    pub(super) half_open: FxHashMap<(u64, u64), u32>,
    /// Identifiers without a program.
    orphans: u32,
    sends: Fair<Whose, Mad>,
}

/// How long an answer is waited for at first, and how often a message is said again.
const fn patience(message: &Message) -> (Nanos, u32) {
    match message {
        Message::Dreq { .. } => (FIRST, END_TRIES),
        _ => (FIRST, TRIES),
    }
}

impl Machine {
    /// The connection manager of a NIC; numbers begin at `first`.
    pub(super) fn new(guid: [u8; 8], gids: Vec<Gid>, account: Account, first: u32) -> Self {
        Self {
            guid,
            gids,
            account,
            channels: BTreeMap::new(),
            ids: FxHashMap::default(),
            last: first,
            sessions: FxHashMap::default(),
            ports: BTreeMap::new(),
            groups: FxHashMap::default(),
            by_peer: FxHashMap::default(),
            by_qpn: FxHashMap::default(),
            claims: FxHashMap::default(),
            timers: BTreeSet::new(),
            half_open: FxHashMap::default(),
            orphans: 0,
            sends: Fair::new(SENDS),
        }
    }

    pub(super) fn number(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            let n = self.last;
            let used = self.ids.contains_key(&n) || self.groups.contains_key(&n);
            if n != 0 && !used && !self.channels.contains_key(&n) {
                return n;
            }
        }
    }

    pub(super) fn add_channel(&mut self, session: u64, bell: Bell) -> u32 {
        let number = self.number();
        // There are never more requests than identifiers.
        let (events, requests) = (VecDeque::new(), Fair::new(IDS));
        let channel = Channel { session, bell, events, requests, untold: 0, ids: 0 };
        self.channels.insert(number, channel);
        number
    }

    /// Ends a channel and all that is its own.
    pub(super) fn remove_channel(&mut self, asker: Asker, now: Nanos) -> Result<(), Status> {
        self.channel(asker)?;
        let of = Some(asker.channel);
        // All at once, and not for each identifier what is its own.
        let (gone, _) = self.withdraw_all(asker.channel, |_| true);
        self.refuse_unseen(&gone, now);
        let mut own: Vec<u32> =
            self.ids.iter().filter(|(_, id)| id.channel == of).map(|(n, _)| *n).collect();
        // In the order in which they were made, so that what peers hear is no matter of chance.
        own.sort_unstable();
        for number in own {
            self.destroy(number, now);
        }
        self.channels.remove(&asker.channel);
        Ok(())
    }

    /// Ends all that a session has.
    pub(super) fn end_session(&mut self, session: u64, now: Nanos) {
        let own = self.channels.iter().filter(|(_, it)| it.session == session);
        let own: Vec<u32> = own.map(|(number, _)| *number).collect();
        for channel in own {
            // It is there, and the session's.
            let _ = self.remove_channel(Asker { session, channel }, now);
        }
        self.sessions.remove(&session);
    }

    pub(super) fn channel(&mut self, asker: Asker) -> Result<&mut Channel, Status> {
        let found = self.channels.get_mut(&asker.channel);
        found.filter(|channel| channel.session == asker.session).ok_or(Status::NOENT)
    }

    /// How many tokens a channel lacks.
    pub(super) fn untold(&self, channel: u32) -> u32 {
        self.channels.get(&channel).map_or(0, |channel| channel.untold)
    }

    /// So many were put in.
    pub(super) fn told(&mut self, channel: u32, count: u32) {
        if let Some(channel) = self.channels.get_mut(&channel) {
            channel.untold = channel.untold.saturating_sub(count);
        }
    }

    /// Withdraws events of an identifier; how many tokens of them the process has or will find.
    pub(super) fn withdraw(
        &mut self,
        (channel, of): (u32, u32),
        unwanted: impl Fn(&Event) -> bool,
    ) -> (Vec<Event>, u32) {
        // Most have none that wait, and a channel may have thousands.
        if self.ids.get(&of).is_none_or(|id| id.waiting == 0) {
            return (Vec::new(), 0);
        }
        self.withdraw_all(channel, |event| event.of == of && unwanted(event))
    }

    /// As [`Self::withdraw`], whosever they are.
    fn withdraw_all(
        &mut self,
        channel: u32,
        unwanted: impl Fn(&Event) -> bool,
    ) -> (Vec<Event>, u32) {
        let Some(channel) = self.channels.get_mut(&channel) else { return (Vec::new(), 0) };
        let (gone, rest) = std::mem::take(&mut channel.events).into_iter().partition(&unwanted);
        channel.events = rest;
        let mut gone: VecDeque<Event> = gone;
        gone.extend(channel.requests.take(&unwanted));
        let count = u32::try_from(gone.len()).unwrap_or(u32::MAX);
        let never_told = channel.untold.min(count);
        channel.untold -= never_told;
        gone.iter().for_each(|event| self.taken(event));
        (gone.into(), count - never_told)
    }

    /// An event waits in its channel no longer.
    pub(super) fn taken(&mut self, event: &Event) {
        if let Some(id) = self.ids.get_mut(&event.of) {
            id.waiting = id.waiting.saturating_sub(1);
        }
    }

    pub(super) fn push(&mut self, channel: u32, event: Event) {
        let whose = self.ids.get(&event.id).map_or(0, |id| id.whose);
        if self.channels.contains_key(&channel)
            && let Some(id) = self.ids.get_mut(&event.of)
        {
            id.waiting = id.waiting.saturating_add(1);
        }
        if let Some(channel) = self.channels.get_mut(&channel) {
            match event.kind {
                Kind::Request => channel.requests.push(whose, event),
                _ => channel.events.push_back(event),
            }
            channel.untold = channel.untold.saturating_add(1);
            channel.bell.ring();
        }
    }

    /// Something happened to an identifier. One that its program does not know yet has no events.
    pub(super) fn happened(&mut self, number: u32, kind: Kind, status: i32, said: Said) {
        let Some(id) = self.ids.get(&number).filter(|id| id.uid != 0) else { return };
        let Some(channel) = id.channel else { return };
        let uid = id.uid;
        let event = Event { kind, status, id: number, of: number, uid, group: None, said };
        self.push(channel, event);
    }

    pub(super) fn session_of(&self, channel: Option<u32>) -> Option<u64> {
        Some(self.channels.get(&channel?)?.session)
    }

    /// A new one in a channel.
    pub(super) fn create(&mut self, channel: u32, space: Space) -> Result<u32, Status> {
        let session = self.session_of(Some(channel)).ok_or(Status::NOENT)?;
        let count = self.sessions.get(&session).copied().unwrap_or(0);
        let left = u32::try_from(IDS.saturating_sub(self.ids.len())).unwrap_or(0);
        if count >= SESSION_IDS.min(left) {
            return Err(Status::NOMEM);
        }
        let kept = self.account.charge(ID).ok_or(Status::NOMEM)?;
        let number = self.number();
        let id = Id { channel: Some(channel), ..Id::new(space, kept) };
        self.ids.insert(number, id);
        self.sessions.insert(session, count + 1);
        if let Some(channel) = self.channels.get_mut(&channel) {
            channel.ids += 1;
        }
        Ok(number)
    }

    pub(super) fn id(&mut self, asker: Asker, number: u32) -> Result<&mut Id, Status> {
        let session = self.session_of(self.ids.get(&number).and_then(|id| id.channel));
        if session != Some(asker.session) {
            return Err(Status::NOENT);
        }
        self.ids.get_mut(&number).ok_or(Status::NOENT)
    }

    /// Whether there is room for a request from this NIC beside what it has that is not up.
    pub(super) fn has_room_for(&self, session: u64, whose: u64) -> bool {
        let count = self.sessions.get(&session).copied().unwrap_or(0);
        let left = SESSION_IDS.saturating_sub(count);
        self.half_open.get(&(session, whose)).copied().unwrap_or(0) < left
    }

    /// Counts a passive identifier that is not up, from a peer's NIC.
    pub(super) fn opens(&mut self, number: u32, whose: u64) {
        let Some(id) = self.ids.get_mut(&number) else { return };
        id.whose = whose;
        let Some(session) = id.channel.and_then(|it| Some(self.channels.get(&it)?.session)) else {
            return;
        };
        id.half_open = Some(session);
        *self.half_open.entry((session, whose)).or_default() += 1;
    }

    /// It is up, or ends.
    pub(super) fn opened(&mut self, number: u32) {
        let Some(id) = self.ids.get_mut(&number) else { return };
        let Some(session) = id.half_open.take() else { return };
        let share = (session, id.whose);
        if let Some(count) = self.half_open.get_mut(&share) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.half_open.remove(&share);
            }
        }
    }

    /// Whether one more may stay without a program until its peer has answered.
    pub(super) const fn may_stay(&self) -> bool {
        self.orphans <= ORPHANS
    }

    /// Takes an identifier out of its channel: from now on it has no program.
    pub(super) fn orphan(&mut self, number: u32) {
        self.opened(number);
        let Some(id) = self.ids.get_mut(&number) else { return };
        let Some(channel) = id.channel.take() else { return };
        let listener = id.listener.take();
        self.orphans += 1;
        if let Some(channel) = self.channels.get_mut(&channel) {
            channel.ids = channel.ids.saturating_sub(1);
            if let Some(count) = self.sessions.get_mut(&channel.session) {
                *count = count.saturating_sub(1);
            }
        }
        self.answered(listener);
    }

    /// A request is not the program's to answer any more.
    pub(super) fn answered(&mut self, listener: Option<u32>) {
        if let Some(listener) = listener.and_then(|number| self.ids.get_mut(&number)) {
            listener.unanswered = listener.unanswered.saturating_sub(1);
        }
    }

    /// Ends an identifier for its program; its peer is told, and events of it are withdrawn: how
    /// many tokens too many there are, and how many events the program has taken.
    pub(super) fn destroy(&mut self, number: u32, now: Nanos) -> (u32, u32) {
        let Some(id) = self.ids.get(&number) else { return (0, 0) };
        let (reported, Some(channel)) = (id.reported, id.channel) else { return (0, 0) };
        let (gone, tokens) = self.withdraw((channel, number), |_| true);
        let groups = self.ids.get_mut(&number).map(|id| std::mem::take(&mut id.groups));
        for group in groups.unwrap_or_default().into_keys() {
            self.groups.remove(&group);
        }
        self.unbind(number);
        self.unclaim(number);
        self.orphan(number);
        self.refuse_unseen(&gone, now);
        self.leave(number, now);
        (reported, tokens)
    }

    /// Requests that nobody has seen are refused.
    fn refuse_unseen(&mut self, gone: &[Event], now: Nanos) {
        for request in gone.iter().filter(|event| event.kind == Kind::Request) {
            self.orphan(request.id);
            self.leave(request.id, now);
        }
    }

    /// Forgets an identifier.
    pub(super) fn forget(&mut self, number: u32) {
        self.orphan(number);
        self.unbind(number);
        self.unclaim(number);
        self.disarm(number);
        self.unlink(number);
        if self.ids.remove(&number).is_some() {
            // All that end have been made one.
            self.orphans = self.orphans.saturating_sub(1);
        }
    }

    /// Takes an identifier out of what peers are looked up in.
    pub(super) fn unlink(&mut self, number: u32) {
        let Some(id) = self.ids.get(&number) else { return };
        let peer = (id.peer, id.remote, id.space.is_datagram());
        if self.by_peer.get(&peer) == Some(&number) {
            self.by_peer.remove(&peer);
        }
        let end = (id.peer, id.theirs.qpn);
        if self.by_qpn.get(&end) == Some(&number) {
            self.by_qpn.remove(&end);
        }
    }

    pub(super) fn arm(&mut self, number: u32, at: Nanos) {
        self.disarm(number);
        if let Some(id) = self.ids.get_mut(&number) {
            id.deadline = Some(at);
            self.timers.insert((at, number));
        }
    }

    pub(super) fn disarm(&mut self, number: u32) {
        let deadline = self.ids.get_mut(&number).and_then(|id| id.deadline.take());
        if let Some(at) = deadline {
            self.timers.remove(&(at, number));
        }
    }

    /// When [`Self::tick`] is to be called at the latest.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Has a datagram sent.
    pub(super) fn send(
        &mut self,
        whose: Whose,
        (source, dest): (Gid, Gid),
        traffic_class: u8,
        bytes: [u8; 256],
    ) {
        self.sends.push(whose, Mad { source, dest, traffic_class, sl: 0, bytes });
    }

    /// Datagrams to be sent, some at a time.
    pub(super) fn take_sends(&mut self, most: usize) -> Vec<Mad> {
        (0..most).map_while(|_| self.sends.pop()).collect()
    }

    pub(super) fn has_sends(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Makes room at a listener for a request from this NIC: the last of whoever has more there,
    /// which its program has not seen, is as if it had not been heard.
    pub(super) fn make_room(&mut self, listener: u32, whose: u64) -> bool {
        let channel = self.ids.get(&listener).and_then(|it| it.channel);
        let Some(channel) = channel.and_then(|number| self.channels.get_mut(&number)) else {
            return false;
        };
        let here = |event: &Event| event.of == listener;
        let (own, Some((heaviest, most))) = channel.requests.shares(whose, here) else {
            return false;
        };
        if own + 1 >= most {
            return false;
        }
        let Some(event) = channel.requests.pop_last(heaviest, here) else { return false };
        // Its token finds no event, or has not been put in.
        channel.untold = channel.untold.saturating_sub(1);
        self.taken(&event);
        self.forget(event.id);
        true
    }

    /// Puts the event of a request into its listener's channel.
    pub(super) fn requested(&mut self, listener: u32, number: u32, said: Said) {
        let Some((channel, uid)) =
            self.ids.get(&listener).and_then(|it| Some((it.channel?, it.uid)))
        else {
            return;
        };
        if let Some(listener) = self.ids.get_mut(&listener) {
            listener.unanswered += 1;
        }
        let (kind, of) = (Kind::Request, listener);
        self.push(channel, Event { kind, status: 0, id: number, of, uid, group: None, said });
    }

    /// Has a message sent until its answer comes.
    pub(super) fn tell_again(&mut self, number: u32, message: Message, now: Nanos) {
        self.tell(number, &message);
        let (wait, left) = patience(&message);
        if let Some(id) = self.ids.get_mut(&number) {
            id.again = Some(Again { message, wait, left });
        }
        self.arm(number, now.saturating_add(wait));
    }

    /// Each identifier has as many events in its channel as is known of it.
    #[cfg(test)]
    pub(super) fn check_waiting(&self) {
        // Floods have nothing that others have not.
        if self.ids.len() > 64 {
            return;
        }
        let mut waiting: BTreeMap<u32, u32> = BTreeMap::new();
        for channel in self.channels.values() {
            for event in channel.events.iter().chain(channel.requests.iter()) {
                *waiting.entry(event.of).or_default() += 1;
            }
        }
        for (number, id) in &self.ids {
            assert_eq!(id.waiting, waiting.get(number).copied().unwrap_or(0), "{id:?}");
        }
    }

    /// Nothing is left of anybody.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.channels.is_empty()
            && self.ids.is_empty()
            && self.sessions.is_empty()
            && self.ports.is_empty()
            && self.groups.is_empty()
            && self.by_peer.is_empty()
            && self.by_qpn.is_empty()
            && self.claims.is_empty()
            && self.timers.is_empty()
            && self.half_open.is_empty()
            && self.orphans == 0
    }
}
