//! The engine's randomness, which it takes as an argument: keys and queue pair numbers must not be
//! guessable by another tenant, so a CSPRNG.

use std::io;

use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

use crate::qpn::Key;
use crate::shard::Random;

/// ChaCha, seeded by the operating system.
pub(crate) struct SystemRandom(StdRng);

impl SystemRandom {
    pub(crate) fn new() -> io::Result<Self> {
        StdRng::try_from_os_rng().map(Self).map_err(io::Error::other)
    }
}

impl Random for SystemRandom {
    fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }
}

/// A key of queue pair numbers that nobody can know.
///
/// # Errors
/// The host has no random numbers.
pub(crate) fn qpn_key() -> io::Result<Key> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(Key::from_bytes(&bytes))
}
