//! What is left of a session, where it outlives the supervisor: in the queue of a socket.
//!
//! A message that was sent over a socket pair stays in the queue, with its descriptors, as long as
//! the receiving end is open; and that end is in the service manager's store. So a ledger is such a
//! pair: what the network process tells of a session is written to the one end, nobody reads the
//! other, and whoever inherits it finds all of it in order. A queue has little room. When it is
//! full a new one is begun with what has come of it all, and the old one is let go; so there may be
//! two, and the last that was begun to its end counts.
//!
//! The names tell what belongs together: `stream.SESSION@NIC`, `ledger.SESSION.PAGE@NIC`.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::part::label;
use super::record::Record;
use crate::aside::close_aside;
use crate::device::Change;
use crate::network_process::{BadMessage, FILES_MAX, Packet, Wire, decode, encode};
use crate::node::NicConfig;
use crate::store::Store;

/// Of [`Entry`]; a successor may be another build.
pub(super) const VERSION: u32 = 1;

/// The version of all that a daemon hands down: what its NICs have, and whose the sessions are. A
/// build reads no other.
#[must_use]
pub fn saved_version() -> String {
    format!("{}.{VERSION}", vhost_rdma_engine::nic::saved::VERSION)
}
/// Entries after which a new page is begun: each takes room, whatever it says.
const ENTRIES_MAX: usize = 64;
/// How long an entry waits for room: there is nobody who makes some.
const WAIT: Duration = Duration::from_millis(1);
/// Whose descriptors are closed that an earlier supervisor left. No NIC has such a name.
pub(super) const LEFT: &str = "an earlier supervisor";
/// Bytes of changes in one entry, about.
const BYTES_MAX: usize = 32 << 10;

/// Whose session it is: one that goes on must find the NIC that it had.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Whose {
    pub(super) version: u32,
    pub(super) nic: String,
    /// As the process that served it is called ([`label`]).
    pub(super) network: String,
    pub(super) vni: u32,
    pub(super) mac: String,
    /// By which the network process named it.
    pub(super) session: u64,
}

impl Whose {
    pub(super) fn of(nic: &NicConfig, session: u64) -> Self {
        Self {
            version: VERSION,
            nic: nic.name.clone(),
            network: label(nic),
            vni: nic.vni,
            mac: nic.mac.to_string(),
            session,
        }
    }
}

/// One message of a ledger. Descriptors come along, those of the changes in order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Entry {
    /// The first of a page.
    Head(Whose),
    /// What was told.
    Changes(Vec<Change>),
    /// A message of the VMM was begun.
    Begun,
    /// It was answered.
    Done,
    /// Descriptors were lost: nobody can go on with the session.
    Lost,
    /// What there was when the page was begun ends here.
    Whole,
}

/// How many descriptors a change brings, at most.
pub(super) fn files_of(change: &Change) -> usize {
    match change {
        Change::Memory(pieces) => pieces.len(),
        Change::Plugged(_) | Change::Kick(_) | Change::Call(_) => 1,
        _ => 0,
    }
}

/// Writes one session down. Dropping it is the end of the session.
#[derive(Debug)]
pub(super) struct Ledger {
    store: Store,
    whose: Whose,
    stream: String,
    serial: u64,
    /// None if nothing is kept.
    page: Option<Page>,
    /// Pages that were begun, until somebody asks.
    turns: u32,
}

#[derive(Debug)]
struct Page {
    name: String,
    wire: Wire,
    entries: usize,
}

/// Later ones have greater numbers, in this process and in the next.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn send(page: &mut Page, entry: &Entry, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    page.entries += 1;
    page.wire.send(&encode(entry).map_err(io::Error::other)?, files)
}

impl Ledger {
    /// That of a session; nothing is kept yet. One that goes on has a `serial` already, and keeps
    /// it: a service manager that has its stream under one name takes it under no other.
    pub(super) fn new(store: &Store, whose: Whose, serial: Option<u64>) -> Self {
        let serial = serial.unwrap_or_else(now);
        let stream = format!("stream.{serial}@{}", whose.nic);
        Self { store: store.clone(), whose, stream, serial, page: None, turns: 0 }
    }

    /// Whether the store has the session's stream under this name.
    pub(super) fn is_of(&self, name: &str) -> bool {
        self.stream == name
    }

    /// Keeps the VMM's stream and what is known of the session.
    pub(super) fn begin(&mut self, stream: &UnixStream, record: &Record) {
        if !self.store.is_there() {
            return;
        }
        let kept = self.store.keep(&self.stream, stream.as_fd());
        let begun = kept.and_then(|()| self.turn(record));
        self.heed(begun);
    }

