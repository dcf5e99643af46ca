//! The backing `rnic`: guests share an RNIC of this host, with memory protection in hardware.
//!
//! A guest's objects are host objects one to one: a host PD per guest PD, host QPs, SRQs and AHs,
//! and host registrations of the guest's own pages at the guest's own addresses. The guest sees the
//! hardware's keys and QPNs, so whatever a peer sends is checked and placed by the RNIC alone: no
//! software is on the inbound path, and no byte is copied. What remains here is the daemon's share
//! of the sending side: work requests are copied from the guest's ring and posted in bursts,
//! completions are polled from one host CQ, told apart by their `wr_id`, and written to the guest's
//! CQs.
//!
//! ```text
//! shard ──OnShard──> round     what is to be done in one round
//!                    control   commands       provider   what the guest's part asks for
//!                      │
//!                      ├─ create, modify, drain  commands, one host object each
//!                      ├─ mr, mw                 regions and windows
//!                      ├─ reach                  who has to be found on the network first
//!                      ├─ ending                 the end of much, a little at a time or aside
//!                      ├─ requester, receiver    guest rings -> bursts -> HostVerbs
//!                      ├─ cq                     HostVerbs completions -> guest CQs
//!                      ├─ gsi                    QP 1: the daemon carries its datagrams
//!                      ├─ events, refusal        what HostVerbs says, as the guest's
//!                      └─ addresses, peer_check  which host GID, and who may be reached
//!                           │
//!                           v
//! nic: one NIC. Its queues, regions, windows (`sends`, `receives`, `region`, `windows` …)
//! directory, peer_table, ways: who is on this host's RNICs, whom they may reach, and how
//!
//! HostVerbs: null (copies work requests, completes them, injects faults)
//!            or libibverbs (feature `host-rnic`)
//! ```
//!
//! Guest-side machinery is the engine's: contexts and doorbells, rings, CQs, the outbox of events,
//! the QP state machine. What the hardware does that the engine does otherwise is listed in
//! docs/RNIC.md.

mod addresses;
#[cfg_attr(not(feature = "host-rnic"), allow(dead_code, reason = "librdmacm is for RNICs"))]
mod cm;
mod control;
mod cq;
mod create;
mod directory;
mod drain;
mod ending;
mod events;
mod faults;
mod findings;
mod follow;
mod gone;
mod gsi;
mod held;
mod host;
#[cfg(feature = "host-rnic")]
mod ibverbs;
mod limits;
mod mcast;
mod modify;
mod mr;
mod mw;
mod nic;
mod nic_quota;
mod null;
mod open_error;
mod peer_check;
mod peer_table;
mod peers;
mod provider;
mod quota;
mod reach;
mod receiver;
mod receives;
mod refusal;
mod region;
mod requester;
mod round;
mod sends;
mod services;
mod srq;
mod stopping;
#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers of tests")]
mod tests;
mod uplink;
mod verbs;
mod ways;
mod windows;
mod work;
mod wr_id;

#[cfg(feature = "host-rnic")]
pub use cm::CmBridge;
pub use directory::{Claim, Directory};
pub use faults::{Call, Faults};
pub use host::{open, prepare, prepare_cm};
pub use nic::Nic;
pub use nic::{Opener, Place, Rnic};
pub use nic_quota::{ForwardQuota, QuotaPermit};
pub use nic_quota::{NicQuota, NicQuotas, PER_NIC};
pub use null::Null;
pub use open_error::OpenError;
pub use peer_table::{Peer, Remote};
pub use peers::Refusal;
pub use verbs::{
    Data, HostAh, HostDomain, HostError, HostEvent, HostGid, HostLimits, HostMr, HostMw,
    HostObjects, HostPart, HostPd, HostPort, HostQp, HostSge, HostSrq, HostVerbs, HostWc, Keeps,
    MadeAh, PostError, QpInit, RecvBurst, RecvWr, Registered, Result, SendBurst, SendWr, Subject,
};
pub use ways::{Carrier, Far, Mac, Uplink};
