//! Connections between guests and third-party hosts: each is one connection of the guest's
//! connection manager, which sees datagrams, and one of the host's, which sees the guest's queue
//! pair as `conn_param.qp_num`. No I/O and no clock here.
//!
//! ```text
//!  guest            this               host             guest            this               host
//!   REQ ──────────────> connect ─────────>               <── REQ ────────── Request <────────
//!   <── REP ─────────── Response <────────               REP ──────────────> accept ─────────>
//!   RTU ──────────────> establish ───────>               <── RTU ────────── Established <────
//!   DREQ, REJ ────────> disconnect, reject               the same; back: Disconnected, Rejected
//! ```
//!
//! The host's connection manager chooses the PSN with which the peer begins and the MTU, and tells
//! nobody before. The guest has chosen both too, and gives them to its queue pair: there the host's
//! take their place, by the peer and the peer's QPN (`Directory::agreed`). The PSN that the *guest*
//! begins with is the peer's choice and reaches it as it is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vhost_rdma_engine::cm::Mad;
use vhost_rdma_engine::cm::message::{
    Ends, Message, Offer, Parsed, Unserved, build, parse, reason,
};
use vhost_rdma_engine::link::Gid;

use crate::directory::Directory;
use crate::ways::{Agreed, Sent, Station};

/// Connections of one NIC, and of all.
const OF_NIC: usize = 1024;
const OF_ALL: usize = 16 << 10;
/// How long a connection may take to come about, and to go.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection, as the host's connection manager is told of it; also its communication ID towards
/// the guest.
pub(super) type Key = u32;

/// A connection that a guest asks for, in the host's addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) from: Gid,
    pub(super) to: Gid,
    pub(super) port: u16,
    pub(super) offer: Offer,
    pub(super) private: Vec<u8>,
}

/// What a peer said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    /// Its queue pair, and the PSN that the guest shall begin with.
    pub(super) offer: Offer,
    /// What the host's connection manager agreed on with the peer.
    pub(super) agreed: Agreed,
    pub(super) private: Vec<u8>,
}

/// What the host's connection manager has to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    Response(Key, Answer),
    Request { key: Key, ends: Ends, answer: Answer },
    Established(Key),
    Rejected { key: Key, reason: u16, private: Vec<u8> },
    Disconnected(Key),
    Failed(Key),
}

/// The host refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refused;

/// The host's connection manager.
pub(super) trait HostCm {
    fn connect(&mut self, key: Key, ask: &Ask) -> Result<(), Refused>;
    fn establish(&mut self, key: Key) -> Result<(), Refused>;
    fn accept(&mut self, key: Key, offer: &Offer, private: &[u8]) -> Result<(), Refused>;
    fn reject(&mut self, key: Key, private: &[u8]);
    fn disconnect(&mut self, key: Key);
    /// Forgets a connection.
    fn close(&mut self, key: Key);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The guest's REQ went out.
    Connecting,
    /// The guest has the peer's REP.
    Replied,
    /// The guest has the peer's REQ.
    Asked,
    /// The guest's REP went out.
    Accepting,
    Up,
    /// The guest has a DREQ.
    Closing,
}

#[derive(Debug)]
struct Conn {
    station: Station,
    /// As the guest names it.
    peer: Gid,
    /// As the host does.
    peer_host: Gid,
    /// The guest's communication ID; 0 until its REP.
    guest_id: u32,
    guest_qpn: u32,
    peer_qpn: u32,
    state: State,
    since: Duration,
    /// What the guest was told last: it may have been lost.
    told: Option<Message>,
}

/// All connections of guests to third-party hosts.
#[derive(Debug)]
pub(super) struct Terminator<H> {
    pub(super) host: H,
    directory: Arc<Directory>,
    conns: BTreeMap<Key, Conn>,
    last: Key,
}

/// Tells a guest something.
fn tell(station: &Station, peer: Gid, message: &Message, tid: u32) {
    let bytes = build(message, tid);
    let mad = Mad { source: peer, dest: station.gid, traffic_class: 0, sl: 0, bytes };
    if !station.inbox.put(mad) {
        tracing::debug!(
            "a message of the connection manager is lost: the guest does not take them"
        );
    }
}

fn refusal(local: u32, remote: u32, reason: u16, private: Vec<u8>) -> Message {
    Message::Rej { local, remote, of_rep: false, reason, private }
}

impl<H: HostCm> Terminator<H> {
    pub(super) const fn new(host: H, directory: Arc<Directory>) -> Self {
        Self { host, directory, conns: BTreeMap::new(), last: 0 }
    }

    /// A number that no connection has. They are not zero, which stands for none.
    pub(super) fn next_key(&mut self) -> Key {
        loop {
            self.last = self.last.wrapping_add(1);
            if self.last != 0 && !self.conns.contains_key(&self.last) {
                return self.last;
            }
        }
    }

