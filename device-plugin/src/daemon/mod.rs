//! The daemon as the agent needs it.
//!
//! - `admin`: its admin API, the real one
//! - `paced`: what a network that does not answer may take of the agent's time

mod admin;
mod paced;

use std::collections::BTreeMap;
use std::future::Future;

use vhost_rdma_proto::v1;

pub use admin::AdminApi;
pub use paced::{Pace, Paced};

/// Why the daemon did not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DaemonError {
    /// It does not answer.
    #[error("the vhost-rdma daemon does not answer: {0}")]
    Unreachable(String),
    /// It has no such thing.
    #[error("{0}")]
    NotFound(String),
    /// It has one of this name.
    #[error("{0}")]
    Exists(String),
    /// It refused.
    #[error("{0}")]
    Refused(String),
    /// One of its networks does not answer.
    #[error("{0}")]
    Silent(String),
}

type Done<T> = Result<T, DaemonError>;

/// What there is in the daemon.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct View {
    /// Its run: another one has lost every session.
    pub instance: String,
    /// Its version.
    pub version: String,
    /// Every NIC by name.
    pub nics: BTreeMap<String, v1::Nic>,
}

/// The calls that the agent makes.
pub trait Daemon: Send + Sync + 'static {
    /// Who it is and what it has.
    fn view(&self) -> impl Future<Output = Done<View>> + Send;
    /// Makes a network unless it exists.
    fn ensure_network(&self, name: &str, vni: Option<u32>)
    -> impl Future<Output = Done<()>> + Send;
    /// Removes a network, if the one of this name has this VNI.
    fn remove_network(&self, name: &str, vni: u32) -> impl Future<Output = Done<()>> + Send;
    /// Replaces the controller's peers of a network, or changes them.
    fn replace_peers(
        &self,
        request: v1::ReplacePeersRequest,
    ) -> impl Future<Output = Done<()>> + Send;
    /// Has it read its files again, and hears what came of it.
    fn reload(&self) -> impl Future<Output = Done<v1::ReloadResponse>> + Send;
    /// Makes a NIC.
    fn add_nic(&self, request: v1::AddNicRequest) -> impl Future<Output = Done<v1::Nic>> + Send;
    /// Changes a NIC.
    fn update_nic(
        &self,
        request: v1::UpdateNicRequest,
    ) -> impl Future<Output = Done<v1::Nic>> + Send;
    /// Shows a NIC.
    fn nic(&self, name: &str) -> impl Future<Output = Done<v1::Nic>> + Send;
    /// Ends a NIC; one that does not exist is no fault.
    fn remove_nic(&self, name: &str) -> impl Future<Output = Done<()>> + Send;
}

/// The daemon's word for a session.
#[must_use]
pub const fn session_word(session: v1::Session) -> &'static str {
    match session {
        v1::Session::Connected => "connected",
        v1::Session::DriverReady => "driver_ready",
        v1::Session::Failed => "failed",
        v1::Session::Absent => "absent",
        v1::Session::Unspecified => "unknown",
    }
}

/// Is a VMM connected?
#[must_use]
pub fn is_connected(nic: &v1::Nic) -> bool {
    matches!(nic.session(), v1::Session::Connected | v1::Session::DriverReady)
}
