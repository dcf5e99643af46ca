//! What a program finds, where nothing is lost.

use super::super::id::{Kind, Said, Space, UDP_QKEY};
use super::super::layout::{Command, Reply, parse, write};
use super::*;
use crate::cm::message::{Message, build};

#[test]
fn a_connection_is_made_used_and_ended() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let listener = b.listen(7, Space::Tcp, 7471);
    let active = a.connect((1, Space::Tcp), at(2, 7471), param(0x11, b"hello"));
    talk(&mut a, &mut b);
    let request = b.expects(Kind::Request);
    let Said::Connection(offer, private) = request.said else { panic!("a connection") };
    assert_eq!((offer.qpn, private.len()), (0x11, 56));
    assert_eq!(private[..5], *b"hello");
    // What one begins the other serves.
    assert_eq!((offer.responder_resources, offer.initiator_depth), (2, 3));
    let passive = request.id;
    let Ok(Reply::Route(route)) = b.ask(Command::Query { id: passive }) else { panic!("a route") };
    assert_eq!(route.own, Some(at(2, 7471)));
    assert_eq!(route.path, Some((gid(2), gid(1))));
    assert_eq!(route.dest.map(|dest| dest.ip()), Some(at(1, 0).ip()));
    b.ask(Command::Accept { id: passive, uid: 2, param: Some(param(0x22, b"yes")) }).unwrap();
    talk(&mut a, &mut b);
    let Said::Connection(_, private) = a.expects(Kind::Response).said else { panic!("a REP") };
    assert_eq!(private[..3], *b"yes");
    let attributes = |host: &mut Host, id, state| match host.ask(Command::QpAttr { id, state }) {
        Ok(Reply::Attributes(attributes)) => *attributes,
        other => panic!("{other:?}"),
    };
    let (ours, theirs) = (attributes(&mut a, active, 2), attributes(&mut b, passive, 2));
    assert_eq!((ours.dest_qpn, theirs.dest_qpn), (0x22, 0x11));
    assert_eq!((ours.mtu, theirs.mtu), (5, 5));
    let (sends, receives) = (attributes(&mut a, active, 3), attributes(&mut b, passive, 3));
    assert_eq!((sends.sq_psn, receives.sq_psn), (theirs.rq_psn, ours.rq_psn));
    assert_eq!((sends.retry_count, receives.retry_count), (6, 6));
    assert_eq!(sends.rnr_retry, 5);
    a.ask(Command::Accept { id: active, uid: 0, param: None }).unwrap();
    talk(&mut a, &mut b);
    assert_eq!(b.expects(Kind::Established).id, passive);
    a.ask(Command::Disconnect { id: active }).unwrap();
    talk(&mut a, &mut b);
    a.expects(Kind::Disconnected);
    b.expects(Kind::Disconnected);
    b.ask(Command::Disconnect { id: passive }).unwrap();
    for host in [&mut a, &mut b] {
        host.passes(3 * SECOND);
        host.expects(Kind::TimewaitExit);
        assert_eq!(host.event(), None);
    }
    assert_eq!(a.ask(Command::Destroy { id: active }), Ok(Reply::Counts(5, 0)));
    assert_eq!(b.ask(Command::Destroy { id: passive }), Ok(Reply::Counts(3, 0)));
    assert_eq!(b.ask(Command::Destroy { id: listener }), Ok(Reply::Counts(1, 0)));
    for host in [&mut a, &mut b] {
        host.machine.end_session(1, host.now);
        assert!(host.machine.is_empty(), "{:?}", host.machine);
    }
}

