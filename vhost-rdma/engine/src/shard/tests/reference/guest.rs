//! One guest of the model: what its keys open, what its queues hold, and what arrives at it.

use virtio_rdma_abi::{access, event, wc_status};

use super::model::{
    Bind, Binding, Done, Guest, LINES, Named, Outcome, PIECE, REGIONS, Receive, State, WINDOWS,
    Wait, Window,
};

impl Window {
    /// Whether a work request of this QP would free it.
    pub(super) fn is_bound_to(&self, qpn: u32) -> bool {
        self.bound.is_some_and(|bound| bound.qpn == qpn)
    }

    /// Where it is bound.
    pub(super) fn start(&self) -> Option<u64> {
        self.bound.map(|bound| bound.addr)
    }

    /// Bytes that it shows.
    pub(super) fn size(&self) -> Option<u64> {
        self.bound.map(|bound| bound.len)
    }

    pub(super) const fn new(key: u32, domain: usize) -> Self {
        Self { key, domain, bound: None }
    }
}

impl Guest {
    pub(super) fn new(base: u64, memory: Vec<u8>) -> Self {
        Self {
            base,
            memory,
            regions: [None; REGIONS],
            windows: [None; WINDOWS],
            shared: None,
            qps: Default::default(),
            done: Default::default(),
            events: Vec::new(),
            run: std::collections::VecDeque::new(),
        }
    }

    /// Everything but memory is gone.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.base, std::mem::take(&mut self.memory));
    }

    pub(super) fn is_in_use(&self, region: usize) -> bool {
        self.windows.iter().flatten().any(|w| w.bound.is_some_and(|bound| bound.region == region))
    }

    pub(super) const fn piece(&self, region: usize) -> u64 {
        self.base + region as u64 * PIECE
    }

    /// Where in memory `len` bytes at `named` lie, if the key opens them to the guest's own
    /// requests or (`qpn`) to those of a peer.
    pub(super) fn find(
        &self,
        named: Named,
        len: u32,
        rights: u32,
        user: (usize, Option<u32>),
    ) -> Option<usize> {
        let (domain, qpn) = user;
        let inside = |start: u64, size: u64| {
            let offset = named.addr.checked_sub(start)?;
            (offset <= size && u64::from(len) <= size - offset).then_some(())
        };
        let region = self.regions.iter().position(|r| r.is_some_and(|r| r.key == named.key));
        if let Some((number, region)) = region.and_then(|n| Some((n, self.regions[n]?))) {
            let allowed = region.domain == domain && rights & !region.rights == 0;
            allowed.then(|| inside(self.piece(number), PIECE))??;
        } else {
            let window = self.windows.iter().flatten().find(|window| window.key == named.key)?;
            let bound = window.bound?;
            let allowed =
                window.domain == domain && Some(bound.qpn) == qpn && rights & !bound.rights == 0;
            allowed.then(|| inside(bound.addr, bound.len))??;
            // A window shows what its region is now.
            self.regions[bound.region]?;
        }
        usize::try_from(named.addr - self.base).ok()
    }

    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn bind(&mut self, domain: usize, qpn: u32, bind: &Bind) -> Option<()> {
        let region = self.regions.iter().position(|r| r.is_some_and(|r| r.key == bind.region))?;
        let shown = self.regions[region]?;
        let piece = self.piece(region);
        let window = self.windows.iter_mut().flatten().find(|window| window.key == bind.present)?;
        let writes = bind.rights & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        let offset = bind.addr.checked_sub(piece)?;
        let allowed = window.domain == domain
            && shown.domain == domain
            && window.bound.is_none()
            && bind.len > 0
            && shown.rights & access::MW_BIND != 0
            && (!writes || shown.rights & access::LOCAL_WRITE != 0)
            && offset <= PIECE
            && bind.len <= PIECE - offset;
        if !allowed {
            return None;
        }
        // The low byte is the consumer's, the rest stays.
        window.key = bind.present & !0xff | bind.new & 0xff;
        window.bound =
            Some(Binding { region, addr: bind.addr, len: bind.len, rights: bind.rights, qpn });
        Some(())
    }

    pub(super) fn invalidate(&mut self, key: u32, qpn: u32) -> Option<()> {
        let window = self.windows.iter_mut().flatten().find(|window| window.key == key)?;
        window.bound.filter(|bound| bound.qpn == qpn)?;
        window.bound = None;
        Some(())
    }

    pub(super) fn complete(&mut self, line: usize, direction: usize, done: Done) {
        self.done[line][direction].push(done);
    }

    /// The QP of a line goes to ERR, with everything that is posted on it.
    pub(super) fn fails(&mut self, line: usize) {
        let Some(qp) = &mut self.qps[line] else { return };
        qp.state = State::Err;
        (qp.wanted, qp.draining, qp.begun, qp.wait) = (false, false, false, Wait::None);
        qp.unheard.clear();
        (qp.ahead, qp.done) = (false, 0);
        let flushed = [
            qp.sends.drain(..).map(|request| request.id).collect::<Vec<_>>(),
            qp.receives.drain(..).map(|receive| receive.id).collect(),
        ];
        if qp.shared && !std::mem::replace(&mut qp.last_told, true) {
            self.events.push((event::QP_LAST_WQE_REACHED, line));
        }
        for (direction, ids) in flushed.into_iter().enumerate() {
            for id in ids {
                self.complete(
                    line,
                    direction,
                    Done { id, status: wc_status::WR_FLUSH_ERR, len: 0 },
                );
            }
        }
    }

    /// Takes a receive for the QP of a line.
    pub(super) fn take_receive(&mut self, line: usize) -> Option<Receive> {
        let qp = self.qps[line].as_mut()?;
        if !qp.shared {
            let taken = qp.receives.pop_front();
            qp.wanted = taken.is_none();
            return taken;
        }
        let queue = self.shared.as_mut()?;
        let taken = queue.receives.pop_front();
        if taken.is_none() && !queue.wanting.contains(&line) {
            queue.wanting.push(line);
        }
        if taken.is_some() && queue.receives.len() < queue.limit {
            queue.limit = 0;
            self.events.push((event::SRQ_LIMIT_REACHED, LINES));
        }
        taken
    }
}

