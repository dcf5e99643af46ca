//! Answers that a wire loses, and what may come of it.
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
//!
//! Which answers the wire lost the model is not told, only how many. So where the engine does not
//! do what the model does without losses, the step is tried with every choice of that many answers
//! ([`Losses::next`]), and one of them must come to what the engine did.

use super::model::{LINES, Model, Receive, Request, Wait};

/// Choices of a step that are tried at most.
const MOST: usize = 200_000;

/// The choices of one run of the model.
#[derive(Clone, Debug, Default)]
pub(super) struct Losses {
    /// Answers that may be lost still.
    left: u64,
    choices: Vec<bool>,
    /// How many of them have been made.
    made: usize,
}

impl Losses {
    /// The first run with so many answers lost at most: none is.
    const fn of(most: u64) -> Self {
        Self { left: most, choices: Vec::new(), made: 0 }
    }

    /// Whether the next answer is lost.
    pub(super) fn loses(&mut self) -> bool {
        let lost = self.left > 0 && self.chance();
        self.left -= u64::from(lost);
        lost
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
    fn next(mut self, most: u64) -> Option<Self> {
        self.choices.truncate(self.made);
        while self.choices.pop()? {}
        self.choices.push(true);
        Some(Self { left: most, choices: self.choices, made: 0 })
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
                self.ask_again();
                self.try_again();
            }
        }
    }

    /// Some who wait for a receive try again, in any order: what they may write by then is asked
    /// once more.
    fn try_again(&mut self) {
        for end in 0..4 * LINES {
            let (side, line) = (end / LINES % 2, end % LINES);
            let qp = self.guests[side].qps[line].as_ref();
            if qp.is_some_and(|qp| qp.wait == Wait::Receiver) && self.losses.chance() {
                self.wake(side, line);
                self.settle();
            }
        }
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

    /// The model as it is if so many answers were lost at most and if that is what was seen; `None`
    /// also where nothing was lost.
    pub(super) fn find(&self, most: u64, is_seen: impl Fn(&Model) -> bool) -> Option<Model> {
        let lost = self.calls.iter().any(|call| matches!(call, Call::Again));
        let before = self.before.as_ref().filter(|_| lost)?;
        let mut losses = Losses::of(most);
        for _ in 0..MOST {
            let mut model = Model { losses, ..Model::clone(before) };
            self.calls.iter().for_each(|&call| model.call(call));
            model.ask_again();
            losses = std::mem::take(&mut model.losses);
            if is_seen(&model) {
                return Some(model);
            }
            losses = losses.next(most)?;
        }
        None
    }
}
