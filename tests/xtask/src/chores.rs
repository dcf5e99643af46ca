//! Cargo's part of the work: formatting, lints, documentation, licences, tests, benchmarks, the
//! manual page.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use lab::Part;
use lab::cache::Cache;
use lab::exec::{check_interrupt, run_logged, tied, wait, workspace};
use lab::host;

use crate::wheels;

const CARGO_WAIT: Duration = Duration::from_secs(1800);
/// How much slower an emulated processor is, roughly.
const EMULATED: u32 = 8;
/// A package and its program, of the same name.
const MUTATE: &str = "cargo-mutants";
/// Each change is a build and a run of a package's tests.
const MUTATE_WAIT: Duration = Duration::from_secs(4 * 3600);

fn cargo() -> Command {
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace());
    cmd
}

/// How many times its time what we start may take: in a VM of the lab all is emulated.
fn patience() -> u32 {
    if host::is_emulated() { EMULATED } else { 1 }
}

/// One cargo command as a step, its output in a log.
fn logged(cache: &Cache, name: &str, cmd: &mut Command) -> Result<bool> {
    let log = cache.log(name);
    let _ = std::fs::remove_file(&log);
    run_logged(cmd, name, &log, CARGO_WAIT * patience()).map(|()| true)
}

/// Everything is formatted.
pub(crate) fn rustfmt(cache: &Cache) -> Result<bool> {
    logged(cache, "rustfmt", cargo().args(["fmt", "--all", "--check"]))
}

/// clippy over the workspace, which may not say a word. With the feature `host-rnic`: there is more
/// code with it than without.
pub(crate) fn clippy(cache: &Cache) -> Result<bool> {
    host::ensure_packages(cache, host::RNIC_PACKAGES)?;
    let mut cmd = cargo();
    cmd.args(["clippy", "--locked", "--workspace", "--all-targets", "--quiet"]);
    cmd.args(["--features", "vhost-rdma/host-rnic", "--", "-D", "warnings"]);
    logged(cache, "clippy", &mut cmd)
}

/// clippy over what the feature changes, as a plain build has it. What is wrong there with types,
/// the tests' own build tells; only lints come to light here.
pub(crate) fn clippy_plain(cache: &Cache) -> Result<bool> {
    let mut cmd = cargo();
    cmd.args(["clippy", "--locked", "--quiet", "-p", "vhost-rdma", "-p", "vhost-rdma-rnic"]);
    logged(cache, "clippy-plain", cmd.args(["--all-targets", "--", "-D", "warnings"]))
}

