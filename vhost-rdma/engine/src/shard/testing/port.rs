//! Where the events of a NIC go, and the chance that tests have.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use virtio_rdma_abi as abi;

use crate::shard::{Job, Port, Random};

/// A predictable source, so that tests repeat.
#[derive(Debug)]
pub struct Lcg(pub(crate) u64);

impl Random for Lcg {
    fn next_u32(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
}

/// What a NIC's port was given.
#[derive(Debug, Default)]
pub struct Events {
    pub completions: VecDeque<(u32, u32)>,
    pub asynchronous: VecDeque<(u32, u32)>,
    pub jobs: Vec<(u32, Job)>,
    pub buffers: usize,
    /// Calls from now on that find a queue taken by another thread.
    pub taken: usize,
    pub(super) was_busy: bool,
}

impl Events {
    /// Whether there is a buffer, and nobody else at the queue.
    fn take_buffer(&mut self) -> bool {
        if self.taken > 0 {
            self.taken -= 1;
            self.was_busy = true;
            return false;
        }
        let found = self.buffers > 0;
        self.buffers -= usize::from(found);
        found
    }
}

/// The way there.
#[derive(Debug)]
pub(super) struct TestPort(pub(super) Arc<Mutex<Events>>);

impl Port for TestPort {
    fn completion_event(&mut self, vector: u32, event: abi::CompEvent) -> bool {
        let mut events = self.0.lock().unwrap();
        if !events.take_buffer() {
            return false;
        }
        events.completions.push_back((vector, event.cqn.get()));
        true
    }

    fn async_event(&mut self, event: abi::AsyncEvent) -> bool {
        let mut events = self.0.lock().unwrap();
        if !events.take_buffer() {
            return false;
        }
        events.asynchronous.push_back((event.r#type.get(), event.object.get()));
        true
    }

    fn owner_job(&mut self, ctx: u32, job: Job) -> bool {
        let mut events = self.0.lock().unwrap();
        if events.taken > 0 {
            events.taken -= 1;
            return false;
        }
        events.jobs.push((ctx, job));
        true
    }

    fn flush(&mut self) {}

    fn was_busy(&mut self) -> bool {
        std::mem::take(&mut self.0.lock().unwrap().was_busy)
    }
}
