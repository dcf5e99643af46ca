//! Set-up only: what a first `demo` would make, and the paths of it.

use anyhow::Result;

use crate::cache::Cache;
use crate::debug_kernel;
use crate::host;
use crate::roots::{self, Debian};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also the roots that only `vm drivers` and `test --full` use
    #[arg(long)]
    all: bool,
    /// Also the debug kernel, half an hour of compiling
    #[arg(long)]
    debug_kernel: bool,
}

impl Args {
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        host::require_root()?;
        host::ensure_tools(cache)?;
        println!("qemu root            {}", roots::qemu(cache)?.display());
        let releases = if self.all { &Debian::ALL[..] } else { &[Debian::Trixie][..] };
        for &debian in releases {
            let guest = roots::guest(cache, debian)?;
            println!("guest {:<14} {} kernel {}", debian.name(), guest.dir.display(), guest.abi);
            let builder = roots::builder(cache, debian)?;
            println!(
                "builder {:<12} {} headers {}",
                debian.name(),
                builder.root.display(),
                builder.abi
            );
        }
        if self.debug_kernel {
            let guest = debug_kernel::guest(cache)?;
            println!("guest with the debug kernel {} {}", guest.dir.display(), guest.abi);
        }
        Ok(true)
    }
}