/// The documentation of all crates, without a warning.
pub(crate) fn doc(cache: &Cache) -> Result<bool> {
    let mut cmd = cargo();
    cmd.args(["doc", "--locked", "--workspace", "--no-deps", "--quiet"]);
    logged(cache, "cargo-doc", cmd.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Licences, banned crates, sources and advisories of what we depend on.
pub(crate) fn deny(cache: &Cache) -> Result<bool> {
    let tool = wheels::DENY.program(cache)?;
    let mut cmd = tied(&tool);
    cmd.current_dir(workspace()).args([
        "--workspace",
        "check",
        "--hide-inclusion-graph",
        "--show-stats",
    ]);
    let all = logged(cache, "cargo-deny", &mut cmd);
    let Err(error) = all else { return Ok(true) };
    check_interrupt()?;
    // The advisories live in a repository of their own. Not to reach it says nothing about us, but
    // it must be said.
    let text = std::fs::read_to_string(cache.log("cargo-deny")).unwrap_or_default();
    if !text.contains("failed to fetch advisory database") {
        return Err(error);
    }
    eprintln!(
        "    warning: the advisory database cannot be reached; advisories are NOT checked in this \
         run"
    );
    let mut cmd = tied(&tool);
    cmd.current_dir(workspace()).args([
        "--workspace",
        "check",
        "--hide-inclusion-graph",
        "licenses",
        "bans",
        "sources",
    ]);
    logged(cache, "cargo-deny", &mut cmd)
}

/// Words that are misspelt, in whatever git keeps; `_typos.toml` has those that are not.
pub(crate) fn typos(cache: &Cache) -> Result<bool> {
    let mut cmd = tied(wheels::TYPOS.program(cache)?);
    cmd.current_dir(workspace()).args(["--format", "brief"]);
    logged(cache, "typos", &mut cmd)
}

/// A program of crates.io: the machine's, or one of our own. A debug build: it runs for seconds and
/// compiles in a third of the time.
fn tool(cache: &Cache, program: &str) -> Result<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let own = cache.dir().join("tools/bin").join(program);
    let mut known = path.split(':').map(|d| Path::new(d).join(program)).chain([own.clone()]);
    if let Some(found) = known.find(|p| p.exists()) {
        return Ok(found);
    }
    let _lock = cache.lock(program)?;
    if !own.exists() {
        eprintln!("    this machine lacks {program}: building it once");
        install(cache, program, None, &cache.dir().join("tools"))?;
    }
    Ok(own)
}

/// `cargo install` below `root`.
pub(crate) fn install(
    cache: &Cache,
    package: &str,
    version: Option<&str>,
    root: &Path,
) -> Result<()> {
    let target = cache.dir().join(format!("tmp/{package}-target"));
    let mut cmd = cargo();
    cmd.current_dir(cache.dir()).args(["install", "--locked", "--debug", package, "--root"]);
    cmd.arg(root).env("CARGO_TARGET_DIR", &target);
    if let Some(version) = version {
        cmd.args(["--version", version]);
    }
    let log = cache.log(&format!("{package}-install"));
    run_logged(&mut cmd, &format!("cargo install {package}"), &log, CARGO_WAIT)?;
    let _ = std::fs::remove_dir_all(target);
    Ok(())
}

/// Unit and whole-stack tests, and the examples of the documentation, which nextest runs none of.
pub(crate) fn tests(cache: &Cache) -> Result<bool> {
    let mut cmd = by_nextest(cache)?;
    cmd.args(["--status-level", "fail", "--final-status-level", "slow"]);
    let mut examples = cargo();
    examples.args(["test", "--locked", "--workspace", "--doc"]);
    Ok(logged(cache, "tests", &mut cmd)? && logged(cache, "examples", &mut examples)?)
}

/// The whole-stack tests with a daemon of another shape (`virtual_guest::daemon`).
pub(crate) fn tests_shaped(cache: &Cache, shape: &str) -> Result<bool> {
    let mut cmd = by_nextest(cache)?;
    cmd.args(["-E", "package(virtual-guest)"]).env("VHOST_RDMA_SHAPE", shape);
    cmd.args(["--status-level", "fail", "--final-status-level", "slow"]);
    logged(cache, &format!("tests-{shape}"), &mut cmd)
}

/// The tests as [`tests`] runs them, with what the user adds.
pub(crate) fn nextest(cache: &Cache, rest: &[String]) -> Result<bool> {
    shown(by_nextest(cache)?.args(rest))
}

/// Each test in a process of its own with a time limit (.config/nextest.toml).
fn by_nextest(cache: &Cache) -> Result<Command> {
    host::ensure_packages(cache, host::TEST_PACKAGES)?;
    let mut cmd = cargo();
    cmd.args(["nextest", "run", "--locked", "--workspace", "--no-fail-fast"]);
    cmd.env("PATH", wheels::NEXTEST.on_path(cache)?);
    if patience() > 1 {
        cmd.env("NEXTEST_PROFILE", "emulated").env("VHOST_RDMA_PATIENCE", patience().to_string());
    }
    with_daemon(&mut cmd)?;
    Ok(cmd)
}

/// The daemon that this very command builds for its own tests. Without the name the virtual guest
/// would have it built for itself, with other features of its libraries, each of which is then
/// compiled a second time.
fn with_daemon(cmd: &mut Command) -> Result<&mut Command> {
    Ok(cmd.env("VHOST_RDMA_BIN", std::path::absolute(target().join("debug/vhost-rdma"))?))
}

/// Parts of the seeded bugs, one of which a run that is not `--full` takes.
const PARTS: u32 = 30;

/// The seeded device bugs, each of which the whole-stack tests must catch: all of them, or the part
/// whose turn it is by the commit, so that each is tried every few changes.
pub(crate) fn mutants(cache: &Cache, all: bool) -> Result<bool> {
    let part = if all { Part::ALL } else { Part::turn(turn(), PARTS) };
    eprintln!("    part {part}");
    let mut cmd = cargo();
    cmd.args(["run", "--locked", "--quiet", "-p", "virtual-guest", "--bin", "mutants"]);
    cmd.args(["--", "--part", &part.to_string(), "--cache"]).arg(cache.dir().join("mutants"));
    if !all {
        // Agent and CNI plugin would be compiled for their few.
        cmd.arg("--daemon");
    }
    logged(cache, "mutants", &mut cmd)
}

/// Changes what has been touched since a revision, one place at a time (cargo-mutants), and tells
/// which changes no test of that package notices.
pub(crate) fn mutate(cache: &Cache, since: &str, rest: &[String]) -> Result<bool> {
    let diff = Command::new("git")
        .args(["diff", "--no-color", since, "--", "*.rs"])
        .current_dir(workspace())
        .output()
        .context("git tells what has changed")?;
    ensure!(diff.status.success(), "git: {}", String::from_utf8_lossy(&diff.stderr).trim());
    ensure!(!diff.stdout.is_empty(), "no Rust file differs from {since}");
    let file = cache.dir().join("tmp/mutate.diff");
    std::fs::create_dir_all(cache.dir().join("tmp"))?;
    std::fs::write(&file, diff.stdout)?;
    let mut cmd = tied(tool(cache, MUTATE)?);
    cmd.current_dir(workspace()).args(["mutants", "--in-diff"]).arg(&file);
    cmd.arg("--output").arg(cache.dir().join("tmp"));
    // What a time limit ends counts as noticed; cargo-mutants takes its measure from the tests.
    cmd.args(["--minimum-test-timeout", "120"]).args(rest);
    shown_for(&mut cmd, MUTATE_WAIT)
}

/// A number that the commit decides, for what CI takes by turns; 0 where there is none.
pub(crate) fn turn() -> u32 {
    let head = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(workspace()).output();
    let text = head.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    text.ok().and_then(|id| u32::from_str_radix(id.get(..8)?, 16).ok()).unwrap_or(0)
}

/// A cargo command whose output the user wants to see.
fn shown(cmd: &mut Command) -> Result<bool> {
    shown_for(cmd, CARGO_WAIT)
}

fn shown_for(cmd: &mut Command, limit: Duration) -> Result<bool> {
    let mut child = cmd.spawn().with_context(|| format!("cannot start {cmd:?}"))?;
    Ok(wait(&mut child, limit, || {})?.success())
}

/// Where cargo puts what it makes.
fn target() -> PathBuf {
    let set = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    set.unwrap_or_else(|| workspace().join("target"))
}

/// A program of the virtual guest, optimised, with the optimised daemon. One command builds both:
/// apart, each would be built with other features of the libraries that they share, again and
/// again.
fn guest_program(name: &str, json: Option<&Path>) -> Result<Option<Command>> {
    let both =
        ["build", "--release", "--locked", "-p", "vhost-rdma", "-p", "virtual-guest", "--bins"];
    if !shown(cargo().args(both))? {
        return Ok(None);
    }
    let made = std::path::absolute(target().join("release"))?;
    let mut cmd = tied(made.join(name));
    cmd.current_dir(workspace()).env("VHOST_RDMA_BIN", made.join("vhost-rdma"));
    if let Some(path) = json {
        // The program runs in the workspace's root.
        cmd.arg("--json").arg(std::path::absolute(path)?);
    }
    Ok(Some(cmd))
}

/// What the virtual guest measures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Bench {
    /// Bandwidth, rates, round trips, control commands
    #[default]
    Speed,
    /// What attacks by one network cost a victim in another on the same worker
    Isolation,
}

