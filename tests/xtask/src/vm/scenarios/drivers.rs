//! The kernel driver, compiled for every kernel that we support, with warnings as errors; sparse
//! over it; and the forms in which driver and provider would go upstream.

use anyhow::Result;

use crate::cache::Cache;
use crate::host;
use crate::products;
use crate::roots::Debian;
use crate::upstream;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// A check and its name.
type Check = (&'static str, fn(&Cache) -> Result<()>);

const CHECKS: &[Check] = &[
    ("sparse", upstream::sparse),
    ("kernel series", upstream::kernel),
    ("rdma-core series", upstream::rdma_core),
];

impl Args {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        host::require_root()?;
        host::ensure_tools(cache)?;
        let (mut good, mut bad) = (0, 0);
        let mut tell = |name: &str, result: Result<String>| match result {
            Ok(text) => {
                good += 1;
                println!("{name:<18} ok      {text}");
            }
            Err(e) => {
                bad += 1;
                println!("{name:<18} FAILED  {e:#}");
            }
        };
        for debian in Debian::ALL {
            let module = products::module(cache, debian);
            tell(debian.name(), module.map(|path| path.display().to_string()));
            crate::exec::check_interrupt()?;
        }
        for (name, check) in CHECKS {
            tell(name, check(cache).map(|()| String::new()));
            crate::exec::check_interrupt()?;
        }
        println!("{good} passed, {bad} failed");
        Ok(bad == 0)
    }
}
