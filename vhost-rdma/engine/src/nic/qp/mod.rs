//! Queue pairs as a guest sees them: their state machine, their attributes, and their send queue.

mod ahead;
pub mod attrs;
pub(crate) mod send;
pub mod state;

pub(crate) use ahead::{Fate, Flight, MOST, PIECES, WINDOW};
pub use attrs::Attrs;
pub(crate) use send::Landed;
pub use send::{SavedSends, SendQueue, Wait};
pub use state::{Kind, State};
