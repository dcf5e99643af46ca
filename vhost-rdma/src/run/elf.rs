//! What a 64-bit ELF program says of itself (elf(5)): its loader, and the libraries that it names.
//! A file that is none, or not whole, says nothing.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

const LOAD: u64 = 1;
const DYNAMIC: u64 = 2;
const INTERP: u64 = 3;
/// Tags of the dynamic section.
const NEEDED: u64 = 1;
const STRTAB: u64 = 5;
/// Bytes of the header, of an entry of the table of segments, and of the dynamic section.
const HEADER: usize = 64;
const SEGMENT: usize = 56;
const TAG: usize = 16;
/// Segments, and bytes of the dynamic section, that are looked at, and of a name.
const SEGMENTS: u64 = 1024;
const SECTION: u64 = 64 << 10;
const NAME: usize = 256;

/// A little-endian number of so many bytes.
fn number(bytes: &[u8], at: u64, size: usize) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let field = bytes.get(at..at.checked_add(size)?)?;
    Some(field.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

/// The loader that a 64-bit ELF program names; `Some(None)`: it names none.
pub(super) fn loader(bytes: &[u8]) -> Option<Option<&[u8]>> {
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size) = (number(bytes, 32, 8)?, number(bytes, 54, 2)?);
    for index in 0..number(bytes, 56, 2)? {
        let at = table.checked_add(index.checked_mul(size)?)?;
        if number(bytes, at, 4)? != INTERP {
            continue;
        }
        let from = usize::try_from(number(bytes, at.checked_add(8)?, 8)?).ok()?;
        let len = usize::try_from(number(bytes, at.checked_add(32)?, 8)?).ok()?;
        return Some(bytes.get(from..from.checked_add(len)?));
    }
    Some(None)
}

/// What a file has from there on, up to so many bytes.
fn read(file: &File, at: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut got = 0;
    while got < len {
        match file.read_at(bytes.get_mut(got..)?, at.checked_add(u64::try_from(got).ok()?)?).ok()? {
            0 => break,
            more => got += more,
        }
    }
    bytes.truncate(got);
    Some(bytes)
}

/// A segment of a kind: where it is in the file, its address, and its bytes in the file.
type Segment = (u64, u64, u64);

fn segments(file: &File) -> Option<Vec<(u64, Segment)>> {
    let header = read(file, 0, HEADER)?;
    let is_ours = header.starts_with(b"\x7fELF\x02\x01");
    let size = u64::try_from(SEGMENT).ok()?;
    let (table, each) = (number(&header, 32, 8)?, number(&header, 54, 2)?);
    let count = number(&header, 56, 2)?.min(SEGMENTS);
    if !is_ours || each != size {
        return None;
    }
    let table = read(file, table, usize::try_from(count * size).ok()?)?;
    let segment = |bytes: &[u8]| {
        let place = (number(bytes, 8, 8)?, number(bytes, 16, 8)?, number(bytes, 32, 8)?);
        Some((number(bytes, 0, 4)?, place))
    };
    table.chunks_exact(SEGMENT).map(segment).collect()
}

fn names(file: &File) -> Option<Vec<String>> {
    let segments = segments(file)?;
    let (_, (at, _, len)) = segments.iter().find(|(kind, _)| *kind == DYNAMIC)?;
    let section = read(file, *at, usize::try_from((*len).min(SECTION)).ok()?)?;
    let tags: Vec<_> = section
        .chunks_exact(TAG)
        .map_while(|tag| Some((number(tag, 0, 8).filter(|tag| *tag != 0)?, number(tag, 8, 8)?)))
        .collect();
    let (_, table) = tags.iter().find(|(tag, _)| *tag == STRTAB)?;
    let in_file = |(at, address, len): &Segment| {
        let behind = table.checked_sub(*address).filter(|behind| behind < len)?;
        at.checked_add(behind)
    };
    let mut loaded = segments.iter().filter(|(kind, _)| *kind == LOAD);
    let table = loaded.find_map(|(_, segment)| in_file(segment))?;
    let name = |(_, at): &(u64, u64)| {
        let bytes = read(file, table.checked_add(*at)?, NAME)?;
        let end = bytes.iter().position(|byte| *byte == 0)?;
        String::from_utf8(bytes.get(..end)?.to_vec()).ok()
    };
    Some(tags.iter().filter(|(tag, _)| *tag == NEEDED).filter_map(name).collect())
}

/// The libraries that a program names, in order.
pub(super) fn needed(file: &File) -> Vec<String> {
    names(file).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_program_names_its_libraries() {
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let names = needed(&file);
        assert!(names.iter().any(|name| name == "libc.so.6"), "{names:?}");
        assert!(names.iter().all(|name| name.contains(".so")), "{names:?}");
    }

    /// Whatever is cut off or bent: nothing, or names.
    #[test]
    fn a_file_that_is_not_whole_is_read_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let whole = std::fs::read("/bin/sh").unwrap();
        let looked = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            needed(&File::open(&path).unwrap())
        };
        assert!(!looked(&whole).is_empty());
        for cut in [0, 4, 5, 63, 64, 100, 119, 500, 4096, whole.len() / 2] {
            let _ = looked(&whole[..cut.min(whole.len())]);
        }
        for at in 0..HEADER + 16 * SEGMENT {
            let mut bent = whole[..whole.len().min(1 << 16)].to_vec();
            bent[at] = 0xff;
            let _ = looked(&bent);
        }
        let _ = looked(&[b"\x7fELF\x02\x01".as_slice(), &[0xff; 200]].concat());
    }
}
