//! The loop of one worker.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::WorkerConfig;
use super::carrier::Carrier;
use super::clock::Clock;
use super::handle::{Message, Progress, Work, WorkerHandle};
use super::job_share::JobShare;
use super::kicks::Heard;
use super::mailbox::{Found, Mailbox, mailbox};
use super::sync::spin_loop;
use super::turn_stats::{Counter, TurnStats};
use super::waker::Waker;
use crate::eventfd;
use crate::link::NicId;
use crate::memory;
use crate::panics::{contained, give_up};
use crate::shard::{Look, Nanos, Shard};

/// Time after which no further job is begun in a turn: a flood of control commands must not stop
/// the data path.
const JOBS: Nanos = 50_000;

/// Rounds without work that a worker makes at least before it sleeps.
const ROUNDS_BEFORE_SLEEP: u64 = 16;

/// How often kicks are heard while the worker is awake: a system call, and how late a NIC that is
/// parked may be.
const HEAR: Nanos = 20_000;

/// Starts worker `index`.
pub(super) fn spawn(
    index: u32,
    shard: Shard,
    config: WorkerConfig,
    carrier: Carrier,
) -> io::Result<(WorkerHandle, JoinHandle<()>)> {
    let (sender, mailbox) = mailbox();
    let waker = carrier.waker();
    let clock = Clock::new();
    let poll_for = u64::from(config.poll_us) * 1000;
    let shard = shard.with_clock(Box::new(clock)).with_patience(poll_for);
    let turn_stats = Arc::new(TurnStats::new(clock));
    let runner = Runner::new(shard, mailbox, carrier, (clock, poll_for));
    let (ready, sealed) = sync_channel(1);
    let thread = thread::Builder::new().name(format!("vrdma-shard-{index}")).spawn({
        let turn_stats = turn_stats.clone();
        move || {
            eventfd::own_context();
            let counter = Counter::new(turn_stats);
            let done = config.seal.map_or(Ok(()), |seal| seal());
            let go_on = done.is_ok();
            // It makes a thread, which is to be sealed as this one is.
            memory::unmap_elsewhere();
            // Whoever started the thread waits for it.
            let _ = ready.send(done);
            if go_on {
                runner.run(counter);
            }
        }
    })?;
    sealed.recv().map_err(io::Error::other)??;
    Ok((WorkerHandle::new(sender, waker, turn_stats), thread))
}

/// The jobs of a turn.
struct Jobs {
    began: Nanos,
    /// What had been charged then.
    charged: Nanos,
}

/// What draining the mailbox found.
#[derive(PartialEq, Eq)]
pub(super) enum Mail {
    None,
    Some,
    Stop,
}

/// What a worker's thread does.
pub(super) struct Runner {
    shard: Shard,
    mailbox: Mailbox<Message>,
    /// What the last look before sleep found in the mailbox.
    peeked: Found<Message>,
    /// Jobs that go in steps, and have some left.
    unfinished: VecDeque<(Option<NicId>, Work)>,
    pub(super) job_share: JobShare,
    waker: Arc<Waker>,
    carrier: Carrier,
    /// Kicks of guests.
    heard: Heard,
    /// When they were last asked for.
    heard_at: Nanos,
    pub(super) clock: Clock,
    poll_for: Nanos,
    /// How much guest memory had vanished at the last look.
    vanished: u64,
}

impl Runner {
    pub(super) fn new(
        shard: Shard,
        mailbox: Mailbox<Message>,
        carrier: Carrier,
        (clock, poll_for): (Clock, Nanos),
    ) -> Self {
        Self {
            shard,
            mailbox,
            peeked: Found::None,
            unfinished: VecDeque::new(),
            job_share: JobShare::default(),
            waker: carrier.waker(),
            carrier,
            heard: Heard::default(),
            heard_at: 0,
            clock,
            poll_for,
            vanished: memory::vanished(),
        }
    }

    /// Until it is told to stop.
    pub(super) fn run(mut self, mut counter: Counter) {
        let mut before = self.clock.now();
        let mut idle = 0;
        counter.begin(before);
        loop {
            let mail = self.drain();
            if mail == Mail::Stop {
                return;
            }
            // Read last thing before the doorbells are: a timer counted from a time that is past
            // would run out too early.
            let now = self.clock.now();
            // A turn is a round of polling with the jobs after it, so that it costs no look at the
            // clock of its own.
            counter.end(now, self.shard.charged());
            counter.begin(now);
            if self.vanished != memory::vanished() {
                self.vanished = memory::vanished();
                self.guarded(None, Shard::memory_vanished);
            }
            if self.shard.hears_kicks() && now.saturating_sub(self.heard_at) >= HEAR {
                let more = self.waker.hear(&mut self.heard);
                self.heard_at = if more { 0 } else { now };
                self.take_kicks();
            }
            self.carrier.bring(&mut self.shard);
            let polled = self.guarded(None, |shard| shard.poll(now)).unwrap_or(true);
            self.carrier.take_away(&mut self.shard);
            if !polled {
                self.job_share.round_was_idle();
            }
            // A round is no longer than this: time in which the host ran someone else was not spent
            // on looking.
            let looked = now.saturating_sub(before).min(self.poll_for / ROUNDS_BEFORE_SLEEP);
            before = now;
            if polled || mail == Mail::Some {
                idle = 0;
                continue;
            }
            idle += looked;
            if idle < self.poll_for {
                spin_loop();
            } else {
                self.sleep(&mut counter);
                before = self.clock.now();
                counter.begin(before);
                idle = 0;
            }
        }
    }

