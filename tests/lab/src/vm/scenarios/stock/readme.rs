//! The README's own command on a stock Debian: a VM of the release is the machine, and
//! `cargo xtask demo` is typed there.
//!
//! The VM has this machine's toolchain, tree and caches, each read-only under a layer of its own
//! memory, at the same places. So cargo finds everything fresh: a compiler that is emulated would
//! take hours. Nothing else is different. Tools, kernel, C library and cgroups (of version 2) are
//! the release's, the lab makes its run there, and its guests are guests of a guest.
//!
//! Any other command of the README can be given in place of the demo. What it compiles or makes has
//! to be here before.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::nested::CGROUPS;
use super::{Args, kernels};
use crate::cache::Cache;
use crate::exec;
use crate::k8s;
use crate::products;
use crate::roots::{self, Debian};
use crate::rows::Row;
use crate::vm::daemon;
use crate::vm::guest::{Guest, Job};
use crate::vm::{Lab, Nic, Plan};

/// What the README tells its reader to type first.
pub(super) const DEMO: &str = "demo";

/// The step of the README's second command that needs most of a host: a cluster of one node.
pub(super) const CLUSTER: &str = "k8s test --brief";

const MOUNTS: Duration = Duration::from_secs(120);
/// The demo has taken 47 minutes, beside compilers.
const END: Duration = Duration::from_secs(3 * 3600);
/// Between two looks at what it has said.
const NAP: Duration = Duration::from_millis(500);

/// Each directory under a layer in memory. `@DIRECTORIES@` are in the order of their shares.
const LAYERS: &str = "set -e
modprobe -a overlay 9p 9pnet_virtio
mkdir /lower /layers && mount -t tmpfs -o size=75% layers /layers
n=0
for d in @DIRECTORIES@; do
  mkdir -p /lower/$n /layers/$n/upper /layers/$n/work $d
  mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 d$n /lower/$n
  mount -t overlay -o lowerdir=/lower/$n,upperdir=/layers/$n/upper,workdir=/layers/$n/work o $d
  n=$((n+1))
done
[ \"$(stat -fc %T /sys/fs/cgroup)\" = cgroup2fs ]
. /etc/os-release
echo \"$PRETTY_NAME, $(uname -r)\"
";

/// What decides whether cargo takes a crate for fresh, and where things are.
const ENVIRONMENT: [&str; 11] = [
    "CARGO_BUILD_",
    "CARGO_HOME",
    "CARGO_INCREMENTAL",
    "CARGO_PROFILE_",
    "CARGO_TARGET_DIR",
    "HOME",
    "RUSTFLAGS",
    "RUSTUP_",
    "RUST_",
    "VHOST_RDMA_CACHE",
    "XDG_CACHE_HOME",
];

/// The directories that make this machine one on which the tree has been built.
fn directories(cache: &Cache) -> Result<Vec<PathBuf>> {
    let home = PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?);
    let of = |name: &str, usual: &str| {
        std::env::var_os(name).map_or_else(|| home.join(usual), PathBuf::from)
    };
    let tree = exec::workspace();
    let mut all = vec![tree.clone(), cache.dir().to_path_buf()];
    all.extend([of("CARGO_HOME", ".cargo"), of("RUSTUP_HOME", ".rustup")]);
    all.push(std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| tree.join("target"), Into::into));
    all.sort();
    all.retain(|one| one.is_dir());
    // Sorted, what contains another comes before it.
    let mut chosen: Vec<PathBuf> = Vec::new();
    for one in all {
        if !chosen.iter().any(|other| one.starts_with(other)) {
            chosen.push(one);
        }
    }
    Ok(chosen)
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn environment() -> String {
    let is_ours = |name: &str| ENVIRONMENT.iter().any(|start| name.starts_with(start));
    let lines = std::env::vars().filter(|(name, _)| is_ours(name));
    lines.map(|(name, value)| format!("export {name}={}\n", quoted(&value))).collect()
}

