//! The daemon as a process: what it leaves, what it keeps, what it serves.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use crate::daemon::Daemon;

#[test]
fn a_stopped_daemon_leaves_no_socket_and_keeps_its_networks_and_nics() {
    let daemon = Daemon::start();
    daemon.cli(&["network", "add", "blue", "--vni", "9"]).ok();
    daemon.cli(&["nic", "add", "a", "--network", "blue"]).ok();
    daemon
        .cli(&["nic", "set", "a", "--max-qps", "7", "--address", "10.0.0.9", "--mode", "0666"])
        .ok();
    let before = daemon.cli(&["nic", "show", "a", "--json"]).json();
    let run = daemon.run_dir();
    let socket = run.join("nics/a/vhost.sock");
    assert!(socket.metadata().unwrap().file_type().is_socket());
    let (dir, log) = daemon.stop();
    assert!(log.iter().any(|line| line.contains("SIGTERM")), "{log:?}");
    // The directory stays: a container may have it mounted.
    assert!(!socket.exists() && run.join("nics/a").is_dir() && !run.join("admin.sock").exists());

    let daemon = Daemon::start_in(dir, &[]);
    assert_eq!(daemon.cli(&["nic", "show", "a", "--json"]).json(), before);
    assert_eq!(before["limits"]["max_qps"], 7);
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o7777, 0o666);
    UnixStream::connect(&socket).unwrap();
    daemon.cli(&["nic", "rm", "a"]).ok();
    assert!(!run.join("nics/a").exists());
    daemon.cli(&["network", "rm", "blue"]).ok();
    let (dir, _) = daemon.stop();
    let daemon = Daemon::start_in(dir, &[]);
    assert_eq!(daemon.cli(&["nic", "list", "--json"]).json(), json!([]));
}

#[test]
fn a_killed_daemon_is_replaced_over_its_stale_sockets() {
    let mut daemon = Daemon::start();
    daemon.cli(&["nic", "add", "a"]).ok();
    let before = daemon.cli(&["nic", "show", "a", "--json"]).json();
    daemon.kill();
    assert!(daemon.socket().exists());
    daemon.cli(&["status"]).fails(3, &["nobody listens"]);
    let daemon = Daemon::start_in(daemon.into_dir(), &[]);
    assert_eq!(daemon.cli(&["nic", "show", "a", "--json"]).json(), before);
}

