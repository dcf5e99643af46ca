//! Queue pairs as a guest sees them: their state machine, their attributes, and their send queue.

mod ahead;
pub(crate) mod attrs;
pub(crate) mod send;
pub(crate) mod state;

pub(crate) use attrs::Attrs;
pub(crate) use send::{SavedSends, SendQueue, Wait};
pub(crate) use state::{Kind, State};