/// A script that types the command. What its steps write lies in the VM's share, so that it can be
/// read while they run, and afterwards with `--keep`.
fn script(words: &str, logs: &Path) -> String {
    let tree = exec::workspace();
    let [tree, logs] = [&tree, logs].map(|path| quoted(&path.display().to_string()));
    format!(
        "set -e\n{}export PATH=${{CARGO_HOME:-$HOME/.cargo}}/bin:$PATH CARGO_NET_OFFLINE=true\n\
         mkdir -p /host/logs {logs}\nmount --bind /host/logs {logs}\n\
         cd {tree}\nexec cargo xtask {words} --json /host/rows.json\n",
        environment()
    )
}

/// What the command is made of, so that the VM finds it: a cluster's parts, or the demo's.
fn make(words: &str, lab: &Lab) -> Result<()> {
    if words.starts_with("k8s") {
        return k8s::make(&lab.cache);
    }
    daemon::build(&lab.cache)?;
    products::for_guest(&lab.cache, Debian::default())?;
    roots::guest(&lab.cache, Debian::default()).map(|_| ())
}

/// Waits for the command and shows what it says.
fn watch(host: &mut Guest, job: Job) -> Result<bool> {
    let mut shown = 0;
    let status = exec::wait_for("the command in the VM", END, || {
        let said = host.output(job);
        // Whole lines alone.
        let end = said.rfind('\n').map_or(0, |at| at + 1);
        said.get(shown..end).unwrap_or_default().lines().for_each(|line| eprintln!("    | {line}"));
        shown = shown.max(end);
        let status = host.finished(job)?;
        std::thread::sleep(NAP);
        Ok(status)
    });
    if status.is_err() {
        host.kill(job)?;
    }
    Ok(status? == 0)
}

fn rows(share: &Path) -> Result<Vec<Row>> {
    let text = fs::read(share.join("rows.json")).context("the command has left no rows")?;
    Ok(serde_json::from_slice(&text)?)
}

impl Args {
    /// One VM of each release after the other, and the command in it.
    pub(super) fn command(&self, words: &str, lab: &mut Lab, table: &mut Vec<Row>) -> Result<()> {
        make(words, lab)?;
        let directories = directories(&lab.cache)?;
        let names: Vec<String> =
            directories.iter().map(|one| quoted(&one.display().to_string())).collect();
        let layers = LAYERS.replace("@DIRECTORIES@", &names.join(" "));
        for debian in self.releases() {
            let of = format!("{}: cargo xtask {words}", debian.name());
            let image = roots::lab_machine(&lab.cache, debian)?;
            let nics = vec![Nic::Lab(directories.clone())];
            lab.boot(&Plan { image, cpus: 2, nics })?;
            let host = lab.guests.first_mut().context("no guest")?;
            host.must(CGROUPS, MOUNTS)?;
            eprintln!("    {}", host.must(&layers, MOUNTS)?.trim());
            let logs = lab.cache.dir().join("logs");
            eprintln!("    logs of its steps: {}", host.share().join("logs").display());
            let job = host.spawn(&script(words, &logs))?;
            let ok = watch(host, job)?;
            for row in rows(host.share()).unwrap_or_default() {
                table.push(Row { name: format!("{of}: {}", row.name), ..row });
            }
            table.push(Row::verdict(of.clone(), ok));
            kernels(lab, &format!("{}: ", debian.name()), table);
            lab.shut_down();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_typed_in_the_tree_with_what_cargo_needs() {
        let script = script("demo --only 'x y'", Path::new("/c/logs"));
        assert!(script.contains("\nmount --bind /host/logs '/c/logs'\n"));
        assert!(script.contains("\nexec cargo xtask demo --only 'x y' --json /host/rows.json\n"));
        assert!(script.contains(&format!("\ncd '{}'\n", exec::workspace().display())));
        assert!(!script.contains("CARGO_PKG_"), "it is no program of this crate:\n{script}");
    }

    #[test]
    fn what_is_in_another_directory_is_no_share_of_its_own() {
        let cache = Cache::open().expect("a cache");
        let all = directories(&cache).expect("directories");
        assert!(all.iter().any(|one| exec::workspace().starts_with(one)), "{all:?}");
        for (n, one) in all.iter().enumerate() {
            assert!(!all.iter().take(n).any(|other| one.starts_with(other)), "{all:?}");
        }
    }

    #[test]
    fn quotes_hold() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
