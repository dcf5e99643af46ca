//! Listening sockets that outlive the daemon: whoever connects meanwhile waits for its successor.
//!
//! A VMM that is started while there is no daemon, or in the pause of an upgrade, finds the file of
//! a NIC's socket; without a listener behind it the kernel refuses. So each listening socket is in
//! the store, and its backlog with it, from its first moment on. The successor goes on with it if
//! it is what it would make itself: of the same owner, kind and path, and still the one behind the
//! file there. A file can be replaced by whoever has its directory; so a name in the store says
//! which one it was: `listen.DEVICE.INODE@NIC`, `admin.DEVICE.INODE@`.
//!
//! One that nobody wants any more is closed, and its file goes, if it still is its own.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::FileType;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, getsockname, socket_with,
};

use super::{Heirloom, Store};
use crate::aside::drop_aside;
use crate::node::{AttachError, SocketAccess};
use crate::socket;

/// Whose a socket is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// The daemon's: the admin socket.
    Admin,
    /// A NIC's.
    Nic(String),
}

/// Which file a socket was bound to: its device and inode.
type FileId = (u64, u64);

impl Owner {
    fn kept_as(&self, (device, inode): FileId) -> String {
        match self {
            Self::Admin => format!("admin.{device}.{inode}@"),
            Self::Nic(nic) => format!("listen.{device}.{inode}@{nic}"),
        }
    }

    fn parse(name: &str) -> Option<(Self, FileId)> {
        let (what, whose) = name.split_once('@')?;
        let mut words = what.split('.');
        let kind = words.next()?;
        let file = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        match (kind, words.next(), whose) {
            ("admin", None, "") => Some((Self::Admin, file)),
            ("listen", None, nic) if !nic.is_empty() => Some((Self::Nic(nic.to_owned()), file)),
            _ => None,
        }
    }
}

/// One that was left.
#[derive(Debug)]
struct Left {
    name: String,
    file: FileId,
    socket: OwnedFd,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Sockets {
    store: Store,
    left: Mutex<BTreeMap<Owner, Vec<Left>>>,
}

/// A listening socket; dropping it removes its file.
#[derive(Debug)]
pub struct Listening {
    listener: UnixListener,
    path: PathBuf,
    /// As what it is in the store.
    kept: Option<String>,
    store: Store,
}

impl Sockets {
    /// Takes the listening sockets out of what an earlier daemon left; the rest.
    #[must_use]
    pub fn read(store: Store, heirlooms: Vec<Heirloom>) -> (Arc<Self>, Vec<Heirloom>) {
        let mut left: BTreeMap<Owner, Vec<Left>> = BTreeMap::new();
        let mut rest = Vec::new();
        for (name, socket) in heirlooms {
            match Owner::parse(&name) {
                Some((owner, file)) => {
                    left.entry(owner).or_default().push(Left { name, file, socket });
                }
                None => rest.push((name, socket)),
            }
        }
        (Arc::new(Self { store, left: Mutex::new(left) }), rest)
    }

    /// The store that they are in.
    #[must_use]
    pub const fn store(&self) -> &Store {
        &self.store
    }

    /// A listening socket of this kind at `path`, which only those named in `access` can open: the
    /// one that an earlier daemon left to `owner`, or a new one.
    ///
    /// # Errors
    /// As [`socket::bind`].
    pub fn open(
        &self,
        owner: &Owner,
        kind: SocketType,
        (path, access): (&Path, &SocketAccess),
    ) -> Result<Listening, AttachError> {
        let listener = match self.claim(owner, kind, path) {
            Some(left) => {
                // Who may come can have changed.
                socket::set_access(path, access).inspect_err(|_| socket::remove(path))?;
                left
            }
            None => socket::bind_as(kind, path, access)?,
        };
        let kept = self.keep(owner, &listener, path);
        let store = self.store.clone();
        Ok(Listening { listener, path: path.to_owned(), kept, store })
    }

    fn claim(&self, owner: &Owner, kind: SocketType, path: &Path) -> Option<UnixListener> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(owner)?;
        let mut found = None;
        for left in left {
            match left.why_not(kind, path) {
                None if found.is_none() => found = Some(UnixListener::from(left.socket)),
                // One that was in two stores.
                None => {}
                Some(why) => self.let_go(owner, &left, why),
            }
        }
        found
    }

