//! What everybody says who speaks for a connection manager here: the datagrams of QP 1, and the
//! messages of connection managers in them.
//!
//! Two do: the bridge that joins guests on RNICs with third-party hosts (`rnic::cm`), and the
//! connection manager of processes, which have no kernel that could be one (`process::cm`). What
//! they make of a message is theirs; how it is written is here.

mod mad;
pub mod message;

pub use mad::ROOM;
pub use mad::{Inbox, MAD_LEN, Mad, Wake};
