//! Requests and receives: chosen by numbers, posted to the engine and to the model.

use virtio_rdma_abi::{self as abi, opcode, send_flags};
use zerocopy::little_endian::{U32, U64};

use super::losses::Call;
use super::model::{Action, Bind, Named, PIECE, Receive, Request};
use super::ops::{Key, Place, Post, TO_THE_END};
use super::run::{DEPTH, Run, Side, WINDOW_RIGHTS};
use crate::shard::testing::driver::wqe;

impl Run {
    pub(super) fn window_key(&self, side: usize, window: u8) -> u32 {
        let window = self.model.guests[side].windows[usize::from(window)];
        window.map_or(self.sides[side].stale, |window| window.key)
    }

    /// The memory of guest `side` that `place` names.
    pub(super) fn named(&self, side: usize, place: Place) -> Named {
        let guest = &self.model.guests[side];
        let (key, base) = match place.key {
            Key::Region(n) => {
                let n = usize::from(n);
                let stale = self.sides[side].stale;
                (guest.regions[n].map_or(stale, |region| region.key), guest.piece(n))
            }
            Key::Window(n) => {
                let bound = guest.windows[usize::from(n)].and_then(|window| window.start());
                (self.window_key(side, n), bound.unwrap_or_else(|| guest.piece(0)))
            }
            Key::Stale => (self.sides[side].stale, guest.piece(0)),
            Key::Foreign(n) => {
                let region = self.model.guests[1 - side].regions[usize::from(n)];
                (region.map_or(1, |region| region.key), guest.piece(usize::from(n)))
            }
        };
        Named { key, addr: base + u64::from(place.offset()) }
    }

    /// The number of bytes that a drawn length means at a place.
    fn len(&self, side: usize, place: Place, drawn: u16) -> u32 {
        let Some(beyond) = drawn.checked_sub(TO_THE_END) else { return drawn.into() };
        let all = match place.key {
            Key::Window(n) => {
                let window = self.model.guests[side].windows[usize::from(n)];
                window.and_then(|window| window.size()).unwrap_or(PIECE)
            }
            _ => PIECE,
        };
        let left = (all as u32).saturating_sub(place.offset().into());
        (left + u32::from(beyond)).saturating_sub(2)
    }

    pub(super) const fn request(&self, action: Action) -> Request {
        let nothing = Named { key: 0, addr: 0 };
        Request { id: self.next, action, local: nothing, len: 0, remote: nothing }
    }

    /// Most of the time a program does not do what must fail.
    const fn is_reckless(&self) -> bool {
        self.next.is_multiple_of(5)
    }

    /// The key of a window that a request of this QP shall free.
    pub(super) fn frees(&self, side: usize, line: usize, window: u8) -> Option<u32> {
        let guest = &self.model.guests[side];
        let qpn = guest.qps[line].as_ref()?.qpn;
        let good = guest.windows[usize::from(window)].is_some_and(|w| w.is_bound_to(qpn));
        (good || self.is_reckless()).then(|| self.window_key(side, window))
    }

