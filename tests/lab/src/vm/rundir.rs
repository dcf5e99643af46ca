//! The run-time directory of one lab: sockets, shares and consoles.
//!
//! It lies directly under `/tmp` because unix socket paths end at 107 bytes. A lock file in it is
//! held for the life of the run; directories whose lock nobody holds are what a killed run left,
//! and the next run removes them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const BASE: &str = "/tmp";
const PREFIX: &str = "vhost-rdma-lab.";

#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    keep: bool,
    _lock: File,
}

impl RunDir {
    pub(crate) fn new() -> Result<Self> {
        sweep();
        let path = (0..100)
            .map(|n| Path::new(BASE).join(format!("{PREFIX}{}-{n}", std::process::id())))
            .find(|p| fs::create_dir(p).is_ok())
            .with_context(|| format!("cannot make a directory in {BASE}"))?;
        let lock = File::create(path.join("lock"))?;
        lock.lock()?;
        Ok(Self { path, keep: false, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the directory behind for a look at consoles and logs; the next run removes it.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn sweep() {
    for entry in fs::read_dir(BASE).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(|n| n.starts_with(PREFIX)) {
            continue;
        }
        // A directory without a lock file may be one that is being made just now.
        if let Ok(lock) = File::open(entry.path().join("lock"))
            && lock.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
