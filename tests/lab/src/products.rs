//! What of ours goes into a guest: the kernel module, the rdma-core provider, and the programs of
//! `tests/guest-programs`.
//!
//! Each is keyed by its sources, the ABI header and the builder it is made in. They are brought
//! into a running guest through its share, so a changed line costs seconds of compiling and no new
//! image. Builds run on a copy in the artefact's own directory, bound into the builder as `/work`:
//! neither the source tree nor the builder is written to.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, tree_digest};
use crate::debug_kernel;
use crate::exec::{run_logged, tied, tied_private_mounts, workspace};
use crate::roots::{self, Builder, Debian, RDMA_CORE};

const BUILD_WAIT: Duration = Duration::from_secs(400);
const STATIC_WAIT: Duration = Duration::from_secs(1200);

/// `$1` builder root, `$2` directory that becomes `/work`, `$3` script.
const ENTER: &str = r#"
mount --bind "$2" "$1/work"
mount -t proc proc "$1/proc"
exec chroot "$1" sh -ec "$3"
"#;

/// `-Werror` and `W=1` apart: W=1 of a new kernel complains about the kernel's own headers.
const MODULE: &str = "
make -C /lib/modules/@ABI@/build M=/work/vhost-rdma/guest/kernel KCFLAGS=-Werror -j2 modules
cp vhost-rdma/guest/kernel/virtio_rdma.ko /work/
";

/// What makes the driver one with a feature more than there are.
const LATER_DRIVER: &str = include_str!("later-driver.patch");

