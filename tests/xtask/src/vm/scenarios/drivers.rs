//! The kernel driver, compiled for every kernel that we support, with warnings as errors.

use anyhow::Result;

use crate::cache::Cache;
use crate::host;
use crate::products;
use crate::roots::Debian;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        host::require_root()?;
        host::ensure_tools(cache)?;
        let mut bad = 0;
        for debian in Debian::ALL {
            match products::module(cache, debian) {
                Ok(path) => println!("{:<18} ok      {}", debian.name(), path.display()),
                Err(e) => {
                    bad += 1;
                    println!("{:<18} FAILED  {e:#}", debian.name());
                }
            }
            crate::exec::check_interrupt()?;
        }
        println!("{} passed, {bad} failed", Debian::ALL.len() - bad);
        Ok(bad == 0)
    }
}
