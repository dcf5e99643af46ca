//! Work requests that concern this NIC's own keys: invalidate, bind a window, register fast.
//!
//! They execute in their turn of the send queue, after everything before them and before everything
//! behind, which is stronger than IBTA 10.8.3.3 asks.

use virtio_rdma_abi::{SqWqe, opcode, wc_opcode, wc_status};

use super::fastreg::FastRegister;
use super::mr::Denied;
use super::nic::{KERNEL, SoftNic};
use super::window::Bind;
use crate::memory::PageArray;
use crate::nic::qp::Kind;

/// A work request of this file's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LocalOperation {
    Invalidate,
    BindWindow,
    FastRegister,
}

/// What an opcode does here, if QPs of this kind may do it (docs/virtio-rdma.md §7.1).
pub(super) const fn local_operation(kind: Kind, code: u8) -> Option<LocalOperation> {
    match (code, kind) {
        (opcode::LOCAL_INV, _) => Some(LocalOperation::Invalidate),
        (opcode::BIND_MW, Kind::Rc | Kind::Uc) => Some(LocalOperation::BindWindow),
        (opcode::REG_MR, _) => Some(LocalOperation::FastRegister),
        _ => None,
    }
}

/// The QP that a local work request was posted on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Poster {
    pub(super) qpn: u32,
    pub(super) pdn: u32,
}

impl SoftNic {
    /// Executes a local work request; its completion opcode, or the status that it fails with.
    pub(super) fn local_request(
        &mut self,
        poster: Poster,
        wqe: &SqWqe,
        operation: LocalOperation,
    ) -> Result<u8, u8> {
        let Poster { qpn, pdn } = poster;
        let failed = |_: Denied| wc_status::LOC_QP_OP_ERR;
        match operation {
            LocalOperation::Invalidate => {
                self.backing.mrs.invalidate(wqe.imm.get(), pdn, qpn).map_err(failed)?;
                Ok(wc_opcode::LOCAL_INV)
            }
            LocalOperation::BindWindow => {
                let bind = Bind {
                    pdn,
                    qpn,
                    present: wqe.imm.get(),
                    new: wqe.rkey.get(),
                    region: low_half(wqe.arg1.get()),
                    addr: wqe.remote_addr.get(),
                    len: wqe.arg0.get(),
                    access: wqe.aux.get(),
                };
                self.backing.mrs.bind(&bind).map_err(|Denied| wc_status::MW_BIND_ERR)?;
                Ok(wc_opcode::BIND_MW)
            }
            LocalOperation::FastRegister => {
                // It carries guest physical addresses, which only the kernel may name.
                if self.qps.get(&qpn).is_none_or(|qp| qp.ctx != KERNEL) {
                    return Err(wc_status::LOC_QP_OP_ERR);
                }
                let array = wqe.arg1.get();
                let pages = PageArray {
                    addr: array & (u64::MAX >> 8),
                    npages: wqe.aux.get(),
                    page_shift: array.to_le_bytes()[7],
                };
                let request = FastRegister {
                    pdn,
                    key: wqe.rkey.get(),
                    access: wqe.imm.get(),
                    iova: wqe.remote_addr.get(),
                    len: wqe.arg0.get(),
                    pages,
                };
                self.backing.mrs.fast_register(&request, &self.space).map_err(failed)?;
                Ok(wc_opcode::REG_MR)
            }
        }
    }
}

fn low_half(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
