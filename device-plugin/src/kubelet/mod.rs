//! The kubelet: the device plugin servers that it calls, the registration that makes it call them,
//! and the client of the pod-resources API that tells who has what ([`crate::holders`]).

mod authority;
mod plugin;
mod podresources;
mod register;

pub use plugin::Plugin;
pub use podresources::NodeKubelet;
pub use register::{Registrar, endpoint};
