//! What the node in the VM consists of, and the images of its pods.
//!
//! Debian 13's containerd is 1.7: new enough for the CDI field of CRI, old enough for the CRI
//! version of our kubelet. The guest image has neither it nor runc; their packages are unpacked
//! beside it, and the guest lays them over its own `/usr`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec::{run_logged, tied, workspace};
use crate::host::Archive;
use crate::k8s::image::Image;
use crate::k8s::parts::servers;
use crate::roots::Debian;

const SUITE: &str = "trixie";
const BUILD_WAIT: Duration = Duration::from_secs(1800);
const STEP_WAIT: Duration = Duration::from_secs(120);

/// What the guest lacks; its own libraries serve for the rest.
const TOOLS: &[&str] = &["containerd", "containernetworking-plugins", "libseccomp2", "runc"];

/// The root file system of a pod with verbs.
const POD: &[&str] = &[
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "libc6",
    "libibverbs1",
    "libnl-3-200",
    "libnl-route-3-200",
    "librdmacm1t64",
];

/// The image of every pod's first container, as kubelet and containerd call it.
pub(super) const PAUSE: &str = "localhost/pause:lab";
/// The image with `ibv_devinfo` and `ibv_rc_pingpong`.
pub(super) const VERBS: &str = "localhost/verbs:lab";

/// What goes into the guest's share.
#[derive(Debug)]
pub(super) struct Parts {
    /// Packages below `usr`, as a tar file.
    tools: PathBuf,
    /// The root of pods.
    pod: PathBuf,
    kubelet: PathBuf,
    /// What opens a function in a pod.
    vfio: PathBuf,
    /// Programs of this workspace.
    ours: Vec<PathBuf>,
}

impl Parts {
    pub(super) fn prepare(cache: &Cache) -> Result<Self> {
        let ours = build(cache)?;
        let programs = crate::products::programs(cache, Debian::Trixie)?;
        let vfio = programs.into_iter().find(|path| path.ends_with("vrdma-vfio"));
        let vfio = vfio.context("tests/guest-programs has no vrdma-vfio")?;
        let packages = packages(cache)?;
        let kubelet = servers(cache)?.join("kubelet");
        Ok(Self {
            tools: packages.join("tools.tar"),
            pod: packages.join("pod"),
            kubelet,
            vfio,
            ours,
        })
    }

    /// Puts all of it into the share of a guest; `images` there has the images.
    pub(super) fn deliver(&self, share: &Path) -> Result<()> {
        let to = share.join("products");
        fs::create_dir_all(&to)?;
        for file in self.ours.iter().chain([&self.tools, &self.kubelet]) {
            let name = file.file_name().context("a product has a name")?;
            fs::copy(file, to.join(name))
                .with_context(|| format!("cannot copy {}", file.display()))?;
        }
        let images = share.join("images");
        fs::create_dir_all(&images)?;
        Image::with_busybox(&self.pod)
            .entry(&["/bin/sleep", "1000000000"])
            .write(PAUSE, &images.join("pause.tar"))?;
        Image::on_root(&self.pod)
            .file(&self.vfio, "usr/bin/vrdma-vfio")
            .entry(&["/bin/sh"])
            .write(VERBS, &images.join("verbs.tar"))
    }
}

/// Debug builds: what is tested here is behaviour.
fn build(cache: &Cache) -> Result<Vec<PathBuf>> {
    const PROGRAMS: [&str; 3] = ["vhost-rdma", "vhost-rdma-agent", "vhost-rdma-cni"];
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace()).args(["build", "--locked", "--bins", "--example", "cri-pod"]);
    for package in PROGRAMS {
        cmd.args(["-p", package]);
    }
    run_logged(&mut cmd, "building the node's programs", &cache.log("pods-build"), BUILD_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from)
        .join("debug");
    let mut files: Vec<PathBuf> = PROGRAMS.iter().map(|program| target.join(program)).collect();
    files.push(target.join("examples/cri-pod"));
    Ok(files)
}

fn packages(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &[SUITE])?;
    let wanted: Vec<&str> = TOOLS.iter().chain(POD).copied().collect();
    let versions: Vec<String> = archive
        .resolve(&wanted)?
        .iter()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| wanted.contains(name))
        .map(|(name, version)| format!("{name}={version}"))
        .collect();
    let inputs = format!("1\n{}\n{MERGE}", versions.join("\n"));
    let name = "pods-packages";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return packages(cache);
    }
    cache.artefact(name, &inputs, |tmp| {
        let log = cache.log(name);
        for (dir, names) in [("tools", TOOLS), ("pod", POD)] {
            let (debs, tree) = (tmp.join("debs"), tmp.join(dir));
            fs::create_dir_all(&debs)?;
            fs::create_dir_all(&tree)?;
            let of_these = |package: &&String| {
                package.split_once('=').is_some_and(|(name, _)| names.contains(&name))
            };
            let list: Vec<String> = versions.iter().filter(of_these).cloned().collect();
            archive.download(&list, &debs, &log)?;
            for deb in fs::read_dir(&debs)? {
                let mut cmd = tied("dpkg-deb");
                cmd.arg("-x").arg(deb?.path()).arg(&tree);
                run_logged(&mut cmd, "unpacking a package", &log, STEP_WAIT)?;
            }
            fs::remove_dir_all(&debs)?;
        }
        let mut cmd = tied("sh");
        cmd.args(["-ec", MERGE, "sh"]).arg(tmp);
        run_logged(&mut cmd, "packing the node's programs", &log, STEP_WAIT)
    })
}

/// `$1` has the trees. The links of a merged `/usr` are base-files', which a pod does not need
/// otherwise.
const MERGE: &str = r#"
cd "$1/pod"
for d in bin sbin lib lib64; do [ -e $d ] || ln -s usr/$d $d; done
for a in cat env id ip ls ping sh sleep stat; do [ -e usr/bin/$a ] || ln -s busybox usr/bin/$a; done
rm -rf usr/share usr/lib/x86_64-linux-gnu/gconv
cd "$1"
rm -rf tools/usr/share
tar -cf tools.tar -C tools usr
rm -rf tools
"#;
