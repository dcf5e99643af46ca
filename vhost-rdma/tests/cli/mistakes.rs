//! Every mistake has one sentence that names the cure, and an exit status that tells its kind.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::daemon::{Daemon, cli, serve_fails, vhost_rdma};

/// "nobody" on every distribution.
const NOBODY: u32 = 65534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn the_daemon_is_not_running() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let socket = dir.path().join("admin.sock");
    cli(&socket, &["status"]).fails(3, &["not running", "vhost-rdma serve", "--socket"]);
    drop(UnixListener::bind(&socket).unwrap());
    cli(&socket, &["nic", "list"]).fails(3, &["not running", "nobody listens"]);
    let said = cli(&socket, &["status", "--json"]);
    let error: Value = serde_json::from_str(&said.err).unwrap();
    assert_eq!(error["error"]["code"], "unavailable");
    assert!(error["error"]["message"].as_str().unwrap().contains("not running"));
}

#[test]
fn what_answers_is_not_the_daemon() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let socket = dir.path().join("admin.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"220 mail.example ESMTP\r\n").unwrap();
    });
    cli(&socket, &["status"]).fails(3, &["did not answer", "vhost-rdma status"]);
    other.join().unwrap();
}

#[test]
fn a_second_daemon_in_the_same_directory() {
    let daemon = Daemon::start();
    let pid = daemon.pid().to_string();
    let dir = daemon.run_dir();
    serve_fails(&["--runtime-dir", dir.to_str().unwrap()])
        .fails(5, &["another vhost-rdma daemon", &pid, "--runtime-dir"]);
    daemon.cli(&["status"]).ok();
}

#[test]
fn sockets_in_use_and_stale_ones() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let run = dir.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let foreign = UnixListener::bind(run.join("admin.sock")).unwrap();
    serve_fails(&["--runtime-dir", run.to_str().unwrap()]).fails(5, &["in use", "admin.sock"]);
    drop(foreign);
    let daemon = Daemon::start_in(dir, &[]);
    std::fs::create_dir_all(run.join("nics/a")).unwrap();
    let foreign = UnixListener::bind(run.join("nics/a/vhost.sock")).unwrap();
    daemon
        .cli(&["nic", "add", "a"])
        .fails(5, &["in use by another process", "nics/a/vhost.sock", "another name"]);
    assert_eq!(daemon.cli(&["nic", "list", "--json"]).json(), serde_json::json!([]));
    drop(foreign);
    daemon.cli(&["nic", "add", "a"]).ok();
}

#[test]
fn names_taken_malformed_and_unknown() {
    let daemon = Daemon::start();
    daemon.cli(&["nic", "add", "storage-1"]).ok();
    daemon.cli(&["nic", "add", "storage-1"]).fails(5, &["already exists", "nic rm storage-1"]);
    daemon.cli(&["network", "add", "default"]).fails(5, &["already exists"]);
    daemon.cli(&["nic", "add", "Bad"]).fails(2, &["\"Bad\" is not valid", "a-z"]);
    daemon.cli(&["network", "add", "a/b"]).fails(2, &["not valid"]);
    for command in ["show", "rm", "qemu-args", "cloud-hypervisor-args"] {
        daemon
            .cli(&["nic", command, "storage1"])
            .fails(4, &["no NIC \"storage1\"", "did you mean \"storage-1\"?", "nic list"]);
    }
    daemon.cli(&["nic", "set", "nope", "--max-qps", "1"]).fails(4, &["no NIC \"nope\""]);
    daemon
        .cli(&["nic", "add", "b", "--network", "defualt"])
        .fails(4, &["did you mean \"default\"?", "network add defualt"]);
    daemon.cli(&["network", "rm", "blue"]).fails(4, &["no network \"blue\""]);
    daemon.cli(&["nic", "list", "--network", "blue"]).fails(4, &["no network \"blue\""]);
    let said = daemon.cli(&["nic", "show", "nope", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&said.err).unwrap()["error"]["code"], "not_found");
}

