//! What verbs promise, in the plainest code: two guests with their regions, windows, shared queues
//! and connections, where work requests execute one after the other. It knows nothing of rings,
//! timers, turns or pieces, and uses nothing of the engine.
//!
//! A request at the head of a send queue either completes, fails, or waits: for a receive of its
//! peer, or for an answer that only [`Model::time_passes`] decides. Statuses follow
//! docs/virtio-rdma.md §8.3.

use std::collections::VecDeque;

use virtio_rdma_abi::{access, event, wc_status};

use super::losses::Losses;

/// Connections between the two guests.
pub(super) const LINES: usize = 3;
/// Regions of each guest, each over a piece of memory of its own.
pub(super) const REGIONS: usize = 4;
/// Bytes of such a piece.
pub(super) const PIECE: u64 = 512;
/// Type 2 windows of each guest.
pub(super) const WINDOWS: usize = 2;
/// Rights that every QP of the model gives its peer.
const QP_RIGHTS: u32 =
    access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// A piece of memory named by key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    pub(super) key: u32,
    pub(super) addr: u64,
}

/// A region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) key: u32,
    pub(super) domain: usize,
    pub(super) rights: u32,
}

/// A type 2 window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) key: u32,
    pub(super) domain: usize,
    pub(super) bound: Option<Binding>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Binding {
    pub(super) region: usize,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) rights: u32,
    pub(super) qpn: u32,
}

/// What a bind asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bind {
    pub(super) present: u32,
    pub(super) new: u32,
    pub(super) region: u32,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) rights: u32,
}

/// What a work request does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    Send { invalidate: Option<u32> },
    Write { immediate: bool },
    Read,
    FetchAdd(u64),
    CompareSwap(u64, u64),
    Bind(Bind),
    Invalidate(u32),
}

/// A posted send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) action: Action,
    pub(super) local: Named,
    pub(super) len: u32,
    pub(super) remote: Named,
}

/// A posted receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive {
    pub(super) id: u64,
    pub(super) into: Named,
    pub(super) len: u32,
}

/// The states that the model's QPs can be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Rts,
    Sqd,
    Err,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    None,
    Receiver,
    Answer,
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub(super) struct Qp {
    pub(super) qpn: u32,
    pub(super) domain: usize,
    pub(super) state: State,
    pub(super) shared: bool,
    /// Waits for receives for ever.
    pub(super) patient: bool,
    pub(super) sends: VecDeque<Request>,
    pub(super) receives: VecDeque<Receive>,
    /// The head of `sends` was tried.
    pub(super) begun: bool,
    /// The first of `sends`, which the peer has executed and this end has not heard of, each with
    /// what an atomic found.
    pub(super) unheard: Vec<Option<[u8; 8]>>,
    /// The next is sent all the same.
    pub(super) ahead: bool,
    /// Where the piece of the first of `sends` begins that waits for a receive: those before it are
    /// done.
    pub(super) done: usize,
    pub(super) wait: Wait,
    /// The peer found no receive here.
    pub(super) wanted: bool,
    pub(super) draining: bool,
    pub(super) last_told: bool,
}

/// A shared receive queue; it belongs to domain 0.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared {
    pub(super) receives: VecDeque<Receive>,
    pub(super) limit: usize,
    pub(super) wanting: Vec<usize>,
}

/// A completion, as much of it as verbs define.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) id: u64,
    pub(super) status: u8,
    /// Bytes received; 0 for sends and failures.
    pub(super) len: u32,
}

/// One guest.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) base: u64,
    pub(super) memory: Vec<u8>,
    pub(super) regions: [Option<Region>; REGIONS],
    pub(super) windows: [Option<Window>; WINDOWS],
    pub(super) shared: Option<Shared>,
    pub(super) qps: [Option<Qp>; LINES],
    /// Completions since the last look: of sends, of receives.
    pub(super) done: [[Vec<Done>; 2]; LINES],
    /// Asynchronous events since the last look: type and line, or type and `LINES` for the shared
    /// queue.
    pub(super) events: Vec<(u32, usize)>,
    pub(super) run: VecDeque<usize>,
}

