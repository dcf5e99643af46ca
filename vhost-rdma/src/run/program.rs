//! Whether a program can use our libraries.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::elf::{self, loader};

/// Why a program cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// There is none of that name.
    #[error("there is no program {0}")]
    NotThere(String),
    /// It is linked without a loader.
    #[error("{0} is a static program: it loads no libibverbs, and so cannot use the device")]
    Static(String),
    /// Another C library.
    #[error("{0} is a program of musl, and our libibverbs is one of glibc")]
    Musl(String),
    /// It gets rights that we do not have.
    #[error("{0} is setuid or setgid: its loader ignores our library path")]
    Setuid(String),
    /// It gets capabilities that we do not have.
    #[error("{0} has file capabilities: its loader ignores our library path")]
    Capabilities(String),
}

/// Bytes of a program that are looked at: its headers.
const HEADERS: u64 = 64 << 10;

/// Where a file has its capabilities (capabilities(7)).
const CAPABILITIES: &str = "security.capability";

/// Whether a program gets capabilities by its file. Root has them all, and its loader takes our
/// path (capabilities(7), ld.so(8)).
fn gets_capabilities(path: &Path, is_root: bool) -> bool {
    let mut value = [0_u8; 64];
    // Whatever else is said is that of a file system without them.
    !is_root && rustix::fs::getxattr(path, CAPABILITIES, &mut value).is_ok_and(|len| len > 0)
}

fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Path::new(program).exists().then(|| PathBuf::from(program));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|path| {
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    })
}

/// Runtimes of sanitizers, which have to be the first of a program's libraries: GCC's, and Clang's
/// where they are not in the program itself.
const SANITIZERS: [&str; 5] =
    ["libasan.so.", "libhwasan.so.", "liblsan.so.", "libtsan.so.", "libclang_rt."];

/// What has to be preloaded before anything else.
pub(super) fn first_of_all(program: &OsStr) -> Option<String> {
    let needed = elf::needed(&File::open(find(program)?).ok()?);
    let is_one = |name: &String| SANITIZERS.iter().any(|one| name.starts_with(one));
    needed.into_iter().find(is_one)
}

/// Looks at a program; a script is its interpreter's affair.
pub(super) fn check(program: &OsStr) -> Result<(), Unfit> {
    let name = || program.to_string_lossy().into_owned();
    let path = find(program).ok_or_else(|| Unfit::NotThere(name()))?;
    if path.metadata().is_ok_and(|file| file.permissions().mode() & 0o6000 != 0) {
        return Err(Unfit::Setuid(name()));
    }
    if gets_capabilities(&path, rustix::process::geteuid().is_root()) {
        return Err(Unfit::Capabilities(name()));
    }
    let mut bytes = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(HEADERS).read_to_end(&mut bytes));
    match read.ok().and_then(|_| loader(&bytes)) {
        Some(None) => Err(Unfit::Static(name())),
        Some(Some(loader)) if loader.windows(4).any(|part| part == b"musl") => {
            Err(Unfit::Musl(name()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program with one program header, of this type, and what it points to.
    fn elf(kind: u32, loader: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64..68].copy_from_slice(&kind.to_le_bytes());
        bytes[72] = 120;
        bytes[96] = u8::try_from(loader.len()).unwrap();
        bytes.extend(loader);
        bytes
    }

    #[test]
    fn file_capabilities_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ping");
        std::fs::write(&path, "").unwrap();
        assert!(!gets_capabilities(&path, false));
        // VFS_CAP_REVISION_2, effective; CAP_NET_RAW (linux/capability.h).
        let words = [0x0200_0001_u32, 1 << 13, 0, 0, 0];
        let value: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        let flags = rustix::fs::XattrFlags::empty();
        match rustix::fs::setxattr(&path, CAPABILITIES, &value, flags) {
            Ok(()) => {
                assert!(gets_capabilities(&path, false));
                assert!(!gets_capabilities(&path, true));
            }
            // That takes CAP_SETFCAP.
            Err(error) => {
                assert!(!rustix::process::geteuid().is_root(), "{error}");
                assert_eq!(error, rustix::io::Errno::PERM);
            }
        }
    }

    #[test]
    fn what_cannot_be_served_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let check = |name: &str, bytes: &[u8], mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            check(path.as_os_str())
        };
        let glibc = elf(3, b"/lib64/ld-linux-x86-64.so.2\0");
        assert_eq!(check("glibc", &glibc, 0o755), Ok(()));
        assert!(matches!(check("static", &elf(1, b""), 0o755), Err(Unfit::Static(_))));
        let musl = elf(3, b"/lib/ld-musl-x86_64.so.1\0");
        assert!(matches!(check("musl", &musl, 0o755), Err(Unfit::Musl(_))));
        assert!(matches!(check("suid", &glibc, 0o4755), Err(Unfit::Setuid(_))));
        assert_eq!(check("script", b"#!/bin/sh\n", 0o755), Ok(()));
        assert!(matches!(super::check(OsStr::new("no-such-program")), Err(Unfit::NotThere(_))));
        assert_eq!(super::check(OsStr::new("sh")), Ok(()));
        // Whatever else it is: no fault of ours.
        for cut in 0..glibc.len() {
            let _ = loader(&glibc[..cut]);
        }
        let _ = loader(&[b"\x7fELF\x02\x01".as_slice(), &[0xff; 200]].concat());
    }
}
