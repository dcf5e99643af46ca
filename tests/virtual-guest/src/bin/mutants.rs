//! `mutants [--list] [--part K/N] [FILTER…]`: are the whole-stack tests able to fail?
//!
//! Each entry of `mutants.toml` is a bug seeded into a copy of the daemon's source: apply it, build
//! the daemon, and at least one of the tests that the entry names must fail on it; all of them must
//! pass on the source as it is. The copy and its build live in a cache outside the source, so that
//! a run costs one incremental build per bug. The tests themselves are built once, from here.
//!
//! A bug with a `package` is of another of the workspace's packages, and its tests are that
//! package's own, which are built with it. `--daemon` leaves those out.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::str::FromStr;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use serde::Deserialize;
use virtual_guest::daemon::cargo;

/// The most that one test may take before it counts as failed.
const TEST_LIMIT: Duration = Duration::from_secs(150);

#[derive(Debug, Parser)]
#[command(about = "Seeds bugs into the daemon and checks that the whole-stack tests catch them")]
struct Args {
    /// Only bugs whose name contains one of these
    filter: Vec<String>,
    /// Show the table and check it against the source, without building
    #[arg(long)]
    list: bool,
    /// Only bugs of the daemon
    #[arg(long)]
    daemon: bool,
    /// Every Nth bug of those, from the Kth on: with all K from 0 to N-1 each is tried once
    #[arg(long, value_name = "K/N", default_value = "0/1")]
    part: Part,
    /// Where the copy of the source and its build are [default: $XDG_CACHE_HOME/vhost-rdma/mutants]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// The profile of the seeded daemons is the tests' own; jobs of their builds
    #[arg(long, value_name = "N")]
    jobs: Option<u32>,
    /// Write one row per bug to this file as a JSON array
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Which of the bugs.
#[derive(Debug, Clone, Copy)]
struct Part {
    first: usize,
    step: usize,
}

impl FromStr for Part {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts =
            text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        let (first, step) = parts.ok_or("two numbers, such as 0/3")?;
        if first < step { Ok(Self { first, step }) } else { Err("K is less than N") }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    mutant: Vec<Mutant>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    name: String,
    /// None: the daemon's, whatever the crate.
    #[serde(default)]
    package: Option<Package>,
    /// Below the package's directory.
    file: PathBuf,
    find: String,
    replace: String,
    why: String,
    tests: Vec<String>,
    /// Between networks in one process, which `serve` has none of by default.
    #[serde(default)]
    one_process: bool,
}

/// A package whose bugs its own tests find: `lib::TEST` and `PROGRAM::TEST`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Package {
    #[serde(rename = "vhost-rdma")]
    Daemon,
    #[serde(rename = "vhost-rdma-agent")]
    Agent,
    #[serde(rename = "vhost-rdma-cni")]
    CniPlugin,
    #[serde(rename = "vhost-rdma-engine")]
    Engine,
    #[serde(rename = "vhost-rdma-rnic")]
    Rnic,
}

impl Package {
    const fn name(self) -> &'static str {
        match self {
            Self::Daemon => "vhost-rdma",
            Self::Agent => "vhost-rdma-agent",
            Self::CniPlugin => "vhost-rdma-cni",
            Self::Engine => "vhost-rdma-engine",
            Self::Rnic => "vhost-rdma-rnic",
        }
    }

    const fn dir(self) -> &'static str {
        match self {
            Self::Daemon => "vhost-rdma",
            Self::Agent => "device-plugin",
            Self::CniPlugin => "cni-plugin",
            Self::Engine => "vhost-rdma/engine",
            Self::Rnic => "vhost-rdma/rnic",
        }
    }
}

impl Mutant {
    /// Below the workspace.
    fn path(&self) -> PathBuf {
        Path::new(self.package.map_or("vhost-rdma", Package::dir)).join(&self.file)
    }

    /// The source of the file with the bug in it.
    fn seed(&self, source: &str) -> Result<String> {
        let found = source.matches(&self.find).count();
        ensure!(
            found == 1,
            "{}: its text occurs {found} times in {}",
            self.name,
            self.file.display()
        );
        ensure!(self.find != self.replace, "{}: it changes nothing", self.name);
        ensure!(!self.tests.is_empty(), "{}: no test is named", self.name);
        Ok(source.replacen(&self.find, &self.replace, 1))
    }
}

fn workspace() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().and_then(Path::parent).context("the package is two levels down")?.to_owned())
}

