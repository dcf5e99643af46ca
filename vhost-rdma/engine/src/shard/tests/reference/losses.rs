//! What a wire loses, and what may come of it.
//!
//! Whoever hears nothing asks again by the same number, and a responder that has executed that
//! number answers once more (IBTA 9.7.5.1). So nothing is done twice, and most of what is lost
//! changes nothing. These may come out otherwise, and nothing else:
//!
//! - A refusal is said once: its responder is in an error then. Who missed it finds nobody.
//! - A request was executed, and its responder came to an error before it was asked again. What
//!   followed it may have been executed as well.
//! - A read that is asked for again finds what is there by then.
//! - A write with immediate data that waits for a receive is refused when it is tried again, where
//!   its target's rights have changed.
//! - A request that was lost comes later than it was posted, and so does one whose receive's word
//!   was lost. Whoever waits for a receive tries again meanwhile, and may fail: then nobody answers
//!   any more.
//! - Of a message of several pieces the first may have come by then, and be stored.
//!
//! What the wire lost the model is not told, only how much: answers, and all else. So where the
//! engine does not do what the model does without losses, the step is tried with every choice of
//! that many ([`Losses::next`]), those of few first, and one of them must come to what the engine
//! did.

use virtio_rdma_abi::{access, wc_status};

use super::model::{Action, Guest, LINES, Model, Receive, Request, State, Wait};

/// Choices of a step that are tried at most.
const MOST: usize = 200_000;

/// How much a wire lost: answers, and what asks for something or ends a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lost {
    pub(super) answers: u64,
    pub(super) others: u64,
}

/// The choices of one run of the model.
#[derive(Clone, Debug, Default)]
pub(super) struct Losses {
    /// What may be lost still, and how much of both together.
    left: Lost,
    few: u64,
    choices: Vec<bool>,
    /// How many of them have been made.
    made: usize,
}

impl Losses {
    /// The first run with so much lost at most: nothing is.
    const fn of(most: Lost, few: u64) -> Self {
        Self { left: most, few, choices: Vec::new(), made: 0 }
    }

    /// Whether the next answer is lost.
    pub(super) fn loses(&mut self) -> bool {
        let lost = self.few > 0 && self.left.answers > 0 && self.chance();
        self.left.answers -= u64::from(lost);
        self.few -= u64::from(lost);
        lost
    }

    /// Whether the next request is lost, or the next word that a wait is over.
    pub(super) fn loses_request(&mut self) -> bool {
        let lost = self.few > 0 && self.left.others > 0 && self.chance();
        self.left.others -= u64::from(lost);
        self.few -= u64::from(lost);
        lost
    }

    /// Whether one of a message's pieces is lost, or what says that those so far are done: how many
    /// bytes came before.
    pub(super) fn loses_piece(&mut self, len: usize, piece: usize) -> Option<usize> {
        if self.loses_request() {
            return Some(0);
        }
        let mut came = piece;
        while came < len {
            if self.loses_request() || self.loses() {
                return Some(came);
            }
            came = came.saturating_add(piece);
        }
        None
    }

    /// What is nobody's promise.
    pub(super) fn chance(&mut self) -> bool {
        if self.made == self.choices.len() {
            self.choices.push(false);
        }
        self.made += 1;
        self.choices[self.made - 1]
    }

    /// The next run; `None` if this was the last.
    fn next(mut self, most: Lost, few: u64) -> Option<Self> {
        self.choices.truncate(self.made);
        while self.choices.pop()? {}
        self.choices.push(true);
        Some(Self { left: most, few, choices: self.choices, made: 0 })
    }
}

/// What has requests executed in a step.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    Post(usize, usize, Request),
    Receive(usize, usize, Receive),
    ReceiveShared(usize, Receive),
    Error(usize, usize),
    BadIndex(usize, usize),
    Drain(usize, usize),
    GoOn(usize, usize),
    Destroy(usize, usize),
    TimePasses,
    /// What was lost is asked for again. That takes a time, in which whoever waits for a receive
    /// may try again, too.
    Again,
}

impl Model {
    fn call(&mut self, call: Call) {
        match call {
            Call::Post(side, line, request) => self.post(side, line, request),
            Call::Receive(side, line, receive) => self.receive(side, line, receive),
            Call::ReceiveShared(side, receive) => self.receive_shared(side, receive),
            Call::Error(side, line) => self.error(side, line),
            Call::BadIndex(side, line) => self.bad_index(side, line),
            Call::Drain(side, line) => self.drain(side, line),
            Call::GoOn(side, line) => _ = self.go_on(side, line),
            Call::Destroy(side, line) => self.guests[side].qps[line] = None,
            Call::TimePasses => self.time_passes(),
            Call::Again => {
                self.try_again();
                self.ask_again();
                self.try_again();
            }
        }
    }