    /// A guest has sent a datagram to a third-party host.
    pub(super) fn sent(&mut self, sent: Sent, now: Duration) {
        match parse(&sent.mad.bytes) {
            Parsed::Message(Message::Req { local, ends, offer, private, .. }) => {
                self.request(sent, local, (ends, offer, private), now);
            }
            Parsed::Message(message) => self.message(&sent, message, now),
            Parsed::Unserved(Unserved { local }) => {
                let message = refusal(0, local, reason::INVALID_SERVICE, Vec::new());
                tell(&sent.station, sent.mad.dest, &message, 0);
            }
            Parsed::Other => {}
        }
    }

    fn request(
        &mut self,
        sent: Sent,
        guest_id: u32,
        (ends, offer, private): (Ends, Offer, Vec<u8>),
        now: Duration,
    ) {
        let Sent { station, host, to, mad } = sent;
        let mine = |conn: &&Conn| Arc::ptr_eq(&conn.station.inbox, &station.inbox);
        let again = self
            .conns
            .iter()
            .find(|(_, conn)| mine(conn) && conn.guest_id == guest_id && conn.peer == mad.dest);
        if let Some((&key, conn)) = again {
            // It has sent again: what it waits for may have been lost.
            if let Some(told) = &conn.told {
                tell(&conn.station, conn.peer, told, key);
            }
            return;
        }
        let of_nic = self.conns.values().filter(mine).count();
        let known = self.directory.has_qp(&station, offer.qpn);
        let key = self.next_key();
        let ask = Ask { from: host, to, port: ends.dest_port, offer, private };
        let full = of_nic >= OF_NIC || self.conns.len() >= OF_ALL;
        if full || !known || self.host.connect(key, &ask).is_err() {
            let message = refusal(key, guest_id, reason::NO_RESOURCES, Vec::new());
            return tell(&station, mad.dest, &message, key);
        }
        let conn = Conn {
            station,
            peer: mad.dest,
            peer_host: to,
            guest_id,
            guest_qpn: offer.qpn,
            peer_qpn: 0,
            state: State::Connecting,
            since: now,
            told: None,
        };
        self.conns.insert(key, conn);
    }

    /// A message that names a connection, by the number that the guest was given.
    fn message(&mut self, sent: &Sent, message: Message, now: Duration) {
        let (local, key) = match &message {
            Message::Rep { local, remote, .. }
            | Message::Rtu { local, remote }
            | Message::Rej { local, remote, .. }
            | Message::Dreq { local, remote, .. }
            | Message::Drep { local, remote } => (*local, *remote),
            Message::Req { .. }
            | Message::Mra { .. }
            | Message::SidrReq { .. }
            | Message::SidrRep { .. } => return,
        };
        let conn = self.conns.get_mut(&key).filter(|conn| {
            Arc::ptr_eq(&conn.station.inbox, &sent.station.inbox) && conn.peer == sent.mad.dest
        });
        let Some(conn) = conn else {
            // It may have lost our DREP.
            if matches!(message, Message::Dreq { .. }) {
                let message = Message::Drep { local: key, remote: local };
                tell(&sent.station, sent.mad.dest, &message, key);
            }
            return;
        };
        match (message, conn.state) {
            (Message::Rep { offer, private, .. }, State::Asked) => {
                conn.guest_id = local;
                conn.guest_qpn = offer.qpn;
                conn.state = State::Accepting;
                conn.since = now;
                let known = self.directory.has_qp(&conn.station, offer.qpn);
                if !known || self.host.accept(key, &offer, &private).is_err() {
                    self.host.reject(key, &[]);
                    self.end(key, Some(reason::NO_RESOURCES));
                }
            }
            (Message::Rep { .. }, State::Up) => {
                if let Some(told) = &conn.told {
                    tell(&conn.station, conn.peer, told, key);
                }
            }
            (Message::Rtu { .. }, State::Replied) => {
                conn.state = State::Up;
                conn.told = None;
                if self.host.establish(key).is_err() {
                    self.hang_up(key, now);
                }
            }
            (Message::Rej { private, .. }, State::Asked | State::Replied) => {
                self.host.reject(key, &private);
                self.end(key, None);
            }
            (Message::Rej { .. }, _) | (Message::Drep { .. }, State::Closing) => {
                self.host.disconnect(key);
                self.end(key, None);
            }
            (Message::Dreq { .. }, _) => {
                let message = Message::Drep { local: key, remote: local };
                tell(&conn.station, conn.peer, &message, key);
                self.host.disconnect(key);
                self.end(key, None);
            }
            _ => {}
        }
    }

