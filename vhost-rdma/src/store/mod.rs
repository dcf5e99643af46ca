//! Descriptors that outlive the daemon's main process: the service manager's store.
//!
//! A VMM's session is its descriptors. Whoever else holds them keeps the session alive while the
//! daemon ends and its successor begins, for whatever reason. systemd offers that to every service
//! (`FDSTORE=1`, sd_notify(3), sd_pid_notify_with_fds(3)), and [`keep`] is a parent that offers the
//! same where there is no systemd. So there is one protocol: a datagram adds a descriptor under a
//! name, or removes it. The next process finds all of them: those of systemd from descriptor 3 on,
//! with their names in `LISTEN_FDNAMES`, and those of [`keep`] in a table (`successor`).
//!
//! [`Sockets`] keeps what is listened on. Of everything else nothing here knows what it is; that is
//! the supervisor's (`supervisor::estate`).

pub mod keep;
mod sockets;
mod successor;

pub use self::sockets::{Listening, Owner, Sockets};
pub use self::successor::{READS, Successor, become_successor};

use std::env;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with,
};

use crate::socket;

/// Where the service manager listens.
const NOTIFY: &str = "NOTIFY_SOCKET";
/// The name of the socket to a parent that keeps, among the descriptors that it hands down.
const PARENT: &str = "parent";
/// How many descriptors it hands down, to which process, and their names.
const COUNT: &str = "LISTEN_FDS";
const PROCESS: &str = "LISTEN_PID";
const NAMES: &str = "LISTEN_FDNAMES";
/// The first of them (sd_listen_fds(3)).
const FIRST: i32 = 3;
/// How long the service manager may take to read what is said.
const PATIENCE: Duration = Duration::from_secs(5);
/// More than any daemon keeps.
const MOST: i32 = 1 << 20;

pub use crate::node::Heirloom;

/// The way to the store; without a service manager nothing is kept.
#[derive(Debug, Clone, Default)]
pub struct Store {
    socket: Option<Arc<OwnedFd>>,
    /// Its other end is a parent's, and it has no name by which the next program could find it.
    of_parent: bool,
    /// In this process, for the program that it becomes.
    own: Option<Arc<Mutex<Vec<Heirloom>>>>,
}

impl Store {
    /// The store that this process was started with, and what is in it. To be called once, and
    /// before anything is opened.
    #[must_use]
    pub fn open() -> (Self, Vec<Heirloom>) {
        let mut files = inherited();
        files.extend(successor::inherited());
        if let Some(at) = files.iter().position(|(name, _)| name == PARENT) {
            let (_, socket) = files.swap_remove(at);
            // One that does not read is not to hold the daemon up.
            if let Err(error) = set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE)) {
                tracing::warn!(%error, "a parent that hangs would hold the daemon up");
            }
            return (Self { socket: Some(Arc::new(socket)), of_parent: true, own: None }, files);
        }
        let socket = env::var(NOTIFY).ok().and_then(|address| match dial(&address) {
            Ok(socket) => Some(Arc::new(socket)),
            Err(error) => {
                tracing::warn!(address, %error, "the service manager does not listen");
                None
            }
        });
        (Self { socket, of_parent: false, own: None }, files)
    }

    /// The way to a parent, for the next program of this process.
    #[must_use]
    pub fn hand_down(&self) -> Option<Heirloom> {
        let socket = self.socket.as_ref().filter(|_| self.of_parent)?;
        Some((PARENT.to_owned(), socket.try_clone().ok()?))
    }

    /// One whose datagrams go to the other end of `socket`.
    #[cfg(test)]
    pub(crate) fn to(socket: OwnedFd) -> Self {
        Self { socket: Some(Arc::new(socket)), of_parent: false, own: None }
    }

    /// One that this process has itself.
    #[must_use]
    pub fn own() -> Self {
        Self { socket: None, of_parent: false, own: Some(Arc::default()) }
    }

    /// What this process keeps itself.
    #[must_use]
    pub fn take(&self) -> Vec<Heirloom> {
        let own = self.own.as_ref();
        own.map(|own| std::mem::take(&mut *own.lock().unwrap_or_else(PoisonError::into_inner)))
            .unwrap_or_default()
    }

    /// Whether there is one.
    #[must_use]
    pub const fn is_there(&self) -> bool {
        self.socket.is_some() || self.own.is_some()
    }

    /// Has a descriptor outlive this process under a name of its own.
    ///
    /// # Errors
    /// The service manager does not take it.
    pub fn keep(&self, name: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        if let Some(own) = &self.own {
            let heirloom = (name.to_owned(), file.try_clone_to_owned()?);
            own.lock().unwrap_or_else(PoisonError::into_inner).push(heirloom);
        }
        // It is not to look whether the other end is closed: that is the heir's to find out.
        self.say(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), &[file])
    }

    /// Has it end with this process, if it ends.
    pub fn forget(&self, name: &str) {
        if let Some(own) = &self.own {
            own.lock().unwrap_or_else(PoisonError::into_inner).retain(|(kept, _)| kept != name);
        }
        if let Err(error) = self.say(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]) {
            tracing::warn!(name, %error, "the service manager keeps a descriptor of ours");
        }
    }

    /// Tells the service manager something else (sd_notify(3)), if there is one.
    ///
    /// # Errors
    /// It does not listen.
    pub fn tell(&self, what: &str) -> io::Result<()> {
        self.say(what, &[])
    }

    fn say(&self, text: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::Error::other("one descriptor at a time"));
        }
        let bytes = [IoSlice::new(text.as_bytes())];
        sendmsg(&**socket, &bytes, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// A name that begins with `@` is abstract.
fn dial(address: &str) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let address = match address.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        None => SocketAddrUnix::new(address)?,
    };
    // One that does not read is not to hold the daemon up.
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    connect(&socket, &address)?;
    Ok(socket)
}

