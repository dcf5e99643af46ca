//! What outlives a process: the form of saved state, and what its parts share.
//!
//! Each part of a NIC says in its own file what of it is saved, as plain data without a host
//! address, and makes itself again from that. Here is what goes around it: a mark, a version, a
//! length and a checksum. State comes from a process that guests talk to, so whoever reads it
//! believes nothing: numbers are looked at where they could lead astray, and memory is resolved
//! again, with the checks and the charges that a command's has. What does not fit is [`BadState`];
//! then the guest is told that its device is lost, as after a crash.
//!
//! The version changes whenever the meaning of the bytes does (a test holds the bytes of one state
//! against it). A reader takes the versions that it knows: version 3 alone. Version 1 had no pieces
//! under way beside the present one ([`super::qp`]), version 2 no refusal that found the NIC
//! paused.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::Status;
use super::limits::{Counters, MAX_WR};
use crate::memory::{AddressSpace, Fault, Ring, SavedMap};

/// What saved state begins with.
const MARK: [u8; 8] = *b"vRDMAsav";
/// Of the bytes behind the header: a build reads no other.
pub const VERSION: u32 = 3;
/// Mark, version, checksum (CRC-32 of what follows), and length of what follows.
const HEADER: usize = 8 + 4 + 4 + 8;
/// What no counter reaches: more bytes than a NIC of 400 Gb/s moves in two years.
const COUNTED: u64 = 1 << 62;
/// log2 of the largest entry of a ring.
const MAX_STRIDE: u8 = 12;

/// Why state cannot be read, or does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadState {
    /// Not written by any of us, or cut off.
    #[error("it is no saved state")]
    Mark,
    /// Written by a build that this one does not know.
    #[error("it is of version {0}, and this build reads version {VERSION}")]
    Version(u32),
    /// Bytes have changed.
    #[error("its checksum is wrong")]
    Checksum,
    /// The bytes are no state.
    #[error("it cannot be understood: {0}")]
    Form(String),
    /// Memory that it names is not there.
    #[error("the guest's memory does not have what it names: {0:?}")]
    Memory(Fault),
    /// A number that cannot be.
    #[error("{0} cannot be")]
    Content(&'static str),
}

impl From<Fault> for BadState {
    fn from(fault: Fault) -> Self {
        Self::Memory(fault)
    }
}

impl From<Status> for BadState {
    fn from(_: Status) -> Self {
        Self::Memory(Fault::Room)
    }
}

/// The bytes of a state.
///
/// # Errors
/// [`BadState::Form`]; none that is made of our own types.
pub fn seal<T: Serialize>(state: &T) -> Result<Vec<u8>, BadState> {
    let form = |error: postcard::Error| BadState::Form(error.to_string());
    let body = postcard::to_allocvec(state).map_err(form)?;
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(MARK);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(crc32fast::hash(&body).to_le_bytes());
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(body);
    Ok(bytes)
}

/// The state that bytes are.
///
/// # Errors
/// See [`BadState`].
pub fn open<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BadState> {
    let (header, body) = bytes.split_at_checked(HEADER).ok_or(BadState::Mark)?;
    let word = |at: usize| {
        let bytes = header.get(at..at + 4).and_then(|word| word.try_into().ok());
        bytes.map(u32::from_le_bytes).ok_or(BadState::Mark)
    };
    if header.get(..8) != Some(&MARK[..]) {
        return Err(BadState::Mark);
    }
    let version = word(8)?;
    if version != VERSION {
        return Err(BadState::Version(version));
    }
    let len = u64::from(word(16)?) | u64::from(word(20)?) << 32;
    if len != body.len() as u64 {
        return Err(BadState::Mark);
    }
    if word(12)? != crc32fast::hash(body) {
        return Err(BadState::Checksum);
    }
    postcard::from_bytes(body).map_err(|error| BadState::Form(error.to_string()))
}

