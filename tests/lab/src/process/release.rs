//! The releases whose programs run: the lab's guests of Debian, and another distribution's root.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::cache::Cache;
use crate::host::{Archive, UBUNTU_KEYRING};
use crate::roots::{self, Debian, Recipe, owned};

/// Ubuntu 24.04, by its name in the archive.
const SUITE: &str = "noble";
/// What a guest of the lab has, as far as it is for programs.
const PACKAGES: &[&str] = &[
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "libfabric-bin",
    "openmpi-bin",
    "perftest",
    "procps",
    "python3-mpi4py",
    "python3-pyverbs",
    "rdmacm-utils",
    "ucx-utils",
];

/// See the module
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    Debian(Debian),
    Ubuntu,
}

impl Release {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Debian(debian) => debian.name(),
            Self::Ubuntu => "ubuntu-24.04",
        }
    }

    /// Its file system: an image, or a folder. Ubuntu's comes from this mirror.
    pub(super) fn root(self, cache: &Cache, mirror: Option<&str>) -> Result<PathBuf> {
        match (self, mirror) {
            (Self::Debian(debian), _) => Ok(roots::guest(cache, debian)?.dir.join("root.img")),
            (Self::Ubuntu, mirror) => ubuntu(cache, mirror.unwrap_or_default()),
        }
    }

    /// Tests of rdma-core's Python suite that must pass.
    pub(super) const fn least(self) -> usize {
        match self {
            Self::Debian(Debian::Bookworm) => 118,
            Self::Debian(Debian::Trixie | Debian::TrixieBackports) => 129,
            Self::Ubuntu => 123,
        }
    }
}

fn ubuntu(cache: &Cache, mirror: &str) -> Result<PathBuf> {
    ensure!(
        Path::new(UBUNTU_KEYRING).exists(),
        "{UBUNTU_KEYRING} is not there: the package ubuntu-keyring has it"
    );
    let archive = Archive::ubuntu(cache, mirror, SUITE, "main universe")?;
    let inputs = format!("1\n{}\n", archive.resolve(PACKAGES)?.join("\n"));
    let name = "process-ubuntu";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return ubuntu(cache, mirror);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let packages = owned(PACKAGES);
        let recipe = Recipe { name, suite: SUITE, variant: "apt", packages: &packages };
        roots::mmdebstrap(cache, &archive, &recipe, &tmp.join("root"))?;
        Ok(std::fs::create_dir_all(tmp.join("root/host"))?)
    })?;
    Ok(dir.join("root"))
}
