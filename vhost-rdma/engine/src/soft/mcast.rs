//! Multicast groups of UD queue pairs (IBTA 10.5.2; RoCE v2 maps IP groups to GIDs).
//!
//! A datagram to a group goes to every attached QP of the network, those of the sender's own NIC
//! included: IBTA loops multicast back.

use super::engine::Execution;
use super::nic::{Soft, SoftNic};
use super::nics::Nics;
use crate::link::{Gid, NicId, is_multicast};
use crate::nic::limits::{MAX_MCAST_GROUPS, MAX_MCAST_QPS};
use crate::nic::qp::Kind;
use crate::nic::{Reply, Status};

impl SoftNic {
    /// Attaches a QP to a group; true if the NIC joins the group by it. Attaching twice is once.
    pub(super) fn attach(&mut self, ctx: u32, qpn: u32, mgid: Gid) -> Result<bool, Status> {
        self.owned_qp(ctx, qpn)?;
        let is_ud = self.qps.get(&qpn).is_some_and(|qp| qp.kind == Kind::Ud);
        if !is_ud || !is_multicast(&mgid) {
            return Err(Status::INVAL);
        }
        let joins = !self.backing.groups.contains_key(&mgid);
        if joins && self.backing.groups.len() >= MAX_MCAST_GROUPS as usize {
            return Err(Status::NOMEM);
        }
        let members = self.backing.groups.entry(mgid).or_default();
        if !members.contains(&qpn) {
            if members.len() >= MAX_MCAST_QPS as usize {
                return Err(Status::NOMEM);
            }
            members.push(qpn);
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.own.groups += 1;
            }
        }
        Ok(joins)
    }

    /// Detaches a QP; true if the NIC leaves the group by it.
    pub(super) fn detach(&mut self, ctx: u32, qpn: u32, mgid: Gid) -> Result<bool, Status> {
        self.owned_qp(ctx, qpn)?;
        let members = self.backing.groups.get_mut(&mgid).ok_or(Status::INVAL)?;
        let at = members.iter().position(|&member| member == qpn).ok_or(Status::INVAL)?;
        members.swap_remove(at);
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.own.groups = qp.own.groups.saturating_sub(1);
        }
        let leaves = members.is_empty();
        if leaves {
            self.backing.groups.remove(&mgid);
        }
        Ok(leaves)
    }

    /// Takes QPs that go away out of all groups. Those that it leaves empty wait in `left` for the
    /// shard to leave them too.
    pub(super) fn leave_all(&mut self, goes: impl Fn(u32) -> bool) {
        let Soft { groups, left, .. } = &mut self.backing;
        groups.retain(|mgid, members| {
            members.retain(|&member| !goes(member));
            if members.is_empty() {
                left.push(*mgid);
            }
            !members.is_empty()
        });
    }
}

impl<N: Nics> Execution<'_, N> {
    pub(super) fn attach_mcast(
        &mut self,
        id: NicId,
        ctx: u32,
        member: (u32, Gid),
    ) -> Result<Reply, Status> {
        let (nic, networks, _) = self.parts(id).ok_or(Status::FATAL)?;
        if nic.attach(ctx, member.0, member.1)? {
            networks.join(nic.settings.vni, member.1, id);
        }
        Ok(Reply::Done)
    }

    pub(super) fn detach_mcast(
        &mut self,
        id: NicId,
        ctx: u32,
        member: (u32, Gid),
    ) -> Result<Reply, Status> {
        let (nic, networks, _) = self.parts(id).ok_or(Status::FATAL)?;
        if nic.detach(ctx, member.0, member.1)? {
            networks.leave(nic.settings.vni, member.1, id);
        }
        Ok(Reply::Done)
    }
}