    /// Writes down what is told. False if it did not fit: then [`Self::settle`] must follow.
    pub(super) fn note(&mut self, entry: &Entry, files: &[BorrowedFd<'_>]) -> bool {
        let Some(page) = &mut self.page else { return true };
        if page.entries >= ENTRIES_MAX {
            return false;
        }
        match send(page, entry, files) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                // A service manager without a store (`FileDescriptorStoreMax=`) lets go of all.
                tracing::debug!(nic = self.whose.nic, "the service manager keeps nothing");
                self.page = None;
                true
            }
            sent => sent.is_ok(),
        }
    }

    /// `record` has what was told by now.
    pub(super) fn settle(&mut self, noted: bool, record: &Record) {
        if !noted {
            let turned = self.turn(record);
            self.heed(turned);
        }
    }

    /// Pages that were begun since the last time that this was asked. Each is work for the service
    /// manager, which is everybody's.
    pub(super) const fn take_turns(&mut self) -> u32 {
        std::mem::replace(&mut self.turns, 0)
    }

    fn heed(&mut self, done: io::Result<()>) {
        if let Err(error) = done {
            let nic = &self.whose.nic;
            tracing::error!(nic, %error, "the session would not survive the daemon's end");
            self.forget();
        }
    }

    /// Begins a new page with all of it.
    fn turn(&mut self, record: &Record) -> io::Result<()> {
        let (wire, end) = Wire::pair()?;
        wire.set_patience(WAIT)?;
        let name = format!("ledger.{}.{}@{}", self.serial, now(), self.whose.nic);
        let mut page = Page { name, wire, entries: 0 };
        send(&mut page, &Entry::Head(self.whose.clone()), &[])?;
        for (changes, files) in packed(record.changes()) {
            send(&mut page, &Entry::Changes(changes), &files)?;
        }
        if record.is_broken() {
            send(&mut page, &Entry::Lost, &[])?;
        }
        if record.is_busy() {
            send(&mut page, &Entry::Begun, &[])?;
        }
        send(&mut page, &Entry::Whole, &[])?;
        page.entries = 0;
        self.turns = self.turns.saturating_add(1);
        self.store.keep(&page.name, end.as_fd())?;
        if let Some(old) = self.page.replace(page) {
            self.store.forget(&old.name);
        }
        Ok(())
    }

    /// As if the process had been killed.
    #[cfg(test)]
    pub(super) fn die(mut self) {
        self.page = None;
    }

    fn forget(&mut self) {
        if let Some(page) = self.page.take() {
            self.store.forget(&page.name);
            self.store.forget(&self.stream);
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.forget();
    }
}

type Told<'a> = (Vec<Change>, Vec<BorrowedFd<'a>>);

/// As few messages as hold them.
fn packed<'a>(changes: Vec<(Change, Vec<BorrowedFd<'a>>)>) -> Vec<Told<'a>> {
    let mut packs: Vec<Told<'a>> = Vec::new();
    let mut bytes = BYTES_MAX;
    for (change, files) in changes {
        // Nothing of it is long: each piece of memory is a change of its own here.
        let size = 160;
        match packs.last_mut() {
            Some(pack) if pack.1.len() + files.len() <= FILES_MAX && bytes + size < BYTES_MAX => {
                pack.0.push(change);
                pack.1.extend(files);
                bytes += size;
            }
            _ => {
                packs.push((vec![change], files));
                bytes = size;
            }
        }
    }
    packs
}

/// Why what was inherited is no ledger.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadLedger {
    #[error("{0}")]
    Message(#[from] BadMessage),
    #[error("{0}")]
    Host(#[from] io::Error),
    #[error("its first message does not say whose it is")]
    NoHead,
    #[error("it is of version {0}, where this daemon reads {VERSION}")]
    Version(u32),
    #[error("it was not written to its end")]
    Torn,
    #[error("its descriptors do not fit")]
    Files,
}

/// Reads a page that an earlier supervisor wrote.
pub(super) fn read(wire: &Wire) -> Result<(Whose, Record), BadLedger> {
    let first = wire.receive()?.ok_or(BadLedger::NoHead)?;
    let Entry::Head(whose) = decode(&first.bytes)? else { return Err(BadLedger::NoHead) };
    if whose.version != VERSION {
        return Err(BadLedger::Version(whose.version));
    }
    let (mut record, mut whole) = (Record::default(), false);
    while let Some(packet) = wire.receive()? {
        whole |= take(&mut record, packet)?;
    }
    if whole { Ok((whose, record)) } else { Err(BadLedger::Torn) }
}

/// True at the end of what the page began with.
fn take(record: &mut Record, packet: Packet) -> Result<bool, BadLedger> {
    let Packet { bytes, files, files_lost } = packet;
    match decode(&bytes)? {
        Entry::Changes(changes) => {
            let mut files = files.into_iter();
            let last = changes.len().saturating_sub(1);
            for (n, change) in changes.into_iter().enumerate() {
                let most = files_of(&change);
                let own: Vec<_> = if n == last {
                    files.by_ref().collect()
                } else {
                    files.by_ref().take(most).collect()
                };
                if own.len() > most {
                    return Err(BadLedger::Files);
                }
                crate::network_process::check_change(&change, own.len())?;
                close_aside(LEFT, record.apply(change, own));
            }
            if files_lost {
                record.lose();
            }
        }
        Entry::Begun => record.set_busy(true),
        Entry::Done => record.set_busy(false),
        Entry::Lost => record.lose(),
        Entry::Whole => return Ok(true),
        Entry::Head(_) => return Err(BadLedger::NoHead),
    }
    Ok(false)
}