#[test]
fn a_timeout_of_acknowledgements_is_the_programs_to_say() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (active, passive) = connected(&mut a, &mut b);
    let timeout = |host: &mut Host, id| match host.ask(Command::QpAttr { id, state: 3 }) {
        Ok(Reply::Attributes(attributes)) => attributes.timeout,
        other => panic!("{other:?}"),
    };
    assert_eq!((timeout(&mut a, active), timeout(&mut b, passive)), (18, 18), "nobody's word");
    let option =
        |id, value: &[u8]| Command::SetOption { id, level: 0, name: 3, value: value.into() };
    assert_eq!(a.ask(option(active, &[21])), Ok(Reply::Done));
    // 0 is for ever, and a word as good as any other.
    assert_eq!(b.ask(option(passive, &[0])), Ok(Reply::Done));
    assert_eq!((timeout(&mut a, active), timeout(&mut b, passive)), (21, 0));
    assert_eq!(a.ask(option(active, &[21, 0, 0, 0])), Err(Status::INVAL), "it is one byte");
    let datagrams = a.create(9, Space::Udp);
    assert_eq!(a.ask(option(datagrams, &[21])), Err(Status::INVAL), "nothing is acknowledged");
}

#[test]
fn a_datagram_service_is_found_or_not() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    b.listen(7, Space::Udp, 5000);
    let id = a.connect((1, Space::Udp), at(2, 5000), param(0x11, b"who"));
    talk(&mut a, &mut b);
    let request = b.expects(Kind::Request);
    let Said::Datagram(.., private) = request.said else { panic!("a datagram service") };
    assert_eq!((private.len(), &private[..3]), (180, &b"who"[..]));
    let accept = Command::Accept { id: request.id, uid: 2, param: Some(param(0x22, b"me")) };
    b.ask(accept).unwrap();
    talk(&mut a, &mut b);
    let Said::Datagram(qpn, qkey, way, private) = a.expects(Kind::Established).said else {
        panic!("a datagram service")
    };
    assert_eq!((qpn, qkey, way.dest), (0x22, UDP_QKEY, gid(2)));
    assert_eq!(private[..2], *b"me");
    // The same port of connections is another.
    let other = a.connect((3, Space::Udp), at(2, 5001), param(0x12, b""));
    talk(&mut a, &mut b);
    let refused = a.expects(Kind::Unreachable);
    assert_eq!((refused.id, refused.status), (other, 1));
    assert_eq!(a.ask(Command::Disconnect { id }), Err(Status::INVAL));
    // Who refuses may say why (drivers/infiniband/core/cma.c, cma_sidr_rep_handler()).
    let third = a.connect((4, Space::Udp), at(2, 5000), param(0x13, b""));
    talk(&mut a, &mut b);
    let request = b.expects(Kind::Request).id;
    b.ask(Command::Reject { id: request, reason: 0, private: b"full".to_vec() }).unwrap();
    talk(&mut a, &mut b);
    let refused = a.expects(Kind::Unreachable);
    assert_eq!((refused.id, refused.status), (third, 2));
    let Said::Datagram(.., private) = refused.said else { panic!("words") };
    assert_eq!((private.len(), &private[..4]), (136, &b"full"[..]));
}

/// As in the kernel: what a listener has said is of its own messages (cma.c).
#[test]
fn both_ends_have_the_type_of_service_of_who_asks() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let tos = |id, class| Command::SetOption { id, level: 0, name: 0, value: vec![class] };
    let listener = b.listen(7, Space::Tcp, 80);
    b.ask(tos(listener, 4)).unwrap();
    let id = a.create(1, Space::Tcp);
    a.ask(tos(id, 0x68)).unwrap();
    a.ask(Command::Resolve { id, source: None, dest: at(2, 80) }).unwrap();
    a.ask(Command::Route { id }).unwrap();
    a.ask(Command::Connect { id, param: param(0x11, b"") }).unwrap();
    talk(&mut a, &mut b);
    let passive = b.expects(Kind::Request).id;
    for (host, id) in [(&mut a, id), (&mut b, passive)] {
        let Ok(Reply::Route(route)) = host.ask(Command::Query { id }) else { panic!("a route") };
        assert_eq!(route.traffic_class, 0x68, "NIC {}", host.number);
    }
    let Ok(Reply::Attributes(to)) = b.ask(Command::QpAttr { id: passive, state: 2 }) else {
        panic!("attributes")
    };
    assert_eq!(to.way.map(|way| way.traffic_class), Some(0x68));
}

