//! A kernel that looks for faults: Debian 13's source with KASAN, lockdep, kmemleak, object
//! debugging and fault injection (`debug-kernel.config`), small enough to be compiled on two cores
//! in less than an hour.
//!
//! It boots Debian 13's guest image as it is: its few modules come in the initramfs and are laid
//! over the image's. The compiled tree stays in the builder, for the driver to be compiled against.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec::{run_logged, tied, tied_private_mounts};
use crate::host::Archive;
use crate::roots::{self, Builder, Debian, GuestImage, Recipe};

/// Hours on a machine that does twenty other things.
const BUILD_WAIT: Duration = Duration::from_secs(3 * 3600);
const STEP_WAIT: Duration = Duration::from_secs(300);

/// The kernel of a scenario's guests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Kernel {
    /// The release's own.
    #[default]
    Release,
    /// Debian 13's with everything that looks for faults.
    Debug,
}

/// How much longer everything takes in a guest with this kernel.
pub(crate) const PATIENCE: u32 = 8;

const CONFIG: &str = include_str!("debug-kernel.config");

const PACKAGES: &[&str] = &[
    "bc",
    "bison",
    "build-essential",
    "busybox-static",
    "cpio",
    "flex",
    "kmod",
    "libelf-dev",
    "linux-source",
    "python3-minimal",
    "xz-utils",
];

/// Where the compiled tree is in the builder.
pub(crate) const TREE: &str = "/src/linux";

/// In the builder. What is compiled is of no use afterwards, but for what compiles modules.
const COMPILE: &str = r#"
mkdir -p /src/linux
cd /src/linux
tar --strip-components=1 -xf /usr/src/linux-source-*.tar.xz
rm /usr/src/linux-source-*.tar.xz
make -s KCONFIG_ALLCONFIG=/src/config allnoconfig
missing=$(grep '^CONFIG_' /src/config | grep -vxFf .config || true)
[ -z "$missing" ] || { echo "not in the configuration:" $missing; exit 1; }
make -j"$(nproc)" bzImage modules
make -s INSTALL_MOD_PATH=/src/modules modules_install
cp arch/x86/boot/bzImage /src/vmlinuz
make -s kernelrelease > /src/abi
rm -rf Documentation samples vmlinux* arch/x86/boot
find . \( -name '*.o' -o -name '*.a' -o -name '*.c' -o -name '*.S' \) \
  ! -path './scripts/*' ! -path './tools/*' ! -path './include/*' ! -path './arch/x86/*' -delete
"#;

/// `$1` builder root, `$2` script.
const ENTER: &str = r#"
mount -t proc proc "$1/proc"
exec chroot "$1" nice sh -ec "$2"
"#;

const INITRAMFS_INIT: &str = r"#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
n=0
while [ ! -b /dev/vda ] && [ $n -lt 300 ]; do $b sleep 0.1; n=$((n+1)); done
$b mount -t ext4 /dev/vda /root || { echo initramfs: no root file system; exec $b poweroff -f; }
$b mount -t tmpfs tmpfs /root/usr/lib/modules
$b cp -a /modules/. /root/usr/lib/modules/
$b mount -o move /dev /root/dev
exec $b switch_root /root /lab/init
";

/// The builder with the compiled tree.
pub(crate) fn builder(cache: &Cache) -> Result<Builder> {
    let archive = Archive::open(cache, &["trixie"])?;
    let inputs = format!("1\n{}\n{CONFIG}\n{COMPILE}", archive.resolve(PACKAGES)?.join("\n"));
    let name = "builder-debug-kernel";
    if !cache.has(name, &inputs) && archive.renew(cache)? {
        return builder(cache);
    }
    let dir = cache.artefact(name, &inputs, |tmp| {
        let root = tmp.join("root");
        let packages = roots::owned(PACKAGES);
        let recipe = Recipe { name, suite: "trixie", variant: "apt", packages: &packages };
        roots::mmdebstrap(cache, &archive, &recipe, &root)?;
        fs::create_dir_all(root.join("src"))?;
        fs::create_dir_all(root.join("work"))?;
        fs::write(root.join("src/config"), CONFIG)?;
        let mut cmd = tied_private_mounts("sh");
        cmd.args(["-ec", ENTER, "sh"]).arg(&root).arg(COMPILE);
        run_logged(&mut cmd, "compiling the debug kernel", &cache.log(name), BUILD_WAIT)
    })?;
    let root = dir.join("root");
    let abi = fs::read_to_string(root.join("src/abi")).context("the debug kernel has no name")?;
    Ok(Builder { root, abi: abi.trim().to_owned() })
}

/// Debian 13's guest with this kernel.
pub(crate) fn guest(cache: &Cache) -> Result<GuestImage> {
    let builder = builder(cache)?;
    let base = roots::guest(cache, Debian::Trixie)?;
    let inputs =
        format!("1\n{}\n{}\n{INITRAMFS_INIT}\n", builder.root.display(), base.dir.display());
    let dir = cache.artefact("guest-debug-kernel", &inputs, |tmp| {
        let log = cache.log("guest-debug-kernel");
        fs::copy(builder.root.join("src/vmlinuz"), tmp.join("vmlinuz"))?;
        // The image is read only; a link outlives the artefact that it comes from.
        fs::hard_link(base.dir.join("root.img"), tmp.join("root.img"))?;
        initramfs(&builder, tmp, &log)
    })?;
    Ok(GuestImage { dir, abi: builder.abi })
}

fn initramfs(builder: &Builder, tmp: &Path, log: &Path) -> Result<()> {
    let tree = tmp.join("initramfs");
    for dir in ["bin", "dev", "root"] {
        fs::create_dir_all(tree.join(dir))?;
    }
    roots::write_script(&tree.join("init"), INITRAMFS_INIT)?;
    let mut cmd = tied("cp");
    cmd.arg("-a").arg(builder.root.join("src/modules/lib/modules")).arg(tree.join("modules"));
    run_logged(&mut cmd, "copying modules", log, STEP_WAIT)?;
    fs::copy(builder.root.join("usr/bin/busybox"), tree.join("bin/busybox"))?;
    roots::pack_initramfs(&tree, &tmp.join("initrd.gz"), log)
}
