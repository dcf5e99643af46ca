//! What is the same in both backings is written once: no [`EQUAL`] lines in a row stand in `soft/`
//! and in `rnic/`. Lines are counted as a reader does, a bracket alone as well, in rows of which
//! the first line and more than half of all say something; but not comments and imports, which are
//! nothing that could be a function.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::modules::sources;

/// The two backings.
const BACKINGS: [&str; 2] = ["vhost-rdma/engine/src/soft", "vhost-rdma/rnic/src"];
/// So many lines in a row, equal in both, are one function too many.
const EQUAL: usize = 6;

/// A line of code, and where it stands.
type Line = (String, String);

/// Whether nothing is written in both; what is goes to standard error.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let read = |name: &str| lines(&root.join(name)).with_context(|| name.to_owned());
    let [soft, rnic] = BACKINGS;
    let wrong = equal(&read(soft)?, &read(rnic)?);
    wrong.iter().for_each(|line| eprintln!("error: {line}"));
    Ok(wrong.is_empty())
}

/// The lines of each source below a folder, but for tests.
fn lines(folder: &Path) -> Result<Vec<Vec<Line>>> {
    let mut files = Vec::new();
    for (module, path) in sources(folder)? {
        if module.iter().any(|name| name == "tests") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        files.push(counted(code, &module.join("/")));
    }
    anyhow::ensure!(!files.is_empty(), "it has no source");
    Ok(files)
}

/// Lines that count.
fn counted(code: &str, name: &str) -> Vec<Line> {
    let mut imports = false;
    let mut counted = Vec::new();
    for (n, line) in code.lines().map(str::trim).enumerate() {
        let begins = |words: &[&str]| words.iter().any(|word| line.starts_with(word));
        imports |= begins(&["use ", "pub use ", "pub(crate) use ", "pub(super) use ", "mod "]);
        if !imports && !line.is_empty() && !begins(&["//"]) {
            counted.push((line.to_owned(), format!("{name}.rs:{}", n + 1)));
        }
        imports &= !line.ends_with(';');
    }
    counted
}

/// Whether a line is more than brackets.
fn says((line, _): &Line) -> bool {
    line.chars().any(char::is_alphanumeric)
}

/// Where lines in a row are equal, once for each place.
fn equal(one: &[Vec<Line>], other: &[Vec<Line>]) -> Vec<String> {
    let text = |row: &[Line]| row.iter().map(|(line, _)| line.clone()).collect::<Vec<_>>();
    let rows = |files: &[Vec<Line>]| -> BTreeMap<Vec<String>, String> {
        let all = files.iter().flat_map(|file| file.windows(EQUAL));
        all.filter(|row| says(&row[0]) && row.iter().filter(|line| says(line)).count() > EQUAL / 2)
            .map(|row| (text(row), row[0].1.clone()))
            .collect()
    };
    let (one, other) = (rows(one), rows(other));
    let both = one.iter().filter_map(|(row, here)| Some((here, other.get(row)?)));
    let [soft, rnic] = BACKINGS;
    both.map(|(here, there)| format!("{EQUAL} equal lines: {soft}/{here} and {rnic}/{there}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_in_a_row_are_found_and_imports_are_none() {
        let code = "use a;\nlet a = 1;\nb();\n// why\nc();\n\nuse b::{\n    c,\n};\n\
                    d();\ne();\nf();\ng();\n";
        let [here, there] = ["here", "there"].map(|name| vec![counted(code, name)]);
        assert_eq!(here[0].len(), 7);
        let found = equal(&here, &there);
        assert_eq!(found.len(), 2, "{found:?}");
        let first = |line: &&String| line.contains("here.rs:2") && line.contains("there.rs:2");
        assert_eq!(found.iter().filter(first).count(), 1, "{found:?}");
        let other = vec![counted(&code.replace("d()", "x()"), "there")];
        assert!(equal(&here, &other).is_empty());
    }

    #[test]
    fn a_bracket_alone_is_a_line_too() {
        let code = "if a\n    && b\n{\n    let c = d();\n    e(c);\n}\n";
        let [here, there] = ["here", "there"].map(|name| vec![counted(code, name)]);
        assert_eq!(equal(&here, &there).len(), 1);
        let ends = "    return a;\n}\n}\nb\n}\n}\nfn c() {\n";
        let [here, there] = ["here", "there"].map(|name| vec![counted(ends, name)]);
        assert!(equal(&here, &there).is_empty(), "ends of blocks alone");
    }
}
