//! Every test of the virtual guest, its NICs backed by `rnic:rxe0`, over real sockets in the host
//! VM.
//!
//! Both VMs are hosts here, each on its own: they share the test programs out between them, and no
//! packet crosses the cable. The tests of a program run in one process, one after the other; one
//! that hangs, or that takes its process with it, fails alone: those after it go on in a new
//! process.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::known::KNOWN;
use super::verbs::Seen;
use super::{Args, row};
use crate::cache::Cache;
use crate::exec::{self, capture, run_logged, tied, workspace};
use crate::rows::Row;
use crate::vm::guest::{Guest, Job};

/// NICs for processes are on the daemon's own engine.
const NO_RNIC: [&str; 2] = ["process", "hostile_process"];

const BUILD_WAIT: Duration = Duration::from_secs(1800);
const LIST_WAIT: Duration = Duration::from_secs(60);
/// One test, emulated on a busy machine.
const TEST_END: Duration = Duration::from_secs(480);
/// Tests of a program that a VM takes at a time.
const PART: usize = 8;
const POLL: Duration = Duration::from_millis(200);
/// What a failing test said, as far as it is shown.
const SHOWN_LINES: usize = 30;

/// `@TESTS@` in one process; what they say goes to a file of its own, so that their verdicts are
/// all of the output.
const SCRIPT: &str = r#"ulimit -l unlimited
export VHOST_RDMA_BIN=/tmp/vhost-rdma VHOST_RDMA_BACKING=rnic:rxe0 VHOST_RDMA_PATIENCE=8 RUST_BACKTRACE=0
export VHOST_RDMA_WITHOUT=systemd
mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup
export VHOST_RDMA_WITNESS=/host/@WITNESS@ VHOST_RDMA_DISK=/host
cp -u /host/products/vhost-rdma /tmp
cp /host/products/@BINARY@ /tmp/tests
exec /tmp/tests --exact --test-threads=1 --nocapture @TESTS@ 2> /host/@ERRORS@
"#;

/// The file in a guest's share that takes what its tests say.
const ERRORS: &str = "suite.err";

/// The file in a guest's share that takes what the device did for the tests of a program.
pub(super) fn witness(suite: &str) -> String {
    format!("suite.{suite}.seen")
}

/// A program of tests.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) suite: String,
    pub(super) file: String,
}

#[derive(Debug, Deserialize)]
struct Artifact {
    reason: String,
    executable: Option<PathBuf>,
    target: Option<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

/// The virtual guest's programs: those of its tests if they are wanted (without unit tests, which
/// need no NIC), and those that talk to peers, optimized.
pub(super) fn virtual_guest(cache: &Cache, wanted: bool) -> Result<(Vec<Program>, Vec<PathBuf>)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // A list of this run's own: others may build at the same time.
    let list = cache.log(&format!("virtual-guest-artifacts-{}", std::process::id()));
    let script = format!(
        "{1} \"$0\" test -q --locked -p virtual-guest --no-run --message-format json > '{0}'; \"$0\" build -q --locked --release -p virtual-guest --bin pingpong --bin check --message-format json >> '{0}'",
        list.display(),
        if wanted { "" } else { "true" },
    );
    let mut cmd = tied("sh");
    cmd.current_dir(workspace()).args(["-ec", &script]).arg(cargo);
    let log = cache.log("virtual-guest-build");
    run_logged(&mut cmd, "building the virtual guest", &log, BUILD_WAIT)?;
    let text = std::fs::read_to_string(&list)?;
    std::fs::remove_file(&list)?;
    let made = text.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let (mut tests, mut peers) = (Vec::new(), Vec::new());
    for artifact in made.filter(|artifact| artifact.reason == "compiler-artifact") {
        let Artifact { executable: Some(path), target: Some(target), .. } = artifact else {
            continue;
        };
        // What the tests are built beside is not optimized.
        let optimized = path.parent().is_some_and(|dir| dir.ends_with("release"));
        if ["pingpong", "check"].contains(&target.name.as_str()) && optimized {
            peers.push(path);
        } else if target.kind.iter().any(|kind| kind == "test")
            && !NO_RNIC.contains(&target.name.as_str())
        {
            let file = path.file_name().context("a program has a name")?;
            let file = file.to_string_lossy().into_owned();
            tests.push(Program { suite: target.name, file, path });
        }
    }
    ensure!(
        tests.is_empty() != wanted,
        "cargo left no test programs, or some that nobody asked for"
    );
    Ok((tests, peers))
}

