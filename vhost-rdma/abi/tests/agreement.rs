//! The ABI stands three times: in this crate, in the C header and in section 12 of the document.
//! This test proves that the three are one: the same constants with the same numbers, the same
//! structs with the same sizes, the same fields in the same order with the same types, offsets and
//! sizes, and nothing that only one of them knows.
//!
//! Each definition is read by its own means, so that no reader can hide a mistake of another: Rust
//! registers its items while it defines them, the C compiler answers for the header (a generated
//! program prints what `sizeof`, `offsetof` and the preprocessor say), the document is parsed from
//! its tables. The second half of the file changes one thing at a time and demands that the
//! comparison notices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/virtio_rdma_abi.h");
const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/virtio-rdma.md");
const CONSTANT_PREFIX: &str = "VIRTIO_RDMA_";
const STRUCT_PREFIX: &str = "virtio_rdma_";

/// A field: name, type in the document's terms (`le32`, `u8[6]`, `struct av`), offset, size.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    name: String,
    ty: String,
    offset: u64,
    size: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Struct {
    size: u64,
    fields: Vec<Field>,
}

/// One of the three definitions, names without their C prefixes.
#[derive(Clone, Debug, Default)]
struct Definition {
    constants: BTreeMap<String, u64>,
    structs: BTreeMap<String, Struct>,
}

impl Definition {
    fn add_constant(&mut self, name: &str, value: u64) -> Result<(), String> {
        match self.constants.insert(name.to_owned(), value) {
            None => Ok(()),
            Some(_) => Err(format!("constant {name} is defined twice")),
        }
    }

    fn add_struct(&mut self, name: &str, layout: Struct) -> Result<(), String> {
        match self.structs.insert(name.to_owned(), layout) {
            None => Ok(()),
            Some(_) => Err(format!("struct {name} is defined twice")),
        }
    }
}

/// All that differs between two definitions, in words.
fn differences(a_is: &str, a: &Definition, b_is: &str, b: &Definition) -> Vec<String> {
    let mut found = Vec::new();
    let names: BTreeSet<_> = a.constants.keys().chain(b.constants.keys()).collect();
    for name in names {
        match (a.constants.get(name), b.constants.get(name)) {
            (Some(x), Some(y)) if x == y => {}
            (x, y) => found.push(format!("constant {name}: {a_is} {x:?}, {b_is} {y:?}")),
        }
    }
    let names: BTreeSet<_> = a.structs.keys().chain(b.structs.keys()).collect();
    for name in names {
        match (a.structs.get(name), b.structs.get(name)) {
            (Some(x), Some(y)) => {
                if x.size != y.size {
                    found
                        .push(format!("struct {name}: {a_is} {} bytes, {b_is} {}", x.size, y.size));
                }
                for i in 0..x.fields.len().max(y.fields.len()) {
                    let (f, g) = (x.fields.get(i), y.fields.get(i));
                    if f != g {
                        found.push(format!("struct {name}, field {i}: {a_is} {f:?}, {b_is} {g:?}"));
                    }
                }
            }
            (x, y) => found.push(format!(
                "struct {name}: {a_is} {}, {b_is} {}",
                if x.is_some() { "has it" } else { "lacks it" },
                if y.is_some() { "has it" } else { "lacks it" },
            )),
        }
    }
    found
}

// ---- Rust --------------------------------------------------------------------------------------

/// `virtio_rdma_qp_attr` is `QpAttr` in Rust.
fn camel(name: &str) -> String {
    name.split('_')
        .flat_map(|part| {
            let mut chars = part.chars();
            chars.next().map(|c| c.to_ascii_uppercase()).into_iter().chain(chars)
        })
        .collect()
}

fn rust_type(ty: &str, structs: &BTreeMap<String, &str>) -> Result<String, String> {
    if let Some((element, count)) =
        ty.strip_prefix('[').and_then(|t| t.strip_suffix(']')).and_then(|t| t.split_once("; "))
    {
        return Ok(format!("{}[{count}]", rust_type(element, structs)?));
    }
    Ok(match ty {
        "u8" => "u8".to_owned(),
        "U16" => "le16".to_owned(),
        "U32" => "le32".to_owned(),
        "U64" => "le64".to_owned(),
        other => {
            let name = structs.get(other).ok_or_else(|| format!("no C name for type {other}"))?;
            format!("struct {name}")
        }
    })
}

