//! Columns: a line of code, comment or text is no wider than [`COLUMNS`].
//!
//! So two files fit beside each other, and a change of a sentence shows as one. It holds for every
//! file of git's whose lines somebody writes by hand ([`Kind`]); lists of data, records of runs and
//! patches are as wide as they are. So is
//!
//! - in Rust, a line of a string that is raw or has line breaks of its own, if a word of it takes
//!   half of the columns: data, such as JSON without blanks. Scripts and files that are written so
//!   are broken as their language breaks lines, and any other string by a backslash.
//! - in C, a line that has one string and no more: what a program says is found by its words. There
//!   a tab is as wide as editors of C show it.
//! - in documents, a heading, a row of a table, a single word, such as a link, and a line with a
//!   word that fits on none; and documents that a program makes ([`MADE`]). Code in documents is
//!   looked at.
//! - in TOML and YAML, all but comments.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::exec::{capture, tied};

const GIT_WAIT: Duration = Duration::from_secs(30);
/// The widest line.
const COLUMNS: usize = 100;
const TAB: usize = 8;
/// Documents that a program makes.
const MADE: [&str; 2] = ["docs/API.md", "docs/results/README.md"];
/// Files whose name tells what they are, without an ending that does.
const NAMES: [&str; 4] = ["CMakeLists.txt", "Containerfile", "Kbuild", "Makefile"];

/// What of a file is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rust,
    C,
    Document,
    /// Every line.
    Lines,
    /// Lines that are a comment.
    Comments,
}

/// Whether no line is too wide; those that are go to standard error.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut git: Command = tied("git");
    git.current_dir(root).args(["ls-files", "-z"]);
    let names = capture(&mut git, GIT_WAIT)?;
    let (mut seen, mut right) = (0, true);
    for name in names.split_terminator('\0') {
        let path = root.join(name);
        // A file that git knows and a change in work has removed.
        if !path.is_file() {
            continue;
        }
        let bytes = fs::read(&path).with_context(|| name.to_owned())?;
        let text = String::from_utf8_lossy(&bytes);
        let Some(kind) = kind(name, &text) else { continue };
        seen += 1;
        for line in wide(kind, &text) {
            eprintln!("error: {name}:{line}: wider than {COLUMNS} columns");
            right = false;
        }
    }
    anyhow::ensure!(seen > 0, "git knows no source in {}", root.display());
    Ok(right)
}

fn kind(name: &str, text: &str) -> Option<Kind> {
    let path = Path::new(name);
    let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
    match path.extension().and_then(|ending| ending.to_str()) {
        _ if MADE.contains(&name) => None,
        _ if NAMES.contains(&file) => Some(Kind::Lines),
        Some("rs") => Some(Kind::Rust),
        Some("c" | "h") => Some(Kind::C),
        Some("md") => Some(Kind::Document),
        Some("sh" | "py" | "proto" | "go" | "8") => Some(Kind::Lines),
        Some("toml" | "yaml") => Some(Kind::Comments),
        None if text.starts_with("#!") => Some(Kind::Lines),
        _ => None,
    }
}

/// Lines that are too wide.
fn wide(kind: Kind, text: &str) -> Vec<usize> {
    let quoted = if kind == Kind::Rust { quoted(text) } else { BTreeSet::new() };
    let mut in_code = false;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        in_code ^= start.starts_with("```");
        let as_it_is = match kind {
            Kind::Rust => quoted.contains(&number) && widest_word(start) > COLUMNS / 2,
            Kind::C => start.starts_with('"'),
            Kind::Document => widest_word(start) > COLUMNS || (!in_code && cannot_be_broken(start)),
            Kind::Lines => false,
            Kind::Comments => !start.starts_with('#'),
        };
        if !as_it_is && width(kind, line) > COLUMNS {
            found.push(number);
        }
    }
    found
}

fn width(kind: Kind, line: &str) -> usize {
    line.chars().fold(0, |at, sign| match (kind, sign) {
        (Kind::C, '\t') => at / TAB * TAB + TAB,
        _ => at + 1,
    })
}

fn widest_word(line: &str) -> usize {
    line.split_whitespace().map(|word| word.chars().count()).max().unwrap_or_default()
}

/// Whether a line of a document has to be as wide as it is.
fn cannot_be_broken(start: &str) -> bool {
    let is_word = !start.trim_start_matches("- ").trim_end().contains(' ');
    is_word || start.starts_with(['#', '|', '<'])
}

/// Lines of Rust on which a string stands that is raw or has line breaks of its own.
fn quoted(source: &str) -> BTreeSet<usize> {
    let mut rest = source.as_bytes();
    let (mut lines, mut line) = (BTreeSet::new(), 1);
    while !rest.is_empty() {
        let (length, as_it_is) = piece(rest);
        let (here, after) = rest.split_at(length.min(rest.len()));
        let last = line + here.iter().filter(|&&byte| byte == b'\n').count();
        if as_it_is {
            lines.extend(line..=last);
        }
        (rest, line) = (after, last);
    }
    lines
}

/// The length of the word, comment, string or character that begins here, one for anything else;
/// and whether it is a string that is raw or has line breaks of its own.
fn piece(rest: &[u8]) -> (usize, bool) {
    let word = count(rest, |byte| byte.is_ascii_alphanumeric() || byte == b'_');
    match rest {
        _ if word > 0 => {
            let hashes = count(&rest[word..], |byte| byte == b'#');
            let begin = word + hashes + 1;
            let opens = rest.get(begin - 1) == Some(&b'"');
            if !opens || !matches!(&rest[..word], b"r" | b"br" | b"cr") {
                return (word, false);
            }
            let end = format!("\"{}", "#".repeat(hashes));
            (begin + through(&rest[begin..], end.as_bytes()), true)
        }
        [b'/', b'/', ..] => (through(rest, b"\n"), false),
        [b'/', b'*', inside @ ..] => (2 + through(inside, b"*/"), false),
        [b'"', ..] => string(rest),
        [b'\'', b'\\', _, inside @ ..] => (3 + through(inside, b"'"), false),
        // A character, or the name of a lifetime.
        [b'\'', first, ..] => {
            let end = 1 + match first {
                ..=0x7f => 1,
                ..=0xdf => 2,
                ..=0xef => 3,
                _ => 4,
            };
            (if rest.get(end) == Some(&b'\'') { end + 1 } else { 1 }, false)
        }
        _ => (1, false),
    }
}

