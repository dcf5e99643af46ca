//! rdma-core's own Python suite, as a release ships it, with one NIC.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::container::Container;
use super::release::Release;
use crate::exec::workspace;
use crate::rows::Row;
use crate::verdicts::{Found, RUNNER, drift, parse, read_pins};

const WAIT: Duration = Duration::from_secs(900);
/// dh_compress leaves some of the tests gzipped, and a gzipped module cannot be imported.
const SCRIPT: &str = "mkdir /tmp/pyverbs
cp -r /usr/share/doc/rdma-core/tests /tmp/pyverbs/
gunzip -f /tmp/pyverbs/tests/*.gz
# Asked for interfaces of devices, it fails on a kernel without RDMA where there are simply none.
mkdir /run/bin
printf '#!/bin/sh\\necho []\\n' > /run/bin/rdma
chmod +x /run/bin/rdma
PATH=/run/bin:$PATH exec python3 /host/pyverbs-run.py --dir /tmp/pyverbs --dev vhost_rdma0 \
  --results /host/pyverbs.jsonl --only \"$ONLY\"";

fn pins(release: Release) -> PathBuf {
    workspace().join(format!("tests/guest-programs/pyverbs-skips-process-{}.txt", release.name()))
}

/// Its row, if any test matches, and whether all is well.
pub(super) fn run(container: &Container, only: Option<&str>) -> Result<(Option<Row>, bool)> {
    let share = container.share();
    let results = share.join("pyverbs.jsonl");
    fs::write(share.join("pyverbs-run.py"), RUNNER)?;
    let _old = fs::remove_file(&results);
    let begin = Instant::now();
    let script = format!("ONLY='{}'\n{SCRIPT}", only.unwrap_or_default());
    let text = container.run(1, &script, WAIT).context("the suite's runner")?;
    let verdicts = parse(&results)?;
    if verdicts.is_empty() {
        return Ok((None, true));
    }
    print!("{text}");
    let file = pins(container.release);
    let drift = drift(&verdicts, &read_pins(&file)?, only.is_none());
    let name = format!("{}: rdma-core's Python suite", container.release.name());
    let found = Found { of: &name, verdicts: &verdicts, drift: &drift };
    let least = only.is_none().then(|| container.release.least());
    let held = found.sum_up(least, &file);
    Ok((Some(Row::timed(name, held, begin.elapsed().as_secs_f64())), held))
}