/// Both guests.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) guests: [Guest; 2],
    /// Which answers are lost.
    pub(super) losses: Losses,
    /// Bytes of a piece.
    pub(super) piece: usize,
}

pub(super) enum Outcome {
    Done,
    /// The peer did it, and these bytes are to be put there.
    Found(usize, Vec<u8>),
    Waits(Wait),
    Failed(u8),
    /// The peer's answer.
    Refused(u8),
}

/// Whether the QP waits for receives for ever. If both ends of a connection were impatient, which
/// one gives up first would be chance.
pub(super) const fn is_patient(side: usize, line: usize) -> bool {
    side == 1 || line != LINES - 1
}

impl Request {
    /// Whether it may be sent before those ahead of it are answered.
    const fn is_early(&self) -> bool {
        matches!(self.action, Action::Send { invalidate: None } | Action::Write { .. })
    }
}

impl Model {
    /// Connects a line anew: both QPs to RTS, with nothing posted.
    pub(super) fn connect(&mut self, line: usize, qpns: [u32; 2], domains: [usize; 2]) {
        for (side, guest) in self.guests.iter_mut().enumerate() {
            guest.qps[line] = Some(Qp {
                qpn: qpns[side],
                domain: domains[side],
                state: State::Rts,
                shared: guest.shared.is_some() && line > 0,
                patient: is_patient(side, line),
                sends: VecDeque::new(),
                receives: VecDeque::new(),
                begun: false,
                unheard: Vec::new(),
                ahead: false,
                done: 0,
                wait: Wait::None,
                wanted: false,
                draining: false,
                last_told: false,
            });
        }
    }

    /// RESET and a new connection, of QPs that exist: `shared` is what it was.
    pub(super) fn reconnect(&mut self, line: usize) {
        let ends = [0, 1].map(|side| {
            let qp = self.guests[side].qps[line].as_ref();
            qp.map_or((0, 0, false), |qp| (qp.qpn, qp.domain, qp.shared))
        });
        self.connect(line, ends.map(|end| end.0), ends.map(|end| end.1));
        for (side, end) in ends.into_iter().enumerate() {
            if let Some(qp) = &mut self.guests[side].qps[line] {
                qp.shared = end.2;
            }
        }
    }

    pub(super) fn error(&mut self, side: usize, line: usize) {
        self.guests[side].fails(line);
    }

    /// A producer index that cannot be true.
    pub(super) fn bad_index(&mut self, side: usize, line: usize) {
        self.guests[side].events.push((event::QP_FATAL, line));
        self.guests[side].fails(line);
    }

    /// RTS to SQD; nothing begins there.
    pub(super) fn drain(&mut self, side: usize, line: usize) {
        let guest = &mut self.guests[side];
        let Some(qp) = guest.qps[line].as_mut() else { return };
        qp.state = State::Sqd;
        qp.draining = true;
        if !qp.begun {
            qp.draining = false;
            guest.events.push((event::SQ_DRAINED, line));
        }
    }

    /// SQD to RTS; refused while something is under way.
    pub(super) fn go_on(&mut self, side: usize, line: usize) -> bool {
        let Some(qp) = self.guests[side].qps[line].as_mut() else { return false };
        if qp.draining {
            return false;
        }
        qp.state = State::Rts;
        self.ready(side, line);
        self.settle();
        true
    }

    pub(super) fn post(&mut self, side: usize, line: usize, request: Request) {
        let guest = &mut self.guests[side];
        let Some(qp) = guest.qps[line].as_mut() else { return };
        qp.sends.push_back(request);
        if qp.ahead {
            qp.wait = Wait::None;
        }
        if qp.state == State::Err {
            guest.fails(line);
        } else {
            self.ready(side, line);
            self.settle();
        }
    }

    pub(super) fn receive(&mut self, side: usize, line: usize, receive: Receive) {
        let guest = &mut self.guests[side];
        let Some(qp) = guest.qps[line].as_mut() else { return };
        qp.receives.push_back(receive);
        if qp.state == State::Err {
            guest.fails(line);
        } else if std::mem::take(&mut qp.wanted) && !self.losses.loses_request() {
            self.wake(1 - side, line);
        }
        self.settle();
    }

