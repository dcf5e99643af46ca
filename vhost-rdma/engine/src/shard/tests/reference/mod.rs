//! The engine against a small reference model ([`model`]), under random sequences of what two
//! guests can do: create, destroy, connect and break QPs, register and withdraw regions and
//! windows, fill shared queues, post every kind of request with right and wrong keys, let time
//! pass, reset a NIC. In half of the sequences a NIC is parked as soon as it has nothing to do; in
//! half of them each guest has a shard of its own.
//! After each step completions, events, states, statuses of commands and every byte of both guests'
//! memory must be those of the model.
//!
//! `PROPTEST_CASES` says how many sequences are tried (512). A failure shrinks to a short sequence
//! of [`Op`]s and is replayed from `proptest-regressions` first in the next run.

mod guest;
mod model;
mod ops;
mod posts;
mod run;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;

use ops::{Op, busy, furnished, op};

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
        run_all((parks, apart), (&begin, &ops));
    }

    /// The same with a shard for each guest, and steps that leave much under way between them.
    #[test]
    fn so_it_does_with_much_under_way(
        parks in any::<bool>(),
        ops in prop::collection::vec(busy(), 1..100),
    ) {
        run_all((parks, true), (&furnished(false), &ops));
    }
}

fn run_all((parks, apart): (bool, bool), (begin, ops): (&[Op], &[Op])) -> run::Met {
    let mut run = run::Run::new(apart);
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
    for _ in 0..60 {
        let ops = steps.new_tree(&mut runner).unwrap().current();
        let more = run_all((false, true), (&furnished(false), &ops));
        met.all += more.all;
        met.moved += more.moved;
        met.saved += more.saved;
    }
    assert!(met.all > 100 && met.moved > 20 && met.saved > 20, "{met:?}");
}