#[test]
fn networks_that_cannot_go_and_vnis_that_cannot_be() {
    let daemon = Daemon::start();
    daemon.cli(&["network", "add", "blue", "--vni", "7"]).ok();
    daemon.cli(&["nic", "add", "a", "--network", "blue"]).ok();
    daemon.cli(&["network", "rm", "blue"]).fails(5, &["not empty", "1 NIC(s) (a)", "nic rm"]);
    daemon.cli(&["network", "rm", "default"]).fails(5, &["always exists"]);
    daemon.cli(&["network", "add", "red", "--vni", "7"]).fails(5, &["VNI 7", "\"blue\""]);
    daemon.cli(&["network", "add", "red", "--vni", "0"]).fails(2, &["1 to 16777215"]);
    daemon.cli(&["network", "add", "red", "--vni", "16777216"]).fails(2, &["1 to 16777215"]);
}

#[test]
fn values_of_a_nic() {
    let daemon = Daemon::start();
    daemon.cli(&["nic", "add", "a", "--mac", "02:00:00:00:00:01", "--address", "10.0.0.1"]).ok();
    let refused = |args: &[&str], status: i32, words: &[&str]| {
        let all: Vec<&str> = ["nic", "add", "b"].iter().chain(args).copied().collect();
        daemon.cli(&all).fails(status, words);
    };
    refused(&["--mac", "02:00"], 2, &["MAC address \"02:00\"", "02:00:00:00:00:01"]);
    refused(&["--mac", "03:00:00:00:00:01"], 2, &["multicast"]);
    refused(&["--mac", "02:00:00:00:00:01"], 5, &["belongs to NIC \"a\"", "leave --mac away"]);
    refused(&["--address", "10.0.0"], 2, &["\"10.0.0\" is not valid", "10.0.0.5"]);
    refused(&["--address", "10.0.0.2/24"], 2, &["prefix length"]);
    refused(&["--address", "10.0.0.1"], 5, &["belongs to NIC \"a\"", "nic set a"]);
    refused(&["--owner", "no-such-user"], 2, &["no user \"no-such-user\"", "getent passwd"]);
    refused(&["--group", "no-such-group"], 2, &["no group \"no-such-group\"", "getent group"]);
    refused(&["--backing", "hard"], 2, &["\"hard\"", "soft", "rnic:DEVICE"]);
    refused(&["--virtio-id", "64"], 2, &["virtio id 64"]);
    refused(&["--vectors", "33"], 2, &["1 to 32"]);
    refused(&["--vectors", "65537"], 2, &["1 to 32"]);
    refused(&["--max-qps", "0"], 2, &["max_qps must be at least 1"]);
    daemon.cli(&["nic", "set", "a"]).fails(2, &["nothing to change"]);
    daemon.cli(&["nic", "set", "a", "--owner", "no-such-user"]).fails(2, &["no user"]);
    assert_eq!(daemon.cli(&["nic", "list", "--json"]).json().as_array().unwrap().len(), 1);
}

#[test]
fn options_that_no_vmm_takes() {
    let daemon = Daemon::start();
    daemon.cli(&["nic", "add", "a"]).ok();
    let refused = |args: &[&str], words: &[&str]| {
        let all: Vec<&str> = ["nic", "qemu-args", "a"].iter().chain(args).copied().collect();
        daemon.cli(&all).fails(2, words);
    };
    refused(&["--netdev", "user"], &["netdev \"user\"", "tap:IFNAME"]);
    refused(&["--netdev", "tap:much-too-long-for-linux"], &["interface name"]);
    refused(&["--memory", "1024"], &["memory size", "512M"]);
    refused(&["--virtio-id", "99"], &["virtio id 99"]);
    refused(&["--vectors", "2"], &["has 4 completion vectors", "nic add --vectors 2"]);
    daemon
        .cli(&["nic", "cloud-hypervisor-args", "a", "--tap", "a b"])
        .fails(2, &["interface name"]);
}

#[test]
fn paths_that_are_too_long() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let long = dir.path().join("d".repeat(110));
    let long = long.to_str().unwrap();
    serve_fails(&["--runtime-dir", long]).fails(2, &["admin.sock", "allows 107", "--runtime-dir"]);
    cli(long.as_ref(), &["status"]).fails(2, &["allows 107", "--socket"]);
    let daemon = Daemon::start();
    let name = "n".repeat(63);
    let fits = 107 - daemon.run_dir().join("nics").as_os_str().len() - "//vhost.sock".len();
    if fits < 63 {
        daemon.cli(&["nic", "add", &name]).fails(2, &["allows 107", "shorter NIC name"]);
    }
    daemon.cli(&["nic", "add", &name[..fits.min(63)]]).ok();
}