fn from_rust() -> Result<Definition, String> {
    let mut definition = Definition::default();
    for &(name, value) in virtio_rdma_abi::CONSTANTS.iter().copied().flatten() {
        let name = name.strip_prefix(CONSTANT_PREFIX).ok_or(format!("{name} lacks the prefix"))?;
        definition.add_constant(name, value)?;
    }
    let names: BTreeMap<_, _> =
        virtio_rdma_abi::STRUCTS.iter().map(|s| (camel(s.name), s.name)).collect();
    for layout in virtio_rdma_abi::STRUCTS {
        let mut fields = Vec::new();
        for field in layout.fields {
            fields.push(Field {
                name: field.name.trim_start_matches("r#").to_owned(),
                ty: rust_type(field.ty, &names)?,
                offset: field.offset as u64,
                size: field.size as u64,
            });
        }
        definition.add_struct(layout.name, Struct { size: layout.size as u64, fields })?;
    }
    Ok(definition)
}

// ---- C -----------------------------------------------------------------------------------------

fn compiler() -> String {
    std::env::var("CC").unwrap_or_else(|_| "cc".to_owned())
}

fn output(command: &mut Command) -> Result<String, String> {
    let out = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if !out.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&out.stderr)));
    }
    String::from_utf8(out.stdout).map_err(|e| e.to_string())
}

/// Names of all macros of the header that have a value, as the preprocessor knows them.
fn macros(header: &Path) -> Result<Vec<String>, String> {
    let text = output(Command::new(compiler()).args(["-E", "-dM"]).arg(header))?;
    let mut names = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace().skip(1);
        if let (Some(name), Some(_value)) = (words.next(), words.next())
            && let Some(name) = name.strip_prefix(CONSTANT_PREFIX)
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("/*");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str(part.split_once("*/").map_or("", |(_, rest)| rest));
    }
    out
}

/// A struct's name and its fields as (name, type). Sizes and offsets are the compiler's business.
type Declaration = (String, Vec<(String, String)>);

fn declarations(header: &str) -> Result<Vec<Declaration>, String> {
    let text = without_comments(header);
    let mut structs = Vec::new();
    for chunk in text.split("};") {
        let Some((before, body)) = chunk.split_once('{') else { continue };
        let name = before
            .split_whitespace()
            .last()
            .and_then(|word| word.strip_prefix(STRUCT_PREFIX))
            .ok_or_else(|| format!("a body without a name: {body}"))?;
        let mut fields = Vec::new();
        for declaration in body.split(';').map(str::trim).filter(|d| !d.is_empty()) {
            let (ty, field) = declaration
                .rsplit_once(char::is_whitespace)
                .ok_or_else(|| format!("{declaration}: not a field"))?;
            let (field, count) = field.split_at(field.find('[').unwrap_or(field.len()));
            let ty = ty.trim().trim_start_matches("__").replace(STRUCT_PREFIX, "");
            fields.push((field.to_owned(), format!("{ty}{count}")));
        }
        structs.push((name.to_owned(), fields));
    }
    Ok(structs)
}

/// A C program that prints every constant, size and offset of the header.
fn program(header: &Path, constants: &[String], structs: &[Declaration]) -> String {
    let mut lines = Vec::new();
    for name in constants {
        lines.push(format!(
            "printf(\"constant {name} %llu\\n\", (unsigned long long){CONSTANT_PREFIX}{name});"
        ));
    }
    for (name, fields) in structs {
        let c_type = format!("struct {STRUCT_PREFIX}{name}");
        lines.push(format!("printf(\"struct {name} %zu\\n\", sizeof({c_type}));"));
        for (field, _) in fields {
            lines.push(format!(
                "printf(\"field {field} %zu %zu\\n\", offsetof({c_type}, {field}), \
                 sizeof((({c_type} *)0)->{field}));"
            ));
        }
    }
    format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/types.h>\n#include \"{}\"\n\
         int main(void)\n{{\n{}\nreturn 0;\n}}\n",
        header.display(),
        lines.join("\n")
    )
}

fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()))
}