/// Copies what differs, so that unchanged files keep their times and cargo builds little; removes
/// what is gone.
fn mirror(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let mut wanted = Vec::new();
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == "target" || name == ".git" {
            continue;
        }
        wanted.push(name.clone());
        let (source, copy) = (entry.path(), to.join(&name));
        if entry.file_type()?.is_dir() {
            mirror(&source, &copy)?;
        } else if entry.file_type()?.is_file() {
            update(&copy, &fs::read(&source)?)?;
        }
    }
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        if wanted.contains(&entry.file_name()) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn update(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).ok().as_deref() != Some(content) {
        fs::write(path, content).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Waits for a child up to `limit`; its output and whether it succeeded in time.
fn run(command: &mut Command, limit: Duration) -> Result<(bool, String)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{command:?}"))?;
    let drain = |stream: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut text = Vec::new();
            let _read = stream.map(|mut s| s.read_to_end(&mut text));
            text
        })
    };
    let out = drain(child.stdout.take().map(|s| Box::new(s) as Box<dyn Read + Send>));
    let err = drain(child.stderr.take().map(|s| Box::new(s) as Box<dyn Read + Send>));
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let mut text = out.join().map_err(|_| anyhow!("a reader ended"))?;
    text.extend(err.join().map_err(|_| anyhow!("a reader ended"))?);
    let success = status.is_some_and(|s| s.success());
    Ok((success, String::from_utf8_lossy(&text).into_owned()))
}

/// Builds the test programs; their paths by name.
fn test_programs(workspace: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let output = cargo()
        .current_dir(workspace)
        // As `cargo test` of the whole workspace, whose libraries have the same features and are
        // there already.
        .args(["test", "--workspace", "--no-run", "--message-format=json"])
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "the whole-stack tests do not build");
    let mut programs = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let message: serde_json::Value = serde_json::from_str(line)?;
        let target = &message["target"];
        let ours =
            message["manifest_path"] == env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml";
        if ours
            && target["kind"][0] == "test"
            && let (Some(name), Some(path)) =
                (target["name"].as_str(), message["executable"].as_str())
        {
            programs.insert(name.to_owned(), PathBuf::from(path));
        }
    }
    Ok(programs)
}

/// How long a build may take.
const BUILD_LIMIT: Duration = Duration::from_secs(1200);

struct Bench {
    tree: PathBuf,
    target: PathBuf,
    jobs: Option<u32>,
    programs: BTreeMap<String, PathBuf>,
}

impl Bench {
    /// cargo on the copy.
    fn cargo(&self, what: &str) -> Command {
        let mut command = cargo();
        command
            .current_dir(&self.tree)
            .args([what, "--quiet", "--target-dir"])
            .arg(&self.target)
            // Only its behaviour matters, not its warnings and not its debug information.
            .env("RUSTFLAGS", "--cap-lints allow")
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        if let Some(jobs) = self.jobs {
            command.arg("--jobs").arg(jobs.to_string());
        }
        command
    }

    fn build(&self) -> Result<PathBuf> {
        let mut command = self.cargo("build");
        command.args(["--package", "vhost-rdma", "--bin", "vhost-rdma"]);
        let (success, text) = run(&mut command, BUILD_LIMIT)?;
        ensure!(success, "it does not build:\n{text}");
        Ok(self.target.join("debug/vhost-rdma"))
    }

    /// Builds and runs one test of a package; true if it passed.
    fn passes_in(&self, package: Package, test: &str) -> Result<bool> {
        let (program, name) =
            test.split_once("::").with_context(|| format!("{test}: no program"))?;
        let cargo = |last: &[&str]| {
            let mut command = self.cargo("test");
            command.args(["--package", package.name()]);
            match program {
                "lib" => command.arg("--lib"),
                program => command.args(["--test", program]),
            };
            command.args(last);
            command
        };
        let (built, text) = run(&mut cargo(&["--no-run"]), BUILD_LIMIT)?;
        ensure!(built, "{test}: it does not build:\n{text}");
        let (success, text) = run(&mut cargo(&["--", "--exact", name]), TEST_LIMIT)?;
        ensure!(text.contains("running 1 test"), "{test}: there is no such test:\n{text}");
        Ok(success)
    }

