//! A session of a VMM, as what outlives the process that serves it: its stream, what it has told,
//! and who waits for its end.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ledger::{Entry, Ledger, Whose};
use super::record::Record;
use crate::aside::drop_aside;
use crate::device::Change;
use crate::node::Ending;
use crate::store::Store;

/// A VMM's session.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) nic: String,
    pub(super) stream: UnixStream,
    pub(super) record: Record,
    pub(super) ledger: Ledger,
    pub(super) ended: Sender<Ending>,
}

impl Held {
    /// A message of the VMM was begun, or answered.
    pub(super) fn set_busy(&mut self, busy: bool) {
        self.record.set_busy(busy);
        let noted = self.ledger.note(if busy { &Entry::Begun } else { &Entry::Done }, &[]);
        self.ledger.settle(noted, &self.record);
    }

    /// Something has changed; descriptors may have been lost on the way. Those that it takes the
    /// place of are for the caller to close, once nobody waits for it.
    #[must_use]
    pub(super) fn take(&mut self, change: Change, files: Vec<OwnedFd>, lost: bool) -> Vec<OwnedFd> {
        let entry = Entry::Changes(vec![change.clone()]);
        let own: Vec<BorrowedFd<'_>> = files.iter().map(OwnedFd::as_fd).collect();
        let noted = !lost && self.ledger.note(&entry, &own);
        drop(own);
        let gone = self.record.apply(change, files);
        if lost {
            self.record.lose();
        }
        self.ledger.settle(noted, &self.record);
        gone
    }

    /// Has the session be in `store` alone, for the next daemon.
    pub(super) fn hand_down(&mut self, store: &Store, whose: Whose) {
        let mut ledger = Ledger::new(store, whose, None);
        ledger.begin(&self.stream, &self.record);
        // The old one's descriptors are let go of; those that are handed down live on.
        self.ledger = ledger;
    }

    pub(super) fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
    }

    /// Tells whoever waits for the end. What the store has of it is let go of here; what the VMM
    /// has sent is closed elsewhere.
    pub(super) fn end(self, ending: Ending) {
        let Self { nic, stream, record, ended, .. } = self;
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let _ = ended.send(ending);
        drop_aside(&nic, (stream, record));
    }
}