/// Counters, if a NIC can have counted so far: whoever goes on counting is not to come to the end
/// of the numbers.
pub(crate) fn load_counters(saved: Counters) -> Result<Counters, BadState> {
    let Counters { tx_bytes, rx_bytes, tx_messages, rx_messages, .. } = saved;
    let Counters { rnr_naks_sent, rnr_naks_received, ack_timeouts, access_errors, .. } = saved;
    let Counters { request_errors, completion_errors, receive_drops, .. } = saved;
    let Counters { events_coalesced, completions, events, commands, page_faults, .. } = saved;
    let all = [
        [tx_bytes, rx_bytes, tx_messages, rx_messages],
        [rnr_naks_sent, rnr_naks_received, ack_timeouts, access_errors],
        [request_errors, completion_errors, receive_drops, events_coalesced],
        [completions, events, commands, page_faults],
    ];
    let fits = all.as_flattened().iter().all(|&count| count < COUNTED);
    if fits { Ok(saved) } else { Err(BadState::Content("a counter")) }
}

/// A structure of the ABI, as its own bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AbiBytes(Vec<u8>);

impl AbiBytes {
    pub(crate) fn of<T: IntoBytes + Immutable + ?Sized>(value: &T) -> Self {
        Self(value.as_bytes().to_vec())
    }

    pub(crate) fn read<T: FromBytes>(&self) -> Result<T, BadState> {
        T::read_from_bytes(&self.0).map_err(|_| BadState::Content("such a structure"))
    }

    /// As many as there are.
    pub(crate) fn read_all<T: FromBytes>(&self) -> impl Iterator<Item = Result<T, BadState>> {
        let wrong = |_| BadState::Content("such a list");
        self.0.chunks(size_of::<T>()).map(move |one| T::read_from_bytes(one).map_err(wrong))
    }
}

/// A ring of entries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRing {
    /// `None`: its memory is gone.
    map: Option<SavedMap>,
    pub(crate) entries: u32,
    pub(crate) log2_stride: u8,
}

impl SavedRing {
    /// That of a guest with this memory.
    pub(crate) fn of(ring: &Ring, (entries, log2_stride): (u32, u8), space: &AddressSpace) -> Self {
        let map = ring.save().filter(|_| ring.lives_in(space));
        Self { map, entries, log2_stride }
    }

    /// Its memory, if indices masked by its entries lie in something that makes sense.
    pub(crate) fn load(&self, most: u32, space: &AddressSpace) -> Result<Ring, BadState> {
        let shape = self.entries.is_power_of_two() && self.entries <= most;
        if !shape || self.log2_stride > MAX_STRIDE {
            return Err(BadState::Content("a ring of such a shape"));
        }
        match &self.map {
            Some(map) if map.is_identity() => Err(BadState::Content("a ring in all of memory")),
            Some(map) => Ok(Ring::load(map, space)?),
            None => Ok(Ring::nowhere()),
        }
    }

    /// As [`Self::load`], for work requests whose indices are these.
    pub(crate) fn load_work(
        &self,
        (producer, taken): (u32, u32),
        space: &AddressSpace,
    ) -> Result<Ring, BadState> {
        if producer.wrapping_sub(taken) > self.entries {
            return Err(BadState::Content("more work than a ring holds"));
        }
        self.load(MAX_WR, space)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_changed_are_no_state() {
        let state = vec![1u32, 2, 3];
        let bytes = seal(&state).unwrap();
        assert_eq!(open::<Vec<u32>>(&bytes).unwrap(), state);
        for at in 0..bytes.len() {
            let mut bent = bytes.clone();
            bent[at] ^= 1;
            assert!(open::<Vec<u32>>(&bent).is_err(), "byte {at}");
            assert!(open::<Vec<u32>>(&bytes[..at]).is_err(), "cut at {at}");
        }
        for version in [VERSION - 1, VERSION + 1] {
            let mut other = bytes.clone();
            other[8..12].copy_from_slice(&version.to_le_bytes());
            assert_eq!(open::<Vec<u32>>(&other), Err(BadState::Version(version)));
        }
        assert!(open::<Vec<String>>(&bytes).is_err(), "another kind of state");
        let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
        assert!(open::<Vec<u32>>(&longer).is_err());
    }
}
