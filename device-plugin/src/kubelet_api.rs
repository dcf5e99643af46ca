//! The kubelet's APIs, generated from their definitions at build time.

/// Device plugin API.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    clippy::use_self,
    clippy::wildcard_imports
)]
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");

    /// The version that is told at registration.
    pub const VERSION: &str = "v1beta1";
    /// A device that can be given to a pod.
    pub const HEALTHY: &str = "Healthy";
    /// A device that cannot.
    pub const UNHEALTHY: &str = "Unhealthy";
    /// The kubelet's own socket in the device plugin directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}

/// Pod-resources API.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    clippy::use_self,
    clippy::wildcard_imports
)]
pub mod podresources {
    tonic::include_proto!("v1");
}
