//! The file systems of the lab, made from Debian packages: a QEMU to run, guests to boot, and
//! builders for what goes into the guests.
//!
//! Each is keyed by the versions that its packages resolve to and by the text of its recipe. The
//! recipe texts are constants here, so a change of a script below makes a new artefact by itself.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::exec::{capture, run_logged, tied, tied_private_mounts};
use crate::host::{self, Archive};

const ROOT_WAIT: Duration = Duration::from_secs(900);
const STEP_WAIT: Duration = Duration::from_secs(300);

/// A Debian release with one of its kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Debian {
    /// Debian 12, kernel 6.1.
    Bookworm,
    /// Debian 13, kernel 6.12.
    #[default]
    Trixie,
    /// Debian 13 with the newest kernel of trixie-backports.
    TrixieBackports,
}

impl Debian {
    pub(crate) const ALL: [Self; 3] = [Self::Bookworm, Self::Trixie, Self::TrixieBackports];

    /// What the release and its kernel are called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::TrixieBackports => "trixie-backports",
        }
    }

    pub(crate) fn suite(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie | Self::TrixieBackports => "trixie",
        }
    }

    fn archive(self, cache: &Cache) -> Result<Archive> {
        match self {
            Self::Bookworm => Archive::open(cache, &["bookworm"]),
            Self::Trixie => Archive::open(cache, &["trixie"]),
            Self::TrixieBackports => Archive::open(cache, &["trixie", "trixie-backports"]),
        }
    }
}

/// What the guests run. Nothing of ours is in it: module, provider and programs come through the
/// share.
const GUEST_PACKAGES: &[&str] = &[
    "busybox-static",
    "e2fsprogs",
    "fio",
    "ibverbs-providers",
    "ibverbs-utils",
    "infiniband-diags",
    "iproute2",
    "iputils-ping",
    "kmod",
    "libfabric-bin",
    "mount",
    "nfs-kernel-server",
    "nvme-cli",
    "open-iscsi",
    "openmpi-bin",
    "perftest",
    "procps",
    "python3-mpi4py",
    "python3-pyverbs",
    "qperf",
    "rdmacm-utils",
    "strace",
    "ucx-utils",
    "util-linux",
];

const BUILDER_PACKAGES: &[&str] = &[
    "build-essential",
    "cmake",
    "cpio",
    "libibverbs-dev",
    "libnl-3-dev",
    "libnl-route-3-dev",
    "librdmacm-dev",
    "ninja-build",
    "pkg-config",
    "python3-minimal",
    "xz-utils",
];

/// The tarballs that Debian publishes, put together as dpkg-source would.
const UNPACK_RDMA_CORE: &str = r#"
cd "$1"
mkdir rdma-core
tar -xf rdma-core_*.orig.tar.* -C rdma-core --strip-components=1
tar -xf rdma-core_*.debian.tar.* -C rdma-core
cd rdma-core
if [ -e debian/patches/series ]; then
  grep -v '^#' debian/patches/series | while read -r p; do
    [ -z "$p" ] || patch -p1 -s < "debian/patches/$p"
  done
fi
"#;

/// Modules that must be there before the root file system is.
const BOOT_MODULES: &[&str] =
    &["virtio_pci", "virtio_blk", "crc32c_generic", "crc32c-cryptoapi", "ext4"];

