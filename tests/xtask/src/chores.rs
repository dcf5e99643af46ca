//! Cargo's part of the work: formatting, lints, documentation, licences, tests, benchmarks, the manual page.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec::{check_interrupt, run_logged, tied, wait, workspace};
use crate::steps::Steps;

const CARGO_WAIT: Duration = Duration::from_secs(1800);
const DENY: &str = "cargo-deny";

fn cargo() -> Command {
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace());
    cmd
}

/// One cargo command as a step, its output in a log.
fn logged(cache: &Cache, name: &str, cmd: &mut Command) -> Result<bool> {
    let log = cache.log(name);
    let _ = std::fs::remove_file(&log);
    run_logged(cmd, name, &log, CARGO_WAIT).map(|()| true)
}

/// fmt, clippy, doc and cargo-deny, nothing of which may say a word.
pub(crate) fn lint(cache: &Cache, steps: &mut Steps) -> Result<()> {
    steps
        .step("rustfmt", || logged(cache, "rustfmt", cargo().args(["fmt", "--all", "--check"])))?;
    steps.step("clippy", || {
        let mut cmd = cargo();
        cmd.args([
            "clippy",
            "--locked",
            "--workspace",
            "--all-targets",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ]);
        logged(cache, "clippy", &mut cmd)
    })?;
    steps.step("cargo doc", || {
        let mut cmd = cargo();
        cmd.args(["doc", "--locked", "--workspace", "--no-deps", "--quiet"])
            .env("RUSTDOCFLAGS", "-D warnings");
        logged(cache, "cargo-doc", &mut cmd)
    })?;
    steps.step("cargo-deny", || deny(cache))
}

fn deny(cache: &Cache) -> Result<bool> {
    let tool = deny_tool(cache)?;
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
    // The advisories live in a repository of their own. Not to reach it says nothing about us, but it must be said.
    let text = std::fs::read_to_string(cache.log("cargo-deny")).unwrap_or_default();
    if !text.contains("failed to fetch advisory database") {
        return Err(error);
    }
    eprintln!(
        "    warning: the advisory database cannot be reached; advisories are NOT checked in this run"
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

/// cargo-deny of the machine, or one of our own. A debug build: it runs for a second and compiles in a third of the time.
fn deny_tool(cache: &Cache) -> Result<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let own = cache.dir().join("tools/bin").join(DENY);
    let known =
        path.split(':').map(|d| Path::new(d).join(DENY)).chain([own.clone()]).find(|p| p.exists());
    if let Some(found) = known {
        return Ok(found);
    }
    let _lock = cache.lock("cargo-deny")?;
    if !own.exists() {
        eprintln!("    this machine lacks cargo-deny: building it once");
        let mut cmd = cargo();
        cmd.current_dir(cache.dir())
            .args(["install", "--locked", "--debug", "cargo-deny", "--root"])
            .arg(cache.dir().join("tools"));
        cmd.env("CARGO_TARGET_DIR", cache.dir().join("tmp/cargo-deny-target"));
        run_logged(
            &mut cmd,
            "cargo install cargo-deny",
            &cache.log("cargo-deny-install"),
            CARGO_WAIT,
        )?;
        let _ = std::fs::remove_dir_all(cache.dir().join("tmp/cargo-deny-target"));
    }
    Ok(own)
}

/// Unit and whole-stack tests.
pub(crate) fn tests(cache: &Cache, steps: &mut Steps) -> Result<()> {
    steps.step("cargo test", || {
        logged(
            cache,
            "cargo-test",
            cargo().args(["test", "--locked", "--workspace", "--no-fail-fast"]),
        )
    })
}

/// The seeded device bugs, each of which the whole-stack tests must catch.
pub(crate) fn mutants(cache: &Cache, steps: &mut Steps) -> Result<()> {
    steps.step("seeded device bugs", || {
        let mut cmd = cargo();
        cmd.args([
            "run",
            "--locked",
            "--quiet",
            "-p",
            "virtual-guest",
            "--bin",
            "mutants",
            "--",
            "--cache",
        ]);
        logged(cache, "mutants", cmd.arg(cache.dir().join("mutants")))
    })
}

/// A cargo command whose output the user wants to see.
fn shown(cmd: &mut Command) -> Result<bool> {
    let mut child = cmd.spawn().with_context(|| format!("cannot start {cmd:?}"))?;
    Ok(wait(&mut child, CARGO_WAIT, || {})?.success())
}

/// The virtual guest's benchmarks.
pub(crate) fn bench(json: Option<&Path>, rest: &[String]) -> Result<bool> {
    // The daemon under test is the optimised one.
    if !shown(cargo().args(["build", "--release", "--locked", "-p", "vhost-rdma"]))? {
        return Ok(false);
    }
    let mut cmd = cargo();
    cmd.args([
        "run",
        "--release",
        "--locked",
        "--quiet",
        "-p",
        "virtual-guest",
        "--bin",
        "bench",
        "--",
    ]);
    if let Some(path) = json {
        // The program runs in the workspace's root.
        cmd.arg("--json").arg(std::path::absolute(path)?);
    }
    shown(cmd.args(rest))
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
