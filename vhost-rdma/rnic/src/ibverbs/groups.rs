//! Multicast groups that the port's interface receives because QPs of this context are in them.
//!
//! Attaching a QP tells the RNIC what to do with datagrams of a group, and nothing to switches and
//! to the host's own stack: without a membership (IGMP, MLD) nobody sends them here. rdma_cm makes
//! one for its own joins (cma.c, cma_igmp_send); we hold a socket in each group. Through it the
//! host also loops its own datagrams back, as IBTA has it.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use vhost_rdma_engine::link::Gid;

use crate::verbs::{HostError, HostQp, Result};

#[derive(Debug)]
struct Group {
    /// What it is a member by; nothing is ever read from it.
    _member: UdpSocket,
    qps: Vec<HostQp>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Groups(BTreeMap<Gid, Group>);

impl Groups {
    /// One more QP is in a group, of the interface that has this address and index.
    pub(super) fn join(
        &mut self,
        group: &Gid,
        qp: HostQp,
        (own, interface): (&Gid, u32),
    ) -> Result<()> {
        if let Some(joined) = self.0.get_mut(group) {
            joined.qps.push(qp);
            return Ok(());
        }
        let failed = |error: io::Error| HostError(error.raw_os_error().unwrap_or(libc::EIO));
        let member = member(group, own, interface).map_err(failed)?;
        self.0.insert(*group, Group { _member: member, qps: vec![qp] });
        Ok(())
    }

    /// One less is.
    pub(super) fn leave(&mut self, group: &Gid, qp: HostQp) {
        if let Some(joined) = self.0.get_mut(group) {
            joined.qps.retain(|&member| member != qp);
            if joined.qps.is_empty() {
                self.0.remove(group);
            }
        }
    }

    /// All who are in one, which is to end.
    pub(super) fn clear(&mut self) -> Vec<(HostQp, Gid)> {
        let groups = std::mem::take(&mut self.0).into_iter();
        groups.flat_map(|(gid, group)| group.qps.into_iter().map(move |qp| (qp, gid))).collect()
    }

    /// QPs in all groups together.
    pub(super) fn attachments(&self) -> usize {
        self.0.values().map(|group| group.qps.len()).sum()
    }
}

fn member(group: &Gid, own: &Gid, interface: u32) -> io::Result<UdpSocket> {
    let canonical = |gid: &Gid| IpAddr::from(*gid).to_canonical();
    match (canonical(group), canonical(own)) {
        (IpAddr::V4(group), IpAddr::V4(own)) => {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.join_multicast_v4(&group, &own)?;
            Ok(socket)
        }
        (IpAddr::V6(group), IpAddr::V6(_)) => {
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
            socket.join_multicast_v6(&group, interface)?;
            Ok(socket)
        }
        _ => Err(io::Error::from_raw_os_error(libc::EADDRNOTAVAIL)),
    }
}
