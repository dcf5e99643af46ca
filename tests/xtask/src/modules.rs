//! How the modules of a crate name each other.
//!
//! Among the modules of one folder, each taken together with all that is below it, no two name each
//! other, not even by way of others: data flows one way, and each can be read with what it names
//! and nothing else. A folder's own file (`mod.rs`, or the file of its name) is the face of those
//! below it, and may be named by them and name them.
//!
//! And what is the same in both backings is written once: no [`EQUAL`] lines in a row stand in
//! `soft/` and in `rnic/`.
//!
//! Sources are read as syntax. What stands in tests alone is not looked at, nor is what a macro
//! makes; a name in a macro's argument is seen if a `use` brings it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree};

/// Where crates have their sources.
const CRATES: [&str; 14] = [
    "vhost-rdma/src",
    "vhost-rdma/abi/src",
    "vhost-rdma/engine/src",
    "vhost-rdma/memory/src",
    "vhost-rdma/places/src",
    "vhost-rdma/rdma-netlink/src",
    "vhost-rdma/rnic/src",
    "vhost-rdma/vmm/src",
    "cni-plugin/src",
    "cni-plugin/skel/src",
    "controller/src",
    "controller/api/src",
    "device-plugin/src",
    "device-plugin/api/src",
];
/// The two backings.
const BACKINGS: [&str; 2] = ["vhost-rdma/engine/src/soft", "vhost-rdma/rnic/src"];
/// So many lines in a row, equal in both, are one function too many.
const EQUAL: usize = 6;

/// A module's name below its crate; the crate itself has none.
type Module = Vec<String>;
/// Which modules of a folder a module names.
type Names = BTreeMap<String, BTreeSet<String>>;

/// Whether no modules go round in a circle and nothing is written twice; what does goes to standard
/// error.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut wrong = Vec::new();
    for name in CRATES {
        let modules = read(&root.join(name)).with_context(|| name.to_owned())?;
        anyhow::ensure!(!modules.is_empty(), "{name} has no module");
        wrong.extend(circles(&modules).into_iter().map(|circle| format!("{name}: {circle}")));
    }
    let [soft, rnic] = BACKINGS.map(|name| lines(&root.join(name)));
    wrong.extend(equal(&soft?, &rnic?));
    wrong.iter().for_each(|line| eprintln!("error: {line}"));
    Ok(wrong.is_empty())
}

/// The sources below a folder, and each one's module.
fn sources(folder: &Path) -> Result<Vec<(Module, PathBuf)>> {
    let mut found = Vec::new();
    let mut folders = vec![(Module::new(), folder.to_owned())];
    while let Some((module, folder)) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let mut own = module.clone();
            if path.is_dir() {
                own.push(stem.to_owned());
                folders.push((own, path));
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                if !matches!(stem, "mod" | "lib" | "main") {
                    own.push(stem.to_owned());
                }
                found.push((own, path));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Each module with the paths that it names, but for those of tests.
fn read(folder: &Path) -> Result<BTreeMap<Module, BTreeSet<Module>>> {
    let mut all = BTreeMap::new();
    let mut tests = BTreeSet::new();
    for (module, path) in sources(folder)? {
        let file = syn::parse_file(&fs::read_to_string(&path)?);
        let file = file.with_context(|| path.display().to_string())?;
        let mut reader = Reader { module: module.clone(), named: BTreeSet::new(), tests: vec![] };
        reader.visit_file(&file);
        tests.extend(reader.tests);
        all.entry(module).or_insert_with(BTreeSet::new).extend(reader.named);
    }
    all.retain(|module, _| !(1..=module.len()).any(|len| tests.contains(&module[..len])));
    Ok(all)
}

/// Reads one module.
struct Reader {
    module: Module,
    named: BTreeSet<Module>,
    /// Modules of tests that it declares.
    tests: Vec<Module>,
}

impl Reader {
    /// Takes note of a path that begins in this crate.
    fn name(&mut self, path: &[String]) {
        let mut rest = path;
        let mut module = match rest.first().map(String::as_str) {
            Some("crate") => Module::new(),
            Some("self" | "super") => self.module.clone(),
            // A sibling is named by `super`; what stands below is of no interest.
            _ => return,
        };
        while let Some(first) = rest.first() {
            match first.as_str() {
                "super" => drop(module.pop()),
                "self" | "crate" => {}
                _ => break,
            }
            rest = &rest[1..];
        }
        module.extend(rest.iter().cloned());
        self.named.insert(module);
    }

    fn tree(&mut self, before: &mut Vec<String>, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.tree(before, &path.tree);
                before.pop();
            }
            UseTree::Group(group) => group.items.iter().for_each(|item| self.tree(before, item)),
            UseTree::Name(_) | UseTree::Rename(_) | UseTree::Glob(_) => {
                let mut path = before.clone();
                match tree {
                    UseTree::Name(name) => path.push(name.ident.to_string()),
                    UseTree::Rename(name) => path.push(name.ident.to_string()),
                    _ => {}
                }
                self.name(&path);
            }
        }
    }
}

/// Whether something is there in tests only.
fn is_of_tests(attrs: &[Attribute]) -> bool {
    attrs.iter().filter(|attr| attr.path().is_ident("cfg")).any(|attr| {
        let condition = match &attr.meta {
            syn::Meta::List(list) => list.tokens.to_string(),
            _ => String::new(),
        };
        let mut words = condition.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.any(|word| word == "test") && !condition.starts_with("not")
    })
}

