//! The guest's packages, as `vhost-rdma/guest/packaging` makes them: built, looked into, installed
//! and removed in roots of the distributions that they are for.
//!
//! A root has DKMS and the headers of the kernels that its release offers, so an installation
//! compiles the module for each of them, as it would on a user's machine. It is never written to:
//! what a script does goes to an overlay, which ends with it. What comes out are the files that the
//! packages put into place; `vm drivers --full` gives them to two guests.
//!
//! Ubuntu's archive is no part of Debian's: whoever wants it names a mirror, and has Ubuntu's keys
//! (`ubuntu-keyring`) in [`UBUNTU_KEYRING`].

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cache::{Cache, tree_digest};
use crate::exec::{run_logged, tied, tied_private_mounts, workspace};
use crate::host::{Archive, UBUNTU_KEYRING};
use crate::products::{copy_sources, is_source};
use crate::roots::{self, Debian, Recipe, owned};

const WAIT: Duration = Duration::from_secs(900);
const SOURCES: &[&str] = &["vhost-rdma/guest", "vhost-rdma/abi/include", "LICENSES"];
const DEBIAN: &str = include_str!("debian.sh");
const RPM: &str = include_str!("rpm.sh");

/// In every root.
const PACKAGES: &[&str] = &["build-essential", "dkms", "kmod"];
/// Where the provider is built and installed too.
const FOR_PROVIDER: &[&str] = &[
    "cmake",
    "ibverbs-providers",
    "libnl-3-dev",
    "libnl-route-3-dev",
    "pkg-config",
    "python3-minimal",
    "rdma-core",
];
const FOR_RPM: &[&str] = &["rpm", "rpmlint"];

/// `$1` root, `$2` directory that becomes `/work`, `$3` script.
const ENTER: &str = r#"
mkdir -p "$2/upper" "$2/overlay" "$2/mnt"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/overlay" "$2/mnt"
mkdir -p "$2/mnt/work"
mount --bind "$2" "$2/mnt/work"
mount -t proc proc "$2/mnt/proc"
exec chroot "$2/mnt" sh -ec "cd /work
$3"
"#;

/// A release whose guests the packages are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Release {
    pub(crate) name: &'static str,
    suite: &'static str,
    /// Meta packages of headers, one for each kernel.
    headers: &'static [&'static str],
    /// Its libibverbs takes our provider.
    provider: bool,
}

/// Debian's, whose archive every machine of ours has.
pub(crate) const DEBIANS: &[Release] = &[
    Release {
        name: "Debian 12",
        suite: "bookworm",
        headers: &["linux-headers-amd64"],
        provider: true,
    },
    TRIXIE,
];
const TRIXIE: Release = Release {
    name: "Debian 13",
    suite: "trixie",
    headers: &["linux-headers-amd64"],
    provider: true,
};

/// Ubuntu's long-term releases, each with the kernel that it came with and the newest it has.
pub(crate) const UBUNTUS: &[Release] = &[
    Release {
        name: "Ubuntu 22.04",
        suite: "jammy",
        headers: &["linux-headers-generic-hwe-22.04"],
        provider: false,
    },
    Release {
        name: "Ubuntu 24.04",
        suite: "noble",
        headers: &["linux-headers-generic", "linux-headers-generic-hwe-24.04"],
        provider: true,
    },
    Release {
        name: "Ubuntu 26.04",
        suite: "resolute",
        headers: &["linux-headers-generic"],
        provider: false,
    },
];

/// The Debian packages on a release: the directory with what they put into place. `mirror` is
/// Ubuntu's, where the release is.
pub(crate) fn debian(cache: &Cache, release: &Release, mirror: Option<&str>) -> Result<PathBuf> {
    let root = root(cache, release, mirror, &[])?;
    let provider = if release.provider { "yes" } else { "no" };
    let script = format!("KERNELS={}\nPROVIDER={provider}\n{DEBIAN}", release.headers.len());
    let name = format!("packages-{}", release.suite);
    run(cache, &name, &root, &script)
}

