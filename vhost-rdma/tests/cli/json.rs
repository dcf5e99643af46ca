//! JSON that scripts rely on: the whole set of field names, and each command's shape.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::daemon::{Daemon, cli, vhost_rdma};

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn a_nic() {
    let daemon = Daemon::start();
    let nic = daemon
        .cli(&[
            "nic",
            "add",
            "a",
            "--mac",
            "02:00:00:00:00:0A",
            "--address",
            "10.0.0.1,fd00::1",
            "--max-mr-bytes",
            "2G",
            "--max-guest-bytes",
            "3G",
            "--mode",
            "0600",
            "--json",
        ])
        .json();
    let socket = daemon.run_dir().join("nics/a/vhost.sock");
    let (owner, group) = (nic["owner"].clone(), nic["group"].clone());
    let expected = json!({
        "name": "a", "network": "default", "vni": 1, "mac": "02:00:00:00:00:0a",
        "addresses": ["10.0.0.1", "fd00::1"],
        "virtio_id": null, "comp_vectors": 4, "num_queues": 8, "backing": "soft", "guests": "vm",
        "socket": socket, "owner": owner,
        "group": group, "mode": "0600", "acl": [], "configured": false, "session": "absent",
        "interrupted": false, "error": null, "gids": [],
        "limits": {
            "max_contexts": 1024, "max_pds": 4096, "max_mrs": 65536,
            "max_mr_bytes": 2_147_483_648_u64,
                "max_kept_bytes": 536_870_912_u64, "max_guest_bytes": 3_221_225_472_u64,
                "max_cqs": 16384,
            "max_srqs": 4096, "max_qps": 16384, "max_ahs": 65536,
        },
        "counters": {
            "tx_bytes": 0, "rx_bytes": 0, "tx_messages": 0, "rx_messages": 0, "rnr_naks": 0,
            "retries": 0, "access_errors": 0,
            "control_commands": 0, "kicks": 0, "events": 0, "completions": 0,
            "page_faults": 0, "moves": 0,
        },
        "worker": 0,
        "number": 1,
        "objects": { "contexts": 0, "pds": 0, "mrs": 0, "mr_bytes": 0, "cqs": 0, "srqs": 0,
            "qps": 0, "ahs": 0, "kept_bytes": 0 },
    });
    assert_eq!(nic, expected);
    assert_eq!(daemon.cli(&["nic", "show", "a", "--json"]).json(), expected);
    assert_eq!(daemon.cli(&["nic", "list", "--json"]).json(), json!([expected]));
    assert_eq!(
        daemon.cli(&["--json", "nic", "list", "--network", "default"]).json(),
        json!([expected])
    );
    assert_eq!(
        daemon.cli(&["nic", "rm", "a", "--json"]).json(),
        json!({ "removed": "a", "warning": null })
    );
}

#[test]
fn networks_and_status() {
    let daemon = Daemon::start();
    let blue = daemon.cli(&["network", "add", "blue", "--json"]).json();
    // Nobody gave this daemon a tree of cgroups.
    let network = |name, vni, nics| {
        json!({
            "name": name, "vni": vni, "nics": nics, "configured": false,
            "memory_bytes": 0, "memory_max": 0, "memory_kills": 0,
        })
    };
    assert_eq!(blue, network("blue", 2, 0));
    daemon.cli(&["nic", "add", "a", "--network", "blue"]).ok();
    let (default, blue) = (network("default", 1, 0), network("blue", 2, 1));
    assert_eq!(daemon.cli(&["network", "list", "--json"]).json(), json!([blue, default]));
    let status = daemon.cli(&["status", "--json"]).json();
    let names = [
        "ephemeral",
        "instance",
        "networks",
        "nics",
        "nics_ready",
        "pid",
        "poll_us",
        "runtime_dir",
        "upgrade_pause_us",
        "uptime_seconds",
        "version",
        "workers",
    ];
    assert_eq!(keys(&status), names);
    assert_eq!(
        (&status["networks"], &status["nics"], &status["nics_ready"]),
        (&json!(2), &json!(1), &json!(0))
    );
    assert_eq!(status["upgrade_pause_us"], json!(0), "it took nobody's place");
    assert_eq!(status["pid"], json!(daemon.pid()));
    assert_eq!(status["runtime_dir"], json!(daemon.run_dir()));
}

#[test]
fn versions_with_and_without_a_daemon() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let ours = env!("CARGO_PKG_VERSION");
    let alone = cli(&dir.path().join("admin.sock"), &["version", "--json"]).json();
    assert_eq!(alone, json!({ "client": ours, "daemon": null }));
    let daemon = Daemon::start();
    assert_eq!(
        daemon.cli(&["version", "--json"]).json(),
        json!({ "client": ours, "daemon": ours })
    );
    assert!(daemon.cli(&["version"]).ok().contains(ours));
}

#[test]
fn vmm_options_are_the_same_as_a_line_and_as_an_array() {
    let daemon = Daemon::start();
    daemon.cli(&["nic", "add", "a", "--vectors", "2", "--mac", "02:00:00:00:00:01"]).ok();
    let socket = daemon.run_dir().join("nics/a/vhost.sock");
    let socket = socket.to_str().unwrap();
    for command in ["qemu-args", "cloud-hypervisor-args"] {
        let line = daemon.cli(&["nic", command, "a"]).ok();
        let array: Vec<String> =
            serde_json::from_value(daemon.cli(&["nic", command, "a", "--json"]).json()).unwrap();
        assert_eq!(line.lines().count(), 1);
        assert_eq!(shlex::split(&line).unwrap(), array);
        assert!(line.contains(socket) && line.contains("mac=02:00:00:00:00:01"), "{line}");
    }
    let qemu = daemon.cli(&["nic", "qemu-args", "a", "--netdev", "bridge:br0"]).ok();
    assert!(!qemu.contains('\''), "{qemu}");
    assert!(
        qemu.contains("virtio-id=21,num_vqs=6,vq_size=128,config_size=64,page-per-vq=on"),
        "{qemu}"
    );
    assert!(qemu.contains("-netdev bridge,id=vrnet0,br=br0"), "{qemu}");
    let ch = daemon.cli(&["nic", "cloud-hypervisor-args", "a"]).ok();
    assert!(ch.contains("device_type=42,queue_sizes=[128,128,128,128,128,128]"), "{ch}");
    let help = daemon.cli(&["nic", "qemu-args", "--help"]).ok();
    assert!(help.contains("aborts") && help.contains("21"), "{help}");
}

#[test]
fn manual_and_completions_need_no_daemon() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let run =
        |args: &[&str]| crate::daemon::Said::from(vhost_rdma().args(args).output().unwrap()).ok();
    assert!(run(&["man"]).contains(".TH vhost-rdma 1"));
    run(&["man", "--dir", dir.path().to_str().unwrap()]);
    for page in
        ["vhost-rdma.1", "vhost-rdma-serve.1", "vhost-rdma-nic-add.1", "vhost-rdma-nic-qemu-args.1"]
    {
        assert!(dir.path().join(page).exists(), "{page}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(run(&["completions", shell]).contains("cloud-hypervisor-args"), "{shell}");
    }
}
