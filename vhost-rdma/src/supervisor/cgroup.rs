//! A cgroup for each network's process, where the host lets us make one.
//!
//! What a tenant makes its process spend is then accounted to that process, it has a share of the
//! processors like each of its neighbours, and where memory is limited the kernel's memory killer
//! ends that process and no other: the network starts again, and nobody else notices.
//!
//! Where a limit was asked for, no process runs without it: one that cannot be put into its cgroup
//! is not started, and its network says why. Where none was, it runs on without, which is said.
//!
//! A cgroup is only made where the daemon was given a tree of its own, which the service manager
//! says by an attribute (`Delegate=yes`), or where a limit was asked for. With version 2 a cgroup
//! that has children has no processes; so the daemon, and a parent that keeps it, move to a child
//! `supervisor`. With version 1 each controller has a tree, and those are used that can be.
//!
//! The names are the same after a restart, so what a daemon that was killed has left is found: by
//! the cgroup that is the daemon's own, or by its runtime directory, which one daemon has at a
//! time.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::node::MemoryStatus;

/// Where the daemon itself is, in a tree of its own.
const OURS: &str = "supervisor";
/// Controllers that are of use.
const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];
/// What says that a cgroup was given away (systemd.resource-control(5), `Delegate=`).
const GIVEN: [&str; 2] = ["user.delegate", "trusted.delegate"];
/// What an operator can do about a limit that cannot be set.
const CURE: &str = "mend that, or do without --network-memory-max and --network-pids-max";
/// How often the end of a cgroup is tried, and how long between: its process is just gone.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// What one network's process may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Threads.
    pub pids: Option<u64>,
}

