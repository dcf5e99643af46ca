//! Whether programs that were linked against a release's libibverbs and librdmacm find all that
//! they name in ours, and which C library ours need, those that are preloaded too.
//!
//! A program names a symbol with its version (`ibv_create_qp@IBVERBS_1.1`). Versions that are
//! `PRIVATE` are for rdma-core's own parts of the same release, and no program's.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM};
use object::read::elf::{FileHeader as _, Sym as _};

use super::container::Container;
use super::release::Release;
use crate::rows::Row;

const WAIT: Duration = Duration::from_secs(30);
/// The distribution's, which ours stand for.
const LIBRARIES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
/// All that vhost-rdma/process/build.sh makes.
const OURS: [&str; 4] =
    [LIBRARIES[0], LIBRARIES[1], "libvhost_rdma_heap.so", "libvhost_rdma_files.so"];
/// The least that ours need, built on Debian 12 and on Debian 11: vhost-rdma/process/README.md says
/// it.
const GLIBC: (u32, u32) = (2, 34);
const OLD_GLIBC: (u32, u32) = (2, 27);
const COPY: &str =
    "mkdir -p /host/stock; cd /usr/lib/*-linux-gnu; cp libibverbs.so.1 librdmacm.so.1 /host/stock";

/// What a library has, and what it needs.
#[derive(Debug, Default)]
struct Symbols {
    /// Name and version of each that is defined.
    defined: BTreeSet<(String, String)>,
    /// Versions of the C library.
    glibc: BTreeSet<(u32, u32)>,
}

fn read(path: &Path) -> Result<Symbols> {
    let data = fs::read(path).with_context(|| path.display().to_string())?;
    let data = &*data;
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let symbols = sections.symbols(endian, data, SHT_DYNSYM)?;
    let versions = sections.versions(endian, data)?.context("its symbols have no versions")?;
    let mut found = Symbols::default();
    for (index, symbol) in symbols.enumerate() {
        let name = symbols.symbol_name(endian, symbol)?;
        let version = versions.version(versions.version_index(endian, index))?;
        let Some(version) = version else { continue };
        let version = String::from_utf8_lossy(version.name()).into_owned();
        if symbol.is_undefined(endian) {
            found.glibc.extend(glibc(&version));
        } else if !version.contains("PRIVATE") {
            found.defined.insert((String::from_utf8_lossy(name).into_owned(), version));
        }
    }
    Ok(found)
}

/// The newest C library that a program or library names.
pub(crate) fn newest_glibc(path: &Path) -> Result<Option<(u32, u32)>> {
    Ok(read(path)?.glibc.last().copied())
}

/// The version of the C library that a version of a symbol names.
fn glibc(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.strip_prefix("GLIBC_")?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Its row.
pub(super) fn run(container: &Container) -> Row {
    let begin = Instant::now();
    let name = format!("{}: symbols of the libraries", container.release.name());
    let done = compare(container);
    match &done {
        Ok(count) => eprintln!("    {name}: ok, {count} of them"),
        Err(error) => eprintln!("    {name}: {error:#}"),
    }
    Row::timed(name, done.is_ok(), begin.elapsed().as_secs_f64())
}

fn compare(container: &Container) -> Result<usize> {
    container.run(1, COPY, WAIT)?;
    let mut count = 0;
    for library in LIBRARIES {
        let stock = read(&container.share().join("stock").join(library))?;
        let ours = read(&container.libraries().join(library))?;
        ensure!(!stock.defined.is_empty(), "the release's {library} defines nothing");
        count += stock.defined.len();
        let missing: Vec<_> = stock.defined.difference(&ours.defined).collect();
        ensure!(missing.is_empty(), "our {library} lacks {missing:?}");
    }
    let most = if container.release == Release::Old { OLD_GLIBC } else { GLIBC };
    c_library(container.libraries(), most)?;
    Ok(count)
}

/// Whether the libraries of a folder are ours, all of them, and need no newer C library than is
/// said.
fn c_library(libraries: &Path, most: (u32, u32)) -> Result<()> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(libraries)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        // libibverbs.so.1 is a link to libibverbs.so.1.14.56.1.
        let known = OURS.iter().any(|ours| name == *ours || name.starts_with(&format!("{ours}.")));
        ensure!(known, "{name} is no library that we know of");
        names.insert(name);
    }
    for library in OURS {
        ensure!(names.contains(library), "there is no {library}");
        let least = read(&libraries.join(library))?.glibc.last().copied();
        let least = least.with_context(|| format!("{library} needs no C library"))?;
        ensure!(least <= most, "our {library} needs glibc {least:?}, not {most:?} as we say");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::rundir::RunDir;

    #[test]
    fn versions_of_the_c_library_are_numbers() {
        assert_eq!(glibc("GLIBC_2.34"), Some((2, 34)));
        assert_eq!(glibc("GLIBC_2.2.5"), Some((2, 2)));
        assert_eq!(glibc("GLIBC_PRIVATE"), None);
        assert_eq!(glibc("IBVERBS_1.1"), None);
        assert!(GLIBC > (2, 4), "numbers are compared, not text");
    }

    /// A library that a compiler has made of this.
    fn make(dir: &Path, name: &str, source: &str) {
        let text = dir.join("source.c");
        fs::write(&text, source).unwrap();
        let mut cc = std::process::Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]).arg(dir.join(name)).arg(&text);
        assert!(cc.status().unwrap().success());
        fs::remove_file(text).unwrap();
    }

    #[test]
    fn each_library_counts_and_none_is_unknown() {
        let run = RunDir::new().unwrap();
        let dir = run.path().join("lib");
        fs::create_dir(&dir).unwrap();
        let why = || format!("{:#}", c_library(&dir, GLIBC).unwrap_err());
        assert!(why().contains("no libibverbs.so.1"), "{}", why());
        // fstat() came with glibc 2.33 (its NEWS), printf() with the first.
        let old = "#include <stdio.h>\nint f(void) { return printf(\"%d\", getchar()); }";
        let newer = "#include <sys/stat.h>\nint f(void) { struct stat s; return fstat(0, &s); }";
        let newest = "#define _GNU_SOURCE\n#include <sys/epoll.h>\n\
                      int f(void) { return epoll_pwait2(0, 0, 0, 0, 0); }";
        for name in OURS {
            make(&dir, name, old);
        }
        c_library(&dir, GLIBC).unwrap();
        // One of those that are preloaded.
        make(&dir, OURS[3], newest);
        assert!(why().contains("needs glibc (2, 35)"), "{}", why());
        make(&dir, OURS[3], newer);
        make(&dir, "libother.so", old);
        assert!(why().contains("libother.so"), "{}", why());
    }

    #[test]
    fn the_least_c_library_is_said() {
        let text =
            fs::read_to_string(crate::exec::workspace().join("vhost-rdma/process/README.md"));
        let text = text.unwrap();
        for (major, minor) in [GLIBC, OLD_GLIBC] {
            assert!(text.contains(&format!("glibc {major}.{minor}")), "{major}.{minor}");
        }
    }
}
