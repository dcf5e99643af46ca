//! The releases whose programs run: the lab's guests of Debian, and another distribution's root.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use super::products;
use crate::cache::Cache;
use crate::host::{Archive, UBUNTU_KEYRING};
use crate::roots::{self, Debian, Recipe, owned};

/// Ubuntu 24.04, by its name in the archive.
const NOBLE: &str = "noble";
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
    /// Debian's next, whose rdma-core has another private ABI.
    Next,
}

impl Release {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Debian(debian) => debian.name(),
            Self::Ubuntu => "ubuntu-24.04",
            Self::Next => products::NEXT,
        }
    }

    /// Its file system: an image, or a folder. Ubuntu's comes from this mirror.
    pub(super) fn root(self, cache: &Cache, mirror: Option<&str>) -> Result<PathBuf> {
        match (self, mirror) {
            (Self::Debian(debian), _) => Ok(roots::guest(cache, debian)?.dir.join("root.img")),
            (Self::Ubuntu, mirror) => ubuntu(cache, mirror.unwrap_or_default()),
            (Self::Next, _) => {
                let open = || Archive::open(cache, &[products::NEXT]);
                folder(cache, "process-next", products::NEXT, &open)
            }
        }
    }

    /// Our libraries for its programs. perftest is linked with libraries of providers, which want
    /// the private ABI of their own rdma-core.
    pub(super) fn libraries(self, cache: &Cache) -> Result<PathBuf> {
        match self {
            Self::Debian(_) | Self::Ubuntu => products::libraries(cache),
            Self::Next => products::libraries_of(cache, products::NEXT),
        }
    }

    /// Tests of rdma-core's Python suite that must pass. The suite of a release that still changes
    /// is not run.
    pub(super) const fn least(self) -> Option<usize> {
        match self {
            Self::Debian(Debian::Bookworm) => Some(108),
            Self::Debian(Debian::Trixie | Debian::TrixieBackports) => Some(129),
            Self::Ubuntu => Some(123),
            Self::Next => None,
        }
    }
}

fn ubuntu(cache: &Cache, mirror: &str) -> Result<PathBuf> {
    ensure!(
        Path::new(UBUNTU_KEYRING).exists(),
        "{UBUNTU_KEYRING} is not there: the package ubuntu-keyring has it"
    );
    let open = || Archive::ubuntu(cache, mirror, NOBLE, "main universe");
    folder(cache, "process-ubuntu", NOBLE, &open)
}

fn folder(
    cache: &Cache,
    name: &str,
    suite: &str,
    open: &dyn Fn() -> Result<Archive>,
) -> Result<PathBuf> {
    let archive = open()?;
    let inputs = format!("1\n{}\n", archive.resolve(PACKAGES)?.join("\n"));
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return folder(cache, name, suite, open);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let packages = owned(PACKAGES);
        let recipe = Recipe { name, suite, variant: "apt", packages: &packages };
        roots::mmdebstrap(cache, &archive, &recipe, &tmp.join("root"))?;
        Ok(std::fs::create_dir_all(tmp.join("root/host"))?)
    })?;
    Ok(dir.join("root"))
}