/// The provider's own script, the one that its package uses.
const PROVIDER: &str = "
CFLAGS=-Werror sh vhost-rdma/guest/provider/build.sh @RDMA_CORE@ /work/out
mv out/*.so out/*.driver /work/
rm -rf /work/out
";

/// `@FILES@` are their names. The last libraries are apart before glibc 2.34.
const PROGRAMS: &str = "
for f in tests/guest-programs/@FILES@.c; do
  gcc -std=gnu11 -O2 -Wall -Wextra -Werror -o /work/$(basename $f .c) $f \\
    -lrdmacm -libverbs -lpthread -lrt -ldl
done
";

/// What the module is made of.
pub(crate) const MODULE_SOURCES: &[&str] =
    &["vhost-rdma/guest/kernel", "vhost-rdma/guest/include", "vhost-rdma/abi/include"];

/// The module for a release's kernel.
pub(crate) fn module(cache: &Cache, debian: Debian) -> Result<PathBuf> {
    let builder = roots::builder(cache, debian)?;
    let script = MODULE.replace("@ABI@", &builder.abi);
    let name = format!("module-{}", debian.name());
    Ok(build(cache, &name, &builder, MODULE_SOURCES, &script)?.join("virtio_rdma.ko"))
}

/// The module for a release's kernel, with one feature more than there are.
pub(crate) fn later_module(cache: &Cache, debian: Debian) -> Result<PathBuf> {
    let builder = roots::builder(cache, debian)?;
    let script = MODULE.replace("@ABI@", &builder.abi);
    let script =
        format!("patch -p1 -s --fuzz=0 <<'PATCH-ENDS'\n{LATER_DRIVER}PATCH-ENDS\n{script}");
    let name = format!("module-later-{}", debian.name());
    Ok(build(cache, &name, &builder, MODULE_SOURCES, &script)?.join("virtio_rdma.ko"))
}

/// Everything that a guest of a release gets, as a list of files.
pub(crate) fn for_guest(cache: &Cache, debian: Debian) -> Result<Vec<PathBuf>> {
    let mut files = vec![module(cache, debian)?];
    files.extend(for_any_kernel(cache, debian)?);
    Ok(files)
}

/// The same for a guest with the debug kernel.
pub(crate) fn for_debug_kernel(cache: &Cache) -> Result<Vec<PathBuf>> {
    let builder = debug_kernel::builder(cache)?;
    let script = MODULE.replace("/lib/modules/@ABI@/build", debug_kernel::TREE);
    let module = build(cache, "module-debug-kernel", &builder, MODULE_SOURCES, &script)?;
    let mut files = vec![module.join("virtio_rdma.ko")];
    files.extend(for_any_kernel(cache, Debian::Trixie)?);
    Ok(files)
}

/// Provider and programs.
fn for_any_kernel(cache: &Cache, debian: Debian) -> Result<Vec<PathBuf>> {
    let builder = roots::builder(cache, Debian::Trixie)?;
    let sources =
        ["vhost-rdma/guest/provider", "vhost-rdma/guest/include", "vhost-rdma/abi/include"];
    let provider =
        build(cache, "provider", &builder, &sources, &PROVIDER.replace("@RDMA_CORE@", RDMA_CORE))?;
    let mut files =
        vec![provider.join("libvirtio_rdma-rdmav34.so"), provider.join("virtio_rdma.driver")];
    files.extend(programs(cache, debian)?);
    Ok(files)
}

/// Our own test programs, for the libraries of a release.
pub(crate) fn programs(cache: &Cache, debian: Debian) -> Result<Vec<PathBuf>> {
    let suite = if debian == Debian::Bookworm { debian } else { Debian::Trixie };
    let builder = roots::builder(cache, suite)?;
    programs_of(cache, (&format!("programs-{}", suite.name()), &builder.root), "*")
}

/// Those of our test programs whose names match, built in a root.
pub(crate) fn programs_of(
    cache: &Cache,
    (name, root): (&str, &Path),
    files: &str,
) -> Result<Vec<PathBuf>> {
    let script = PROGRAMS.replace("@FILES@", files);
    let sources = &["tests/guest-programs"];
    let dir = Build { name, root, sources, extra: &[], script: &script }.make(cache)?;
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_file() && entry.file_name() != "INPUTS" {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// How programs are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// As tests have them.
    Debug,
    /// As they are shipped.
    Release,
}

/// Programs of this workspace as nodes can run them whatever C library they have: static (there is
/// no musl target where only Debian's own toolchain is). `programs` are paths below the target's
/// directory.
pub(crate) fn static_programs(
    cache: &Cache,
    profile: Profile,
    packages: &[&str],
    programs: &[&str],
) -> Result<Vec<PathBuf>> {
    const TARGET: &str = if cfg!(target_arch = "aarch64") {
        "aarch64-unknown-linux-gnu"
    } else {
        "x86_64-unknown-linux-gnu"
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cmd = tied(cargo);
    cmd.current_dir(workspace()).env("RUSTFLAGS", "-C target-feature=+crt-static");
    cmd.args(["build", "--locked", "--bins", "--examples", "--target", TARGET]);
    let folder = match profile {
        Profile::Debug => "debug",
        Profile::Release => {
            cmd.arg("--release");
            "release"
        }
    };
    for package in packages {
        cmd.args(["-p", package]);
    }
    run_logged(&mut cmd, "building static programs", &cache.log("static-build"), STATIC_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    let dir = target.join(TARGET).join(folder);
    programs
        .iter()
        .map(|program| {
            let path = dir.join(program);
            path.canonicalize().with_context(|| format!("cargo left no {}", path.display()))
        })
        .collect()
}

fn build(
    cache: &Cache,
    name: &str,
    builder: &Builder,
    sources: &[&str],
    script: &str,
) -> Result<PathBuf> {
    Build { name, root: &builder.root, sources, extra: &[], script }.make(cache)
}

/// A script that runs in a builder on copies of sources.
#[derive(Debug)]
pub(crate) struct Build<'a> {
    pub(crate) name: &'a str,
    /// A root with what the script takes.
    pub(crate) root: &'a Path,
    /// Directories of the workspace, at the same places below `/work`.
    pub(crate) sources: &'a [&'a str],
    /// Files and directories of this machine that the script finds in `/work` itself. Only their
    /// paths are part of the key: an artefact's path names its contents.
    pub(crate) extra: &'a [&'a Path],
    pub(crate) script: &'a str,
}

impl Build<'_> {
    /// The directory with what the script left.
    pub(crate) fn make(&self, cache: &Cache) -> Result<PathBuf> {
        let Self { name, root, sources, extra, script } = self;
        let mut inputs = format!("1\n{script}\n{}\n", root.display());
        for source in *sources {
            let dir = workspace().join(source);
            if !dir.is_dir() {
                bail!("{source} is not in this tree: {name} cannot be built");
            }
            inputs.push_str(&format!("{source}:\n{}", tree_digest(&dir, is_source)?));
        }
        for path in *extra {
            inputs.push_str(&format!("{}\n", path.display()));
        }
        cache.artefact(name, &inputs, |tmp| {
            for source in *sources {
                copy_sources(&workspace().join(source), &tmp.join(source))?;
            }
            for path in *extra {
                let log = cache.log(name);
                let mut copy = tied("cp");
                run_logged(copy.arg("-aL").arg(path).arg(tmp), "copying", &log, BUILD_WAIT)?;
            }
            let mut cmd = tied_private_mounts("sh");
            cmd.args(["-ec", ENTER, "sh"]).arg(root).arg(tmp).arg(format!("cd /work\n{script}"));
            run_logged(&mut cmd, &format!("building {name}"), &cache.log(name), BUILD_WAIT)?;
            for top in ["vhost-rdma", "tests", "tree"] {
                let _ = fs::remove_dir_all(tmp.join(top));
            }
            Ok(())
        })
    }
}

/// What somebody's build in place left behind is no input.
pub(crate) fn is_source(name: &str) -> bool {
    let junk =
        [".o", ".ko", ".cmd", ".mod", ".mod.c", ".a", ".so", "Module.symvers", "modules.order"];
    !name.starts_with('.') && !junk.iter().any(|j| name.ends_with(j))
}

pub(crate) fn copy_sources(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_str().is_some_and(is_source) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy_sources(&entry.path(), &to.join(name))?;
        } else {
            fs::copy(entry.path(), to.join(name))?;
        }
    }
    Ok(())
}