impl<'a> Visit<'a> for Reader {
    fn visit_item(&mut self, item: &'a Item) {
        let attrs = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_of_tests(attrs) {
            visit::visit_item(self, item);
        } else if let Item::Mod(item) = item {
            let mut module = self.module.clone();
            module.push(item.ident.to_string());
            self.tests.push(module);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if !is_of_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    /// One that stands in the same file is a part of it.
    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        if item.content.is_some() {
            self.module.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.tree(&mut Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        self.name(&segments);
        visit::visit_path(self, path);
    }
}

/// The circles among the modules of each folder, for people.
fn circles(modules: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<String> {
    let mut folders: BTreeMap<&[String], Names> = BTreeMap::new();
    for (module, named) in modules {
        for path in named {
            // The module that a path leads to: what is behind it are its items.
            let len = (0..=path.len()).rev().find(|len| modules.contains_key(&path[..*len]));
            let to = &path[..len.unwrap_or(0)];
            let same = module.iter().zip(to).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(same), to.get(same)) {
                let names = folders.entry(&module[..same]).or_default();
                names.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    let circle = |(folder, names): (&[String], Names)| {
        let circle = names.keys().find_map(|start| way(&names, start, start))?;
        let within = if folder.is_empty() { "the crate".to_owned() } else { folder.join("::") };
        Some(format!("in {within} these name each other: {}", circle.join(" -> ")))
    };
    folders.into_iter().filter_map(circle).collect()
}

/// The shortest way from one module to another, by names.
fn way(names: &Names, from: &str, to: &str) -> Option<Vec<String>> {
    let mut known = BTreeSet::new();
    let mut ways = std::collections::VecDeque::from([vec![from.to_owned()]]);
    while let Some(so_far) = ways.pop_front() {
        for next in so_far.last().and_then(|last| names.get(last)).into_iter().flatten() {
            let mut on = so_far.clone();
            on.push(next.clone());
            if next == to {
                return Some(on);
            }
            if known.insert(next) {
                ways.push_back(on);
            }
        }
    }
    None
}

/// A line of code, and where it stands.
type Line = (String, String);

/// The lines of each source below a folder that say anything, but for tests.
fn lines(folder: &Path) -> Result<Vec<Vec<Line>>> {
    let mut files = Vec::new();
    for (module, path) in sources(folder)? {
        if module.iter().any(|name| name == "tests") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        files.push(telling(code, &module.join("/")));
    }
    Ok(files)
}

/// Lines that are not the same everywhere: no comment, no import, no bracket alone.
fn telling(code: &str, name: &str) -> Vec<Line> {
    let numbered = code.lines().map(str::trim).enumerate();
    let tells = numbered.filter(|(_, line)| {
        let says = line.chars().any(char::is_alphanumeric);
        says && !["//", "use ", "pub use ", "mod ", "#["].iter().any(|it| line.starts_with(it))
    });
    tells.map(|(n, line)| (line.to_owned(), format!("{name}.rs:{}", n + 1))).collect()
}

/// Where lines in a row are equal, once for each place.
fn equal(one: &[Vec<Line>], other: &[Vec<Line>]) -> Vec<String> {
    let text = |row: &[Line]| row.iter().map(|(line, _)| line.clone()).collect::<Vec<_>>();
    let rows = |files: &[Vec<Line>]| -> BTreeMap<Vec<String>, String> {
        let all = files.iter().flat_map(|file| file.windows(EQUAL));
        all.map(|row| (text(row), row[0].1.clone())).collect()
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

    /// Modules of a crate, from their sources.
    fn of(sources: &[(&str, &str)]) -> BTreeMap<Module, BTreeSet<Module>> {
        let folder = std::env::temp_dir().join(format!("modules-{}", std::process::id()));
        let folder = folder.join(sources[0].0.replace('/', "-") + &sources[0].1.len().to_string());
        for (name, text) in sources {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let modules = read(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        modules
    }

    #[test]
    fn a_circle_is_found_by_whatever_way_it_goes() {
        let all = of(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use super::b::{self, B};"),
            ("b.rs", "fn f() { crate::c::deep::g() }"),
            ("c/mod.rs", "mod deep;"),
            ("c/deep.rs", "type A = crate::a::A; use super::super::a as other;"),
        ]);
        let found = circles(&all);
        assert_eq!(found, ["in the crate these name each other: a -> b -> c -> a"]);
    }

    #[test]
    fn one_way_faces_and_tests_are_no_circle() {
        let all = of(&[
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod tests; use a::A; pub struct Face;"),
            ("a.rs", "use super::b::B; use super::Face; use std::fmt;"),
            ("b.rs", "use crate::Face; #[cfg(test)] mod tests { use crate::a::A; }"),
            ("tests.rs", "use crate::a::A;"),
            ("b/child.rs", "use super::B; use super::super::Face;"),
        ]);
        assert!(circles(&all).is_empty(), "{:?}", circles(&all));
        assert!(!all.contains_key(&vec!["tests".to_owned()]), "tests are not looked at");
    }

    #[test]
    fn lines_in_a_row_are_found_and_imports_are_none() {
        let code = "use a;\nlet a = 1;\nb();\n// why\nc();\n}\nd();\ne();\nf();\ng();\n";
        let [here, there] = ["here", "there"].map(|name| vec![telling(code, name)]);
        assert_eq!(here[0].len(), 7);
        let found = equal(&here, &there);
        assert_eq!(found.len(), 2, "{found:?}");
        let first = |line: &&String| line.contains("here.rs:2") && line.contains("there.rs:2");
        assert_eq!(found.iter().filter(first).count(), 1, "{found:?}");
        let other = vec![telling(&code.replace("d()", "x()"), "there")];
        assert!(equal(&here, &other).is_empty());
    }
}
