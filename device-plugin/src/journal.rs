//! The ledger on the disk: a file of lines, each the whole new state of one ID, so that replaying
//! any number of them twice does no harm.
//!
//! ```text
//!   vhost-rdma-agent-journal 1
//!   7d0a36c1 {"id":"blue-0","slot":{…}}        CRC-32 of the rest of the line, in hexadecimal
//! ```
//!
//! A crash may leave the last line torn: it was never acknowledged, so it is cut off. A bad line
//! before the last is damage and stops the agent, since what follows may rest on it. When the file
//! has grown to several times what it says, a new one is written beside it and renamed over it. The
//! directory must be on a disk that survives what pods survive (`/var/lib`, not `/run`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::ledger::Slot;

const HEADER: &str = "vhost-rdma-agent-journal 1\n";
/// The journal's name in the state directory.
const FILE: &str = "journal";
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
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(JournalError::Locked(dir.display().to_string()));
            }
            Err(error) => return Err(fault("lock", &lock_path)(error.into())),
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
        Ok((Self { path, file, length, base: length, _lock: lock }, slots))
    }

    /// Adds the new states of some IDs with one write, and with one `fdatasync` if `durable`. If it
    /// fails, nothing was added.
    ///
    /// # Errors
    /// The disk is full or broken.
    pub fn append<'a>(
        &mut self,
        changes: impl IntoIterator<Item = (&'a str, &'a Slot)>,
        durable: bool,
    ) -> Result<(), JournalError> {
        let mut text = String::new();
        for (id, slot) in changes {
            line(&mut text, id, slot);
        }
        let written = self
            .file
            .write_all(text.as_bytes())
            .and_then(|()| if durable { self.file.sync_data() } else { Ok(()) });
        if let Err(source) = written {
            // What was written in part must not stand before what comes next.
            let taken_back = self
                .file
                .set_len(self.length)
                .and_then(|()| self.file.seek(SeekFrom::Start(self.length)));
            if let Err(error) = taken_back {
                tracing::error!(%error, "cannot take a failed write to the ledger back");
            }
            return Err(JournalError::Io {
                action: "write the ledger",
                path: self.path.display().to_string(),
                source,
            });
        }
        self.length += text.len() as u64;
        Ok(())
    }

    /// Is it time to write the file anew?
    #[must_use]
    pub const fn wants_compaction(&self) -> bool {
        self.length > COMPACT_MIN && self.length / 4 > self.base
    }

    /// Writes the file anew with what holds now.
    ///
    /// # Errors
    /// The disk is full or broken; the old file stays.
    pub fn compact<'a>(
        &mut self,
        slots: impl Iterator<Item = (&'a String, &'a Slot)>,
    ) -> Result<(), JournalError> {
        let mut text = HEADER.to_owned();
        for (id, slot) in slots {
            line(&mut text, id, slot);
        }
        let new = self.path.with_extension("new");
        let written = (|| {
            let mut file =
                File::options().read(true).write(true).create(true).truncate(true).open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, &self.path)?;
            sync_dir(self.path.parent().unwrap_or(Path::new("/")))?;
            Ok(file)
        })();
        self.file = written.map_err(|source| JournalError::Io {
            action: "write the ledger anew as",
            path: new.display().to_string(),
            source,
        })?;
        self.length = text.len() as u64;
        self.base = self.length;
        Ok(())
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn line(text: &mut String, id: &str, slot: &Slot) {
    use std::fmt::Write as _;
    // Neither can fail: every key is a string, and a String takes anything.
    let json = serde_json::to_string(&LineOut { id, slot }).unwrap_or_default();
    let _ = writeln!(text, "{:08x} {json}", crc32fast::hash(json.as_bytes()));
}