/// `nic show`'s word on whether a VMM is missed, once it is `missed`.
fn awaits(daemon: &Daemon, session: &str, missed: bool) {
    let begin = Instant::now();
    loop {
        let shown = daemon.cli(&["nic", "show", "a", "--json"]).json();
        if shown["session"] == session && shown["interrupted"] == missed {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{shown}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_vmm_that_lost_its_daemon_is_missed_until_one_connects() {
    let mut daemon = Daemon::start();
    daemon.cli(&["nic", "add", "a"]).ok();
    let socket = daemon.run_dir().join("nics/a/vhost.sock");
    // One that came and went before the daemon's death is missed by nobody.
    drop(UnixStream::connect(&socket).unwrap());
    awaits(&daemon, "absent", false);
    let vmm = UnixStream::connect(&socket).unwrap();
    awaits(&daemon, "connected", false);
    let run = |daemon: &Daemon| daemon.cli(&["status", "--json"]).json()["instance"].clone();
    let before = run(&daemon);
    daemon.kill();
    let daemon = Daemon::start_in(daemon.into_dir(), &[]);
    assert_ne!(run(&daemon), before);
    awaits(&daemon, "absent", true);
    assert!(daemon.cli(&["nic", "show", "a"]).ok().contains("has not come back"));
    drop(vmm);
    let again = UnixStream::connect(&socket).unwrap();
    awaits(&daemon, "connected", false);
    // A daemon that is told to end cuts its VMMs off as well.
    let (dir, _) = daemon.stop();
    let daemon = Daemon::start_in(dir, &[]);
    awaits(&daemon, "absent", true);
    drop(again);
    // A NIC of the same name is another NIC.
    daemon.cli(&["nic", "rm", "a"]).ok();
    assert!(!daemon.run_dir().join("nics/a").exists());
    daemon.cli(&["nic", "add", "a"]).ok();
    awaits(&daemon, "absent", false);
}

#[test]
fn an_ephemeral_daemon_forgets() {
    let daemon = Daemon::start_in(TempDir::with_prefix("vr").unwrap(), &["--ephemeral"]);
    daemon.cli(&["nic", "add", "a"]).ok();
    assert!(!daemon.run_dir().join("state.json").exists());
    assert_eq!(daemon.cli(&["status", "--json"]).json()["ephemeral"], true);
    let (dir, _) = daemon.stop();
    assert_eq!(Daemon::start_in(dir, &[]).cli(&["nic", "list", "--json"]).json(), json!([]));
}

#[test]
fn the_admin_socket_is_its_owners_alone_unless_said_otherwise() {
    let mode = |daemon: &Daemon| daemon.socket().metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&Daemon::start()), 0o600);
    let open = Daemon::start_in(TempDir::with_prefix("vr").unwrap(), &["--admin-mode", "0660"]);
    assert_eq!(mode(&open), 0o660);
}

#[test]
fn a_nics_socket_gets_its_owner_and_group() {
    let daemon = Daemon::start();
    // The present user and group can be given by anyone; root can give others too.
    let meta = daemon.dir.path().metadata().unwrap();
    let (mut uid, mut gid) = (meta.uid(), meta.gid());
    if uid == 0 {
        (uid, gid) = (12345, 12346);
    }
    daemon.cli(&["nic", "add", "a", "--owner", &uid.to_string(), "--group", &gid.to_string()]).ok();
    let socket = daemon.run_dir().join("nics/a/vhost.sock").metadata().unwrap();
    assert_eq!(
        (socket.uid(), socket.gid(), socket.permissions().mode() & 0o7777),
        (uid, gid, 0o660)
    );
}

#[test]
fn an_access_control_list_lets_others_in_and_outlives_the_daemon() {
    const STRANGER: u32 = 54321;
    let daemon = Daemon::start();
    let socket = daemon.run_dir().join("nics/a/vhost.sock");
    daemon
        .cli(&["nic", "add", "a", "--mode", "0600", "--acl", &format!("u:{STRANGER}:rw,g:7:r")])
        .ok();
    let listed =
        |daemon: &Daemon| daemon.cli(&["nic", "show", "a", "--json"]).json()["acl"].clone();
    let expected = listed(&daemon);
    assert_eq!(expected.as_array().unwrap().len(), 2, "{expected}");
    // The group's bits show the mask: the most that anyone named gets.
    let mode = || socket.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o660);
    // Only root can ask the kernel as another user would; others see that the list is kept.
    let is_root = daemon.dir.path().metadata().unwrap().uid() == 0;
    if is_root {
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(daemon.dir.path(), open).unwrap();
        assert!(may_connect(&socket, STRANGER) && !may_connect(&socket, STRANGER + 1));
    }

    // Another mode does not change the list, and neither does a new daemon.
    daemon.cli(&["nic", "set", "a", "--mode", "0640"]).ok();
    let (dir, _) = daemon.stop();
    let daemon = Daemon::start_in(dir, &[]);
    assert_eq!((listed(&daemon), mode()), (expected, 0o660));
    if is_root {
        assert!(may_connect(&socket, STRANGER) && !may_connect(&socket, STRANGER + 1));
    }
    daemon.cli(&["nic", "set", "a", "--no-acl"]).ok();
    assert_eq!((listed(&daemon), mode()), (serde_json::json!([]), 0o640));
    if is_root {
        assert!(!may_connect(&socket, STRANGER));
    }
    daemon.cli(&["nic", "set", "a", "--acl", "user=7"]).fails(2, &["user=7", "u:USER:rw"]);
}

