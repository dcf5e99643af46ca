//! What is left of a session when the process that served it has died.
//!
//! Kept from what that process told ([`Change`]), bounded whatever it tells, and told to the next
//! one in an order in which each part finds what it needs. Nothing here is looked into: addresses
//! and indices are the VMM's, and whoever takes the session up checks them as if they came from it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use crate::device::{Change, Piece, Place};

/// Memory regions of one guest (`device::memory`).
const PIECES_MAX: usize = 509;

#[derive(Debug, Default)]
struct Queue {
    size: Option<u32>,
    place: Option<Place>,
    base: Option<u32>,
    enabled: Option<bool>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Record {
    features: Option<u64>,
    protocol: Option<u64>,
    memory: Vec<(Piece, OwnedFd)>,
    queues: BTreeMap<u32, Queue>,
    /// A message of the VMM was begun and not answered: nobody knows how far it came.
    busy: bool,
    /// Something was told that could not be kept.
    broken: bool,
}

impl Record {
    /// A message is being taken from the stream, or was answered.
    pub(super) const fn set_busy(&mut self, busy: bool) {
        self.busy = busy;
    }

    /// Descriptors came that this process had no room for.
    pub(super) const fn lose(&mut self) {
        self.broken = true;
    }

    /// Whether another process can go on with the session.
    pub(super) const fn is_whole(&self) -> bool {
        !self.busy && !self.broken
    }

    pub(super) const fn is_busy(&self) -> bool {
        self.busy
    }

    pub(super) const fn is_broken(&self) -> bool {
        self.broken
    }

    /// Keeps a change, whose descriptors were counted; those that were there before.
    #[must_use]
    pub(super) fn apply(&mut self, change: Change, files: Vec<OwnedFd>) -> Vec<OwnedFd> {
        let mut files = files.into_iter();
        let mut gone = Vec::new();
        match change {
            Change::Features(features) => self.features = Some(features),
            Change::ProtocolFeatures(features) => self.protocol = Some(features),
            Change::Reset => {
                self.features = None;
                self.queues.values_mut().for_each(|queue| queue.enabled = None);
            }
            Change::Memory(pieces) => {
                let new = pieces.into_iter().zip(files.by_ref()).collect();
                let old = std::mem::replace(&mut self.memory, new);
                gone.extend(old.into_iter().map(|(_, file)| file));
            }
            Change::Plugged(piece) => self.memory.extend(files.next().map(|file| (piece, file))),
            Change::Unplugged(start) => {
                let out = self.memory.extract_if(.., |(piece, _)| piece.start == start);
                gone.extend(out.map(|(_, file)| file));
            }
            Change::Size(queue, size) => self.queue(queue).size = Some(size),
            Change::Place(queue, place) => self.queue(queue).place = Some(place),
            Change::Base(queue, base) => self.queue(queue).base = Some(base),
            Change::Enabled(queue, enabled) => self.queue(queue).enabled = Some(enabled),
            Change::Kick(queue) => {
                gone.extend(std::mem::replace(&mut self.queue(queue).kick, files.next()));
            }
            Change::Call(queue) => {
                gone.extend(std::mem::replace(&mut self.queue(queue).call, files.next()));
            }
            Change::Stopped(queue, base) => {
                let queue = self.queue(queue);
                queue.base = Some(base);
                gone.extend(queue.kick.take());
                gone.extend(queue.call.take());
            }
        }
        self.broken |= self.memory.len() > PIECES_MAX;
        let more = self.memory.len().min(PIECES_MAX);
        gone.extend(self.memory.drain(more..).map(|(_, file)| file));
        gone.extend(files);
        gone
    }

    /// Its number was checked (`protocol`), so there are not many.
    fn queue(&mut self, index: u32) -> &mut Queue {
        self.queues.entry(index).or_default()
    }

