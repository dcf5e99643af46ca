//! `vf` without a NIC that has SR-IOV, as on most machines that run this; with one it is the lab's
//! `vm sriov`.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::daemon::{Said, cli};

/// No daemon listens there: `vf` must not ask for one.
fn vf(state: &Path, args: &[&str]) -> Said {
    let state = state.to_str().unwrap();
    let args = [&["vf", "--state-dir", state], args].concat();
    cli(Path::new("/nonexistent/admin.sock"), &args)
}

#[test]
fn a_look_needs_no_daemon_and_writes_nothing() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let state = dir.path().join("state");
    vf(&state, &["list"]).ok();
    assert!(vf(&state, &["list", "--json"]).json().is_array());
    assert_eq!(vf(&state, &["recover", "--json"]).json(), Value::Array(Vec::new()));
    vf(&state, &["recover"]).ok();
    assert!(!state.exists());
}

#[test]
fn mistakes_are_told_apart() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let vf = |args: &[&str]| vf(dir.path(), args);
    vf(&["create", "no-such-nic", "4"]).fails(4, &["no-such-nic", "vf list"]);
    vf(&["show", "no-such-nic/3"]).fails(4, &["no-such-nic"]);
    vf(&["bind", "ffff:ff:1f.7"]).fails(4, &["ffff:ff:1f.7", "no virtual function"]);
    vf(&["qemu-args", "no-such-vf"]).fails(4, &["no-such-vf"]);
    vf(&["set", "no-such-vf"]).fails(2, &["nothing to change", "--max-tx-rate"]);
    // These the grammar finds, and says how to get help.
    for (option, value, word) in [
        ("--mac", "52:54:00", "no hardware address"),
        ("--node-guid", "1", "no GUID"),
        ("--trust", "yes", "on or off"),
        ("--link-state", "up", "auto, enable or disable"),
        ("--vlan", "4095", "4095"),
    ] {
        let said = vf(&["set", "x", option, value]);
        assert_eq!(said.status, 2);
        assert!(said.err.contains(word) && said.err.contains("--help"), "{}", said.err);
    }
}

#[test]
fn a_journal_that_makes_no_sense_is_shown_and_kept() {
    let dir = TempDir::with_prefix("vr").unwrap();
    let file = dir.path().join("0000:01:00.0.json");
    std::fs::write(&file, "{").unwrap();
    vf(dir.path(), &["recover"]).fails(2, &["0000:01:00.0.json", "move it away"]);
    assert_eq!(std::fs::read_to_string(file).unwrap(), "{");
}
