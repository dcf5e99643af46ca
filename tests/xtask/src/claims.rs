//! The threat model held against the tests: each of its claims names tests that show it, and each
//! test that it names is there.
//!
//! A name is `file::test`. The file is one below [`ROOTS`], without `.rs`; a claim is a paragraph
//! or list item, and the sections of [`SECTIONS`] are made of claims that say what shows them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Where the document is.
const DOCUMENT: &str = "docs/THREAT_MODEL.md";
/// Where files of tests are looked for.
const ROOTS: [&str; 6] = [
    "tests/virtual-guest/tests",
    "vhost-rdma/src",
    "device-plugin/tests",
    "cni-plugin/tests",
    "cni-plugin/src",
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
    wrong.iter().for_each(|line| eprintln!("error: {line}"));
    Ok(wrong.is_empty())
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
        [at.with_extension("rs"), at.join("mod.rs")]
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
        assert!(check(&crate::exec::workspace()).unwrap());
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
        assert!(!is_a_test(&crate::exec::workspace(), "rc::nobody_wrote_this"));
    }
}
