//! Events on their way to the guest: at most one waits per CQ, and one of a type per object, for as
//! long as the guest has no buffer.
//!
//! So nothing is lost and memory is bounded by the number of objects, whatever a guest does with
//! its event queues. As many as wait may be offered, a few in each round, since each costs a look
//! at the guest's memory.

use std::fmt;

use serde::{Deserialize, Serialize};
use virtio_rdma_abi as abi;
use zerocopy::little_endian::U32;

use super::cq::Cq;
use super::limits::Counters;
use super::pending::Pending;
use super::port::{Nowhere, Port};
use super::table::Table;
use crate::link::{Flow, MAD_LEN};

/// Events that are offered in one round.
const BATCH: usize = 32;

/// How far an offer of completion events has come.
#[derive(Debug, Clone, Copy, Default)]
struct Offer {
    /// Waiting CQs that have still to be offered.
    left: usize,
    /// Bit n: vector n was found dry.
    dry: u64,
}

/// The events of one NIC.
pub struct Outbox {
    port: Box<dyn Port>,
    /// CQs whose completion event waits for a buffer.
    completions: Pending<u32, ()>,
    /// The context of each event that waits, by type and object.
    events: Pending<(u32, u32), u32>,
    /// Waiting completion events are being offered.
    completing: Option<Offer>,
    /// Waiting asynchronous events are to be offered.
    raising: bool,
    put: bool,
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").field("events", &self.events).finish_non_exhaustive()
    }
}

/// What is saved of the events of a NIC: CQs, and events by type, object and context.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct SavedEvents {
    completions: Vec<u32>,
    events: Vec<(u32, u32, u32)>,
}

impl Outbox {
    /// See [`super::saved`].
    pub(crate) fn save(&self) -> SavedEvents {
        let event = |((kind, object), ctx): ((u32, u32), &u32)| (kind, object, *ctx);
        SavedEvents {
            completions: self.completions.iter().map(|(cqn, ())| cqn).collect(),
            events: self.events.iter().map(event).collect(),
        }
    }

    /// Has wait what waited.
    pub(crate) fn load(&mut self, saved: SavedEvents) {
        for cqn in saved.completions {
            self.completions.insert(cqn, ());
        }
        for (kind, object, ctx) in saved.events {
            self.events.insert((kind, object), ctx);
        }
        self.wanted();
    }

    pub(crate) fn new(port: Box<dyn Port>) -> Self {
        Self {
            port,
            completions: Pending::default(),
            events: Pending::default(),
            completing: None,
            raising: false,
            put: false,
        }
    }

    /// An empty one with the same way out, which this one loses.
    pub(crate) fn succeed(&mut self) -> Self {
        Self::new(std::mem::replace(&mut self.port, Box::new(Nowhere)))
    }

    /// Another way out.
    pub(crate) fn set_port(&mut self, port: Box<dyn Port>) {
        self.port = port;
        self.wanted();
    }

    pub(crate) fn port(&mut self) -> &mut dyn Port {
        self.port.as_mut()
    }

    /// There are buffers again, or may be.
    pub(crate) fn wanted(&mut self) {
        self.completing = Some(Offer { left: self.completions.len(), dry: 0 });
        self.raising = true;
    }

    /// Whether there is anything to offer or to tell.
    #[inline]
    pub(crate) const fn has_work(&self) -> bool {
        self.completing.is_some() || self.raising || self.put
    }

    /// Raises an asynchronous event; at most one of a type waits per object.
    pub(crate) fn raise(&mut self, (kind, object, ctx): (u32, u32, u32), counters: &mut Counters) {
        if self.events.insert((kind, object), ctx) {
            self.raising = true;
        } else {
            counters.events_coalesced += 1;
        }
    }

    /// Gives a management datagram to the port; false if that wants none.
    pub(crate) fn management(&mut self, flow: &Flow, mad: &[u8; MAD_LEN as usize]) -> bool {
        self.port.management(flow, mad)
    }

    /// Drops the waiting events of an object that goes away: `kinds` are those of its class.
    pub fn forget(&mut self, kinds: &[u32], object: u32) {
        for &kind in kinds {
            self.events.remove((kind, object));
        }
    }

    /// Drops the waiting event of a CQ that goes away.
    pub(crate) fn forget_completion(&mut self, cqn: u32) {
        self.completions.remove(cqn);
    }

    /// The completion event of a CQ whose arm `seq` fired.
    pub(crate) fn complete(&mut self, cqn: u32, cq: &mut Cq, seq: u32, counters: &mut Counters) {
        if cq.event_pending {
            counters.events_coalesced += 1;
            return;
        }
        let event = abi::CompEvent { cqn: U32::new(cqn), arm_seq: U32::new(seq) };
        if self.port.completion_event(cq.vector, event) {
            counters.events += 1;
            self.put = true;
        } else {
            cq.event_pending = true;
            self.completions.insert(cqn, ());
            self.come_again();
        }
    }

    /// Offers all once more if the way out was somebody else's at that moment.
    fn come_again(&mut self) {
        if self.port.was_busy() {
            self.put = true;
            self.wanted();
        }
    }

    /// Offers some waiting events to the port and lets it notify the guest; how many were offered.
    pub fn deliver(&mut self, cqs: &mut Table<Cq>, counters: &mut Counters) -> usize {
        let mut room = BATCH;
        if let Some(offer) = self.completing.take() {
            self.completing = self.offer_completions(offer, &mut room, (cqs, counters));
        }
        if self.raising {
            self.raising = self.offer_events(&mut room, counters);
        }
        if std::mem::take(&mut self.put) {
            self.port.flush();
        }
        self.come_again();
        BATCH - room
    }

    /// What is left of the offer afterwards. Vectors run dry one by one, so every waiting CQ is
    /// offered once, but none to a vector that was found dry.
    fn offer_completions(
        &mut self,
        mut offer: Offer,
        room: &mut usize,
        (cqs, counters): (&mut Table<Cq>, &mut Counters),
    ) -> Option<Offer> {
        while offer.left > 0 {
            if *room == 0 {
                return Some(offer);
            }
            *room -= 1;
            offer.left -= 1;
            let (cqn, ()) = self.completions.pop()?;
            let Some(cq) = cqs.get_mut(cqn as usize).filter(|cq| cq.event_pending) else {
                continue;
            };
            let vector = 1u64.checked_shl(cq.vector).unwrap_or(0);
            if offer.dry & vector != 0 {
                self.completions.insert(cqn, ());
                continue;
            }
            let event = abi::CompEvent { cqn: U32::new(cqn), arm_seq: U32::new(cq.fired()) };
            if self.port.completion_event(cq.vector, event) {
                cq.event_pending = false;
                counters.events += 1;
                self.put = true;
            } else {
                offer.dry |= vector;
                self.completions.insert(cqn, ());
            }
        }
        None
    }

    /// Whether there are more, and may be buffers for them.
    fn offer_events(&mut self, room: &mut usize, counters: &mut Counters) -> bool {
        while *room > 0 {
            *room -= 1;
            let Some(((kind, object), ctx)) = self.events.pop() else { return false };
            let event = abi::AsyncEvent {
                r#type: U32::new(kind),
                object: U32::new(object),
                ctx: U32::new(ctx),
                reserved: U32::new(0),
            };
            if !self.port.async_event(event) {
                self.events.put_back((kind, object), ctx);
                return false;
            }
            counters.events += 1;
            self.put = true;
        }
        true
    }
}