    pub(super) fn transfer(
        &self,
        at: (usize, usize),
        what: Post,
        places: (Place, Place),
        len: u16,
    ) -> Request {
        let (side, line) = at;
        let (local, remote) = (self.named(side, places.0), self.named(1 - side, places.1));
        let atomic = matches!(what, Post::FetchAdd(_) | Post::CompareSwap(..));
        let action = match what {
            Post::Send => Action::Send { invalidate: None },
            Post::SendInvalidate(window) => {
                let invalidate = self.frees(1 - side, line, window);
                Action::Send { invalidate }
            }
            Post::Write => Action::Write { immediate: false },
            Post::WriteImmediate => Action::Write { immediate: true },
            Post::Read => Action::Read,
            Post::FetchAdd(n) => Action::FetchAdd(n),
            Post::CompareSwap(hit, new) => {
                let peer = &self.model.guests[1 - side];
                let at = (remote.addr - peer.base) as usize;
                let there = peer.memory.get(at..at + 8).filter(|_| hit);
                let word = there.map_or(1, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
                Action::CompareSwap(word, new)
            }
        };
        // The end that matters is that of the side which is written or read from afar.
        let sends = matches!(what, Post::Send | Post::SendInvalidate(_));
        let drawn =
            if sends { self.len(side, places.0, len) } else { self.len(1 - side, places.1, len) };
        let len = if atomic { 8 } else { drawn };
        Request { id: self.next, action, local, len, remote }
    }

    pub(super) fn bind(&mut self, at: (usize, usize), window: usize, place: Place, how: (u16, u8)) {
        let (side, line) = at;
        let Some(old) = self.model.guests[side].windows[window] else { return };
        if old.start().is_some() && !self.is_reckless() {
            return;
        }
        let named = self.named(side, place);
        let bind = Bind {
            present: old.key,
            // Its upper bits mean nothing.
            new: old.key ^ (self.next as u32 & 0x7f | 0x80) ^ (self.next as u32) << 9,
            region: named.key,
            addr: named.addr,
            len: self.len(side, place, how.0).into(),
            rights: WINDOW_RIGHTS[usize::from(how.1)],
        };
        let request = self.request(Action::Bind(bind));
        self.post(side, line, request);
    }

    pub(super) fn post(&mut self, side: usize, line: usize, request: Request) {
        let Side { guest, ends, .. } = &mut self.sides[side];
        let Some(end) = ends[line].as_mut().filter(|end| end.open[0] < DEPTH - 1) else { return };
        let (code, imm) = match request.action {
            Action::Send { invalidate: None } => (opcode::SEND, 0),
            Action::Send { invalidate: Some(key) } => (opcode::SEND_WITH_INV, key),
            Action::Write { immediate: false } => (opcode::RDMA_WRITE, 0),
            Action::Write { immediate: true } => (opcode::RDMA_WRITE_WITH_IMM, 7),
            Action::Read => (opcode::RDMA_READ, 0),
            Action::FetchAdd(_) => (opcode::ATOMIC_FETCH_AND_ADD, 0),
            Action::CompareSwap(..) => (opcode::ATOMIC_CMP_AND_SWP, 0),
            Action::Bind(bind) => (opcode::BIND_MW, bind.present),
            Action::Invalidate(key) => (opcode::LOCAL_INV, key),
        };
        let mut entry = wqe(code, send_flags::SIGNALED, request.id);
        entry.imm = U32::new(imm);
        entry.remote_addr = U64::new(request.remote.addr);
        entry.rkey = U32::new(request.remote.key);
        match request.action {
            Action::FetchAdd(n) => entry.arg0 = U64::new(n),
            Action::CompareSwap(expected, new) => {
                (entry.arg0, entry.arg1) = (U64::new(expected), U64::new(new));
            }
            Action::Bind(bind) => {
                entry.rkey = U32::new(bind.new);
                entry.remote_addr = U64::new(bind.addr);
                entry.arg0 = U64::new(bind.len);
                entry.arg1 = U64::new(bind.region.into());
                entry.aux = U32::new(bind.rights);
            }
            _ => {}
        }
        let element = abi::Sge {
            addr: U64::new(request.local.addr),
            length: U32::new(request.len),
            lkey: U32::new(request.local.key),
        };
        let local = matches!(request.action, Action::Bind(_) | Action::Invalidate(_));
        let elements = [element];
        guest.post_send(&mut end.qp, entry, if local { &[] } else { &elements });
        end.open[0] += 1;
        self.call(Call::Post(side, line, request));
    }

    pub(super) fn receive(&mut self, side: usize, line: usize, into: Place, len: u16) {
        let receive =
            Receive { id: self.next, into: self.named(side, into), len: self.len(side, into, len) };
        let Side { guest, ends, .. } = &mut self.sides[side];
        let shared = self.model.guests[side].qps[line].as_ref().is_none_or(|qp| qp.shared);
        let Some(end) = ends[line].as_mut().filter(|end| !shared && end.open[1] < DEPTH - 1) else {
            return;
        };
        guest.post_receive(&mut end.qp, receive.id, &[element(&receive)]);
        end.open[1] += 1;
        self.call(Call::Receive(side, line, receive));
    }

    pub(super) fn receive_shared(&mut self, side: usize, into: Place, len: u16) {
        let (into, len) = (self.named(side, into), self.len(side, into, len));
        let Side { guest, queue, .. } = &mut self.sides[side];
        let Some(queue) = queue.as_mut().filter(|queue| queue.open < DEPTH - 1) else { return };
        let receive = Receive { id: queue.posted.into(), into, len };
        guest.post_shared(queue.ring, queue.posted, element(&receive));
        queue.posted += 1;
        queue.open += 1;
        self.call(Call::ReceiveShared(side, receive));
    }
}

fn element(receive: &Receive) -> abi::Sge {
    abi::Sge {
        addr: U64::new(receive.into.addr),
        length: U32::new(receive.len),
        lkey: U32::new(receive.into.key),
    }
}