/// Until when options of addresses may be set: cma.c, rdma_set_afonly() and rdma_set_reuseaddr().
#[test]
fn options_of_addresses_are_set_while_they_mean_something() {
    let mut host = Host::new(1);
    let id = host.create(1, Space::Tcp);
    let set = |host: &mut Host, name, value: u32| {
        let value = value.to_le_bytes().to_vec();
        host.ask(Command::SetOption { id, level: 0, name, value })
    };
    let (reuse, v6only) = (1, 2);
    host.ask(Command::Bind { id, address: "[::]:80".parse().unwrap() }).unwrap();
    assert_eq!(set(&mut host, v6only, 1), Ok(Reply::Done), "it does not listen yet");
    assert_eq!(set(&mut host, reuse, 0), Err(Status::INVAL), "others may have come by it");
    assert_eq!(set(&mut host, reuse, 1), Ok(Reply::Done));
    host.ask(Command::Listen { id, backlog: 0 }).unwrap();
    for (name, value) in [(reuse, 0), (reuse, 1), (v6only, 0)] {
        assert_eq!(set(&mut host, name, value), Err(Status::INVAL), "option {name}: {value}");
    }
}

#[test]
fn requests_are_refused_by_programs_and_for_want_of_them() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let listener = b.listen(7, Space::Tcp, 80);
    a.connect((1, Space::Tcp), at(2, 81), param(0x11, b""));
    talk(&mut a, &mut b);
    assert_eq!(a.expects(Kind::Rejected).status, 8, "no such service");
    a.connect((2, Space::Tcp), at(2, 80), param(0x12, b""));
    talk(&mut a, &mut b);
    let id = b.expects(Kind::Request).id;
    b.ask(Command::Reject { id, reason: 0, private: b"no".to_vec() }).unwrap();
    talk(&mut a, &mut b);
    let refused = a.expects(Kind::Rejected);
    let Said::Connection(_, private) = refused.said else { panic!("words") };
    assert_eq!((refused.status, &private[..2]), (28, &b"no"[..]));
    // Its program lets go of what it has not looked at.
    a.connect((3, Space::Tcp), at(2, 80), param(0x13, b""));
    talk(&mut a, &mut b);
    // No token was given yet, so none is to be taken back.
    assert_eq!(b.ask(Command::Destroy { id: listener }), Ok(Reply::Counts(1, 0)));
    talk(&mut a, &mut b);
    assert_eq!(a.expects(Kind::Rejected).status, 28);
}

#[test]
fn tokens_and_events_are_as_many() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let id = b.listen(7, Space::Tcp, 80);
    let channel = b.asker.channel;
    for n in 1..4 {
        a.connect((n.into(), Space::Tcp), at(2, 80), param(0x10 + n, b""));
    }
    talk(&mut a, &mut b);
    assert_eq!(b.machine.untold(channel), 3);
    b.machine.told(channel, 2);
    b.expects(Kind::Request);
    // Two tokens and two events were left; one of the tokens is the program's already.
    assert_eq!(b.ask(Command::Destroy { id }), Ok(Reply::Counts(1, 1)));
    assert_eq!((b.machine.untold(channel), b.event()), (0, None));
}

#[test]
fn ports_are_taken_and_shared_as_sockets_have_them() {
    let mut host = Host::new(1);
    let mut bind = |address: SocketAddr, reuse: bool| {
        let id = host.create(1, Space::Tcp);
        let value = u32::from(reuse).to_le_bytes().to_vec();
        host.ask(Command::SetOption { id, level: 0, name: 1, value }).unwrap();
        let done = host.ask(Command::Bind { id, address }).map(|_| id);
        let Ok(Reply::Route(route)) = host.ask(Command::Query { id }) else { panic!("a route") };
        (done, route.own.map(|own| own.port()))
    };
    assert!(bind(at(1, 80), false).0.is_ok(), "no port is anybody's privilege");
    assert_eq!(bind(at(1, 80), true).0, Err(Status::EXIST));
    assert_eq!(bind(everywhere(80), false).0, Err(Status::EXIST));
    assert_eq!(bind(at(9, 81), false).0, Err(Status::UNREACH), "another's address");
    let six: SocketAddr = "[::]:80".parse().unwrap();
    assert_eq!(bind(six, false).0, Err(Status::EXIST), "it is IPv4 as well");
    assert!(bind(everywhere(90), true).0.is_ok() && bind(at(1, 90), true).0.is_ok());
    let (first, second) =
        (bind(everywhere(0), false).1.unwrap(), bind(everywhere(0), false).1.unwrap());
    assert!(first != second && first >= 32768 && second >= 32768);
}

