//! What a message between the supervisor and a network's process may not be, and how what it says
//! is shown to people.

use std::fmt::Display;

/// Bytes of a message, at most.
pub const MESSAGE_MAX: usize = 128 << 10;
/// Characters of a text that is shown to people.
pub const TEXT_MAX: usize = 1000;

/// Why a message is none.
#[derive(Debug, thiserror::Error)]
pub enum BadMessage {
    /// Longer than [`MESSAGE_MAX`].
    #[error("a message of {0} bytes, where {MESSAGE_MAX} are the most")]
    TooLong(usize),
    /// Not one of ours, and why, which quotes it.
    #[error("it cannot be understood: {0}")]
    Form(String),
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

impl From<serde_json::Error> for BadMessage {
    fn from(error: serde_json::Error) -> Self {
        Self::Form(plain(error))
    }
}

/// What is shown to people takes a line, and commands no terminal.
pub fn plain(text: impl Display) -> String {
    let clean = |c: char| if c.is_control() { '?' } else { c };
    text.to_string().chars().take(TEXT_MAX).map(clean).collect()
}
