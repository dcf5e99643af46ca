//! The VM and cluster lab: what `cargo xtask` sets up and runs programs in.
//!
//! Three layers. `exec`, `cache` and `host` know nothing of RDMA: children that cannot outlive us,
//! artefacts that are made once, the machine's package mirror. `roots` and `products` make what a
//! lab needs: a QEMU, guest images, builders, and from them the kernel module and the provider.
//! Above them are the labs: `vm` boots guests and runs programs in them, each use of it one file in
//! `vm/scenarios`; `process` has containers, `k8s` a cluster, `attempt` two processes of this
//! machine.
//!
//! A lab is a type of arguments with a `run`, and prints rows. Which of them a command or a test
//! run takes is `xtask`'s business, of which nothing is known here.

pub mod attempt;
pub mod cache;
pub mod chart;
mod debug_kernel;
pub mod exec;
mod fabtests;
pub mod host;
pub mod k8s;
pub mod monitoring;
pub mod node_bench;
mod packages;
mod part;
pub mod pip;
pub mod process;
mod products;
mod roots;
pub mod rows;
mod upstream;
mod verdicts;
mod vm;

pub use debug_kernel::Kernel;
pub use part::Part;
pub use roots::Debian;
pub use vm::scenarios;
