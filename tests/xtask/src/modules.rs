//! How the modules of a crate name each other.
//!
//! Among the modules of one folder, each taken together with all that is below it, no two name each
//! other, not even by way of others: data flows one way, and each can be read with what it names
//! and nothing else. A folder's own file (`mod.rs`, or the file of its name) is the face of those
//! below it, and may be named by them and name them. What it only passes on (`pub use`, or a `use`
//! that those below see) counts as named where it is: so does what any other module passes on.
//!
//! Sources are read as syntax. What stands in tests alone is not looked at, nor is what a macro
//! makes; a name in a macro's argument is seen if a `use` brings it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
/// More names than any path goes through; one that goes on names itself.
const HOPS: usize = 16;

/// A module's name below its crate; the crate itself has none.
pub(crate) type Module = Vec<String>;
/// Which modules of a folder a module names.
type Names = BTreeMap<String, BTreeSet<String>>;
/// All modules of a crate.
type Modules = BTreeMap<Module, Source>;

/// What one module says.
#[derive(Default)]
struct Source {
    /// How much of its name is its file's: the rest is a module within that.
    file: usize,
    /// The paths in it, from the crate on.
    paths: BTreeSet<Module>,
    /// What its `use` items bring, by the names that they have here.
    brings: BTreeMap<String, BTreeSet<Module>>,
    /// Of what a `use` brings all names.
    brings_all: BTreeSet<Module>,
    /// What is made in it.
    items: BTreeSet<String>,
}

/// Whether no modules go round in a circle; those that do go to standard error.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut wrong = Vec::new();
    for name in CRATES {
        let modules = read(&root.join(name)).with_context(|| name.to_owned())?;
        anyhow::ensure!(!modules.is_empty(), "{name} has no module");
        wrong.extend(circles(&modules).into_iter().map(|circle| format!("{name}: {circle}")));
    }
    wrong.iter().for_each(|line| eprintln!("error: {line}"));
    Ok(wrong.is_empty())
}

