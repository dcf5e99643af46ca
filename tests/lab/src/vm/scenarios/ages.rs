//! Kernel driver and device of different ages (docs/virtio-rdma.md, 5.9): each with one feature
//! more than there are, beside each as it is.
//!
//! The feature is a label. `vhost-rdma/src/device/ctrl/later.rs` is the device that has it, a
//! cargo feature that no release is built with; `later-driver.patch` the driver that wants it, and
//! that tells in its kernel's log what it found. Guest a has the later driver, guest b today's.
//! They write to each other on today's device, then on the later one: four meetings, and in each
//! the data arrives.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::fixture::{Fixture, Options, Wish};
use crate::cache::Cache;
use crate::products;
use crate::rows::{self, Row};
use crate::vm::guest::Guest;
use crate::vm::peers::{self, Devices};
use crate::vm::programs::PROGRAMS;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
}

const SHORT: Duration = Duration::from_secs(30);
const TRAFFIC: [&str; 3] = ["vrdma-check write", "vrdma-check read", "vrdma-check send"];

/// What the later driver says.
const LABELS: &str = "dmesg | sed -n 's/.*label: //p' | sort -u";

/// The bits that driver and device agreed on, of which one is the label's (the last of 64).
const NEGOTIATED: &str = "cut -c 64 /sys/bus/virtio/drivers/virtio_rdma/virtio*/features";

/// What a driver must have found with a device.
type Meeting = (&'static str, fn(&mut Guest, &Age) -> Result<()>);

/// A device, and what it is to the later driver.
struct Age {
    features: &'static [&'static str],
    /// Guest a's meeting and guest b's.
    meetings: [Meeting; 2],
    /// As the later driver tells it.
    found: &'static [&'static str],
    /// The last feature bit in guest a.
    bit: &'static str,
}

/// The later device first: what stays in the target directory is today's.
const DEVICES: &[Age] = &[
    Age {
        features: &["later-device"],
        meetings: [
            ("a later driver, a later device", meets_later),
            ("today's driver, a later device", meets),
        ],
        found: &[
            "a QP with one, a response of 32 bytes",
            "feature negotiated, capability in effect, a label is taken",
        ],
        bit: "1",
    },
    Age {
        features: &[],
        meetings: [
            ("a later driver, today's device", meets_later),
            ("today's driver, today's device", meets),
        ],
        found: &[
            "a QP with none, a response of 24 bytes",
            "feature missing, capability missing, a label is refused",
        ],
        bit: "0",
    },
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let module = products::later_module(cache, self.options.debian)?;
        let (mut table, mut clean) = (Vec::new(), true);
        let wanted = |(name, _): &Meeting| self.options.chosen(name);
        for age in DEVICES.iter().filter(|age| age.meetings.iter().any(wanted)) {
            let wish = Wish { features: age.features, ..self.options.wish(2) };
            let mut fixture = Fixture::start(cache, wish)?;
            let guest = fixture.lab.guests.first().context("there is no guest")?;
            std::fs::copy(&module, guest.share().join("products/virtio_rdma.ko"))?;
            let (a, b) = fixture.lab.pair()?;
            let devices = peers::attach_ours(a, b)?;
            let traffic = traffic(a, b, &devices);
            // Whether the device is the later one is what the later driver finds.
            let [(with_later, later), (with_todays, todays)] = age.meetings;
            let later = later(a, age);
            let todays = todays(b, age);
            table.push(row(with_later, &[&traffic, &later]));
            table.push(row(with_todays, &[&traffic, &later, &todays]));
            clean &= fixture.clean();
        }
        ensure!(!table.is_empty(), "no row's name contains {:?}", self.options.only);
        rows::print_table(&table, "ok", "-");
        self.options.write(&table)?;
        Ok(clean && table.iter().all(|r| r.ok))
    }
}

/// Checked transfers from a to b.
fn traffic(a: &mut Guest, b: &mut Guest, devices: &Devices) -> Result<()> {
    for name in TRAFFIC {
        let program = PROGRAMS.iter().find(|p| p.name == name).context("no such program")?;
        let ran = peers::run(a, b, devices, program, program.n, None)?;
        ensure!(ran.fault.is_none(), "{name}: {}", ran.fault.unwrap_or_default());
    }
    Ok(())
}

/// The later driver found what there is, and asks for nothing else.
fn meets_later(guest: &mut Guest, age: &Age) -> Result<()> {
    let said = guest.must(LABELS, SHORT)?;
    let said: Vec<&str> = said.lines().collect();
    ensure!(said == age.found, "the driver found {said:?}");
    agreed(guest, age.bit)
}

/// Today's driver takes no feature that it does not know, and has nothing to say of it.
fn meets(guest: &mut Guest, _: &Age) -> Result<()> {
    let said = guest.must(LABELS, SHORT)?;
    ensure!(said.is_empty(), "today's driver speaks of labels: {said}");
    agreed(guest, "0")
}

fn agreed(guest: &mut Guest, bit: &str) -> Result<()> {
    let found = guest.must(NEGOTIATED, SHORT)?;
    ensure!(found.trim() == bit, "the last feature bit is {found:?}");
    Ok(())
}

fn row(name: &str, results: &[&Result<()>]) -> Row {
    let faults: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    match faults.as_slice() {
        [] => eprintln!("    {name}: ok"),
        faults => eprintln!("    {name}: FAILED\n{faults:#?}"),
    }
    Row::verdict(name, faults.is_empty())
}
