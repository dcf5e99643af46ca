//! What a message between the supervisor and a network's process may not be.

/// Bytes of a message, at most.
pub const MESSAGE_MAX: usize = 128 << 10;

/// Why a message is none.
#[derive(Debug, thiserror::Error)]
pub enum BadMessage {
    /// Longer than [`MESSAGE_MAX`].
    #[error("a message of {0} bytes, where {MESSAGE_MAX} are the most")]
    TooLong(usize),
    /// Not one of ours.
    #[error("it cannot be understood: {0}")]
    Form(#[from] serde_json::Error),
    /// Its descriptors are not those that it should have.
    #[error("{found} descriptors with a message that has {wanted}")]
    Files {
        /// That came.
        found: usize,
        /// That should have.
        wanted: String,
    },
    /// It says what cannot be.
    #[error("{0} cannot be")]
    Content(&'static str),
}