#[test]
fn a_particular_listener_goes_before_one_for_all() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let reuse = |host: &mut Host, id| {
        let value = vec![1, 0, 0, 0];
        host.ask(Command::SetOption { id, level: 0, name: 1, value }).unwrap();
    };
    let (all, one) = (b.create(1, Space::Tcp), b.create(2, Space::Tcp));
    for (id, address) in [(all, everywhere(80)), (one, at(2, 80))] {
        reuse(&mut b, id);
        b.ask(Command::Bind { id, address }).unwrap();
    }
    b.ask(Command::Listen { id: one, backlog: 0 }).unwrap();
    assert_eq!(b.ask(Command::Listen { id: all, backlog: 0 }), Err(Status::EXIST));
    a.connect((1, Space::Tcp), at(2, 80), param(1, b""));
    talk(&mut a, &mut b);
    assert_eq!(b.expects(Kind::Request).uid, 2);
}

/// An IPv4 address in IPv6's form is that address (ipv6(7)): programs of both kinds have one
/// socket.
#[test]
fn who_listens_at_a_mapped_address_is_heard() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let std::net::IpAddr::V4(ip) = at(2, 0).ip() else { panic!("an IPv4 address") };
    let mapped = SocketAddr::from((ip.to_ipv6_mapped(), 80));
    let id = b.create(1, Space::Tcp);
    b.ask(Command::Bind { id, address: mapped }).unwrap();
    let other = b.create(2, Space::Tcp);
    let taken = b.ask(Command::Bind { id: other, address: at(2, 80) });
    assert_eq!(taken, Err(Status::EXIST), "it is the same address");
    b.ask(Command::Listen { id, backlog: 0 }).unwrap();
    a.connect((1, Space::Tcp), at(2, 80), param(1, b""));
    talk(&mut a, &mut b);
    assert_eq!(b.expects(Kind::Request).uid, 1);
}

#[test]
fn a_group_is_joined_and_left() {
    let mut host = Host::new(1);
    let id = host.create(1, Space::Udp);
    let group: SocketAddr = "224.1.2.3:0".parse().unwrap();
    let join = |address| Command::Join { id, uid: 9, address };
    assert_eq!(host.ask(join(group)), Err(Status::INVAL), "it has no address yet");
    host.ask(Command::Resolve { id, source: None, dest: group }).unwrap();
    host.expects(Kind::AddressResolved);
    assert_eq!(host.ask(join(at(2, 0))), Err(Status::INVAL), "no group");
    let Ok(Reply::Number(number)) = host.ask(join(group)) else { panic!("a group") };
    let joined = host.expects(Kind::MulticastJoin);
    let Said::Datagram(qpn, qkey, way, _) = joined.said else { panic!("a group") };
    assert_eq!((joined.uid, qpn, qkey), (9, 0xff_ffff, UDP_QKEY));
    assert_eq!(way.dest[10..], [0xff, 0xff, 224, 1, 2, 3]);
    assert_eq!(host.ask(Command::Leave { id: number }), Ok(Reply::Counts(1, 0)));
    assert_eq!(host.ask(Command::Leave { id: number }), Err(Status::NOENT));
}

#[test]
fn an_identifier_moves_with_its_events() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (_, passive) = connected(&mut a, &mut b);
    b.machine.end_session(99, 0);
    a.machine.end_session(1, 0);
    talk(&mut a, &mut b);
    let (before, after) = (b.asker, b.another_session(1));
    assert_eq!(b.by(after, Command::Migrate { id: passive }), Ok(Reply::Counts(1, 0)));
    assert_eq!(b.by(before, Command::GetEvent), Err(Status::BUSY));
    let Ok(Reply::Event(event)) = b.by(after, Command::GetEvent) else { panic!("an event") };
    assert_eq!((event.kind, event.id), (Kind::Disconnected, passive));
}

