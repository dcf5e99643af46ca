//! Listening unix sockets: made with the right owner and mode, never taken from someone who still
//! listens, removed at the end.
//!
//! A socket file outlives a process that was killed, so `bind` alone would fail for ever after; but
//! removing it unseen would cut off a daemon that is alive. The difference is what `connect` says:
//! a socket without a listener refuses. Owner and mode are set between `bind` and `listen`, so that
//! no one can connect before they hold. The admin socket and the NICs' sockets are both made here;
//! the caller holds the runtime directory's lock, so no second daemon can be between its own `bind`
//! and `listen`.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::node::{AttachError, SocketAccess};

mod acl;

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 128;

/// Makes way for a new socket at `path`: a stale one is removed.
///
/// # Errors
/// Someone listens there, something that is no socket is there, or it cannot be removed.
pub fn clear(path: &Path) -> Result<(), AttachError> {
    let shown = path.display();
    let kind = match path.symlink_metadata() {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(AttachError::io(format!("look at {shown}"), error)),
    };
    if !kind.is_socket() {
        let source = io::Error::new(
            io::ErrorKind::AlreadyExists,
            "something that is not a socket is there; move it away",
        );
        return Err(AttachError::io(format!("make the socket {shown}"), source));
    }
    match knock(path) {
        Err(rustix::io::Errno::CONNREFUSED) => std::fs::remove_file(path)
            .map_err(|error| AttachError::io(format!("remove the stale socket {shown}"), error)),
        // A listener with a full backlog or one that does not let us in is a listener.
        _ => Err(AttachError::SocketInUse { path: shown.to_string() }),
    }
}

/// Tries to connect, and never waits: a listener whose backlog is full would hold a blocking
/// `connect` up for ever.
fn knock(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

/// A listening socket at `path` that only those named in `access` can open; a stale one is
/// replaced.
///
/// # Errors
/// The path is in use, too long or forbidden, or the access cannot be given.
pub fn bind(path: &Path, access: &SocketAccess) -> Result<UnixListener, AttachError> {
    bind_as(SocketType::STREAM, path, access)
}

/// As [`bind`], of this type.
///
/// # Errors
/// As [`bind`].
pub fn bind_as(
    kind: SocketType,
    path: &Path,
    access: &SocketAccess,
) -> Result<UnixListener, AttachError> {
    clear(path)?;
    let making = || format!("make the socket {}", path.display());
    let address =
        SocketAddrUnix::new(path).map_err(|error| AttachError::io(making(), error.into()))?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
        .map_err(|error| AttachError::io(making(), error.into()))?;
    rustix::net::bind(&socket, &address)
        .map_err(|error| AttachError::io(making(), error.into()))?;
    let ready = set_access(path, access).and_then(|()| {
        rustix::net::listen(&socket, BACKLOG)
            .map_err(|error| AttachError::io(making(), error.into()))
    });
    match ready {
        Ok(()) => Ok(socket.into()),
        Err(error) => {
            remove(path);
            Err(error)
        }
    }
}

/// The directory that a socket is to be in, opened without following a link at its end.
///
/// # Errors
/// It is not there, or is a link.
pub fn own_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::PATH | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path.parent().unwrap_or(path), flags, Mode::empty())?)
}

/// Is the socket that was made at `path` the one in this directory?
///
/// # Errors
/// It is not: something put a link in between.
pub fn check_in(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default();
    let inside = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let made = rustix::fs::lstat(path)?;
    if (inside.st_dev, inside.st_ino) == (made.st_dev, made.st_ino)
        && FileType::from_raw_mode(inside.st_mode) == FileType::Socket
    {
        return Ok(());
    }
    Err(io::Error::other("its directory was replaced while it was made"))
}

/// Gives an existing socket its owner, group, mode and access control list. The list comes last: a
/// mode that is set beside one would change its mask.
///
/// # Errors
/// The operating system forbids it.
pub fn set_access(path: &Path, access: &SocketAccess) -> Result<(), AttachError> {
    let shown = path.display();
    if access.uid.is_some() || access.gid.is_some() {
        std::os::unix::fs::chown(path, access.uid, access.gid).map_err(|error| {
            let id =
                |id: Option<u32>| id.map_or_else(|| "unchanged".to_owned(), |id| id.to_string());
            let action = format!(
                "give the socket {shown} to user {}, group {}",
                id(access.uid),
                id(access.gid)
            );
            AttachError::io(action, error)
        })?;
    }
    let list = |error| AttachError::io(format!("set the access control list of {shown}"), error);
    acl::remove(path).map_err(list)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(access.mode)).map_err(
        |error| AttachError::io(format!("set mode {:o} of the socket {shown}", access.mode), error),
    )?;
    if access.acl.is_empty() {
        return Ok(());
    }
    acl::set(path, access.mode, &access.acl).map_err(list)
}

