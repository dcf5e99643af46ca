//! A node: a root file system of its own in mount, PID, network, cgroup, IPC and UTS namespaces of
//! its own.
//!
//! kubelet, containerd and our agent have paths that no option moves
//! (`/var/lib/kubelet/device-plugins`, `/run/netns`), write sysctls and make cgroups at the top.
//! Here they have a machine to themselves: the paths are those of production, any number of nodes
//! live side by side, and the end of one is the end of its first process, which takes every
//! process, mount and network of it along, however the run ended. What the kernel does not take
//! back by itself is cgroups; they lie below one directory per hierarchy, and the next run removes
//! what a killed one left. The sysctls that kubelet insists on are covered with files that hold the
//! values that it wants, so that the machine's own are never written.
//!
//! Commands enter with `nsenter`. One that detaches itself becomes a child of the node's first
//! process (`tini`, which reaps it).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::cgroups::{self, Hierarchies};
use crate::exec::{self, capture, tail, tied};

const BASE: &str = "/tmp";
const PREFIX: &str = "vhost-rdma-k8s.";
const START_WAIT: Duration = Duration::from_secs(60);
const COMMAND_WAIT: Duration = Duration::from_secs(60);
const STOP_WAIT: Duration = Duration::from_secs(30);

/// Holds the lock of the state directory and puts itself into the cgroups, which become the tops of
/// a cgroup namespace. `$1` state directory, `$2` root file system, `$4` the node's number, `$5`
/// what is next.
const ENTER: &str = r#"
while read -r dir; do echo $$ > "$dir/cgroup.procs"; done < "$1/cgroups"
exec unshare --cgroup sh -ec "$5" sh "$1" "$2" "$3" "$4"
"#;

/// Out of the way of version 2, whose top may hand controllers down once nobody is in it; then
/// the other namespaces.
const NAMESPACE: &str = r#"
while read -r dir; do
  [ -d "$dir/node" ] || continue
  echo $$ > "$dir/node/cgroup.procs"
  sed 's/[^ ]*/+&/g' "$dir/cgroup.controllers" > "$dir/cgroup.subtree_control"
done < "$1/cgroups"
exec unshare --mount --propagation private --pid --fork --kill-child=KILL --net --ipc --uts \
  sh -ec "$3" sh "$1" "$2" "$4"
"#;

/// The node's first process, up to the moment when it becomes `tini`. `/proc` is still the
/// machine's here, so the first line writes the process id as the machine counts. `/dev/net/tun` is
/// open to everybody, as udev makes it and not every container's `/dev` has it. Each cgroup
/// hierarchy is mounted as this cgroup namespace shows it: our directory is its top.
const INIT: &str = r#"
state=$1
number=$3
read -r pid rest < /proc/self/stat
echo "$pid" > "$state/init.pid"
cd "$state"
mkdir -p upper work root node/containerd node/etcd node/kubelet
mount -t overlay overlay -o "lowerdir=$2,upperdir=$state/upper,workdir=$state/work" root
cd root
mkdir -p lab var/lib/containerd var/lib/etcd var/lib/kubelet etc/cni/net.d opt/cni/bin .old
mount --bind "$state/lab" lab
for d in containerd etcd kubelet; do mount --bind "$state/node/$d" var/lib/$d; done
mount -t tmpfs -o mode=755 run run
mount -t tmpfs tmp tmp
mount -t proc proc proc
mount -t sysfs sys sys
mount --rbind /dev dev
mount -t tmpfs shm dev/shm
[ ! -d dev/net ] || mount -t tmpfs -o mode=755 net dev/net
[ ! -d dev/net ] || mknod -m 666 dev/net/tun c 10 200
while read -r point kind options; do
  mkdir -p "sys/fs/cgroup/$point"
  mount -t $kind -o "$options" "$kind" "sys/fs/cgroup/$point"
done < "$state/mounts"
while read -r key value; do
  [ -e "proc/sys/$key" ] || continue
  echo "$value" > "tmp/sysctl"
  mkdir -p "run/sysctl/${key%/*}"
  mv tmp/sysctl "run/sysctl/$key"
  mount --bind "run/sysctl/$key" "proc/sys/$key"
