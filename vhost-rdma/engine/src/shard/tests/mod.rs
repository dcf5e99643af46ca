//! The engine driven without a device: two NICs, anonymous guest memory, a clock that the test
//! turns.

mod ahead;
mod apart;
mod budgets;
mod connected;
mod datagram;
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
