//! Connections through both connection managers, the host's one scripted.

use std::net::Ipv4Addr;

use vhost_rdma_engine::cm::{Inbox, MAD_LEN};

use super::*;
use crate::{Peer, Remote};

/// What the host's connection manager was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Connect(Key, Ask),
    Establish(Key),
    Accept(Key, u32),
    Reject(Key),
    Disconnect(Key),
    Close(Key),
}

#[derive(Debug, Default)]
struct Script {
    calls: Vec<Call>,
    refuses: bool,
}

impl HostCm for Script {
    fn connect(&mut self, key: Key, ask: &Ask) -> Result<(), Refused> {
        self.calls.push(Call::Connect(key, ask.clone()));
        if self.refuses { Err(Refused) } else { Ok(()) }
    }
    fn establish(&mut self, key: Key) -> Result<(), Refused> {
        self.calls.push(Call::Establish(key));
        Ok(())
    }
    fn accept(&mut self, key: Key, offer: &Offer, _: &[u8]) -> Result<(), Refused> {
        self.calls.push(Call::Accept(key, offer.qpn));
        if self.refuses { Err(Refused) } else { Ok(()) }
    }
    fn reject(&mut self, key: Key, _: &[u8]) {
        self.calls.push(Call::Reject(key));
    }
    fn disconnect(&mut self, key: Key) {
        self.calls.push(Call::Disconnect(key));
    }
    fn close(&mut self, key: Key) {
        self.calls.push(Call::Close(key));
    }
}

fn gid(net: u8, host: u8) -> Gid {
    Ipv4Addr::new(10, net, 0, host).to_ipv6_mapped().octets()
}

const NOW: Duration = Duration::from_secs(1);
const QPN: u32 = 0x11;
const PEER_QPN: u32 = 0x99;
/// Its number for a connection.
const GUEST_ID: u32 = 4242;
const AGREED: Agreed = Agreed { psn: 0x333, mtu: 3 };

/// A guest 10.0.0.1, of which the host is 10.9.0.1, and a peer 10.0.0.2 that it has under 10.9.0.2.
struct Bench {
    terminator: Terminator<Script>,
    station: Station,
}

impl Bench {
    fn new() -> Self {
        let directory: Arc<Directory> = Arc::default();
        let inbox = Arc::new(Inbox::new(Arc::new(|| {})));
        directory.add_holder(("rxe0", 7, gid(0, 1)), gid(9, 1), inbox.clone());
        directory.add_qp("rxe0", QPN, 7);
        let address = gid(9, 2);
        let same = Ipv4Addr::new(10, 9, 0, 2).into();
        let peer = Peer { address: same, prefix_len: 32, through: None, remote: None };
        directory.set_peers(7, vec![peer]);
        assert!(directory.station(&gid(9, 1), &address).is_some());
        let station = Station { device: "rxe0".to_owned(), vni: 7, gid: gid(0, 1), inbox };
        Self { terminator: Terminator::new(Script::default(), directory), station }
    }

    fn send(&mut self, message: &Message) {
        self.send_bytes(build(message, 5));
    }

    fn send_bytes(&mut self, bytes: [u8; MAD_LEN]) {
        let (source, dest) = (gid(0, 1), gid(9, 2));
        let mad = Mad { source, dest, traffic_class: 0, sl: 0, bytes };
        let sent = Sent { station: self.station.clone(), host: gid(9, 1), to: dest, mad };
        self.terminator.sent(sent, NOW);
    }

    fn host_says(&mut self, event: Event) {
        self.terminator.happened(event, NOW);
    }

    /// What the guest was told since.
    fn told(&self) -> Vec<Message> {
        std::iter::from_fn(|| self.station.inbox.take())
            .map(|mad| {
                assert_eq!((mad.source, mad.dest), (gid(9, 2), gid(0, 1)));
                match parse(&mad.bytes) {
                    Parsed::Message(message) => message,
                    other => panic!("{other:?}"),
                }
            })
            .collect()
    }

    fn calls(&mut self) -> Vec<Call> {
        std::mem::take(&mut self.terminator.host.calls)
    }

    fn agreed(&self) -> Option<Agreed> {
        self.terminator.directory.agreed("rxe0", (gid(9, 2), PEER_QPN))
    }

    /// A guest's connection, as far as the peer's answer.
    fn replied(&mut self) -> Key {
        self.send(&request());
        let key = match self.calls().as_slice() {
            [Call::Connect(key, _)] => *key,
            other => panic!("{other:?}"),
        };
        self.host_says(Event::Response(key, answer()));
        self.told();
        key
    }
}