/// A string that is not raw, from its first quote on.
fn string(rest: &[u8]) -> (usize, bool) {
    let (mut at, mut breaks) = (1, false);
    while at < rest.len() && rest[at] != b'"' {
        breaks |= rest[at] == b'\n';
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1, breaks)
}

/// How many bytes there are at the start that are of a kind.
fn count(rest: &[u8], is: impl Fn(u8) -> bool) -> usize {
    rest.iter().take_while(|&&byte| is(byte)).count()
}

/// Bytes to the end of a mark; all if it does not come.
fn through(rest: &[u8], mark: &[u8]) -> usize {
    let at = rest.windows(mark.len()).position(|part| part == mark);
    at.map_or(rest.len(), |at| at + mark.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> String {
        "word ".repeat(21)
    }

    #[test]
    fn files_are_looked_at_by_what_they_are() {
        let kinds = [
            ("a/b.rs", Some(Kind::Rust)),
            ("a/b.h", Some(Kind::C)),
            ("README.md", Some(Kind::Document)),
            ("docs/API.md", None),
            ("a/b.sh", Some(Kind::Lines)),
            ("a/Containerfile", Some(Kind::Lines)),
            ("a/Cargo.toml", Some(Kind::Comments)),
            ("Cargo.lock", None),
            ("a/b.patch", None),
            ("a/b.json", None),
            ("a/b", None),
        ];
        kinds.iter().for_each(|&(name, expected)| assert_eq!(kind(name, "x"), expected, "{name}"));
        assert_eq!(kind(".ci/run", "#!/bin/bash\n"), Some(Kind::Lines));
    }

    #[test]
    fn a_wide_line_is_told() {
        let (just, over) = ("w".repeat(COLUMNS), "w".repeat(COLUMNS + 1));
        for kind in [Kind::Rust, Kind::C, Kind::Lines] {
            assert_eq!(wide(kind, &format!("{just}\n{over}\n{just}\n{over}")), [2, 4], "{kind:?}");
        }
        let signs = "é".repeat(COLUMNS);
        assert_eq!(wide(Kind::Lines, &format!("{signs}\n{signs}é\n")), [2]);
    }

    #[test]
    fn in_rust_data_in_strings_is_as_wide_as_it_is() {
        let words = words();
        let data = format!("{{{}}} {words}", "w".repeat(COLUMNS / 2));
        let told = [
            format!("let a = \"{words}\";"),
            format!("let a = \"b\\\n  {words}\\\\\";"),
            format!("// r\"\n{words}"),
            format!("let a = ('\"', '\\'', '\\\"', b'\"', 'é'); // {words}"),
            format!("fn a<'a>(b: &'a str) {{ \"c\"; }} // {words}\nlet d = r#type;"),
            format!("let a = r\"b\nc\";\n/* \" */ let d = {words};"),
            format!("let bar\" = {words}; \""),
            format!("let a = \"b\n{words}\";"),
            format!("let a = r\"\n{words}\n\";"),
            format!("let a = \"{data}\";"),
        ];
        told.iter().for_each(|text| assert_eq!(wide(Kind::Rust, text).len(), 1, "{text}"));
        let right = [
            format!("let a = r\"{data}\";"),
            format!("let a = br#\"\" {data}\n{data}\"#;"),
            format!("let a = \"b\n{data}\n\\\"{data}\";"),
            format!("let a = '\"'; let b = \"{data}\n\";"),
            format!("let a = \"{data}\\\\\n\";"),
        ];
        right.iter().for_each(|text| assert_eq!(wide(Kind::Rust, text), [0; 0], "{text}"));
    }

    #[test]
    fn in_c_what_a_program_says_is_as_it_is() {
        let words = words();
        let text = format!("\tdev_err(dev,\n\t\t\"{words}\\n\");\n\tsay(\"{words}\");\n");
        assert_eq!(wide(Kind::C, &text), [3]);
        let (just, over) = ("w".repeat(COLUMNS - 16), "w".repeat(COLUMNS - 15));
        assert_eq!(wide(Kind::C, &format!("\t\t{just}\n\t\t{over}\n  \t\t{over}\n")), [2, 3]);
        assert_eq!(wide(Kind::Lines, &format!("\t\t{over}\n")), [0; 0]);
    }

    #[test]
    fn in_documents_text_and_code_are_looked_at() {
        let words = words();
        let word = "w".repeat(120);
        let text = format!(
            "# {words}\n\n{words}\n- {words}\n- {word}\n\n```sh\n# {words}\n```\n\n\
             | {words} |\n|---|\n| {words} |\n\n<!-- {words} -->\n"
        );
        assert_eq!(wide(Kind::Document, &text), [3, 4, 8]);
    }

    #[test]
    fn in_data_comments_are_looked_at() {
        let words = words();
        assert_eq!(wide(Kind::Comments, &format!("a = \"{words}\"\n  # {words}\n")), [2]);
    }

    #[test]
    fn no_line_of_ours_is_too_wide() {
        assert!(check(&lab::exec::workspace()).unwrap());
    }
}