    /// The host's connection manager has something to say.
    pub(super) fn happened(&mut self, event: Event, now: Duration) {
        let key = match event {
            Event::Request { key, ends, answer } => return self.asked(key, ends, answer, now),
            Event::Response(key, answer) => return self.answered(key, answer, now),
            Event::Rejected { key, reason, private } => {
                if let Some(conn) = self.conns.get(&key) {
                    let message = refusal(key, conn.guest_id, reason, private);
                    tell(&conn.station, conn.peer, &message, key);
                }
                return self.end(key, None);
            }
            Event::Failed(key) => return self.end(key, Some(reason::TIMEOUT)),
            Event::Established(key) | Event::Disconnected(key) => key,
        };
        let Some(conn) = self.conns.get_mut(&key) else { return self.host.close(key) };
        if matches!(event, Event::Disconnected(_)) {
            self.host.disconnect(key);
            return self.hang_up(key, now);
        }
        if conn.state == State::Accepting {
            conn.state = State::Up;
            let message = Message::Rtu { local: key, remote: conn.guest_id };
            tell(&conn.station, conn.peer, &message, key);
            conn.told = Some(message);
        }
    }

    /// A peer has answered a guest's REQ.
    fn answered(&mut self, key: Key, answer: Answer, now: Duration) {
        let Some(conn) = self.conns.get_mut(&key) else { return self.host.close(key) };
        if conn.state != State::Connecting {
            return;
        }
        tracing::debug!(?answer.offer, ?answer.agreed, "a third-party host has answered");
        conn.state = State::Replied;
        conn.since = now;
        conn.peer_qpn = answer.offer.qpn;
        let end = (conn.peer_host, conn.peer_qpn);
        self.directory.set_agreed(&conn.station.device, end, answer.agreed);
        let Answer { offer, private, .. } = answer;
        let message = Message::Rep { local: key, remote: conn.guest_id, offer, private };
        tell(&conn.station, conn.peer, &message, key);
        conn.told = Some(message);
    }

    /// A peer asks for a connection to a guest.
    fn asked(&mut self, key: Key, ends: Ends, answer: Answer, now: Duration) {
        let station = self.directory.station(&ends.dest, &ends.source);
        let of_nic = |station: &Station| {
            let mine = |conn: &&Conn| Arc::ptr_eq(&conn.station.inbox, &station.inbox);
            self.conns.values().filter(mine).count()
        };
        let room = self.conns.len() < OF_ALL;
        let Some(station) = station.filter(|station| room && of_nic(station) < OF_NIC) else {
            self.host.reject(key, &[]);
            return self.host.close(key);
        };
        let end = (ends.source, answer.offer.qpn);
        self.directory.set_agreed(&station.device, end, answer.agreed);
        tracing::debug!(?answer.offer, ?answer.agreed, "a third-party host asks for a connection");
        let Answer { offer, agreed, private } = answer;
        let ends = Ends { dest: station.gid, ..ends };
        let message = Message::Req { local: key, ends, offer, mtu: agreed.mtu, private };
        tell(&station, ends.source, &message, key);
        let conn = Conn {
            station,
            peer: ends.source,
            peer_host: ends.source,
            guest_id: 0,
            guest_qpn: 0,
            peer_qpn: offer.qpn,
            state: State::Asked,
            since: now,
            told: Some(message),
        };
        self.conns.insert(key, conn);
    }

    /// The connection is over for the peer; the guest is told.
    fn hang_up(&mut self, key: Key, now: Duration) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let message = Message::Dreq { local: key, remote: conn.guest_id, qpn: conn.guest_qpn };
        tell(&conn.station, conn.peer, &message, key);
        conn.state = State::Closing;
        conn.since = now;
    }

    /// Forgets a connection; the guest hears why, if there is a reason to tell.
    fn end(&mut self, key: Key, why: Option<u16>) {
        if let Some(conn) = self.conns.remove(&key) {
            if let Some(why) = why {
                let message = refusal(key, conn.guest_id, why, Vec::new());
                tell(&conn.station, conn.peer, &message, key);
            }
            self.directory.forget_agreed(&conn.station.device, (conn.peer_host, conn.peer_qpn));
        }
        self.host.close(key);
    }

    /// Looks for what did not come about in time and for NICs that are gone; to be called once in a
    /// while.
    pub(super) fn sweep(&mut self, now: Duration) {
        let gone = |conn: &Conn| !self.directory.is_at(&conn.station);
        let late = |conn: &Conn| conn.state != State::Up && now >= conn.since + PATIENCE;
        let over: Vec<(Key, State)> = self
            .conns
            .iter()
            .filter(|(_, conn)| late(conn) || gone(conn))
            .map(|(key, conn)| (*key, conn.state))
            .collect();
        for (key, state) in over {
            match state {
                State::Asked | State::Replied => self.host.reject(key, &[]),
                State::Up | State::Accepting => self.host.disconnect(key),
                State::Connecting | State::Closing => {}
            }
            self.end(key, Some(reason::TIMEOUT));
        }
    }

    /// Connections that there are.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.conns.len()
    }
}

#[cfg(test)]
#[path = "terminate_tests.rs"]
mod tests;
