//! What a queue pair remembers of another shard's requests (`crossing`).

use serde::{Deserialize, Serialize};

/// What a queue pair knows of the requests that came to it from another shard.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Stream {
    /// Whose: the life of the requester's queue pair.
    pub(super) life: u64,
    /// The number that is to be executed next.
    pub(super) next: u32,
    /// The one before it was executed, and this is what an atomic found.
    pub(super) found: Option<[u8; 8]>,
    /// `next` waits for an owner.
    pub(super) held: bool,
}

impl Stream {
    /// As it is in another process, which owners have not been asked by.
    pub(super) const fn resumed(self) -> Self {
        Self { held: false, ..self }
    }
}