done <<END
kernel/keys/root_maxbytes 25000000
kernel/keys/root_maxkeys 1000000
kernel/panic 10
kernel/panic_on_oops 1
vm/overcommit_memory 1
vm/panic_on_oom 0
END
echo nameserver 127.0.0.1 > etc/resolv.conf
echo 127.0.0.1 localhost node$number > etc/hosts
hostname node$number
ip link set lo up
ip link add k8sbr0 type bridge
ip addr add 10.222.$((number - 1)).1/24 dev k8sbr0
ip link set k8sbr0 up
echo 1 > proc/sys/net/ipv4/ip_forward
pivot_root . .old
exec chroot . sh -ec 'umount -l /.old; mount --make-rshared /; touch /lab/up
  exec tini -- sleep infinity'
"#;

/// `nsenter` changes what a process sees of the cgroups, not which it is in; and from within the
/// namespace nobody can be fetched into it (`nsdelegate`, cgroup-v2.rst). `$1` the list of files,
/// `$2` the node's first process; the rest is the command.
const JOIN: &str = r#"while read -r f; do echo $$ > "$f"; done < "$1"
target=$2; shift 2
exec nsenter --target "$target" --mount --pid --net --ipc --uts --cgroup -- "$@""#;

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    dir: PathBuf,
    number: u8,
    pid: u32,
    /// The process that keeps the namespaces, if this run ends with them.
    keeper: Option<Child>,
}

/// How long a node lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// Until the value is dropped or this process ends.
    Ours,
    /// Until [`Node::end`], across runs.
    Detached,
}

impl Node {
    /// A new node called `name` on this root file system, the first of its cluster. What dead ones
    /// left is removed first.
    pub(crate) fn start(name: &str, root: &Path, life: Life) -> Result<Self> {
        Self::start_as(name, 1, root, life)
    }

    /// The same, of this number in its cluster: its name there and its addresses follow from it.
    pub(crate) fn start_as(name: &str, number: u8, root: &Path, life: Life) -> Result<Self> {
        sweep();
        let dir = Path::new(BASE).join(format!("{PREFIX}{name}"));
        if dir.exists() {
            bail!(
                "a cluster runs in {}: `cargo xtask k8s down` ends one that `up` made",
                dir.display()
            );
        }
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        fs::create_dir_all(dir.join("lab/log"))?;
        Hierarchies::find()?.make(&dir, &format!("{PREFIX}{name}"))?;
        let log = fs::File::create(dir.join("lab/log/init.log"))?;
        let mut cmd = match life {
            Life::Ours => tied("flock"),
            Life::Detached => {
                // A group leader would make setsid fork and end.
                let mut cmd = Command::new("setsid");
                cmd.arg("flock").stdin(Stdio::null());
                cmd
            }
        };
        cmd.args(["--nonblock", "--no-fork"]).arg(dir.join("lock"));
        cmd.args(["sh", "-ec", ENTER, "sh"]).arg(&dir).arg(root).arg(INIT);
        cmd.arg(number.to_string()).arg(NAMESPACE);
        fs::write(dir.join("number"), number.to_string())?;
        let keeper = cmd.stdout(log.try_clone()?).stderr(log).spawn().context("flock")?;
        let mut node = Self { dir, number, pid: 0, keeper: Some(keeper) };
        let up = node.dir.join("lab/up");
        exec::wait_for("the node's first process", START_WAIT, || {
            if let Some(keeper) = &mut node.keeper
                && let Some(status) = keeper.try_wait()?
            {
                bail!("the node ended at its start: {status}\n{}", tail(&node.log("init"), 0, 25));
            }
            Ok(up.exists().then_some(()))
        })?;
        node.pid = fs::read_to_string(node.dir.join("init.pid"))?.trim().parse()?;
        if life == Life::Detached {
            node.keeper = None;
        }
        Ok(node)
    }