/// What the compiler makes of the header; `name` keeps the files of concurrent tests apart.
fn from_c(header: &Path, name: &str) -> Result<Definition, String> {
    let text = std::fs::read_to_string(header).map_err(|e| e.to_string())?;
    let constants = macros(header)?;
    let structs = declarations(&text)?;
    let (source, binary) = (scratch(name).with_extension("c"), scratch(name).with_extension("bin"));
    std::fs::write(&source, program(header, &constants, &structs)).map_err(|e| e.to_string())?;
    output(
        Command::new(compiler())
            .args(["-std=c11", "-Wall", "-Wextra", "-Wpadded", "-Werror", "-o"])
            .args([&binary, &source]),
    )?;
    let printed = output(&mut Command::new(&binary));
    for file in [&source, &binary] {
        std::fs::remove_file(file).map_err(|e| e.to_string())?;
    }

    let mut definition = Definition::default();
    let mut types = structs.iter().flat_map(|(_, fields)| fields.iter().map(|(_, ty)| ty));
    let mut current: Option<(String, Struct)> = None;
    for line in printed?.lines() {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["constant", name, value] => definition.add_constant(name, number(value)?)?,
            ["struct", name, size] => {
                let next = Struct { size: number(size)?, fields: Vec::new() };
                if let Some((name, done)) = current.replace((name.to_owned(), next)) {
                    definition.add_struct(&name, done)?;
                }
            }
            ["field", name, offset, size] => {
                let ty = types.next().ok_or("more fields than declared")?.clone();
                let (_, layout) = current.as_mut().ok_or("a field outside a struct")?;
                layout.fields.push(Field {
                    name: name.to_owned(),
                    ty,
                    offset: number(offset)?,
                    size: number(size)?,
                });
            }
            _ => return Err(format!("the program printed {line:?}")),
        }
    }
    if let Some((name, done)) = current {
        definition.add_struct(&name, done)?;
    }
    Ok(definition)
}

// ---- The document ------------------------------------------------------------------------------

/// A number as the document writes it: decimal, hexadecimal or a shifted one.
fn number(text: &str) -> Result<u64, String> {
    let parsed = if let Some(shift) = text.strip_prefix("1 << ") {
        shift.parse().ok().and_then(|shift| 1u64.checked_shl(shift))
    } else if let Some(hex) = text.strip_prefix("0x") {
        u64::from_str_radix(hex, 16).ok()
    } else {
        text.parse().ok()
    };
    parsed.ok_or_else(|| format!("{text:?} is not a number"))
}

fn unquoted(cell: &str) -> Result<&str, String> {
    cell.strip_prefix('`')
        .and_then(|c| c.strip_suffix('`'))
        .ok_or_else(|| format!("{cell:?} is not in backticks"))
}

/// Cells of a table row; `\|` does not end a cell.
fn cells(row: &str) -> Vec<String> {
    let row = row.trim().trim_start_matches('|').trim_end_matches('|').replace("\\|", "\u{0}");
    row.split('|').map(|cell| cell.trim().replace('\u{0}', "|")).collect()
}

/// What the table under the present heading defines.
enum Heading {
    Other,
    Constants,
    Struct(String, Struct),
}

impl Heading {
    fn read(line: &str) -> Result<Self, String> {
        let title = line.trim_start_matches('#').trim();
        if title.starts_with("Constants:") {
            return Ok(Self::Constants);
        }
        let Some(rest) = title.strip_prefix("struct ") else { return Ok(Self::Other) };
        let (name, size) = rest
            .split_once(", ")
            .and_then(|(name, size)| Some((name, size.strip_suffix(" bytes")?)))
            .ok_or_else(|| format!("heading {line:?}: want `struct NAME, N bytes`"))?;
        Ok(Self::Struct(name.to_owned(), Struct { size: number(size)?, fields: Vec::new() }))
    }

    fn row(&mut self, line: &str, definition: &mut Definition) -> Result<(), String> {
        let cells = cells(line);
        let cells: Vec<_> = cells.iter().map(String::as_str).collect();
        match (self, &cells[..]) {
            (Self::Other, _)
            | (Self::Constants, ["name", "value", "meaning"])
            | (Self::Struct(..), ["offset", "size", "type", "field", "meaning"]) => Ok(()),
            (_, [first, ..]) if first.starts_with("---") => Ok(()),
            (_, [.., ""]) => Err(format!("row without a meaning: {line}")),
            (Self::Constants, [name, value, _]) => {
                definition.add_constant(unquoted(name)?, number(value)?)
            }
            (Self::Struct(_, layout), [offset, size, ty, name, _]) => {
                layout.fields.push(Field {
                    name: unquoted(name)?.to_owned(),
                    ty: (*ty).to_owned(),
                    offset: number(offset)?,
                    size: number(size)?,
                });
                Ok(())
            }
            _ => Err(format!("row of a wrong form: {line}")),
        }
    }

    fn finish(self, definition: &mut Definition) -> Result<(), String> {
        match self {
            Self::Struct(name, layout) => definition.add_struct(&name, layout),
            Self::Other | Self::Constants => Ok(()),
        }
    }
}

