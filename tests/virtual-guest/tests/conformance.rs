//! Every requirement of the specification has a number, and every number something that shows it.
//!
//! Section 13 of docs/virtio-rdma.md lists the clauses; sections 1 to 11 name them where they are
//! explained. This file reads the document and nothing else knows it: it runs no daemon. What it
//! cannot know is whether a test that a clause names really tests it; that is for its reader.
//!
//! The second half takes the document, does one kind of damage at a time, and wants it to be found.

#![allow(clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A clause of section 13.
#[derive(Debug)]
struct Clause {
    number: String,
    says: String,
    shown_by: Vec<String>,
}

impl Clause {
    fn is_devices(&self) -> bool {
        self.number.starts_with("DEV-")
    }
}

fn read(path: &str) -> String {
    let path = Path::new(ROOT).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn document() -> String {
    read("docs/virtio-rdma.md")
}

/// The part of the document from one heading to another.
fn part<'a>(text: &'a str, from: &str, to: Option<&str>) -> &'a str {
    let begin = text.find(&format!("\n{from}")).unwrap_or(text.len());
    let rest = &text[begin..];
    let end = to.and_then(|to| rest.find(&format!("\n{to}"))).unwrap_or(rest.len());
    &rest[..end]
}

/// What stands between pairs of `mark`.
fn between(text: &str, mark: char) -> impl Iterator<Item = &str> {
    text.split(mark).skip(1).step_by(2)
}

/// The items `- **NUMBER** text` with the names below them.
fn clauses(text: &str) -> Vec<Clause> {
    let list = part(text, "## 13. Conformance", None);
    let mut clauses = Vec::new();
    for item in list.split("\n- **").skip(1) {
        let item = item.split("\n\n").next().unwrap_or_default();
        let (number, rest) = item.split_once("** ").unwrap_or((item, ""));
        let says: String = rest.split('`').step_by(2).collect();
        // Words in the text are marked too: what shows a clause has a place in front of a name.
        let names =
            between(rest, '`').map(|name| name.split_whitespace().collect::<Vec<_>>().join(" "));
        let shown_by = names.filter(|name| name.contains("::") || name.contains(": ")).collect();
        clauses.push(Clause { number: number.to_owned(), says, shown_by });
    }
    clauses
}

/// The numbers in brackets of a piece of prose.
fn numbers(prose: &str) -> BTreeSet<String> {
    let inside = prose.split('[').skip(1).filter_map(|rest| rest.split(']').next());
    let names = inside.flat_map(|names| names.split(',')).map(|name| name.trim().to_owned());
    names.filter(|name| name.starts_with("DEV-") || name.starts_with("DRV-")).collect()
}

/// Sentences of sections 1 to 11, and the rows of their tables.
fn sentences(text: &str) -> Vec<String> {
    let prose = part(text, "## 1. Device ID", Some("## 12. "));
    let mut found = Vec::new();
    for block in prose.split("\n\n") {
        for line in block.lines().filter(|line| line.starts_with('|')) {
            found.push(line.to_owned());
        }
        let words: Vec<_> = block
            .lines()
            .filter(|line| !line.starts_with('|'))
            .flat_map(str::split_whitespace)
            .collect();
        let mut rest = words.join(" ");
        while let Some(end) = rest.find(". ") {
            let behind = rest.split_off(end + 2);
            found.push(std::mem::replace(&mut rest, behind));
        }
        found.push(rest);
    }
    found
}

/// Names of the tests of a Rust file; ignored ones do not count.
fn tests_of(path: &Path) -> Option<BTreeSet<String>> {
    let source = std::fs::read_to_string(path).ok()?;
    let mut found = BTreeSet::new();
    for piece in source.split("#[test]").skip(1) {
        let (attributes, rest) = piece.split_once("fn ")?;
        let name = rest.split('(').next().unwrap_or_default();
        if !attributes.contains("#[ignore") {
            found.insert(name.trim().to_owned());
        }
    }
    Some(found)
}

/// Functions that a C file defines.
fn defines(path: &Path, function: &str) -> bool {
    let source = std::fs::read_to_string(path).unwrap_or_default();
    source.lines().any(|line| {
        let starts = line.starts_with(|c: char| c.is_alphabetic() || c == '_');
        let called = line.find(&format!("{function}(")).is_some_and(|at| {
            !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') && at > 0
        });
        starts && called && !line.trim_end().ends_with(';')
    })
}

/// Whether a row is in the source of a scenario or of what it runs in the guest.
fn has_row(scenario: &str, row: &str) -> bool {
    let name = scenario.strip_prefix("vm ").unwrap_or(scenario);
    let scenarios = Path::new(ROOT).join("tests/lab/src/vm/scenarios");
    let files = [scenarios.join(name).join("mod.rs"), scenarios.join(format!("{name}.rs"))];
    files.iter().any(|file| {
        let source = std::fs::read_to_string(file).unwrap_or_default();
        source.contains(&format!("(\"{row}\","))
    })
}

fn file_of(name: &str) -> PathBuf {
    let root = Path::new(ROOT);
    match name.split_once('/') {
        Some(("models", file)) => root.join(format!("vhost-rdma/engine/src/nic/models/{file}.rs")),
        Some(("device", file)) => root.join(format!("vhost-rdma/src/device/{file}.rs")),
        Some(("shard", file)) => root.join(format!("vhost-rdma/engine/src/shard/{file}.rs")),
        _ if name == "wrap" => root.join("vhost-rdma/engine/src/shard/tests/wrap.rs"),
        _ => root.join(format!("tests/virtual-guest/tests/{name}.rs")),
    }
}

