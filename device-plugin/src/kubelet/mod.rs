//! The kubelet: the device plugin servers that it calls, the registration that makes it call them,
//! and the pod-resources API that tells who has what.

mod authority;
mod plugin;
mod podresources;
mod register;

pub use plugin::Plugin;
pub use podresources::{Holding, Kubelet, KubeletError, Listing, NodeKubelet, PodKey, Run};
pub use register::{Registrar, endpoint};
