//! Network interfaces, their virtual functions, addresses and routes: rtnetlink without a runtime.
//!
//! ```no_run
//! use rdma_netlink::{Netns, link::{Links, NewAddress, Veth}};
//! # fn main() -> rdma_netlink::Result<()> {
//! let pod = Netns::from_path("/run/netns/pod")?;
//! let mut host = Links::open()?;
//! let mut inside = Links::open_in(&pod)?;
//!
//! // A VF's netdev moves into the pod under another name and comes up there.
//! let vf = host.by_name("ens3f0v2")?;
//! host.move_to(vf.index, &pod, Some("eth1"))?;
//! let vf = inside.by_name("eth1")?;
//! inside.add_address(vf.index, &NewAddress::new("10.8.0.7/24".parse()?))?;
//! inside.set_up(vf.index, true)?;
//!
//! // A pair of interfaces, one end on a bridge, the other in the pod.
//! let peer_netns = Some(&pod);
//! host.add_veth(&Veth { name: "veth7", peer: "eth0", peer_netns, ..Veth::default() })?;
//! let (near, bridge) = (host.by_name("veth7")?, host.by_name("br0")?);
//! host.set_master(near.index, Some(bridge.index))?;
//! # Ok(())
//! # }
//! ```
//!
//! Interfaces are named by index where they are changed: an index does not change when a name does.
//! A request that fails has changed nothing, except that [`Links::move_to`] may have moved and not
//! renamed, and that [`Links::set_vf`] sends one request for each field (drivers refuse them one by
//! one, and the error then says which).

mod address;
mod attributes;
mod client;
mod create;
mod route;
mod tap;
mod vf;

pub use address::{Address, NewAddress};
pub use attributes::{Link, LinkKind};
pub use client::Links;
pub use create::Veth;
pub use route::{NewRoute, Route};
pub use tap::{Tap, remove_tap};
pub use vf::{VfChange, VfLinkState, VfSettings};