    /// Whatever nobody has claimed is closed.
    pub fn close(&self) {
        let all = std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner));
        for (owner, left) in all {
            left.iter().for_each(|left| self.let_go(&owner, left, "there is no such NIC any more"));
        }
    }

    fn let_go(&self, owner: &Owner, left: &Left, why: &str) {
        tracing::warn!(?owner, why, "a listening socket of an earlier daemon is closed");
        if let Some(path) = left.own_path() {
            socket::remove(&path);
        }
        self.store.forget(&left.name);
    }

    /// Has it outlive this process; as what.
    fn keep(&self, owner: &Owner, listener: &UnixListener, path: &Path) -> Option<String> {
        let kept = file_id(path).and_then(|file| {
            let name = owner.kept_as(file);
            self.store.keep(&name, listener.as_fd())?;
            Ok(name)
        });
        kept.inspect_err(|error| {
            tracing::warn!(?owner, %error, "its listening socket would not outlive the daemon");
        })
        .ok()
    }
}

impl Left {
    /// Why it is not the one that is wanted.
    fn why_not(&self, kind: SocketType, path: &Path) -> Option<&'static str> {
        let listens = socket_acceptconn(&self.socket).unwrap_or(false);
        if !listens || socket_type(&self.socket).ok() != Some(kind) {
            return Some("it is of another kind");
        }
        if bound_to(&self.socket).as_deref() != Some(path) {
            return Some("it is at another path");
        }
        if file_id(path).ok() != Some(self.file) {
            return Some("its file was replaced");
        }
        None
    }

    /// The file that is its own.
    fn own_path(&self) -> Option<PathBuf> {
        let path = bound_to(&self.socket)?;
        (file_id(&path).ok()? == self.file).then_some(path)
    }
}

/// Where a unix socket is bound, if it is at a file.
fn bound_to(socket: &OwnedFd) -> Option<PathBuf> {
    let address = SocketAddrUnix::try_from(getsockname(socket).ok()?).ok()?;
    let path = address.path()?;
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(path.to_bytes())))
}

/// The socket's file at `path` itself.
fn file_id(path: &Path) -> io::Result<FileId> {
    let file = rustix::fs::lstat(path)?;
    if FileType::from_raw_mode(file.st_mode) != FileType::Socket {
        return Err(io::Error::other("its file is no socket"));
    }
    Ok((file.st_dev, file.st_ino))
}