/// Would the kernel let this user connect? Connecting takes write permission (unix(7)).
fn may_connect(socket: &Path, uid: u32) -> bool {
    use std::os::unix::process::CommandExt as _;
    let mut test = std::process::Command::new("/usr/bin/test");
    test.arg("-w").arg(socket).uid(uid).gid(uid).status().unwrap().success()
}

#[test]
fn the_configuration_file_makes_networks_and_nics_at_every_start() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let file = dir.path().join("vr.toml");
    std::fs::write(
        &file,
        "workers = 1\npoll_us = 5\n[[networks]]\nname = 'blue'\n[[nics]]\nname = 'a'\n\
         network = 'blue'\nlimits = { max_qps = 3 }\n",
    )
    .unwrap();
    let options = ["--config".to_owned(), file.to_str().unwrap().to_owned()];
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let daemon = Daemon::start_in(dir, &options);
    let before = daemon.cli(&["nic", "show", "a", "--json"]).json();
    assert_eq!((&before["configured"], &before["limits"]["max_qps"]), (&json!(true), &json!(3)));
    let status = daemon.cli(&["status", "--json"]).json();
    assert_eq!((&status["workers"], &status["poll_us"]), (&json!(1), &json!(5)));
    let removed = daemon.cli(&["nic", "rm", "a"]).ok();
    assert!(removed.contains("comes back"), "{removed}");
    let (dir, _) = daemon.stop();
    let daemon = Daemon::start_in(dir, &options);
    assert_eq!(daemon.cli(&["nic", "show", "a", "--json"]).json()["network"], "blue");
    let mac = daemon.cli(&["nic", "show", "a", "--json"]).json()["mac"].clone();
    let (dir, _) = daemon.stop();
    let daemon = Daemon::start_in(dir, &options);
    assert_eq!(daemon.cli(&["nic", "show", "a", "--json"]).json()["mac"], mac);
}

#[test]
fn metrics_have_one_series_for_each_nic() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let socket = dir.path().join("metrics.sock");
    let address = format!("unix:{}", socket.display());
    let daemon = Daemon::start_in(dir, &["--metrics", &address]);
    daemon.cli(&["nic", "add", "a", "--max-qps", "12"]).ok();
    let get = |path: &str| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let text = get("/metrics");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    for line in [
        "vhost_rdma_nic_tx_bytes_total{nic=\"a\",network=\"default\"} 0",
        "vhost_rdma_nic_qps_limit{nic=\"a\",network=\"default\"} 12",
        "vhost_rdma_nic_driver_ready{nic=\"a\",network=\"default\"} 0",
        "# EOF",
    ] {
        assert!(text.contains(line), "{line:?} is not in {text}");
    }
    assert!(get("/").starts_with("HTTP/1.1 404"));
    daemon.stop();
    assert!(!socket.exists());
}

#[test]
fn whoever_asks_for_metrics_and_does_not_read_holds_little_and_nobody_up() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let socket = dir.path().join("metrics.sock");
    let daemon = Daemon::start_in(dir, &["--metrics", &format!("unix:{}", socket.display())]);
    for n in 0..20 {
        daemon.cli(&["nic", "add", &format!("n{n}")]).ok();
    }
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    let asks = |question: &str| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        // It may be closed already.
        let _ = stream.write_all(question.as_bytes());
        stream
    };
    let question = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    let before = descriptors();
    let held: Vec<_> =
        (0..500).map(|n| asks(if n % 2 == 0 { question } else { "GET /met" })).collect();
    let begin = Instant::now();
    let mut text = String::new();
    asks(question).read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("# EOF\n"), "{text}");
    daemon.cli(&["status"]).ok();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    let most = before + 8 + 2;
    assert!(descriptors() <= most, "{} of at most {most}", descriptors());
    drop(held);
    daemon.stop();
}

