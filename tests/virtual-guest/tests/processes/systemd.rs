//! The unit that ships, under a real systemd: the daemon is killed, and its guests go on.
//!
//! systemd is the first process of a process namespace, with mounts of its own; no other unit than
//! ours is there. Its cgroups are made below the root's, and removed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use virtual_guest::daemon::{binary, copy_program};
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::world::{Node, Watchdog};

use super::{can_look, eventually, pair, start_anew, told_that_it_is_lost, writes};

const UNIT: &str = include_str!("../../../../vhost-rdma/systemd/vhost-rdma.service");
const SYSTEMD: [&str; 2] = ["/usr/lib/systemd/systemd", "/lib/systemd/systemd"];
/// In a namespace of its own nothing of this is anybody else's.
const SCRIPT: &str = "set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount --bind \"$1\" /mnt
export container=lxc SYSTEMD_UNIT_PATH=/mnt/units SYSTEMD_LOG_LEVEL=notice
exec \"$2\" --system --unit=ours.target --log-target=console";

struct Systemd {
    child: Child,
    dir: tempfile::TempDir,
    slice: String,
}

impl Systemd {
    /// None where there is no systemd.
    fn start() -> Option<Self> {
        let program = SYSTEMD.into_iter().find(|path| Path::new(path).exists())?;
        let dir = tempfile::Builder::new().prefix("vrdma-").tempdir().expect("a directory");
        let units = dir.path().join("units");
        std::fs::create_dir(&units).expect("it is ours");
        copy_program(&binary(), &dir.path().join("vhost-rdma"));
        std::fs::write(dir.path().join("config.toml"), "").expect("it is ours");
        // Its own slice: another run's unit is another cgroup.
        let slice = format!("vrdmatest{}.slice", std::process::id());
        let unit = UNIT
            .replace("/usr/bin/vhost-rdma", "/mnt/vhost-rdma")
            .replace("/etc/vhost-rdma.toml", "/mnt/config.toml")
            .replace(
                "[Service]",
                &format!(
                    "DefaultDependencies=no\n[Service]\nSlice={slice}\n\
                     StandardError=append:/mnt/log"
                ),
            );
        std::fs::write(units.join("vhost-rdma.service"), unit).expect("it is ours");
        let target = "[Unit]\nDefaultDependencies=no\nWants=vhost-rdma.service\n";
        std::fs::write(units.join("ours.target"), target).expect("it is ours");
        let log = std::fs::File::create(dir.path().join("log")).expect("it is ours");
        let child = Command::new("unshare")
            .args(["--fork", "--pid", "--mount", "--uts", "--mount-proc", "--kill-child"])
            .args(["sh", "-c", SCRIPT, "sh"])
            .arg(dir.path())
            .arg(program)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .expect("util-linux");
        Some(Self { child, dir, slice })
    }

    /// The first process of the namespace.
    fn init(&self) -> Option<u32> {
        let pid = self.child.id();
        let path = format!("/proc/{pid}/task/{pid}/children");
        std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
    }

    /// Its file system.
    fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.init().expect("it runs")))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn systemctl(&self, args: &[&str]) -> String {
        let init = self.init().expect("it runs").to_string();
        let output = Command::new("nsenter")
            .args(["--target", &init, "--mount", "--pid", "systemctl"])
            .args(args)
            .output()
            .expect("nsenter");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{args:?}: {text}{output:?}\n{}", self.log());
        text.trim().to_owned()
    }

    fn try_cli(&self, args: &[&str]) -> Option<Value> {
        let socket = self.root().join("run/vhost-rdma/admin.sock");
        let mut command = Command::new(binary());
        command.arg("--socket").arg(socket).arg("--json").args(args);
        let output = command.output().expect("the program");
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    fn node(&self, name: &str) -> Node {
        let nic = self.try_cli(&["nic", "add", name, "--address", "10.0.0.1"]);
        let nic = nic.ok_or_else(|| self.log()).expect("a NIC");
        let socket = nic["socket"].as_str().expect("a path").trim_start_matches('/').to_owned();
        let socket = self.root().join(socket);
        let guest = Guest::connect(&socket, GuestConfig::default()).expect("it gets in");
        let gid = virtual_guest::world::ipv4_gid(0, 1);
        Node::start(name.to_owned(), socket, guest, gid)
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // With the first process of a namespace end all; their cgroups are left.
        let left = || {
            let mut dirs = Vec::new();
            for tree in std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
                for name in [self.slice.as_str(), "init.scope", "system.slice"] {
                    collect(&tree.path().join(name), &mut dirs);
                }
                collect(&Path::new("/sys/fs/cgroup").join(&self.slice), &mut dirs);
            }
            dirs
        };
        for round in 0..100 {
            let dirs = left();
            // Those of a systemd that this machine runs itself have processes, and stay.
            let gone = dirs.iter().filter(|dir| std::fs::remove_dir(dir).is_ok()).count();
            let ours = |dir: &PathBuf| dir.to_string_lossy().contains(&self.slice);
            if gone == 0 && round > 10 && !dirs.iter().any(ours) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Folders below `dir`, the inner ones first.
fn collect(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), into);
        }
    }
    if dir.is_dir() {
        into.push(dir.to_owned());
    }
}

#[test]
fn the_unit_in_the_manual_is_the_one_that_ships() {
    let text = include_str!("../../../../docs/OPERATIONS.md");
    assert!(text.contains(&format!("```ini\n# /etc/systemd/system/vhost-rdma.service\n{UNIT}```")));
}

#[test]
fn a_daemon_that_is_killed_is_started_again_and_its_guests_go_on() {
    let _watchdog = Watchdog::new(Duration::from_secs(180));
    let systemd = Systemd::start();
    can_look("systemd", systemd.is_some());
    let Some(systemd) = systemd else { return };
    eventually("the unit does not start", || {
        systemd.init().is_some() && systemd.try_cli(&["status"]).is_some()
    });
    let a = systemd.node("a");
    writes(&mut pair(&a, &a), 1);
    let show = |what: &str| systemd.systemctl(&["show", "-P", what, "vhost-rdma.service"]);
    let kept: u32 = show("NFileDescriptorStore").parse().expect("a number");
    assert!(kept >= 4, "the admin socket, the NIC's, and a session: {kept}");
    let mut main = show("MainPID");
    for round in 2..4 {
        systemd.systemctl(&["kill", "--signal=KILL", "vhost-rdma.service"]);
        eventually("it is not started again", || {
            let now = show("MainPID");
            now != main && now != "0" && systemd.try_cli(&["status"]).is_some()
        });
        main = show("MainPID");
        let shown = systemd.try_cli(&["nic", "show", "a"]).expect("it");
        assert_eq!(shown["interrupted"], false, "{}", systemd.log());
        assert_ne!(shown["session"], "absent", "{}", systemd.log());
        told_that_it_is_lost(&a.guest);
        let a = start_anew(&a);
        writes(&mut pair(&a, &a), round);
    }
    assert_eq!(show("NRestarts"), "2");
    assert_eq!(systemd.try_cli(&["nic", "show", "a"]).expect("it")["session"], "driver_ready");
    let now: u32 = show("NFileDescriptorStore").parse().expect("a number");
    assert_eq!(now, kept, "nothing is left over");
    assert_eq!(show("NotifyAccess"), "main");
    systemd.systemctl(&["stop", "vhost-rdma.service"]);
    assert_eq!(show("Result"), "success");
}
