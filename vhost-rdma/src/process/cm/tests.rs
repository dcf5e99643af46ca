//! Two connection managers, their programs, and a network between them that loses, doubles and
//! reorders; the clock is turned by hand.

mod hostile;
mod model;
mod rules;

use std::net::SocketAddr;

use super::id::{Event, Kind, Space};
use super::layout::{Command, Param, Reply};
use super::machine::{Asker, Machine};
use crate::cm::Mad;
use crate::cm::message::Offer;
use crate::link::Gid;
use crate::memory::Account;
use crate::nic::{Nanos, Status};
use crate::process::events::Bell;

const SECOND: Nanos = 1_000_000_000;

fn gid(host: u8) -> Gid {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, host]
}

fn at(host: u8, port: u16) -> SocketAddr {
    ([10, 0, 0, host], port).into()
}

fn everywhere(port: u16) -> SocketAddr {
    ([0, 0, 0, 0], port).into()
}

fn param(qpn: u32, private: &[u8]) -> Param {
    let offer = Offer {
        qpn,
        responder_resources: 3,
        initiator_depth: 2,
        retry_count: 6,
        rnr_retry_count: 5,
        ..Offer::default()
    };
    Param { offer, qkey: 0, private: private.to_vec() }
}

/// A NIC's connection manager with one program.
struct Host {
    number: u8,
    machine: Machine,
    asker: Asker,
    now: Nanos,
}

impl Host {
    fn new(number: u8) -> Self {
        let guid = [2, 0, 0, 0xff, 0xfe, 0, 0, number];
        let first = u32::from(number) * 1000;
        let mut machine = Machine::new(guid, vec![gid(number)], Account::default(), first);
        let channel = machine.add_channel(1, Bell::new().unwrap());
        Self { number, machine, asker: Asker { session: 1, channel }, now: 0 }
    }

    fn another_session(&mut self, session: u64) -> Asker {
        let channel = self.machine.add_channel(session, Bell::new().unwrap());
        Asker { session, channel }
    }

    fn by(&mut self, asker: Asker, command: Command) -> Result<Reply, Status> {
        let done = self.machine.command(asker, command, (true, self.now));
        self.machine.check_waiting();
        done
    }

    fn ask(&mut self, command: Command) -> Result<Reply, Status> {
        self.by(self.asker, command)
    }

    #[track_caller]
    fn create(&mut self, uid: u64, space: Space) -> u32 {
        match self.ask(Command::Create { uid, space }) {
            Ok(Reply::Number(number)) => number,
            other => panic!("{other:?}"),
        }
    }

    /// One that listens at every address.
    #[track_caller]
    fn listen(&mut self, uid: u64, space: Space, port: u16) -> u32 {
        let id = self.create(uid, space);
        self.ask(Command::Bind { id, address: everywhere(port) }).unwrap();
        self.ask(Command::Listen { id, backlog: 0 }).unwrap();
        id
    }

    fn event(&mut self) -> Option<Event> {
        match self.ask(Command::GetEvent) {
            Ok(Reply::Event(event)) => Some(*event),
            Err(Status::BUSY) => None,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn expects(&mut self, kind: Kind) -> Event {
        let event = self.event();
        assert_eq!(event.as_ref().map(|event| event.kind), Some(kind), "{event:?}");
        event.unwrap()
    }

    /// One that has asked for a connection.
    #[track_caller]
    fn connect(&mut self, (uid, space): (u64, Space), dest: SocketAddr, param: Param) -> u32 {
        let id = self.create(uid, space);
        self.ask(Command::Resolve { id, source: None, dest }).unwrap();
        self.expects(Kind::AddressResolved);
        self.ask(Command::Route { id }).unwrap();
        self.expects(Kind::RouteResolved);
        self.ask(Command::Connect { id, param }).unwrap();
        id
    }

    fn sends(&mut self) -> Vec<Mad> {
        self.machine.take_sends(usize::MAX)
    }

    fn hears(&mut self, mads: &[Mad]) {
        for mad in mads {
            self.machine.datagram((mad, mad.source[15].into()), self.now);
            self.machine.check_waiting();
        }
    }

    fn passes(&mut self, now: Nanos) {
        self.now = now;
        self.machine.tick(now);
    }
}

/// Lets two say all that they have to say to each other.
fn talk(a: &mut Host, b: &mut Host) {
    loop {
        let (of_a, of_b) = (a.sends(), b.sends());
        if of_a.is_empty() && of_b.is_empty() {
            return;
        }
        b.hears(&of_a);
        a.hears(&of_b);
    }
}

/// A connection that is up: both ends.
#[track_caller]
fn connected(a: &mut Host, b: &mut Host) -> (u32, u32) {
    let listener = b.listen(7, Space::Tcp, 7471);
    let active = a.connect((1, Space::Tcp), at(b.number, 7471), param(0x11, b"hello"));
    talk(a, b);
    let request = b.expects(Kind::Request);
    assert_eq!((request.of, request.uid), (listener, 7));
    let passive = request.id;
    b.ask(Command::Accept { id: passive, uid: 2, param: Some(param(0x22, b"yes")) }).unwrap();
    talk(a, b);
    a.expects(Kind::Response);
    a.ask(Command::Accept { id: active, uid: 0, param: None }).unwrap();
    talk(a, b);
    let up = b.expects(Kind::Established);
    assert_eq!((up.id, up.uid), (passive, 2));
    (active, passive)
}
