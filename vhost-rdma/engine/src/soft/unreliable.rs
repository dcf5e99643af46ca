//! The order of messages on unreliable connections, of which some get lost.
//!
//! A message of several pieces takes its time, and what is not there to receive a piece is not told
//! of it: its machine stands still, it holds no address, it does not let its peer write, an owner
//! of its memory is late. IBTA 9.8.2 drops such a message to its end: neither is a receive
//! completed by it, nor an immediate told, nor may a later message go on where it stopped.
//!
//! Between shards a message can be overtaken where a NIC moves meanwhile. A packet that is older
//! than what has come is none that the responder waits for (IBTA 9.8.2), and so is a message here:
//! it comes too late.

use super::nic::SoftNic;
use super::qp::Message;
use crate::link::{NicId, Owner, Request, Service};

/// Where a message has come to that is dropped: no piece begins there.
const BROKEN: u32 = u32::MAX;
/// Messages that are further ahead than this are behind: numbers wrap.
const HALF: u32 = 1 << 31;

fn message(request: &Request<'_>) -> Message {
    (request.ticket.life, request.message)
}

fn is_older(one: Message, than: Message) -> bool {
    one.0 != 0 && one.0 == than.0 && one.1.wrapping_sub(than.1) >= HALF
}

impl SoftNic {
    /// Whether a piece is to be executed now, by what has come before it. One of a service that is
    /// no unreliable connection always is, by what is known here.
    #[inline]
    pub(super) fn is_in_order(&mut self, qpn: u32, request: &Request<'_>) -> bool {
        request.service != Service::Unreliable || self.follows(qpn, request)
    }

    fn follows(&mut self, qpn: u32, request: &Request<'_>) -> bool {
        let Some(qp) = self.qps.get_mut(&qpn) else { return false };
        let (own, number) = (&mut qp.own, message(request));
        let asked = request.owner != Owner::Unasked;
        // It was in order when it came, and others have come since.
        if asked && request.flow.source == NicId::ELSEWHERE {
            return own.lost != Some(number);
        }
        if own.message.is_some_and(|last| is_older(number, last)) {
            self.counters.receive_drops += u64::from(request.is_last());
            return false;
        }
        if request.len == request.total {
            own.message = Some(number);
            return true;
        }
        let end = request.offset + request.len;
        // What an earlier process has begun is gone on with by whoever fits, and its last piece may
        // come again.
        let same = own.message.is_none_or(|last| last == number);
        let again = own.arrived == end && (own.message.is_none() || (same && asked));
        let follows = request.is_first() || again || (same && own.arrived == request.offset);
        let known = own.message == Some(number) && own.arrived == BROKEN;
        own.message = Some(number);
        own.arrived = if follows { end } else { BROKEN };
        if !follows && !known {
            self.counters.receive_drops += 1;
        }
        follows
    }

    /// A message came by another way, and before anything that is still under way.
    pub(super) fn note_message(&mut self, qpn: u32, message: Message) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.own.message = Some(message);
        }
    }

    /// The message of an unreliable peer is dropped, with whatever comes of it.
    pub(super) fn drop_message(&mut self, qpn: u32, request: &Request<'_>) {
        self.counters.receive_drops += 1;
        if let Some(qp) = self.qps.get_mut(&qpn) {
            (qp.own.arrived, qp.own.lost) = (BROKEN, Some(message(request)));
        }
    }

    /// A piece from another shard that waited for an owner is not executed.
    pub(super) fn lose_piece(&mut self, qpn: u32, number: Message) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if qp.own.lost.replace(number) != Some(number) {
            self.counters.receive_drops += 1;
        }
        if qp.own.message == Some(number) {
            qp.own.arrived = BROKEN;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_older;

    #[test]
    fn numbers_wrap_and_lives_have_no_order() {
        assert!(is_older((1, 4), (1, 5)) && !is_older((1, 5), (1, 5)) && !is_older((1, 6), (1, 5)));
        assert!(is_older((1, u32::MAX), (1, 0)) && !is_older((1, 0), (1, u32::MAX)));
        assert!(!is_older((1, 4), (2, 5)) && !is_older((2, 4), (1, 5)), "another life");
        assert!(!is_older((0, 4), (0, 5)), "where nothing overtakes, who begins anew is heard");
    }
}