    /// The first pieces of a message have come, and the rest has not. It begins anew when it is
    /// asked for again, which comes to the same.
    pub(super) fn begin_to_put(
        &mut self,
        (side, line): (usize, usize),
        request: &Request,
        came: &[u8],
    ) {
        let peer = &mut self.guests[1 - side];
        let Some(qp) = peer.qps[line].as_ref().filter(|qp| qp.state != State::Err) else { return };
        let to = match request.action {
            Action::Send { .. } => {
                qp.receives.front().filter(|receive| receive.len >= request.len).and_then(
                    |receive| {
                        let user = (qp.domain, None);
                        peer.find(receive.into, receive.len, access::LOCAL_WRITE, user)
                    },
                )
            }
            Action::Write { .. } => {
                let user = (qp.domain, Some(qp.qpn));
                peer.find(request.remote, request.len, access::REMOTE_WRITE, user)
            }
            _ => None,
        };
        if let Some(at) = to.filter(|_| !came.is_empty()) {
            peer.put(at, came);
        }
    }

    /// Some who wait try again, in any order: what they may write by then is asked once more. Who
    /// asks somebody who is in an error may come to the end of it.
    fn try_again(&mut self) {
        for end in 0..4 * LINES {
            let (side, line) = (end / LINES % 2, end % LINES);
            let qp = self.guests[side].qps[line].as_ref();
            let Some(wait) = qp.map(|qp| qp.wait).filter(|wait| *wait != Wait::None) else {
                continue;
            };
            let is_alone = wait == Wait::Answer && !self.answers(1 - side, line);
            if !is_alone && !self.comes_to_anything(side, line) {
                continue;
            }
            if self.losses.chance() {
                if is_alone {
                    self.failed(side, line, wc_status::RETRY_EXC_ERR);
                } else {
                    self.wake(side, line);
                }
                self.settle();
            }
        }
    }

    /// Whether one that waits would find anything changed if it tried again. Else it need not try,
    /// and it does not matter what is lost of that.
    pub(super) fn comes_to_anything(&self, side: usize, line: usize) -> bool {
        let waits = |model: &Self| model.guests[side].qps[line].as_ref().map(|qp| qp.wait);
        let wait = waits(self);
        if matches!(wait, None | Some(Wait::None)) {
            return false;
        }
        let mut after = Self { losses: Losses::default(), ..self.clone() };
        after.wake(side, line);
        after.settle();
        let same = |a: &Guest, b: &Guest| {
            (&a.done, &a.events, &a.memory) == (&b.done, &b.events, &b.memory)
        };
        waits(&after) != wait
            || !self.guests.iter().zip(&after.guests).all(|(before, after)| same(before, after))
    }

    /// Whose answers were lost ask until they hear of it.
    fn ask_again(&mut self) {
        let ends = || (0..2).flat_map(|side| (0..LINES).map(move |line| (side, line)));
        let unheard = |model: &Self, side: usize, line: usize| {
            let qp = model.guests[side].qps[line].as_ref();
            qp.is_some_and(|qp| qp.wait == Wait::Answer) && model.answers(1 - side, line)
        };
        while let Some((side, line)) = ends().find(|&(side, line)| unheard(self, side, line)) {
            self.wake(side, line);
            self.settle();
        }
    }
}

/// The model before a step, and what the step has done to it.
#[derive(Debug, Default)]
pub(super) struct Steps {
    before: Option<Box<Model>>,
    calls: Vec<Call>,
}

impl Steps {
    /// Has the model do something.
    pub(super) fn call(&mut self, model: &mut Model, call: Call) {
        if self.before.is_none() {
            self.before = Some(Box::new(model.clone()));
        }
        self.calls.push(call);
        model.call(call);
    }

    /// The step is over.
    pub(super) fn end(&mut self) {
        *self = Self::default();
    }

    /// The model as it is if so much was lost at most and if that is what was seen; `None`
    /// also where nothing was lost.
    pub(super) fn find(&self, most: Lost, is_seen: impl Fn(&Model) -> bool) -> Option<Model> {
        let lost = self.calls.iter().any(|call| matches!(call, Call::Again));
        let before = self.before.as_ref().filter(|_| lost)?;
        let mut runs = 0;
        // What takes few losses is the likeliest, and the choices of few are few.
        for few in 0..=most.answers + most.others {
            let mut next = Some(Losses::of(most, few));
            while let Some(losses) = next {
                runs += 1;
                if runs > MOST {
                    return None;
                }
                let mut model = Model { losses, ..Model::clone(before) };
                self.calls.iter().for_each(|&call| model.call(call));
                model.ask_again();
                let losses = std::mem::take(&mut model.losses);
                if is_seen(&model) {
                    return Some(model);
                }
                next = losses.next(most, few);
            }
        }
        None
    }
}
