//! What verbs promise, in the plainest code: two guests with their regions, windows, shared queues
//! and connections, where work requests execute one after the other. It knows nothing of rings,
//! timers, turns or pieces, and uses nothing of the engine.
//!
//! A request at the head of a send queue either completes, fails, or waits: for a receive of its
//! peer, or for an answer that only [`Model::time_passes`] decides. Statuses follow
//! docs/virtio-rdma.md §8.3.

use std::collections::VecDeque;

use virtio_rdma_abi::{access, event, wc_status};

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
#[derive(Debug)]
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
    pub(super) wait: Wait,
    /// The peer found no receive here.
    pub(super) wanted: bool,
    pub(super) draining: bool,
    pub(super) last_told: bool,
}

/// A shared receive queue; it belongs to domain 0.
#[derive(Debug, Default)]
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
#[derive(Debug)]
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
#[derive(Debug)]
pub(super) struct Model {
    pub(super) guests: [Guest; 2],
}

pub(super) enum Outcome {
    Done,
    Waits(Wait),
    Failed(u8),
}

/// Whether the QP waits for receives for ever. If both ends of a connection were impatient, which
/// one gives up first would be chance.
pub(super) const fn is_patient(side: usize, line: usize) -> bool {
    side == 1 || line != LINES - 1
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
        } else if std::mem::take(&mut qp.wanted) {
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
                ends().for_each(|(side, line)| self.wake(side, line));
                self.settle();
            }
            let late = ends().find_map(|(side, line)| {
                let qp = self.guests[side].qps[line].as_ref()?;
                let status = match qp.wait {
                    Wait::Answer => wc_status::RETRY_EXC_ERR,
                    Wait::Receiver if !qp.patient => wc_status::RNR_RETRY_EXC_ERR,
                    _ => return None,
                };
                Some((side, line, status))
            });
            match late {
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

    fn wake(&mut self, side: usize, line: usize) {
        let Some(qp) = self.guests[side].qps[line].as_mut() else { return };
        if std::mem::replace(&mut qp.wait, Wait::None) != Wait::None {
            self.ready(side, line);
        }
    }

    fn ready(&mut self, side: usize, line: usize) {
        let run = &mut self.guests[side].run;
        if !run.contains(&line) {
            run.push_back(line);
        }
    }

    fn settle(&mut self) {
        while let Some(side) = (0..2).find(|&side| !self.guests[side].run.is_empty()) {
            if let Some(line) = self.guests[side].run.pop_front() {
                while self.step(side, line) {}
            }
        }
    }

    /// Tries the head of a send queue; true if the next one may be tried.
    fn step(&mut self, side: usize, line: usize) -> bool {
        let Some(qp) = self.guests[side].qps[line].as_mut() else { return false };
        let may_run = match qp.state {
            State::Rts => true,
            State::Sqd => qp.begun,
            State::Err => false,
        };
        let Some(&request) = qp.sends.front().filter(|_| may_run && qp.wait == Wait::None) else {
            return false;
        };
        qp.begun = true;
        match self.execute(side, line, &request) {
            Outcome::Done => {
                let guest = &mut self.guests[side];
                guest.complete(line, 0, Done { id: request.id, status: 0, len: 0 });
                if let Some(qp) = &mut guest.qps[line] {
                    qp.sends.pop_front();
                    qp.begun = false;
                    if qp.state == State::Sqd && std::mem::take(&mut qp.draining) {
                        guest.events.push((event::SQ_DRAINED, line));
                    }
                }
                true
            }
            Outcome::Waits(wait) => {
                if let Some(qp) = &mut self.guests[side].qps[line] {
                    qp.wait = wait;
                }
                false
            }
            Outcome::Failed(status) => {
                self.failed(side, line, status);
                false
            }
        }
    }

    fn failed(&mut self, side: usize, line: usize, status: u8) {
        let guest = &mut self.guests[side];
        if let Some(request) = guest.qps[line].as_mut().and_then(|qp| qp.sends.pop_front()) {
            guest.complete(line, 0, Done { id: request.id, status, len: 0 });
        }
        guest.fails(line);
    }

    fn execute(&mut self, side: usize, line: usize, request: &Request) -> Outcome {
        let guest = &mut self.guests[side];
        let Some((qpn, domain)) = guest.qps[line].as_ref().map(|qp| (qp.qpn, qp.domain)) else {
            return Outcome::Waits(Wait::Answer);
        };
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
                peer.put(remote, &bytes);
                if immediate {
                    let Some(receive) = peer.take_receive(line) else {
                        return Outcome::Waits(Wait::Receiver);
                    };
                    peer.complete(line, 1, Done { id: receive.id, status: 0, len: request.len });
                }
                return Outcome::Done;
            }
            Action::FetchAdd(n) => {
                let before = peer.memory[there].to_vec();
                peer.put(remote, &word(&before).wrapping_add(n).to_le_bytes());
                self.guests[side].put(local, &before);
            }
            Action::CompareSwap(expected, new) => {
                let before = peer.memory[there].to_vec();
                if word(&before) == expected {
                    peer.put(remote, &new.to_le_bytes());
                }
                self.guests[side].put(local, &before);
            }
            _ => {
                let read = peer.memory[there].to_vec();
                self.guests[side].put(local, &read);
            }
        }
        Outcome::Done
    }
}