/// The virtual guest's benchmarks.
pub(crate) fn bench(
    what: Bench,
    quick: bool,
    json: Option<&Path>,
    rest: &[String],
) -> Result<bool> {
    let program = match what {
        Bench::Speed => "bench",
        Bench::Isolation => "isolation",
    };
    let Some(mut cmd) = guest_program(program, json)? else { return Ok(false) };
    if quick {
        cmd.arg("--quick");
    }
    shown(cmd.args(rest))
}

/// The isolation benchmark as CI runs it: every attack runs, and nowhere does the worker stand
/// still. A machine that has other things to do fails no target; those are for a report.
pub(crate) fn isolation(more: &[&str]) -> Result<bool> {
    let words: Vec<String> = ["--loose"].iter().chain(more).map(|word| (*word).into()).collect();
    bench(Bench::Isolation, true, None, &words)
}

/// The virtual guest's soak.
pub(crate) fn soak(minutes: f64, json: Option<&Path>, rest: &[String]) -> Result<bool> {
    let Some(mut cmd) = guest_program("soak", json)? else { return Ok(false) };
    cmd.arg("--minutes").arg(minutes.to_string());
    let limit = CARGO_WAIT + Duration::from_secs_f64((minutes * 60.0).clamp(0.0, 1e6));
    shown_for(cmd.args(rest), limit)
}

