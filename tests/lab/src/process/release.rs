//! The releases whose programs run: the lab's guests of Debian, older and newer releases of it, and
//! another distribution's root.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use super::products;
use crate::cache::Cache;
use crate::host::{Archive, UBUNTU_KEYRING};
use crate::roots::{self, Debian};

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

/// How the names of those begin that take private symbols.
const PRIVATE_SYMBOLS: &[&str] = &[
    "fork",
    "ib_",
    "ibv_devices, ibv_devinfo",
    "libfabric",
    // The one that works is of perftest.
    "memory that hangs",
    "open mpi",
    "private: ib_",
    "rdma_cm: ib_",
    "ucx_perftest",
];

/// See the module
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    Debian(Debian),
    Ubuntu,
    /// Debian's next, whose rdma-core has another private ABI.
    Next,
    /// Debian 11: the oldest C library that we build for.
    Old,
}

impl Release {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Debian(debian) => debian.name(),
            Self::Ubuntu => "ubuntu-24.04",
            Self::Next => products::NEXT,
            Self::Old => products::OLD,
        }
    }

    /// Its file system: an image, or a folder. Ubuntu's comes from this mirror.
    pub(super) fn root(self, cache: &Cache, mirror: Option<&str>) -> Result<PathBuf> {
        match (self, mirror) {
            (Self::Debian(debian), _) => Ok(roots::guest(cache, debian)?.dir.join("root.img")),
            (Self::Ubuntu, mirror) => ubuntu(cache, mirror.unwrap_or_default()),
            (Self::Next, _) => debian(cache, ("process-next", products::NEXT)),
            (Self::Old, _) => debian(cache, ("process-old", products::OLD)),
        }
    }

    /// Our libraries for its programs. perftest is linked with libraries of providers, which want
    /// the private ABI of their own rdma-core.
    pub(super) fn libraries(self, cache: &Cache) -> Result<PathBuf> {
        match self {
            Self::Debian(_) | Self::Ubuntu => products::libraries(cache),
            Self::Next => products::libraries_of(cache, products::NEXT),
            Self::Old => products::old_libraries(cache),
        }
    }

    /// Whether it has a program in a form that can run. Private symbols of Debian 11's libibverbs
    /// (`IBVERBS_PRIVATE_33`) are wanted by its perftest, UCX and libfabric, all of which are
    /// linked with libraries of providers, by pyverbs and by `ibv_devinfo`. The source of that
    /// rdma-core is not in the archive any more, so there are no libraries of it.
    pub(super) fn runs(self, program: &str) -> bool {
        self != Self::Old || !PRIVATE_SYMBOLS.iter().any(|start| program.starts_with(start))
    }

    /// Tests of rdma-core's Python suite that must pass. The suite of a release that still changes
    /// is not run, nor one that takes private symbols which ours have not.
    pub(super) const fn least(self) -> Option<usize> {
        match self {
            Self::Debian(Debian::Bookworm) => Some(108),
            Self::Debian(Debian::Trixie | Debian::TrixieBackports) => Some(129),
            Self::Ubuntu => Some(123),
            Self::Next | Self::Old => None,
        }
    }
}

fn ubuntu(cache: &Cache, mirror: &str) -> Result<PathBuf> {
    ensure!(
        Path::new(UBUNTU_KEYRING).exists(),
        "{UBUNTU_KEYRING} is not there: the package ubuntu-keyring has it"
    );
    let open = || Archive::ubuntu(cache, mirror, NOBLE, "main universe");
    roots::folder(cache, ("process-ubuntu", NOBLE), PACKAGES, &open)
}

fn debian(cache: &Cache, (name, suite): (&str, &str)) -> Result<PathBuf> {
    roots::folder(cache, (name, suite), PACKAGES, &|| Archive::open(cache, &[suite]))
}
