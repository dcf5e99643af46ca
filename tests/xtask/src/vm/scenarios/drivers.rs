//! The kernel driver, compiled for every kernel that we support, with warnings as errors; sparse
//! over it, and smatch where there is one (no Debian package has it); and the forms in which driver and provider would go upstream.

use std::path::PathBuf;

use anyhow::Result;

use crate::cache::Cache;
use crate::host;
use crate::products;
use crate::roots::Debian;
use crate::upstream;

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Also smatch: a directory with `smatch` and `smatch_data`, as its own build leaves them
    #[arg(long, value_name = "DIR")]
    smatch: Option<PathBuf>,
}

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
        if let Some(dir) = &self.smatch {
            tell("smatch", upstream::smatch(cache, dir).map(|()| String::new()));
        }
        println!("{good} passed, {bad} failed");
        Ok(bad == 0)
    }
}
