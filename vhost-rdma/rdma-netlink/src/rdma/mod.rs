//! RDMA netlink (`NETLINK_RDMA`, client NLDEV): what the `rdma` tool of iproute2 speaks.
//!
//! ```no_run
//! use rdma_netlink::{Netns, rdma::{NetnsMode, Rdma}};
//! # fn main() -> rdma_netlink::Result<()> {
//! let mut rdma = Rdma::open()?;
//! if rdma.system()?.netns_mode == Some(NetnsMode::Exclusive) {
//!     let pod = Netns::from_path("/run/netns/pod")?;
//!     let device = rdma.by_name("mlx5_3")?;
//!     rdma.move_to(device.index, &pod, None)?;
//!     // Only a socket of that namespace sees it now.
//!     println!("{:?}", Rdma::open_in(&pod)?.by_name("mlx5_3")?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! In *shared* mode every namespace sees every device, and its network decides which GIDs it may
//! use; in *exclusive* mode a device belongs to one namespace. A device in another namespace, or
//! none that the kernel knows, is simply not listed.
//!
//! The messages ([`Device`], [`Port`], [`QueuePair`], …) convert both ways ([`Message`]), so that a
//! test can stand for the kernel. Interface definition: `include/uapi/rdma/rdma_netlink.h` of
//! Linux.

mod client;
mod code;
mod codec;
mod constants;
mod device;
mod monitor;
mod resource;
mod statistics;

pub use client::Rdma;
pub use code::{
    CmState, NetnsMode, NodeType, PathMigration, PhysicalState, PortSpace, PortState, QpState,
    QpType,
};
pub use codec::Message;
pub use device::{CharDevice, Device, Port, System};
pub use monitor::{Event, EventKind, Monitor};
pub use resource::{
    CompletionQueue, ConnectionId, Context, MemoryRegion, ProtectionDomain, QueuePair, Resource,
    ResourceCount, SharedReceiveQueue,
};
pub use statistics::Counter;
