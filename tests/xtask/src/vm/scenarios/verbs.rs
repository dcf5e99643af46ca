//! What no suite of others looks at, in one guest that talks to itself.
//!
//! | part | what is looked at |
//! |---|---|
//! | `vrdma-verbs` | moderation of completion events, CQ overflow, SRQ limit and resize, last WQE, SQD and SQE |
//! | `resources-check.py` | `rdma resource show`, `rdma statistic`, the counters in sysfs |
//! | namespaces | the RDMA device and its network interface move to a network namespace, work there, and come back |
//!
//! Each line `ok NAME` or `fail NAME: why` of a part is a row; a part that ends without a line for its end is a failure of its own.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::fixture::{Fixture, Wish};
use crate::cache::Cache;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::guest::Guest;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Release of the guest
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// vCPUs of the guest
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// Only the parts whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Default for Args {
    fn default() -> Self {
        Self { debian: Debian::default(), cpus: 1, only: None, keep: false, json: None }
    }
}

const RESOURCES: &str = include_str!("../../../../guest-programs/resources-check.py");
const NAMESPACES: &str = include_str!("../../../../guest-programs/netns-check.sh");
const PART: Duration = Duration::from_secs(240);

/// Programs by name; `{dev}` and `{gid}` are the guest's device and the index of its IPv4 GID.
const PARTS: &[(&str, &str)] = &[
    ("events", "exec /host/products/vrdma-verbs -d {dev} -g {gid}"),
    ("resources", "exec python3 -W ignore /host/resources-check.py {dev} {gid}"),
    // Last: the device ends up with other GID indices.
    ("namespaces", "exec sh /host/netns-check.sh {dev}"),
];

impl Args {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        let wish = Wish { debian: self.debian, guests: 1, cpus: self.cpus, keep: self.keep };
        let mut fixture = Fixture::start(cache, wish)?;
        let devices = fixture.attach()?;
        let mut table = Vec::new();
        let chosen = |name: &str| self.only.as_ref().is_none_or(|o| name.contains(o.as_str()));
        for (guest, (dev, gid)) in fixture.lab.guests.iter_mut().zip(&devices) {
            std::fs::write(guest.share().join("resources-check.py"), RESOURCES)?;
            std::fs::write(guest.share().join("netns-check.sh"), NAMESPACES)?;
            for (name, command) in PARTS.iter().filter(|(name, _)| chosen(name)) {
                let command = command.replace("{dev}", dev).replace("{gid}", gid);
                part(guest, (name, &command), PART, &mut table)?;
            }
        }
        let clean = fixture.clean();
        rows::print_table(&table, "vhost-rdma", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(clean && !table.is_empty() && table.iter().all(|r| r.ok))
    }
}

/// Runs a part, a name and a command, and takes its verdicts as rows.
pub(super) fn part(
    guest: &mut Guest,
    (name, command): (&str, &str),
    wait: Duration,
    table: &mut Vec<Row>,
) -> Result<()> {
    let out = guest.run(&format!("ulimit -l unlimited\n{command}\n"), wait)?;
    let lines = verdicts(&out.text);
    for (line, ok) in &lines {
        table.push(row(format!("{name}: {line}"), *ok));
    }
    if !out.ok() || lines.is_empty() {
        println!("{name}: {:?}\n{}", out.status, out.text);
        table.push(row(format!("{name}: end"), false));
    }
    Ok(())
}

/// The names behind `ok` and `fail`.
fn verdicts(text: &str) -> Vec<(String, bool)> {
    let verdict = |line: &str| {
        let bad = line.strip_prefix("fail ").map(|l| l.split(": ").next().unwrap_or(l));
        let good = line.strip_prefix("ok ");
        good.or(bad).map(|name| (name.trim().to_owned(), good.is_some()))
    };
    text.lines().filter_map(verdict).collect()
}

fn row(name: String, ok: bool) -> Row {
    Row {
        name,
        ok,
        value: None,
        reference: None,
        ratio: None,
        unit: String::new(),
        target: String::new(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn lines_become_verdicts() {
        let found = super::verdicts("noise\nok qp connected\nfail cq: nothing: at all\nokay\n");
        assert_eq!(found, [("qp connected".to_owned(), true), ("cq".to_owned(), false)]);
    }
}
