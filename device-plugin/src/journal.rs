//! The ledger on the disk: a file of lines, each the whole new state of one ID, so that replaying
//! any number of them twice does no harm.
//!
//! ```text
//!   vhost-rdma-agent-journal 1
//!   7d0a36c1 {"id":"blue-0","slot":{…}}        CRC-32 of the rest of the line, in hexadecimal
//! ```
//!
//! A crash may leave the last line torn: it was never acknowledged, so it is cut off. A bad line
//! before the last is damage and stops the agent, since what follows may rest on it; so does a
//! whole line that only a newer agent understands. When the file has grown to several times what it
//! says, a new one is written beside it and renamed over it. The directory must be on a disk that
//! survives what pods survive (`/var/lib`, not `/run`).
//!
//! What fails half-way is taken back before anything else is written, and what cannot be read again
//! is not written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::ledger::Slot;

const HEADER: &str = "vhost-rdma-agent-journal 1\n";
/// What one of any version begins with.
const ANY_HEADER: &str = "vhost-rdma-agent-journal ";
/// The journal's name in the state directory.
const FILE: &str = "journal";
/// An agent that is ending, or a program that it is just starting, may have the lock for a moment.
const ENDING: Duration = Duration::from_secs(1);
/// Between two looks at the lock.
const LOOK: Duration = Duration::from_millis(20);
/// A file smaller than this is never written anew.
const COMPACT_MIN: u64 = 256 << 10;
/// A line is at most this long; a slot has some 4 KiB.
const LINE_MAX: usize = 1 << 20;

/// Why the ledger cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file system said no.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Another agent has it.
    #[error("another vhost-rdma-agent uses {0}; stop it, or give this one its own --state-dir")]
    Locked(String),
    /// It would be written and not be read again.
    #[error("what the ledger is to say of {id} is {bytes} bytes long, and may be {LINE_MAX}")]
    TooLong {
        /// Of what.
        id: String,
        /// How long the line would be.
        bytes: usize,
    },
    /// It is not what it should be.
    #[error(
        "the ledger {path} is damaged at line {line} ({why}); put a good copy there, or, when no \
         pod of this node has a NIC, move it away"
    )]
    Damaged {
        /// The file.
        path: String,
        /// Which line.
        line: usize,
        /// What is wrong.
        why: &'static str,
    },
}

#[derive(Serialize)]
struct LineOut<'a> {
    id: &'a str,
    slot: &'a Slot,
}

#[derive(Deserialize)]
struct LineIn {
    id: String,
    slot: Slot,
}

/// The open journal; nobody else can open it.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    length: u64,
    /// Its length when it was last written anew.
    base: u64,
    /// After `length` there may be a part of what failed to be written.
    torn: bool,
    /// What was written since the last sync may be lost (fsync(2): after an error pages count as
    /// written).
    doubtful: bool,
    /// The directory may, after a crash, still have the file before this one.
    unsettled: bool,
    sync_dir: fn(&Path) -> io::Result<()>,
    _lock: File,
}

