//! The threat model held against the tests: each of its claims names tests that show it, and each
//! test that it names is there.
//!
//! A name is `file::test`. The file is one below [`ROOTS`], without `.rs`; a claim is a paragraph
//! or list item, and the sections of [`SECTIONS`] are made of claims that say what shows them.
//!
//! The README's clients are claims too. Its table names for each the rows of the VM lab that run
//! it; the lab has those rows and no client that the table leaves out, and the README names no
//! client of [`CLIENTS`] elsewhere that is not in the table.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use lab::scenarios::{clients, pair};

/// Where the document is.
const DOCUMENT: &str = "docs/THREAT_MODEL.md";
/// Where files of tests are looked for.
const ROOTS: [&str; 12] = [
    "tests/virtual-guest/tests",
    "vhost-rdma/src",
    "vhost-rdma/engine/src",
    "vhost-rdma",
    "device-plugin/src",
    "device-plugin/tests",
    "cni-plugin/tests",
    "cni-plugin/src",
    "controller/api/src",
    "controller/api/tests",
    "controller/src",
    "controller/tests",
];
/// Sections in which every list item is a claim.
const SECTIONS: [&str; 7] = [
    "## Guest against daemon",
    "## Daemon against daemon",
    "## Tenant against the node",
    "## Network process against supervisor",
    "## Process against its guest",
    "## Process against daemon and others of its NIC",
    "## Peer against peer",
];
/// Where clients are claimed.
const README: &str = "README.md";
const TABLE: &str = "\n## What runs on it\n";
/// What people ask for, by the word that a claim of it would have.
const CLIENTS: [&str; 26] = [
    "perftest",
    "rping",
    "ucmatose",
    "udaddy",
    "mckey",
    "cmtime",
    "rsockets",
    "UCX",
    "MPI",
    "OpenSHMEM",
    "libfabric",
    "NCCL",
    "RCCL",
    "gloo",
    "PyTorch",
    "qperf",
    "NVMe-oF",
    "iSER",
    "SRP",
    "NFS",
    "SMC-R",
    "RDS",
    "Lustre",
    "Ceph",
    "Spark",
    "libvirt",
];
/// What begins the names.
const SHOWN: &str = "*Shown by*";

/// Whether the document is right; what is wrong goes to standard error.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let text = fs::read_to_string(root.join(DOCUMENT)).context(DOCUMENT)?;
    let mut wrong = unshown(&text);
    wrong.extend(
        names(&text)
            .into_iter()
            .filter(|name| !is_a_test(root, name))
            .map(|name| format!("{DOCUMENT} names `{name}`, and there is no such test")),
    );
    let readme = fs::read_to_string(root.join(README)).context(README)?;
    wrong.extend(clients_claimed(&readme));
    wrong.iter().for_each(|line| eprintln!("error: {line}"));
    Ok(wrong.is_empty())
}

/// What is wrong with the clients that a README claims.
fn clients_claimed(text: &str) -> Vec<String> {
    let Some((_, section)) = text.split_once(TABLE) else {
        return vec![format!("{README} has no section of clients")];
    };
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    let cells: Vec<(&str, BTreeSet<&str>)> = rows
        .filter_map(|line| line.trim_matches(['|', ' ']).split_once(" | "))
        .map(|(client, shown)| (client, shown.split('`').skip(1).step_by(2).collect()))
        .collect();
    let lab: BTreeSet<&str> = pair::names().chain(clients::names()).collect();
    let mut wrong = Vec::new();
    for (client, shown) in &cells {
        if !shown.iter().any(|name| lab.contains(name)) {
            wrong.push(format!("{README}: no row of the lab shows \"{client}\""));
        }
        let unknown =
            shown.iter().filter(|name| !lab.contains(*name) && !name.starts_with("cargo xtask "));
        wrong.extend(unknown.map(|name| format!("{README}: the lab has no row \"{name}\"")));
    }
    let named = |name: &&str| cells.iter().any(|(_, shown)| shown.contains(name));
    let left_out = clients::names().filter(|name| !named(name));
    wrong.extend(left_out.map(|name| format!("{README}: the row \"{name}\" is not in its table")));
    let word = |text: &str, word: &str| {
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').any(|part| part == word)
    };
    let unshown = CLIENTS
        .iter()
        .filter(|client| word(text, client) && !cells.iter().any(|(cell, _)| word(cell, client)));
    wrong
        .extend(unshown.map(|client| format!("{README} names {client}, which its table does not")));
    wrong
}

