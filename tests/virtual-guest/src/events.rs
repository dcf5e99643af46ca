//! Event virtqueues: buffers that the driver stocks and the device fills (7.5).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::guest::{Error, Guest, Result};
use crate::ram::{Pages, Ram, lock};
use crate::spec::{PAGE, Take};
use crate::virtq::Virtq;
use crate::witness;

/// A virtqueue of events with one buffer per descriptor.
#[derive(Debug)]
pub struct EventQueue {
    /// The virtqueue.
    pub vq: Virtq,
    buffers: Pages,
    size: u32,
    /// Put a buffer back when its event was taken. Off, the device runs out of buffers.
    pub restock: bool,
    in_stock: usize,
}

/// A completion event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompEvent {
    /// The completion queue.
    pub cqn: u32,
    /// The `seq` of the arm word that fired.
    pub arm_seq: u32,
}

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// One of [`crate::spec::event`].
    pub kind: u32,
    /// The object.
    pub object: u32,
    /// The object's context.
    pub ctx: u32,
}

impl EventQueue {
    pub(crate) fn new(ram: &Arc<Ram>, vq: Virtq, size: u32) -> Self {
        let bytes = u64::from(vq.size()) * u64::from(size);
        let buffers = ram.alloc(bytes.div_ceil(PAGE) as usize);
        Self { vq, buffers, size, restock: true, in_stock: 0 }
    }

    /// Empties the bookkeeping and puts `n` buffers into a queue that was just reset.
    pub(crate) fn stock(&mut self, n: usize) {
        self.in_stock = 0;
        self.add_buffers(n);
    }

    /// Adds `n` buffers; the caller kicks.
    pub fn add_buffers(&mut self, n: usize) {
        for _ in 0..n {
            // Descriptors are taken one at a time and every one has its own buffer, found by its
            // number.
            let Some(head) = self.vq.next_free() else { return };
            let gpa = self.buffers.gpa(u64::from(head) * u64::from(self.size));
            if self.vq.add(&[], &[(gpa, self.size)]) == Some(head) {
                self.in_stock += 1;
            }
        }
    }

    /// Buffers that the device holds.
    pub fn in_stock(&self) -> usize {
        self.in_stock
    }

    /// The next event's bytes.
    pub fn take(&mut self, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let Some((head, len)) = self.vq.wait(timeout)? else { return Ok(None) };
        self.in_stock -= 1;
        if len != self.size {
            return Err(Error::Broken(format!("an event of {len} bytes, not {}", self.size)));
        }
        let offset = u64::from(head) * u64::from(self.size);
        let bytes = self.buffers.view(offset, u64::from(self.size)).vec(0, u64::from(self.size));
        if self.restock {
            self.add_buffers(1);
            self.vq.kick()?;
        }
        Ok(Some(bytes))
    }
}

impl Guest {
    /// Runs `f` on the queue of asynchronous events.
    pub fn with_async<T>(&self, f: impl FnOnce(&mut EventQueue) -> T) -> T {
        f(&mut lock(&self.0.events[0]))
    }

    /// Runs `f` on the completion-event queue of `vector`.
    pub fn with_comp<T>(&self, vector: usize, f: impl FnOnce(&mut EventQueue) -> T) -> T {
        f(&mut lock(&self.0.events[1 + vector]))
    }

    /// The next asynchronous event within `timeout`.
    pub fn async_event(&self, timeout: Duration) -> Result<Option<AsyncEvent>> {
        if let Some(process) = &self.0.process {
            // It knows objects by names of its own, and has one context.
            let event = process.event(timeout);
            return Ok(event.map(|(name, kind)| {
                let object = process.number_of(name).unwrap_or(name as u32);
                AsyncEvent { kind, object, ctx: 0 }
            }));
        }
        let bytes = self.with_async(|q| q.take(timeout))?;
        let event =
            bytes.map(|b| AsyncEvent { kind: b.u32_at(0), object: b.u32_at(4), ctx: b.u32_at(8) });
        event.iter().for_each(|event| witness::raised(event.kind));
        Ok(event)
    }

    /// Waits for an event of `kind` for `object`, ignoring others; all that were seen if it does
    /// not come.
    pub fn await_async(
        &self,
        kind: u32,
        object: u32,
        timeout: Duration,
    ) -> std::result::Result<AsyncEvent, Vec<AsyncEvent>> {
        let deadline = Instant::now() + timeout;
        let mut seen = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.async_event(left) {
                Ok(Some(e)) if e.kind == kind && e.object == object => return Ok(e),
                Ok(Some(e)) => seen.push(e),
                _ => return Err(seen),
            }
        }
    }

    /// The next completion event of `vector` within `timeout`. A process has channels of its own
    /// instead ([`crate::process::Channel`]).
    pub fn comp_event(&self, vector: usize, timeout: Duration) -> Result<Option<CompEvent>> {
        if self.0.process.is_some() {
            return Ok(None);
        }
        let bytes = self.with_comp(vector, |q| q.take(timeout))?;
        Ok(bytes.map(|b| CompEvent { cqn: b.u32_at(0), arm_seq: b.u32_at(4) }))
    }
}