/// Who has asked a listener goes where the listener goes, and is not of the channel that it left.
#[test]
fn a_listener_moves_with_those_who_have_asked() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let listener = b.listen(7, Space::Tcp, 80);
    let active = a.connect((1, Space::Tcp), at(2, 80), param(0x11, b""));
    talk(&mut a, &mut b);
    let (before, after) = (b.asker, b.another_session(1));
    assert_eq!(b.by(after, Command::Migrate { id: listener }), Ok(Reply::Counts(0, 0)));
    b.machine.remove_channel(before, 0).unwrap();
    talk(&mut a, &mut b);
    assert_eq!(a.event(), None, "nobody has refused it");
    b.asker = after;
    let id = b.expects(Kind::Request).id;
    b.ask(Command::Accept { id, uid: 2, param: Some(param(0x22, b"")) }).unwrap();
    talk(&mut a, &mut b);
    a.expects(Kind::Response);
    a.ask(Command::Accept { id: active, uid: 0, param: None }).unwrap();
    talk(&mut a, &mut b);
    assert_eq!(b.expects(Kind::Established).id, id);
    for host in [&mut a, &mut b] {
        host.machine.end_session(1, 0);
    }
    talk(&mut a, &mut b);
    assert!(b.machine.is_empty(), "{:?}", b.machine);
}

/// A peer that was started anew has another connection with the same queue pair.
#[test]
fn a_stale_connection_is_ended() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (_, passive) = connected(&mut a, &mut b);
    let mut reborn = Host::new(1);
    // Numbers of another life begin somewhere else.
    reborn.machine.last += 500;
    reborn.connect((5, Space::Tcp), at(2, 7471), param(0x11, b""));
    talk(&mut reborn, &mut b);
    assert_eq!(reborn.expects(Kind::Rejected).status, 10, "a stale connection");
    let gone = b.expects(Kind::Disconnected);
    assert_eq!(gone.id, passive);
    reborn.connect((6, Space::Tcp), at(2, 7471), param(0x11, b""));
    talk(&mut reborn, &mut b);
    b.expects(Kind::Request);
}

/// Offsets are those of rdma/rdma_user_cm.h.
#[test]
fn answers_are_as_long_as_the_kernels() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let id = a.connect((1, Space::Tcp), at(2, 80), param(0x11, b""));
    let lengths = |host: &mut Host, command| host.ask(command).map(|reply| write(&reply).len());
    assert_eq!(lengths(&mut a, Command::Query { id }), Ok(208));
    assert_eq!(lengths(&mut a, Command::QpAttr { id, state: 1 }), Ok(144));
    talk(&mut a, &mut b);
    assert_eq!(lengths(&mut a, Command::GetEvent), Ok(336));
    let command = |number: u32, len: usize| {
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.resize(8 + len, 0);
        parse(&bytes)
    };
    assert_eq!(command(1, 16), Ok(Command::Destroy { id: 0 }));
    for (number, len) in [(1, 15), (1, 17), (12, 9), (6, 287), (14, 25)] {
        assert_eq!(command(number, len), Err(Status::INVAL), "{number}");
    }
    for number in [13, 19, 20, u32::MAX] {
        assert_eq!(command(number, 8), Err(Status::NOTSUPP), "{number}");
    }
    assert_eq!(parse(&[0; 7]), Err(Status::INVAL));
}

#[test]
fn a_message_of_another_address_is_not_believed() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (active, passive) = connected(&mut a, &mut b);
    let end = build(&Message::Dreq { local: active, remote: passive, qpn: 0x22 }, 1);
    let forged = Mad { source: gid(3), dest: gid(2), traffic_class: 0, sl: 0, bytes: end };
    b.hears(std::slice::from_ref(&forged));
    assert_eq!(b.event(), None);
    b.hears(&[Mad { source: gid(1), ..forged }]);
    b.expects(Kind::Disconnected);
}
