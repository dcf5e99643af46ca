//! Files that others read: a NIC's description for its pod, device information for network plugins,
//! CDI specifications for the runtime. Each is replaced as a whole, so that no reader sees half of
//! one.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags};
use serde_json::Value;

/// Where they go.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// CDI specifications that do not survive a reboot.
    pub cdi: PathBuf,
    /// Device information of device plugins (device-info-spec 1.1.0 §4.1).
    pub device_info: PathBuf,
}

impl Default for Dirs {
    fn default() -> Self {
        Self {
            cdi: PathBuf::from("/var/run/cdi"),
            device_info: PathBuf::from("/var/run/k8s.cni.cncf.io/devinfo/dp"),
        }
    }
}

/// Opens a directory without following a link at its end: what is put there must not land
/// elsewhere.
///
/// # Errors
/// It does not exist, or is not a directory.
pub fn open_dir(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(dir, flags, Mode::empty())?)
}

/// Writes a document into a directory that exists.
///
/// # Errors
/// The file system said no; an old document stays.
pub fn write(dir: BorrowedFd<'_>, name: &str, document: &Value) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(document)?;
    text.push(b'\n');
    write_bytes(dir, name, &text)
}

fn write_bytes(dir: BorrowedFd<'_>, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = format!(".{name}.new");
    let flags =
        OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, &temporary, flags, Mode::from_raw_mode(0o644))?;
    // The umask must not decide who can read it.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(0o644))?;
    let written = File::from(file)
        .write_all(bytes)
        .and_then(|()| Ok(rustix::fs::renameat(dir, &temporary, dir, name)?));
    if written.is_err() {
        let _ = rustix::fs::unlinkat(dir, &temporary, AtFlags::empty());
    }
    written
}

/// Writes a document into a directory that is made if need be.
///
/// # Errors
/// The file system said no.
pub fn publish(dir: &Path, name: &str, document: &Value) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    write(open_dir(dir)?.as_fd(), name, document)
}

/// Writes a text into a directory that is made if need be.
///
/// # Errors
/// The file system said no.
pub fn publish_text(dir: &Path, name: &str, text: &str) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    write_bytes(open_dir(dir)?.as_fd(), name, text.as_bytes())
}

/// Removes a document; one that is gone already is no fault, and any other fault is only logged,
/// since nothing can be done.
pub fn remove(dir: &Path, name: &str) {
    match std::fs::remove_file(dir.join(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %dir.join(name).display(), %error, "cannot remove the file");
        }
        _ => {}
    }
}

/// Gives a NIC's directory and its socket the SELinux context that containers of its pool may use.
///
/// # Errors
/// The kernel has no SELinux or does not know the context.
pub fn label(dir: &Path, context: &str) -> io::Result<()> {
    let value = context.as_bytes();
    rustix::fs::lsetxattr(dir, "security.selinux", value, XattrFlags::empty())?;
    Ok(rustix::fs::lsetxattr(
        dir.join("vhost.sock"),
        "security.selinux",
        value,
        XattrFlags::empty(),
    )?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use serde_json::json;

    use super::{open_dir, publish, remove, write};

    #[test]
    fn a_document_is_replaced_as_a_whole_and_readable_by_all() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b");
        publish(&deep, "x.json", &json!({"a": 1})).unwrap();
        let first = deep.join("x.json").metadata().unwrap();
        assert_eq!(first.permissions().mode() & 0o777, 0o644);
        publish(&deep, "x.json", &json!({"a": 2})).unwrap();
        assert_ne!(first.ino(), deep.join("x.json").metadata().unwrap().ino());
        assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 1);
        remove(&deep, "x.json");
        remove(&deep, "x.json");
        assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 0);
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(open_dir(&link).is_err());
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, real.join(".x.json.new")).unwrap();
        assert!(write(open_dir(&real).unwrap().as_fd(), "x.json", &json!({})).is_err());
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }
}
