//! Links between documents, and the paths that they name: each leads somewhere.
//!
//! A relative link of a document that git knows leads to a file or directory, its `#anchor` to a
//! heading there, by GitHub's rule for the names of headings. A path between backquotes that begins
//! with a directory of the root is there too, with `{a,b}` for several. Links to the network are
//! not followed: the check needs none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::exec::{capture, tied};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

const GIT_WAIT: Duration = Duration::from_secs(30);

/// What a document says of others.
#[derive(Debug, Default)]
struct Document {
    /// Names of its headings.
    anchors: BTreeSet<String>,
    /// Targets of links, each with its line.
    links: Vec<(usize, String)>,
    /// What stands between backquotes, each with its line.
    code: Vec<(usize, String)>,
}

/// Whether all links lead somewhere; those that do not go to standard error.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut git: Command = tied("git");
    git.current_dir(root).args(["ls-files", "-z", "--", "*.md"]);
    let names = capture(&mut git, GIT_WAIT)?;
    let mut all = BTreeMap::new();
    for name in names.split_terminator('\0') {
        let path = root.join(name);
        // A file that git knows and a change in work has removed.
        if path.exists() {
            let text = fs::read_to_string(&path).with_context(|| name.to_owned())?;
            all.insert(PathBuf::from(name), Document::read(&text));
        }
    }
    anyhow::ensure!(!all.is_empty(), "git knows no document in {}", root.display());
    let wrong = broken(root, &all)?;
    wrong.iter().for_each(|line| eprintln!("error: {line}"));
    Ok(wrong.is_empty())
}

impl Document {
    fn read(text: &str) -> Self {
        let mut found = Self::default();
        let mut heading: Option<String> = None;
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES;
        let line = |at: &Range<usize>| text[..at.start].matches('\n').count() + 1;
        for (event, at) in Parser::new_ext(text, options).into_offset_iter() {
            if let (Some(heading), Event::Text(part) | Event::Code(part)) = (&mut heading, &event) {
                heading.push_str(part);
            }
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let name = anchor(&heading.take().unwrap_or_default());
                    let times = seen.entry(name.clone()).or_default();
                    let suffix = if *times == 0 { String::new() } else { format!("-{times}") };
                    *times += 1;
                    found.anchors.insert(name + &suffix);
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    found.links.push((line(&at), dest_url.into_string()));
                }
                Event::Code(code) => found.code.push((line(&at), code.into_string())),
                _ => {}
            }
        }
        found
    }
}

/// The name of a heading: small letters, a hyphen for each space, and no other signs than those and
/// underscores.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c => c.is_alphanumeric().then_some(c),
    });
    kept.flat_map(char::to_lowercase).collect()
}

/// What leads nowhere, a line for each.
fn broken(root: &Path, all: &BTreeMap<PathBuf, Document>) -> Result<Vec<String>> {
    let folders = folders(root)?;
    let mut wrong = Vec::new();
    for (name, document) in all {
        for (line, link) in &document.links {
            if !leads(root, all, name, link) {
                wrong.push(format!("{}:{line}: the link {link} leads nowhere", name.display()));
            }
        }
        let paths = document.code.iter().filter(|(_, code)| is_path(code, &folders));
        for (line, code) in paths {
            let lost = alternatives(code).into_iter().filter(|path| !root.join(path).exists());
            wrong.extend(lost.map(|path| format!("{}:{line}: no {path} is there", name.display())));
        }
    }
    Ok(wrong)
}

fn leads(root: &Path, all: &BTreeMap<PathBuf, Document>, from: &Path, link: &str) -> bool {
    if link.contains("://") || link.starts_with("mailto:") {
        return true;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => from.to_path_buf(),
        path => plain(&from.parent().unwrap_or(Path::new("")).join(path)),
    };
    let there = all.get(&target).map(|document| document.anchors.contains(anchor));
    // Other documents than ours have no anchors that we know.
    if anchor.is_empty() { root.join(target).exists() } else { there == Some(true) }
}

/// A path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::ParentDir => _ = plain.pop(),
            Component::CurDir => {}
            part => plain.push(part),
        }
        plain
    })
}

/// Directories of the root that git knows, as `name/`.
fn folders(root: &Path) -> Result<BTreeSet<String>> {
    let mut git = tied("git");
    git.current_dir(root).args(["ls-tree", "-d", "--name-only", "HEAD"]);
    Ok(capture(&mut git, GIT_WAIT)?.lines().map(|name| format!("{name}/")).collect())
}

/// Whether a piece of code is a path of the tree: no command, no pattern, no place on a node.
fn is_path(code: &str, folders: &BTreeSet<String>) -> bool {
    let sign = |c: char| c.is_ascii_alphanumeric() || "/._-{},".contains(c);
    folders.iter().any(|folder| code.starts_with(folder)) && code.chars().all(sign)
}

/// The paths of `a/{b,c}.rs`.
fn alternatives(code: &str) -> Vec<String> {
    let braces = code.split_once('{').and_then(|(before, rest)| {
        let (inside, after) = rest.split_once('}')?;
        Some((before, inside, after))
    });
    let Some((before, inside, after)) = braces else { return vec![code.to_owned()] };
    inside.split(',').flat_map(|one| alternatives(&format!("{before}{one}{after}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str) -> Vec<String> {
        let other =
            Document::read("# Other\n\n## `serve`: a (first) look_up\n\n## Twice\n\n## Twice\n");
        let all = [("docs/a.md", Document::read(text)), ("docs/TESTING.md", other)];
        let all = all.into_iter().map(|(name, document)| (name.into(), document)).collect();
        broken(&lab::exec::workspace(), &all).unwrap()
    }

    #[test]
    fn what_leads_somewhere_is_right() {
        let right = [
            "# Here\n[a](#here) [b](TESTING.md#serve-a-first-look_up) [c](../docs/TESTING.md)",
            "[a](TESTING.md#twice) [b](TESTING.md#twice-1) [c](../README.md) [d](.)",
            "```sh\n[a](nowhere.md) `docs/nowhere.md`\n```\n`[a](nowhere.md)`",
            "[b](https://a.example/#b) `docs/{TESTING,OPERATIONS}.md` `docs/TESTING.md`",
            "`docs/*.md` `tests/` `blue/nowhere.rs`",
        ];
        right.iter().for_each(|text| assert_eq!(wrong(text), Vec::<String>::new(), "{text}"));
    }

    #[test]
    fn what_leads_nowhere_is_told_with_its_line() {
        let text = [
            "# Here\n",
            "[a](#there)",
            "[b](nowhere.md) ![c](nowhere.png)",
            "[d](TESTING.md#serve)",
            "[e](TESTING.md#twice-2) [f][f]",
            "`docs/{TESTING,NOWHERE}.md`",
            "[g](../README.md#nowhere)\n",
            "[f]: ../nowhere.md",
        ];
        let text = text.join("\n");
        let lines: Vec<String> = wrong(&text)
            .iter()
            .map(|w| w.split(": ").next().unwrap_or_default().to_owned())
            .collect();
        let expected = [3, 4, 4, 5, 6, 6, 7, 8].map(|line| format!("docs/a.md:{line}"));
        let mut lines = lines;
        lines.sort();
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_documents_lead_somewhere() {
        assert!(check(&lab::exec::workspace()).unwrap());
    }
}
