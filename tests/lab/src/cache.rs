//! What was made once and may be used again, outside the tree.
//!
//! An artefact is a directory named after the hash of everything that went into it. It is built
//! under a temporary name and published by one `rename`, so a reader sees all of it or nothing; a
//! lock per name keeps two runs from building the same thing at the same time. Nothing in a
//! published artefact is written to again: QEMU opens images with `snapshot=on`, and run-time files
//! live elsewhere.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::exec;

/// Artefacts of one name that nobody used for so long are removed when a new one of that name is
/// published.
const KEEP: Duration = Duration::from_secs(7 * 24 * 3600);
const BUILD_WAIT: Duration = Duration::from_secs(1200);

/// The directory of what was made once.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// The cache that the environment names; made where it is missing.
    pub fn open() -> Result<Self> {
        let dir = if let Some(dir) = std::env::var_os("VHOST_RDMA_CACHE") {
            PathBuf::from(dir)
        } else if let Some(dir) = std::env::var_os("XDG_CACHE_HOME") {
            Path::new(&dir).join("vhost-rdma")
        } else {
            let home = std::env::var_os("HOME").context(
                "neither VHOST_RDMA_CACHE, XDG_CACHE_HOME nor HOME is set: where may the cache go?",
            )?;
            Path::new(&home).join(".cache/vhost-rdma")
        };
        for sub in ["locks", "tmp", "logs"] {
            let sub = dir.join(sub);
            fs::create_dir_all(&sub)
                .with_context(|| format!("cannot make the cache directory {}", sub.display()))?;
        }
        let dir = dir.canonicalize()?;
        Ok(Self { dir })
    }

    /// Where everything is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The log of a step; begun anew by whoever asks with `fresh`.
    pub fn log(&self, name: &str) -> PathBuf {
        self.dir.join("logs").join(format!("{name}.log"))
    }

    /// Holds the lock `name` until the returned file is dropped.
    pub fn lock(&self, name: &str) -> Result<File> {
        let path = self.dir.join("locks").join(format!("{name}.lock"));
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        let mut told = false;
        exec::wait_for(
            &format!("the lock {} (held by another run)", path.display()),
            BUILD_WAIT,
            || match file.try_lock() {
                Ok(()) => Ok(Some(())),
                Err(fs::TryLockError::WouldBlock) => {
                    if !told {
                        eprintln!("    another run is making {name}; waiting for it");
                        told = true;
                    }
                    std::thread::sleep(Duration::from_millis(200));
                    Ok(None)
                }
                Err(fs::TryLockError::Error(e)) => Err(e.into()),
            },
        )?;
        Ok(file)
    }

    /// The artefact `name` for these inputs, built by `build` in an empty directory if it is not
    /// there yet.
    pub(crate) fn artefact(
        &self,
        name: &str,
        inputs: &str,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.dir.join(format!("{name}-{}", hash(inputs.as_bytes())));
        if touch(&path) {
            return Ok(path);
        }
        let _lock = self.lock(name)?;
        if touch(&path) {
            return Ok(path);
        }
        let tmp = self.dir.join("tmp").join(format!("{name}-{}", std::process::id()));
        let scrap = Scrap(tmp.clone());
        if tmp.exists() {
            fs::remove_dir_all(&tmp)?;
        }
        fs::create_dir_all(&tmp)?;
        let _ = fs::remove_file(self.log(name));
        build(&tmp)?;
        fs::write(tmp.join("INPUTS"), inputs)?;
        fs::rename(&tmp, &path).with_context(|| format!("cannot publish {}", path.display()))?;
        drop(scrap);
        self.prune(name, &path);
        Ok(path)
    }

    /// Whether an artefact is there.
    pub(crate) fn has(&self, name: &str, inputs: &str) -> bool {
        self.dir.join(format!("{name}-{}", hash(inputs.as_bytes()))).exists()
    }

    fn prune(&self, name: &str, current: &Path) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let ours = entry
                .file_name()
                .to_str()
                .and_then(|n| n.strip_prefix(name))
                .and_then(|n| n.strip_prefix('-'))
                .is_some_and(|h| h.len() == 16);
            let used = fs::metadata(path.join("INPUTS"))
                .and_then(|m| m.modified())
                .unwrap_or_else(|_| SystemTime::now());
            if ours && path != current && used.elapsed().unwrap_or_default() > KEEP {
                let _ = fs::remove_dir_all(&path);
            }
        }
    }
}

/// Marks an artefact as used now; false if there is none.
fn touch(path: &Path) -> bool {
    let stamp = path.join("INPUTS");
    match File::options().append(true).open(stamp) {
        Ok(f) => {
            let _ = f.set_modified(SystemTime::now());
            true
        }
        Err(_) => false,
    }
}

struct Scrap(PathBuf);

impl Drop for Scrap {
    fn drop(&mut self) {
        if self.0.exists() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// The first 16 hex digits of a SHA-256.
pub(crate) fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|b| format!("{b:02x}")).collect()
}

/// Names and contents of every file below `dir` whose name `counts`, as one text to hash.
pub(crate) fn tree_digest(dir: &Path, counts: fn(&str) -> bool) -> Result<String> {
    let mut files = Vec::new();
    let mut stack = vec![dir.to_path_buf()];
    while let Some(d) = stack.pop() {
        for entry in fs::read_dir(&d).with_context(|| format!("cannot read {}", d.display()))? {
            let entry = entry?;
            if !entry.file_name().to_str().is_some_and(counts) {
                continue;
            }
            if entry.file_type()?.is_dir() {
                stack.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    let mut text = String::new();
    for f in files {
        let name = f.strip_prefix(dir).unwrap_or(&f).display().to_string();
        text.push_str(&format!("{name} {}\n", hash(&fs::read(&f)?)));
    }
    Ok(text)
}
