//! The VMM at the other end of a NIC's connection: who it is, and whether it is still there.
//!
//! The framework accepts connections itself and shows nobody their descriptor. It is found again among this process's own, by the
//! address that an accepted unix socket has from its listener: the NIC's path, which no other NIC has. `pidfd_getfd` duplicates it
//! without a raw descriptor changing hands. Where that system call is missing or forbidden the connection is served all the same,
//! only unobserved.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::net::SocketAddrUnix;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::socket::{self, Credentials};

/// An observed VMM.
#[derive(Debug)]
pub(super) struct Peer {
    stream: OwnedFd,
    /// As they were at `connect`.
    credentials: Credentials,
}

impl Peer {
    /// The VMM that is connected to the socket at `path`.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let wanted = SocketAddrUnix::new(path).ok()?;
        let me = pidfd_open(getpid(), PidfdFlags::empty()).ok()?;
        for entry in std::fs::read_dir("/proc/self/fd").ok()?.flatten() {
            let is_socket = std::fs::read_link(entry.path())
                .is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let Some(number) = number.filter(|_| is_socket) else { continue };
            let Ok(stream) = pidfd_getfd(&me, number, PidfdGetfdFlags::empty()) else { continue };
            if is_connected_at(stream.as_fd(), &wanted) {
                let credentials = socket::credentials(stream.as_fd())?;
                return Some(Self { stream, credentials });
            }
        }
        None
    }

    /// Do owner, group and mode of the socket let it in? The kernel asked that at `connect`; between that and now the connection
    /// may have waited, and the access been changed.
    ///
    /// Supplementary groups are not known here, so a group that may write lets everyone in whom the kernel let in; so does an access
    /// control list, whose mask stands in the place of the group's bits.
    pub(super) fn may_enter(&self, socket: &Path) -> bool {
        let Ok(metadata) = socket.symlink_metadata() else { return false };
        let uid = self.credentials.uid;
        let ours = rustix::process::geteuid().as_raw();
        uid == 0 || uid == ours || uid == metadata.uid() || metadata.mode() & 0o022 != 0
    }

    /// For the log.
    pub(super) const fn credentials(&self) -> Credentials {
        self.credentials
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_connected_at(stream: BorrowedFd<'_>, path: &SocketAddrUnix) -> bool {
    let here =
        rustix::net::getsockname(stream).ok().and_then(|any| SocketAddrUnix::try_from(any).ok());
    here.as_ref() == Some(path) && rustix::net::getpeername(stream).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::Peer;

    #[test]
    fn the_connection_is_found_by_its_path_and_its_credentials_are_ours() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("a"), dir.path().join("b"));
        let listener = UnixListener::bind(&path).unwrap();
        let _other = UnixListener::bind(&other).unwrap();
        let _elsewhere = UnixStream::connect(&other).unwrap();
        assert!(Peer::of(&path).is_none(), "nobody is connected, only listening");
        let _client = UnixStream::connect(&path).unwrap();
        let (_server, _) = listener.accept().unwrap();
        let peer = Peer::of(&path).unwrap();
        assert_eq!(peer.credentials().pid.cast_unsigned(), std::process::id());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(peer.may_enter(&path));
        std::fs::remove_file(&path).unwrap();
        assert!(!peer.may_enter(&path));
    }
}