fn section_12(text: &str) -> Result<&str, String> {
    text.split_once("\n## 12. ").map(|(_, section)| section).ok_or("no section 12".to_owned())
}

fn from_document(text: &str) -> Result<Definition, String> {
    let mut definition = Definition::default();
    let mut heading = Heading::Other;
    for line in section_12(text)?.lines() {
        if line.starts_with('#') {
            let next = Heading::read(line)?;
            std::mem::replace(&mut heading, next).finish(&mut definition)?;
        } else if line.starts_with('|') {
            heading.row(line, &mut definition)?;
        }
    }
    heading.finish(&mut definition)?;
    Ok(definition)
}

fn document() -> Result<String, String> {
    std::fs::read_to_string(DOCUMENT).map_err(|e| format!("{DOCUMENT}: {e}"))
}

// ---- The agreement -----------------------------------------------------------------------------

#[test]
fn rust_c_and_the_document_agree() {
    let rust = from_rust().unwrap();
    let c = from_c(Path::new(HEADER), "agreement").unwrap();
    let document = from_document(&document().unwrap()).unwrap();
    let mut found = differences("Rust", &rust, "C", &c);
    found.extend(differences("C", &c, "document", &document));
    found.extend(differences("document", &document, "Rust", &rust));
    assert!(found.is_empty(), "{}", found.join("\n"));
    // An empty definition agrees with an empty definition.
    assert!(rust.constants.len() > 200 && rust.structs.len() > 40);
}

#[test]
fn structs_are_padded_nowhere() {
    for (name, layout) in from_rust().unwrap().structs {
        let mut end = 0;
        for field in &layout.fields {
            assert_eq!(field.offset, end, "{name}.{} leaves a hole", field.name);
            let align = match field.ty.split('[').next().unwrap() {
                "u8" => 1,
                "le16" => 2,
                "le32" => 4,
                _ => 8,
            };
            // The av is the one struct that holds no 64-bit field.
            let align = if field.ty == "struct av" { 4 } else { align };
            assert_eq!(field.offset % align, 0, "{name}.{} is misaligned", field.name);
            end += field.size;
        }
        assert_eq!(layout.size, end, "{name} has a tail");
    }
}

/// Every name in capitals that the prose puts in backticks must exist, alone or behind the prefix
/// of its group.
#[test]
fn the_prose_names_only_what_exists() {
    let text = document().unwrap();
    let known = from_document(&text).unwrap().constants;
    let prose = &text[..text.len() - section_12(&text).unwrap().len()];
    assert_eq!(prose.matches('`').count() % 2, 0, "a backtick has no partner");
    let (mut unknown, mut named) = (BTreeSet::new(), 0);
    for word in prose.split('`').skip(1).step_by(2) {
        let name = word.strip_prefix(CONSTANT_PREFIX).unwrap_or(word);
        let capitals =
            name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        if name.len() < 3 || !capitals || name.starts_with("VIRTIO_F_") {
            continue;
        }
        named += 1;
        let behind_prefix = format!("_{name}");
        if !known.contains_key(name) && !known.keys().any(|k| k.ends_with(&behind_prefix)) {
            unknown.insert(word);
        }
    }
    assert!(named > 30, "only {named} names found: is the prose still read?");
    assert!(unknown.is_empty(), "the prose names what section 12 does not define: {unknown:?}");
}

/// Section 5.7 has one row for each command, and its bodies are the structs that are named for
/// commands.
#[test]
fn the_table_of_commands_is_complete() {
    let text = document().unwrap();
    let known = from_document(&text).unwrap();
    let table = text.split_once("### 5.7 ").and_then(|(_, t)| t.split_once("\n### ")).unwrap().0;
    let (mut commands, mut bodies) = (BTreeSet::new(), BTreeSet::new());
    for line in table.lines().filter(|l| l.starts_with('|')).skip(2) {
        let row = cells(line);
        assert_eq!(row.len(), 5, "{line}");
        assert!(commands.insert(format!("CMD_{}", row[0])), "{} has two rows", row[0]);
        bodies.extend(row[1..3].iter().filter(|c| !c.starts_with('–')).cloned());
    }
    let defined: BTreeSet<_> =
        known.constants.keys().filter(|k| k.starts_with("CMD_")).cloned().collect();
    assert_eq!(commands, defined);
    let defined: BTreeSet<_> = known
        .structs
        .keys()
        .filter(|k| k.ends_with("_req") || k.ends_with("_resp"))
        .map(|k| format!("`{k}`"))
        .collect();
    assert_eq!(bodies, defined);
}

