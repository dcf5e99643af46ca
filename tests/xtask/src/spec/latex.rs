//! The tree as LaTeX, with the macros of the virtio specification.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Result, bail, ensure};

use super::document::{Block, Document, Group};

/// Labels of the TC's document begin so.
const PLACE: &str = "Device Types / RDMA Device";

/// What the TC's preamble defines, for a document of its own.
const ALONE: &str = r"\documentclass[a4paper]{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[margin=2cm]{geometry}
\usepackage{longtable}
\usepackage{array}
\usepackage{textcomp}
\usepackage[hidelinks]{hyperref}
\newcommand{\devicenormative}[3]{#1{Device Requirements: #2}\label{devicenormative:#3}}
\newcommand{\drivernormative}[3]{#1{Driver Requirements: #2}\label{drivernormative:#3}}
\newcommand{\conformance}[2]{#1{#2}}
\setlength{\emergencystretch}{3em}
\begin{document}
\input{description.tex}
\section{Conformance}
\input{device-conformance.tex}
\input{driver-conformance.tex}
\end{document}
";

/// Which side's statements.
#[derive(Debug, Clone, Copy)]
enum Side {
    Device,
    Driver,
}

impl Side {
    const fn macro_name(self) -> &'static str {
        match self {
            Self::Device => "devicenormative",
            Self::Driver => "drivernormative",
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Device => "Device",
            Self::Driver => "Driver",
        }
    }
}

/// Names and texts.
pub(super) fn files(document: &Document) -> Result<Vec<(&'static str, String)>> {
    let files = vec![
        ("description.tex", description(document)?),
        ("device-conformance.tex", conformance(Side::Device, &document.device)?),
        ("driver-conformance.tex", conformance(Side::Driver, &document.driver)?),
        ("rdma.tex", ALONE.to_owned()),
    ];
    for (name, text) in &files {
        ensure!(text.is_ascii(), "{name} has a character that LaTeX must be told of");
    }
    Ok(files)
}

fn description(document: &Document) -> Result<String> {
    let known: BTreeSet<&str> = document.clauses().map(|c| c.number.as_str()).collect();
    let title = &document.title;
    let mut out = format!("\\section{{{}}}\\label{{sec:{PLACE}}}\n\n", words(title, &known)?);
    for block in &document.blocks {
        out.push_str(&render(block, &known)?);
        out.push('\n');
    }
    for (side, groups) in [(Side::Device, &document.device), (Side::Driver, &document.driver)] {
        for group in groups {
            normative(&mut out, side, group, &known)?;
        }
    }
    Ok(out)
}

fn normative(out: &mut String, side: Side, group: &Group, known: &BTreeSet<&str>) -> Result<()> {
    let (title, name) = (&group.title, side.macro_name());
    writeln!(out, "\\{name}{{\\subsection}}{{{title}}}{{{PLACE} / {title}}}\n")?;
    out.push_str("\\begin{itemize}\n");
    for clause in &group.clauses {
        let number = &clause.number;
        let says = words(&clause.says, known)?;
        writeln!(out, "\\item \\hypertarget{{{number}}}{{\\textbf{{{number}}}}} {says}")?;
    }
    out.push_str("\\end{itemize}\n\n");
    Ok(())
}

fn conformance(side: Side, groups: &[Group]) -> Result<String> {
    let (word, name) = (side.word(), side.macro_name());
    let mut out = format!(
        "\\conformance{{\\subsection}}{{RDMA {word} Conformance}}\
         \\label{{sec:Conformance / {word} Conformance / RDMA {word} Conformance}}\n\n\
         An RDMA {} MUST conform to the following normative statements:\n\n\\begin{{itemize}}\n",
        word.to_lowercase()
    );
    for group in groups {
        writeln!(out, "\\item \\ref{{{name}:{PLACE} / {}}}", group.title)?;
    }
    out.push_str("\\end{itemize}\n");
    Ok(out)
}

fn render(block: &Block, known: &BTreeSet<&str>) -> Result<String> {
    Ok(match block {
        Block::Heading(depth, title) => heading(*depth, title, known)?,
        Block::Paragraph(text) => format!("{}\n", words(text, known)?),
        Block::Note(text) => {
            let text = text.strip_prefix("Note, ").or_else(|| text.strip_prefix("Note: "));
            let Some(text) = text else { bail!("a note that does not begin so: {block:?}") };
            format!("\\begin{{quote}}\\textbf{{Note}} {}\\end{{quote}}\n", words(text, known)?)
        }
        Block::Bullets(items) => list("itemize", items, known)?,
        Block::Steps(items) => list("enumerate", items, known)?,
        Block::Table { head, rows } => table(head, rows, known)?,
    })
}

/// The document's numbers of sections are LaTeX's business; the text refers to them by number, so
/// they stay in the labels and in the titles.
fn heading(depth: usize, title: &str, known: &BTreeSet<&str>) -> Result<String> {
    let command = match depth {
        2 => "subsection",
        3 => "subsubsection",
        4 => "paragraph",
        _ => bail!("a heading of depth {depth}: {title}"),
    };
    let label = title.replace(['`', '&', '_', '#', '%'], "");
    Ok(format!("\\{command}{{{}}}\\label{{sec:{PLACE} / {label}}}\n", words(title, known)?))
}

fn list(kind: &str, items: &[String], known: &BTreeSet<&str>) -> Result<String> {
    let mut out = format!("\\begin{{{kind}}}\n");
    for item in items {
        writeln!(out, "\\item {}", words(item, known)?)?;
    }
    writeln!(out, "\\end{{{kind}}}")?;
    Ok(out)
}

/// Columns are as wide as their longest cells want, within the page.
fn table(head: &[String], rows: &[Vec<String>], known: &BTreeSet<&str>) -> Result<String> {
    let widths = head.iter().enumerate().map(|(n, title)| {
        let cells = rows.iter().filter_map(|row| row.get(n)).chain([title]);
        cells.map(|cell| cell.chars().count().clamp(4, 60)).max().unwrap_or(4)
    });
    let widths: Vec<usize> = widths.collect();
    let all: usize = widths.iter().sum();
    let mut out = String::from("\\begin{longtable}{|");
    for width in &widths {
        // Hundredths of the line; a tenth is left to the rules between.
        let share = (width * 88 / all.max(1)).max(5);
        write!(out, ">{{\\raggedright\\arraybackslash}}p{{0.{share:02}\\linewidth}}|")?;
    }
    out.push_str("}\n\\hline\n");
    for row in std::iter::once(head).chain(rows.iter().map(Vec::as_slice)) {
        let cells = row.iter().map(|cell| words(cell, known)).collect::<Result<Vec<_>>>()?;
        writeln!(out, "{} \\\\\n\\hline", cells.join(" & "))?;
    }
    out.push_str("\\end{longtable}\n");
    Ok(out)
}

/// Prose: `code`, **bold**, *emphasis*, [numbers of clauses]; everything else as it is.
fn words(text: &str, known: &BTreeSet<&str>) -> Result<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['`', '*', '[']) {
        plain(&mut out, rest.get(..at).unwrap_or_default(), false)?;
        rest = rest.get(at..).unwrap_or_default();
        rest = marked(&mut out, rest, known)?;
    }
    plain(&mut out, rest, false)?;
    Ok(out)
}

