//! The VMM at the other end of a NIC's connection: who it is, and whether it is still there.
//!
//! What is known of it comes from the accepted stream itself: the kernel noted user, group and
//! process at `connect` (`SO_PEERCRED`), and since Linux 6.5 hands out a descriptor of that process
//! (`SO_PEERPIDFD`), which no later process can be taken for. Never from a name: a socket that
//! another process binds in a mount namespace of its own can have any path.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::socket::{self, Credentials};

/// An observed VMM.
#[derive(Debug)]
pub(super) struct Peer {
    stream: UnixStream,
    /// As they were at `connect`.
    credentials: Credentials,
    /// The process; none where the kernel does not tell.
    process: Option<OwnedFd>,
}

impl Peer {
    /// Who is connected by `stream`.
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = socket::credentials(stream.as_fd())?;
        let process = socket::peer_process(stream.as_fd());
        Ok(Self { stream: stream.try_clone()?, credentials, process })
    }

    /// Do owner, group and mode of the socket let it in? The kernel asked that at `connect`;
    /// between that and now the connection may have waited, and the access been changed.
    ///
    /// Supplementary groups are not known here, so a group that may write lets everyone in whom the
    /// kernel let in; so does an access control list, whose mask stands in the place of the group's
    /// bits.
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

    /// Closes the connection, whoever else has it open.
    pub(super) fn hang_up(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether the other end of the connection is closed.
    pub(super) fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
    }

    /// Whether the process that connected has ended. If the connection has not, somebody else has
    /// it: whom it was left to (a child), or given to (by a launcher).
    pub(super) fn has_ended(&self) -> bool {
        let Some(process) = &self.process else { return false };
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};

    use super::*;

    const SOCKET: &str = "VHOST_RDMA_TEST_PEER";

    #[test]
    fn the_stream_tells_whose_it_is_whatever_the_path_says() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (server, _) = listener.accept().unwrap();
        let peer = Peer::of(&server).unwrap();
        assert_eq!(peer.credentials().pid.cast_unsigned(), std::process::id());
        assert!(!peer.has_ended() && !peer.has_hung_up());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(peer.may_enter(&path));
        std::fs::remove_file(&path).unwrap();
        assert!(!peer.may_enter(&path));
        drop(client);
        assert!(peer.has_hung_up());
    }

    /// What the child does: connects, leaves the connection to a child of its own, and ends. That a
    /// second process has ended is the subject.
    #[test]
    #[ignore = "run by the test below, as a process of its own"]
    #[allow(clippy::zombie_processes, reason = "it is left behind; its input ends with the test")]
    fn connect_and_leave() {
        let stream = UnixStream::connect(std::env::var_os(SOCKET).unwrap()).unwrap();
        Command::new("cat").stdin(OwnedFd::from(stream)).stdout(Stdio::null()).spawn().unwrap();
    }

    #[test]
    fn a_process_that_leaves_its_connection_to_another_is_known_to_have_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let listener = UnixListener::bind(&path).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "supervisor::peer::tests::connect_and_leave", "--ignored"])
            .env(SOCKET, &path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (server, _) = listener.accept().unwrap();
        let peer = Peer::of(&server).unwrap();
        assert!(child.wait().unwrap().success());
        // Where the kernel does not tell (before Linux 6.5) it is not known.
        assert_eq!(peer.has_ended(), peer.process.is_some());
        assert!(!peer.has_hung_up(), "the connection is");
    }
}
