//! The numbers of NICs: one for each on the host, whatever becomes of the processes.

use std::collections::BTreeSet;

use crate::daemon::Daemon;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn numbers(daemon: &Daemon) -> [u64; 3] {
    NAMES
        .map(|name| daemon.cli(&["nic", "show", name, "--json"]).json()["number"].as_u64().unwrap())
}

#[test]
fn a_nics_number_is_its_own_on_the_host_and_stays() {
    let file = "[[networks]]\nname = \"green\"\n[[nics]]\nname = \"c\"\nnetwork = \"green\"\n";
    let dir = tempfile::TempDir::with_prefix("vr").unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, file).unwrap();
    let options = ["--config", config.to_str().unwrap()];
    let daemon = Daemon::start_in(dir, &options);
    for (name, network) in [("a", "blue"), ("b", "red")] {
        daemon.cli(&["network", "add", network]).ok();
        daemon.cli(&["nic", "add", name, "--network", network]).ok();
    }
    let first = numbers(&daemon);
    assert_eq!(BTreeSet::from(first).len(), 3, "three networks, three processes: {first:?}");
    daemon.cli(&["network", "restart", "blue"]).ok();
    assert_eq!(numbers(&daemon), first, "another process serves one of them");
    daemon.cli(&["upgrade"]).ok();
    assert_eq!(numbers(&daemon), first, "another program serves all of them");
    let (dir, log) = daemon.stop();
    // What their own processes say of them: two for each, three of the one that was restarted.
    for ((name, number), least) in NAMES.into_iter().zip(first).zip([3, 2, 2]) {
        let (name, number) = (format!("nic=\"{name}\""), format!("number={number} "));
        let said =
            |line: &&String| line.contains(&name) && line.contains("may make the daemon keep");
        let lines: Vec<&String> = log.iter().filter(said).collect();
        assert!(lines.len() >= least, "{name}: {log:?}");
        assert!(lines.iter().all(|line| line.contains(&number)), "{number}: {lines:?}");
    }

    let daemon = Daemon::start_in(dir, &options);
    assert_eq!(numbers(&daemon), first, "another daemon");
    // Who comes after one that is gone is not taken for it.
    daemon.cli(&["nic", "rm", "b"]).ok();
    daemon.cli(&["nic", "add", "b", "--network", "blue"]).ok();
    let second = numbers(&daemon);
    assert!(!first.contains(&second[1]) && second[0] == first[0], "{first:?} {second:?}");
}
