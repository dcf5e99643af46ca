//! Pieces of memory that a process gives and takes back, and what vanishes of them.

use std::fs::File;

use super::super::memory::{self, Kind};
use super::super::messages::{Answer, Piece, exactly};
use super::{REGION, REGIONS, Session};
use crate::device::memory::Offer;
use crate::nic::Status;

impl Session {
    pub(super) fn plug(&mut self, body: &[u8], file: Option<File>) -> Result<Answer, Status> {
        let piece: Piece = exactly(body)?;
        let file = file.ok_or(Status::INVAL)?;
        if self.space.regions().len() >= REGIONS {
            return Err(Status::NOMEM);
        }
        self.keep(REGION)?;
        let loose = memory::kind(&file)? == Kind::Loose;
        let (address, len) = (piece.address.get(), piece.length.get());
        let start = self.window.place(address, len)?;
        let offer = Offer { start, len, file, offset: piece.offset.get(), loose };
        self.space = self.house.plug(&self.space, offer)?;
        Ok(Answer::ok(&[]))
    }

    pub(super) fn unplug(&mut self, body: &[u8]) -> Result<Answer, Status> {
        let piece: Piece = exactly(body)?;
        let (address, len) = (piece.address.get(), piece.length.get());
        let start = self.window.place(address, len)?;
        // The NIC would take the loss of a doorbell page for its own.
        if self.pages.iter().any(|page| page.checked_sub(address).is_some_and(|at| at < len)) {
            return Err(Status::BUSY);
        }
        self.space = self.house.unplug(&self.space, (start, len))?;
        self.keep(0)?;
        Ok(Answer::ok(&[]))
    }

    /// Memory of some process vanished: what is this one's is as if it had taken it back.
    pub(super) fn lose_memory(&mut self) {
        let lost: Vec<_> = self.space.lost().map(|it| (it.start(), it.bytes())).collect();
        for piece in lost {
            tracing::debug!(nic = self.house.nic.name, "memory of a process has vanished");
            match self.house.unplug(&self.space, piece) {
                Ok(space) => self.space = space,
                Err(status) => tracing::error!("vanished memory stays: {}", status.0),
            }
        }
        // Fewer regions than before: this is not refused.
        let _ = self.keep(0);
    }
}