impl CgroupLimits {
    const fn is_none(&self) -> bool {
        self.memory.is_none() && self.pids.is_none()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A cgroup in which those of networks are, and the controllers that they have there.
#[derive(Debug, Clone)]
struct Tree {
    version: Version,
    dir: PathBuf,
    controllers: Vec<&'static str>,
}

/// See the module. There may be no tree at all.
#[derive(Debug, Clone, Default)]
pub(super) struct Cgroups {
    trees: Arc<Vec<Tree>>,
    /// What their names begin with.
    prefix: Arc<str>,
    /// Those that there are, without what they begin with.
    names: Names,
    limits: CgroupLimits,
    /// Why limits that were asked for cannot be set.
    trouble: Option<Arc<str>>,
}

type Names = Arc<Mutex<BTreeSet<String>>>;

fn lock(names: &Names) -> MutexGuard<'_, BTreeSet<String>> {
    names.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the kernel has its files.
struct Host {
    /// `/proc/self/cgroup`.
    own: String,
    /// `/proc/self/mountinfo`.
    mounts: String,
}

impl Cgroups {
    /// Finds where cgroups can be made, and removes what an earlier daemon left. What cannot be is
    /// said in the log.
    pub(super) fn open(limits: CgroupLimits, runtime_dir: &Path) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let host = Host { own: read("/proc/self/cgroup"), mounts: read("/proc/self/mountinfo") };
        Self::found(Self::find(&host, limits, runtime_dir), limits)
    }

    fn found(found: Result<Self, String>, limits: CgroupLimits) -> Self {
        match found {
            Ok(found) => {
                found.remove_left();
                let trees: Vec<_> = found.trees.iter().map(|tree| tree.dir.display()).collect();
                tracing::info!(?trees, "each network's process has a cgroup of its own");
                found
            }
            Err(why) if limits.is_none() => {
                tracing::info!(why, "network processes have no cgroup of their own");
                Self::default()
            }
            Err(why) => {
                tracing::error!(why, "no network is served: its limits cannot be set");
                Self { trouble: Some(why.into()), ..Self::default() }
            }
        }
    }

    fn find(host: &Host, limits: CgroupLimits, runtime_dir: &Path) -> Result<Self, String> {
        let own = host.dir(None).map(|dir| match dir.parent() {
            // We have moved there before we became this program.
            Some(parent) if dir.ends_with(OURS) && is_given(parent) => parent.to_owned(),
            _ => dir,
        });
        let given = own.as_ref().is_some_and(|dir| is_given(dir));
        if !given && limits.is_none() {
            return Err("no tree of cgroups was given to the daemon (Delegate=yes)".to_owned());
        }
        let second = own.filter(|dir| !offered(dir).is_empty());
        let (trees, prefix) = match second {
            Some(dir) if given => (vec![Tree::second(dir)], "network-".to_owned()),
            // The trees of version 1, and what is nobody's own, have others' cgroups beside ours.
            second => {
                let dir = runtime_dir.metadata().map_err(|error| error.to_string())?;
                let prefix = format!("vhost-rdma-{}-{}-", dir.dev(), dir.ino());
                let first = CONTROLLERS.iter().filter_map(|name| Tree::first(host, name));
                (first.map(Ok).chain(second.map(Tree::second)).collect(), prefix)
            }
        };
        let trees: Vec<Tree> =
            trees.into_iter().collect::<io::Result<_>>().map_err(|error| error.to_string())?;
        let has = |wanted: &str| trees.iter().any(|tree| tree.controllers.contains(&wanted));
        let asked = [("memory", limits.memory.is_some()), ("pids", limits.pids.is_some())];
        if let Some((wanted, _)) = asked.into_iter().find(|(wanted, asked)| *asked && !has(wanted))
        {
            return Err(format!("the controller {wanted} cannot be used here"));
        }
        if trees.is_empty() {
            return Err("no controller can be used here".to_owned());
        }
        Ok(Self { trees: Arc::new(trees), prefix: prefix.into(), limits, ..Self::default() })
    }

    /// Those of earlier daemons. One that is in use, or comes back, is taken as it is.
    fn remove_left(&self) {
        for tree in &*self.trees {
            for entry in fs::read_dir(&tree.dir).into_iter().flatten().flatten() {
                if entry.file_name().to_string_lossy().starts_with(&*self.prefix) {
                    let _ = fs::remove_dir(entry.path());
                }
            }
        }
    }

    /// A name that no other has: a network may come again before the process that it had has ended.
    fn name(&self, network: &str) -> String {
        let mut names = lock(&self.names);
        let again = (1..).map(|n| format!("{network}.{n}"));
        let name = std::iter::once(network.to_owned()).chain(again).find(|n| !names.contains(n));
        let name = name.unwrap_or_default();
        names.insert(name.clone());
        name
    }

    /// That of a network, with its limits.
    ///
    /// # Errors
    /// A limit that was asked for cannot be set.
    pub(super) fn make(&self, network: &str) -> io::Result<Cgroup> {
        if let Some(why) = &self.trouble {
            return Err(io::Error::other(format!("its limits cannot be set: {why}; {CURE}")));
        }
        let name = (self.name(network), self.names.clone());
        let mut cgroup = Cgroup { parts: Vec::new(), limits: self.limits, name };
        for tree in &*self.trees {
            let dir = tree.dir.join(format!("{}{}", self.prefix, cgroup.name.0));
            let part = Part { tree: tree.clone(), dir, is_missed: AtomicBool::new(false) };
            if let Err(error) = part.make(self.limits) {
                part.remove();
                part.failed("its process goes without a cgroup", &error, self.limits)?;
            } else {
                cgroup.parts.push(part);
            }
        }
        Ok(cgroup)
    }
}

impl Host {
    /// Our own cgroup, of version 1 if a controller is named.
    fn dir(&self, controller: Option<&str>) -> Option<PathBuf> {
        let wanted = |names: &str| match controller {
            Some(name) => names.split(',').any(|each| each == name),
            None => names.is_empty(),
        };
        let path = self.own.lines().find_map(|line| {
            let mut words = line.splitn(3, ':');
            let (_, names, path) = (words.next()?, words.next()?, words.next()?);
            wanted(names).then_some(path)
        })?;
        self.mounts.lines().find_map(|line| {
            // proc_pid_mountinfo(5): root and mount point are the fourth and fifth word; type and
            // options are the first and third after a dash.
            let (before, after) = line.split_once(" - ")?;
            let mut words = before.split(' ').skip(3);
            let (root, point) = (words.next()?, words.next()?);
            let mut words = after.split(' ');
            let (kind, options) = (words.next()?, words.nth(1)?);
            let fits = match controller {
                Some(name) => kind == "cgroup" && options.split(',').any(|each| each == name),
                None => kind == "cgroup2",
            };
            let below = Path::new(path).strip_prefix(root).ok().filter(|_| fits)?;
            // Beyond what this namespace of cgroups begins with.
            if below.components().any(|part| part == Component::ParentDir) {
                return None;
            }
            Some(Path::new(point).join(below))
        })
    }
}

fn is_given(dir: &Path) -> bool {
    let is = |name: &&'static str| {
        let mut value = [0; 8];
        rustix::fs::getxattr(dir, *name, &mut value).is_ok_and(|n| value.get(..n) == Some(b"1"))
    };
    GIVEN.iter().any(is)
}

