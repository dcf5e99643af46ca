//! Mooncake's transfer engine, which moves the caches of language models between machines: a
//! program of another distribution. Its authors build it on one of Red Hat's (manylinux 2.28 is
//! AlmaLinux 8) and give it to Python's registry for any Linux; libibverbs is the only library of
//! rdma-core that it takes from where it runs. The container has Debian 12 around it.
//!
//! It falls back to TCP where no device pleases it, so what it says of its devices counts too.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use crate::cache::Cache;
use crate::host::Archive;
use crate::pip::Wheel;
use crate::roots::{self, Recipe, owned};

const WHEEL: Wheel = Wheel {
    name: "mooncake-transfer-engine-non-cuda",
    version: "0.3.13.post1",
    digest: "ca9f668a04ffe648b250fda28b97d0a7da149cb110dec5cf3d166a9e68afc940",
    platform: &["--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_28_x86_64"],
};
const SUITE: &str = "bookworm";
/// What it wants of its distribution, beside our libraries and what these want.
const PACKAGES: &[&str] = &["libcurl4", "libnl-3-200", "libnl-route-3-200", "libnuma1", "python3"];

pub(super) const PROGRAM: &str = "mooncake's transfer engine, as built for any Linux";

pub(super) const SCRIPT: &str = "export PYTHONPATH=/opt/mooncake
timeout 100 python3 /host/mooncake-check.py vhost_rdma0 vhost_rdma1 > /tmp/said 2>&1 ||
  { cat /tmp/said >&2; exit 1; }
for device in vhost_rdma0 vhost_rdma1; do grep -q \"RDMA device: $device\" /tmp/said; done
[ $(grep -c '^ok' /tmp/said) -eq 6 ] && ! grep -q TcpTransport /tmp/said
";

/// A file system with it.
pub(super) fn root(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    let requirement = WHEEL.requirement();
    let inputs = format!("1\n{}\n{requirement}", archive.resolve(PACKAGES)?.join("\n"));
    let name = "process-mooncake";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return root(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let (packages, root) = (owned(PACKAGES), tmp.join("root"));
        let recipe = Recipe { name, suite: SUITE, variant: "apt", packages: &packages };
        roots::mmdebstrap(cache, &archive, &recipe, &root)?;
        WHEEL.unpack(cache, &root.join("opt/mooncake"))?;
        Ok(fs::create_dir_all(root.join("host"))?)
    })?;
    Ok(dir.join("root"))
}
