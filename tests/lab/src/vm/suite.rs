//! Programs of tests, built here and run in guests of the lab.
//!
//! The guests share the programs out between them. The tests of a program run in one process, one
//! after the other; one that hangs, or that takes its process with it, fails alone: those after it
//! go on in a new process.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::cache::Cache;
use crate::exec::{self, capture, run_logged, tied, workspace};
use crate::rows::Row;
use crate::vm::guest::{Guest, Job};

const BUILD_WAIT: Duration = Duration::from_secs(1800);
const LIST_WAIT: Duration = Duration::from_secs(60);
/// One test, emulated on a busy machine.
const TEST_END: Duration = Duration::from_secs(900);
/// Tests of a program that a guest takes at a time.
const PART: usize = 8;
const POLL: Duration = Duration::from_millis(200);
const SETTLE: Duration = Duration::from_secs(1);
/// How many lines of what a failing test said are shown: why it failed is at the beginning, what
/// the daemon did last at the end.
const SHOWN_LINES: [usize; 2] = [10, 25];

/// `@TESTS@` in one process; what they say goes to a file of its own, so that their verdicts are
/// all of the output.
const SCRIPT: &str = r#"ulimit -l unlimited
export VHOST_RDMA_BIN=/tmp/vhost-rdma RUST_BACKTRACE=0
mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup
export VHOST_RDMA_WITNESS=/host/@WITNESS@
cp -u /host/products/vhost-rdma /tmp
cp /host/products/@BINARY@ /tmp/tests
@PRELUDE@
exec /tmp/tests --exact --test-threads=1 --nocapture @TESTS@ 2> /host/@ERRORS@
"#;

/// The file in a guest's share that takes what its tests say.
const ERRORS: &str = "suite.err";

/// The file in a guest's share that takes what the device did for the tests of a program.
pub(crate) fn witness(suite: &str) -> String {
    format!("suite.{suite}.seen")
}

/// A program of tests.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(crate) suite: String,
    pub(crate) file: String,
}

#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

/// A program that cargo made.
#[derive(Debug)]
pub(crate) struct Artifact {
    pub(crate) path: PathBuf,
    /// Of its target.
    pub(crate) name: String,
    /// Of its target: `test`, `lib`, `bin`, …
    pub(crate) kind: String,
    /// Whether it is one of tests.
    pub(crate) tests: bool,
}

impl Artifact {
    /// A program of tests, called by its target.
    pub(crate) fn program(self) -> Result<Program> {
        let file = self.path.file_name().context("a program has a name")?;
        let file = file.to_string_lossy().into_owned();
        Ok(Program { suite: self.name, file, path: self.path })
    }
}

/// Runs cargo as each of these says, and returns the programs that it made.
pub(crate) fn build(cache: &Cache, what: &str, orders: &[&[&str]]) -> Result<Vec<Artifact>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // A list of this run's own: others may build at the same time.
    let list = cache.log(&format!("{}-artifacts-{}", what.replace(' ', "-"), std::process::id()));
    let mut script = format!(": > '{}'\n", list.display());
    for order in orders {
        let words = order.join(" ");
        script +=
            &format!("\"$0\" {words} -q --locked --message-format json >> '{}'\n", list.display());
    }
    let mut cmd = tied("sh");
    cmd.current_dir(workspace()).args(["-ec", &script]).arg(cargo);
    let log = cache.log(&format!("{}-build", what.replace(' ', "-")));
    run_logged(&mut cmd, &format!("building {what}"), &log, BUILD_WAIT)?;
    let text = std::fs::read_to_string(&list)?;
    std::fs::remove_file(&list)?;
    let made = text.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    let made = made.filter(|message| message.reason == "compiler-artifact").filter_map(|message| {
        let Target { kind, name } = message.target?;
        let tests = message.profile.is_some_and(|profile| profile.test);
        Some(Artifact { path: message.executable?, name, kind: kind.into_iter().next()?, tests })
    });
    Ok(made.collect())
}

