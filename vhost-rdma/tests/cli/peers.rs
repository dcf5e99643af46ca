//! Peers by hand, by the configuration file and as a set of the controller.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::daemon::Daemon;

const FILE: &str = "[[networks]]\nname='blue'\npeers=[{address='10.1.0.0/16'}]\n";

fn start(text: &str) -> (Daemon, std::path::PathBuf) {
    let dir = TempDir::with_prefix("vr").unwrap();
    let file = dir.path().join("vhost-rdma.toml");
    std::fs::write(&file, text).unwrap();
    (Daemon::start_in(dir, &["--config", file.to_str().unwrap()]), file)
}

fn peers(daemon: &Daemon) -> Vec<(String, String)> {
    let listed = daemon.cli(&["peer", "list", "--json"]).json();
    let text = |peer: &Value, key: &str| peer[key].as_str().unwrap().to_owned();
    let list = listed.as_array().unwrap().iter();
    list.map(|peer| (text(peer, "address"), text(peer, "source"))).collect()
}

fn is(peers: &[(String, String)], expected: &[(&str, &str)]) {
    let shown: Vec<_> = peers.iter().map(|(a, s)| (a.as_str(), s.as_str())).collect();
    assert_eq!(shown, expected);
}

/// `peer replace` with this list and these options.
fn replace(daemon: &Daemon, list: &Value, options: &[&str]) -> crate::daemon::Said {
    let file = daemon.run_dir().join("set.json");
    std::fs::write(&file, list.to_string()).unwrap();
    let file = file.to_str().unwrap();
    let command = ["peer", "replace", "--network", "blue", "--file", file, "--json"];
    daemon.cli(&[&command[..], options].concat())
}

#[test]
fn a_set_is_replaced_and_what_others_named_stays() {
    let (daemon, _) = start(FILE);
    daemon.cli(&["peer", "add", "10.2.0.0/16", "--network", "blue"]).ok();
    let set = json!([
        {"address": "10.3.0.0/26", "through": "192.0.2.3", "daemon": "192.0.2.3:4790"},
        {"address": "10.3.0.64/26", "through": "192.0.2.4"},
    ]);
    let done = replace(&daemon, &set, &[]).json();
    assert_eq!(done, json!({"added": 2, "removed": 0}));
    assert_eq!(replace(&daemon, &set, &[]).json(), json!({"added": 0, "removed": 0}));
    let by_file = ("10.1.0.0/16", "file");
    let by_hand = ("10.2.0.0/16", "hand");
    let (one, other) = (("10.3.0.0/26", "controller"), ("10.3.0.64/26", "controller"));
    is(&peers(&daemon), &[by_file, by_hand, one, other]);
    // What nobody added by hand is not taken away by hand.
    for (address, word) in [("10.1.0.0/16", "configuration file"), ("10.3.0.0/26", "controller")] {
        let refused = daemon.cli(&["peer", "rm", address, "--network", "blue"]);
        refused.fails(5, &[address, word]);
    }
    // The set is as it was after a restart; a listing can be given back.
    let listed = daemon.cli(&["peer", "list", "--network", "blue", "--json"]).json();
    let (dir, _) = daemon.stop();
    let config = dir.path().join("vhost-rdma.toml");
    let daemon = Daemon::start_in(dir, &["--config", config.to_str().unwrap()]);
    assert_eq!(daemon.cli(&["peer", "list", "--network", "blue", "--json"]).json(), listed);
    let ours: Vec<&Value> = listed.as_array().unwrap().iter().skip(3).collect();
    assert_eq!(replace(&daemon, &json!(ours), &[]).json(), json!({"added": 0, "removed": 1}));
    is(&peers(&daemon), &[by_file, by_hand, other]);
    assert_eq!(replace(&daemon, &json!([]), &[]).json(), json!({"added": 0, "removed": 1}));
    is(&peers(&daemon), &[by_file, by_hand]);
}

#[test]
fn a_set_that_is_older_or_not_good_changes_nothing() {
    let (daemon, _) = start(FILE);
    let set = json!([{"address": "10.3.0.0/26"}]);
    replace(&daemon, &set, &["--generation", "7"]).ok();
    let old = replace(&daemon, &json!([]), &["--generation", "6"]);
    old.fails(5, &["generation 7", "6"]);
    // The same again is no news; another count is not compared.
    assert_eq!(replace(&daemon, &set, &["--generation", "7"]).json()["added"], 0);
    replace(&daemon, &set, &["--generation", "1", "--epoch", "2"]).ok();
    let before = peers(&daemon);
    for (list, word) in [
        (json!([{"address": "10.3.0.1/26"}]), "10.3.0.1/26"),
        (json!([{"address": "10.4.0.0/26"}, {"address": "10.4.0.0/26"}]), "twice"),
        (json!([{"address": "10.4.0.0/26", "network": "default"}]), "another network"),
        (json!([{"address": "10.4.0.0/26", "daemon": "nowhere"}]), "HOST:PORT"),
        (json!([{"address": "10.4.0.0/26", "through": "10.0.0.0/8"}]), "10.0.0.0/8"),
        (json!([{"address": "10.4.0.0/26", "colour": "blue"}]), "colour"),
        (json!({"address": "10.4.0.0/26"}), "list"),
    ] {
        replace(&daemon, &list, &["--generation", "9", "--epoch", "2"]).fails(2, &[word]);
        assert_eq!(peers(&daemon), before, "{list}");
    }
    let file = daemon.run_dir().join("none.json");
    let missing = ["peer", "replace", "--file", file.to_str().unwrap()];
    daemon.cli(&missing).fails(1, &["none.json"]);
    let set = daemon.run_dir().join("set.json");
    std::fs::write(&set, "[]").unwrap();
    let nowhere = ["peer", "replace", "--network", "none", "--file", set.to_str().unwrap()];
    daemon.cli(&nowhere).fails(4, &["none"]);
}

#[test]
fn the_file_is_read_again_and_touches_its_own_entries_only() {
    let (daemon, file) = start(FILE);
    daemon.cli(&["peer", "add", "10.2.0.0/16", "--network", "blue"]).ok();
    replace(&daemon, &json!([{"address": "10.3.0.0/26"}]), &["--generation", "3"]).ok();
    let said = |daemon: &Daemon| daemon.cli(&["reload"]).ok();
    assert_eq!(said(&daemon), "nothing has changed\n");
    std::fs::write(&file, FILE.replace("10.1.0.0", "10.9.0.0")).unwrap();
    assert!(said(&daemon).contains("peers of network \"blue\" changed"));
    let others = [("10.2.0.0/16", "hand"), ("10.3.0.0/26", "controller")];
    is(&peers(&daemon), &[others[0], others[1], ("10.9.0.0/16", "file")]);
    for bad in ["10.9.0.1/16", "x", "10.9.0.0/16'}, {address='10.9.0.0/40"] {
        std::fs::write(&file, FILE.replace("10.1.0.0/16", bad)).unwrap();
        daemon.cli(&["reload"]).fails(2, &["network \"blue\""]);
    }
    std::fs::write(&file, "[[networks]]\nname='blue'\n").unwrap();
    said(&daemon);
    is(&peers(&daemon), &others);
    // The set's version is known still.
    replace(&daemon, &json!([]), &["--generation", "2"]).fails(5, &["generation 3"]);
}
