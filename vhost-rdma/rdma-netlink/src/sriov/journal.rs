//! What was promised about a physical function, on disk: one file and one lock for each.
//!
//! The file says what is being done (`pending`) and what must be known to undo what was done. It is
//! replaced as a whole: written beside, flushed, renamed, and the directory flushed. So a reader
//! sees the state before or the state after, and an operation has begun if and only if the file
//! says so. The lock is `flock` on another file: the system frees it when its holder dies, and it
//! serialises processes as well as threads. Whoever can open that file can hold it for ever, so
//! file and directory are their owner's alone.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::PciAddress;
use super::operation::{Binding, Operation};
use crate::{Error, Result};

/// Where the state is on a host. Survives a reboot, but what is in it does not count then: virtual
/// functions do not survive one.
pub const STATE_DIR: &str = "/var/lib/vhost-rdma/sriov";

const VERSION: u32 = 1;
/// An operation may wait for drivers; somebody who waits longer has met a hung one.
const LOCK_WAIT: Duration = Duration::from_secs(60);

/// The directory is its owner's alone,
const OWNERS_DIR: u32 = 0o700;
/// and so are the files.
const OWNERS_FILE: u32 = 0o600;

/// A reservation of a virtual function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Who may change it.
    pub owner: String,
    /// What for.
    #[serde(default)]
    pub note: String,
}

/// What is known about a physical function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    version: u32,
    /// The run of the kernel in which this was true.
    boot: String,
    /// What has begun and not ended.
    pub(super) pending: Option<Operation>,
    /// How virtual functions were bound before they were given to another driver.
    #[serde(default)]
    pub(super) origins: BTreeMap<PciAddress, Binding>,
    #[serde(default)]
    pub(super) claims: BTreeMap<PciAddress, Claim>,
}

/// The directory of the files.
#[derive(Debug, Clone)]
pub(super) struct Store {
    dir: PathBuf,
}

/// A physical function that nobody else changes meanwhile.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    store: &'a Store,
    pf: PciAddress,
    boot: String,
    _lock: File,
}

impl Store {
    pub(super) fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Only who changes something needs the directory. What is above it is others' as well.
    fn make(&self) -> Result<()> {
        let dir = &self.dir;
        dir.parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| match DirBuilder::new().mode(OWNERS_DIR).create(dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    narrow(dir, OWNERS_DIR)
                }
                made => made,
            })
            .map_err(|source| {
                Error::io(format!("make the state directory {}", dir.display()), source)
            })
    }

    fn file(&self, pf: PciAddress) -> PathBuf {
        self.dir.join(format!("{pf}.json"))
    }

    /// The physical functions of which something is known.
    pub(super) fn known(&self) -> Vec<PciAddress> {
        super::sysfs::names(&self.dir)
            .iter()
            .filter_map(|name| name.strip_suffix(".json")?.parse().ok())
            .collect()
    }

    pub(super) fn lock(&self, pf: PciAddress, boot: String) -> Result<Locked<'_>> {
        self.make()?;
        let path = self.dir.join(format!("{pf}.lock"));
        let what = || format!("lock {}", path.display());
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(OWNERS_FILE)
            .open(&path)
            .and_then(|lock| narrow(&path, OWNERS_FILE).map(|()| lock))
            .map_err(|source| Error::io(what(), source))?;
        let deadline = Instant::now() + LOCK_WAIT;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Locked { store: self, pf, boot, _lock: lock }),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(Error::Conflict(format!(
                        "another process has been changing {pf} for more than {} s; `fuser {}` \
                         says which",
                        LOCK_WAIT.as_secs(),
                        path.display()
                    )));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::io(what(), errno)),
            }
        }
    }

    /// True if there is a state of an earlier run of the kernel.
    pub(super) fn is_stale(&self, pf: PciAddress, boot: &str) -> Result<bool> {
        Ok(read(&self.file(pf))?.is_some_and(|state| state.boot != boot && state.pending.is_some()))
    }

    /// A look without the lock. Who may not see the state cannot change anything either, and sees
    /// the functions alone.
    pub(super) fn peek(&self, pf: PciAddress, boot: &str) -> Result<State> {
        match self.state(pf, boot) {
            Err(error) if error.is_permission() => Ok(State::default()),
            seen => seen,
        }
    }

    fn state(&self, pf: PciAddress, boot: &str) -> Result<State> {
        Ok(read(&self.file(pf))?.filter(|state| state.boot == boot).unwrap_or_default())
    }
}

