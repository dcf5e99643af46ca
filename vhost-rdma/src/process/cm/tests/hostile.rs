//! Programs and peers that do what they should not.

use proptest::prelude::*;

use super::super::id::{Kind, Space};
use super::super::layout::{Command, parse, write};
use super::*;
use crate::cm::message::{Ends, Message, build};

#[test]
fn identifiers_of_another_session_are_none() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (_, id) = connected(&mut a, &mut b);
    let thief = b.another_session(2);
    for command in [
        Command::Query { id },
        Command::Disconnect { id },
        Command::Destroy { id },
        Command::Migrate { id },
        Command::QpAttr { id, state: 2 },
        Command::Reject { id, reason: 0, private: Vec::new() },
        Command::Accept { id, uid: 1, param: None },
        Command::Join { id, uid: 1, address: at(224, 1) },
    ] {
        assert_eq!(b.by(thief, command.clone()), Err(Status::NOENT), "{command:?}");
    }
    let channel = b.asker.channel;
    assert_eq!(b.by(Asker { session: 2, channel }, Command::GetEvent), Err(Status::NOENT));
    assert!(b.machine.remove_channel(Asker { session: 2, channel }, 0).is_err());
    b.machine.end_session(2, 0);
    assert_eq!(b.event(), None, "the connection is up");
}

/// Else its peer would take a connection of another's for a stale one, and end it.
#[test]
fn a_queue_pair_is_one_sessions() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    connected(&mut a, &mut b);
    let thief = a.another_session(2);
    let Ok(Reply::Number(id)) = a.by(thief, Command::Create { uid: 1, space: Space::Tcp }) else {
        panic!("an identifier")
    };
    a.by(thief, Command::Resolve { id, source: None, dest: at(2, 7471) }).unwrap();
    a.by(thief, Command::Route { id }).unwrap();
    let connect = |qpn| Command::Connect { id, param: param(qpn, b"") };
    assert_eq!(a.by(thief, connect(0x11)), Err(Status::PERM));
    a.by(thief, connect(0x99)).unwrap();
    talk(&mut a, &mut b);
    b.expects(Kind::Request);
    assert_eq!(a.event(), None);
}

#[test]
fn what_a_session_may_have_is_bounded() {
    let mut host = Host::new(1);
    let create = || Command::Create { uid: 1, space: Space::Udp };
    let mut ids = Vec::new();
    while let Ok(Reply::Number(id)) = host.ask(create()) {
        ids.push(id);
    }
    assert_eq!(ids.len(), 1024);
    assert_eq!(host.ask(create()), Err(Status::NOMEM));
    let other = host.another_session(2);
    assert!(host.by(other, create()).is_ok(), "another session has its own");
    host.ask(Command::Destroy { id: ids[0] }).unwrap();
    host.ask(create()).unwrap();
    // Groups, and events that nobody takes.
    let id = ids[1];
    host.ask(Command::Resolve { id, source: None, dest: at(2, 80) }).unwrap();
    let address: SocketAddr = "224.0.0.9:0".parse().unwrap();
    let mut groups = Vec::new();
    while let Ok(Reply::Number(group)) = host.ask(Command::Join { id, uid: 3, address }) {
        groups.push(group);
    }
    assert_eq!(groups.len(), 16);
    ids[1..].iter().for_each(|id| drop(host.ask(Command::Destroy { id: *id }).unwrap()));
    let id = host.create(1, Space::Udp);
    host.ask(Command::Resolve { id, source: None, dest: address }).unwrap();
    let mut joined = 0;
    while let Ok(Reply::Number(group)) = host.ask(Command::Join { id, uid: 3, address }) {
        host.ask(Command::Leave { id: group }).unwrap();
        joined += 1;
        if joined > 10_000 {
            break;
        }
    }
    assert_eq!(joined, 10_001, "what is left leaves no event");
    host.machine.end_session(1, 0);
    host.machine.end_session(2, 0);
    assert!(host.machine.is_empty());
}

#[test]
fn an_account_that_is_full_takes_no_more() {
    let mut machine = Machine::new([0; 8], vec![gid(1)], Account::new(5000), 1);
    let channel = machine.add_channel(1, Bell::new().unwrap());
    assert!(machine.create(channel, Space::Tcp).is_ok());
    assert!(machine.create(channel, Space::Tcp).is_ok());
    assert_eq!(machine.create(channel, Space::Tcp), Err(Status::NOMEM));
}

