//! Creation of QPs: their numbers are the shard's.

use virtio_rdma_abi as abi;

use super::engine::Execution;
use super::nics::Nics;
use super::qp::Inbound;
use crate::link::NicId;
use crate::nic::qp::Kind;
use crate::nic::verb::NewQp;
use crate::nic::{Reply, Status};

impl<N: Nics> Execution<'_, N> {
    pub(super) fn create_qp(&mut self, id: NicId, ctx: u32, new: NewQp) -> Result<Reply, Status> {
        let kept = self.nic_mut(id).ok_or(Status::FATAL)?.room_for_qp(&new.req)?;
        let qpn = if new.kind == Kind::Gsi {
            abi::GSI_QPN
        } else {
            self.engine.qpns.take(self.engine.random.as_mut()).ok_or(Status::NOMEM)?
        };
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        match nic.insert_qp((ctx, qpn), new, (kept, Inbound::default())) {
            Ok(made) => Ok(Reply::Qp(made)),
            Err(_) => {
                if qpn != abi::GSI_QPN {
                    self.engine.qpns.free(qpn);
                }
                Err(Status::NOMEM)
            }
        }
    }
}
