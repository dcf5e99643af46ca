//! A skeleton for CNI plugins.
//!
//! A CNI plugin is a program that a container runtime executes: the command comes in the
//! environment, the network configuration on stdin, the answer goes to stdout as JSON, and so does
//! every error. This crate is everything around the plugin's own work. It reads a call (all that
//! the specification allows, see [`Environment`]), picks the version, dispatches to a [`Plugin`],
//! delegates to IPAM plugins and undoes that on failure ([`Delegate`]), and writes exactly one JSON
//! document or nothing to stdout. Whatever the caller sends, also a panic of the plugin, ends in
//! the specified error JSON and a code.
//!
//! The rules are those of the CNI specification 1.1.0 with what 0.3.0 to 1.0.0 do otherwise; where
//! the specification is silent, libcni's Go skeleton is followed, since that is what runtimes are
//! tested against. Three lenient readings are on purpose, because the strict ones leave deleted
//! pods behind: DEL needs no `CNI_NETNS`, does not look at `CNI_ARGS` that it cannot read, and no
//! verb demands `CNI_PATH` before something is delegated.
//!
//! There is no runtime, no thread but those that feed a delegate, no `unsafe`, and no global:
//! environment, stdin and stdout are arguments of [`run_with`], so a plugin is tested and fuzzed as
//! a function.
//!
//! ```
//! use cni_skel::{AddResult, Answer, Attachment, Environment, Error, Network, Plugin, run_with};
//!
//! struct Nothing;
//! impl Plugin for Nothing {
//!     fn add(&self, network: &Network, _: &Attachment) -> Result<Answer, Error> {
//!         Ok(Answer::passed_through(network).unwrap_or_else(|| AddResult::default().into()))
//!     }
//!     fn del(&self, _: &Network, _: &Attachment) -> Result<(), Error> {
//!         Ok(())
//!     }
//!     fn check(&self, _: &Network, _: &Attachment) -> Result<(), Error> {
//!         Ok(())
//!     }
//! }
//!
//! let environment = Environment::from([
//!     ("CNI_COMMAND", "DEL"),
//!     ("CNI_CONTAINERID", "c1"),
//!     ("CNI_IFNAME", "eth0"),
//! ]);
//! let mut out = Vec::new();
//! let config = br#"{"cniVersion": "1.0.0", "name": "net", "type": "nothing"}"#;
//! let status = run_with(&Nothing, &environment, &mut config.as_slice(), &mut out);
//! assert_eq!((status, out.len()), (0, 0));
//! ```

#![forbid(unsafe_code)]

mod args;
mod config;
mod delegate;
mod environment;
mod error;
mod result;
mod run;
mod version;

pub use args::Args;
pub use config::{NetworkConfig, RuntimeConfig, ValidAttachment};
pub use delegate::{DEFAULT_TIMEOUT, Delegate, Ipam, Refusal};
pub use environment::{Attachment, Command, Environment, valid_ifname};
pub use error::{Code, Error};
pub use result::{AddResult, Cidr, Dns, Extra, Interface, Ip, Route};
pub use run::{Answer, Network, Plugin, run, run_with};
pub use version::Version;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