/// What the bytes say, and how many of them are good.
fn replay(bytes: &[u8], path: &Path) -> Result<(BTreeMap<String, Slot>, usize), JournalError> {
    let damaged = |line, why| JournalError::Damaged { path: path.display().to_string(), line, why };
    let mut slots = BTreeMap::new();
    let Some(body) = bytes.strip_prefix(HEADER.as_bytes()) else {
        // A crash while the very first line was written.
        if HEADER.as_bytes().starts_with(bytes) {
            return Ok((slots, 0));
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
    serde_json::from_slice(json).map_err(|_| "a newer agent wrote it")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{FILE, HEADER, Journal, JournalError};
    use crate::ledger::Slot;

    fn slot(n: usize) -> Slot {
        Slot { pool: format!("p{n}"), cordoned: n % 5 != 4, ..Slot::default() }
    }

    fn write(dir: &std::path::Path, ids: &[usize]) -> BTreeMap<String, Slot> {
        let (mut journal, mut slots) = Journal::open(dir).unwrap();
        for n in ids {
            let (id, slot) = (format!("id-{}", n % 7), slot(*n));
            journal.append([(id.as_str(), &slot)], true).unwrap();
            if slot.is_blank() {
                slots.remove(&id)
            } else {
                slots.insert(id, slot)
            };
        }
        slots
    }

    #[test]
    fn what_was_written_is_read_and_two_agents_exclude_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let slots = write(dir.path(), &[1, 2, 3, 4, 9]);
        let (_journal, read) = Journal::open(dir.path()).unwrap();
        assert_eq!(read, slots);
        assert!(matches!(Journal::open(dir.path()), Err(JournalError::Locked(_))));
    }

    #[test]
    fn damage_in_the_middle_stops_and_names_its_line() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[1, 2, 3]);
        let path = dir.path().join(FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[HEADER.len() + 20] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = Journal::open(dir.path()).unwrap_err();
        assert!(matches!(error, JournalError::Damaged { line: 2, .. }), "{error}");
        std::fs::write(&path, "something else\n").unwrap();
        assert!(matches!(Journal::open(dir.path()), Err(JournalError::Damaged { line: 1, .. })));
    }

    #[test]
    fn compaction_loses_nothing_and_the_file_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut slots = BTreeMap::new();
        {
            let (mut journal, _) = Journal::open(dir.path()).unwrap();
            let mut compacted = 0;
            for n in 0..8000 {
                let (id, slot) = (format!("id-{}", n % 7), slot(1));
                journal.append([(id.as_str(), &slot)], false).unwrap();
                slots.insert(id, slot);
                if journal.wants_compaction() {
                    journal.compact(slots.iter()).unwrap();
                    compacted += 1;
                }
            }
            assert!(compacted > 0);
            journal.append([("last", &slot(2))], true).unwrap();
            slots.insert("last".to_owned(), slot(2));
        }
        assert_eq!(Journal::open(dir.path()).unwrap().1, slots);
    }

    proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]

        /// A crash at any byte leaves what was acknowledged before, never more and never an error.
        #[test]
        fn any_cut_leaves_a_prefix(cut in any::<proptest::sample::Index>()) {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), &[1, 2, 3, 4, 9, 11]);
            let path = dir.path().join(FILE);
            let bytes = std::fs::read(&path).unwrap();
            let cut = cut.index(bytes.len() + 1);
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let whole = bytes[..cut].iter().filter(|byte| **byte == b'\n').count();
            let (mut journal, slots) = Journal::open(dir.path()).unwrap();
            let other = tempfile::tempdir().unwrap();
            let expected = write(other.path(), &[1, 2, 3, 4, 9, 11][..whole.saturating_sub(1)]);
            prop_assert_eq!(&slots, &expected);
            // And it can be written on.
            journal.append([("x", &slot(1))], true).unwrap();
            drop(journal);
            prop_assert!(Journal::open(dir.path()).unwrap().1.contains_key("x"));
        }

        #[test]
        fn no_bytes_make_it_panic(junk in proptest::collection::vec(any::<u8>(), 0..200)) {
            let dir = tempfile::tempdir().unwrap();
            let mut bytes = HEADER.as_bytes().to_vec();
            bytes.extend(junk);
            std::fs::write(dir.path().join(FILE), bytes).unwrap();
            let _ = Journal::open(dir.path());
        }
    }
}