impl Guest {
    /// A message arrives on the QP of a line.
    pub(super) fn deliver(
        &mut self,
        line: usize,
        bytes: &[u8],
        invalidate: Option<u32>,
    ) -> Outcome {
        let Some(receive) = self.take_receive(line) else {
            return Outcome::Waits(Wait::Receiver);
        };
        let Some((qpn, domain, shared)) =
            self.qps[line].as_ref().map(|qp| (qp.qpn, qp.domain, qp.shared))
        else {
            return Outcome::Waits(Wait::Answer);
        };
        let mut failure = None;
        if bytes.len() > receive.len as usize {
            failure = Some((wc_status::LOC_LEN_ERR, Some(wc_status::REM_INV_REQ_ERR)));
        } else if !bytes.is_empty() {
            let user = (if shared { 0 } else { domain }, None);
            match self.find(receive.into, receive.len, access::LOCAL_WRITE, user) {
                Some(at) => self.put(at, bytes),
                None => failure = Some((wc_status::LOC_PROT_ERR, Some(wc_status::REM_OP_ERR))),
            }
        }
        if failure.is_none() && invalidate.is_some_and(|key| self.invalidate(key, qpn).is_none()) {
            failure = Some((wc_status::LOC_PROT_ERR, None));
        }
        let (status, answer) = failure.unwrap_or((0, None));
        let len = if status == 0 { u32::try_from(bytes.len()).unwrap_or(0) } else { 0 };
        self.complete(line, 1, Done { id: receive.id, status, len });
        if status != 0 {
            self.fails(line);
        }
        answer.map_or(Outcome::Done, Outcome::Refused)
    }

    /// A peer's request breaks the rules: that is the end of the connection.
    pub(super) fn refuses(&mut self, line: usize, kind: u32, status: u8) -> Outcome {
        self.events.push((kind, line));
        self.fails(line);
        Outcome::Refused(status)
    }
}
