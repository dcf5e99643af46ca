//! Where key, certificate and roots are: in the agent's state directory, which survives a reboot,
//! and in a directory that the daemon reads.
//!
//! The first is one sealed file, so key and certificate always fit. The second is three files in a
//! directory of their own, to which the link `current` points: the daemon, which may start at any
//! moment, finds those that belong together.
//!
//! ```text
//!   /run/vhost-rdma/channel/current -> 5f0c…            replaced by `rename`
//!   /run/vhost-rdma/channel/5f0c…/{cert,key,ca}.pem
//! ```

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::identity::{Pair, Request, Roots};
use crate::sealed::Sealed;

const HEADER: &str = "vhost-rdma-agent-channel 1\n";
const FILE: &str = "channel";
const SIZE_MAX: u64 = 1 << 20;
/// What the daemon is told to read: the names of `--cm-cert`, `--cm-key`, `--cm-ca`.
const CURRENT: &str = "current";

/// What the node keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The roots that are believed.
    #[serde(default)]
    pub roots: Option<Roots>,
    /// Key and certificate in use.
    #[serde(default)]
    pub pair: Option<Pair>,
    /// A request that was made and not answered yet.
    #[serde(default)]
    pub asked: Option<Request>,
}

/// Both places.
#[derive(Debug, Clone)]
pub struct Store {
    file: Sealed,
    shared: PathBuf,
}

impl Store {
    /// `shared` is the directory that the daemon reads.
    #[must_use]
    pub fn new(state_dir: &Path, shared: &Path) -> Self {
        let file = Sealed::new(state_dir, FILE, HEADER, SIZE_MAX);
        Self { file, shared: shared.to_owned() }
    }

    /// What was kept last. What is damaged is not believed: a new certificate is asked for.
    #[must_use]
    pub fn read(&self) -> Kept {
        let read = self.file.read().unwrap_or_else(|error| {
            tracing::error!(%error, "the kept certificate is not believed");
            None
        });
        read.unwrap_or_default()
    }

    /// Keeps it over a reboot.
    ///
    /// # Errors
    /// The disk is full or broken; the old one stays.
    pub fn write(&self, kept: &Kept) -> io::Result<()> {
        self.file.write(kept)
    }

    /// Gives it to the daemon; false if it has it already, or there is nothing to give.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn publish(&self, kept: &Kept) -> io::Result<bool> {
        let (Some(pair), Some(roots)) = (&kept.pair, &kept.roots) else { return Ok(false) };
        let files = [("cert.pem", &pair.cert), ("key.pem", &pair.key), ("ca.pem", &roots.pem)];
        let all: Vec<u8> = files.iter().flat_map(|(_, text)| text.bytes().chain([0])).collect();
        let digest = ring::digest::digest(&ring::digest::SHA256, &all);
        let name: String = digest.as_ref().iter().take(8).map(|b| format!("{b:02x}")).collect();
        let link = self.shared.join(CURRENT);
        let dir = self.shared.join(&name);
        let there = |(file, text): &(&str, &String)| {
            fs::read(dir.join(file)).is_ok_and(|found| found == text.as_bytes())
        };
        if fs::read_link(&link).is_ok_and(|to| to == Path::new(&name)) && files.iter().all(there) {
            return Ok(false);
        }
        let private = || {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o700);
            builder
        };
        private().create(&self.shared)?;
        // One that was left half-made is not looked at by anybody.
        remove(&dir)?;
        private().create(&dir)?;
        for (file, text) in files {
            let mut options = File::options();
            let mut file = options.write(true).create_new(true).mode(0o600).open(dir.join(file))?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
        }
        let new = self.shared.join("current.new");
        if let Err(error) = fs::remove_file(&new)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let before = fs::read_link(&link).unwrap_or_default();
        std::os::unix::fs::symlink(&name, &new)?;
        fs::rename(&new, &link)?;
        // A daemon that starts may have read one file of those before, and wants the others.
        self.sweep(&[&dir, &self.shared.join(before)]);
        Ok(true)
    }

    fn sweep(&self, used: &[&Path]) {
        for entry in fs::read_dir(&self.shared).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let ours =
                name.len() == 16 && name.to_string_lossy().bytes().all(|b| b.is_ascii_hexdigit());
            if ours
                && !used.contains(&&*entry.path())
                && let Err(error) = fs::remove_dir_all(entry.path())
            {
                tracing::warn!(%error, "an old certificate stays");
            }
        }
    }
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn kept(cert: &str) -> Kept {
        Kept {
            roots: Some(Roots { pem: "roots".to_owned(), current: "r".to_owned() }),
            pair: Some(Pair { cert: cert.to_owned(), key: "key".to_owned() }),
            asked: None,
        }
    }

    fn store(dir: &Path) -> Store {
        Store::new(&dir.join("state"), &dir.join("run/channel"))
    }

    #[test]
    fn it_outlives_a_reboot_and_damage_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        assert_eq!(store.read(), Kept::default());
        store.write(&kept("one")).unwrap();
        assert_eq!(store.read(), kept("one"));
        let file = dir.path().join("state").join(FILE);
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&file, "something").unwrap();
        assert_eq!(store.read(), Kept::default());
    }

    #[test]
    fn the_daemon_finds_files_that_belong_together_and_no_old_ones() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        assert!(!store.publish(&Kept::default()).unwrap());
        assert!(store.publish(&kept("one")).unwrap());
        assert!(!store.publish(&kept("one")).unwrap(), "it has that already");
        let shared = dir.path().join("run/channel");
        let read = |file: &str| fs::read_to_string(shared.join("current").join(file)).unwrap();
        assert_eq!([read("cert.pem"), read("key.pem"), read("ca.pem")], ["one", "key", "roots"]);
        let mode = shared.join("current/key.pem").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(store.publish(&kept("two")).unwrap());
        assert_eq!(read("cert.pem"), "two");
        assert!(store.publish(&kept("three")).unwrap() && store.publish(&kept("two")).unwrap());
        let left = fs::read_dir(&shared).unwrap().count();
        assert_eq!(left, 3, "the link, what it names, and what it named before");
        // As after a reboot, or a write that was cut off.
        fs::remove_file(shared.join("current/cert.pem")).unwrap();
        assert!(store.publish(&kept("two")).unwrap());
        assert_eq!(read("cert.pem"), "two");
    }
}
