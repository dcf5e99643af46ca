//! Multicast groups of UD queue pairs (IBTA 10.5.2), where the RNIC has them.
//!
//! On the wire a group is one for all networks, so nothing separates them but what the operator
//! says: a network's NICs send to and receive from the groups that one of its peer entries names,
//! and no others. Two networks with the same group share it.

use easy_ext::ext;
use vhost_rdma_engine::link::{Gid, is_multicast};
use vhost_rdma_engine::nic::limits::{MAX_MCAST_GROUPS, MAX_MCAST_QPS};
use vhost_rdma_engine::nic::qp::Kind;
use vhost_rdma_engine::nic::{Reply, Status};
use virtio_rdma_abi as abi;

use super::addresses::Addresses as _;
use super::nic::Nic;
use super::refusal::Control as _;
use super::verbs::HostQp;

/// A group as it is on the wire: IPv4 groups have two forms (`ff0e::ffff:a.b.c.d` and the mapped
/// address), of which RoCE v2 knows the second.
fn on_the_wire(mgid: &Gid) -> Gid {
    let mut mapped = [0; 16];
    mapped[10..].copy_from_slice(&mgid[10..]);
    if mgid[2..10] == [0; 8] && mgid[10..12] == [0xff, 0xff] && is_multicast(&mapped) {
        mapped
    } else {
        *mgid
    }
}

#[ext(Mcast)]
pub(super) impl Nic {
    /// QPs that may be in one group; 0 where the RNIC has no groups.
    fn max_mcast_qps(&self) -> u32 {
        MAX_MCAST_QPS.min(self.backing.host.limits().max_mcast_qps)
    }

    fn max_mcast_groups(&self) -> u32 {
        MAX_MCAST_GROUPS.min(self.backing.host.limits().max_mcast_groups)
    }

    fn has_multicast(&self) -> bool {
        self.max_mcast_qps() > 0 && self.max_mcast_groups() > 0
    }

    /// The group on the wire, if the network's NICs may use it.
    fn group(&self, mgid: &Gid) -> Result<Gid, Status> {
        let wire = on_the_wire(mgid);
        let place = &self.backing.place;
        let allowed = self.has_multicast() && place.directory.names_group(self.settings.vni, &wire);
        if allowed { Ok(wire) } else { Err(Status::UNREACH) }
    }

    fn member(&self, ctx: u32, qpn: u32) -> Result<HostQp, Status> {
        if !self.has_multicast() {
            return Err(Status::NOTSUPP);
        }
        self.owned_qp(ctx, qpn)?;
        let qp = self.qps.get(&qpn).filter(|qp| qp.kind == Kind::Ud);
        qp.map(|qp| qp.own.host).ok_or(Status::INVAL)
    }

    /// Attaches a QP to a group. Attaching twice is once.
    fn attach(&mut self, ctx: u32, qpn: u32, mgid: Gid) -> Result<Reply, Status> {
        let host = self.member(ctx, qpn)?;
        if !is_multicast(&mgid) {
            return Err(Status::INVAL);
        }
        let wire = self.group(&mgid)?;
        let present = self.backing.groups.get(&wire).map_or(&[][..], |members| &members[..]);
        if present.contains(&qpn) {
            return Ok(Reply::Done);
        }
        let full = present.len() >= self.max_mcast_qps() as usize
            || (present.is_empty()
                && self.backing.groups.len() >= self.max_mcast_groups() as usize);
        if full {
            return Err(Status::NOMEM);
        }
        let own = self.host_address_like(&wire).ok_or(Status::UNREACH)?;
        self.backing.host.attach_mcast(host, &wire, &own).map_err(|error| self.refused(error))?;
        self.backing.groups.entry(wire).or_default().push(qpn);
        Ok(Reply::Done)
    }

    fn detach(&mut self, ctx: u32, qpn: u32, mgid: Gid) -> Result<Reply, Status> {
        self.member(ctx, qpn)?;
        let wire = on_the_wire(&mgid);
        let member = self.backing.groups.get(&wire).is_some_and(|members| members.contains(&qpn));
        if !member {
            return Err(Status::INVAL);
        }
        self.leave(|group, member| *group == wire && member == qpn);
        Ok(Reply::Done)
    }

    /// Takes QPs out of groups.
    fn leave(&mut self, goes: impl Fn(&Gid, u32) -> bool) {
        let mut left = Vec::new();
        self.backing.groups.retain(|group, members| {
            members.retain(|&member| {
                let stays = !goes(group, member);
                if !stays {
                    left.push((*group, member));
                }
                stays
            });
            !members.is_empty()
        });
        for (group, member) in left {
            if let Some(host) = self.qps.get(&member).map(|qp| qp.own.host) {
                self.forgo(|nic| nic.backing.host.detach_mcast(host, &group));
            }
        }
    }

    /// A QP goes away: hardware keeps those that are in a group (IBTA o10-2.2.3).
    fn leave_all(&mut self, qpn: u32) {
        if !self.backing.groups.is_empty() {
            self.leave(|_, member| member == qpn);
        }
    }

    /// Leaves the groups that the network may not use any more.
    fn leave_forbidden(&mut self) {
        let forbidden: Vec<Gid> = self
            .backing
            .groups
            .keys()
            .copied()
            .filter(|group| self.group(group).is_err())
            .collect();
        if !forbidden.is_empty() {
            self.leave(|group, _| forbidden.contains(group));
        }
    }

    /// The address vector that the hardware is given for one of a group.
    fn resolve_group(&self, av: &abi::Av) -> Result<abi::Av, Status> {
        let index = self.host_index(av.sgid_index.get()).ok_or(Status::UNREACH)?;
        let dgid = self.group(&av.dgid)?;
        Ok(abi::Av { dgid, sgid_index: index.into(), dmac: [0; 6], ..*av })
    }
}
