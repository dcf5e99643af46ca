//! The engine against a small reference model ([`model`]), under random sequences of what two
//! guests can do: create, destroy, connect and break QPs, register and withdraw regions and
//! windows, fill shared queues, post every kind of request with right and wrong keys, let time
//! pass, reset a NIC. In half of the sequences a NIC is parked as soon as it has nothing to do; in
//! half of them each guest has a shard of its own, and in some a wire between the shards repeats
//! what it carries, lets some overtake others, loses requests and answers, and takes small pieces
//! only. Another process goes on at random steps, and half of these do not wait for what is on its
//! way. What is changed by what is lost, the model may do: [`losses`].
//! After each step completions, events, states, statuses of commands and every byte of both guests'
//! memory must be those of the model.
//!
//! `PROPTEST_CASES` says how many sequences are tried (512). A failure shrinks to a short sequence
//! of [`Op`]s and is replayed from `proptest-regressions` first in the next run.

mod guest;
mod losses;
mod model;
mod ops;
mod posts;
mod run;
mod seen;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;

use ops::{Op, busy, furnished, op};

use crate::shard::testing::air::{Air, Faults};

/// More than proptest's own number: what is rare is what is wrong.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(512)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn the_engine_does_what_the_model_does(
        begun in prop::bool::weighted(0.9),
        parks in any::<bool>(),
        apart in any::<bool>(),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let begin = if begun { furnished(true) } else { Vec::new() };
        run_all((parks, apart.then(Air::still)), (&begin, &ops));
    }

    /// The same with a shard for each guest, and steps that leave much under way between them.
    #[test]
    fn so_it_does_with_much_under_way(
        parks in any::<bool>(),
        ops in prop::collection::vec(busy(), 1..100),
    ) {
        run_all((parks, Some(Air::still())), (&furnished(false), &ops));
    }

    /// The same over a wire that is none of the best. Whom a shared queue's receive is for, of
    /// several who wait, is up to the wire then: there is none.
    #[test]
    fn so_it_does_over_a_bad_wire(
        seed in any::<u64>(),
        ops in prop::collection::vec(prop_oneof![op(), busy()], 1..100),
    ) {
        run_all((false, Some(Air::new(BAD, seed))), (&furnished(false), &unshared(ops)));
    }

    /// The same over one that loses requests and answers, too. What was sent before its turn and
    /// was lost has begun, as far as its queue pair knows, and a drain waits for it (IBTA
    /// 10.3.1.4); which request that is the model is not told, so there is no drain.
    #[test]
    fn so_it_does_over_a_wire_that_loses(
        seed in any::<u64>(),
        ops in prop::collection::vec(prop_oneof![op(), busy()], 1..100),
    ) {
        let mut ops = unshared(ops);
        ops.retain(|op| !matches!(op, Op::Drain { .. }));
        run_all((false, Some(Air::new(LOSES, seed))), (&furnished(false), &ops));
    }
}

/// Some hundreds of parcels one after the other take less time than any timer has.
const BAD: Faults = Faults {
    lost: 0,
    requests_alone: false,
    repeated: 20,
    delay: 10_000,
    lag: 1000,
    mtu: Some(64),
};
/// What is lost is asked for again after a time, in which nobody waits any longer: steps whose
/// requests are lost are few enough that others find who waits.
const LOSES: Faults = Faults { lost: 4, ..BAD };

fn unshared(mut ops: Vec<Op>) -> Vec<Op> {
    ops.retain(|op| !matches!(op, Op::CreateShared { .. }));
    ops
}

fn run_all((parks, air): (bool, Option<Air>), (begin, ops): (&[Op], &[Op])) -> run::Met {
    let mut run = run::Run::new(air);
    if parks {
        [0, 1].into_iter().for_each(|on| run.world.at(on).park_at_once());
    }
    for op in begin.iter().chain(ops) {
        run.apply(op);
    }
    run.finish()
}

/// What the model is to be held against happens in its runs: pieces go ahead of their turn, and
/// some are not settled when a NIC moves, or is saved.
#[test]
fn pieces_are_under_way_in_the_runs() {
    let mut runner = TestRunner::deterministic();
    let steps = prop::collection::vec(busy(), 50..100);
    let mut met = run::Met::default();
    for _ in 0..ENOUGH {
        let ops = steps.new_tree(&mut runner).unwrap().current();
        let more = run_all((false, Some(Air::still())), (&furnished(false), &ops));
        met.all += more.all;
        met.moved += more.moved;
        met.saved += more.saved;
    }
    assert!(met.all > 100 && met.moved > 20 && met.saved > 20, "{met:?}");
}

/// How many sequences show what happens in all of them.
const ENOUGH: u64 = 60;

/// The bad wires do what they are said to.
#[test]
fn the_wires_of_the_runs_lose_repeat_and_reorder() {
    let mut runner = TestRunner::deterministic();
    let steps = prop::collection::vec(busy(), 50..100);
    let (mut repeated, mut reordered, mut lost, mut answers, mut otherwise) = (0, 0, 0, 0, 0);
    for seed in 0..4 * ENOUGH {
        let ops = steps.new_tree(&mut runner).unwrap().current();
        let faults = if seed % 2 == 0 { BAD } else { LOSES };
        let more = run_all((false, Some(Air::new(faults, seed))), (&furnished(false), &ops));
        repeated += more.repeated;
        reordered += more.reordered;
        lost += more.lost;
        answers += more.apart.answers;
        otherwise += more.otherwise;
    }
    let all = [repeated, reordered, lost, answers];
    assert!(all.iter().all(|&seen| seen > 50), "repeated, reordered, lost, answers: {all:?}");
    assert!(otherwise > 0, "what is lost never changes anything");
}
