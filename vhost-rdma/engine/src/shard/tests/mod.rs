//! The engine driven without a device: two NICs, anonymous guest memory, a clock that the test
//! turns.
//!
//! What a guest sees does not tell by which link its requests go. So the tests that look from there
//! are written once and run over each: between two NICs of one shard, between shards over the bus,
//! and over a simulated link that repeats, reorders and delays what the bus gives it. Whoever
//! writes such a test makes its world by `super::world`, asks for guests by `World::guest`, and
//! names a shard by `World::at`. A link that loses too is the affair of `apart` and of the
//! reference model, since unreliable messages may be lost there and counts of retries change.

use crate::shard::testing::driver::World;

mod ahead;
mod alone;
mod apart;
mod budgets;
mod connected;
mod datagram;
mod exact;
mod failures;
mod flights;
mod keys;
mod lifecycle;
mod mirror;
mod moves;
mod parking;
mod placement;
mod plain;
mod reference;
mod rules;
mod saved;
mod wrap;

/// A world of one shard.
fn world() -> World {
    World::new()
}

/// The same tests between two shards.
#[allow(clippy::duplicate_mod, reason = "one suite over all links")]
#[path = "."]
mod over_the_bus {
    use crate::shard::testing::air::Air;
    use crate::shard::testing::driver::World;

    mod connected;
    mod datagram;
    mod exact;
    mod failures;
    mod keys;
    mod lifecycle;
    mod rules;
    mod wrap;

    fn world() -> World {
        World::over(Air::still())
    }
}

/// The same tests over a link on which nothing is as it was sent, but all of it arrives.
#[allow(clippy::duplicate_mod, reason = "one suite over all links")]
#[path = "."]
mod over_the_air {
    use crate::shard::testing::air::{Air, Faults};
    use crate::shard::testing::driver::World;

    mod connected;
    mod datagram;
    mod failures;
    mod keys;
    mod lifecycle;
    mod rules;
    mod wrap;

    const FAULTS: Faults = Faults { lost: 0, ..super::apart::BAD };

    fn world() -> World {
        World::over(Air::new(FAULTS, 11))
    }
}
