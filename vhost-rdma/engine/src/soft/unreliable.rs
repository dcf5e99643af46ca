//! Messages of unreliable connections, of which a part may be missing.
//!
//! A message of several pieces takes its time, and what is not there to receive a piece is not told
//! of it: its machine stands still, it holds no address, it does not let its peer write, an owner
//! of its memory is late. IBTA 9.8.2 drops such a message to its end: neither is a receive completed
//! by it, nor an immediate told, nor may a later message go on where it stopped.

use super::nic::SoftNic;
use crate::link::{Owner, Request, Service};

/// Where a message has come to that is dropped: no piece begins there.
const BROKEN: u32 = u32::MAX;

impl SoftNic {
    /// Whether a piece goes on where its message is. What is not one of several of an unreliable
    /// message always does, by what is known here.
    #[inline]
    pub(super) fn is_in_order(&mut self, qpn: u32, request: &Request<'_>) -> bool {
        let several = request.len != request.total;
        request.service != Service::Unreliable || !several || self.follows(qpn, request)
    }

    fn follows(&mut self, qpn: u32, request: &Request<'_>) -> bool {
        let Some(qp) = self.qps.get_mut(&qpn) else { return false };
        let (own, end) = (&mut qp.own, request.offset + request.len);
        // What an earlier process has begun is gone on with by whoever fits, and its last piece may
        // come again.
        let same = own.message.is_none_or(|message| message == request.message);
        // The owner of its memory was asked meanwhile; pieces behind it may have come since.
        let again = request.owner != Owner::Unasked && own.arrived != BROKEN && end <= own.arrived;
        if same && again {
            return true;
        }
        let follows = request.is_first()
            || (same && own.arrived == request.offset)
            || (own.message.is_none() && own.arrived == end);
        let known = own.message == Some(request.message) && own.arrived == BROKEN;
        own.message = Some(request.message);
        own.arrived = if follows { end } else { BROKEN };
        if !follows && !known {
            self.counters.receive_drops += 1;
        }
        follows
    }

    /// A message of an unreliable peer is dropped, with whatever comes of it.
    pub(super) fn drop_message(&mut self, qpn: u32) {
        self.counters.receive_drops += 1;
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.own.arrived = BROKEN;
        }
    }

    /// A piece that was waited for does not come any more.
    pub(super) fn lose_piece(&mut self, qpn: u32, message: u32) {
        let awaited = self.qps.get(&qpn).is_some_and(|qp| {
            qp.own.message == Some(message) && !matches!(qp.own.arrived, 0 | BROKEN)
        });
        if awaited {
            self.drop_message(qpn);
        }
    }
}
