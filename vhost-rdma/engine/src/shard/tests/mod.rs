//! The engine driven without a device: two NICs, anonymous guest memory, a clock that the test
//! turns.
//!
//! What a guest sees does not tell by which link its requests go. So the tests that look from there
//! are written once and run over each: between two NICs of one shard, between shards over the bus,
//! over a simulated link that repeats, reorders and delays what the bus gives it, and over one that
//! loses requests. Whoever writes such a test makes its world by `super::world`, asks for guests by
//! `World::guest`, and names a shard by `World::at`. A link that loses answers and datagrams too is
//! the affair of `apart` and of the reference model, since a refusal that is lost comes out
//! otherwise.

use crate::shard::testing::driver::World;

mod ahead;
mod alone;
mod apart;
mod budgets;
mod commands;
mod connected;
mod datagram;
mod exact;
mod failures;
mod flights;
mod keys;
mod late;
mod lifecycle;
mod mirror;
mod moves;
mod parking;
mod placement;
mod plain;
mod reference;
mod rules;
mod saved;
mod states;
mod unreliable;
mod wakes;
mod wire;
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

    mod commands;
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

    mod commands;
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

/// The same tests over a link that loses requests of connections: the fourth, the fifth and the
/// tenth of each test, and about one in seven behind them. Whoever waits sends them again, and no
/// guest can tell.
#[allow(clippy::duplicate_mod, reason = "one suite over all links")]
#[path = "."]
mod over_losses {
    use crate::shard::testing::air::{Air, Faults};
    use crate::shard::testing::driver::World;

    mod connected;
    mod failures;
    mod keys;
    mod lifecycle;
    mod rules;
    mod wrap;

    const FAULTS: Faults =
        Faults { lost: 15, requests_alone: true, repeated: 0, delay: 0, lag: 0, mtu: None };

    fn world() -> World {
        World::over(Air::new(FAULTS, 39))
    }
}
