//! The driver stays small enough to be read at a sitting: what a device asks of its driver is no
//! more than this.
//!
//! Counted is every line of `src`, comments included, but for unit tests and `vhost_user`, which is
//! no part of a driver: it stands for the monitor of a machine.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::Path;

const MOST: usize = 1500;
const MONITOR: &str = "vhost_user.rs";

/// The lines before a file's unit tests.
fn lines(text: &str) -> usize {
    text.lines().take_while(|line| *line != "#[cfg(test)]").count()
}

#[test]
fn the_driver_has_at_most_1500_lines() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut counts = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        assert!(entry.file_type().unwrap().is_file(), "{entry:?} is not counted");
        let name = entry.file_name().into_string().unwrap();
        if name != MONITOR {
            counts.push((lines(&std::fs::read_to_string(entry.path()).unwrap()), name));
        }
    }
    let all: usize = counts.iter().map(|(count, _)| count).sum();
    assert!(all > MOST / 2, "too few lines to be true: {counts:?}");
    assert!(all <= MOST, "{all} lines: {counts:?}");
}

#[test]
fn unit_tests_are_left_out() {
    assert_eq!(lines("one\n\n// two\n#[cfg(test)]\nmod tests {\n}\n"), 3);
}