#[test]
fn logs_are_json_lines_if_asked() {
    let daemon = Daemon::start_in(TempDir::with_prefix("vr").unwrap(), &["--log-format", "json"]);
    daemon.cli(&["nic", "add", "a"]).ok();
    let (_, log) = daemon.stop();
    let lines: Vec<serde_json::Value> =
        log.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(
        lines.iter().any(|line| line["message"] == "NIC added" && line["nic"] == "a"),
        "{log:?}"
    );
}

#[test]
fn a_client_that_stays_connected_does_not_keep_the_daemon() {
    let daemon = Daemon::start();
    let _open = UnixStream::connect(daemon.socket()).unwrap();
    daemon.stop();
}

/// Asks over the vhost-user protocol (QEMU's docs/interop/vhost-user.rst) how many queues the
/// device has, as a VMM does.
fn queues_of(socket: &Path) -> u64 {
    const GET_FEATURES: u32 = 1;
    const SET_FEATURES: u32 = 2;
    const GET_PROTOCOL_FEATURES: u32 = 15;
    const SET_PROTOCOL_FEATURES: u32 = 16;
    const GET_QUEUE_NUM: u32 = 17;
    let mut stream = UnixStream::connect(socket).unwrap();
    let mut send = |request: u32, value: Option<u64>| {
        let body = value.map(u64::to_ne_bytes);
        let body: &[u8] = body.as_ref().map_or(&[], |body| body);
        let length = u32::try_from(body.len()).unwrap();
        let message: Vec<u8> = [request, 1, length]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .chain(body.iter().copied())
            .collect();
        stream.write_all(&message).unwrap();
        if value.is_some() {
            return 0;
        }
        let mut reply = [0; 20];
        stream.read_exact(&mut reply).unwrap();
        u64::from_ne_bytes(reply[12..].try_into().unwrap())
    };
    let features = send(GET_FEATURES, None);
    send(SET_FEATURES, Some(features));
    let protocol = send(GET_PROTOCOL_FEATURES, None);
    send(SET_PROTOCOL_FEATURES, Some(protocol));
    send(GET_QUEUE_NUM, None)
}

#[test]
fn the_device_has_the_queues_that_the_vmm_is_told_of() {
    let daemon = Daemon::start();
    for (name, vectors, queues) in [("a", "4", 8), ("b", "1", 5), ("c", "32", 36)] {
        let nic = daemon.cli(&["nic", "add", name, "--vectors", vectors, "--json"]).json();
        assert_eq!(nic["num_queues"], queues);
        assert!(
            daemon.cli(&["nic", "qemu-args", name]).ok().contains(&format!(",num_vqs={queues},"))
        );
        assert_eq!(queues_of(&daemon.run_dir().join("nics").join(name).join("vhost.sock")), queues);
    }
}

#[test]
fn a_connected_vmm_shows() {
    let daemon = Daemon::start();
    daemon.cli(&["nic", "add", "a"]).ok();
    let session = || daemon.cli(&["nic", "show", "a", "--json"]).json()["session"].clone();
    let becomes = |wanted: &str| {
        let begin = Instant::now();
        while session() != wanted {
            assert!(begin.elapsed() < Duration::from_secs(20), "{} is not {wanted}", session());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    becomes("absent");
    let vmm = UnixStream::connect(daemon.run_dir().join("nics/a/vhost.sock")).unwrap();
    becomes("connected");
    drop(vmm);
    becomes("absent");
}

/// As where the disk is full.
#[test]
fn a_lock_file_that_cannot_be_written_keeps_nobody_from_serving() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let run = dir.path().join("run");
    std::fs::create_dir(&run).unwrap();
    std::os::unix::fs::symlink("/dev/full", run.join("daemon.lock")).unwrap();
    let daemon = Daemon::start_in(dir, &[]);
    daemon.cli(&["status"]).ok();
    let (_, log) = daemon.stop();
    assert!(log.iter().any(|line| line.contains("lock file")), "{log:?}");
}