/// The sources below a folder, and each one's module.
pub(crate) fn sources(folder: &Path) -> Result<Vec<(Module, PathBuf)>> {
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

/// Each module and what it says, but for those of tests.
fn read(folder: &Path) -> Result<Modules> {
    let mut reader = Reader::default();
    for (module, path) in sources(folder)? {
        let file = syn::parse_file(&fs::read_to_string(&path)?);
        let file = file.with_context(|| path.display().to_string())?;
        reader.file = module.len();
        reader.module = module;
        reader.source();
        reader.visit_file(&file);
    }
    let Reader { mut modules, tests, .. } = reader;
    modules.retain(|module, _| !(1..=module.len()).any(|len| tests.contains(&module[..len])));
    Ok(modules)
}

/// Reads one module after the other.
#[derive(Default)]
struct Reader {
    modules: Modules,
    /// Modules of tests.
    tests: BTreeSet<Module>,
    /// The one that is read, and how much of its name is its file's.
    module: Module,
    file: usize,
}

impl Reader {
    fn source(&mut self) -> &mut Source {
        let source = self.modules.entry(self.module.clone()).or_default();
        source.file = self.file;
        source
    }

    /// A path from the crate on. One that begins with another name goes on from this module: what
    /// has that name here is found when all are read, or is another crate's.
    fn whole(&self, path: &[String]) -> Module {
        let mut module = self.module.clone();
        let mut rest = path;
        while let Some(first) = rest.first() {
            match first.as_str() {
                "crate" => module.clear(),
                "super" => drop(module.pop()),
                "self" => {}
                _ => break,
            }
            rest = &rest[1..];
        }
        module.extend(rest.iter().cloned());
        module
    }

    /// Takes note of a path.
    fn path(&mut self, path: &[String]) -> Module {
        let path = self.whole(path);
        self.source().paths.insert(path.clone());
        path
    }

    fn brings(&mut self, path: &[String], name: &str) {
        let path = self.path(path);
        self.source().brings.entry(name.to_owned()).or_default().insert(path);
    }

    fn tree(&mut self, before: &mut Vec<String>, tree: &UseTree) {
        let ident = match tree {
            UseTree::Path(path) => &path.ident,
            UseTree::Name(name) => &name.ident,
            UseTree::Rename(name) => &name.ident,
            UseTree::Group(group) => {
                return group.items.iter().for_each(|item| self.tree(before, item));
            }
            UseTree::Glob(_) => {
                let path = self.path(before);
                self.source().brings_all.insert(path);
                return;
            }
        };
        before.push(ident.to_string());
        match tree {
            UseTree::Path(path) => self.tree(before, &path.tree),
            UseTree::Rename(name) => self.brings(before, &name.rename.to_string()),
            // `use a::{self}` brings `a`.
            _ => {
                let name = before.iter().rev().find(|name| *name != "self").cloned();
                self.brings(before, &name.unwrap_or_default());
            }
        }
        before.pop();
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
        let (attrs, name) = match item {
            Item::Const(item) => (&item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.attrs, Some(&item.ident)),
            Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
            Item::Impl(item) => (&item.attrs, None),
            Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
            Item::Mod(item) => (&item.attrs, Some(&item.ident)),
            Item::Static(item) => (&item.attrs, Some(&item.ident)),
            Item::Struct(item) => (&item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.attrs, Some(&item.ident)),
            Item::Type(item) => (&item.attrs, Some(&item.ident)),
            Item::Union(item) => (&item.attrs, Some(&item.ident)),
            Item::Use(item) => (&item.attrs, None),
            _ => return visit::visit_item(self, item),
        };
        if !is_of_tests(attrs) {
            if let Some(name) = name {
                self.source().items.insert(name.to_string());
            }
            visit::visit_item(self, item);
        } else if let Item::Mod(item) = item {
            let mut module = self.module.clone();
            module.push(item.ident.to_string());
            self.tests.insert(module);
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
            self.source();
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.tree(&mut Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        self.path(&segments);
        visit::visit_path(self, path);
    }
}

/// How many names of a path are a module's: what is behind it are its items.
fn module_of(modules: &Modules, path: &[String]) -> usize {
    (0..=path.len()).rev().find(|len| modules.contains_key(&path[..*len])).unwrap_or(0)
}

/// Where a path leads, with each module on the way that passes a name on. Ends are paths whose
/// next name is an item, or nobody's.
fn follow(modules: &Modules, path: Module, through: &mut BTreeSet<Module>, hops: usize) -> Ends {
    let len = module_of(modules, &path);
    let (module, rest) = path.split_at(len);
    let Some(source) = modules.get(module).filter(|_| hops < HOPS) else { return Ends::new() };
    through.insert(module[..source.file].to_vec());
    let Some((name, behind)) = rest.split_first() else { return Ends::from([path]) };
    let onward = |to: &Module, names: &[String]| {
        let path: Module = to.iter().chain(names).cloned().collect();
        // A crate that has the name of what it brings: `use quote::quote`.
        (!path.starts_with(&[module, std::slice::from_ref(name)].concat())).then_some(path)
    };
    let mut ends = Ends::new();
    if let Some(brought) = source.brings.get(name) {
        for path in brought.iter().filter_map(|to| onward(to, behind)) {
            ends.extend(follow(modules, path, through, hops + 1));
        }
    } else if !source.items.contains(name) {
        for to in &source.brings_all {
            for to in follow(modules, to.clone(), &mut BTreeSet::new(), hops + 1) {
                // Only who has the name is named by it.
                let mut by_way = BTreeSet::new();
                let found = onward(&to, rest).filter(|_| modules.contains_key(&to));
                let found = found.map(|path| follow(modules, path, &mut by_way, hops + 1));
                let found = found.unwrap_or_default();
                if found.iter().any(|end| is_there(modules, end)) {
                    through.extend(by_way);
                    ends.extend(found);
                }
            }
        }
    }
    if ends.is_empty() {
        ends.insert(path);
    }
    ends
}

type Ends = BTreeSet<Module>;

/// Whether a path is a module, or an item of one.
fn is_there(modules: &Modules, path: &[String]) -> bool {
    let (module, rest) = path.split_at(module_of(modules, path));
    rest.first().is_none_or(|name| modules[module].items.contains(name))
}

/// The circles among the modules of each folder, for people.
fn circles(modules: &Modules) -> Vec<String> {
    let mut folders: BTreeMap<Module, Names> = BTreeMap::new();
    for (module, source) in modules {
        let module = &module[..source.file];
        let mut named = BTreeSet::new();
        for path in &source.paths {
            follow(modules, path.clone(), &mut named, 0);
        }
        for to in named {
            let same = module.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(same), to.get(same)) {
                let names = folders.entry(module[..same].to_vec()).or_default();
                names.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    let circle = |(folder, names): (Module, Names)| {
        let circle = names.keys().find_map(|start| way(&names, start, start))?;
        let within = if folder.is_empty() { "the crate".to_owned() } else { folder.join("::") };
        Some(format!("in {within} these name each other: {}", circle.join(" -> ")))
    };
    folders.into_iter().filter_map(circle).collect()
}

/// The shortest way from one module to another, by names.
fn way(names: &Names, from: &str, to: &str) -> Option<Vec<String>> {
    let mut known = BTreeSet::new();
    let mut ways = VecDeque::from([vec![from.to_owned()]]);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Modules of a crate, from their sources.
    fn of(sources: &[(&str, &str)]) -> Modules {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in sources {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        read(folder.path()).unwrap()
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

    /// What one module of a folder has of the other by way of its face.
    fn by_way_of(face: &str, a: &str) -> Vec<String> {
        circles(&of(&[
            ("lib.rs", "mod folder;"),
            ("folder/mod.rs", &format!("mod a; mod b; pub struct Face; {face}")),
            ("folder/a.rs", &format!("pub struct A; {a}")),
            ("folder/b.rs", "use super::a::A; pub struct B; pub fn make() {} pub mod deep {}"),
        ]))
    }

    #[test]
    fn a_circle_that_a_face_hides_is_found() {
        let hidden = [
            ("pub use b::B;", "use super::B;"),
            ("pub use self::b::{B as C};", "fn f() -> super::C { todo!() }"),
            ("use b::B;", "use crate::folder::{Face, B};"),
            ("pub use b::*;", "use super::{B};"),
            ("pub use b::*;", "use super::*; fn f(_: B) {}"),
            ("pub use b::make;", "use super::super::folder; fn f() { folder::make() }"),
            ("pub use b::deep;", "fn f() { super::deep::g() }"),
            ("mod c { pub use super::b::B; } pub use c::B;", "use super::B;"),
            ("pub use other::B; use b as other;", "use super::B;"),
        ];
        for (face, a) in hidden {
            let found = by_way_of(face, a);
            assert_eq!(found, ["in folder these name each other: a -> b -> a"], "{face} {a}");
        }
    }

    #[test]
    fn a_face_and_other_crates_hide_no_circle() {
        let open = [
            ("pub use b::B;", "use super::Face;"),
            ("pub use b::*;", "use super::Face; use super::*;"),
            ("pub use b::*; pub struct B2;", "use super::{B2, A2};"),
            ("pub use b::B;", "use make::make; fn f() { make() }"),
            ("pub use one::other; use other::one;", "use super::{one, other};"),
            ("pub use b::B; #[cfg(test)] pub use b::make;", "use super::make;"),
        ];
        for (face, a) in open {
            assert!(by_way_of(face, a).is_empty(), "{face} {a}: {:?}", by_way_of(face, a));
        }
    }
}