/// The manual page, as the program itself writes it.
pub(crate) fn man(dir: Option<&Path>) -> Result<bool> {
    let mut cmd = cargo();
    cmd.args(["run", "--locked", "--quiet", "-p", "vhost-rdma", "--", "man"]);
    if let Some(dir) = dir {
        std::fs::create_dir_all(dir)?;
        cmd.arg("--dir").arg(std::path::absolute(dir)?);
    }
    shown(&mut cmd)
}

/// The definitions of the cluster's kinds, as their source says them.
pub(crate) fn crds() -> Result<bool> {
    let mut cmd = cargo();
    cmd.args(["run", "--locked", "--quiet", "-p", "vhost-rdma-cluster-api", "--example", "crds"]);
    let (crds, api) = (workspace().join("manifests/crds"), workspace().join("docs/API.md"));
    shown(cmd.arg("--").arg(crds).arg(api))
}

/// What makes libFuzzer see which code a string reaches: the flags that cargo-fuzz gives, none of
/// which needs a nightly compiler.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module \
                        -Cllvm-args=-sanitizer-coverage-level=4 \
                        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                        -Cllvm-args=-sanitizer-coverage-pc-table -Ccodegen-units=1";

/// A fuzz target, guided by coverage. What it finds new is kept in the cache; the repository's
/// corpus is read.
pub(crate) fn fuzz(cache: &Cache, target: &str, seconds: u64) -> Result<bool> {
    let fuzz = workspace().join("vhost-rdma/fuzz");
    let (build, found) = (cache.dir().join("fuzz/build"), cache.dir().join("fuzz").join(target));
    std::fs::create_dir_all(&found).with_context(|| found.display().to_string())?;
    // With a target of its own, so that build scripts and macros are not instrumented.
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cmd = cargo();
    cmd.args(["build", "--release", "--target", &host, "--manifest-path"]);
    cmd.arg(fuzz.join("Cargo.toml")).env("CARGO_TARGET_DIR", &build).env("RUSTFLAGS", COVERAGE);
    if !shown(&mut cmd)? {
        return Ok(false);
    }
    let mut cmd = tied(build.join(host).join("release/fuzz"));
    cmd.current_dir(&found).env("VHOST_RDMA_FUZZ_TARGET", target);
    cmd.arg(&found).arg(fuzz.join("corpus").join(target));
    cmd.arg(format!("-max_total_time={seconds}")).args(["-max_len=4096", "-timeout=20"]);
    let limit = CARGO_WAIT + Duration::from_secs(seconds);
    let ok = shown_for(&mut cmd, limit)?;
    if !ok {
        eprintln!(
            "the string is in {}; put it to {} when what it shows is mended",
            found.display(),
            fuzz.join("corpus").join(target).display()
        );
    }
    Ok(ok)
}
