//! PCI functions as sysfs shows them.
//!
//! The root is a parameter: tests read a tree of their own. Files come and go while they are read,
//! so what is missing is absent, never an error; only writes fail.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::PciAddress;
use crate::{Error, Result};

/// A sysfs, usually `/sys`.
#[derive(Debug, Clone)]
pub(crate) struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub(crate) fn path(&self, function: PciAddress) -> PathBuf {
        self.root.join("bus/pci/devices").join(function.to_string())
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// All PCI functions, in order.
    pub(crate) fn functions(&self) -> Result<Vec<PciAddress>> {
        let dir = self.root.join("bus/pci/devices");
        match fs::read_dir(&dir) {
            Ok(_) => {}
            // A machine without PCI.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(Error::io(format!("read {}", dir.display()), source)),
        }
        Ok(names(&dir).iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// The text of an attribute, without the newline; `None` if there is none.
    pub(crate) fn text(&self, function: PciAddress, attribute: &str) -> Option<String> {
        text(&self.path(function).join(attribute))
    }

    pub(crate) fn number(&self, function: PciAddress, attribute: &str) -> Option<i64> {
        let text = self.text(function, attribute)?;
        match text.strip_prefix("0x") {
            Some(digits) => i64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        }
    }

    /// The last part of what a link points to.
    pub(crate) fn target(&self, function: PciAddress, link: &str) -> Option<String> {
        let target = fs::read_link(self.path(function).join(link)).ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }

    /// The names in a directory of the function, such as `net`.
    pub(crate) fn entries(&self, function: PciAddress, dir: &str) -> Vec<String> {
        names(&self.path(function).join(dir))
    }

    /// The virtual functions of a physical one, by number.
    pub(crate) fn virtual_functions(&self, function: PciAddress) -> Vec<(u32, PciAddress)> {
        let mut list: Vec<(u32, PciAddress)> = names(&self.path(function))
            .iter()
            .filter_map(|name| {
                let number = name.strip_prefix("virtfn")?.parse().ok()?;
                Some((number, self.target(function, name)?.parse().ok()?))
            })
            .collect();
        list.sort_unstable();
        list
    }

    /// Writes an attribute in one call, as sysfs wants it.
    pub(crate) fn write(&self, path: &Path, value: &str, what: &str) -> Result<()> {
        let path = self.root.join(path);
        fs::File::options()
            .write(true)
            .open(&path)
            .and_then(|mut file| file.write_all(value.as_bytes()))
            .map_err(|source| {
                Error::io(format!("{what} (write {value:?} to {})", path.display()), source)
            })
    }
}

pub(crate) fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}