/// Writes what stands at the beginning of `rest` between marks; what follows it.
fn marked<'a>(out: &mut String, rest: &'a str, known: &BTreeSet<&str>) -> Result<&'a str> {
    if let Some((code, behind)) = rest.strip_prefix('`').and_then(|r| r.split_once('`')) {
        out.push_str("\\texttt{");
        plain(out, code, true)?;
        out.push('}');
        return Ok(behind);
    }
    for (mark, command) in [("**", "textbf"), ("*", "emph")] {
        if let Some((inside, behind)) = rest.strip_prefix(mark).and_then(|r| r.split_once(mark)) {
            write!(out, "\\{command}{{{}}}", words(inside, known)?)?;
            return Ok(behind);
        }
    }
    let Some((inside, behind)) = rest.strip_prefix('[').and_then(|r| r.split_once(']')) else {
        bail!("a mark that does not end: {rest:?}");
    };
    if !["DEV-", "DRV-"].iter().any(|side| inside.starts_with(side)) {
        out.push_str("{[}");
        out.push_str(&words(inside, known)?);
        out.push_str("{]}");
        return Ok(behind);
    }
    let mut links = Vec::new();
    for number in inside.split(',').map(str::trim) {
        ensure!(known.contains(number), "[{number}] is no clause");
        links.push(format!("\\hyperlink{{{number}}}{{{number}}}"));
    }
    write!(out, "{{[}}{}{{]}}", links.join(", "))?;
    Ok(behind)
}

/// Characters; in code a long name may be broken behind its underscores.
fn plain(out: &mut String, text: &str, code: bool) -> Result<()> {
    for c in text.chars() {
        match c {
            '_' if code => out.push_str("\\_\\allowbreak{}"),
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => {
                out.push('\\');
                out.push(c);
            }
            '\\' => out.push_str("\\textbackslash{}"),
            '~' => out.push_str("\\textasciitilde{}"),
            '^' => out.push_str("\\textasciicircum{}"),
            '<' => out.push_str("\\textless{}"),
            '>' => out.push_str("\\textgreater{}"),
            '|' => out.push_str("\\textbar{}"),
            '"' => out.push_str("\\textquotedbl{}"),
            c if c.is_ascii() => out.push(c),
            c => out.push_str(symbol(c)?),
        }
    }
    Ok(())
}