/// Controllers of version 2 that a cgroup has, of those that are of use.
fn offered(dir: &Path) -> Vec<&'static str> {
    let there = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    let there = |name: &&&str| there.split_whitespace().any(|each| each == **name);
    CONTROLLERS.iter().filter(there).copied().collect()
}

impl Tree {
    /// Our own cgroup of version 1 that has this controller, if more can be made in it.
    fn first(host: &Host, controller: &'static str) -> Option<Self> {
        let dir = host.dir(Some(controller))?;
        let may = rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK).is_ok();
        may.then(|| Self { version: Version::One, dir, controllers: vec![controller] })
    }

    /// A tree of version 2 whose root has no processes and hands its controllers down.
    fn second(dir: PathBuf) -> io::Result<Self> {
        // Only that of the whole host has no type, and may have both.
        if dir.join("cgroup.type").exists() {
            make_way(&dir)?;
        }
        let controllers = offered(&dir);
        let handed: Vec<String> = controllers.iter().map(|name| format!("+{name}")).collect();
        fs::write(dir.join("cgroup.subtree_control"), handed.join(" "))?;
        Ok(Self { version: Version::Two, dir, controllers })
    }
}

/// Moves the daemon, and a parent that keeps it, to a child of their cgroup.
fn make_way(dir: &Path) -> io::Result<()> {
    let ours = [std::process::id(), std::os::unix::process::parent_id()];
    let there = fs::read_to_string(dir.join("cgroup.procs"))?;
    let there: Vec<u32> = there.lines().filter_map(|line| line.parse().ok()).collect();
    if there.iter().any(|pid| !ours.contains(pid)) {
        return Err(io::Error::other("other processes are in the daemon's cgroup"));
    }
    let child = dir.join(OURS);
    make_dir(&child)?;
    there.iter().try_for_each(|pid| fs::write(child.join("cgroup.procs"), pid.to_string()))
}