    /// Runs one test (`program::test`) on a daemon; true if it passed.
    fn passes(&self, test: &str, daemon: &Path, one_process: bool) -> Result<bool> {
        let (program, name) =
            test.split_once("::").with_context(|| format!("{test}: no program"))?;
        let path =
            self.programs.get(program).with_context(|| format!("{test}: no such program"))?;
        let mut command = Command::new(path);
        command.args(["--exact", name]).env("VHOST_RDMA_BIN", daemon);
        if one_process {
            command.env("VHOST_RDMA_SHAPE", "one");
        }
        command.current_dir(env!("CARGO_MANIFEST_DIR"));
        let (success, text) = run(&mut command, TEST_LIMIT)?;
        ensure!(text.contains("running 1 test"), "{test}: there is no such test");
        Ok(success)
    }
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let workspace = workspace()?;
    let table = fs::read_to_string(workspace.join("tests/virtual-guest/mutants.toml"))?;
    let table: Table = toml::from_str(&table)?;
    let named = |m: &Mutant| args.filter.iter().any(|f| m.name.contains(f));
    let wanted =
        |m: &&Mutant| (args.filter.is_empty() || named(m)) && !(args.daemon && m.package.is_some());
    let chosen: Vec<&Mutant> = table.mutant.iter().filter(wanted).collect();
    ensure!(!chosen.is_empty(), "no bug matches {:?}", args.filter);
    let source = |m: &Mutant| {
        let path = workspace.join(m.path());
        fs::read_to_string(&path).with_context(|| format!("{}: {}", m.name, path.display()))
    };
    // The whole table first: a bug whose text is gone must not be found out after an hour.
    for mutant in &chosen {
        mutant.seed(&source(mutant)?)?;
    }
    let chosen: Vec<&Mutant> =
        chosen.into_iter().skip(args.part.first).step_by(args.part.step).collect();
    ensure!(!chosen.is_empty(), "there are fewer bugs than parts");
    if args.list {
        for mutant in &chosen {
            println!("{:<32} {:<24} {}", mutant.name, mutant.path().display(), mutant.why);
        }
        println!("{} seeded bugs", chosen.len());
        return Ok(ExitCode::SUCCESS);
    }
    let cache = match args.cache {
        Some(dir) => dir,
        None => default_cache()?,
    };
    let bench = Bench {
        tree: cache.join("tree"),
        target: cache.join("target"),
        jobs: args.jobs,
        programs: test_programs(&workspace)?,
    };
    mirror(&workspace, &bench.tree)?;
    let (packages, chosen): (Vec<&Mutant>, Vec<&Mutant>) =
        chosen.into_iter().partition(|mutant| mutant.package.is_some());
    let mut rows = Vec::new();
    let mut hunted = |mutant: &Mutant, caught: Result<Option<String>>| -> Result<()> {
        let caught = caught.with_context(|| mutant.name.clone())?;
        match &caught {
            Some(test) => println!("caught    {:<32} by {test}", mutant.name),
            None => println!("SURVIVED  {:<32} {}", mutant.name, mutant.why),
        }
        rows.push(serde_json::json!({
            "name": mutant.name, "ok": caught.is_some(), "value": caught, "reference": mutant.tests,
            "ratio": null, "unit": "test", "target": "caught",
        }));
        Ok(())
    };
    if !chosen.is_empty() {
        check_original(&bench, &chosen)?;
        each_seeded(&bench, &chosen, &source, |mutant, daemon| {
            hunted(mutant, daemon.and_then(|daemon| hunt(&bench, mutant, &daemon)))
        })?;
    }
    // One after the other: their tests are built from the copy that has the bug.
    for mutant in packages {
        hunted(mutant, hunt_in_package(&bench, mutant, &source(mutant)?))?;
    }
    if let Some(path) = &args.json {
        fs::write(path, serde_json::to_string_pretty(&rows)? + "\n")?;
    }
    let survivors = rows.iter().filter(|r| r["ok"] == false).count();
    let names = rows.iter().filter(|r| r["ok"] == false).map(|r| format!(" {}", r["name"]));
    println!("{} seeded bugs, {survivors} survived{}", rows.len(), names.collect::<String>());
    Ok(if survivors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn default_cache() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(base.context("neither XDG_CACHE_HOME nor HOME is set")?.join("vhost-rdma/mutants"))
}

/// Every test that is named must pass on the daemon as it is.
fn check_original(bench: &Bench, chosen: &[&Mutant]) -> Result<()> {
    let daemon = bench.build()?;
    let named =
        |m: &&Mutant| m.tests.iter().map(|t| (t.clone(), m.one_process)).collect::<Vec<_>>();
    let mut tests: Vec<(String, bool)> = chosen.iter().flat_map(named).collect();
    tests.sort();
    tests.dedup();
    for (test, one_process) in &tests {
        let passes = bench.passes(test, &daemon, *one_process)?;
        ensure!(passes, "{test} fails on the daemon without any seeded bug");
    }
    println!("{} tests pass on the daemon as it is", tests.len());
    Ok(())
}

/// Builds the daemon with each bug, and hands it over while the next one is built.
fn each_seeded(
    bench: &Bench,
    chosen: &[&Mutant],
    source: &(impl Fn(&Mutant) -> Result<String> + Sync),
    mut hunted: impl FnMut(&Mutant, Result<PathBuf>) -> Result<()>,
) -> Result<()> {
    // One waits, one is being built.
    let (ready, built) = sync_channel(0);
    thread::scope(|scope| {
        scope.spawn(move || {
            for (number, mutant) in chosen.iter().enumerate() {
                let original = source(mutant);
                let daemon = original.and_then(|s| build_seeded(bench, mutant, &s, number % 2));
                // Nobody listens any more once one could not be built or hunted.
                if ready.send((*mutant, daemon)).is_err() {
                    break;
                }
            }
        });
        for (mutant, daemon) in built {
            hunted(mutant, daemon)?;
        }
        Ok(())
    })
}

/// The daemon with a bug, in one of two places: the other is in use.
fn build_seeded(bench: &Bench, mutant: &Mutant, original: &str, place: usize) -> Result<PathBuf> {
    let file = bench.tree.join(mutant.path());
    fs::write(&file, mutant.seed(original)?)?;
    let built = bench.build();
    fs::write(&file, original)?;
    let kept = bench.target.join(format!("seeded-{place}"));
    let _old = fs::remove_file(&kept);
    fs::copy(built?, &kept)?;
    Ok(kept)
}

/// How often all tests of a bug are run before it has survived: a race is not lost each time.
const ROUNDS: usize = 3;

/// The first test that fails on the daemon with this bug.
fn hunt(bench: &Bench, mutant: &Mutant, daemon: &Path) -> Result<Option<String>> {
    for test in std::iter::repeat_n(&mutant.tests, ROUNDS).flatten() {
        if !bench.passes(test, daemon, mutant.one_process)? {
            return Ok(Some(test.clone()));
        }
    }
    if !daemon.exists() {
        bail!("the daemon vanished");
    }
    Ok(None)
}

/// The first of a package's tests that fails with this bug; all pass without it.
fn hunt_in_package(bench: &Bench, mutant: &Mutant, original: &str) -> Result<Option<String>> {
    let package = mutant.package.context("a bug of the daemon")?;
    for test in &mutant.tests {
        ensure!(bench.passes_in(package, test)?, "{test} fails without any seeded bug");
    }
    let file = bench.tree.join(mutant.path());
    fs::write(&file, mutant.seed(original)?)?;
    let caught = mutant.tests.iter().find_map(|test| match bench.passes_in(package, test) {
        Ok(true) => None,
        Ok(false) => Some(Ok(test.clone())),
        Err(error) => Some(Err(error)),
    });
    fs::write(&file, original)?;
    caught.transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(find: &str, replace: &str) -> Mutant {
        Mutant {
            name: "m".into(),
            package: None,
            file: "f".into(),
            find: find.into(),
            replace: replace.into(),
            why: String::new(),
            tests: vec!["a::b".into()],
            one_process: false,
        }
    }

    #[test]
    fn a_bug_must_have_exactly_one_place() {
        assert_eq!(mutant("b", "x").seed("abc").unwrap(), "axc");
        assert!(mutant("b", "x").seed("abcb").is_err());
        assert!(mutant("d", "x").seed("abc").is_err());
        assert!(mutant("b", "b").seed("abc").is_err());
    }

    #[test]
    fn the_table_fits_the_source() {
        let root = workspace().unwrap();
        let table = fs::read_to_string(root.join("tests/virtual-guest/mutants.toml")).unwrap();
        let table: Table = toml::from_str(&table).unwrap();
        assert!(table.mutant.len() >= 20);
        for mutant in &table.mutant {
            let path = root.join(mutant.path());
            mutant.seed(&fs::read_to_string(path).unwrap()).unwrap();
            if let Some(package) = mutant.package {
                has_tests(&root.join(package.dir()), mutant);
                continue;
            }
            for test in &mutant.tests {
                let (program, name) = test.split_once("::").unwrap();
                // A program of several files is a folder: its tests have a module, or stand in
                // `main.rs`.
                let folder = root.join("tests/virtual-guest/tests").join(program);
                let (file, name) = match name.split_once("::") {
                    Some((module, name)) => (folder.join(format!("{module}.rs")), name),
                    None if folder.is_dir() => (folder.join("main.rs"), name),
                    None => (folder.with_extension("rs"), name),
                };
                let text = fs::read_to_string(&file)
                    .unwrap_or_else(|e| panic!("{test}: {}: {e}", file.display()));
                assert!(text.contains(&format!("fn {name}(")), "{test} is not there");
            }
        }
    }

    /// Each of them is the name of a function below the package's directory.
    fn has_tests(dir: &Path, mutant: &Mutant) {
        let mut text = String::new();
        let mut dirs = vec![dir.to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    dirs.push(path);
                } else if path.extension().is_some_and(|ext| ext == "rs") {
                    text.push_str(&fs::read_to_string(path).unwrap());
                }
            }
        }
        for test in &mutant.tests {
            let (_, name) = test.rsplit_once("::").unwrap();
            assert!(text.contains(&format!("fn {name}(")), "{test} is not there");
        }
    }
}