const INITRAMFS_INIT: &str = r"#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
for m in /m/*.ko; do $b insmod $m || echo initramfs: insmod $m failed; done
n=0
while [ ! -b /dev/vda ] && [ $n -lt 100 ]; do $b sleep 0.1; n=$((n+1)); done
$b mount -t ext4 /dev/vda /root || { echo initramfs: no root file system; exec $b poweroff -f; }
$b mount -o move /dev /root/dev
exec $b switch_root /root /lab/init
";

/// The guest's first process. Commands are files in the share; the second serial port only carries
/// `run N`, `kill N` and the answers, so output of any size and several commands at once do not
/// disturb each other. `/usr/bin/kill`, since dash's own takes `--` for a number.
const GUEST_INIT: &str = r#"#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb \
  LC_ALL=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
modprobe -a virtio_net 9pnet_virtio 9p
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 host /host ||
  { echo lab: no share; busybox poweroff -f; }
for w in $(cat /proc/cmdline); do
  case $w in lab.name=*) hostname ${w#lab.name=};; lab.ip=*) ip=${w#lab.ip=};; esac
done
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then
  echo 0 > /proc/sys/net/ipv6/conf/eth0/accept_dad
  ip link set eth0 up
  ip addr add 10.9.0.$ip/24 dev eth0
  ip -6 addr add fd00:9::$ip/64 dev eth0 nodad
fi
ulimit -l unlimited
ulimit -c 0
stty -F /dev/ttyS1 raw -echo
exec 3<>/dev/ttyS1
echo ready >&3
while read -r verb id rest <&3; do
  case $verb in
  run) ( setsid -w sh -c 'echo $$ > /run/$0.pid; exec sh /host/cmd/$0.sh' $id \
      > /host/cmd/$id.out 2>&1 < /dev/null; echo "done $id $?" >&3 ) & ;;
  kill) read -r pid < /run/$id.pid; /usr/bin/kill -9 -- -$pid ;;
  off) sync; busybox poweroff -f ;;
  esac
done
"#;

/// A root to be made.
pub(crate) struct Recipe<'a> {
    /// Names the log.
    pub(crate) name: &'a str,
    pub(crate) suite: &'a str,
    pub(crate) variant: &'a str,
    pub(crate) packages: &'a [String],
}

pub(crate) fn mmdebstrap(
    cache: &Cache,
    archive: &Archive,
    recipe: &Recipe<'_>,
    root: &Path,
) -> Result<()> {
    // Whoever comes here first on a new machine finds nothing of it.
    host::ensure_tools(cache)?;
    let Recipe { name, suite, variant, packages } = recipe;
    let mut cmd = tied_private_mounts("mmdebstrap");
    cmd.arg("--mode=root").arg(format!("--variant={variant}")).args(archive.mmdebstrap_options());
    cmd.args([
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
    ]);
    cmd.arg(format!("--include={}", packages.join(","))).arg(suite).arg(root).args(&archive.lines);
    run_logged(
        &mut cmd,
        &format!("making the {name} root ({suite}, mmdebstrap)"),
        &cache.log(name),
        ROOT_WAIT,
    )
}

pub(crate) fn owned(packages: &[&str]) -> Vec<String> {
    packages.iter().map(|p| (*p).to_owned()).collect()
}

/// A root of these packages as a folder: one for programs, with an empty `/host`, or one that
/// compiles in `/work`. `open` finds its archive.
pub(crate) fn folder(
    cache: &Cache,
    (name, suite): (&str, &str),
    packages: &[&str],
    open: &dyn Fn() -> Result<Archive>,
) -> Result<PathBuf> {
    let archive = open()?;
    let inputs = format!("2\n{}\n", archive.resolve(packages)?.join("\n"));
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return folder(cache, (name, suite), packages, open);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let root = tmp.join("root");
        let recipe = Recipe { name, suite, variant: "apt", packages: &owned(packages) };
        mmdebstrap(cache, &archive, &recipe, &root)?;
        for place in ["host", "work"] {
            fs::create_dir_all(root.join(place))?;
        }
        Ok(())
    })?;
    Ok(dir.join("root"))
}

/// A root with QEMU of trixie-backports: stock Debian 12 and 13 are too old for the generic
/// vhost-user device.
pub(crate) fn qemu(cache: &Cache) -> Result<PathBuf> {
    let archive = Archive::open(cache, &["trixie", "trixie-backports"])?;
    let inputs = format!("1\n{}", archive.resolve(&["qemu-system-x86"])?.join("\n"));
    if !cache.has("qemu", &inputs) && archive.renew(cache)? {
        return qemu(cache);
    }
    let dir = cache.artefact("qemu", &inputs, |tmp| {
        let root = tmp.join("root");
        mmdebstrap(
            cache,
            &archive,
            &Recipe {
                name: "qemu",
                suite: "trixie",
                variant: "minbase",
                packages: &owned(&["qemu-system-x86"]),
            },
            &root,
        )?;
        let mut cmd = tied("chroot");
        cmd.arg(&root).args(["qemu-system-x86_64", "-device", "vhost-user-test-device-pci,help"]);
        capture(&mut cmd, STEP_WAIT)
            .context("this QEMU has no vhost-user-test-device-pci; QEMU 10.2 or newer is needed")?;
        Ok(())
    })?;
    Ok(dir.join("root"))
}

/// A bootable guest.
#[derive(Debug, Clone)]
pub(crate) struct GuestImage {
    pub(crate) dir: PathBuf,
    /// The kernel's ABI name, as `uname -r` says it.
    pub(crate) abi: String,
}

/// The packages of `resolved` that hold a kernel, as `name=version`.
fn kernel_packages(resolved: &[String]) -> Vec<String> {
    resolved
        .iter()
        .filter_map(|l| {
            let (name, version) = l.split_once(' ')?;
            let tail = ["linux-image-", "linux-binary-", "linux-modules-"]
                .iter()
                .find_map(|p| name.strip_prefix(p))?;
            tail.starts_with(|c: char| c.is_ascii_digit()).then(|| format!("{name}={version}"))
        })
        .collect()
}

fn kernel_abi(kernels: &[String]) -> Result<String> {
    kernels
        .iter()
        .find_map(|p| {
            p.strip_prefix("linux-image-")?.split_once('=').map(|(abi, _)| abi.to_owned())
        })
        .context("no kernel among the resolved packages")
}

/// The guest image of a release with its kernel.
pub(crate) fn guest(cache: &Cache, debian: Debian) -> Result<GuestImage> {
    image(cache, debian, "guest", &[])
}

/// A machine of a release on which the lab runs: it has what [`host::ensure_tools`] would fetch.
pub(crate) fn lab_machine(cache: &Cache, debian: Debian) -> Result<GuestImage> {
    let mut tools: Vec<&str> = host::tools().collect();
    tools.sort_unstable();
    tools.dedup();
    image(cache, debian, "lab-machine", &tools)
}

fn image(cache: &Cache, debian: Debian, kind: &str, more: &[&str]) -> Result<GuestImage> {
    let packages = [GUEST_PACKAGES, more].concat();
    let archive = debian.archive(cache)?;
    let kernels = kernel_packages(&archive.resolve(&["linux-image-amd64"])?);
    let abi = kernel_abi(&kernels)?;
    let inputs = format!(
        "2\n{}\n{}\n{INITRAMFS_INIT}\n{GUEST_INIT}\n{}",
        kernels.join("\n"),
        archive.resolve(&packages)?.join("\n"),
        BOOT_MODULES.join(" ")
    );
    let name = format!("{kind}-{}", debian.name());
    if !cache.has(&name, &inputs) && archive.renew(cache)? {
        return image(cache, debian, kind, more);
    }
    let dir = cache.artefact(&name, &inputs, |tmp| {
        let root = tmp.join("root");
        let log = cache.log(&name);
        mmdebstrap(
            cache,
            &archive,
            &Recipe {
                name: &name,
                suite: debian.suite(),
                variant: "apt",
                packages: &owned(&packages),
            },
            &root,
        )?;
        unpack_kernel(&archive, &kernels, &abi, &root, tmp, &log)?;
        write_script(&root.join("lab/init"), GUEST_INIT)?;
        fs::create_dir_all(root.join("host"))?;
        initramfs(&root, &abi, tmp, &log)?;
        for junk in ["var/lib/apt/lists", "var/cache/apt", "usr/share/info"] {
            let _ = fs::remove_dir_all(root.join(junk));
        }
        let image = tmp.join("root.img");
        let size = if more.is_empty() { "2G" } else { "4G" };
        let mut cmd = tied("mke2fs");
        cmd.args(["-q", "-t", "ext4", "-O", "^has_journal", "-F", "-d"])
            .arg(&root)
            .arg(&image)
            .arg(size);
        run_logged(&mut cmd, "making the guest image (mke2fs)", &log, STEP_WAIT)?;
        fs::remove_dir_all(&root)?;
        Ok(())
    })?;
    Ok(GuestImage { dir, abi })
}

/// Puts the modules into the root and the kernel beside it. The packages are unpacked elsewhere
/// first: `dpkg-deb -x` of a package that ships `/lib` as a directory onto a merged-/usr root would
/// replace the symlink; and installing them would make an initrd that nobody boots.
fn unpack_kernel(
    archive: &Archive,
    kernels: &[String],
    abi: &str,
    root: &Path,
    tmp: &Path,
    log: &Path,
) -> Result<()> {
    let debs = tmp.join("debs");
    let tree = tmp.join("kernel");
    fs::create_dir_all(&debs)?;
    fs::create_dir_all(&tree)?;
    archive.download(kernels, &debs, log)?;
    for deb in fs::read_dir(&debs)? {
        run_logged(
            tied("dpkg-deb").arg("-x").arg(deb?.path()).arg(&tree),
            "unpacking a kernel package",
            log,
            STEP_WAIT,
        )?;
    }
    let modules = ["usr/lib/modules", "lib/modules"]
        .iter()
        .map(|d| tree.join(d).join(abi))
        .find(|d| d.join("kernel").exists());
    let modules = modules.with_context(|| format!("no modules of {abi} in the kernel packages"))?;
    let image = [tree.join(format!("boot/vmlinuz-{abi}")), modules.join("vmlinuz")]
        .into_iter()
        .find(|f| f.exists());
    fs::copy(image.context("no vmlinuz in the kernel packages")?, tmp.join("vmlinuz"))?;
    let to = root.join("usr/lib/modules");
    fs::create_dir_all(&to)?;
    fs::rename(&modules, to.join(abi))?;
    run_logged(tied("chroot").arg(root).args(["depmod", abi]), "depmod", log, STEP_WAIT)?;
    fs::remove_dir_all(&debs)?;
    fs::remove_dir_all(&tree)?;
    Ok(())
}

pub(crate) fn write_script(path: &Path, text: &str) -> Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// A busybox, the modules of the root disk in load order, and ten lines of script: 1 MB, a second
/// to unpack under TCG.
fn initramfs(root: &Path, abi: &str, tmp: &Path, log: &Path) -> Result<()> {
    let tree = tmp.join("initramfs");
    for dir in ["bin", "dev", "root", "m"] {
        fs::create_dir_all(tree.join(dir))?;
    }
    fs::copy(root.join("usr/bin/busybox"), tree.join("bin/busybox"))?;
    write_script(&tree.join("init"), INITRAMFS_INIT)?;
    let mut loaded: Vec<String> = Vec::new();
    for module in BOOT_MODULES {
        let mut cmd = tied("chroot");
        cmd.arg(root).args(["modprobe", "-S", abi, "--show-depends", module]);
        // Which of these are modules, built in or absent differs between the kernels.
        let Ok(text) = capture(&mut cmd, STEP_WAIT) else { continue };
        for path in text.lines().filter_map(|l| l.strip_prefix("insmod ")).map(str::trim) {
            if !loaded.iter().any(|p| p == path) {
                loaded.push(path.to_owned());
            }
        }
    }
    if !loaded.iter().any(|p| p.contains("ext4")) {
        bail!("no ext4 module of {abi} found");
    }
    for (n, path) in loaded.iter().enumerate() {
        let from = root.join(path.trim_start_matches('/'));
        let to = tree.join(format!("m/{n:02}.ko"));
        if path.ends_with(".xz") {
            let mut cmd = tied("xz");
            cmd.arg("-dc").arg(&from).stdout(fs::File::create(&to)?).stderr(Stdio::null());
            if !cmd.status()?.success() {
                bail!("xz -dc {} failed", from.display());
            }
        } else {
            fs::copy(&from, &to)?;
        }
    }
    pack_initramfs(&tree, &tmp.join("initrd.gz"), log)
}

/// Packs `tree`, which goes.
pub(crate) fn pack_initramfs(tree: &Path, to: &Path, log: &Path) -> Result<()> {
    let script = "cd \"$1\" && find . | cpio -o -H newc --quiet -R 0:0 | gzip -1 > \"$2\"";
    let mut cmd = tied("sh");
    cmd.args(["-ec", script, "sh"]).arg(tree).arg(to);
    run_logged(&mut cmd, "packing the initramfs", log, STEP_WAIT)?;
    fs::remove_dir_all(tree)?;
    Ok(())
}

/// A root with compilers, kernel headers and, where a provider is built, the distribution's
/// rdma-core source.
#[derive(Debug, Clone)]
pub(crate) struct Builder {
    pub(crate) root: PathBuf,
    /// ABI name of the kernel whose headers are in it.
    pub(crate) abi: String,
}

/// Where the rdma-core source is in a builder that has one.
pub(crate) const RDMA_CORE: &str = "/src/rdma-core";

/// The builder of a release. Trixie's own and its backports' headers live in one root each, so that
/// neither resolution can move the other.
pub(crate) fn builder(cache: &Cache, debian: Debian) -> Result<Builder> {
    let archive = debian.archive(cache)?;
    let kernels = archive.resolve(&["linux-headers-amd64"])?;
    let abi = kernels
        .iter()
        .filter_map(|l| l.strip_prefix("linux-headers-")?.split_once(' '))
        .map(|(name, _)| name)
        .find(|n| n.starts_with(|c: char| c.is_ascii_digit()) && n.ends_with("-amd64"))
        .context("no kernel headers among the resolved packages")?
        .to_owned();
    let mut packages = owned(BUILDER_PACKAGES);
    packages.push("linux-headers-amd64".into());
    let names: Vec<&str> = packages.iter().map(String::as_str).collect();
    let mut inputs = format!("4\n{}\n{UNPACK_RDMA_CORE}\n", archive.resolve(&names)?.join("\n"));
    // One provider serves Debian 12 and 13 (both have private ABI 34), so only Debian 13's source
    // is needed.
    let source =
        if debian == Debian::Trixie { archive.source_files("rdma-core")? } else { Vec::new() };
    for file in &source {
        inputs.push_str(&format!("{} {}\n", file.name, file.checksum));
    }
    let name = format!("builder-{}", debian.name());
    if !cache.has(&name, &inputs) && archive.renew(cache)? {
        return builder(cache, debian);
    }
    let dir = cache.artefact(&name, &inputs, |tmp| {
        let root = tmp.join("root");
        mmdebstrap(
            cache,
            &archive,
            &Recipe { name: &name, suite: debian.suite(), variant: "apt", packages: &packages },
            &root,
        )?;
        // A link into the root, absolute in some releases: what it points to is not the host's.
        if fs::symlink_metadata(root.join(format!("usr/lib/modules/{abi}/build"))).is_err() {
            bail!(
                "the archive changed while the {name} root was made: no headers of {abi}; run it \
                 again"
            );
        }
        for dir in ["work", "src"] {
            fs::create_dir_all(root.join(dir))?;
        }
        if !source.is_empty() {
            let log = cache.log(&name);
            archive.download_source(&source, &root.join("src"), &log)?;
            run_logged(
                tied("sh").args(["-ec", UNPACK_RDMA_CORE, "sh"]).arg(root.join("src")),
                "unpacking rdma-core",
                &log,
                STEP_WAIT,
            )?;
        }
        Ok(())
    })?;
    Ok(Builder { root: dir.join("root"), abi })
}