    /// The node that an earlier run left, if it is there and alive.
    pub(crate) fn find(name: &str) -> Result<Option<Self>> {
        sweep();
        let dir = Path::new(BASE).join(format!("{PREFIX}{name}"));
        if !dir.exists() {
            return Ok(None);
        }
        let pid = fs::read_to_string(dir.join("init.pid"))
            .with_context(|| format!("the node in {} is not up yet", dir.display()))?;
        let number = fs::read_to_string(dir.join("number"))?.trim().parse()?;
        Ok(Some(Self { dir, number, pid: pid.trim().parse()?, keeper: None }))
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its name in the cluster.
    pub(crate) fn name(&self) -> String {
        format!("node{}", self.number)
    }

    /// The third octet of its pods' addresses, `10.222.SUBNET.0/24`; the first is the node's own.
    pub(crate) fn subnet(&self) -> u8 {
        self.number - 1
    }

    /// Its first process, as the machine counts.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// A script beside the node's files that runs `program` in it, for people.
    pub(crate) fn write_entry(&self, name: &str, program: &str) -> Result<()> {
        let (procs, pid) = (self.dir.join(cgroups::PROCS), self.pid);
        let script = format!(
            "#!/bin/sh\nexec sh -ec '{JOIN}' sh {} {pid} {program} \"$@\"\n",
            procs.display()
        );
        let path = self.dir.join(name);
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(())
    }

    /// What the node sees as `/lab`.
    pub(crate) fn lab(&self) -> PathBuf {
        self.dir.join("lab")
    }

    /// The path of a file of the node as this process can open it.
    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.pid))
    }

    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.dir.join("lab/log").join(format!("{name}.log"))
    }

    /// A command in the node.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut cmd = tied("sh");
        cmd.args(["-ec", JOIN, "sh"]).arg(self.dir.join(cgroups::PROCS));
        cmd.arg(self.pid.to_string()).arg(program);
        cmd.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        cmd.env("HOME", "/root").env("LC_ALL", "C.UTF-8");
        cmd
    }

    /// Runs a short command in the node; its standard output.
    pub(crate) fn run(&self, args: &[&str]) -> Result<String> {
        let (program, rest) = args.split_first().context("no command")?;
        capture(self.command(program).args(rest), COMMAND_WAIT)
    }

    /// Runs a shell script in the node.
    pub(crate) fn sh(&self, script: &str) -> Result<String> {
        self.run(&["sh", "-ec", script])
    }

    /// Starts a server in the node that outlives this call; its output goes to the log of this
    /// name.
    pub(crate) fn spawn(&self, name: &str, command: &[&str]) -> Result<()> {
        let script = r#"log=$1; pid=$2; shift 2
setsid "$@" < /dev/null >> "$log" 2>&1 &
echo $! > "$pid""#;
        let log = format!("/lab/log/{name}.log");
        let pid = format!("/lab/{name}.pid");
        let mut args = vec!["sh", "-ec", script, "sh", &log, &pid];
        args.extend_from_slice(command);
        self.run(&args).map(|_| ()).with_context(|| format!("cannot start {name}"))
    }

    /// Whether a server that [`Self::spawn`] started is alive.
    pub(crate) fn alive(&self, name: &str) -> bool {
        fs::read_to_string(self.lab().join(format!("{name}.pid"))).is_ok_and(|pid| {
            // The first thread is a zombie while others still hold what they hold; `tini` takes the
            // rest away.
            self.path(&format!("/proc/{}", pid.trim())).exists()
        })
    }

    /// An error with the end of its log if the server is gone.
    pub(crate) fn check_alive(&self, name: &str) -> Result<()> {
        if !self.alive(name) {
            bail!("{name} ended:\n{}", tail(&self.log(name), 0, 25));
        }
        Ok(())
    }

    /// Sends a signal to a server and waits until it is gone.
    pub(crate) fn kill(&self, name: &str, signal: &str) -> Result<()> {
        self.check_alive(name)?;
        let script = r#"kill -"$1" "$(cat "/lab/$2.pid")""#;
        self.run(&["sh", "-ec", script, "sh", signal, name])?;
        exec::wait_for(&format!("the end of {name}"), STOP_WAIT, || {
            Ok((!self.alive(name)).then_some(()))
        })
    }

    /// The process id of a server as the machine counts.
    pub(crate) fn outer_pid(&self, name: &str) -> Result<rustix::process::Pid> {
        let inner = fs::read_to_string(self.lab().join(format!("{name}.pid")))?;
        let here = fs::read_link(format!("/proc/{}/ns/pid", self.pid))?;
        let found = fs::read_dir("/proc")?.flatten().find_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let status = fs::read_to_string(entry.path().join("status")).ok()?;
            let ids = status.lines().find_map(|l| l.strip_prefix("NSpid:"))?;
            let ours = ids.split_whitespace().next_back()? == inner.trim()
                && fs::read_link(entry.path().join("ns/pid")).ok()? == here;
            ours.then(|| rustix::process::Pid::from_raw(pid)).flatten()
        });
        found.with_context(|| format!("{name} is not running"))
    }

    /// Ends the node and takes away what the kernel left; an error names what would not go.
    pub(crate) fn end(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        if self.dir.as_os_str().is_empty() {
            return Ok(());
        }
        let dir = std::mem::take(&mut self.dir);
        let namespaces = namespaces_of(self.pid);
        let groups = cgroups::made(&dir, PREFIX);
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw) {
            // The first process of a PID namespace takes the others along.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        if let Some(keeper) = &mut self.keeper {
            exec::end_group(keeper, Duration::from_secs(1));
        }
        let deadline = std::time::Instant::now() + STOP_WAIT;
        let left = loop {
            let left = leftovers(&dir, &namespaces, &groups);
            if left.is_empty() || std::time::Instant::now() > deadline {
                break left;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        if !left.is_empty() {
            bail!("the node is gone, but these are not:\n  {}", left.join("\n  "));
        }
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A detached node that was only looked at stays.
        if self.keeper.is_some()
            && let Err(e) = self.finish()
        {
            eprintln!("warning: {e:#}");
        }
    }
}