/// A peer floods a listener: what its program has not answered is bounded, and who waits for it has
/// no more to look at.
#[test]
fn a_flood_of_requests_ends_at_the_backlog() {
    let mut host = Host::new(1);
    let id = host.create(7, Space::Tcp);
    host.ask(Command::Bind { id, address: everywhere(80) }).unwrap();
    host.ask(Command::Listen { id, backlog: 5 }).unwrap();
    (0..100_000).for_each(|n| host.hears(&[request(2, n)]));
    assert!(host.sends().len() <= 512, "what is to be sent is bounded");
    let mut seen = 0;
    while let Some(event) = host.event() {
        seen += 1;
        host.ask(Command::Destroy { id: event.id }).unwrap();
    }
    assert_eq!(seen, 5);
    host.machine.end_session(1, 0);
    assert!(host.machine.is_empty(), "{:?}", host.machine);
}

/// A REQ for port 80 of host 1, of this communication ID and queue pair.
fn request(from: u8, n: u32) -> Mad {
    let ends = Ends { source: gid(from), source_port: 1, dest: gid(1), dest_port: 80 };
    let offer = Offer { qpn: n, ..Offer::default() };
    let message = Message::Req { local: n, ends, offer, mtu: 5, private: Vec::new() };
    let bytes = build(&message, n);
    Mad { source: gid(from), dest: gid(1), traffic_class: 0, sl: 0, bytes }
}

/// A listener that is full has a place for who did not fill it, and its program finds that one
/// next.
#[test]
fn a_flood_of_requests_keeps_no_other_peer_from_a_listener() {
    let mut host = Host::new(1);
    let id = host.create(7, Space::Tcp);
    host.ask(Command::Bind { id, address: everywhere(80) }).unwrap();
    host.ask(Command::Listen { id, backlog: 5 }).unwrap();
    host.hears(&(0..1000).map(|n| request(2, n)).collect::<Vec<_>>());
    host.hears(&[request(3, 7)]);
    let seen: Vec<Event> = std::iter::from_fn(|| host.event()).collect();
    let from = |event: &Event| match host.machine.ids[&event.id].peer {
        peer if peer == gid(2) => 2,
        _ => 3,
    };
    assert_eq!(seen.iter().map(from).collect::<Vec<_>>(), [2, 3, 2, 2, 2]);
    // What was put out to make room is as if it had not been heard: it comes when it is said again.
    seen.iter().for_each(|event| drop(host.ask(Command::Destroy { id: event.id }).unwrap()));
    host.sends();
    host.hears(&[request(2, 4)]);
    host.expects(Kind::Request);
    host.machine.end_session(1, 0);
    assert!(host.machine.is_empty(), "{:?}", host.machine);
}

/// A peer whose requests are accepted and which never goes on, so that each keeps an identifier.
#[test]
fn connections_that_are_never_up_leave_identifiers_to_others() {
    let mut host = Host::new(1);
    host.listen(7, Space::Tcp, 80);
    for n in 0..5000 {
        host.hears(&[request(2, n)]);
        while let Some(event) = host.event() {
            host.ask(Command::Accept { id: event.id, uid: 2, param: Some(param(9, b"")) }).unwrap();
        }
        host.sends();
    }
    host.hears(&[request(3, 7)]);
    let event = host.expects(Kind::Request);
    assert_eq!(host.machine.ids[&event.id].peer, gid(3));
    host.create(1, Space::Tcp);
}

/// What sessions say goes out in turn; so do answers to peers, who cannot fill the way out either.
#[test]
fn what_one_has_to_say_waits_for_no_flood_of_anothers() {
    let mut host = Host::new(1);
    // More answers than there is room for.
    host.hears(&(0..2000).map(|n| request(2, n)).collect::<Vec<_>>());
    let other = host.another_session(2);
    for n in 0..1000 {
        let Ok(Reply::Number(id)) = host.by(other, Command::Create { uid: 1, space: Space::Udp })
        else {
            panic!("an identifier")
        };
        host.by(other, Command::Resolve { id, source: None, dest: at(9, 80) }).unwrap();
        host.by(other, Command::Route { id }).unwrap();
        host.by(other, Command::Connect { id, param: param(1000 + n, b"") }).unwrap();
        while host.by(other, Command::GetEvent).is_ok() {}
    }
    host.connect((1, Space::Tcp), at(3, 80), param(1, b""));
    let first = host.machine.take_sends(3);
    assert!(first.iter().any(|mad| mad.dest == gid(3)), "{first:?}");
}