    pub(super) fn receive_shared(&mut self, side: usize, receive: Receive) {
        let Some(queue) = &mut self.guests[side].shared else { return };
        queue.receives.push_back(receive);
        for line in std::mem::take(&mut queue.wanting) {
            self.wake(1 - side, line);
        }
        self.settle();
    }

    pub(super) const fn set_limit(&mut self, side: usize, limit: usize) {
        if let Some(queue) = &mut self.guests[side].shared {
            queue.limit = limit;
        }
    }

    /// Long enough for every timeout and every retry, also for those of a request whose peer failed
    /// in this time.
    pub(super) fn time_passes(&mut self) {
        let ends = || (0..2).flat_map(|side| (0..LINES).map(move |line| (side, line)));
        loop {
            // Twice: a retry that fails for a reason of its own leaves its peer without an answer.
            for _ in 0..2 {
                let tried: Vec<(usize, usize)> =
                    ends().filter(|&(side, line)| self.comes_to_anything(side, line)).collect();
                tried.into_iter().for_each(|(side, line)| self.wake(side, line));
                self.settle();
            }
            let late = ends().find_map(|(side, line)| {
                let qp = self.guests[side].qps[line].as_ref()?;
                let status = match qp.wait {
                    Wait::Answer if self.answers(1 - side, line) => return Some((side, line, 0)),
                    Wait::Answer => wc_status::RETRY_EXC_ERR,
                    Wait::Receiver if !qp.patient => wc_status::RNR_RETRY_EXC_ERR,
                    _ => return None,
                };
                Some((side, line, status))
            });
            match late {
                // Its answer was lost, and it asks again.
                Some((_, _, 0)) => {}
                Some((side, line, status)) => self.failed(side, line, status),
                None => break,
            }
        }
    }

    /// Whether both ends of a line wait for a receive of the other.
    pub(super) fn both_wait(&self, line: usize) -> bool {
        let waits =
            |guest: &Guest| guest.qps[line].as_ref().is_some_and(|qp| qp.wait == Wait::Receiver);
        self.guests.iter().all(waits)
    }

    pub(super) fn wake(&mut self, side: usize, line: usize) {
        let Some(qp) = self.guests[side].qps[line].as_mut() else { return };
        if std::mem::replace(&mut qp.wait, Wait::None) != Wait::None {
            qp.ahead = false;
            self.ready(side, line);
        }
    }

    fn ready(&mut self, side: usize, line: usize) {
        let run = &mut self.guests[side].run;
        if !run.contains(&line) {
            run.push_back(line);
        }
    }

    pub(super) fn settle(&mut self) {
        while let Some(side) = (0..2).find(|&side| !self.guests[side].run.is_empty()) {
            if let Some(line) = self.guests[side].run.pop_front() {
                while self.step(side, line) {}
            }
        }
    }

