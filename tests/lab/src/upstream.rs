//! The guest's kernel driver and provider, and the patches of the libraries for processes, in the
//! form in which they would go upstream.
//!
//! `vhost-rdma/guest/upstream/make-series.sh` makes the patch series. Here they are made against a
//! kernel of Debian and the rdma-core of the builder, applied to a fresh copy, looked at with the
//! kernel's own `checkpatch.pl --strict`, and the driver as the series leaves it is compiled for
//! the newest kernel. The driver as it stands in this tree is looked at with sparse.
//!
//! `vhost-rdma/process/patches` is a series as it is. It is applied to the rdma-core that the
//! libraries are made of, which is built after each patch, and they are built of a newer one with
//! it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::{Cache, tree_digest};
use crate::exec::{run_logged, tied, workspace};
use crate::host;
use crate::process::products as process;
use crate::products::{self, Build};
use crate::roots::{self, Debian, RDMA_CORE};

const WAIT: Duration = Duration::from_secs(600);
const GUEST: &str = "vhost-rdma/guest";

/// What of a kernel's source is needed: the files that the series changes, and the script that
/// judges it.
const KERNEL_FILES: &[&str] = &[
    "MAINTAINERS",
    "drivers/infiniband/Kconfig",
    "drivers/infiniband/hw/Makefile",
    "include/uapi/linux/virtio_ids.h",
    "include/uapi/rdma/ib_user_ioctl_verbs.h",
    "scripts/checkpatch.pl",
    "scripts/const_structs.checkpatch",
    "scripts/spelling.txt",
];

/// A build that calls no sparse would pass too: its mark is looked for.
const SPARSE: &str = "
make -C /lib/modules/@ABI@/build M=/work/vhost-rdma/guest/kernel KCFLAGS=-Werror C=2 \
    CHECK=/work/sparse -j2 modules > log 2>&1 || { cat log; exit 1; }
cat log
grep -q 'CHECK .*/main.c' log
! grep -E '^/work/.*: (warning|error): ' log
";

/// The same for smatch, whose findings have no common word but their place.
const SMATCH: &str = "
export LD_LIBRARY_PATH=/work
make -C /lib/modules/@ABI@/build M=/work/vhost-rdma/guest/kernel C=2 CHECK='/work/smatch \
    -p=kernel' -j2 modules > log 2>&1 || { cat log; exit 1; }
cat log
grep -q 'CHECK .*/main.c' log
! grep -E '^/work/.*[.][ch]:[0-9]+ ' log
";
/// What it is linked with and the builder has not.
const SMATCH_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libsqlite3.so.0";

/// The enum's new entry is not in the headers of a distribution.
const NEWEST: &str = "
make -C /lib/modules/@ABI@/build M=/work/tree/drivers/infiniband/hw/virtio \
    CONFIG_INFINIBAND_VIRTIO=m KCFLAGS='-Werror -DRDMA_DRIVER_VIRTIO=1000 -I/work/tree/include \
    -I/work/tree/include/uapi' -j2 modules
cp tree/drivers/infiniband/hw/virtio/virtio_rdma.ko /work/
";

/// The series applies to what it was made from, in the hands of whoever gets it by mail.
const APPLY: &str = r#"
cp -a "$1" "$2"
cd "$2"
rm -rf .git
git init -q
git add -A
git -c user.name=lab -c user.email=lab@localhost -c commit.gpgsign=false commit -q -m base
for patch in "$3"/000[1-9]*.patch; do
  git -c user.name=lab -c user.email=lab@localhost -c commit.gpgsign=false am -q "$patch"
done
"#;