impl Locked<'_> {
    pub(super) fn load(&self) -> Result<State> {
        self.store.state(self.pf, &self.boot)
    }

    /// An operation that an earlier run of the kernel took with it.
    pub(super) fn obsolete(&self) -> Result<Option<Operation>> {
        Ok(read(&self.store.file(self.pf))?
            .filter(|state| state.boot != self.boot)
            .and_then(|state| state.pending))
    }

    pub(super) fn save(&self, state: &State) -> Result<()> {
        let path = self.store.file(self.pf);
        let what = || format!("write {}", path.display());
        let state = State { version: VERSION, boot: self.boot.clone(), ..state.clone() };
        let mut text = serde_json::to_vec_pretty(&state)
            .map_err(|error| Error::io(what(), io::Error::from(error)))?;
        text.push(b'\n');
        self.replace(&path, &text).map_err(|source| Error::io(what(), source))
    }

    fn replace(&self, path: &Path, text: &[u8]) -> io::Result<()> {
        let beside = path.with_extension("new");
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(OWNERS_FILE)
            .open(&beside)?;
        file.write_all(text)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        File::open(&self.store.dir)?.sync_all()
    }
}

/// Takes from others what an earlier version gave them.
fn narrow(path: &Path, mode: u32) -> io::Result<()> {
    if fs::metadata(path)?.permissions().mode() & 0o077 == 0 {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(mode))
}

fn read(path: &Path) -> Result<Option<State>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::io(format!("read {}", path.display()), source)),
    };
    let state: State = serde_json::from_slice(&text).map_err(|error| {
        Error::Invalid(format!(
            "{} cannot be understood ({error}): look at it, and move it away if no virtual \
             function is half changed",
            path.display()
        ))
    })?;
    if state.version > VERSION {
        return Err(Error::Invalid(format!(
            "{} was written by a newer version of this program: use that one",
            path.display()
        )));
    }
    Ok(Some(state))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::{Claim, Operation, State, Store};

    #[test]
    fn state_is_kept_until_the_next_boot() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("a/b"));
        let pf = "0000:01:00.0".parse().unwrap();
        let operation = Operation::Resize { before: 0, after: 2 };
        let claim = Claim { owner: "agent".to_owned(), note: "pod 7".to_owned() };
        {
            let locked = store.lock(pf, "boot1".to_owned()).unwrap();
            assert_eq!(locked.load().unwrap(), State::default());
            let mut state = State { pending: Some(operation.clone()), ..State::default() };
            state.claims.insert("0000:01:10.0".parse().unwrap(), claim.clone());
            locked.save(&state).unwrap();
            let read = locked.load().unwrap();
            assert_eq!(
                (read.pending, read.claims.values().next()),
                (Some(operation.clone()), Some(&claim))
            );
        }
        assert_eq!(store.known(), [pf]);
        let locked = store.lock(pf, "boot2".to_owned()).unwrap();
        assert_eq!(locked.load().unwrap(), State::default());
        assert_eq!(locked.obsolete().unwrap(), Some(operation));
    }

    #[test]
    fn a_file_that_makes_no_sense_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let pf = "0000:01:00.0".parse().unwrap();
        for text in ["", "{", r#"{"version":99,"boot":"b","pending":null}"#] {
            fs::write(dir.path().join("0000:01:00.0.json"), text).unwrap();
            let error = store.lock(pf, "b".to_owned()).unwrap().load().unwrap_err().to_string();
            assert!(error.contains("0000:01:00.0.json"), "{error}");
        }
    }

    /// Whoever can open the lock can hold it, and no function can be changed then.
    #[test]
    fn the_lock_is_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let pf = "0000:01:00.0".parse().unwrap();
        let mode =
            |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o777;
        let open = |name: &str, mode: u32| {
            fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        fs::create_dir(dir.path().join("above")).unwrap();
        open("above", 0o755);
        let lock = || {
            let store = Store::new(dir.path().join("above/state"));
            store.lock(pf, "b".to_owned()).unwrap().save(&State::default()).unwrap();
            (mode("above/state"), mode("above/state/0000:01:00.0.lock"))
        };
        assert_eq!(lock(), (0o700, 0o600));
        assert_eq!(mode("above"), 0o755, "which is not ours alone");
        // As an earlier version made them.
        open("above/state", 0o755);
        open("above/state/0000:01:00.0.lock", 0o644);
        assert_eq!(lock(), (0o700, 0o600));
        assert_eq!(mode("above/state/0000:01:00.0.json"), 0o600);
    }
}