impl Program {
    /// Its tests, as it lists them itself.
    pub(super) fn tests(&self) -> Result<Vec<String>> {
        let mut cmd = tied(&self.path);
        let text = capture(cmd.args(["--list", "--format", "terse"]), LIST_WAIT)?;
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

/// A program, and those of its tests that have no verdict yet.
#[derive(Debug)]
struct Task {
    suite: String,
    file: String,
    left: VecDeque<String>,
}

/// A process in a guest that runs the tests of a task.
#[derive(Debug)]
struct Process {
    task: Task,
    job: Job,
    /// Verdicts that have been read.
    seen: usize,
    /// Bytes of what the tests said until the last verdict.
    said: usize,
    since: Instant,
}

impl Process {
    fn start(task: Task, guest: &mut Guest) -> Result<Self> {
        let tests: Vec<&str> = task.left.iter().map(String::as_str).collect();
        let script = SCRIPT
            .replace("@BINARY@", &task.file)
            .replace("@TESTS@", &tests.join(" "))
            .replace("@ERRORS@", ERRORS)
            .replace("@WITNESS@", &witness(&task.suite));
        let job = guest.spawn(&script)?;
        Ok(Self { task, job, seen: 0, said: 0, since: Instant::now() })
    }

    /// Reads the verdicts since the last look; the task comes back when the process is over.
    fn look(&mut self, guest: &mut Guest, table: &mut Vec<Row>) -> Result<bool> {
        let over = guest.finished(self.job)?.is_some();
        let text = guest.output(self.job);
        let verdicts: Vec<(&str, &str)> = text.lines().filter_map(verdict).collect();
        for (name, verdict) in verdicts.get(self.seen..).unwrap_or_default() {
            self.task.left.retain(|left| left != name);
            if !verdict.starts_with("ignored") {
                self.judge(name, *verdict == "ok", guest, table);
            }
        }
        self.seen = verdicts.len();
        let stuck = !over && self.since.elapsed() > TEST_END;
        if stuck {
            guest.kill(self.job)?;
        }
        if (over || stuck)
            && let Some(name) = self.task.left.pop_front()
        {
            // It was the one at work; those behind it have not begun.
            eprintln!(
                "{}::{name}: {}",
                self.task.suite,
                if stuck { "no end" } else { "took its process with it" }
            );
            self.judge(&name, false, guest, table);
        }
        Ok(over || stuck)
    }

    fn judge(&mut self, name: &str, passed: bool, guest: &Guest, table: &mut Vec<Row>) {
        let full = format!("{}::{name}", self.task.suite);
        let said = std::fs::read(guest.share().join(ERRORS)).unwrap_or_default();
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        let known = KNOWN.iter().find(|(test, _)| *test == full).map(|(_, why)| *why);
        let ok = match (known, passed) {
            (None, _) => passed,
            (Some(_), _) => !passed,
        };
        let word = match (known, passed) {
            (None, true) => "ok".to_owned(),
            (None, false) => "FAILED".to_owned(),
            (Some(why), false) => format!("fails as known: {why}"),
            (Some(why), true) => format!(
                "FAILED: it passes, but is listed as one that cannot ({why}): take it off the list"
            ),
        };
        eprintln!("    {} {seconds:6.1} s  {full}: {word}", guest.name);
        if !passed && !ok {
            let text = String::from_utf8_lossy(said.get(self.said..).unwrap_or_default());
            text.lines()
                .filter(|line| !line.is_empty())
                .take(SHOWN_LINES)
                .for_each(|line| eprintln!("        | {line}"));
        }
        self.said = said.len();
        let unit = "s".to_owned();
        table.push(Row { value: Some(seconds), unit, ..row(&full, ok) });
    }
}

/// A line of a test program: the test and what became of it.
fn verdict(line: &str) -> Option<(&str, &str)> {
    let (name, verdict) = line.strip_prefix("test ")?.split_once(" ... ")?;
    (!verdict.is_empty()).then_some((name, verdict))
}

impl Args {
    /// The tests of all programs, one row each.
    pub(super) fn whole_stack(
        &self,
        guests: &mut [Guest],
        programs: &[Program],
        table: &mut Vec<Row>,
    ) -> Result<()> {
        let mut tasks = VecDeque::new();
        for program in programs {
            let suite = &program.suite;
            let mut tests = program.tests()?;
            tests.retain(|test| self.wanted(&format!("{suite}::{test}")));
            // In parts, so that no VM ends long before the other.
            for part in tests.chunks(PART) {
                let (suite, file) = (suite.clone(), program.file.clone());
                tasks.push_back(Task { suite, file, left: part.to_vec().into() });
            }
        }
        let mut running: Vec<Option<Process>> = guests.iter().map(|_| None).collect();
        loop {
            for (guest, slot) in guests.iter_mut().zip(&mut running) {
                if let Some(mut process) = slot.take() {
                    if process.look(guest, table)? {
                        if !process.task.left.is_empty() {
                            tasks.push_front(process.task);
                        }
                    } else {
                        *slot = Some(process);
                    }
                }
                if slot.is_none()
                    && let Some(task) = tasks.pop_front()
                {
                    *slot = Some(Process::start(task, guest)?);
                }
            }
            if running.iter().all(Option::is_none) {
                break;
            }
            exec::check_interrupt()?;
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// What must have happened in the tests that passed, if all were run.
    pub(super) fn witnessed(
        &self,
        guests: &[Guest],
        programs: &[Program],
        table: &mut Vec<Row>,
    ) -> Result<()> {
        if self.only.is_none() {
            let seen = seen(guests, programs, table)?;
            table.extend(seen.rows());
        }
        Ok(())
    }
}

/// What the device did in the tests that passed.
fn seen(guests: &[Guest], programs: &[Program], table: &[Row]) -> Result<Seen> {
    let known = |name: &str| KNOWN.iter().any(|(test, _)| *test == name);
    let good = table.iter().filter(|row| row.ok && !known(&row.name));
    let passed = good.map(|row| row.name.clone()).collect();
    let mut seen = Seen::default();
    for program in programs {
        for guest in guests {
            let path = guest.share().join(witness(&program.suite));
            if path.exists() {
                seen.add(&program.suite, &std::fs::read_to_string(path)?, &passed);
            }
        }
    }
    Ok(seen)
}