    /// Tries the head of a send queue, or what is sent although nothing was heard of those before;
    /// true if the next one may be tried.
    fn step(&mut self, side: usize, line: usize) -> bool {
        let answers = self.answers(1 - side, line);
        let Some(qp) = self.guests[side].qps[line].as_mut() else { return false };
        let may_run = match qp.state {
            State::Rts => true,
            State::Sqd => qp.begun && !qp.ahead,
            State::Err => false,
        };
        if qp.wait != Wait::None || !may_run {
            return false;
        }
        let place = qp.unheard.len();
        if place > 0 && !qp.ahead {
            // What is asked for again was executed; whoever is in an error says nothing.
            if !answers || self.losses.loses() {
                return self.waits(side, line, Wait::Answer);
            }
            return self.hear(side, line);
        }
        let ahead = std::mem::take(&mut qp.ahead);
        // What is posted next may go as well.
        qp.ahead = ahead && qp.sends.len() == place;
        let Some(&request) = qp.sends.get(place).filter(|request| !ahead || request.is_early())
        else {
            return ahead && self.waits(side, line, Wait::Answer);
        };
        qp.begun = true;
        let outcome = self.execute(side, line, &request);
        let is_local = matches!(request.action, Action::Bind(_) | Action::Invalidate(_));
        let answered =
            !is_local && !matches!(outcome, Outcome::Waits(Wait::Answer) | Outcome::Failed(_));
        let lost = answered && self.losses.loses();
        match outcome {
            // A read is done again, as if it had not been.
            Outcome::Found(..) if lost && matches!(request.action, Action::Read) => {
                self.waits(side, line, Wait::Answer)
            }
            Outcome::Done | Outcome::Found(..) if lost => {
                let found = match &outcome {
                    Outcome::Found(_, bytes) => bytes.first_chunk().copied(),
                    _ => None,
                };
                let goes_on = request.is_early() && self.losses.chance();
                if let Some(qp) = &mut self.guests[side].qps[line] {
                    qp.unheard.push(found);
                    qp.ahead = goes_on;
                }
                goes_on || self.waits(side, line, Wait::Answer)
            }
            Outcome::Waits(_) | Outcome::Refused(_) if lost => self.waits(side, line, Wait::Answer),
            // It was not sent: what is wrong with it is found in its turn.
            Outcome::Failed(_) if place > 0 => self.waits(side, line, Wait::Answer),
            Outcome::Waits(Wait::Answer) => self.waits(side, line, Wait::Answer),
            Outcome::Done => self.hear(side, line) && self.done(side, line),
            Outcome::Found(at, bytes) => {
                self.guests[side].put(at, &bytes);
                self.done(side, line)
            }
            Outcome::Waits(wait) => {
                self.hear(side, line);
                self.waits(side, line, wait)
            }
            Outcome::Failed(status) | Outcome::Refused(status) => {
                self.hear(side, line);
                self.failed(side, line, status);
                false
            }
        }
    }

    /// Whether a QP is there and in a state to answer.
    pub(super) fn answers(&self, side: usize, line: usize) -> bool {
        self.guests[side].qps[line].as_ref().is_some_and(|qp| qp.state != State::Err)
    }

    fn waits(&mut self, side: usize, line: usize, wait: Wait) -> bool {
        if let Some(qp) = &mut self.guests[side].qps[line] {
            qp.wait = wait;
        }
        false
    }

    /// What was not heard of is told by an answer to what came later.
    fn hear(&mut self, side: usize, line: usize) -> bool {
        let Some(qp) = &mut self.guests[side].qps[line] else { return false };
        for found in std::mem::take(&mut qp.unheard) {
            if let Some(bytes) = found {
                let Some(at) = self.lands(side, line) else {
                    self.failed(side, line, wc_status::LOC_PROT_ERR);
                    return false;
                };
                self.guests[side].put(at, &bytes);
            }
            self.done(side, line);
        }
        true
    }

    /// Where what the first request found is put.
    fn lands(&self, side: usize, line: usize) -> Option<usize> {
        let guest = &self.guests[side];
        let qp = guest.qps[line].as_ref()?;
        let request = qp.sends.front()?;
        guest.find(request.local, request.len, access::LOCAL_WRITE, (qp.domain, None))
    }

    fn done(&mut self, side: usize, line: usize) -> bool {
        let guest = &mut self.guests[side];
        let Some(qp) = &mut guest.qps[line] else { return false };
        let Some(request) = qp.sends.pop_front() else { return false };
        (qp.begun, qp.done) = (false, 0);
        let drained = qp.state == State::Sqd && std::mem::take(&mut qp.draining);
        guest.complete(line, 0, Done { id: request.id, status: 0, len: 0 });
        if drained {
            guest.events.push((event::SQ_DRAINED, line));
        }
        true
    }

    pub(super) fn failed(&mut self, side: usize, line: usize, status: u8) {
        let guest = &mut self.guests[side];
        if let Some(request) = guest.qps[line].as_mut().and_then(|qp| qp.sends.pop_front()) {
            guest.complete(line, 0, Done { id: request.id, status, len: 0 });
        }
        guest.fails(line);
    }

