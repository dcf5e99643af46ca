//! The cgroups of a node, on machines of either version.
//!
//! Version 1 is one hierarchy for each controller, some beside a hierarchy of version 2 that has
//! none ("hybrid"): a node gets a directory in each, below the one that we are in. Version 2
//! ("unified", what Debian 12 and 13 boot with) is one hierarchy for all, and has two rules that
//! the other has not (cgroup-v2.rst, "No Internal Process Constraint", "Top-down Constraint"): a
//! cgroup hands controllers down only while no process is in it, and has only those that its
//! parent hands down. We ourselves are in one that has processes, so the node's is made at the
//! top, which is exempt; and the node's own processes are in a leaf of it.
//!
//! A node sees its directory as the top, by a cgroup namespace. It must not touch what is beside.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Where every distribution has them.
const TOP: &str = "/sys/fs/cgroup";
/// The leaf of version 2 for the node's processes that are in no pod.
const LEAF: &str = "node";
/// In a node's state directory: the files that take a process into its cgroups.
pub(super) const PROCS: &str = "procs";
/// What kubelet 1.20 insists on (cgroup_manager_linux.go, `getSupportedUnifiedControllers`).
const NEEDED: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];
/// What else is handed down where it is there.
const WELCOME: [&str; 2] = ["hugetlb", "io"];

/// One hierarchy: mount point below [`TOP`], type, options, and the directory in which the node's
/// is made.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    point: String,
    kind: &'static str,
    options: String,
    parent: PathBuf,
}

/// Everything that a machine has mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchies {
    all: Vec<Hierarchy>,
    unified: bool,
}

impl Hierarchies {
    /// Those of this machine; an error if no node can live on them.
    pub(super) fn find() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let groups = fs::read_to_string("/proc/self/cgroup")?;
        let found = Self::parse(&mounts, &groups);
        let memory = |h: &Hierarchy| h.point.split(',').any(|c| c == "memory");
        if !found.unified && !found.all.iter().any(memory) {
            bail!(
                "the cluster needs cgroups below {TOP}: version 2, or hierarchies of version 1 \
                 (cpu, cpuacct, cpuset, memory, pids); this machine has neither mounted"
            );
        }
        Ok(found)
    }

    fn parse(mounts: &str, groups: &str) -> Self {
        // `id:controllers:path`, proc_pid_cgroup(5).
        let own_path = |controllers: &str| {
            groups.lines().find_map(|l| {
                let mut fields = l.splitn(3, ':').skip(1);
                (fields.next()? == controllers).then(|| fields.next().map(ToOwned::to_owned))?
            })
        };
        let mut all: Vec<Hierarchy> = Vec::new();
        for line in mounts.lines() {
            let Some((head, fs_part)) = line.split_once(" - ") else { continue };
            let Some(at) = head.split(' ').nth(4) else { continue };
            let mut words = fs_part.split(' ');
            let (kind, options) = (words.next().unwrap_or(""), words.nth(1).unwrap_or(""));
            if at == TOP && kind == "cgroup2" {
                let (point, options, parent) = (".".to_owned(), "rw".to_owned(), PathBuf::from(at));
                let top = Hierarchy { point, kind: "cgroup2", options, parent };
                return Self { all: vec![top], unified: true };
            }
            let Some(point) = at.strip_prefix(TOP).and_then(|rest| rest.strip_prefix('/')) else {
                continue;
            };
            let (kind, options, controllers) = match kind {
                "cgroup" => version_1(options),
                "cgroup2" => ("cgroup2", "rw".to_owned(), String::new()),
                _ => continue,
            };
            let Some(own) = own_path(&controllers) else { continue };
            if all.iter().any(|h| h.point == point) {
                continue;
            }
            let parent = Path::new(at).join(own.trim_start_matches('/'));
            all.push(Hierarchy { point: point.to_owned(), kind, options, parent });
        }
        Self { all, unified: false }
    }

    /// Makes a directory of this name in every hierarchy. In `state` stand then `cgroups`, which of
    /// them there are, first of all, so that whatever happens next, somebody can clean up;
    /// `mounts`, what the node mounts below [`TOP`]; and [`PROCS`].
    pub(super) fn make(&self, state: &Path, name: &str) -> Result<()> {
        let mut mounts = String::new();
        if !self.unified {
            mounts.push_str(". tmpfs mode=755\n");
        }
        for Hierarchy { point, kind, options, .. } in &self.all {
            mounts.push_str(&format!("{point} {kind} {options}\n"));
        }
        let dirs: Vec<PathBuf> = self.all.iter().map(|h| h.parent.join(name)).collect();
        let leaf = if self.unified { LEAF } else { "." };
        let procs =
            dirs.iter().map(|d| format!("{}\n", d.join(leaf).join("cgroup.procs").display()));
        let mut file = fs::File::create(state.join("cgroups"))?;
        for dir in &dirs {
            writeln!(file, "{}", dir.display())?;
        }
        file.sync_all()?;
        fs::write(state.join("mounts"), mounts)?;
        fs::write(state.join(PROCS), procs.collect::<String>())?;
        for (Hierarchy { kind, parent, .. }, ours) in self.all.iter().zip(&dirs) {
            if self.unified {
                hand_down(parent)?;
            }
            fs::create_dir(ours).with_context(|| format!("cannot make {}", ours.display()))?;
            if self.unified {
                fs::create_dir(ours.join(LEAF))?;
            }
            // A new cpuset of version 1 is empty, and an empty one takes no process.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(value) = fs::read_to_string(parent.join(file))
                    && *kind == "cgroup"
                {
                    fs::write(ours.join(file), value.trim())?;
                }
            }
        }
        Ok(())
    }
}

