//! State that outlives the daemon: one JSON file, replaced as a whole.
//!
//! Written to a new file, synced, renamed over the old one, directory synced: after a crash at any
//! point the file is the old state or the new one, never a part. The runtime directory is usually
//! on tmpfs, so the state lives as long as the host is up; an operator who wants more names
//! networks and NICs in the configuration file.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::node::Saved;

const FILE: &str = "state.json";
const VERSION: u32 = 1;

/// Why state cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Disk or permission.
    #[error(
        "cannot {action} the state file {path}: {source}; make room or mend the permissions, or \
         run with --ephemeral"
    )]
    Io {
        /// "read" or "write".
        action: &'static str,
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Not ours, or damaged.
    #[error(
        "the state file {path} is damaged ({source}); move it away to start with no networks and \
         NICs, or restore a good copy"
    )]
    Damaged {
        /// The file.
        path: String,
        /// Where and why.
        source: serde_json::Error,
    },
    /// Written by a newer daemon.
    #[error(
        "the state file {path} has version {version}, this daemon knows version {VERSION}; run the \
         newer daemon, or move the file away"
    )]
    Version {
        /// The file.
        path: String,
        /// What it says.
        version: u32,
    },
}

/// How a directory is synced.
type SyncDir = fn(&File) -> io::Result<()>;

/// The state file, or nothing for an ephemeral daemon.
#[derive(Debug)]
pub(super) struct Store {
    path: Option<PathBuf>,
    sync_dir: SyncDir,
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    #[serde(flatten)]
    saved: Saved,
}

impl Store {
    pub(super) fn new(runtime_dir: &Path, ephemeral: bool) -> Self {
        Self { path: (!ephemeral).then(|| runtime_dir.join(FILE)), sync_dir: File::sync_all }
    }

    pub(super) const fn is_ephemeral(&self) -> bool {
        self.path.is_none()
    }

    /// Whether something was saved.
    pub(super) fn is_there(&self) -> bool {
        self.path.as_ref().is_some_and(|path| path.exists())
    }

    pub(super) fn load(&self) -> Result<Saved, StoreError> {
        let Some(path) = &self.path else { return Ok(Saved::default()) };
        let shown = path.display().to_string();
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Saved::default()),
            Err(source) => return Err(StoreError::Io { action: "read", path: shown, source }),
        };
        let damaged = |source| StoreError::Damaged { path: shown.clone(), source };
        // The version is looked at first: what a newer one has besides may well not parse.
        let value: serde_json::Value = serde_json::from_slice(&text).map_err(damaged)?;
        let version = value
            .get("version")
            .and_then(serde_json::Value::as_u64)
            .and_then(|v| u32::try_from(v).ok());
        match version {
            Some(version) if version > VERSION => Err(StoreError::Version { path: shown, version }),
            _ => Ok(serde_json::from_value::<Document>(value).map_err(damaged)?.saved),
        }
    }

    pub(super) fn save(&self, saved: Saved) -> Result<(), StoreError> {
        let Some(path) = &self.path else { return Ok(()) };
        write_whole(path, saved, self.sync_dir).map_err(|source| StoreError::Io {
            action: "write",
            path: path.display().to_string(),
            source,
        })
    }
}

/// Errors leave the old file as it is. One that is in place counts, whatever becomes of its
/// directory: who reads it next finds the change, so it must not be refused any more.
fn write_whole(path: &Path, saved: Saved, sync_dir: SyncDir) -> io::Result<()> {
    let new = path.with_extension("json.new");
    // Now: there may be no descriptor left for it afterwards.
    let dir = path.parent().map(File::open).transpose()?;
    // On one line: with hundreds of NICs, layout was half of what each change has to sync.
    let mut text = serde_json::to_vec(&Document { version: VERSION, saved })?;
    text.push(b'\n');
    let placed = (|| {
        let mut file =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&new, path)
    })();
    if placed.is_err() {
        // It may have the last of the room.
        let _ = fs::remove_file(&new);
    }
    placed?;
    if let Some(Err(error)) = dir.as_ref().map(sync_dir) {
        tracing::error!(path = %path.display(), %error, "a crash may bring the old state back");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::{Store, StoreError};
    use crate::node::{NetworkConfig, Saved};

    fn saved() -> Saved {
        Saved {
            networks: vec![NetworkConfig { name: "blue".to_owned(), vni: 9, configured: false }],
            ..Saved::default()
        }
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), false);
        assert_eq!(store.load().unwrap(), Saved::default());
        store.save(saved()).unwrap();
        store.save(saved()).unwrap();
        assert_eq!(store.load().unwrap(), saved());
        assert!(!dir.path().join("state.json.new").exists());
    }

    #[test]
    fn an_ephemeral_store_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), true);
        store.save(saved()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(store.load().unwrap(), Saved::default());
    }

    #[test]
    fn what_is_in_place_is_saved_and_what_is_not_takes_no_room() {
        let dir = tempfile::tempdir().unwrap();
        let broken = |_: &File| Err(std::io::Error::other("no disk"));
        let store = Store { sync_dir: broken, ..Store::new(dir.path(), false) };
        // A change that the next daemon finds is not refused.
        store.save(saved()).unwrap();
        assert_eq!(store.load().unwrap(), saved());
        let path = dir.path().join("state.json");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(store.save(saved()), Err(StoreError::Io { .. })));
        assert!(!dir.path().join("state.json.new").exists());
    }

    #[test]
    fn damage_and_newer_versions_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), false);
        let path = dir.path().join("state.json");
        std::fs::write(&path, "{\"version\":1,\"netw").unwrap();
        assert!(matches!(store.load(), Err(StoreError::Damaged { .. })));
        std::fs::write(&path, "{\"version\":2,\"other\":true}").unwrap();
        assert!(matches!(store.load(), Err(StoreError::Version { version: 2, .. })));
        std::fs::write(&path, "{}").unwrap();
        assert!(matches!(store.load(), Err(StoreError::Damaged { .. })));
    }
}
