//! A NIC's listening socket: who may connect is decided before anyone can.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

use crate::node::{AttachError, SocketAccess};

/// A bound socket; dropping it removes its file.
#[derive(Debug)]
pub(super) struct NicSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl NicSocket {
    /// Makes the socket with owner, group and mode, and listens only then: before that, a connection is refused.
    pub(super) fn open(path: &Path, access: &SocketAccess) -> Result<Self, AttachError> {
        remove_stale(path)?;
        let create = |error: io::Error| AttachError::io(format!("create the socket {}", path.display()), error);
        let address = SocketAddrUnix::new(path).map_err(|error| create(error.into()))?;
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| create(error.into()))?;
        bind(&fd, &address).map_err(|error| create(error.into()))?;
        // From here on a failure removes the file again.
        let socket = Self { listener: UnixListener::from(fd), path: path.to_owned() };
        grant(path, access)?;
        listen(&socket.listener, 1)
            .map_err(|error| AttachError::io(format!("listen on {}", path.display()), error.into()))?;
        Ok(socket)
    }

    pub(super) const fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for NicSocket {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "the socket was gone already");
        }
    }
}

/// Sets who may connect.
pub(super) fn grant(path: &Path, access: &SocketAccess) -> Result<(), AttachError> {
    let action = |what: &str| format!("{what} of the socket {}", path.display());
    // The owner first: a change of owner may clear mode bits.
    if access.uid.is_some() || access.gid.is_some() {
        chown(path, access.uid, access.gid).map_err(|error| AttachError::io(action("set the owner"), error))?;
    }
    std::fs::set_permissions(path, PermissionsExt::from_mode(access.mode))
        .map_err(|error| AttachError::io(action("set the mode"), error))
}

/// Removes a socket that nobody listens on, such as a daemon that was killed leaves behind.
fn remove_stale(path: &Path) -> Result<(), AttachError> {
    let examine = |error| AttachError::io(format!("examine {}", path.display()), error);
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(examine(error)),
        Ok(found) if !found.file_type().is_socket() => {
            let error = io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is not a socket");
            return Err(AttachError::io(format!("create the socket {}", path.display()), error));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)
            .map_err(|error| AttachError::io(format!("remove the stale socket {}", path.display()), error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(examine(error)),
        Ok(_) => Err(AttachError::SocketInUse { path: path.display().to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).expect("there").permissions().mode() & 0o7777
    }

    #[test]
    fn a_socket_comes_with_its_mode_and_goes_with_its_owner() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vhost.sock");
        let socket = NicSocket::open(&path, &SocketAccess { mode: 0o600, ..Default::default() }).expect("opened");
        assert_eq!(mode(&path), 0o600);
        UnixStream::connect(&path).expect("it listens");
        grant(&path, &SocketAccess { mode: 0o666, ..Default::default() }).expect("changed");
        assert_eq!(mode(&path), 0o666);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn only_a_stale_socket_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vhost.sock");
        // A listener that goes without removing its file.
        drop(UnixListener::bind(&path).expect("bound"));
        assert!(path.exists());
        let socket = NicSocket::open(&path, &SocketAccess::default()).expect("the stale one is replaced");
        let second = NicSocket::open(&path, &SocketAccess::default());
        assert!(matches!(second, Err(AttachError::SocketInUse { .. })), "{second:?}");
        assert!(path.exists(), "a refusal leaves the other one alone");
        drop(socket);

        std::fs::write(&path, "precious").expect("written");
        assert!(matches!(NicSocket::open(&path, &SocketAccess::default()), Err(AttachError::Io { .. })));
        assert_eq!(std::fs::read_to_string(&path).expect("there"), "precious");
    }
}
