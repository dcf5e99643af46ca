//! Commands of the device, given by a process: which it may give, and their way to the worker.
//!
//! Layouts, lengths and the order of checks are the device's own (`device::ctrl`). What is a
//! kernel's in a VM is refused: lives, addresses, keys for all of memory, fast registration.

use virtio_rdma_abi::{RespHdr, cmd, cmd_status};
use zerocopy::FromBytes as _;

use super::house::House;
use crate::device::ctrl::{Executor, Outcome};
use crate::memory::AddressSpace;
use crate::nic::{Command, Status, Step};

/// Whether a process whose context this is (0: it has none) may give a command.
pub(super) fn check(opcode: u16, ctx: u32) -> Result<(), Status> {
    match opcode {
        cmd::KEEPALIVE
        | cmd::INIT
        | cmd::SHUTDOWN
        | cmd::GID_SET
        | cmd::CONTEXT_DESTROY
        | cmd::MR_DMA
        | cmd::MR_ALLOC => Err(Status::PERM),
        cmd::CONTEXT_CREATE if ctx != 0 => Err(Status::EXIST),
        cmd::CONTEXT_CREATE | cmd::QUERY_DEVICE | cmd::QUERY_PORT | cmd::QUERY_COUNTERS => Ok(()),
        _ if ctx == 0 => Err(Status::STATE),
        _ => Ok(()),
    }
}

/// The status of a response, and its body.
pub(super) fn split(response: &[u8]) -> (u32, &[u8]) {
    match RespHdr::read_from_prefix(response) {
        Ok((header, body)) => (header.status.get(), body),
        Err(_) => (cmd_status::INVAL, &[]),
    }
}

/// Carries a process's commands out.
#[derive(Debug)]
pub(super) struct Runner<'a> {
    pub(super) house: &'a House,
    /// The process's memory: nothing else can be named.
    pub(super) space: &'a AddressSpace,
    /// The process's context: whatever a command says, it is of this one.
    pub(super) ctx: u32,
}

impl Executor for Runner<'_> {
    /// Only the session's own thread changes it.
    fn space(&self) -> (AddressSpace, u64) {
        (self.space.clone(), 0)
    }

    fn execute(&self, _generation: u64, _ctx: u32, command: Command) -> Outcome {
        let vanished = crate::memory::vanished();
        let result = self.house.execute(self.ctx, command);
        if vanished != crate::memory::vanished() {
            self.house.nic.post(|_, _, _| ());
        }
        Outcome::Done(result.map(Step::Done))
    }

    /// The house's driver is there for as long as a process is.
    fn decide(&self, _goes_on: bool) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command that comes to be is a process's only if somebody says so here.
    #[test]
    fn what_a_process_may_command_is_known() {
        let kernels = [0x01, 0x02, 0x03, 0x06, 0x11, 0x21, 0x22];
        for &(name, opcode) in cmd::TABLE {
            let opcode = u16::try_from(opcode).unwrap();
            let refused = check(opcode, 7) == Err(Status::PERM);
            assert_eq!(refused, kernels.contains(&opcode), "{name}");
        }
        assert_eq!(cmd::TABLE.len(), 35, "is the new command one of a kernel's?");
        assert_eq!(check(cmd::CONTEXT_CREATE, 7), Err(Status::EXIST));
        assert_eq!(check(cmd::PD_CREATE, 0), Err(Status::STATE));
    }
}
