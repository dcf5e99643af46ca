//! The configuration is read again while the daemon runs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::daemon::Daemon;

const FIRST: &str = "[[networks]]\nname='blue'\nvni=7\n\
    [[nics]]\nname='a'\nnetwork='blue'\nmac='02:00:00:00:00:0a'\nlimits={max_qps=5}\n";
const SECOND: &str = "workers=3\nadmin={mode='0660'}\n[[networks]]\nname='blue'\nvni=8\n\
    [[networks]]\nname='red'\n[[nics]]\nname='a'\nnetwork='blue'\nmac='02:00:00:00:00:0b'\n\
    limits={max_qps=9}\naccess={mode='0600'}\n[[nics]]\nname='b'\nnetwork='red'\n";

struct Configured {
    daemon: Daemon,
    file: std::path::PathBuf,
}

impl Configured {
    fn start(text: &str) -> Self {
        let dir = TempDir::with_prefix("vr").unwrap();
        let file = dir.path().join("vhost-rdma.toml");
        std::fs::write(&file, text).unwrap();
        let daemon = Daemon::start_in(dir, &["--config", file.to_str().unwrap()]);
        Self { daemon, file }
    }

    fn hang_up(&self) {
        let pid = Pid::from_raw(self.daemon.pid().cast_signed()).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
    }

    fn nic(&self, name: &str) -> serde_json::Value {
        self.daemon.cli(&["nic", "show", name, "--json"]).json()
    }
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_can_be_is_taken_over_and_the_rest_is_said() {
    let here = Configured::start(FIRST);
    std::fs::write(&here.file, SECOND).unwrap();
    let said = here.daemon.cli(&["reload", "--json"]).json();
    let lines = |key: &str| -> Vec<String> {
        let list = said[key].as_array().unwrap().iter();
        list.map(|line| line.as_str().unwrap().to_owned()).collect()
    };
    let (changed, kept) = (lines("changed"), lines("kept"));
    for what in ["network \"red\" added", "NIC \"a\" changed", "NIC \"b\" added", "admin socket"] {
        assert!(changed.iter().any(|line| line.contains(what)), "{what}: {said}");
    }
    for what in ["workers", "VNI 7", "MAC address"] {
        assert!(kept.iter().any(|line| line.contains(what)), "{what}: {said}");
    }
    assert_eq!(said["failed"], serde_json::json!([]));
    let a = here.nic("a");
    assert_eq!(a["limits"]["max_qps"], 9);
    assert_eq!((&a["mac"], &a["vni"]), (&"02:00:00:00:00:0a".into(), &7.into()));
    let run = here.daemon.run_dir();
    assert_eq!(mode(&run.join("nics/a/vhost.sock")), 0o600);
    assert_eq!(mode(&here.daemon.socket()), 0o660);
    std::os::unix::net::UnixStream::connect(run.join("nics/b/vhost.sock")).unwrap();
    // Once more: everything that can be is in effect.
    let again = here.daemon.cli(&["reload", "--json"]).json();
    assert_eq!(again["changed"], serde_json::json!([]), "{again}");
    assert_ne!(again["kept"], serde_json::json!([]), "it is said again");
}

#[test]
fn a_signal_reads_it_too_and_nothing_ends_the_daemon() {
    let here = Configured::start(FIRST);
    std::fs::write(&here.file, SECOND).unwrap();
    here.hang_up();
    eventually("the NIC comes", || here.daemon.cli(&["nic", "show", "b"]).status == 0);
    for _ in 0..20 {
        here.hang_up();
    }
    assert_eq!(here.nic("a")["limits"]["max_qps"], 9);
    let (_dir, log) = here.daemon.stop();
    for what in ["NIC \"b\" added", "MAC address", "workers takes a restart"] {
        assert!(log.iter().any(|line| line.contains(what)), "{what}: {log:?}");
    }
}

#[test]
fn a_file_that_is_not_good_changes_nothing_and_is_told() {
    let here = Configured::start(FIRST);
    let before = here.nic("a");
    let conflict = SECOND.replace(
        "name='b'\nnetwork='red'",
        "name='b'\nnetwork='blue'\n\
        mac='02:00:00:00:00:0a'",
    );
    let broken = [
        ("[[nics", "not valid"),
        ("nonsense = 1", "not valid"),
        ("workers = 0", "workers"),
        ("metrics = 'x'", "metrics"),
        ("log = 'a=b=c'", "filter"),
        ("admin = { group = 'no-such-group' }", "no-such-group"),
        ("[[nics]]\nname='b'\nnetwork='none'", "none"),
        (&conflict, "02:00:00:00:00:0a"),
    ];
    for (text, word) in broken {
        std::fs::write(&here.file, text).unwrap();
        // A parser's message has lines that show the place.
        let said = here.daemon.cli(&["reload"]);
        assert!(said.status == 2 && said.err.contains(word), "{word}: {said:?}");
        assert_eq!(here.nic("a"), before, "{text}");
        assert_ne!(here.daemon.cli(&["nic", "show", "b"]).status, 0, "{text}");
    }
    std::fs::remove_file(&here.file).unwrap();
    here.daemon.cli(&["reload"]).fails(2, &["cannot read"]);
    here.hang_up();
    let (_dir, log) = here.daemon.stop();
    let told = log.iter().filter(|line| line.contains("nothing has changed")).count();
    assert!(told > broken.len(), "{log:?}");
}

#[test]
fn the_log_tells_more_when_the_file_says_so() {
    let here = Configured::start("");
    here.daemon.cli(&["network", "rm", "none"]);
    std::fs::write(&here.file, "log = 'debug'").unwrap();
    here.daemon.cli(&["reload"]).ok();
    here.daemon.cli(&["network", "rm", "none"]);
    let (_dir, log) = here.daemon.stop();
    let refused = log.iter().filter(|line| line.contains("request refused")).count();
    assert_eq!(refused, 1, "{log:?}");
}

#[test]
fn a_daemon_without_a_file_says_that_nothing_has_changed() {
    let daemon = Daemon::start();
    assert_eq!(daemon.cli(&["reload"]).ok(), "nothing has changed\n");
}
