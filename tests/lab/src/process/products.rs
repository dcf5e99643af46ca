//! What NICs for processes need: the daemon, and the libraries, built on this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::symbols::newest_glibc;
use crate::cache::{Cache, tree_digest};
use crate::exec::{run_logged, tied, workspace};
use crate::host::{self, Archive};
use crate::products::{Build, is_source, programs_of};
use crate::roots::{self, Debian};

const BUILD_WAIT: Duration = Duration::from_secs(600);
/// What the libraries are built with (vhost-rdma/process/build.sh).
pub(crate) const TOOLS: [&str; 7] =
    ["cmake", "make", "patch", "pkg-config", "python3", "libnl-3-dev", "libnl-route-3-dev"];
/// Upstream's files: a distribution's own are for its packages.
const UNPACK: &str = "cd \"$1\"; mkdir tree
tar -xf rdma-core_*.orig.tar.* -C tree --strip-components=1";

/// The release whose rdma-core they are made of: with the private ABI of Debian 12 and 13.
const SUITE: &str = "trixie";
/// The C library of the oldest release whose programs they serve, Debian 12's.
pub(crate) const OLDEST_GLIBC: (u32, u32) = (2, 36);
/// The same in a builder of that release, from the tarball.
const IN_BUILDER: &str = "
mkdir tree out
tar -xf rdma-core_*.orig.tar.* -C tree --strip-components=1
sh vhost-rdma/process/build.sh /work/tree /work/out
mv out/lib lib
rm -rf out
";
/// Debian 11, the oldest release on which they can be built.
pub(crate) const OLD: &str = "bullseye";
/// Debian's next release, whose rdma-core (65) has another.
pub(crate) const NEXT: &str = "forky";

/// The folder with our libraries, for programs of this machine. Root, who makes containers of other
/// releases, gets some that the oldest of these can load too.
pub(crate) fn libraries(cache: &Cache) -> Result<PathBuf> {
    let here = libraries_of(cache, SUITE)?;
    if host::require_root().is_err() || can_load(&here, OLDEST_GLIBC)? {
        return Ok(here);
    }
    let builder = roots::builder(cache, Debian::Bookworm)?;
    built_in(cache, ("process-libraries-oldest", &builder.root), &here)
}

/// The same for programs of [`OLD`].
pub(crate) fn old_libraries(cache: &Cache) -> Result<PathBuf> {
    let here = libraries_of(cache, SUITE)?;
    built_in(cache, ("process-libraries-old", &old_builder(cache)?), &here)
}

/// Our programs for processes, for [`OLD`].
pub(crate) fn old_programs(cache: &Cache) -> Result<Vec<PathBuf>> {
    programs_of(cache, ("programs-old", &old_builder(cache)?), "process-*")
}

fn old_builder(cache: &Cache) -> Result<PathBuf> {
    let open = || Archive::open(cache, &[OLD]);
    let packages = [&TOOLS[..], &["gcc", "libc6-dev", "libibverbs-dev", "librdmacm-dev"]].concat();
    roots::folder(cache, ("process-old-builder", OLD), &packages, &open)
}

/// The libraries that are `here`, built anew in a root.
fn built_in(cache: &Cache, (name, root): (&str, &Path), here: &Path) -> Result<PathBuf> {
    let made = here.parent().context("the libraries are in a folder of the cache")?;
    let tarball = fs::read_dir(made)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.to_string_lossy().contains(".orig.tar."))
        .context("the source of rdma-core is beside its libraries")?;
    let build = Build {
        name,
        root,
        sources: &["vhost-rdma/process", "vhost-rdma/guest", "vhost-rdma/abi"],
        extra: &[&tarball],
        script: IN_BUILDER,
    };
    Ok(build.make(cache)?.join("lib"))
}

/// Whether programs with this C library can load all of them.
fn can_load(libraries: &Path, glibc: (u32, u32)) -> Result<bool> {
    for entry in fs::read_dir(libraries)? {
        if newest_glibc(&entry?.path())? > Some(glibc) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The same of another release's rdma-core, with its private ABI.
pub(crate) fn libraries_of(cache: &Cache, suite: &str) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[suite])?;
    let mut source = archive.source_files("rdma-core")?;
    source.retain(|file| file.name.contains(".orig.tar."));
    ensure!(!source.is_empty(), "{suite} has no rdma-core as upstream has it");
    let mut inputs = format!("1\n{UNPACK}\n");
    for file in &source {
        inputs.push_str(&format!("{} {}\n", file.name, file.checksum));
    }
    let shared: fn(&str) -> bool = |name| name == "qp_attr.h";
    for (part, counts) in [
        ("process", is_source as fn(&str) -> bool),
        ("guest/provider", is_source),
        ("guest/include", is_source),
        ("guest/kernel", shared),
        ("abi/include", is_source),
    ] {
        let dir = workspace().join("vhost-rdma").join(part);
        inputs.push_str(&format!("{part} {}\n", tree_digest(&dir, counts)?));
    }
    let name = match suite {
        SUITE => "process-libraries".to_owned(),
        other => format!("process-libraries-{other}"),
    };
    let made = cache.artefact(&name, &inputs, |tmp| {
        host::ensure_packages(cache, &TOOLS)?;
        let log = cache.log(&name);
        archive.download_source(&source, tmp, &log)?;
        let mut unpack = tied("sh");
        unpack.args(["-ec", UNPACK, "sh"]).arg(tmp);
        run_logged(&mut unpack, "unpacking rdma-core", &log, BUILD_WAIT)?;
        let mut build = tied("sh");
        build.arg(workspace().join("vhost-rdma/process/build.sh"));
        build.arg(tmp.join("tree")).arg(tmp.join("out"));
        run_logged(&mut build, "building libibverbs", &log, BUILD_WAIT)?;
        fs::rename(tmp.join("out/lib"), tmp.join("lib"))?;
        for rest in ["tree", "out"] {
            fs::remove_dir_all(tmp.join(rest))?;
        }
        Ok(())
    })?;
    Ok(made.join("lib"))
}

/// The daemon, optimised or not.
pub(crate) fn daemon(cache: &Cache, debug: bool) -> Result<PathBuf> {
    let mut build = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.current_dir(workspace()).args(["build", "--locked", "-p", "vhost-rdma"]);
    if !debug {
        build.arg("--release");
    }
    run_logged(&mut build, "building the daemon", &cache.log("try-build"), 2 * BUILD_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    Ok(target.join(if debug { "debug" } else { "release" }).join("vhost-rdma"))
}
