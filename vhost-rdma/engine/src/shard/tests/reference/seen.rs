//! What can be seen of both guests after a step.

use virtio_rdma_abi::{self as abi, qps};

use super::losses::{Call, Lost};
use super::model::{Done, LINES, Model, State};
use super::ops::Op;
use super::run::{Run, Side};

/// See the module.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    memory: Vec<u8>,
    /// Of sends and of receives, by line.
    done: [[Vec<Done>; 2]; LINES],
    /// Types and objects, sorted.
    events: Vec<(u32, u32)>,
    /// Of the queue pairs that there are.
    states: [Option<u8>; LINES],
}

/// What the model says of a guest.
fn expected(model: &Model, number: usize, side: &Side) -> Seen {
    let guest = &model.guests[number];
    // What is told of a queue pair may be found when it is gone.
    let object = |line: usize| match side.qpns.get(line) {
        Some(qpn) => Some(*qpn),
        None => side.queue.as_ref().map(|queue| queue.srqn),
    };
    let events = guest.events.iter().map(|&(kind, line)| (kind, object(line).unwrap_or(0)));
    let mut events: Vec<(u32, u32)> = events.collect();
    events.sort_unstable();
    let states = std::array::from_fn(|line| {
        guest.qps[line].as_ref().map(|qp| match qp.state {
            State::Rts => qps::RTS,
            State::Sqd => qps::SQD,
            State::Err => qps::ERR,
        })
    });
    Seen { memory: guest.memory.clone(), done: guest.done.clone(), events, states }
}

impl Run {
    fn look(&mut self, number: usize) -> Seen {
        let Self { world, sides, model, .. } = self;
        let side = &mut sides[number];
        let memory = side.guest.read(side.base, model.guests[number].memory.len());
        let mut done: [[Vec<Done>; 2]; LINES] = Default::default();
        for (line, cq) in side.cqs.iter_mut().enumerate() {
            let Some(cq) = cq else { continue };
            for cqe in side.guest.drain(cq) {
                let received = cqe.flags.get() & abi::cqe_flags::RECV != 0;
                let good = cqe.status == 0 && received;
                let len = if good { cqe.byte_len.get() } else { 0 };
                let id = cqe.wr_id.get();
                done[line][usize::from(received)].push(Done { id, status: cqe.status, len });
                if received && cqe.flags.get() & abi::cqe_flags::SRQ != 0 {
                    side.queue.as_mut().unwrap().open -= 1;
                } else if let Some(end) = &mut side.ends[line] {
                    end.open[usize::from(received)] -= 1;
                }
            }
        }
        let mut events = side.guest.asynchronous();
        events.sort_unstable();
        let states = std::array::from_fn(|line| {
            let end = side.ends[line].as_ref()?;
            Some(world.query(&side.guest, &end.qp).qp_state)
        });
        Seen { memory, done, events, states }
    }

    /// The engine must have done what the model did, or what it may do with so many answers lost.
    pub(super) fn compare(&mut self, op: &Op) {
        self.world.settle_all();
        self.make_up_for_losses();
        let all = self.world.beside.as_ref().map_or_else(Lost::default, |(_, air)| Lost {
            answers: air.answers_lost,
            others: air.others_lost,
        });
        let before = std::mem::replace(&mut self.met.apart, all);
        let lost =
            Lost { answers: all.answers - before.answers, others: all.others - before.others };
        let seen = [0, 1].map(|number| self.look(number));
        let sides = &self.sides;
        let expects = |model: &Model| [0, 1].map(|n| expected(model, n, &sides[n]));
        let first = expects(&self.model);
        if first != seen {
            let other = self.steps.find(lost, |model| expects(model) == seen);
            let Some(other) = other else {
                for (number, (seen, first)) in seen.iter().zip(&first).enumerate() {
                    let lost = format!("guest {number} after {op:?}, {lost:?}");
                    assert_eq!(seen.done, first.done, "completions of {lost}");
                    assert_eq!(seen.events, first.events, "events of {lost}");
                    assert_eq!(seen.states, first.states, "states of QPs of {lost}");
                    assert!(seen.memory == first.memory, "memory of {lost}");
                }
                unreachable!("they differ");
            };
            self.model = other;
            self.met.otherwise += 1;
        }
        self.steps.end();
        for guest in &mut self.model.guests {
            guest.done = Default::default();
            guest.events.clear();
        }
    }

    /// Has the model do what the engine was asked to do.
    pub(super) fn call(&mut self, call: Call) {
        self.steps.call(&mut self.model, call);
    }
}