fn symbol(c: char) -> Result<&'static str> {
    Ok(match c {
        '·' => "$\\cdot$",
        '×' => "$\\times$",
        '−' => "$-$",
        '–' => "--",
        '—' => "---",
        '…' => "\\ldots{}",
        '→' => "$\\rightarrow$",
        '≤' => "$\\leq$",
        '≥' => "$\\geq$",
        '≠' => "$\\neq$",
        '²' => "\\textsuperscript{2}",
        '³' => "\\textsuperscript{3}",
        '⁴' => "\\textsuperscript{4}",
        '⁰' => "\\textsuperscript{0}",
        'µ' => "\\textmu{}",
        '∞' => "$\\infty$",
        c => bail!("LaTeX must be told of {c:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::super::document::Document;
    use super::*;

    fn text() -> String {
        let path = lab::exec::workspace().join(super::super::SOURCE);
        std::fs::read_to_string(path).unwrap()
    }

    fn all() -> String {
        let document = Document::parse(&text()).unwrap();
        files(&document).unwrap().into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn every_clause_and_every_heading_and_every_cell_is_in_it() {
        let (source, made) = (text(), all());
        let mut clauses = 0;
        for line in source.lines() {
            if let Some((number, _)) = line.strip_prefix("- **D").and_then(|l| l.split_once("** "))
            {
                assert!(made.contains(&format!("\\hypertarget{{D{number}}}")), "D{number}");
                clauses += 1;
            }
        }
        let document = Document::parse(&source).unwrap();
        assert_eq!(document.clauses().count(), clauses);
        let body = source.split("\n## 13.").next().unwrap();
        let headings = body.lines().filter(|l| l.starts_with("##")).count();
        let sections = ["\\subsection{", "\\subsubsection{", "\\paragraph{"];
        let made_headings: usize = sections.iter().map(|s| made.matches(s).count()).sum();
        assert_eq!(made_headings, headings);
        // Two rules of each table are its own: Markdown's and LaTeX's.
        let rows = body.lines().filter(|l| l.starts_with('|') && !l.starts_with("|---")).count();
        assert_eq!(made.matches(" \\\\\n\\hline").count(), rows);
    }

    #[test]
    fn words_outlive_the_marks() {
        let bare = |text: &str| {
            let text = text.replace("\\_\\allowbreak{}", "_");
            text.chars().filter(char::is_ascii_alphanumeric).collect::<String>()
        };
        let (source, made) = (text(), bare(&all()));
        let body = source.split("\n## 13.").next().unwrap();
        // The number of a step is LaTeX's.
        let lines = body.lines().map(|line| line.trim_start_matches(|c: char| c.is_ascii_digit()));
        let plain =
            |line: &&str| line.chars().all(|c| c.is_ascii_alphanumeric() || " .,".contains(c));
        let lines: Vec<&str> = lines.filter(plain).collect();
        assert!(lines.len() > 200, "{} lines without a mark", lines.len());
        for line in lines {
            assert!(made.contains(&bare(line)), "{line}");
        }
    }

    #[test]
    fn what_begins_ends() {
        let made = all();
        for kind in ["itemize", "enumerate", "longtable", "quote"] {
            let begins = made.matches(&format!("\\begin{{{kind}}}")).count();
            assert!(begins > 0, "{kind}");
            assert_eq!(begins, made.matches(&format!("\\end{{{kind}}}")).count(), "{kind}");
        }
        let open = made.replace("\\{", "").replace("\\}", "");
        assert_eq!(open.matches('{').count(), open.matches('}').count());
        let (device, driver) = ("\\ref{devicenormative:", "\\ref{drivernormative:");
        for label in [device, driver].iter().flat_map(|s| made.split(s).skip(1)) {
            let label = label.split('}').next().unwrap();
            let title = label.rsplit(" / ").next().unwrap();
            assert!(made.contains(&format!("{{{title}}}{{{label}}}")), "{label}");
        }
    }

    #[test]
    fn an_unknown_clause_or_character_is_an_error() {
        let known = BTreeSet::from(["DEV-A-1"]);
        assert!(words("so [DEV-A-1]", &known).unwrap().contains("hyperlink{DEV-A-1}"));
        assert!(words("so [DEV-A-2]", &known).is_err());
        assert!(words("☃", &known).is_err());
        assert_eq!(
            words("`a_b` **c** *d* 5%", &known).unwrap(),
            "\\texttt{a\\_\\allowbreak{}b} \\textbf{c} \\emph{d} 5\\%"
        );
    }
}
