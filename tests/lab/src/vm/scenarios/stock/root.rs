//! The README's commands in a root of stock Debian, on this machine's kernel: what somebody finds
//! who has Rust, git and a C compiler, and a clone with nothing built.
//!
//! A VM has the release's own kernel (`readme`), but there every instruction is emulated, and the
//! second of the two commands would take a day. Here it takes as long as in CI, with the release's
//! compiler, libraries and programs. What the command wants besides it has to install itself.
//!
//! The clone has what was committed. What the lab makes once is this machine's or, with `--cold`,
//! made anew, which takes another half an hour and 25 GB.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::Args;
use crate::cache::Cache;
use crate::exec::{self, tied, tied_private_mounts};
use crate::host::{Archive, require_root};
use crate::roots;
use crate::rows::Row;

/// What the README tells its reader to have, beside Rust; and the two that every installation has.
const PACKAGES: &[&str] = &["gcc", "git", "libc6-dev", "ca-certificates", "mount"];
const STEP: Duration = Duration::from_secs(300);
/// CI has 90 minutes, and caches.
const END: Duration = Duration::from_secs(4 * 3600);

/// `$1` root, `$2` cargo's home, `$3` rustup's, `$4` cache, `$5` tree, `$6` script. All that is
/// started has process IDs of its own and ends with the first of them.
const ENTER: &str = r#"
# Programs in it make all mounts private, and enter namespaces: the root has to be the first mount.
mount --bind "$1" "$1"
mount --rbind /dev "$1/dev"; mount --rbind /sys "$1/sys"; mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=755 run "$1/run"; mount -t tmpfs -o mode=1777 tmp "$1/tmp"
mount --bind "$2" "$1/root/.cargo"; mount --bind "$3" "$1/root/.rustup"
mount --bind "$4" "$1/root/.cache/vhost-rdma"; mount --bind -o ro "$5" "$1/work"
cd "$1"; pivot_root . mnt
exec chroot . env -i HOME=/root LANG=C.UTF-8 TERM=dumb \
  PATH=/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt sh -ec "umount -l /mnt; $6"
"#;

/// How this machine reaches its mirror and its registries, which the root has to know, too.
const FILES: [&str; 3] = ["etc/hosts", "etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"];

/// A directory that goes when this does.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("    {} stays: {error}", self.0.display());
        }
    }
}

/// Types the command into a fresh clone.
fn script(words: &str) -> String {
    format!(
        ". /etc/os-release; echo \"$PRETTY_NAME, $(uname -r)\"\n\
         git config --global --add safe.directory '*'\n\
         git clone -q /work /root/vhost-rdma; cd /root/vhost-rdma; git log --oneline -1\n\
         exec cargo xtask {words} --json /root/rows.json\n"
    )
}

/// A copy of the release's root that may be written to.
fn copy(cache: &Cache, suite: &'static str, scratch: &Path) -> Result<PathBuf> {
    let open = || Archive::open(cache, &[suite]);
    let made = roots::folder(cache, (&format!("stock-root-{suite}"), suite), PACKAGES, &open)?;
    let root = scratch.join("root");
    exec::capture(tied("cp").arg("-a").arg(&made).arg(&root), STEP)?;
    fs::write(root.join("etc/apt/sources.list"), format!("{}\n", open()?.lines.join("\n")))?;
    let settings = exec::capture(tied("apt-config").args(["dump", "Acquire"]), STEP)?;
    fs::write(root.join("etc/apt/apt.conf.d/99lab"), settings)?;
    for file in FILES {
        let from = Path::new("/").join(file);
        fs::copy(&from, root.join(file)).with_context(|| from.display().to_string())?;
    }
    for dir in [".cargo", ".rustup", ".cache/vhost-rdma"] {
        fs::create_dir_all(root.join("root").join(dir))?;
    }
    Ok(root)
}

/// Where a program of Rust's keeps what it has.
fn home_of(name: &str, usual: &str) -> Result<PathBuf> {
    let home = || anyhow::Ok(PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?));
    Ok(match std::env::var_os(name) {
        Some(dir) => dir.into(),
        None => home()?.join(usual),
    })
}

impl Args {
    /// One root of each release after the other, and the command in it.
    pub(super) fn in_roots(&self, cache: &Cache, table: &mut Vec<Row>) -> Result<()> {
        require_root()?;
        let words = self.xtask.as_deref().unwrap_or("test");
        for debian in self.releases() {
            let scratch =
                cache.dir().join("tmp").join(format!("stock-root-{}", std::process::id()));
            fs::create_dir_all(&scratch)?;
            let scratch = Scratch(scratch);
            let root = copy(cache, debian.suite(), &scratch.0)?;
            let made = if self.cold { scratch.0.join("cache") } else { cache.dir().to_path_buf() };
            fs::create_dir_all(&made)?;
            let mut cmd = tied_private_mounts("unshare");
            cmd.args(["--pid", "--fork", "--kill-child", "sh", "-ec", ENTER, "sh"]).arg(&root);
            cmd.arg(home_of("CARGO_HOME", ".cargo")?).arg(home_of("RUSTUP_HOME", ".rustup")?);
            cmd.arg(&made).arg(exec::workspace()).arg(script(words));
            // What it says is for who waits.
            let mut child = cmd.spawn().context("cannot start unshare")?;
            let ended = exec::wait(&mut child, END, || {});
            exec::end_group(&mut child, STEP);
            let of = format!("{}, a root: cargo xtask {words}", debian.name());
            let rows = fs::read(root.join("root/rows.json")).ok();
            let rows = rows.and_then(|text| serde_json::from_slice::<Vec<Row>>(&text).ok());
            for row in rows.unwrap_or_default() {
                table.push(Row { name: format!("{of}: {}", row.name), ..row });
            }
            table.push(Row::verdict(of, ended?.success()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_typed_in_a_clone() {
        let script = script("test --only 'x y'");
        assert!(script.contains("; cd /root/vhost-rdma; "));
        assert!(script.ends_with("\nexec cargo xtask test --only 'x y' --json /root/rows.json\n"));
    }
}
