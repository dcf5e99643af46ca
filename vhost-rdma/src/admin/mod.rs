//! The daemon's shell: runtime directory, saved state, admin API, metrics.
//!
//! ```text
//!  gRPC on admin.sock ──> Service ──> Daemon ──┬─> node::Registry   rules
//!  HTTP metrics ─────────────────────┘         ├─> Store            state.json, written before an
//!                                              │                   answer is given
//!                                              └─> node::Backend    the device layer
//! ```
//!
//! `Daemon` is the only thing that changes anything, one change of a network at a time, and each
//! change either holds in all three places or in none. It is synchronous; the service calls it from
//! blocking threads, and looking never waits for a change, so that a NIC which takes its time to
//! stop delays no answer about others' health. The async runtime has one thread and serves this API
//! only: no packet or work request passes here.

#![forbid(unsafe_code)]

mod convert;
mod daemon;
mod lanes;
mod metrics;
mod reloading;
mod scrape;
mod serve;
mod service;
mod store;
mod users;

pub use daemon::{Daemon, Error, NicView, Reloaded};
pub use metrics::MetricsAddress;
pub use reloading::{Next, Reload};
pub use serve::{RunError, ServeError, Settings, check, run};
pub use store::StoreError;
pub use users::{UserError, group_id, group_name, user_id, user_name};
