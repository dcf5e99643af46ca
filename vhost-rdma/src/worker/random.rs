//! The engine's randomness: keys and queue pair numbers must not be guessable by another tenant, so
//! a CSPRNG.

use std::io;

use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

use crate::shard::Random;

/// ChaCha, seeded by the operating system.
pub(super) struct SystemRandom(StdRng);

impl SystemRandom {
    pub(super) fn new() -> io::Result<Self> {
        StdRng::try_from_os_rng().map(Self).map_err(io::Error::other)
    }
}

impl Random for SystemRandom {
    fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }
}
