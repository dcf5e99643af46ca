//! The specification as a tree: what of Markdown it uses, and its clauses.

use anyhow::{Context, Result, bail, ensure};

/// A part of the text, in order.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// Depth (2 for a section) and title.
    Heading(usize, String),
    Paragraph(String),
    Note(String),
    Bullets(Vec<String>),
    Steps(Vec<String>),
    Table {
        head: Vec<String>,
        rows: Vec<Vec<String>>,
    },
}

/// A requirement of section 13.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Clause {
    pub(super) number: String,
    pub(super) says: String,
}

/// Clauses under one heading.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) title: String,
    pub(super) clauses: Vec<Clause>,
}

#[derive(Debug)]
pub(super) struct Document {
    pub(super) title: String,
    /// All but section 13.
    pub(super) blocks: Vec<Block>,
    pub(super) device: Vec<Group>,
    pub(super) driver: Vec<Group>,
}

const CONFORMANCE: &str = "\n## 13. Conformance\n";

impl Document {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (body, conformance) = text.split_once(CONFORMANCE).context("no section 13")?;
        let (device, driver) =
            conformance.split_once("\n### 13.2 Driver\n").context("no section 13.2")?;
        let (_, device) = device.split_once("\n### 13.1 Device\n").context("no section 13.1")?;
        let mut blocks = blocks(body)?.into_iter();
        let Some(Block::Heading(1, title)) = blocks.next() else { bail!("no title") };
        Ok(Self {
            title,
            blocks: blocks.collect(),
            device: groups(device, "Device")?,
            driver: groups(driver, "Driver")?,
        })
    }

    pub(super) fn clauses(&self) -> impl Iterator<Item = &Clause> {
        self.device.iter().chain(&self.driver).flat_map(|group| &group.clauses)
    }
}

/// Pieces between empty lines, each of one kind.
fn blocks(text: &str) -> Result<Vec<Block>> {
    let pieces = text.split("\n\n").map(|piece| piece.trim_matches('\n'));
    pieces.filter(|piece| !piece.is_empty()).map(block).collect()
}

fn block(piece: &str) -> Result<Block> {
    let join = |lines: &str| lines.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some(title) = piece.strip_prefix('#') {
        ensure!(!piece.contains('\n'), "text stands right behind the heading {piece:?}");
        let depth = 1 + title.len() - title.trim_start_matches('#').len();
        return Ok(Block::Heading(depth, title.trim_start_matches('#').trim().to_owned()));
    }
    if piece.starts_with('|') {
        return table(piece);
    }
    if piece.starts_with('>') {
        let lines = piece.lines().map(|line| line.strip_prefix('>').context("half a note"));
        let text = lines.collect::<Result<Vec<_>>>()?.join("\n");
        return Ok(Block::Note(join(&text)));
    }
    if piece.starts_with("- ") {
        return Ok(Block::Bullets(items(piece, |line| line.strip_prefix("- "))?));
    }
    if piece.starts_with("1. ") {
        return Ok(Block::Steps(items(piece, step)?));
    }
    ensure!(!piece.starts_with("```") && !piece.starts_with("    "), "code: {piece:?}");
    Ok(Block::Paragraph(join(piece)))
}

/// The text behind `N. `.
fn step(line: &str) -> Option<&str> {
    let (number, rest) = line.split_once(". ")?;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(rest)
}

/// Items begin with a mark; what follows is indented.
fn items(piece: &str, mark: impl Fn(&str) -> Option<&str>) -> Result<Vec<String>> {
    let mut found: Vec<String> = Vec::new();
    for line in piece.lines() {
        if let Some(text) = mark(line) {
            found.push(text.trim().to_owned());
            continue;
        }
        let last = found.last_mut().context("a list without a mark")?;
        ensure!(line.starts_with(' '), "{line:?} belongs to no item of a list");
        last.push(' ');
        last.push_str(line.trim());
    }
    Ok(found)
}

fn table(piece: &str) -> Result<Block> {
    let mut rows = piece.lines().map(cells).collect::<Result<Vec<_>>>()?;
    ensure!(rows.len() > 2, "a table without rows: {piece}");
    let head = rows.remove(0);
    let rule = rows.remove(0);
    ensure!(rule.iter().all(|cell| cell.trim_matches([':', '-']).is_empty()), "no rule: {piece}");
    let width = head.len();
    ensure!(rows.iter().all(|row| row.len() == width), "rows of different widths: {piece}");
    Ok(Block::Table { head, rows })
}

/// A bar behind a backslash stands in a cell.
fn cells(line: &str) -> Result<Vec<String>> {
    let inside = line.strip_prefix('|').and_then(|l| l.strip_suffix('|'));
    let inside = inside.with_context(|| format!("a row without bars: {line}"))?;
    let cells = inside.replace("\\|", "\u{1}");
    Ok(cells.split('|').map(|cell| cell.replace('\u{1}', "|").trim().to_owned()).collect())
}

/// `**Title**` begins a group, `- **NUMBER** text` is a clause.
fn groups(text: &str, whole: &str) -> Result<Vec<Group>> {
    let mut found: Vec<Group> = Vec::new();
    for block in blocks(text)? {
        match block {
            Block::Paragraph(text) if text.starts_with("**") => {
                found.push(Group { title: text.trim_matches('*').to_owned(), clauses: Vec::new() });
            }
            Block::Bullets(items) => {
                if found.is_empty() {
                    found.push(Group { title: whole.to_owned(), clauses: Vec::new() });
                }
                let group = found.last_mut().context("no group")?;
                for item in &items {
                    group.clauses.push(clause(item)?);
                }
            }
            other => bail!("section 13 has {other:?}"),
        }
    }
    Ok(found)
}

/// What follows the last sentence with a word of RFC 2119 says how this project shows it.
fn clause(item: &str) -> Result<Clause> {
    let rest =
        item.strip_prefix("**").with_context(|| format!("a clause without a number: {item}"))?;
    let (number, text) = rest.split_once("** ").with_context(|| format!("no clause: {item}"))?;
    let end = ["MUST", "SHOULD", "MAY"]
        .iter()
        .filter_map(|word| text.rfind(word))
        .max()
        .with_context(|| format!("{number} requires nothing"))?;
    let behind = text.get(end..).unwrap_or_default();
    let stop = behind.find(". ").map_or(behind.len(), |at| at + 1);
    let says = text.get(..end + stop).unwrap_or(text).trim().to_owned();
    Ok(Clause { number: number.to_owned(), says })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clause_is_its_requirement_without_what_shows_it() {
        let item =
            "**DEV-A-1** It MUST do `a`. And SHOULD b. The lab has one. `file::test`, `vm x: y`";
        let found = clause(item).unwrap();
        assert_eq!(found.number, "DEV-A-1");
        assert_eq!(found.says, "It MUST do `a`. And SHOULD b.");
        assert!(clause("**DEV-A-2** nothing. `file::test`").is_err());
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        for bad in ["# T\ntext", "| a |\n|---|", "| a | b |\n|---|---|\n| 1 |", "```\ncode\n```"] {
            assert!(blocks(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn lists_keep_their_items_whole() {
        let found = blocks("1. one\n   more\n2. two\n\n- a\n  b\n- c").unwrap();
        let own = |items: &[&str]| items.iter().map(|i| (*i).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            found,
            [Block::Steps(own(&["one more", "two"])), Block::Bullets(own(&["a b", "c"]))]
        );
    }
}
