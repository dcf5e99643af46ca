//! libfabric's own tests, as Debian's source package of libfabric has them: no package ships them.
//!
//! They are compiled in the builder for what a guest installs: against the library of that very
//! release, without autoconf, whose answers would all be the same (no GPU, no valgrind). Nothing is
//! linked that is not used here.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec::{run_logged, tied};
use crate::host::Archive;
use crate::products::Build;
use crate::roots::{self, Debian};

const WAIT: Duration = Duration::from_secs(120);

/// The tests, by their directory in the source. A guest gets them as `fi_NAME`.
const TESTS: &str = "benchmarks/msg_pingpong benchmarks/rdm_pingpong \
    benchmarks/rdm_tagged_pingpong benchmarks/rma_pingpong functional/rdm \
    functional/rdm_atomic functional/cq_data";

const UNPACK: &str = "
cd \"$1\"
tar -xf libfabric_*.orig.tar.* --strip-components=1 --wildcards '*/fabtests' '*/include'
dpkg-deb -x libfabric1_*.deb .
rm libfabric*
";

const COMPILE: &str = "
cd tree
library=$(echo usr/lib/*/libfabric.so.1)
touch fabtests/config.h
flags='-std=gnu11 -O2 -D_GNU_SOURCE -DHAVE_CONFIG_H -DHAVE_CLOCK_GETTIME=1 -DHAVE_EPOLL=1
  -DHAVE___INT128=1 -DPACKAGE_VERSION=\"debian\" -Ifabtests -Ifabtests/include
  -Ifabtests/include/unix -Iinclude'
for f in common/shared common/hmem common/hmem_cuda common/hmem_rocr common/hmem_neuron \
    common/hmem_ze common/hmem_synapseai common/ofi_atomic benchmarks/benchmark_shared; do
  gcc $flags -c fabtests/$f.c -o $(basename $f).o
done
for f in @TESTS@; do
  gcc $flags -o /work/fi_$(basename $f) fabtests/$f.c *.o $library \
    -Wl,--unresolved-symbols=ignore-in-shared-libs -lpthread
done
";

/// The programs, for guests of Debian 13.
pub(crate) fn programs(cache: &Cache) -> Result<Vec<PathBuf>> {
    let builder = roots::builder(cache, Debian::Trixie)?;
    let archive = Archive::open(cache, &["trixie"])?;
    // The tests are upstream's: Debian's part changes the packages only.
    let mut source = archive.source_files("libfabric")?;
    source.retain(|file| file.name.contains(".orig."));
    let resolved = archive.resolve(&["libfabric1"])?;
    let library = resolved.iter().find_map(|l| l.strip_prefix("libfabric1 "));
    let library = library.context("libfabric1 does not resolve to itself")?;
    let mut inputs = format!("1\n{UNPACK}\nlibfabric1={library}\n");
    for file in &source {
        inputs.push_str(&format!("{} {}\n", file.name, file.checksum));
    }
    let tree = cache.artefact("fabtests-source", &inputs, |tmp| {
        let log = cache.log("fabtests-source");
        let tree = tmp.join("tree");
        fs::create_dir_all(&tree)?;
        archive.download_source(&source, &tree, &log)?;
        archive.download(&[format!("libfabric1={library}")], &tree, &log)?;
        let mut unpack = tied("sh");
        run_logged(unpack.args(["-ec", UNPACK, "sh"]).arg(&tree), "unpacking libfabric", &log, WAIT)
    })?;
    let script = COMPILE.replace("@TESTS@", TESTS);
    let extra = [tree.join("tree")];
    let extra: Vec<_> = extra.iter().map(PathBuf::as_path).collect();
    let build = Build {
        name: "fabtests",
        root: &builder.root,
        sources: &[],
        extra: &extra,
        script: &script,
    };
    let dir = build.make(cache)?;
    let name = |test: &str| format!("fi_{}", test.rsplit('/').next().unwrap_or(test));
    Ok(TESTS.split_whitespace().map(|test| dir.join(name(test))).collect())
}