/// Who connected, as they were when they did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The process; 0 if it is in a process namespace that we do not see.
    pub pid: i32,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

/// `SO_PEERCRED` (unix(7)). Not by rustix, whose process numbers cannot be 0.
///
/// # Errors
/// It is no unix socket that is connected.
pub fn credentials(stream: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or_default();
    // SAFETY: the descriptor is open, and the kernel writes at most `length` bytes into a structure
    // of that size, all of whose bit patterns are valid.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(Credentials { pid: found.pid, uid: found.uid, gid: found.gid }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The process that connected, as a descriptor that no later process can be taken for:
/// `SO_PEERPIDFD`, from Linux 6.5 on. `None` where the kernel does not tell, or the process is gone
/// and reaped.
#[must_use]
pub fn peer_process(stream: BorrowedFd<'_>) -> Option<OwnedFd> {
    /// <asm-generic/socket.h>; the ports that number socket options otherwise are none of ours.
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut found: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).ok()?;
    // SAFETY: the descriptor is open, and the kernel writes at most `length` bytes into an integer
    // of that size.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    // SAFETY: the kernel has just made this descriptor for us, close-on-exec, and nobody else knows
    // it.
    (result == 0 && found >= 0).then(|| unsafe { OwnedFd::from_raw_fd(found) })
}

/// Puts `with` in the place of the open descriptor `number`, which stays its owner's.
///
/// # Errors
/// The host refuses.
pub fn replace(number: RawFd, with: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: dup3(2) touches no memory. The number was open and is open afterwards, so that its
    // owner closes what is there then; both are stream sockets.
    let done = unsafe { libc::dup3(with.as_raw_fd(), number, libc::O_CLOEXEC) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The open descriptor `number`, which whoever started this process left to it; no program that
/// this one starts gets it. To be called once for each, before anything else is opened.
///
/// # Errors
/// It is not open.
pub fn inherit(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl(2) touches no memory, and fails for a number that is not open.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and was before this process opened anything: nobody here owns it yet.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Closes whatever whoever started this process left open to it beyond the standard descriptors. To
/// be called before anything is opened. A kernel before Linux 5.9 closes nothing.
pub fn close_strangers() {
    const FIRST: libc::c_uint = 3;
    // SAFETY: close_range(2) touches no memory, and nobody in this process owns a descriptor yet.
    let _ = unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) };
}

/// Removes a socket; one that is gone already is no fault, and any other fault is only logged,
/// since nothing can be done.
pub fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove the socket");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use std::os::unix::net::UnixStream;

    use super::{UnixListener, bind, check_in, clear, own_dir, remove};
    use crate::node::{AttachError, SocketAccess};

    #[test]
    fn a_listener_is_left_alone_and_a_stale_socket_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let access = SocketAccess { mode: 0o600, ..SocketAccess::default() };
        let first = bind(&path, &access).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        assert!(matches!(bind(&path, &access), Err(AttachError::SocketInUse { .. })));
        drop(first);
        let second: UnixListener = bind(&path, &access).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(second);
        remove(&path);
        remove(&path);
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_is_a_link_or_was_replaced_is_not_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(own_dir(&link.join("s")).is_err());
        let path = real.join("s");
        let opened = own_dir(&path).unwrap();
        let access = SocketAccess { mode: 0o600, ..SocketAccess::default() };
        let _listener = bind(&path, &access).unwrap();
        check_in(&opened, &path).unwrap();
        let moved = dir.path().join("moved");
        std::fs::rename(&real, &moved).unwrap();
        std::fs::create_dir(&real).unwrap();
        let _other = bind(&path, &access).unwrap();
        assert!(check_in(&opened, &path).is_err());
    }

    #[test]
    fn a_listener_that_does_not_accept_is_a_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _waiting = UnixStream::connect(&path).unwrap();
        assert!(matches!(clear(&path), Err(AttachError::SocketInUse { .. })));
    }

    #[test]
    fn what_is_not_a_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::fs::write(&path, "precious").unwrap();
        assert!(clear(&path).unwrap_err().to_string().contains("not a socket"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
