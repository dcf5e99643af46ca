//! The engine's randomness, which it takes as an argument: keys and queue pair numbers must not be
//! guessable by another tenant, so a CSPRNG.
//!
//! The kernel is asked by its own call. The crate `getrandom` opens a file of `/dev` where it finds
//! no such function in the C library, as in a static build, and a process that has shut itself in
//! opens none.

use std::io;

use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::qpn::Key;
use crate::shard::Random;

/// ChaCha, seeded by the operating system.
pub(crate) struct SystemRandom(StdRng);

impl SystemRandom {
    pub(crate) fn new() -> io::Result<Self> {
        let mut seed = <StdRng as SeedableRng>::Seed::default();
        fill(&mut seed)?;
        Ok(Self(StdRng::from_seed(seed)))
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
    fill(&mut bytes)?;
    Ok(Key::from_bytes(&bytes))
}

/// Fills it with bytes that nobody can know.
///
/// # Errors
/// The host has no random numbers.
pub(crate) fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        match getrandom(&mut *rest, GetRandomFlags::empty()) {
            Ok(count) => rest = rest.get_mut(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_it_is_filled() {
        // The kernel gives up to 256 bytes at once, and may give less of more (getrandom(2)).
        let (mut one, mut other) = ([0; 4096], [0; 4096]);
        fill(&mut one).unwrap();
        fill(&mut other).unwrap();
        fill(&mut []).unwrap();
        let pieces = one.chunks(32).chain(other.chunks(32));
        let unlike: std::collections::BTreeSet<&[u8]> = pieces.collect();
        assert_eq!(unlike.len(), 256);
    }
}
