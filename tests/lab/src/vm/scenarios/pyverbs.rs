//! rdma-core's own Python suite against our device: the tests that real RNICs are held against,
//! unmodified, as Debian ships them.
//!
//! All traffic of the suite is loop-back inside one device, so one guest does.
//! `tests/guest-programs/pyverbs-run.py` runs each test in a process of its own. A test that skips
//! is a hole, so the skips are pinned in a file of the repository, each with the reason that the
//! suite gives: a skip that is not in it fails the run, and so does a pinned one that no longer
//! skips. Without `--only` the run must also reach a number of tests that pass, so that neither a
//! lost module nor a shrunk suite goes unseen.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::fixture::{Fixture, Options, Wish};
use crate::cache::Cache;
use crate::exec::{self, workspace};
use crate::roots::Debian;
use crate::verdicts::{Found, RUNNER, Verdict, drift, parse, read_pins, totals};
use crate::vm::guest::Guest;
use crate::vm::peers;
use crate::vm::{Lab, Nic, Plan};

/// The whole suite takes two minutes on an idle machine.
const SUITE_WAIT: Duration = Duration::from_secs(1500);

/// dh_compress leaves some of the tests gzipped, and a gzipped module cannot be imported.
const UNPACK: &str = "set -e
mkdir -p /tmp/pyverbs
cp -r /usr/share/doc/rdma-core/tests /tmp/pyverbs/
gunzip -f /tmp/pyverbs/tests/*.gz
echo 16 > /proc/sys/vm/nr_hugepages
";

/// What it can be told
#[derive(Debug, clap::Args)]
#[command(mut_arg("only", |arg| arg.help(ONLY)))]
pub struct Args {
    #[command(flatten)]
    options: Options,
    /// Run every test so often
    #[arg(long, default_value_t = 1)]
    repeat: u32,
    /// Every release, and rxe beside ours on each; then the test that lives on a race, often and
    /// with two vCPUs
    #[arg(long, conflicts_with_all = ["debian", "only", "repeat", "cpus"])]
    full: bool,
}

const ONLY: &str = "Only the tests whose name matches this regular expression; the number of tests \
                    that pass is not checked then";

/// Resizing a CQ while completions are on their way: rxe loses one in three runs of five, more of
/// them with two vCPUs.
const RACE: &str = "^test_cq.CQTest.test_resize_cq$";
const RACES: u32 = 50;

impl Default for Args {
    fn default() -> Self {
        Self { options: Options::default(), repeat: 1, full: false }
    }
}

/// The row of a test: the shape of every other row, with words where those have figures.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    ok: bool,
    value: String,
    reference: Option<String>,
    ratio: Option<f64>,
    unit: &'static str,
    target: &'static str,
}

/// The tests that must pass: what rxe passes in the same guest, and rereg MR, parent domain, shared
/// PD and device memory, which it lacks.
fn floor(debian: Debian) -> usize {
    match debian {
        Debian::Bookworm => 114,
        Debian::Trixie | Debian::TrixieBackports => 132,
    }
}

fn pins(debian: Debian) -> PathBuf {
    workspace().join(format!("tests/guest-programs/pyverbs-skips-{}.txt", debian.name()))
}

impl Args {
    /// `--full`, or without options.
    pub fn with_all(full: bool) -> Self {
        Self { full, ..Self::default() }
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let releases = if self.full { &Debian::ALL[..] } else { &[self.options.debian][..] };
        let mut good = true;
        let mut table = Vec::new();
        for &debian in releases {
            let label = if self.full { format!("{}/", debian.name()) } else { String::new() };
            good &= self.release(cache, debian, &label, &mut table)?;
            // An hour's work is not lost with its last step.
            self.options.write(&table)?;
        }
        if self.full {
            let options = Options { cpus: 2, only: Some(RACE.into()), ..Options::default() };
            let race = Self { options, repeat: RACES, full: false };
            good &= race.release(cache, race.options.debian, "2 vCPUs/", &mut table)?;
            self.options.write(&table)?;
        }
        Ok(good)
    }

    fn release(
        &self,
        cache: &Cache,
        debian: Debian,
        label: &str,
        table: &mut Vec<Row>,
    ) -> Result<bool> {
        let wish = Wish { debian, ..self.options.wish(1) };
        let mut fixture = Fixture::start(cache, wish)?;
        fixture.attach()?;
        let ours = self.suite(first(&mut fixture.lab)?, "vrdma0");
        let clean = fixture.clean();
        let ours = ours.inspect_err(|_| {
            eprintln!("the end of the daemon's log:\n{}", fixture.daemon.log_tail(25));
        })?;
        drop(fixture);
        let reference = if self.full { self.reference(cache, debian)? } else { BTreeMap::new() };
        let drift = drift(&ours, &read_pins(&pins(debian))?, self.options.only.is_none());
        let tests = ours.len() / self.repeat.max(1) as usize;
        for (verdict, n) in ours.iter().zip(0..) {
            let turn =
                if self.repeat > 1 { format!(" #{}", n / tests.max(1) + 1) } else { String::new() };
            table.push(Row {
                name: format!("{label}{}{turn}", verdict.name),
                ok: verdict.is("ok") || (verdict.is("skip") && !drift.contains_key(&verdict.name)),
                value: verdict.outcome.clone(),
                reference: reference.get(&verdict.name).cloned(),
                ratio: None,
                unit: "",
                target: "",
            });
        }
        let least = self.options.only.is_none().then(|| floor(debian));
        let found = Found { of: debian.name(), verdicts: &ours, drift: &drift };
        Ok(found.sum_up(least, &pins(debian)) && clean)
    }

    fn reference(&self, cache: &Cache, debian: Debian) -> Result<BTreeMap<String, String>> {
        let mut lab = Lab::prepare(cache)?;
        let image = lab.image(debian)?;
        lab.boot(&Plan { image, cpus: self.options.cpus, nics: vec![Nic::None] })?;
        let guest = first(&mut lab)?;
        let (device, _) = peers::attach_rxe_to(guest)?;
        let verdicts = self.suite(guest, &device)?;
        eprintln!("{} on rxe: {}", debian.name(), totals(&verdicts));
        Ok(verdicts.into_iter().map(|v| (v.name, v.outcome)).collect())
    }

    /// Runs the tests and returns what the runner wrote, complete.
    fn suite(&self, guest: &mut Guest, device: &str) -> Result<Vec<Verdict>> {
        guest.must(UNPACK, Duration::from_secs(60))?;
        fs::write(guest.share().join("pyverbs-run.py"), RUNNER)?;
        let results = guest.share().join("pyverbs.jsonl");
        let job = guest.spawn(&format!(
            "ulimit -l unlimited\nexec python3 /host/pyverbs-run.py --dir /tmp/pyverbs \
             --dev {device} --results /host/pyverbs.jsonl --repeat {} --only '{}'\n",
            self.repeat,
            self.options.only.as_deref().unwrap_or_default()
        ))?;
        let mut progress = exec::Progress::new(format!("the suite on {device}"));
        let deadline = Instant::now() + SUITE_WAIT * self.repeat;
        let status = loop {
            progress.tick();
            exec::check_interrupt()?;
            if let Some(status) = guest.finished(job)? {
                break status;
            }
            if Instant::now() > deadline {
                guest.kill(job)?;
                bail!("the suite did not end\n{}", guest.output(job));
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        progress.done("done");
        print!("{}", guest.output(job));
        if status != 0 {
            bail!("the runner ended with exit status {status}");
        }
        let verdicts = parse(&results)?;
        if verdicts.is_empty() {
            bail!("no test of the suite matches");
        }
        Ok(verdicts)
    }
}

fn first(lab: &mut Lab) -> Result<&mut Guest> {
    lab.guests.first_mut().context("this needs a guest")
}
