//! A second driver of the RDMA device, and the monitor that it needs, in one process.
//!
//! It exists to test a text. It was written from `docs/virtio-rdma.md` and public specifications by
//! somebody who had seen neither another driver nor the device; numbers and offsets are typed from
//! section 12. So what works here can be learned from the text. It may not depend on a crate of
//! this workspace.
//!
//! Upwards: `memory` is the guest's memory, `vhost_user` the monitor, `virtqueue` and
//! `rings` the queues, `device` the kernel's part of a driver, `session` the provider's part,
//! `exchange` and [`pingpong`] the program above it, which is `ibv_rc_pingpong` to its peer.

#![forbid(unsafe_code)]

mod device;
mod error;
mod exchange;
mod layout;
mod memory;
pub mod pingpong;
mod rings;
mod session;
mod vhost_user;
mod virtqueue;