    fn execute(&mut self, side: usize, line: usize, request: &Request) -> Outcome {
        let guest = &mut self.guests[side];
        let own = guest.qps[line].as_ref().map(|qp| (qp.qpn, qp.domain, qp.done));
        let Some((qpn, domain, mut done)) = own else { return Outcome::Waits(Wait::Answer) };
        let (rights, remote_rights) = match request.action {
            Action::Bind(bind) => {
                let bound = guest.bind(domain, qpn, &bind);
                return bound.map_or(Outcome::Failed(wc_status::MW_BIND_ERR), |()| Outcome::Done);
            }
            Action::Invalidate(key) => {
                let done = guest.invalidate(key, qpn);
                return done.map_or(Outcome::Failed(wc_status::LOC_QP_OP_ERR), |()| Outcome::Done);
            }
            Action::Send { .. } => (0, 0),
            Action::Write { .. } => (0, access::REMOTE_WRITE),
            Action::Read => (access::LOCAL_WRITE, access::REMOTE_READ),
            Action::FetchAdd(_) | Action::CompareSwap(..) => {
                (access::LOCAL_WRITE, access::REMOTE_ATOMIC)
            }
        };
        let mut local = 0;
        if request.len > 0 {
            match guest.find(request.local, request.len, rights, (domain, None)) {
                Some(at) => local = at,
                None => return Outcome::Failed(wc_status::LOC_PROT_ERR),
            }
        }
        let bytes = guest.memory[local..local + request.len as usize].to_vec();
        if let Some(came) = self.losses.loses_piece(bytes.len(), self.piece) {
            self.begin_to_put((side, line), request, &bytes[..came]);
            return Outcome::Waits(Wait::Answer);
        }
        let peer = &mut self.guests[1 - side];
        let answers = peer.qps[line].as_ref().filter(|qp| qp.state != State::Err);
        let Some((peer_qpn, peer_domain)) = answers.map(|qp| (qp.qpn, qp.domain)) else {
            return Outcome::Waits(Wait::Answer);
        };
        if let Action::Send { invalidate } = request.action {
            return peer.deliver(line, &bytes, invalidate);
        }
        let atomic = matches!(request.action, Action::FetchAdd(_) | Action::CompareSwap(..));
        if atomic && !request.remote.addr.is_multiple_of(8) {
            return peer.refuses(line, event::QP_REQ_ERR, wc_status::REM_INV_REQ_ERR);
        }
        let mut remote = 0;
        if request.len > 0 {
            let user = (peer_domain, Some(peer_qpn));
            match peer.find(request.remote, request.len, remote_rights & QP_RIGHTS, user) {
                Some(at) => remote = at,
                None => {
                    return peer.refuses(line, event::QP_ACCESS_ERR, wc_status::REM_ACCESS_ERR);
                }
            }
        }
        let there = remote..remote + request.len as usize;
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        match request.action {
            Action::Write { immediate } => {
                if immediate {
                    // The last piece alone takes a receive, and alone is sent again where there is
                    // none (IBTA 9.7.5.2.8): it is not stored before.
                    let last = bytes.len().saturating_sub(1) / self.piece * self.piece;
                    peer.put(remote + done, &bytes[done..last.max(done)]);
                    done = last.max(done);
                    let Some(receive) = peer.take_receive(line) else {
                        if let Some(qp) = &mut self.guests[side].qps[line] {
                            qp.done = done;
                        }
                        return Outcome::Waits(Wait::Receiver);
                    };
                    peer.complete(line, 1, Done { id: receive.id, status: 0, len: request.len });
                }
                peer.put(remote + done, &bytes[done..]);
                Outcome::Done
            }
            Action::FetchAdd(n) => {
                let before = peer.memory[there].to_vec();
                peer.put(remote, &word(&before).wrapping_add(n).to_le_bytes());
                Outcome::Found(local, before)
            }
            Action::CompareSwap(expected, new) => {
                let before = peer.memory[there].to_vec();
                if word(&before) == expected {
                    peer.put(remote, &new.to_le_bytes());
                }
                Outcome::Found(local, before)
            }
            _ => Outcome::Found(local, peer.memory[there].to_vec()),
        }
    }
}