impl Listening {
    /// The socket.
    #[must_use]
    pub const fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It, for the next program of this process.
    #[must_use]
    pub fn hand_down(&self) -> Option<Heirloom> {
        let name = self.kept.clone()?;
        let copy = self.listener.as_fd().try_clone_to_owned();
        copy.inspect_err(|error| {
            tracing::error!(name, %error, "a listening socket is not handed down");
        })
        .ok()
        .map(|file| (name, file))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        socket::remove(&self.path);
        if let Some(name) = &self.kept {
            self.store.forget(name);
        }
        // Who waits there, and was not accepted, may have sent something already.
        let flags = SocketFlags::CLOEXEC;
        if let Ok(none) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) {
            let socket = self.path.display().to_string();
            drop_aside(&socket, std::mem::replace(&mut self.listener, UnixListener::from(none)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::tests::Listener;
    use super::*;

    const STREAM: SocketType = SocketType::STREAM;

    struct Scene {
        _dir: tempfile::TempDir,
        path: PathBuf,
        manager: Listener,
        access: SocketAccess,
    }

    impl Scene {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            let access = SocketAccess { mode: 0o600, ..SocketAccess::default() };
            Self { _dir: dir, path, manager: Listener::new(), access }
        }

        /// What a daemon opens for NIC "a" and leaves by its death; a VMM waits there.
        fn left(&self) -> (Vec<Heirloom>, UnixStream) {
            let store = self.manager.store.clone();
            let opened =
                Sockets::read(store, Vec::new()).0.open(&nic(), STREAM, (&self.path, &self.access));
            let opened = opened.unwrap();
            self.manager.take();
            let waiting = UnixStream::connect(&self.path).unwrap();
            // As a process dies: nothing is dropped.
            let copy = opened.listener.try_clone().unwrap();
            std::mem::forget(opened);
            drop(copy);
            (self.manager.heirlooms(), waiting)
        }

        /// What the next daemon has there.
        fn next(&self, heirlooms: Vec<Heirloom>) -> (Arc<Sockets>, Vec<Heirloom>) {
            Sockets::read(self.manager.store.clone(), heirlooms)
        }
    }

    fn nic() -> Owner {
        Owner::Nic("a".to_owned())
    }

    #[test]
    fn whoever_connected_meanwhile_is_served_by_the_next() {
        let scene = Scene::new();
        let (heirlooms, mut waiting) = scene.left();
        let (sockets, rest) = scene.next(heirlooms);
        assert!(rest.is_empty());
        let access = SocketAccess { mode: 0o660, ..SocketAccess::default() };
        let opened = sockets.open(&nic(), STREAM, (&scene.path, &access)).unwrap();
        let (mut served, _) = opened.listener().accept().unwrap();
        io::Write::write_all(&mut served, b"x").unwrap();
        io::Read::read_exact(&mut waiting, &mut [0]).unwrap();
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&scene.path.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o660, "who may come has changed");
        sockets.close();
        assert!(scene.path.exists());
        drop(opened);
        assert!(!scene.path.exists());
        scene.manager.take();
        assert!(scene.manager.heirlooms().is_empty(), "nothing is kept of it");
    }

    #[test]
    fn one_of_a_nic_that_is_gone_is_closed_and_its_file_with_it() {
        let scene = Scene::new();
        let (heirlooms, mut waiting) = scene.left();
        scene.next(heirlooms).0.close();
        assert!(!scene.path.exists());
        // The descriptor that the dead daemon had is still open in this process.
        drop(UnixStream::connect(&scene.path).unwrap_err());
        waiting.set_nonblocking(true).unwrap();
        let said = io::Read::read(&mut waiting, &mut [0]);
        assert!(said.is_err() || said.is_ok_and(|n| n == 0));
    }

    #[test]
    fn one_at_another_path_is_closed_and_a_new_one_made() {
        let scene = Scene::new();
        let (heirlooms, _waiting) = scene.left();
        let elsewhere = scene.path.with_file_name("other");
        let (sockets, _) = scene.next(heirlooms);
        let opened = sockets.open(&nic(), STREAM, (&elsewhere, &scene.access)).unwrap();
        assert!(!scene.path.exists(), "it was its own");
        UnixStream::connect(opened.path()).unwrap();
    }

    #[test]
    fn one_of_another_kind_makes_way() {
        let scene = Scene::new();
        let (heirlooms, _waiting) = scene.left();
        let (sockets, _) = scene.next(heirlooms);
        let opened = sockets.open(&nic(), SocketType::SEQPACKET, (&scene.path, &scene.access));
        let opened = opened.unwrap();
        assert_eq!(socket_type(opened.listener()).unwrap(), SocketType::SEQPACKET);
    }

    #[test]
    fn one_whose_file_is_another_s_is_closed_and_the_file_stays() {
        let scene = Scene::new();
        let (heirlooms, _waiting) = scene.left();
        // Beside the old one, so that it has another inode.
        let other = scene.path.with_file_name("other");
        let theirs = UnixListener::bind(&other).unwrap();
        std::fs::rename(&other, &scene.path).unwrap();
        let (sockets, _) = scene.next(heirlooms);
        let refused = sockets.open(&nic(), STREAM, (&scene.path, &scene.access));
        assert!(matches!(refused, Err(AttachError::SocketInUse { .. })), "{refused:?}");
        assert!(scene.path.exists());
        drop(theirs);
    }

    #[test]
    fn what_is_no_listening_socket_is_none() {
        let scene = Scene::new();
        let (near, _far) = UnixStream::pair().unwrap();
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let name = |inode: u64| nic().kept_as((1, inode));
        let heirlooms = vec![(name(1), near.into()), (name(2), null)];
        let (sockets, _) = scene.next(heirlooms);
        let opened = sockets.open(&nic(), STREAM, (&scene.path, &scene.access)).unwrap();
        UnixStream::connect(opened.path()).unwrap();
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for owner in [Owner::Admin, nic()] {
            assert_eq!(Owner::parse(&owner.kept_as((3, 4))), Some((owner, (3, 4))));
        }
        for strange in
            ["listen@a", "listen.1@a", "listen.1.2@", "listen.1.2.3@a", "admin.1.2@a", "wire.1@a"]
        {
            assert_eq!(Owner::parse(strange), None, "{strange}");
        }
    }
}
