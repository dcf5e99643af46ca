//! What no suite of others looks at, in one guest that talks to itself.
//!
//! Parts, and what is looked at:
//!
//! - `vrdma-verbs`: moderation of completion events, CQ overflow, SRQ limit and resize, last WQE,
//!   SQD and SQE, numbers of three processes, dma-buf
//! - `resources-check.py`: `rdma resource show`, `rdma statistic`, the counters in sysfs
//! - namespaces: the RDMA device and its network interface move to a network namespace, work there,
//!   and come back
//! - companion: other interfaces with the MAC address of ours are not taken for it
//!
//! Each line `ok NAME` or `fail NAME: why` of a part is a row; a part that ends without a line for
//! its end is a failure of its own.

use std::time::Duration;

use anyhow::Result;

use super::fixture::{Fixture, Options, Wish};
use crate::cache::Cache;
use crate::debug_kernel::Kernel;
use crate::rows::{self, Row};
use crate::vm::guest::Guest;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    #[command(flatten)]
    /// What every scenario with guests can be told
    pub options: Options,
    /// The kernel of the guest
    #[arg(long, value_enum, default_value_t)]
    pub kernel: Kernel,
}

const RESOURCES: &str = include_str!("../../../../guest-programs/resources-check.py");
const NAMESPACES: &str = include_str!("../../../../guest-programs/netns-check.sh");
const COMPANION: &str = include_str!("../../../../guest-programs/companion-check.sh");
const PART: Duration = Duration::from_secs(240);

/// Programs by name; `{dev}` and `{gid}` are the guest's device and the index of its IPv4 GID.
const PARTS: &[(&str, &str)] = &[
    ("events", "exec /host/products/vrdma-verbs -d {dev} -g {gid}"),
    ("resources", "exec python3 -W ignore /host/resources-check.py {dev} {gid}"),
    // Then the device ends up with other GID indices.
    ("namespaces", "exec sh /host/netns-check.sh {dev}"),
    // Last: the driver is loaded anew.
    ("companion", "exec sh /host/companion-check.sh"),
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let wish = Wish { kernel: self.kernel, ..self.options.wish(1) };
        let mut fixture = Fixture::start(cache, wish)?;
        let devices = fixture.attach()?;
        let mut table = Vec::new();
        for (guest, (dev, gid)) in fixture.lab.guests.iter_mut().zip(&devices) {
            std::fs::write(guest.share().join("resources-check.py"), RESOURCES)?;
            std::fs::write(guest.share().join("netns-check.sh"), NAMESPACES)?;
            std::fs::write(guest.share().join("companion-check.sh"), COMPANION)?;
            for (name, command) in PARTS.iter().filter(|(name, _)| self.options.chosen(name)) {
                let command = command.replace("{dev}", dev).replace("{gid}", gid);
                part(guest, (name, &command), PART, &mut table)?;
            }
        }
        let clean = fixture.clean();
        rows::print_table(&table, "vhost-rdma", "-");
        self.options.write(&table)?;
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
        table.push(Row::verdict(format!("{name}: {line}"), *ok));
    }
    if !out.ok() || lines.is_empty() {
        println!("{name}: {:?}\n{}", out.status, out.text);
        table.push(Row::verdict(format!("{name}: end"), false));
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

#[cfg(test)]
mod tests {
    #[test]
    fn lines_become_verdicts() {
        let found = super::verdicts("noise\nok qp connected\nfail cq: nothing: at all\nokay\n");
        assert_eq!(found, [("qp connected".to_owned(), true), ("cq".to_owned(), false)]);
    }
}