fn make_dir(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// A network's cgroup in one tree.
#[derive(Debug)]
struct Part {
    tree: Tree,
    dir: PathBuf,
    /// The process that came last is not in it.
    is_missed: AtomicBool,
}

impl Part {
    fn make(&self, limits: CgroupLimits) -> io::Result<()> {
        make_dir(&self.dir)?;
        let limits = [limits.memory, limits.pids];
        for (controller, limit) in CONTROLLERS.iter().zip(limits) {
            if self.tree.controllers.contains(controller) {
                self.limit(controller, limit)?;
            }
        }
        Ok(())
    }

    /// Sets a limit, or takes away the one that an earlier daemon set.
    ///
    /// What is over a limit of memory must not go to the host's swap instead, which is everybody's:
    /// there is none for it. Version 1 counts both together, and wants the sum never below the
    /// memory (admin-guide/cgroup-v1/memory.rst, 2.4).
    fn limit(&self, controller: &str, limit: Option<u64>) -> io::Result<()> {
        let said = |none: &str| limit.map_or_else(|| none.to_owned(), |limit| limit.to_string());
        let set = |file: &str, text: &str| fs::write(self.dir.join(file), text);
        match (controller, self.tree.version) {
            ("memory", Version::One) => {
                let both = "memory.memsw.limit_in_bytes";
                let counts_both = self.dir.join(both).exists();
                if counts_both {
                    set(both, "-1")?;
                }
                set("memory.limit_in_bytes", &said("-1"))?;
                if counts_both {
                    set(both, &said("-1"))?;
                }
                Ok(())
            }
            ("memory", Version::Two) => {
                let swap = "memory.swap.max";
                if self.dir.join(swap).exists() {
                    set(swap, limit.map_or("max", |_| "0"))?;
                }
                set("memory.max", &said("max"))
            }
            _ => set(&format!("{controller}.max"), &said("max")),
        }
    }

    /// Has a process be in it. Somebody may have removed it since the last one.
    fn enter(&self, pid: u32, limits: CgroupLimits) -> io::Result<()> {
        let procs = self.dir.join("cgroup.procs");
        let entered = match fs::write(&procs, pid.to_string()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make(limits).and_then(|()| fs::write(&procs, pid.to_string()))
            }
            entered => entered,
        };
        self.is_missed.store(entered.is_err(), Ordering::Relaxed);
        entered
    }

    /// What is to become of a process that does without: an error if it would be without a limit.
    fn failed(&self, what: &str, error: &io::Error, limits: CgroupLimits) -> io::Result<()> {
        let has = |name: &&str| self.tree.controllers.contains(name);
        let mut asked = CONTROLLERS.iter().zip([limits.memory, limits.pids]);
        let dir = self.dir.display();
        if asked.any(|(name, limit)| limit.is_some() && has(name)) {
            return Err(io::Error::new(error.kind(), format!("the cgroup {dir}: {error}; {CURE}")));
        }
        tracing::error!(%dir, %error, what);
        Ok(())
    }

    fn remove(&self) {
        for _ in 0..TRIES {
            match fs::remove_dir(&self.dir) {
                Err(error) if error.raw_os_error() == Some(libc_ebusy()) => {
                    std::thread::sleep(PAUSE);
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    let dir = self.dir.display();
                    return tracing::warn!(%dir, %error, "a cgroup is left behind");
                }
                _ => return,
            }
        }
        tracing::warn!(dir = %self.dir.display(), "a cgroup is still in use, and left behind");
    }

    fn number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.dir.join(file)).ok()?.trim().parse().ok()
    }

    /// How often the memory killer has ended a process here.
    fn kills(&self, file: &str) -> Option<u64> {
        let text = fs::read_to_string(self.dir.join(file)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    fn memory(&self) -> Option<MemoryStatus> {
        let [now, max, kills] = match self.tree.version {
            Version::One => {
                ["memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"]
            }
            Version::Two => ["memory.current", "memory.max", "memory.events"],
        };
        // Without a limit, version 1 says the largest number of pages that there can be.
        let max = self.number(max).filter(|max| *max < 1 << 62);
        Some(MemoryStatus { now: self.number(now)?, max, kills: self.kills(kills).unwrap_or(0) })
    }
}

const fn libc_ebusy() -> i32 {
    rustix::io::Errno::BUSY.raw_os_error()
}

/// A network's. Dropping it removes it; its processes have ended before.
#[derive(Debug, Default)]
pub(super) struct Cgroup {
    parts: Vec<Part>,
    limits: CgroupLimits,
    name: (String, Names),
}

impl Cgroup {
    /// Has a process be in it, before it does anything.
    ///
    /// # Errors
    /// It would be without a limit that was asked for.
    pub(super) fn enter(&self, pid: u32) -> io::Result<()> {
        for part in &self.parts {
            if let Err(error) = part.enter(pid, self.limits) {
                part.failed("a network's process is not in its cgroup", &error, self.limits)?;
            }
        }
        Ok(())
    }

    /// How much memory its processes have.
    pub(super) fn memory(&self) -> Option<MemoryStatus> {
        let has = |part: &&Part| {
            part.tree.controllers.contains(&"memory") && !part.is_missed.load(Ordering::Relaxed)
        };
        self.parts.iter().find(has)?.memory()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        self.parts.iter().for_each(Part::remove);
        lock(&self.name.1).remove(&self.name.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(own: &str, mounts: &str) -> Host {
        Host { own: own.to_owned(), mounts: mounts.to_owned() }
    }

    #[test]
    fn our_own_cgroup_is_found_of_either_version() {
        let own = "4:memory:/a/b\n2:cpu,cpuacct:/\n1:name=systemd:/x\n0::/unit\n";
        let mounts = "30 20 0:26 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n\
             31 20 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
             32 20 0:28 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 none rw\n";
        let host = host(own, mounts);
        let dir = |controller| host.dir(controller).map(|dir| dir.display().to_string());
        assert_eq!(dir(Some("memory")).as_deref(), Some("/sys/fs/cgroup/memory/a/b"));
        assert_eq!(dir(Some("cpu")).as_deref(), Some("/sys/fs/cgroup/cpu/"));
        assert_eq!(dir(Some("pids")), None);
        assert_eq!(dir(None).as_deref(), Some("/sys/fs/cgroup/unified/unit"));
    }

    #[test]
    fn what_is_mounted_in_a_container_begins_further_down() {
        let own = "4:memory:/docker/abc/inner\n";
        let mounts = "30 20 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
             31 20 0:26 /docker/xyz /elsewhere ro - cgroup cgroup rw,memory\n";
        let dir = host(own, mounts).dir(Some("memory")).unwrap();
        assert_eq!(dir, Path::new("/sys/fs/cgroup/memory/inner"));
        let outside = host("4:memory:/../x\n", &mounts.replace("/docker/abc", "/"));
        assert_eq!(outside.dir(Some("memory")), None);
    }

    #[test]
    fn without_a_tree_of_its_own_and_without_a_limit_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = format!("30 20 0:26 / {} rw - cgroup2 none rw\n", dir.path().display());
        let host = host("0::/\n", &mounts);
        let refused = Cgroups::find(&host, CgroupLimits::default(), dir.path()).unwrap_err();
        assert!(refused.contains("Delegate"), "{refused}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let none = Cgroups::default().make("net").unwrap();
        none.enter(1).unwrap();
        assert_eq!(none.memory(), None);
    }

    #[test]
    fn a_network_that_comes_again_does_not_share_the_cgroup_of_one_that_still_ends() {
        let root = tempfile::tempdir().unwrap();
        let tree = Tree { version: Version::Two, dir: root.path().to_owned(), controllers: vec![] };
        let trees = Arc::new(vec![tree]);
        let cgroups = Cgroups { trees, prefix: "network-".into(), ..Cgroups::default() };
        let there = || -> BTreeSet<String> {
            let entries = fs::read_dir(root.path()).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        let ends = cgroups.make("net").unwrap();
        let next = cgroups.make("net").unwrap();
        assert_eq!(there(), ["network-net", "network-net.1"].map(str::to_owned).into());
        drop(ends);
        assert_eq!(there(), ["network-net.1"].map(str::to_owned).into());
        drop((next, cgroups.make("net").unwrap()));
        assert_eq!(there(), BTreeSet::new());
    }

    #[test]
    fn a_cgroup_with_a_strangers_process_is_not_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        file("cgroup.type", "domain");
        file("cgroup.controllers", "memory pids");
        file("cgroup.procs", &format!("{}\n999999\n", std::process::id()));
        let refused = Tree::second(dir.path().to_owned()).unwrap_err();
        assert!(refused.to_string().contains("other processes"), "{refused}");
        assert!(!dir.path().join(OURS).exists());
    }

    /// A cgroup of one controller that an earlier daemon left, with these files.
    fn left(version: Version, files: &[&str]) -> (tempfile::TempDir, Part) {
        let dir = tempfile::tempdir().unwrap();
        files.iter().for_each(|file| fs::write(dir.path().join(file), "77").unwrap());
        let tree = Tree { version, dir: dir.path().to_owned(), controllers: vec!["memory"] };
        let part = Part { tree, dir: dir.path().to_owned(), is_missed: AtomicBool::new(false) };
        (dir, part)
    }

    #[test]
    fn what_is_over_a_limit_does_not_go_to_the_hosts_swap() {
        let limits = CgroupLimits { memory: Some(4096), pids: None };
        let (dir, part) = left(Version::Two, &["memory.max", "memory.swap.max"]);
        let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        part.make(limits).unwrap();
        assert_eq!((read("memory.max"), read("memory.swap.max")), ("4096".into(), "0".into()));
        // Without a limit in this run nothing is left of it.
        part.make(CgroupLimits::default()).unwrap();
        assert_eq!((read("memory.max"), read("memory.swap.max")), ("max".into(), "max".into()));

        let files = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"];
        let (dir, part) = left(Version::One, &files);
        let read = || files.map(|file| fs::read_to_string(dir.path().join(file)).unwrap());
        part.make(limits).unwrap();
        assert_eq!(read(), ["4096", "4096"]);
        part.make(CgroupLimits::default()).unwrap();
        assert_eq!(read(), ["-1", "-1"]);

        // A kernel that does not count swap has no file for it.
        let (dir, part) = left(Version::Two, &["memory.max"]);
        part.make(limits).unwrap();
        assert!(!dir.path().join("memory.swap.max").exists());
    }

    #[test]
    fn no_process_runs_without_a_limit_that_was_asked_for() {
        let limits = CgroupLimits { memory: Some(4096), pids: None };
        let trouble = Cgroups::found(Err("no tree".to_owned()), limits).make("net").unwrap_err();
        assert!(trouble.to_string().contains("no tree"), "{trouble}");
        let without = Cgroups::found(Err("no tree".to_owned()), CgroupLimits::default());
        without.make("net").unwrap().enter(1).unwrap();

        let (dir, part) = left(Version::Two, &["memory.max", "memory.current"]);
        let mut cgroup = Cgroup { parts: vec![part], limits, name: Default::default() };
        cgroup.enter(1).unwrap();
        assert_eq!(cgroup.memory().map(|memory| memory.now), Some(77));
        // Nobody can be put into it any more.
        let procs = dir.path().join("cgroup.procs");
        fs::remove_file(&procs).unwrap();
        fs::create_dir(&procs).unwrap();
        let refused = cgroup.enter(2).unwrap_err().to_string();
        assert!(refused.contains("--network-memory-max"), "{refused}");
        // Without a limit it is said, and what the cgroup has is not the process's.
        cgroup.limits = CgroupLimits::default();
        cgroup.enter(2).unwrap();
        assert_eq!(cgroup.memory(), None);
        fs::remove_dir(&procs).unwrap();
        // Somebody has removed it: it is made again, with its limit.
        cgroup.limits = limits;
        fs::remove_file(dir.path().join("memory.max")).unwrap();
        fs::remove_file(dir.path().join("memory.current")).unwrap();
        fs::remove_dir(dir.path()).unwrap();
        cgroup.enter(3).unwrap();
        let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        assert_eq!((read("memory.max"), read("cgroup.procs")), ("4096".into(), "3".into()));
    }
}