/// The inode numbers of a process's namespaces, as links say them.
fn namespaces_of(pid: u32) -> Vec<String> {
    ["mnt", "net", "pid", "cgroup", "ipc", "uts"]
        .iter()
        .filter_map(|n| fs::read_link(format!("/proc/{pid}/ns/{n}")).ok())
        .map(|l| l.display().to_string())
        .collect()
}

/// What is still there of a node: processes in its namespaces, cgroups, mounts.
fn leftovers(dir: &Path, namespaces: &[String], groups: &[PathBuf]) -> Vec<String> {
    let mut left = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let theirs = namespaces_of(pid);
        if theirs.iter().any(|n| namespaces.contains(n)) {
            let what = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            left.push(format!("process {pid} ({})", what.trim()));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let at = dir.display().to_string();
    left.extend(mounts.lines().filter(|l| l.contains(&at)).map(|l| format!("mount {l}")));
    for cgroup in groups {
        cgroups::remove(cgroup);
        if cgroup.exists() {
            left.push(format!("cgroup {}", cgroup.display()));
        }
    }
    left
}

/// Removes what is left of nodes whose lock nobody holds.
fn sweep() {
    for entry in fs::read_dir(BASE).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(|n| n.starts_with(PREFIX)) {
            continue;
        }
        let dir = entry.path();
        // Without a lock file the node is being made, or its maker died before: an old one is no
        // longer being made.
        let free = match fs::File::open(dir.join("lock")) {
            Ok(lock) => lock.try_lock().is_ok(),
            Err(_) => fs::metadata(&dir)
                .and_then(|m| m.modified())
                .is_ok_and(|t| t.elapsed().unwrap_or_default() > START_WAIT),
        };
        if free {
            for cgroup in cgroups::made(&dir, PREFIX) {
                cgroups::remove(&cgroup);
            }
            let _ = fs::remove_dir_all(&dir);
        }
    }
}