/// What a maintainer looks at first: the series applies as it is, without fuzz, each patch is
/// signed by its author, counts what it changes, and says which of how many it is. With each, both
/// libraries are built, and the compiler has nothing to say of them.
const PROCESS: &str = r#"
git_() { git -c user.name=lab -c user.email=lab@localhost -c commit.gpgsign=false "$@"; }
rm -rf "$2"
cp -a "$1" "$2"
cd "$2"
rm -rf .git
git_ init -q
git_ add -A -f
git_ commit -q -m base
cmake -S . -B ../build -DCMAKE_BUILD_TYPE=Release -DNO_PYVERBS=1 -DNO_MAN_PAGES=1
set -- "$3"/*.patch
n=0
for patch; do
  n=$((n+1))
  git_ am -q "$patch"
  author=$(git log -1 --format='%an <%ae>')
  signed="Signed-off-by: $author"
  git log -1 --format=%B | grep -qxF "$signed" || { echo "$patch is not signed"; exit 1; }
  grep -q "^Subject: \[PATCH $n/$#\] " "$patch" || { echo "$patch is not $n of $#"; exit 1; }
  count=$(git apply --stat "$patch" | tail -n 1)
  grep -qxF -- "$count" "$patch" || { echo "$patch changes $count"; exit 1; }
  cmake --build ../build --target ibverbs rdmacm > ../said 2>&1 || { cat ../said; exit 1; }
  ! grep -E '/lib(ibverbs|rdmacm)/.*warning:' ../said || { echo "$patch is warned of"; exit 1; }
done
[ "$n" -gt 0 ]
"#;

/// The first patch is left out: its header is the specification's table in C, with its line ends
/// and shifts.
const CHECKPATCH: &str = r#"
perl "$1/scripts/checkpatch.pl" --no-tree --strict --terse --show-types --max-line-length=100 \
  --ignore FILE_PATH_CHANGES "$2"/000[2-9]*.patch
"#;

/// A few files of Debian's kernel source.
fn kernel_source(cache: &Cache) -> Result<PathBuf> {
    let archive = host::Archive::open(cache, &["trixie"])?;
    let found = archive.resolve(&["linux-source"])?;
    let package = found
        .iter()
        .find_map(|l| {
            let (name, version) = l.split_once(' ')?;
            let digit =
                name.strip_prefix("linux-source-")?.starts_with(|c: char| c.is_ascii_digit());
            digit.then(|| format!("{name}={version}"))
        })
        .context("no linux-source among the resolved packages")?;
    let inputs = format!("1\n{package}\n{}", KERNEL_FILES.join("\n"));
    cache
        .artefact("kernel-source", &inputs, |tmp| {
            let log = cache.log("kernel-source");
            archive.download(std::slice::from_ref(&package), tmp, &log)?;
            let mut script =
                String::from("cd \"$1\"\ndpkg-deb -x linux-source-*.deb deb\nmkdir tree\n");
            script.push_str(
                "tar -C tree --strip-components=1 --wildcards \
                 -xf deb/usr/src/linux-source-*.tar.xz",
            );
            for file in KERNEL_FILES {
                script.push_str(&format!(" '*/{file}'"));
            }
            script.push_str("\nrm -rf deb linux-source-*.deb\n");
            let mut cmd = tied("sh");
            run_logged(
                cmd.args(["-ec", &script, "sh"]).arg(tmp),
                "unpacking the kernel's source",
                &log,
                WAIT,
            )
        })
        .map(|dir| dir.join("tree"))
}

/// Makes a series from `source`, applies it, and gives the directory with patches and `tree`.
fn series(cache: &Cache, kind: &str, source: &Path) -> Result<PathBuf> {
    host::ensure_packages(cache, &["git", "perl"])?;
    let mut inputs = format!("1\n{}\n{APPLY}\n", source.display());
    for dir in [GUEST, "vhost-rdma/abi/include"] {
        inputs.push_str(&tree_digest(&workspace().join(dir), products::is_source)?);
    }
    let name = format!("series-{kind}");
    cache.artefact(&name, &inputs, |tmp| {
        let log = cache.log(&name);
        let script = workspace().join(GUEST).join("upstream/make-series.sh");
        let mut cmd = tied("sh");
        cmd.arg(&script).arg(kind).arg(source).arg(tmp);
        run_logged(&mut cmd, &format!("making the {kind} series"), &log, WAIT)?;
        let mut cmd = tied("sh");
        cmd.args(["-ec", APPLY, "sh"]).arg(source).arg(tmp.join("applied")).arg(tmp);
        run_logged(&mut cmd, &format!("applying the {kind} series"), &log, WAIT)?;
        fs::remove_dir_all(tmp.join("applied"))?;
        Ok(())
    })
}