/// Type, options to mount it again, and its name in `/proc/self/cgroup`.
fn version_1(options: &str) -> (&'static str, String, String) {
    let kept: Vec<&str> = options.split(',').filter(|o| !["rw", "ro"].contains(o)).collect();
    let controllers: Vec<&str> =
        kept.iter().filter(|o| !o.contains('=') || o.starts_with("name=")).copied().collect();
    let controllers = controllers.join(",");
    let named = kept.iter().any(|o| o.starts_with("name="));
    let shown = if named { format!("none,{controllers}") } else { controllers.clone() };
    ("cgroup", shown, controllers)
}

/// Has the top of version 2 hand down what nodes need. That stays so: others may have come to rely
/// on it.
fn hand_down(top: &Path) -> Result<()> {
    let words = |file: &str| -> Result<Vec<String>> {
        let text =
            fs::read_to_string(top.join(file)).with_context(|| format!("{file} of {TOP}"))?;
        Ok(text.split_whitespace().map(ToOwned::to_owned).collect())
    };
    let (there, handed) = (words("cgroup.controllers")?, words("cgroup.subtree_control")?);
    let wish = wish(&there, &handed)?;
    if wish.is_empty() {
        return Ok(());
    }
    fs::write(top.join("cgroup.subtree_control"), &wish).with_context(|| {
        format!(
            "{TOP} does not hand down {wish}: in a container, its processes must first be put into \
             a cgroup below it"
        )
    })
}

/// What is to be written to `cgroup.subtree_control` of a cgroup with these controllers that hands
/// down those.
fn wish(there: &[String], handed: &[String]) -> Result<String> {
    let has = |list: &[String], name: &str| list.iter().any(|c| c == name);
    let missing: Vec<&str> = NEEDED.into_iter().filter(|c| !has(there, c)).collect();
    ensure!(missing.is_empty(), "cgroup version 2 without {} at {TOP}", missing.join(", "));
    let new = NEEDED.into_iter().chain(WELCOME).filter(|c| has(there, c) && !has(handed, c));
    Ok(new.map(|c| format!("+{c}")).collect::<Vec<_>>().join(" "))
}

/// The directories that [`Hierarchies::make`] made, or was about to make.
pub(super) fn made(state: &Path, prefix: &str) -> Vec<PathBuf> {
    let text = fs::read_to_string(state.join("cgroups")).unwrap_or_default();
    text.lines().filter(|l| l.contains(prefix)).map(PathBuf::from).collect()
}

/// `rmdir` from the leaves up: a cgroup's files cannot be removed, and go with it.
pub(super) fn remove(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(mounts: &str, groups: &str) -> (bool, Vec<String>) {
        let found = Hierarchies::parse(mounts, groups);
        let line =
            |h: &Hierarchy| format!("{} {} {} {}", h.point, h.kind, h.options, h.parent.display());
        (found.unified, found.all.iter().map(line).collect())
    }

    #[test]
    fn hierarchies_of_version_1_and_the_hybrid_one() {
        let mounts = "\
30 25 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
34 30 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
35 25 0:31 / /proc rw - proc proc rw
";
        let groups = "4:name=systemd:/\n3:memory:/a/b\n2:cpu,cpuacct:/\n0::/u\n";
        let lines = [
            "cpu,cpuacct cgroup cpu,cpuacct /sys/fs/cgroup/cpu,cpuacct/",
            "memory cgroup memory /sys/fs/cgroup/memory/a/b",
            "systemd cgroup none,name=systemd /sys/fs/cgroup/systemd/",
            "unified cgroup2 rw /sys/fs/cgroup/unified/u",
        ];
        assert_eq!(shown(mounts, groups), (false, lines.map(str::to_owned).to_vec()));
    }

    #[test]
    fn the_unified_hierarchy_is_used_at_its_top() {
        let mounts = "\
24 23 0:21 / /sys rw,relatime - sysfs sysfs rw
31 24 0:27 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 \
rw,nsdelegate,memory_recursiveprot
";
        let groups = "0::/user.slice/user-0.slice/session-1.scope\n";
        assert_eq!(shown(mounts, groups), (true, vec![". cgroup2 rw /sys/fs/cgroup".to_owned()]));
    }

    #[test]
    fn what_is_not_handed_down_yet_is_asked_for() {
        let list = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let there = list("cpuset cpu io memory hugetlb pids rdma misc");
        assert_eq!(wish(&there, &list("memory pids")).unwrap(), "+cpu +cpuset +hugetlb +io");
        assert_eq!(wish(&list("cpuset cpu memory pids"), &there).unwrap(), "");
        let error = wish(&list("cpu io pids"), &[]).unwrap_err().to_string();
        assert_eq!(error, "cgroup version 2 without cpuset, memory at /sys/fs/cgroup");
    }
}
