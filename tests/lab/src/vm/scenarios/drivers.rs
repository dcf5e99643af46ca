//! The kernel driver, compiled for every kernel that we support, with warnings as errors; sparse
//! over it, and smatch where there is one (no Debian package has it); and the forms in which driver
//! and provider would go upstream.
//!
//! With `--full` also the packages for guests (see `packages`), and a ping-pong between two guests
//! of which one has what the Debian packages put into place, and the other what the RPM ones did.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::fixture::{Fixture, Options};
use crate::cache::Cache;
use crate::exec::{self, run_logged, tied};
use crate::host;
use crate::packages::{self, DEBIANS, UBUNTUS};
use crate::products;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::upstream;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Also the packages for guests: made, installed, removed, and used in two guests
    #[arg(long)]
    pub full: bool,
    /// Also smatch: a directory with `smatch` and `smatch_data`, as its own build leaves them
    #[arg(long, value_name = "DIR")]
    pub smatch: Option<PathBuf>,
    /// Also the Debian packages on Ubuntu's long-term releases, from this mirror of its archive
    #[arg(long, value_name = "MIRROR")]
    pub ubuntu: Option<String>,
    /// Only the rows whose name contains this
    #[arg(long)]
    pub only: Option<String>,
    /// Write the rows here
    #[arg(long)]
    pub json: Option<PathBuf>,
}

const UNPACK: Duration = Duration::from_secs(30);

/// What is done for a row, and a word on its result.
type Work<'a> = Box<dyn Fn(&Cache) -> Result<String> + 'a>;
type Task<'a> = (String, Work<'a>);

fn task<'a>(name: impl Into<String>, work: impl Fn(&Cache) -> Result<String> + 'a) -> Task<'a> {
    (name.into(), Box::new(work))
}

fn quietly(work: impl Fn(&Cache) -> Result<()>) -> impl Fn(&Cache) -> Result<String> {
    move |cache| work(cache).map(|()| String::new())
}

fn place(path: &std::path::Path) -> String {
    path.display().to_string()
}

impl Args {
    fn tasks(&self) -> Vec<Task<'_>> {
        let mut tasks: Vec<Task<'_>> = Debian::ALL
            .map(|debian| task(debian.name(), move |c| Ok(place(&products::module(c, debian)?))))
            .into();
        tasks.push(task("sparse", quietly(upstream::sparse)));
        tasks.push(task("kernel series", quietly(upstream::kernel)));
        tasks.push(task("rdma-core series", quietly(upstream::rdma_core)));
        tasks.push(task("process series", quietly(upstream::processes)));
        if let Some(dir) = &self.smatch {
            tasks.push(task("smatch", quietly(|cache| upstream::smatch(cache, dir))));
        }
        if self.full {
            for release in DEBIANS {
                let name = format!("packages, {}", release.name);
                tasks.push(task(name, |c| Ok(place(&packages::debian(c, release, None)?))));
            }
            tasks.push(task("packages, RPM", |c| Ok(place(&packages::rpm(c)?))));
            tasks.push(task("packages, in guests", in_guests));
        }
        if let Some(mirror) = &self.ubuntu {
            for release in UBUNTUS {
                let name = format!("packages, {}", release.name);
                let work = |c: &Cache| Ok(place(&packages::debian(c, release, Some(mirror))?));
                tasks.push(task(name, work));
            }
        }
        let only = self.only.as_deref().unwrap_or_default();
        tasks.retain(|(name, _)| name.contains(only));
        tasks
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        host::require_root()?;
        host::ensure_tools(cache)?;
        let tasks = self.tasks();
        ensure!(!tasks.is_empty(), "no row has such a name; without --only they are all listed");
        let mut table = Vec::new();
        for (name, work) in &tasks {
            let begun = Instant::now();
            let done = work(cache);
            match &done {
                Ok(text) => println!("{name:<22} ok      {text}"),
                Err(e) => println!("{name:<22} FAILED  {e:#}"),
            }
            table.push(Row::timed(name, done.is_ok(), begun.elapsed().as_secs_f64()));
            exec::check_interrupt()?;
        }
        rows::print_table(&table, "vhost-rdma", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }
}

/// What the packages put into place works: in guest a that of the Debian packages, in b that of the
/// RPM ones.
fn in_guests(cache: &Cache) -> Result<String> {
    let made = [packages::for_guest(cache)?, packages::rpm(cache)?];
    let mut fixture = Fixture::start(cache, Options::default().wish(2))?;
    let abi = fixture.lab.image(Debian::Trixie)?.abi;
    for (guest, dir) in fixture.lab.guests.iter().zip(&made) {
        let products = guest.share().join("products");
        // Nothing that was made without the packages stays.
        std::fs::remove_file(products.join("virtio_rdma.ko"))?;
        for file in packages::files(dir, &abi)? {
            let to = products.join(file.file_name().unwrap_or_default());
            std::fs::copy(&file, &to)?;
            // DKMS packs the module as the kernel's own are, and a guest has no xz.
            if to.extension().is_some_and(|extension| extension == "xz") {
                let log = cache.log("packages-unpacked");
                run_logged(tied("xz").arg("-d").arg(&to), "unpacking the module", &log, UNPACK)?;
            }
        }
    }
    let devices = fixture.attach()?;
    let (a, b) = fixture.lab.pair()?;
    let ping = |n: usize| {
        let (device, gid) = &devices[n];
        format!("ulimit -l unlimited\nibv_rc_pingpong -c -d {device} -g {gid} -n 1000")
    };
    let server = b.spawn(&ping(1))?;
    let client = format!(
        "n=0; until {} 10.9.0.2; do sleep 0.5; n=$((n+1)); [ $n -lt 20 ] || exit 1; done",
        ping(0).replace('\n', "; ")
    );
    let text = a.must(&client, Duration::from_secs(60))?;
    let end = b.wait(server, Duration::from_secs(20))?;
    ensure!(end.ok(), "the server: {:?}\n{}", end.status, end.text);
    ensure!(fixture.clean(), "guests or daemon are not as they should be: see above");
    Ok(text.lines().last().unwrap_or_default().to_owned())
}