impl Journal {
    /// Opens the journal in `dir`, or begins one, and reads what it says.
    ///
    /// # Errors
    /// See [`JournalError`].
    pub fn open(dir: &Path) -> Result<(Self, BTreeMap<String, Slot>), JournalError> {
        let fault = |action, path: &Path| {
            let path = path.display().to_string();
            move |source| JournalError::Io { action, path, source }
        };
        std::fs::create_dir_all(dir).map_err(fault("create the state directory", dir))?;
        let lock_path = dir.join("lock");
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(fault("open", &lock_path))?;
        let until = Instant::now() + ENDING;
        while let Err(error) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            match error {
                rustix::io::Errno::WOULDBLOCK if Instant::now() < until => sleep(LOOK),
                rustix::io::Errno::WOULDBLOCK => {
                    return Err(JournalError::Locked(dir.display().to_string()));
                }
                error => return Err(fault("lock", &lock_path)(error.into())),
            }
        }
        let path = dir.join(FILE);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(fault("open the ledger", &path))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(fault("read the ledger", &path))?;
        let (slots, good) = replay(&bytes, &path)?;
        let length = if good == 0 {
            file.set_len(0).map_err(fault("write the ledger", &path))?;
            file.rewind().map_err(fault("write the ledger", &path))?;
            file.write_all(HEADER.as_bytes()).map_err(fault("write the ledger", &path))?;
            file.sync_all().map_err(fault("write the ledger", &path))?;
            sync_dir(dir).map_err(fault("write the directory", dir))?;
            HEADER.len() as u64
        } else {
            if good < bytes.len() {
                tracing::warn!(
                    path = %path.display(),
                    bytes = bytes.len() - good,
                    "the ledger's last line is torn; it was never acknowledged and is cut off"
                );
                file.set_len(good as u64).map_err(fault("cut the ledger", &path))?;
            }
            file.seek(SeekFrom::End(0)).map_err(fault("read the ledger", &path))?;
            good as u64
        };
        let journal = Self {
            path,
            file,
            length,
            base: length,
            torn: false,
            doubtful: false,
            unsettled: false,
            sync_dir,
            _lock: lock,
        };
        Ok((journal, slots))
    }

    fn fault(&self, action: &'static str) -> impl FnOnce(io::Error) -> JournalError {
        let path = self.path.display().to_string();
        move |source| JournalError::Io { action, path, source }
    }

    /// Adds the new states of some IDs with one write, and with one `fdatasync` if `durable`. If it
    /// fails, nothing was added.
    ///
    /// # Errors
    /// The disk is full or broken, or a line would be too long.
    pub fn append<'a>(
        &mut self,
        changes: impl IntoIterator<Item = (&'a str, &'a Slot)>,
        durable: bool,
    ) -> Result<(), JournalError> {
        let mut text = String::new();
        for (id, slot) in changes {
            line(&mut text, id, slot)?;
        }
        self.take_back().map_err(self.fault("take a failed write back from the ledger"))?;
        if durable {
            self.settle()?;
        }
        self.torn = true;
        let mut written = self.file.write_all(text.as_bytes());
        if written.is_ok() && durable {
            written = self.file.sync_data();
            self.doubtful |= written.is_err();
        }
        if let Err(source) = written {
            // What was written in part must not stand before what comes next.
            if let Err(error) = self.take_back() {
                tracing::error!(%error, "cannot take a failed write to the ledger back");
            }
            return Err(self.fault("write the ledger")(source));
        }
        self.torn = false;
        self.length += text.len() as u64;
        Ok(())
    }

    /// Cuts off what is left of a write that failed.
    fn take_back(&mut self) -> io::Result<()> {
        if self.torn {
            self.file.set_len(self.length)?;
            self.file.seek(SeekFrom::Start(self.length))?;
            self.torn = false;
        }
        Ok(())
    }

    /// After a crash the directory has this file.
    fn settle(&mut self) -> Result<(), JournalError> {
        if self.unsettled {
            let dir = self.path.parent().unwrap_or(Path::new("/"));
            (self.sync_dir)(dir).map_err(self.fault("write the directory of"))?;
            self.unsettled = false;
        }
        Ok(())
    }

    /// Is it time to write the file anew?
    #[must_use]
    pub const fn wants_compaction(&self) -> bool {
        self.doubtful || self.length > COMPACT_MIN && self.length / 4 > self.base
    }

    /// Writes the file anew with what holds now.
    ///
    /// # Errors
    /// The disk is full or broken; the old file stays, or it cannot be said which of the two a
    /// crash leaves. Nothing durable is added until that can be said.
    pub fn compact<'a>(
        &mut self,
        slots: impl Iterator<Item = (&'a String, &'a Slot)>,
    ) -> Result<(), JournalError> {
        let mut text = HEADER.to_owned();
        for (id, slot) in slots {
            line(&mut text, id, slot)?;
        }
        let new = self.path.with_extension("new");
        let written = (|| {
            let mut file =
                File::options().read(true).write(true).create(true).truncate(true).open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, &self.path)?;
            Ok(file)
        })();
        let written = written.inspect_err(|_| {
            // The ledger may need the room.
            let _ = std::fs::remove_file(&new);
        });
        // From here on the old one has no name any more.
        self.file = written.map_err(self.fault("write anew the ledger"))?;
        self.length = text.len() as u64;
        self.base = self.length;
        self.torn = false;
        self.doubtful = false;
        self.unsettled = true;
        self.settle()
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Whether something may be added to this slot: what is to be written down until it is gone again
/// still has to fit.
#[must_use]
pub fn can_grow(id: &str, slot: &Slot) -> bool {
    let mut text = String::new();
    line(&mut text, id, slot).is_ok() && text.len() <= LINE_MAX / 2
}