fn inherited() -> Vec<Heirloom> {
    let ours = env::var(PROCESS).ok().and_then(|pid| pid.parse().ok());
    if ours != Some(std::process::id()) {
        return Vec::new();
    }
    let count = env::var(COUNT).ok().and_then(|count| count.parse::<i32>().ok()).unwrap_or(0);
    let names = env::var(NAMES).unwrap_or_default();
    let mut names = names.split(':');
    let numbers = FIRST..FIRST + count.clamp(0, MOST);
    let files = numbers.map(|number| (names.next().unwrap_or_default().to_owned(), number));
    files
        .filter_map(|(name, number)| match socket::inherit(number) {
            Ok(file) => Some((name, file)),
            Err(error) => {
                tracing::error!(name, number, %error, "a descriptor was promised and is not there");
                None
            }
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::IoSliceMut;
    use std::os::fd::AsFd as _;
    use std::sync::Mutex;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, socketpair};

    use super::*;

    /// What a service manager does, in this process.
    pub(crate) struct Listener {
        pub(crate) store: Store,
        socket: OwnedFd,
        kept: Mutex<Vec<Heirloom>>,
    }

    impl Listener {
        pub(crate) fn new() -> Self {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (near, far) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            Self { store: Store::to(near), socket: far, kept: Mutex::default() }
        }

        /// Takes what was said.
        pub(crate) fn take(&self) {
            loop {
                let mut bytes = [0; 512];
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let mut parts = [IoSliceMut::new(&mut bytes)];
                let flags = RecvFlags::CMSG_CLOEXEC;
                let Ok(got) = recvmsg(&self.socket, &mut parts, &mut control, flags) else {
                    return;
                };
                let count = got.bytes;
                let files: Vec<OwnedFd> = control
                    .drain()
                    .flat_map(|message| match message {
                        RecvAncillaryMessage::ScmRights(rights) => rights.collect(),
                        _ => Vec::new(),
                    })
                    .collect();
                let text = std::str::from_utf8(&bytes[..count]).unwrap();
                if count == 0 {
                    return;
                }
                let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap();
                let mut kept = self.kept.lock().unwrap();
                if text.contains("FDSTOREREMOVE=1") {
                    kept.retain(|(kept, _)| kept != name);
                } else {
                    kept.extend(files.into_iter().map(|file| (name.to_owned(), file)));
                }
            }
        }

        /// What the next process would get.
        pub(crate) fn heirlooms(&self) -> Vec<Heirloom> {
            self.take();
            std::mem::take(&mut *self.kept.lock().unwrap())
        }
    }

    #[test]
    fn without_a_service_manager_nothing_is_kept_and_nothing_fails() {
        let store = Store::default();
        assert!(!store.is_there());
        store.keep("a", io::stdin().as_fd()).unwrap();
        store.forget("a");
    }

    #[test]
    fn what_is_forgotten_is_gone() {
        let listener = Listener::new();
        listener.store.keep("a", io::stdin().as_fd()).unwrap();
        listener.store.keep("b", io::stdin().as_fd()).unwrap();
        listener.store.forget("a");
        let names: Vec<_> = listener.heirlooms().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["b"]);
    }
}