/// A session that connects, ends and comes again leaves much to be told; identifiers are left all
/// the same.
#[test]
fn what_sessions_leave_behind_takes_no_room_from_others() {
    let mut host = Host::new(1);
    for round in 0..12u32 {
        let other = host.another_session(2);
        for n in 0..1024 {
            let create = Command::Create { uid: 1, space: Space::Tcp };
            let Ok(Reply::Number(id)) = host.by(other, create) else { break };
            host.by(other, Command::Resolve { id, source: None, dest: at(9, 80) }).unwrap();
            host.by(other, Command::Route { id }).unwrap();
            host.by(other, Command::Connect { id, param: param(n, b"") }).unwrap();
            let offer = Offer { qpn: 5000 * round + n, ..Offer::default() };
            let reply = Message::Rep { local: n, remote: id, offer, private: Vec::new() };
            let bytes = build(&reply, id);
            host.hears(&[Mad { source: gid(9), dest: gid(1), traffic_class: 0, sl: 0, bytes }]);
            host.by(other, Command::Accept { id, uid: 0, param: None }).unwrap();
            while host.by(other, Command::GetEvent).is_ok() {}
            host.sends();
        }
        host.machine.end_session(2, host.now);
    }
    for _ in 0..1000 {
        host.create(1, Space::Tcp);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Datagrams and commands of any bytes, into a machine that has something to lose.
    #[test]
    fn nothing_that_is_said_does_harm(
        said in prop::collection::vec(
            (any::<bool>(), 0u8..0x1a, 0u32..4, prop::collection::vec(any::<u8>(), 232)), 1..60),
        asked in prop::collection::vec(
            (0u32..20, 0u32..4, prop::collection::vec(any::<u8>(), 320)), 1..60),
    ) {
        let (mut a, mut b) = (Host::new(1), Host::new(2));
        let (_, passive) = connected(&mut a, &mut b);
        for ((true_ids, kind, which, body), (number, at, bytes)) in said.iter().zip(&asked) {
            let mut mad = [0; 256];
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[17] = *kind;
            mad[24..].copy_from_slice(body);
            if *true_ids {
                mad[28..32].copy_from_slice(&(passive + which).to_be_bytes());
            }
            let source = gid(1 + u8::try_from(*which).unwrap() % 2);
            b.hears(&[Mad { source, dest: gid(2), traffic_class: 0, sl: 0, bytes: mad }]);
            let mut command = number.to_le_bytes().to_vec();
            command.extend([0; 4]);
            command.extend(bytes);
            for (offset, len) in LENGTHS {
                if offset == *number {
                    command.truncate(8 + len);
                }
            }
            for place in [0usize, 8, 36, 44, 56, 272, 280] {
                if let (Some(field), 0) = (command.get_mut(8 + place..12 + place), at % 2) {
                    field.copy_from_slice(&(passive + at).to_le_bytes());
                }
            }
            if let Ok(command) = parse(&command)
                && let Ok(reply) = b.ask(command)
            {
                prop_assert!(write(&reply).len() <= 336);
            }
            b.passes(b.now + SECOND);
        }
        b.machine.end_session(1, b.now);
        for _ in 0..200 {
            b.passes(b.now + SECOND);
        }
        prop_assert!(b.machine.is_empty(), "{:?}", b.machine);
    }
}

/// Commands, and how long they are.
const LENGTHS: [(u32, usize); 18] = [
    (0, 24),
    (1, 16),
    (2, 40),
    (3, 64),
    (4, 8),
    (5, 16),
    (6, 288),
    (7, 8),
    (8, 296),
    (9, 264),
    (10, 4),
    (11, 16),
    (12, 8),
    (14, 24),
    (15, 8),
    (16, 48),
    (17, 16),
    (18, 16),
];