    /// All that there is to tell.
    pub(super) fn changes(&self) -> Vec<(Change, Vec<BorrowedFd<'_>>)> {
        let mut all = Vec::new();
        all.extend(self.features.map(|features| (Change::Features(features), Vec::new())));
        all.extend(self.protocol.map(|features| (Change::ProtocolFeatures(features), Vec::new())));
        for (piece, file) in &self.memory {
            all.push((Change::Plugged(*piece), vec![file.as_fd()]));
        }
        for (index, queue) in &self.queues {
            queue.tell(*index, &mut all);
        }
        all
    }
}

impl Queue {
    fn tell<'a>(&'a self, index: u32, all: &mut Vec<(Change, Vec<BorrowedFd<'a>>)>) {
        let mut tell = |change: Option<Change>, file: Option<&'a OwnedFd>| {
            all.extend(
                change.map(|change| (change, file.map(|f| f.as_fd()).into_iter().collect())),
            );
        };
        tell(self.size.map(|size| Change::Size(index, size)), None);
        tell(self.place.map(|place| Change::Place(index, place)), None);
        // One that runs goes on where its used ring ends, which only the guest's memory tells.
        let stands = self.base.filter(|_| self.kick.is_none());
        tell(stands.map(|base| Change::Base(index, base)), None);
        tell(self.enabled.map(|enabled| Change::Enabled(index, enabled)), None);
        tell(self.call.is_some().then_some(Change::Call(index)), self.call.as_ref());
        tell(self.kick.is_some().then_some(Change::Kick(index)), self.kick.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn file() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    fn piece(start: u64) -> Piece {
        Piece { start, len: 4096, vmm: start + 1, offset: 0 }
    }

    fn told(record: &Record) -> Vec<(Change, usize)> {
        record.changes().into_iter().map(|(change, files)| (change, files.len())).collect()
    }

    #[test]
    fn the_last_word_counts_and_the_order_is_one_that_can_be_followed() {
        let place = Place { descriptors: 1, used: 2, available: 3 };
        let mut record = Record::default();
        let _ = record.apply(Change::Kick(0), vec![file()]);
        let _ = record.apply(Change::Place(0, place), Vec::new());
        let _ = record.apply(Change::Size(0, 32), Vec::new());
        let _ = record.apply(Change::Size(0, 64), Vec::new());
        let _ = record.apply(Change::Base(0, 7), Vec::new());
        let _ = record.apply(Change::Base(1, 9), Vec::new());
        let _ = record.apply(Change::Memory(vec![piece(0), piece(8192)]), vec![file(), file()]);
        let _ = record.apply(Change::Unplugged(0), Vec::new());
        let _ = record.apply(Change::Features(5), Vec::new());
        let expected = [
            (Change::Features(5), 0),
            (Change::Plugged(piece(8192)), 1),
            (Change::Size(0, 64), 0),
            (Change::Place(0, place), 0),
            (Change::Kick(0), 1),
            (Change::Base(1, 9), 0),
        ];
        assert_eq!(told(&record), expected);
        let _ = record.apply(Change::Stopped(0, 11), Vec::new());
        assert!(told(&record).contains(&(Change::Base(0, 11), 0)));
        assert!(!told(&record).contains(&(Change::Kick(0), 1)));
    }

    #[test]
    fn a_session_in_the_middle_of_a_message_is_not_gone_on_with() {
        let mut record = Record::default();
        assert!(record.is_whole());
        record.set_busy(true);
        assert!(!record.is_whole());
        record.set_busy(false);
        assert!(record.is_whole());
        record.lose();
        assert!(!record.is_whole());
    }

    #[test]
    fn memory_without_end_is_not_kept() {
        let mut record = Record::default();
        for n in 0..2 * PIECES_MAX as u64 {
            let _ = record.apply(Change::Plugged(piece(n * 4096)), vec![file()]);
        }
        assert_eq!(record.memory.len(), PIECES_MAX);
        assert!(!record.is_whole());
    }
}