fn request() -> Message {
    let ends = Ends { source: gid(0, 1), source_port: 1000, dest: gid(9, 2), dest_port: 7471 };
    let offer = Offer { qpn: QPN, psn: 0x111, initiator_depth: 1, ..Offer::default() };
    Message::Req { local: GUEST_ID, ends, offer, mtu: 3, private: vec![7; 56] }
}

fn answer() -> Answer {
    let offer = Offer { qpn: PEER_QPN, psn: 0x222, responder_resources: 1, ..Offer::default() };
    Answer { offer, agreed: AGREED, private: vec![8; 10] }
}

#[test]
fn a_guest_connects_and_the_peer_hangs_up() {
    let mut bench = Bench::new();
    bench.send(&request());
    let calls = bench.calls();
    let [Call::Connect(key, ask)] = calls.as_slice() else { panic!("{calls:?}") };
    let key = *key;
    assert_eq!((ask.from, ask.to, ask.port, ask.offer.qpn), (gid(9, 1), gid(9, 2), 7471, QPN));
    assert_eq!(ask.private, vec![7; 56], "behind the header of the IP service");
    bench.send(&request());
    assert_eq!(bench.calls(), [], "a REQ that was sent again");
    assert_eq!(bench.agreed(), None);
    bench.host_says(Event::Response(key, answer()));
    assert_eq!(bench.agreed(), Some(AGREED), "what the host gave away");
    let told = bench.told();
    let [Message::Rep { local, remote, offer, private }] = told.as_slice() else {
        panic!("{told:?}")
    };
    assert_eq!((*local, *remote, offer.qpn, offer.psn), (key, GUEST_ID, PEER_QPN, 0x222));
    assert_eq!(private[..10], [8; 10]);
    bench.send(&request());
    assert_eq!(bench.told(), told, "a REP that was lost is told again");
    bench.send(&Message::Rtu { local: GUEST_ID, remote: key });
    assert_eq!(bench.calls(), [Call::Establish(key)]);
    bench.host_says(Event::Established(key));
    assert_eq!(bench.told(), []);
    bench.host_says(Event::Disconnected(key));
    assert_eq!(bench.told(), [Message::Dreq { local: key, remote: GUEST_ID, qpn: QPN }]);
    bench.send(&Message::Drep { local: GUEST_ID, remote: key });
    assert_eq!(bench.calls(), [Call::Disconnect(key), Call::Disconnect(key), Call::Close(key)]);
    assert_eq!((bench.agreed(), bench.terminator.len()), (None, 0));
}

#[test]
fn a_peer_connects_and_the_guest_hangs_up() {
    let mut bench = Bench::new();
    let key = bench.terminator.next_key();
    let ends = Ends { source: gid(9, 2), source_port: 9, dest: gid(9, 1), dest_port: 80 };
    bench.host_says(Event::Request { key, ends, answer: answer() });
    let told = bench.told();
    let [Message::Req { local, ends, offer, mtu: 3, .. }] = told.as_slice() else {
        panic!("{told:?}")
    };
    assert_eq!((*local, ends.dest, ends.dest_port), (key, gid(0, 1), 80), "its own address");
    assert_eq!((offer.qpn, offer.psn), (PEER_QPN, 0x222));
    assert_eq!(bench.agreed(), Some(AGREED), "before the guest has answered: it is in RTR by then");
    let offer = Offer { qpn: QPN, psn: 0x444, ..Offer::default() };
    bench.send(&Message::Rep { local: GUEST_ID, remote: key, offer, private: Vec::new() });
    assert_eq!(bench.calls(), [Call::Accept(key, QPN)]);
    bench.host_says(Event::Established(key));
    assert_eq!(bench.told(), [Message::Rtu { local: key, remote: GUEST_ID }]);
    bench.send(&Message::Dreq { local: GUEST_ID, remote: key, qpn: PEER_QPN });
    assert_eq!(bench.told(), [Message::Drep { local: key, remote: GUEST_ID }]);
    assert_eq!(bench.calls(), [Call::Disconnect(key), Call::Close(key)]);
    assert_eq!((bench.agreed(), bench.terminator.len()), (None, 0));
    bench.send(&Message::Dreq { local: GUEST_ID, remote: key, qpn: PEER_QPN });
    assert_eq!(bench.told(), [Message::Drep { local: key, remote: GUEST_ID }], "it was lost");
}