/// Sparse over the driver as it is.
pub(crate) fn sparse(cache: &Cache) -> Result<()> {
    host::ensure_packages(cache, &["sparse"])?;
    let builder = roots::builder(cache, Debian::Trixie)?;
    let build = Build {
        name: "module-sparse",
        root: &builder.root,
        sources: products::MODULE_SOURCES,
        extra: &[Path::new("/usr/bin/sparse")],
        script: &SPARSE.replace("@ABI@", &builder.abi),
    };
    build.make(cache).map(|_| ())
}

/// smatch over the driver as it is.
pub(crate) fn smatch(cache: &Cache, dir: &Path) -> Result<()> {
    host::ensure_packages(cache, &["libsqlite3-0"])?;
    let builder = roots::builder(cache, Debian::Trixie)?;
    let parts = [dir.join("smatch"), dir.join("smatch_data"), SMATCH_LIBRARY.into()];
    let found: Result<Vec<PathBuf>, _> = parts.iter().map(|part| part.canonicalize()).collect();
    let found = found.with_context(|| format!("{} is no built smatch", dir.display()))?;
    // The library's name is that of a link.
    let extra = [found[0].as_path(), found[1].as_path(), parts[2].as_path()];
    let build = Build {
        name: "module-smatch",
        root: &builder.root,
        sources: products::MODULE_SOURCES,
        extra: &extra,
        script: &SMATCH.replace("@ABI@", &builder.abi),
    };
    build.make(cache).map(|_| ())
}

/// The kernel's series: made, applied, judged, compiled.
pub(crate) fn kernel(cache: &Cache) -> Result<()> {
    let source = kernel_source(cache)?;
    let made = series(cache, "kernel", &source)?;
    let mut cmd = tied("sh");
    cmd.args(["-ec", CHECKPATCH, "sh"]).arg(&source).arg(&made);
    run_logged(&mut cmd, "checkpatch --strict", &cache.log("checkpatch"), WAIT)?;
    let builder = roots::builder(cache, Debian::TrixieBackports)?;
    let build = Build {
        name: "module-upstream",
        root: &builder.root,
        sources: &[],
        extra: &[&made.join("tree")],
        script: &NEWEST.replace("@ABI@", &builder.abi),
    };
    build.make(cache).map(|_| ())
}

/// rdma-core's series: made and applied. The same files are compiled for every guest.
pub(crate) fn rdma_core(cache: &Cache) -> Result<()> {
    series(cache, "rdma-core", &rdma_core_source(cache)?).map(|_| ())
}

fn rdma_core_source(cache: &Cache) -> Result<PathBuf> {
    let builder = roots::builder(cache, Debian::Trixie)?;
    let source = builder.root.join(RDMA_CORE.trim_start_matches('/'));
    if !source.is_dir() {
        bail!("the builder has no rdma-core source");
    }
    Ok(source)
}

/// The series for processes: it is fit to be sent, and libraries are built of a newer rdma-core
/// with it.
pub(crate) fn processes(cache: &Cache) -> Result<()> {
    host::ensure_packages(cache, &["git"])?;
    host::ensure_packages(cache, &process::TOOLS)?;
    let source = rdma_core_source(cache)?;
    let patches = workspace().join("vhost-rdma/process/patches");
    let inputs = format!(
        "1\n{}\n{PROCESS}\n{}",
        source.display(),
        tree_digest(&patches, |name| name.ends_with(".patch"))?
    );
    let name = "series-process";
    cache.artefact(name, &inputs, |tmp| {
        let tree = tmp.join("tree");
        let mut cmd = tied("sh");
        cmd.args(["-ec", PROCESS, "sh"]).arg(&source).arg(&tree).arg(&patches);
        let log = cache.log(name);
        run_logged(&mut cmd, "applying and building the series for processes", &log, 3 * WAIT)?;
        for made in [tree, tmp.join("build")] {
            fs::remove_dir_all(made)?;
        }
        Ok(())
    })?;
    process::libraries_of(cache, process::NEXT).map(|_| ())
}
