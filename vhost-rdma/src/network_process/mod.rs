//! The process that serves the NICs of one network.
//!
//! No byte ever goes from one network to another, so nothing is lost by a process for each, and
//! much is won: a fault, a stall, or memory that a tenant makes the daemon touch is that network's.
//! It is this same program, executed anew by the supervisor, with one socket pair as its standard
//! input and nothing else of the supervisor's but standard error.
//!
//! ```text
//!  supervisor (Network) ── Request, descriptors ──> serve: LocalDataplane, in a sandbox
//!                       <── Report, descriptors ──
//! ```
//!
//! `protocol` is what is said; `wire` is how it goes over the socket, `serve` the process itself.
//! The supervisor's end is in [`crate::supervisor`]; it believes nothing that comes from here.
//! `exchange` is what a network on RNICs has to say to who knows all of them ([`crate::outside`]),
//! and `uplink` its way there, where what is `unsaid` waits.

mod bad_message;
mod exchange;
mod protocol;
mod serve;
mod unsaid;
mod uplink;
mod wire;

pub use bad_message::{BadMessage, MESSAGE_MAX, TEXT_MAX, plain};
pub use exchange::{Asked, Datagram, Host, QPS_MAX, Settled, Told};
pub use protocol::{
    Answer, FILES_MAX, Figures, Numbered, Report, Request, Start, VERSION, check_change, decode,
    encode,
};
pub use serve::{Fault, serve};
pub(crate) use serve::{ignore_signals, read_all, set_filter};
pub use wire::{Packet, Wire};