/// List items of sections of claims that name no test.
fn unshown(text: &str) -> Vec<String> {
    let sections = text.split("\n## ").map(|section| format!("## {section}"));
    let claims = sections.filter(|s| SECTIONS.iter().any(|title| s.starts_with(title)));
    let items = claims.flat_map(|s| s.split("\n- ").skip(1).map(str::to_owned).collect::<Vec<_>>());
    let silent =
        items.filter(|item| item.find(SHOWN).is_none_or(|at| names(&item[at..]).is_empty()));
    silent
        .map(|item| {
            let title = item.lines().next().unwrap_or_default();
            format!("{DOCUMENT}: no test shows \"{title}\"")
        })
        .collect()
}

/// The tests that a text names.
fn names(text: &str) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|name| name.contains("::")).map(str::to_owned).collect()
}

/// Whether the file that is named has that function, and it is a test.
fn is_a_test(root: &Path, name: &str) -> bool {
    let Some((file, test)) = name.rsplit_once("::") else { return false };
    let texts = ROOTS.iter().flat_map(|dir| {
        let at = root.join(dir).join(file);
        [at.with_extension("rs"), at.join("mod.rs"), at.join("main.rs")]
    });
    texts.filter_map(|path| fs::read_to_string(path).ok()).any(|text| has_test(&text, test))
}

fn has_test(text: &str, test: &str) -> bool {
    let Some(at) = text.find(&format!("fn {test}(")) else { return false };
    // Its attributes stand right above it.
    let before = text[..at].trim_end_matches("async ").trim_end_matches(' ');
    let mut above = before.lines().rev().take_while(|line| !line.trim().is_empty());
    above.any(|line| {
        let line = line.trim();
        line == "#[test]" || line.starts_with("#[tokio::test")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threat_model_names_tests_that_there_are() {
        assert!(check(&lab::exec::workspace()).unwrap());
    }

    #[test]
    fn the_readme_names_each_client_with_its_row() {
        let text = fs::read_to_string(lab::exec::workspace().join(README)).unwrap();
        assert_eq!(clients_claimed(&text), Vec::<String>::new());
        let seeded = [
            ("| `iSER` |", "| `SRP` |", 1),
            ("| `iSER` |", "| none |", 2),
            ("| `NFS over RDMA` |", "| `NFS over QUIC` |", 3),
            ("# vhost-rdma", "# NCCL on vhost-rdma", 1),
            (TABLE, "\n## Else\n", 1),
        ];
        for (from, to, faults) in seeded {
            let bent = text.replacen(from, to, 1);
            assert_ne!(bent, text, "{from}");
            assert_eq!(
                clients_claimed(&bent).len(),
                faults,
                "{from}: {:?}",
                clients_claimed(&bent)
            );
        }
    }

    #[test]
    fn what_is_wrong_is_found() {
        let text = "# T\n\n## Peer against peer\n\n- **a**: b.\n  *Shown by* `rc::bursts`.\n\
                    - **c**: by `rc::bursts`.\n\n## Other\n\n- **d**: e.\n";
        assert_eq!(unshown(text).len(), 1, "only what is shown is shown");
        assert_eq!(names(text).len(), 1);
        let file = "#[test]\nfn one() {}\n\nfn two() {}\n\n#[tokio::test]\nasync fn three() {}\n";
        assert!(has_test(file, "one") && has_test(file, "three"));
        assert!(!has_test(file, "two") && !has_test(file, "on"));
        assert!(!is_a_test(&lab::exec::workspace(), "rc::nobody_wrote_this"));
    }
}