    /// Does jobs for a while, unless it is the rounds' turn.
    pub(super) fn drain(&mut self) -> Mail {
        if self.job_share.is_spent(|| self.clock.now()) {
            // There may be some: whoever finds nothing else to do looks again before it sleeps.
            return Mail::Some;
        }
        let mut jobs = None;
        let mail = self.do_jobs(&mut jobs);
        if let Some(Jobs { began, charged }) = jobs {
            let now = self.clock.now();
            let charged = self.shard.charged().wrapping_sub(charged);
            self.job_share.spent(charged.max(now.saturating_sub(began)), now);
        }
        mail
    }

    /// Those that go in steps take one step each, in turn; one new job at least is begun, so that
    /// they keep nobody out.
    fn do_jobs(&mut self, jobs: &mut Option<Jobs>) -> Mail {
        let mut found = Mail::None;
        for _ in 0..self.unfinished.len() {
            let Some((nic, work)) = self.unfinished.pop_front() else { break };
            found = Mail::Some;
            if self.step(nic, work, jobs) {
                break;
            }
        }
        loop {
            match self.next_message() {
                Found::One(Message::Job(nic, work)) => {
                    found = Mail::Some;
                    if self.step(nic, work, jobs) {
                        return found;
                    }
                }
                Found::One(Message::Stop) | Found::Closed => return Mail::Stop,
                Found::Later => return Mail::Some,
                Found::None => return found,
            }
        }
    }

    /// Does a job, or a step of it; true: that was enough for this turn.
    fn step(&mut self, nic: Option<NicId>, mut work: Work, jobs: &mut Option<Jobs>) -> bool {
        let now = self.clock.now();
        let jobs = jobs.get_or_insert_with(|| Jobs { began: now, charged: self.shard.charged() });
        let before = self.shard.charged();
        let progress = self.guarded(nic, |shard| work(shard, now));
        let end = self.clock.now();
        if let Some(nic) = nic {
            let charged = self.shard.charged().wrapping_sub(before);
            self.shard.account(nic, charged.max(end.saturating_sub(now)));
        }
        if progress == Some(Progress::More) {
            self.unfinished.push_back((nic, work));
        }
        let charged = self.shard.charged().wrapping_sub(jobs.charged);
        charged >= JOBS || end.saturating_sub(jobs.began) >= JOBS
    }

    fn next_message(&mut self) -> Found<Message> {
        match std::mem::replace(&mut self.peeked, Found::None) {
            Found::None | Found::Later => self.mailbox.take(),
            peeked => peeked,
        }
    }

    fn has_mail(&self) -> bool {
        !matches!(self.peeked, Found::None) || self.carrier.has_any()
    }

    /// Sleeps, unless the last look before it finds something to do.
    fn sleep(&mut self, counter: &mut Counter) {
        self.waker.announce();
        // A panic in here counts as found: the round that follows deals with its NIC.
        let mut look = self.guarded(None, Shard::prepare_sleep).unwrap_or(Look::Found);
        self.peeked = self.next_message();
        // Others are served between the pieces; whatever there is to do ends the look.
        while look == Look::More && !self.has_mail() {
            let now = self.clock.now();
            counter.end(now, self.shard.charged());
            counter.begin(now);
            let polled = self.guarded(None, |shard| shard.poll(now)).unwrap_or(true);
            look = match polled {
                true => Look::Found,
                false => self.guarded(None, Shard::look_on).unwrap_or(Look::Found),
            };
            self.peeked = self.next_message();
        }
        counter.end(self.clock.now(), self.shard.charged());
        if look != Look::Clear || self.has_mail() {
            self.waker.stay_awake();
            // It may be that whoever has a mailbox's lock is to go on first.
            spin_loop();
        } else {
            let deadline = self.shard.next_deadline();
            self.waker.sleep(
                deadline.map(|at| Duration::from_nanos(at.saturating_sub(self.clock.now()))),
                &mut self.heard,
            );
        }
        self.take_kicks();
        self.guarded(None, Shard::wake);
    }

    /// Has NICs visited whose guests kicked.
    fn take_kicks(&mut self) {
        while let Some(nic) = self.heard.next() {
            self.guarded(Some(nic), |shard| shard.kicked(nic));
        }
    }

    /// Runs `work` so that a panic in it costs one NIC and not the thread.
    fn guarded<R>(&mut self, nic: Option<NicId>, work: impl FnOnce(&mut Shard) -> R) -> Option<R> {
        let shard = &mut self.shard;
        match contained(|| work(shard)) {
            Ok(result) => Some(result),
            Err(panic) => {
                self.contain(nic, panic.as_ref());
                None
            }
        }
    }

    /// Takes the NIC that a panic came from out of service.
    fn contain(&mut self, nic: Option<NicId>, panic: &(dyn Any + Send)) {
        let why = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let nic = nic.or_else(|| self.shard.suspect());
        let number = nic.and_then(|nic| self.shard.number(nic));
        tracing::error!(number, why, "a fault of the engine; its NIC stops");
        let Some(nic) = nic else { return give_up() };
        let shard = &mut self.shard;
        if contained(|| shard.fail(nic)).is_err() {
            tracing::error!(number, "the NIC could not be stopped in order");
            give_up();
        }
    }
}