#[test]
fn refusals_pass_in_both_directions() {
    let mut bench = Bench::new();
    let rejected = |bench: &Bench| match bench.told().as_slice() {
        [Message::Rej { remote: GUEST_ID, reason, .. }] => *reason,
        other => panic!("{other:?}"),
    };
    bench.send(&request());
    let Some(Call::Connect(key, _)) = bench.calls().pop() else { panic!("a connection") };
    bench.host_says(Event::Rejected { key, reason: 28, private: vec![1] });
    assert_eq!(rejected(&bench), reason::CONSUMER);
    bench.send(&request());
    let Some(Call::Connect(key, _)) = bench.calls().pop() else { panic!("another") };
    bench.host_says(Event::Failed(key));
    assert_eq!(rejected(&bench), reason::TIMEOUT);
    bench.terminator.host.refuses = true;
    bench.send(&request());
    assert_eq!(rejected(&bench), reason::NO_RESOURCES);
    bench.terminator.host.refuses = false;
    bench.calls();
    let key = bench.replied();
    let private = Vec::new();
    let no = Message::Rej { local: GUEST_ID, remote: key, of_rep: true, reason: 28, private };
    bench.send(&no);
    assert_eq!(bench.calls(), [Call::Reject(key), Call::Close(key)]);
    assert_eq!(bench.terminator.len(), 0);
}

#[test]
fn what_a_guest_may_not_do_it_does_not() {
    let mut bench = Bench::new();
    // Another's queue pair.
    let Message::Req { local, ends, offer, mtu, private } = request() else { panic!("a REQ") };
    let offer = Offer { qpn: 0x77, ..offer };
    bench.send(&Message::Req { local, ends, offer, mtu, private });
    assert!(matches!(bench.told().as_slice(), [Message::Rej { .. }]));
    assert_eq!(bench.calls(), []);
    // Another's connection.
    let key = bench.replied();
    let other = Arc::new(Inbox::new(Arc::new(|| {})));
    let own = std::mem::replace(&mut bench.station.inbox, other);
    bench.send(&Message::Rtu { local: GUEST_ID, remote: key });
    bench.send(&Message::Drep { local: GUEST_ID, remote: key });
    assert_eq!(bench.calls(), []);
    bench.station.inbox = own;
    // Messages out of turn, and numbers that nobody has.
    let offer = Offer::default();
    bench.send(&Message::Rep { local: 1, remote: key, offer, private: Vec::new() });
    bench.send(&Message::Rtu { local: 1, remote: 99 });
    bench.send(&Message::Drep { local: 1, remote: key });
    assert_eq!(bench.calls(), []);
    assert_eq!(bench.terminator.len(), 1);
}

#[test]
fn services_that_are_not_carried_are_refused_at_once() {
    let mut bench = Bench::new();
    let mut native = build(&request(), 1);
    native[24 + 8] = 1;
    bench.send_bytes(native);
    let told = bench.told();
    assert!(matches!(
        told.as_slice(),
        [Message::Rej { remote: GUEST_ID, reason: reason::INVALID_SERVICE, .. }]
    ));
    assert_eq!(bench.calls(), []);
}

#[test]
fn peers_that_no_entry_names_or_that_are_behind_a_daemon_of_ours_are_refused() {
    let mut bench = Bench::new();
    let event = |key, host| {
        let ends = Ends { source: gid(9, host), source_port: 9, dest: gid(9, 1), dest_port: 80 };
        Event::Request { key, ends, answer: answer() }
    };
    bench.host_says(event(50, 3));
    assert_eq!(bench.calls(), [Call::Reject(50), Call::Close(50)]);
    let same = Ipv4Addr::new(10, 9, 0, 2).into();
    let remote = Remote { daemon: "b:1".into(), host: "b".into(), network: "net".into() };
    let peer = Peer { address: same, prefix_len: 32, through: None, remote: Some(remote) };
    bench.terminator.directory.set_peers(7, vec![peer]);
    bench.host_says(event(51, 2));
    assert_eq!(bench.calls(), [Call::Reject(51), Call::Close(51)]);
    assert_eq!((bench.told(), bench.terminator.len()), (Vec::new(), 0));
}

#[test]
fn connections_are_bounded_and_do_not_outlive_their_guest() {
    let mut bench = Bench::new();
    for n in 0..=1024 {
        let Message::Req { ends, offer, mtu, private, .. } = request() else { panic!("a REQ") };
        bench.send(&Message::Req { local: n + 1, ends, offer, mtu, private });
    }
    assert_eq!(bench.calls().len(), OF_NIC);
    assert!(matches!(bench.told().as_slice(), [Message::Rej { remote: 1025, .. }]));
    bench.terminator.sweep(NOW + PATIENCE);
    assert_eq!(bench.terminator.len(), 0);
    bench.calls();
    bench.told();
    let key = bench.replied();
    bench.send(&Message::Rtu { local: GUEST_ID, remote: key });
    bench.calls();
    bench.terminator.sweep(NOW + 2 * PATIENCE);
    assert_eq!(bench.calls(), [], "one that came about stays");
    bench.terminator.directory.remove_holder(("rxe0", 7, gid(0, 1)));
    bench.terminator.sweep(NOW);
    assert_eq!(bench.calls(), [Call::Disconnect(key), Call::Close(key)]);
}