fn line(text: &mut String, id: &str, slot: &Slot) -> Result<(), JournalError> {
    use std::fmt::Write as _;
    // Neither can fail: every key is a string, and a String takes anything.
    let json = serde_json::to_string(&LineOut { id, slot }).unwrap_or_default();
    let begin = text.len();
    let _ = write!(text, "{:08x} {json}", crc32fast::hash(json.as_bytes()));
    let bytes = text.len() - begin;
    text.push('\n');
    if bytes > LINE_MAX {
        return Err(JournalError::TooLong { id: id.to_owned(), bytes });
    }
    Ok(())
}

/// What is wrong with a line that is whole.
const NEWER: &str = "a newer agent wrote it";

/// What the bytes say, and how many of them are good.
fn replay(bytes: &[u8], path: &Path) -> Result<(BTreeMap<String, Slot>, usize), JournalError> {
    let damaged = |line, why| JournalError::Damaged { path: path.display().to_string(), line, why };
    let mut slots = BTreeMap::new();
    let Some(body) = bytes.strip_prefix(HEADER.as_bytes()) else {
        // A crash while the very first line was written.
        if HEADER.as_bytes().starts_with(bytes) {
            return Ok((slots, 0));
        }
        if bytes.starts_with(ANY_HEADER.as_bytes()) {
            return Err(damaged(1, NEWER));
        }
        return Err(damaged(1, "it does not begin as a ledger does"));
    };
    let mut good = HEADER.len();
    let mut rest = body;
    let mut number = 1;
    while !rest.is_empty() {
        number += 1;
        let end = rest.iter().position(|byte| *byte == b'\n');
        let text = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
        let next = end.and_then(|end| rest.get(end + 1..)).unwrap_or_default();
        match parse(text) {
            Ok(line) if end.is_some() => {
                if line.slot.is_blank() {
                    slots.remove(&line.id);
                } else {
                    slots.insert(line.id, line.slot);
                }
            }
            // It was acknowledged.
            Err(NEWER) if end.is_some() => return Err(damaged(number, NEWER)),
            // A torn write may leave a whole line without its end, or blocks of zeros with newlines
            // nowhere.
            _ if next.is_empty() => return Ok((slots, good)),
            Ok(_) => return Ok((slots, good)),
            Err(why) => return Err(damaged(number, why)),
        }
        good += text.len() + 1;
        rest = next;
    }
    Ok((slots, good))
}

fn parse(text: &[u8]) -> Result<LineIn, &'static str> {
    if text.len() > LINE_MAX {
        return Err("the line is too long");
    }
    let (sum, json) = text.split_at_checked(9).ok_or("the line is too short")?;
    let sum = std::str::from_utf8(sum)
        .ok()
        .and_then(|sum| sum.strip_suffix(' '))
        .and_then(|sum| u32::from_str_radix(sum, 16).ok())
        .ok_or("the checksum cannot be read")?;
    if crc32fast::hash(json) != sum {
        return Err("the checksum does not fit");
    }
    serde_json::from_slice(json).map_err(|_| NEWER)
}

#[cfg(test)]
mod tests;
