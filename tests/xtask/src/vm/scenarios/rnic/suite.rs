//! Every test of the virtual guest, its NICs backed by `rnic:rxe0`, over real sockets in the host VM.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::known::KNOWN;
use super::{Args, row};
use crate::cache::Cache;
use crate::exec::{run_logged, tied, workspace};
use crate::rows::Row;
use crate::vm::guest::Guest;

const BUILD_WAIT: Duration = Duration::from_secs(1800);
/// One test has 16 minutes of its own at most, and a program of tests an hour: emulated, 20000 interrupts take their time.
const TESTS_END: Duration = Duration::from_secs(3600);

/// Each test in a process of its own: one that hangs or dies takes no other with it.
const TESTS: &str = r#"ulimit -l unlimited
export VHOST_RDMA_BIN=/host/products/vhost-rdma VHOST_RDMA_BACKING=rnic:rxe0 VHOST_RDMA_PATIENCE=8
cp -f /host/products/@BINARY@ /tmp/t && chmod +x /tmp/t
for t in $(/tmp/t --list --format terse 2>/dev/null | sed -n 's/: test$//p'); do
  case "$t" in *@FILTER@*) ;; *) continue;; esac
  if timeout 1000 /tmp/t --exact "$t" > /tmp/log 2>&1; then
    grep -q '1 passed' /tmp/log && echo "ok $t" || echo "ignored $t"
  else
    echo "fail $t"; grep -v '^running\|^$\|^test \|^failures\|RUST_BACKTRACE' /tmp/log | head -25 | sed 's/^/    | /'
  fi
done
echo "end"
"#;

#[derive(Debug, Deserialize)]
struct Artifact {
    reason: String,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

/// The virtual guest's programs: those of its tests, and `pingpong`.
pub(super) fn virtual_guest(cache: &Cache) -> Result<(Vec<PathBuf>, PathBuf)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let list = cache.log("virtual-guest-artifacts");
    let script = format!(
        "\"$0\" test -q --locked -p virtual-guest --no-run --message-format json > '{0}' && \"$0\" build -q --locked -p virtual-guest --bin pingpong --message-format json >> '{0}'",
        list.display()
    );
    let mut cmd = tied("sh");
    cmd.current_dir(workspace()).args(["-ec", &script]).arg(cargo);
    let log = cache.log("virtual-guest-build");
    run_logged(&mut cmd, "building the virtual guest", &log, BUILD_WAIT)?;
    let text = std::fs::read_to_string(&list)?;
    let made = text.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let (mut tests, mut pingpong) = (Vec::new(), None);
    for artifact in made.filter(|artifact| artifact.reason == "compiler-artifact") {
        let Artifact {
            executable: Some(path), target: Some(target), profile: Some(profile), ..
        } = artifact
        else {
            continue;
        };
        if target.name == "pingpong" && !profile.test {
            pingpong = Some(path);
        } else if profile.test && path.to_string_lossy().contains("/deps/") {
            tests.push(path);
        }
    }
    Ok((tests, pingpong.context("cargo left no pingpong program")?))
}

impl Args {
    /// The tests of one program, one row each.
    pub(super) fn whole_stack(
        &self,
        host: &mut Guest,
        program: &Path,
        table: &mut Vec<Row>,
    ) -> Result<()> {
        let file = program.file_name().context("a program has a name")?.to_string_lossy();
        let suite = file.rsplit_once('-').map_or(&*file, |(name, _)| name);
        let filter = match &self.only {
            Some(only) if suite.contains(only.as_str()) => "",
            Some(only) => only.as_str(),
            None => "",
        };
        let script = TESTS.replace("@BINARY@", &file).replace("@FILTER@", filter);
        let out = host.run(&script, TESTS_END)?;
        let mut ended = false;
        for line in out.text.lines() {
            match line.split_once(' ') {
                Some((verdict @ ("ok" | "fail"), name)) => {
                    let ok = judge(suite, name, verdict == "ok");
                    table.push(row(&format!("{suite}::{name}"), ok));
                }
                None if line == "end" => ended = true,
                _ => eprintln!("{line}"),
            }
        }
        if !ended {
            table.push(row(&format!("{suite} (its end)"), false));
        }
        Ok(())
    }
}

fn judge(suite: &str, name: &str, passed: bool) -> bool {
    let full = format!("{suite}::{name}");
    match KNOWN.iter().find(|(test, _)| *test == full) {
        Some((_, why)) if passed => {
            eprintln!(
                "{full} passes, but is listed as one that cannot ({why}): take it off the list"
            );
            false
        }
        Some((_, why)) => {
            eprintln!("    {full}: as known: {why}");
            true
        }
        None => {
            if !passed {
                eprintln!("{full} FAILED");
            }
            passed
        }
    }
}