/// Not a test of the daemon's parts: of the daemon, over its socket.
fn is_virtual_guests(name: &str) -> bool {
    let of_parts = ["models/", "device/", "shard/", "wrap::"];
    name.contains("::") && !of_parts.iter().any(|part| name.starts_with(part))
}

/// Whether what shows a clause exists.
fn exists(name: &str) -> bool {
    if let Some((file, test)) = name.split_once("::") {
        return tests_of(&file_of(file)).is_some_and(|tests| tests.contains(test));
    }
    match name.split_once(": ") {
        Some((scenario, row)) if scenario.starts_with("vm ") => has_row(scenario, row),
        Some((file, function)) => {
            defines(&Path::new(ROOT).join("vhost-rdma/guest").join(file), function)
        }
        None => false,
    }
}

/// All that is wrong with a document, in words.
fn faults(text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let clauses = clauses(text);
    let mut known = BTreeMap::new();
    for clause in &clauses {
        let Clause { number, says, shown_by } = clause;
        if known.insert(number.clone(), says).is_some() {
            faults.push(format!("{number} is used twice"));
        }
        if !says.contains("MUST") && !says.contains("SHOULD") {
            faults.push(format!("{number} requires nothing"));
        }
        if shown_by.is_empty() {
            faults.push(format!("{number} is shown by nothing"));
        } else if clause.is_devices() && !shown_by.iter().any(|name| is_virtual_guests(name)) {
            faults.push(format!("{number} has no test over the socket"));
        }
        for name in shown_by.iter().filter(|name| !exists(name)) {
            faults.push(format!("{number} names {name}, which is not there"));
        }
    }
    let prose = text.find("\n## 12. ").map_or(text, |end| &text[..end]);
    let named = numbers(prose);
    for number in named.iter().filter(|number| !known.contains_key(*number)) {
        faults.push(format!("{number} is no clause of section 13"));
    }
    for number in known.keys().filter(|number| !named.contains(*number)) {
        faults.push(format!("{number} is explained nowhere"));
    }
    for sentence in sentences(text) {
        let requires = sentence.contains("MUST") || sentence.contains("SHOULD");
        if requires && numbers(&sentence).is_empty() {
            faults.push(format!("no number: {sentence}"));
        }
    }
    faults
}

#[test]
fn every_requirement_is_a_clause_and_every_clause_is_shown() {
    let text = document();
    let faults = faults(&text);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let (devices, drivers): (Vec<_>, Vec<_>) =
        clauses(&text).into_iter().partition(Clause::is_devices);
    assert!(devices.len() > 100 && drivers.len() > 40, "{} {}", devices.len(), drivers.len());
}

#[test]
fn lines_fit_a_page() {
    let text = document();
    let prose = part(&text, "## 1. Device ID", Some("## 12. ")).to_owned()
        + part(&text, "## 13. Conformance", None);
    for line in prose.lines().filter(|line| !line.starts_with('|')) {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

/// The faults of the document after `damage`, which were none before.
#[track_caller]
fn damaged(damage: impl Fn(&str) -> String) -> Vec<String> {
    let text = document();
    let damaged = damage(&text);
    assert_ne!(text, damaged, "the damage did nothing");
    faults(&damaged)
}

#[test]
fn damage_is_found() {
    let found = damaged(|text| text.replacen("**DEV-VQ-2** A", "**DEV-VQ-1** A", 1));
    assert!(found.iter().any(|fault| fault == "DEV-VQ-1 is used twice"), "{found:?}");
    assert!(found.iter().any(|fault| fault == "DEV-VQ-2 is no clause of section 13"), "{found:?}");
    let test = "`transport::queues_of_every_size_serve`";
    let found = damaged(|text| text.replacen(test, "", 1));
    assert_eq!(found, ["DEV-VQ-2 is shown by nothing"]);
    let found = damaged(|text| text.replacen(test, "`transport::no_such_test`", 1));
    assert_eq!(found, ["DEV-VQ-2 names transport::no_such_test, which is not there"]);
    let found = damaged(|text| text.replacen(test, "`kernel/main.c: vrdma_probe`", 1));
    assert_eq!(found, ["DEV-VQ-2 has no test over the socket"]);
    let found = damaged(|text| text.replacen(" [DEV-INIT-2]", "", 1));
    assert_eq!(found, ["DEV-INIT-2 is explained nowhere"]);
    let found = damaged(|text| text.replacen(" [DEV-CTRL-2]", " [DEV-CTRL-999]", 1));
    assert_eq!(found.len(), 2, "{found:?}");
    let found =
        damaged(|text| text.replacen("\n## 6. Memory\n", "\n## 6. Memory\n\nYou MUST.\n", 1));
    assert_eq!(found, ["no number: You MUST."]);
    let row = "`vm life: daemon hangs`";
    let found = damaged(|text| text.replacen(row, "`vm life: daemon sings`", 1));
    assert_eq!(found, ["DRV-VQ-4 names vm life: daemon sings, which is not there"]);
    let code = "`kernel/main.c: vrdma_check_dma`";
    let found = damaged(|text| text.replacen(code, "`kernel/main.c: vrdma_no_dma`", 1));
    assert_eq!(found, ["DRV-FEAT-1 names kernel/main.c: vrdma_no_dma, which is not there"]);
}
