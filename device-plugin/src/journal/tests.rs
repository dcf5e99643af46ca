//! What is written is read again, whatever failed meanwhile.

use std::collections::BTreeMap;

use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{FILE, HEADER, Journal, JournalError, LINE_MAX, line, replay, sync_dir};
use crate::ledger::Slot;

fn slot(n: usize) -> Slot {
    Slot { pool: format!("p{n}"), cordoned: n % 5 != 4, ..Slot::default() }
}

fn write(dir: &Path, ids: &[usize]) -> BTreeMap<String, Slot> {
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

#[test]
fn what_could_not_be_read_again_is_refused_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    journal.append([("first", &slot(1))], true).unwrap();
    let long = Slot { pool: "x".repeat(LINE_MAX), ..slot(1) };
    let refused = journal.append([("second", &slot(1)), ("long", &long)], true).unwrap_err();
    assert!(matches!(refused, JournalError::TooLong { .. }), "{refused}");
    assert!(refused.to_string().contains("of long is"), "{refused}");
    let all = BTreeMap::from([("first".to_owned(), slot(1)), ("long".to_owned(), long)]);
    assert!(matches!(journal.compact(all.iter()), Err(JournalError::TooLong { .. })));
    // The longest that there may be.
    let mut text = String::new();
    line(&mut text, "longest", &Slot { pool: String::new(), ..slot(1) }).unwrap();
    let room = LINE_MAX - (text.len() - 1);
    let longest = Slot { pool: "x".repeat(room), ..slot(1) };
    journal.append([("longest", &longest)], true).unwrap();
    let more = Slot { pool: "x".repeat(room + 1), ..slot(1) };
    assert!(journal.append([("longest", &more)], true).is_err());
    drop(journal);
    let (_, read) = Journal::open(dir.path()).unwrap();
    let names: Vec<&str> = read.keys().map(String::as_str).collect();
    assert_eq!(names, ["first", "longest"]);
    assert_eq!(read["longest"], longest);
}

fn no_disk(_: &Path) -> io::Result<()> {
    Err(rustix::io::Errno::IO.into())
}

#[test]
fn a_file_that_was_put_in_place_is_written_on_also_if_its_directory_cannot_be_synced() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    let mut slots = BTreeMap::from([("first".to_owned(), slot(1))]);
    journal.append([("first", &slot(1))], true).unwrap();
    journal.sync_dir = no_disk;
    journal.compact(slots.iter()).unwrap_err();
    journal.append([("brief", &slot(1))], false).unwrap();
    // Nobody is told that a crash does not undo it.
    journal.append([("refused", &slot(1))], true).unwrap_err();
    journal.sync_dir = sync_dir;
    journal.append([("last", &slot(1))], true).unwrap();
    drop(journal);
    slots.extend(["brief", "last"].map(|id| (id.to_owned(), slot(1))));
    assert_eq!(Journal::open(dir.path()).unwrap().1, slots);
}

#[test]
fn what_failed_and_cannot_be_taken_back_is_not_written_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    // A disk that is full after two pages, and does not let go of what it has.
    let mut disk = File::from(memfd_create("disk", MemfdFlags::ALLOW_SEALING).unwrap());
    disk.write_all(HEADER.as_bytes()).unwrap();
    disk.set_len(8192).unwrap();
    disk.seek(SeekFrom::Start(journal.length)).unwrap();
    fcntl_add_seals(&disk, SealFlags::GROW | SealFlags::SHRINK).unwrap();
    journal.file = disk.try_clone().unwrap();
    journal.append([("first", &slot(1))], true).unwrap();
    let long = Slot { pool: "x".repeat(8192), ..slot(1) };
    journal.append([("long", &long)], true).unwrap_err();
    journal.append([("second", &slot(1))], true).unwrap_err();
    let good = usize::try_from(journal.length).unwrap();
    let mut bytes = Vec::new();
    disk.rewind().unwrap();
    disk.read_to_end(&mut bytes).unwrap();
    assert!(bytes[good..].contains(&b'x'), "a part of it was written");
    // What a crash leaves is the last line, torn.
    let (slots, read) = replay(&bytes, Path::new("disk")).unwrap();
    let names: Vec<&str> = slots.keys().map(String::as_str).collect();
    assert_eq!((names, read), (vec!["first"], good));
    // It works again.
    let mut disk = File::from(memfd_create("disk", MemfdFlags::CLOEXEC).unwrap());
    disk.write_all(&bytes).unwrap();
    journal.file = disk.try_clone().unwrap();
    journal.append([("second", &slot(1))], true).unwrap();
    bytes.clear();
    disk.rewind().unwrap();
    disk.read_to_end(&mut bytes).unwrap();
    assert_eq!(replay(&bytes, Path::new("disk")).unwrap().0.len(), 2);
}

#[test]
fn what_was_not_put_in_place_takes_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    let path = dir.path().join(FILE);
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    journal.compact(BTreeMap::from([("a".to_owned(), slot(1))]).iter()).unwrap_err();
    assert!(!path.with_extension("new").exists());
}

#[test]
fn what_a_newer_agent_wrote_last_was_acknowledged_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[1]);
    let path = dir.path().join(FILE);
    let json = r#"{"id":"a","slot":{"pool":7}}"#;
    let newer = format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()));
    File::options().append(true).open(&path).unwrap().write_all(newer.as_bytes()).unwrap();
    let before = std::fs::read(&path).unwrap();
    let error = Journal::open(dir.path()).unwrap_err();
    assert!(matches!(error, JournalError::Damaged { line: 3, .. }), "{error}");
    assert!(error.to_string().contains("a newer agent wrote it"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let newer = String::from_utf8(before).unwrap().replace("journal 1", "journal 12");
    std::fs::write(&path, newer).unwrap();
    let error = Journal::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("a newer agent wrote it"), "{error}");
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
