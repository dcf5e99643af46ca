//! A link to a peer that is no NIC of this process: what it asks and answers is written by a test,
//! and goes the way of the trait [`Link`] alone.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::link::{
    Answer, Ask, Awaited, Fabric, Fanout, Flow, Gid, Inbound, Link, NicId, OUTSIDE, Operation,
    Outcome, Owner, Payload, Request, Service, Ticket, Token,
};
use crate::memory;

/// Lives of queue pairs that are none of this process's.
const LIFE: u64 = 1 << 63;

/// What was said and not heard, in both directions.
#[derive(Debug, Default)]
struct Line {
    /// What the peer says, and when it comes.
    inbound: VecDeque<(u64, Inbound)>,
    /// What NICs here ask of it.
    asked: Vec<Ask>,
    /// What NICs here answered: the number, the outcome, the bytes; and whether it was given leave
    /// to have more under way.
    answered: Vec<(u32, Option<Outcome>, Vec<u8>, bool)>,
}

/// The shard's end.
#[derive(Debug)]
pub struct Wire(Arc<Mutex<Line>>);

impl Link for Wire {
    fn submit(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Outcome {
        let Some(vni) = fabric.network(request.flow.source) else { return Outcome::NoAnswer };
        let mut bytes = vec![0; request.len as usize];
        match request.payload {
            Payload::Memory(segments) if !request.operation.fetches() => {
                memory::read(segments, request.offset.into(), &mut bytes).unwrap();
            }
            Payload::Inline(all) => bytes.copy_from_slice(&all[request.offset as usize..]),
            _ => bytes.clear(),
        }
        let (source, qpn) = (request.flow.source, request.flow.source_qpn);
        let (ticket, size) = (request.ticket, request.len);
        let token = Token { shard: OUTSIDE, nic: source, qpn, ticket, size };
        self.0.lock().unwrap().asked.push(Ask::new((token, vni), request, bytes));
        match request.service {
            Service::Reliable => Outcome::Later(Awaited::Answer),
            Service::Unreliable | Service::Datagram => Outcome::Done,
        }
    }

    fn poll(&mut self, now: u64) -> Option<Inbound> {
        let inbound = &mut self.0.lock().unwrap().inbound;
        inbound.front().filter(|(at, _)| *at <= now)?;
        inbound.pop_front().map(|(_, inbound)| inbound)
    }

    fn has_work(&self) -> bool {
        self.0.lock().unwrap().inbound.front().is_some_and(|(at, _)| *at == 0)
    }

    fn deadline(&self) -> Option<u64> {
        self.0.lock().unwrap().inbound.front().map(|(at, _)| *at)
    }

    fn answer(&mut self, token: Token, outcome: Option<Outcome>, given: (Vec<u8>, bool)) {
        assert_eq!(token.shard, OUTSIDE);
        let (bytes, gives_back) = given;
        let said = (token.ticket.number, outcome, bytes, gives_back);
        self.0.lock().unwrap().answered.push(said);
    }
}

/// The other end: a queue pair of somebody's.
#[derive(Debug)]
pub struct Peer {
    line: Arc<Mutex<Line>>,
    pub gid: Gid,
    pub qpn: u32,
    /// Whom it asks.
    pub to: (u32, Gid),
    vni: u32,
    number: u32,
    /// When what it says comes; 0: at once.
    pub at: u64,
}

/// What a peer asks.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub operation: Operation,
    pub service: Service,
    /// What goes along; empty where bytes come back.
    pub bytes: &'a [u8],
    pub len: u32,
    pub remote: (u64, u32),
    pub operands: [u64; 2],
}

impl Wanted<'_> {
    pub const fn of(operation: Operation) -> Self {
        let (bytes, len, remote, operands) = (&[], 0, (0, 0), [0; 2]);
        Self { operation, service: Service::Reliable, bytes, len, remote, operands }
    }
}

impl Peer {
    /// One of network `vni`, and the end of its wire that a shard gets.
    pub fn new(vni: u32, host: u8, qpn: u32) -> (Self, Wire) {
        let line = Arc::default();
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, host]);
        let to = (0, [0; 16]);
        let wire = Wire(Arc::clone(&line));
        (Self { line, gid, qpn, to, vni, number: 0, at: 0 }, wire)
    }

    fn say(&self, inbound: Inbound) {
        self.line.lock().unwrap().inbound.push_back((self.at, inbound));
    }

    /// Asks for something by the next number.
    pub fn ask(&mut self, wanted: Wanted<'_>) -> u32 {
        self.number += 1;
        self.ask_as(self.number, wanted);
        self.number
    }

    /// The same by a number that it may have used before.
    pub fn ask_as(&self, number: u32, wanted: Wanted<'_>) {
        let (dest_qpn, dest_gid) = self.to;
        let flow = Flow {
            source: NicId::ELSEWHERE,
            source_qpn: self.qpn,
            source_gid: self.gid,
            source_mac: [2; 6],
            dest_gid,
            dest_qpn,
            traffic_class: 0,
            hop_limit: 1,
            sl: 0,
        };
        let ticket = Ticket { life: LIFE, number };
        let len = wanted.len.max(wanted.bytes.len() as u32);
        let reply = RefCell::new(Vec::new());
        let payload = if wanted.operation.fetches() {
            Payload::Reply(&reply)
        } else {
            Payload::Piece(wanted.bytes)
        };
        let request = Request {
            flow: &flow,
            service: wanted.service,
            operation: wanted.operation,
            payload,
            total: len,
            offset: 0,
            message: 0,
            len,
            remote_addr: wanted.remote.0,
            rkey: wanted.remote.1,
            immediate: None,
            invalidate: None,
            solicited: false,
            operands: wanted.operands,
            qkey: 0x1111,
            fanout: Fanout::default(),
            owner: Owner::Unasked,
            ticket,
            crossed: false,
            ahead: false,
        };
        // A NIC of this process has the same number, and is not meant.
        let token = Token { shard: OUTSIDE, nic: NicId(0), qpn: self.qpn, ticket, size: len };
        self.say(Inbound::Ask(Ask::new((token, self.vni), &request, wanted.bytes.to_vec())));
    }

    /// Answers what a NIC here has asked.
    pub fn answer(&self, token: Token, outcome: Outcome, bytes: &[u8]) {
        let (outcome, bytes) = (Some(outcome), bytes.to_vec());
        self.say(Inbound::Answer(Answer { token, outcome, bytes, gives_back: true }));
    }

    /// What it was asked since the last look.
    pub fn asked(&self) -> Vec<Ask> {
        std::mem::take(&mut self.line.lock().unwrap().asked)
    }

    /// What it was answered since then: by number, with the bytes of what it read.
    pub fn answers(&self) -> Vec<(u32, Outcome, Vec<u8>)> {
        let all = std::mem::take(&mut self.line.lock().unwrap().answered);
        let said = |(number, outcome, bytes, _)| Some((number, outcome?, bytes));
        all.into_iter().filter_map(said).collect()
    }

    /// How many of its requests were taken in hand, of those that were not counted before: so much
    /// more it may have under way.
    pub fn given_back(&self) -> usize {
        let answered = &mut self.line.lock().unwrap().answered;
        let given = |said: &mut (u32, Option<Outcome>, Vec<u8>, bool)| std::mem::take(&mut said.3);
        answered.iter_mut().map(given).filter(|&given| given).count()
    }
}