/// The RPM packages, on Debian 13 with its own rpm.
pub(crate) fn rpm(cache: &Cache) -> Result<PathBuf> {
    let root = root(cache, &TRIXIE, None, FOR_RPM)?;
    run(cache, "packages-rpm", &root, RPM)
}

/// The Debian packages for the guest of the lab.
pub(crate) fn for_guest(cache: &Cache) -> Result<PathBuf> {
    debian(cache, &TRIXIE, None)
}

/// Module, provider and its `.driver` file of a directory that [`debian`] or [`rpm`] gave, for a
/// kernel. The module may be compressed.
pub(crate) fn files(dir: &Path, abi: &str) -> Result<Vec<PathBuf>> {
    let modules = dir.join("modules").join(abi);
    let module = fs::read_dir(&modules)
        .with_context(|| format!("the packages made no module for {abi}"))?
        .next()
        .with_context(|| format!("{} is empty", modules.display()))??;
    let rest = ["libvirtio_rdma-rdmav34.so", "virtio_rdma.driver"].map(|name| dir.join(name));
    let mut files = vec![module.path()];
    files.extend(rest);
    Ok(files)
}

fn root(cache: &Cache, release: &Release, mirror: Option<&str>, more: &[&str]) -> Result<PathBuf> {
    let open = || match mirror {
        None => Archive::open(cache, &[release.suite]),
        Some(mirror) => {
            ensure!(
                Path::new(UBUNTU_KEYRING).exists(),
                "{UBUNTU_KEYRING} is not there: the package ubuntu-keyring has it"
            );
            Archive::ubuntu(cache, mirror, release.suite, "main")
        }
    };
    let mut archive = open()?;
    let mut packages = [PACKAGES, release.headers, more].concat();
    if release.provider {
        packages.extend(FOR_PROVIDER);
    }
    let inputs =
        |archive: &Archive| anyhow::Ok(format!("1\n{}\n", archive.resolve(&packages)?.join("\n")));
    let name = format!("packager-{}{}", release.suite, if more.is_empty() { "" } else { "-rpm" });
    let mut key = inputs(&archive)?;
    if !cache.has(&name, &key) && archive.renew(cache)? {
        archive = open()?;
        key = inputs(&archive)?;
    }
    let dir = cache.artefact(&name, &key, |tmp| {
        let packages = owned(&packages);
        let (suite, variant) = (release.suite, "apt");
        let recipe = Recipe { name: &name, suite, variant, packages: &packages };
        roots::mmdebstrap(cache, &archive, &recipe, &tmp.join("root"))
    })?;
    Ok(dir.join("root"))
}

/// Runs a script over copies of the sources; what it left.
fn run(cache: &Cache, name: &str, root: &Path, script: &str) -> Result<PathBuf> {
    let builder = roots::builder(cache, Debian::Trixie)?;
    let rdma_core = builder.root.join(roots::RDMA_CORE.trim_start_matches('/'));
    let mut inputs = format!("1\n{script}\n{}\n{}\n", root.display(), rdma_core.display());
    for source in SOURCES {
        inputs.push_str(&tree_digest(&workspace().join(source), is_source)?);
    }
    cache.artefact(name, &inputs, |tmp| {
        let log = cache.log(name);
        for source in SOURCES {
            copy_sources(&workspace().join(source), &tmp.join(source))?;
        }
        run_logged(tied("cp").arg("-a").arg(&rdma_core).arg(tmp), "copying", &log, WAIT)?;
        let mut cmd = tied_private_mounts("sh");
        cmd.args(["-ec", ENTER, "sh"]).arg(root).arg(tmp).arg(script);
        run_logged(&mut cmd, &format!("making and installing {name}"), &log, WAIT)?;
        for scrap in ["upper", "overlay", "mnt", "vhost-rdma", "LICENSES"] {
            let _ = fs::remove_dir_all(tmp.join(scrap));
        }
        Ok(())
    })
}