// ---- That it can fail --------------------------------------------------------------------------

#[test]
fn every_seeded_difference_is_found() {
    type Seed = (&'static str, fn(&mut Definition));
    fn cqe(definition: &mut Definition) -> &mut Struct {
        definition.structs.entry("cqe".to_owned()).or_default()
    }
    let seeds: [Seed; 12] = [
        ("value", |d| *d.constants.get_mut("CMD_QP_CREATE").unwrap() += 1),
        ("constant gone", |d| assert!(d.constants.remove("ERR_INVAL").is_some())),
        ("constant more", |d| assert!(d.constants.insert("CMD_NEW".into(), 0x50).is_none())),
        ("struct gone", |d| drop(d.structs.remove("cqe"))),
        ("struct more", |d| drop(d.structs.insert("new".into(), Struct::default()))),
        ("struct size", |d| cqe(d).size += 8),
        ("field gone", |d| drop(cqe(d).fields.pop())),
        ("field name", |d| cqe(d).fields[3].name = "state".into()),
        ("field type", |d| cqe(d).fields[0].ty = "u8[8]".into()),
        ("field offset", |d| cqe(d).fields[1].offset += 4),
        ("field size", |d| cqe(d).fields[1].size *= 2),
        ("field order", |d| cqe(d).fields.swap(2, 3)),
    ];
    let sound = from_rust().unwrap();
    assert!(differences("a", &sound, "b", &sound).is_empty());
    for (what, seed) in seeds {
        let mut broken = sound.clone();
        seed(&mut broken);
        assert!(!differences("a", &sound, "b", &broken).is_empty(), "{what}: not seen");
        assert!(!differences("b", &broken, "a", &sound).is_empty(), "{what}: not seen backwards");
    }
}

/// Takes every row of every table out of the document, one at a time.
#[test]
fn every_row_of_the_document_counts() {
    let (text, rust) = (document().unwrap(), from_rust().unwrap());
    let start = text.len() - section_12(&text).unwrap().len();
    let mut rows = 0;
    let mut at = start;
    for line in text[start..].split_inclusive('\n') {
        let next = at + line.len();
        if line.starts_with('|') && line.contains('`') {
            rows += 1;
            let without = format!("{}{}", &text[..at], &text[next..]);
            let found = from_document(&without).map(|d| differences("document", &d, "Rust", &rust));
            assert!(found.is_err() || found.is_ok_and(|f| !f.is_empty()), "nobody misses {line}");
        }
        at = next;
    }
    let items = rust.constants.len() + rust.structs.values().map(|s| s.fields.len()).sum::<usize>();
    assert_eq!(rows, items, "each row of section 12 defines one item");
}

/// Changes the header itself, so that the way through the compiler is known to see a change too.
#[test]
fn changes_of_the_header_are_seen() {
    let (text, rust) = (std::fs::read_to_string(HEADER).unwrap(), from_rust().unwrap());
    let edits = [
        ("value", "VIRTIO_RDMA_CMD_SRQ_QUERY\t\t0x33u", "VIRTIO_RDMA_CMD_SRQ_QUERY\t\t0x34u"),
        ("name", "VIRTIO_RDMA_EVENT_GID_CHANGE", "VIRTIO_RDMA_EVENT_GID_CHANGED"),
        ("order", "\t__le32 lkey;\n\t__le32 flags;", "\t__le32 flags;\n\t__le32 lkey;"),
        ("type", "\t__le64 nonce;\n};", "\t__le32 nonce[2];\n};"),
    ];
    for (what, old, new) in edits {
        assert!(text.contains(old), "{what}: the header does not hold {old:?} any more");
        let header = scratch(&format!("header-{what}")).with_extension("h");
        std::fs::write(&header, text.replace(old, new)).unwrap();
        let c = from_c(&header, what);
        std::fs::remove_file(&header).unwrap();
        assert!(!differences("C", &c.unwrap(), "Rust", &rust).is_empty(), "{what}: not seen");
    }
    // Padding that the ABI must not have is refused by the compiler itself (-Wpadded).
    let header = scratch("header-padding").with_extension("h");
    std::fs::write(&header, text.replace("\t__u8 sl;\n\t__u8 reserved0;\n", "\t__u8 sl;\n"))
        .unwrap();
    let c = from_c(&header, "padding");
    std::fs::remove_file(&header).unwrap();
    assert!(c.is_err(), "a struct with padding was accepted");
}