impl Program {
    /// Its tests, as it lists them itself.
    pub(crate) fn tests(&self) -> Result<Vec<String>> {
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
struct Process<'a> {
    how: &'a Suites<'a>,
    task: Task,
    job: Job,
    /// Verdicts that have been read.
    seen: usize,
    /// Bytes of what the tests said until the last verdict.
    said: usize,
    since: Instant,
}

impl<'a> Process<'a> {
    fn start(how: &'a Suites<'a>, task: Task, guest: &mut Guest) -> Result<Self> {
        let tests: Vec<&str> = task.left.iter().map(String::as_str).collect();
        let script = SCRIPT
            .replace("@PRELUDE@", how.prelude)
            .replace("@BINARY@", &task.file)
            .replace("@TESTS@", &tests.join(" "))
            .replace("@ERRORS@", ERRORS)
            .replace("@WITNESS@", &witness(&task.suite));
        let job = guest.spawn(&script)?;
        Ok(Self { how, task, job, seen: 0, said: 0, since: Instant::now() })
    }

    /// Reads the verdicts since the last look; the task comes back when the process is over.
    fn look(&mut self, guest: &mut Guest, table: &mut Vec<Row>) -> Result<bool> {
        let over = guest.finished(self.job)?.is_some();
        let text = guest.output(self.job);
        let verdicts = verdicts(&text);
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
        if !passed {
            // The guest may not have written it back yet.
            std::thread::sleep(SETTLE);
        }
        let said = std::fs::read(guest.share().join(ERRORS)).unwrap_or_default();
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        let known = self.how.known.iter().find(|(test, _)| *test == full).map(|(_, why)| *why);
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
            let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
            let [first, last] = SHOWN_LINES;
            let left_out = first..lines.len().saturating_sub(last).max(first);
            lines[..first.min(lines.len())].iter().for_each(|line| eprintln!("        | {line}"));
            if !left_out.is_empty() {
                eprintln!("        | … {} lines …", left_out.len());
            }
            let rest = lines.get(left_out.end..).unwrap_or_default();
            rest.iter().for_each(|line| eprintln!("        | {line}"));
        }
        self.said = said.len();
        let unit = "s".to_owned();
        let name = format!("{}{full}", self.how.of);
        let (reference, ratio, target) = (None, None, String::new());
        table.push(Row { name, ok, value: Some(seconds), reference, ratio, unit, target });
    }
}

/// The tests that have ended, and what became of each. What a test prints stands between its name
/// and its verdict.
fn verdicts(text: &str) -> Vec<(&str, &str)> {
    let is_verdict = |word: &str| ["ok", "FAILED"].contains(&word) || word.starts_with("ignored");
    let mut at_work = None;
    let mut all = Vec::new();
    for line in text.lines() {
        let begun = line.strip_prefix("test ").and_then(|line| line.split_once(" ... "));
        let (name, said) = begun.map_or((at_work, line), |(name, said)| (Some(name), said));
        match name {
            Some(name) if is_verdict(said) => {
                all.push((name, said));
                at_work = None;
            }
            _ => at_work = name,
        }
    }
    all
}

/// How programs of tests are run in guests.
#[derive(Debug)]
pub(crate) struct Suites<'a> {
    /// For the shell, before the tests.
    pub(crate) prelude: &'a str,
    /// Tests that cannot pass there, and why. One that is here and passes is a failure.
    pub(crate) known: &'a [(&'a str, &'a str)],
    /// What the names of the rows begin with.
    pub(crate) of: &'a str,
}

impl Suites<'_> {
    /// The tests of programs that are wanted, by their full names; one row each.
    pub(crate) fn run(
        &self,
        guests: &mut [Guest],
        programs: &[Program],
        table: &mut Vec<Row>,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let mut tasks = VecDeque::new();
        for program in programs {
            let suite = &program.suite;
            let mut tests = program.tests()?;
            tests.retain(|test| wanted(&format!("{suite}::{test}")));
            // In parts, so that no guest ends long before the other.
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
                    *slot = Some(Process::start(self, task, guest)?);
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
}

#[cfg(test)]
mod tests {
    use super::verdicts;

    #[test]
    fn a_test_that_prints_has_a_verdict() {
        let text = "
running 4 tests
test a::quiet ... ok
test a::loud ... 17 bytes to begin with
ok, so far
ok
test a::bad ... FAILED
test a::left ... ignored, run by hand
test a::at_work ... half a word";
        let expected = [
            ("a::quiet", "ok"),
            ("a::loud", "ok"),
            ("a::bad", "FAILED"),
            ("a::left", "ignored, run by hand"),
        ];
        assert_eq!(verdicts(text), expected);
        assert_eq!(verdicts(&format!("{text}\nok\n")).last(), Some(&("a::at_work", "ok")));
    }
}