#[test]
fn configuration_files() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let run = dir.path().join("run");
    let file = dir.path().join("vr.toml");
    let options = ["--runtime-dir", run.to_str().unwrap(), "--config", file.to_str().unwrap()];
    serve_fails(&options).fails(2, &["cannot read the configuration file", "vr.toml"]);
    std::fs::write(&file, "workers = 0").unwrap();
    serve_fails(&options).fails(2, &["0 workers"]);
    std::fs::write(&file, "admin = { owner = 'no-such-user' }").unwrap();
    serve_fails(&options).fails(2, &["admin socket", "no user"]);
    std::fs::write(&file, "[[nics]]\nname = 'a'\nnetwork = 'blue'").unwrap();
    serve_fails(&options)
        .fails(2, &["in the configuration file, NIC \"a\"", "no network \"blue\""]);
    std::fs::write(&file, "wrokers = 1").unwrap();
    let said = serve_fails(&options);
    assert_eq!(said.status, 2);
    assert!(said.err.contains("wrokers") && said.err.contains("line 1"), "{said:?}");
    std::fs::write(&file, "").unwrap();
    std::fs::write(run.join("state.json"), "{").unwrap();
    serve_fails(&options).fails(2, &["state.json", "damaged", "move it away"]);
}

#[test]
fn log_filters_metrics_addresses_and_ports() {
    let said = vhost_rdma().args(["serve"]).env("VHOST_RDMA_LOG", "a=b=c").output().unwrap();
    assert!(String::from_utf8_lossy(&said.stderr).contains("is not a log filter"));
    let said = serve_fails(&["--metrics", "nowhere"]);
    assert_eq!(said.status, 2);
    assert!(said.err.contains("not a metrics address"), "{said:?}");
    serve_fails(&["--cm-port", "7471", "--cm-port", "1023"])
        .fails(2, &["port 1023", "1024", "--one-process"]);
}

/// Another user than the daemon's, through `setuid` in the child.
fn as_nobody(command: &mut Command) -> &mut Command {
    command.uid(NOBODY).gid(NOBODY)
}

/// The shipped binary where every user can execute it: the build directory may be closed to them.
fn public_binary(dir: &TempDir) -> Command {
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let copy = dir.path().join("vhost-rdma");
    // By another process: a descriptor open for writing here could leak into a child that some
    // other test starts at this moment, and the kernel executes no file that is open for writing
    // (ETXTBSY).
    assert!(
        Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_vhost-rdma"))
            .arg(&copy)
            .status()
            .unwrap()
            .success()
    );
    let mut command = Command::new(copy);
    command
        .env_remove("VHOST_RDMA_SOCKET")
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("NOTIFY_SOCKET");
    command
}

#[test]
fn no_permission() {
    let dir = TempDir::with_prefix("vr").unwrap();
    if is_root() {
        let daemon = Daemon::start();
        std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(0o755))
            .unwrap();
        let mut command = public_binary(&dir);
        let said: crate::daemon::Said =
            as_nobody(command.arg("--socket").arg(daemon.socket()).arg("status"))
                .output()
                .unwrap()
                .into();
        said.fails(6, &["no permission to open", "--admin-group"]);
        let closed = dir.path().join("closed");
        std::fs::create_dir(&closed).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
        let mut command = public_binary(&dir);
        let said: crate::daemon::Said =
            as_nobody(command.args(["serve", "--runtime-dir"]).arg(closed.join("run")))
                .output()
                .unwrap()
                .into();
        said.fails(
            6,
            &["cannot create the runtime directory", "Permission denied", "--runtime-dir"],
        );
        let mut command = public_binary(&dir);
        let said: crate::daemon::Said = as_nobody(command.arg("serve")).output().unwrap().into();
        said.fails(2, &["XDG_RUNTIME_DIR is not set", "--runtime-dir"]);
    } else {
        let closed = dir.path().join("closed");
        std::fs::create_dir(&closed).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
        cli(&closed.join("admin.sock"), &["status"])
            .fails(6, &["no permission to open", "--admin-group"]);
        serve_fails(&["--runtime-dir", closed.join("run").to_str().unwrap()]).fails(
            6,
            &["cannot create the runtime directory", "Permission denied", "--runtime-dir"],
        );
        let daemon = Daemon::start();
        daemon
            .cli(&["nic", "add", "a", "--owner", "root"])
            .fails(6, &["no permission to", "vhost.sock", "owner or group"]);
    }
}
