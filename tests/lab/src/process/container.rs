//! A container for programs of a release: its file system is a guest's or a folder, mounted
//! read-only in a mount namespace of its own, with the sockets of the NICs and our libraries at
//! their places. Its network is a loopback interface of its own: nobody else's ports are in the
//! way.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::release::Release;
use crate::exec::{capture, tied};
use crate::vm::rundir::RunDir;

/// `$1` the file system, `$2` a folder of ours for `/host`, in which `script` is what is run.
/// `vhost-rdma run` has said in the environment where sockets and libraries are.
const ENTER: &str = r#"
libraries=$VHOST_RDMA_LIBRARIES
# Ports of its own, so that nobody else's server is met.
ip link set lo up
mount -t tmpfs none /mnt
mkdir /mnt/sockets /mnt/libraries /mnt/host /mnt/root
n=0; devices=
for socket in $(echo "$VHOST_RDMA_DEVICES" | tr ":" " "); do
  : > /mnt/sockets/$n; mount --bind "$socket" /mnt/sockets/$n
  devices=$devices${devices:+:}/run/sockets/$n; n=$((n+1))
done
mount --bind "$libraries" /mnt/libraries
mount --bind "$2" /mnt/host
root=/mnt/root
if [ -d "$1" ]; then
  mount --bind "$1" $root; mount -o remount,bind,ro $root
else
  mount -o loop,ro,noload "$1" $root
fi
mount -t tmpfs none $root/tmp
mount -t tmpfs none $root/run
mount --rbind /proc $root/proc
mount --rbind /dev $root/dev
mount --rbind /sys $root/sys
mkdir $root/run/sockets $root/run/libraries
mount --rbind /mnt/sockets $root/run/sockets
mount --bind /mnt/libraries $root/run/libraries
mount --bind /mnt/host $root/host
# What is not shared memory, where the host's /tmp is none either.
mount --bind /mnt/host $root/var/tmp
unset LD_PRELOAD LD_LIBRARY_PATH VHOST_RDMA_LIBRARIES
exec chroot $root env PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp VHOST_RDMA_DEVICES="$devices" \
  LD_LIBRARY_PATH=/run/libraries \
  LD_PRELOAD=/run/libraries/libvhost_rdma_heap.so:/run/libraries/libvhost_rdma_files.so \
  sh -e /host/script
"#;

#[derive(Debug)]
pub(super) struct Container {
    pub(super) release: Release,
    root: PathBuf,
    daemon: PathBuf,
    libraries: PathBuf,
    /// What the programs see as `/host`, and what enters: of this run alone.
    run: RunDir,
}

impl Container {
    pub(super) fn new(
        release: Release,
        root: PathBuf,
        (daemon, libraries): (&Path, &Path),
    ) -> Result<Self> {
        Ok(Self {
            release,
            root,
            daemon: daemon.to_owned(),
            libraries: libraries.to_owned(),
            run: RunDir::new()?,
        })
    }

    /// The folder that the programs see as `/host`.
    pub(super) fn share(&self) -> &Path {
        self.run.path()
    }

    /// Our libraries, as they are outside.
    pub(super) fn libraries(&self) -> &Path {
        &self.libraries
    }

    /// Runs a script in it, with so many NICs, to its end: what it printed.
    pub(super) fn run(&self, nics: u32, script: &str, limit: Duration) -> Result<String> {
        let enter = self.share().join("enter");
        fs::write(&enter, ENTER)?;
        fs::write(self.share().join("script"), script)?;
        let mut run = tied(&self.daemon);
        run.env("VHOST_RDMA_LIBRARIES", &self.libraries);
        run.args(["run", "--nics", &nics.to_string(), "--"]);
        run.args(["unshare", "--mount", "--net", "--propagation", "private", "sh", "-e"]);
        run.arg(&enter).arg(&self.root).arg(self.share());
        capture(&mut run, limit)
    }
}
