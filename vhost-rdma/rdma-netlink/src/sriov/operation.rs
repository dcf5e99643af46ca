//! Operations as states to reach, in both directions.
//!
//! Each looks at the function first and does only what is missing: that is what makes it safe to
//! start again after a crash at any point.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::PciAddress;
use super::host::Host;
use super::inventory::VFIO_PCI;
use crate::link::VfChange;
use crate::{Error, Result};

/// Something that is done to a physical function or one of its virtual ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "operation", rename_all = "snake_case")]
pub enum Operation {
    /// Another number of virtual functions.
    Resize {
        /// How many there were.
        before: u32,
        /// How many there shall be.
        after: u32,
    },
    /// Other settings of a virtual function.
    Set {
        /// Its number.
        vf: u32,
        /// What puts the old ones back.
        before: VfChange,
        /// The new ones.
        after: VfChange,
    },
    /// Another driver for a virtual function.
    Bind {
        /// Where it is.
        function: PciAddress,
        /// How it was.
        before: Binding,
        /// How it shall be.
        after: Binding,
    },
}

/// How a function is bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// To which driver.
    pub driver: Driver,
    /// The driver that was demanded by name.
    pub driver_override: Option<String>,
}

/// The driver of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Driver {
    /// This one.
    Named(String),
    /// Whatever the kernel finds, except [`VFIO_PCI`].
    Any,
    /// None.
    None,
}

impl From<Option<&str>> for Driver {
    fn from(driver: Option<&str>) -> Self {
        driver.map_or(Self::None, |name| Self::Named(name.to_owned()))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Resize { before, after } => {
                write!(f, "change the number of VFs from {before} to {after}")
            }
            Self::Set { vf, .. } => write!(f, "change the settings of VF {vf}"),
            Self::Bind { function, after, .. } => match &after.driver {
                Driver::Named(name) => write!(f, "give {function} to {name}"),
                Driver::Any => write!(f, "give {function} to its own driver"),
                Driver::None => write!(f, "take the driver from {function}"),
            },
        }
    }
}

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Back,
}

impl Operation {
    /// Drives the function to the state after or before.
    pub(super) fn drive(
        &self,
        host: &mut dyn Host,
        pf: PciAddress,
        direction: Direction,
    ) -> Result<()> {
        let pick = |before, after| if direction == Direction::Forward { after } else { before };
        match self {
            Self::Resize { before, after } => resize(host, pf, pick(*before, *after)),
            Self::Set { vf, before, after } => {
                let change = if direction == Direction::Forward { after } else { before };
                host.set_vf(pf, *vf, change)
            }
            Self::Bind { function, before, after } => {
                bind(host, *function, if direction == Direction::Forward { after } else { before })
            }
        }
    }
}

fn resize(host: &mut dyn Host, pf: PciAddress, count: u32) -> Result<()> {
    let inventory = host.inventory()?;
    let function = inventory.pf_at(pf).ok_or_else(|| gone(pf))?;
    if function.vf_count == count
        && function.vfs.len() == usize::try_from(count).unwrap_or(usize::MAX)
    {
        return Ok(());
    }
    if function.vf_count != 0 {
        host.set_vf_count(pf, 0)?;
    }
    if count == 0 { Ok(()) } else { host.set_vf_count(pf, count) }
}

fn bind(host: &mut dyn Host, function: PciAddress, wanted: &Binding) -> Result<()> {
    let inventory = host.inventory()?;
    let vf = inventory.vf_at(function).ok_or_else(|| gone(function))?;
    let driver = vf.driver.as_deref();
    if vf.driver_override != wanted.driver_override {
        host.set_driver_override(function, wanted.driver_override.as_deref())?;
    }
    if !satisfies(driver, &wanted.driver) {
        if let Some(driver) = driver {
            host.unbind(function, driver)?;
        }
        if wanted.driver != Driver::None {
            host.probe(function)?;
        }
    }
    let inventory = host.inventory()?;
    let now = inventory.vf_at(function).ok_or_else(|| gone(function))?.driver.as_deref();
    // A function for which there is no driver is none the worse.
    let fine = satisfies(now, &wanted.driver) || (wanted.driver == Driver::Any && now.is_none());
    if fine {
        return Ok(());
    }
    let wanted = if let Driver::Named(name) = &wanted.driver { name.as_str() } else { "no driver" };
    Err(Error::NotFound(format!(
        "{function} should have been taken by {wanted}, but has {}; the kernel's log may say why",
        now.unwrap_or("no driver")
    )))
}

fn satisfies(driver: Option<&str>, wanted: &Driver) -> bool {
    match wanted {
        Driver::Named(name) => driver == Some(name),
        Driver::Any => driver.is_some_and(|driver| driver != VFIO_PCI),
        Driver::None => driver.is_none(),
    }
}

pub(super) fn gone(function: PciAddress) -> Error {
    Error::NotFound(format!("there is no function {function} (any more)"))
}
