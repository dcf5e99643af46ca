//! Machines in which a DMA address is no guest physical address: that the device is refused as the
//! specification says (docs/virtio-rdma.md, 3), with a line that says why, and that nobody suffers.
//!
//! Machines, and who refuses:
//!
//! - `iommu_platform=on` for the NIC, with a vIOMMU or without: QEMU, since the device lacks
//!   `VIRTIO_F_ACCESS_PLATFORM`
//! - a vIOMMU that translates, and a NIC that is not behind it: the driver, in its probe
//! - a kernel that bounces all DMA: the driver, in its probe
//!
//! A guest whose driver refused goes on; the daemon does all along, and at the end serves the same
//! NICs in machines without a vIOMMU.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::fixture::{self, Fixture, Options, kernel_is_clean};
use crate::cache::Cache;
use crate::exec;
use crate::rows::{self, Row};
use crate::vm::guest::{self, Guest};
use crate::vm::peers;
use crate::vm::programs::PROGRAMS;
use crate::vm::{NAMES, Nic, Plan};

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
}

const SHORT: Duration = Duration::from_secs(30);
const NIC: &str = "vhost-user-test-device-pci,";
const TRAFFIC: [&str; 2] = ["vrdma-check write", "vrdma-check send"];

/// What the driver says of a device that it refuses.
const REASON: &str = "dmesg | grep 'virtio_rdma virtio' | grep -v 'probe with driver'";

/// The driver is there, and has no device; the guest goes on.
const NO_DEVICE: &str = "set -e
test -d /sys/bus/virtio/drivers/virtio_rdma
test -z \"$(ls -d /sys/bus/virtio/drivers/virtio_rdma/virtio* 2>/dev/null)\"
test -z \"$(ls /sys/class/infiniband 2>/dev/null)\"
rmmod virtio_rdma";

/// Who refuses, by saying what.
#[derive(Debug, Clone, Copy)]
enum Refusal {
    Monitor(&'static str),
    Driver(&'static str),
}
use Refusal::{Driver, Monitor};

struct Machine {
    /// A device before all others.
    iommu: Option<&'static str>,
    /// What the NIC's option ends with.
    nic: &'static str,
    /// For the kernel's command line.
    words: &'static str,
}

const BEHIND_INTEL: Machine =
    Machine { iommu: Some("intel-iommu"), nic: ",iommu_platform=on", words: "intel_iommu=on" };
const BEHIND_VIRTIO: Machine =
    Machine { iommu: Some("virtio-iommu-pci"), nic: ",iommu_platform=on", words: "" };
const BESIDE_INTEL: Machine =
    Machine { iommu: Some("intel-iommu"), nic: "", words: "intel_iommu=on iommu=nopt" };
const BOUNCING: Machine = Machine { iommu: None, nic: "", words: "swiotlb=force" };

const PLATFORM: Machine = Machine { iommu: None, nic: ",iommu_platform=on", words: "" };
const BARE: Machine = Machine { iommu: None, nic: "", words: "" };

const UNSUPPORTED: &str = "iommu_platform=true is not supported by the device";
const NOT_PHYSICAL: &str = "DMA addresses are not guest physical addresses (IOMMU or narrow DMA \
                            mask), and the device does not offer VIRTIO_F_ACCESS_PLATFORM";
const BOUNCED: &str = "bounce buffers (swiotlb=force, encrypted memory) or incoherent DMA";

const MACHINES: &[(&str, &Machine, Refusal)] = &[
    ("intel-iommu, iommu_platform=on", &BEHIND_INTEL, Monitor(UNSUPPORTED)),
    ("virtio-iommu, iommu_platform=on", &BEHIND_VIRTIO, Monitor(UNSUPPORTED)),
    ("no vIOMMU, iommu_platform=on", &PLATFORM, Monitor(UNSUPPORTED)),
    ("intel-iommu that translates", &BESIDE_INTEL, Driver(NOT_PHYSICAL)),
    ("bounce buffers", &BOUNCING, Driver(BOUNCED)),
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut fixture = Fixture::start(cache, self.options.wish(0))?;
        for n in 0..2 {
            fixture.daemon.add_nic(&fixture::nic(n), "red", u8::try_from(n + 1)?)?;
        }
        let mut table = Vec::new();
        for (name, machine, refusal) in MACHINES.iter().filter(|m| self.options.chosen(m.0)) {
            fixture.lab.shut_down();
            let booted = boot(&mut fixture, 1, machine, &self.options);
            table.push(row(name, &refused(&mut fixture, booted, *refusal))?);
        }
        fixture.lab.shut_down();
        table.push(row("no vIOMMU, the same NICs", &served(&mut fixture, &self.options))?);
        let clean = fixture.clean();
        rows::print_table(&table, "ok", "-");
        self.options.write(&table)?;
        Ok(clean && table.iter().all(|r| r.ok))
    }
}

/// Boots `n` guests with the NICs of the fixture.
fn boot(fixture: &mut Fixture, n: usize, machine: &Machine, own: &Options) -> Result<()> {
    let mut nics = Vec::new();
    for number in 0..n {
        let here = guest::cable(fixture.lab.run.path(), NAMES[number]);
        let there = guest::cable(fixture.lab.run.path(), NAMES[number ^ 1]);
        let mut options = fixture.daemon.qemu_args(&fixture::nic(number), &here, &there)?;
        change(&mut options, machine)?;
        nics.push(Nic::Options(options));
    }
    let plan = Plan { image: fixture.lab.image(own.debian)?, cpus: own.cpus, nics };
    fixture.lab.boot_with(&plan, machine.words)?;
    fixture.lab.deliver(&fixture.products)
}

/// The daemon's options as they are for this machine.
fn change(options: &mut Vec<String>, machine: &Machine) -> Result<()> {
    let nic = options.iter_mut().find(|o| o.starts_with(NIC)).context("no NIC in the options")?;
    nic.push_str(machine.nic);
    if let Some(iommu) = machine.iommu {
        options.splice(..0, ["-device".to_owned(), iommu.to_owned()]);
    }
    Ok(())
}

fn refused(fixture: &mut Fixture, booted: Result<()>, refusal: Refusal) -> Result<()> {
    match refusal {
        Monitor(reason) => match booted {
            Ok(()) => bail!("QEMU took it"),
            Err(e) if format!("{e:#}").contains(reason) => {}
            Err(e) => return Err(e.context(format!("QEMU does not say `{reason}`"))),
        },
        Driver(reason) => {
            booted?;
            driver_refuses(first(fixture)?, reason)?;
        }
    }
    fixture.daemon.check_alive()?;
    let objects = fixture.daemon.nic(&fixture::nic(0))?.objects;
    ensure!(objects == Default::default(), "the NIC has {objects:?}");
    Ok(())
}

fn first(fixture: &mut Fixture) -> Result<&mut Guest> {
    fixture.lab.guests.first_mut().context("there is no guest")
}

fn driver_refuses(guest: &mut Guest, reason: &str) -> Result<()> {
    peers::load_ours(guest)?;
    let said = guest.must(REASON, SHORT)?;
    ensure!(said.contains(reason), "the driver does not say `{reason}`, but\n{said}");
    guest.must(NO_DEVICE, SHORT)?;
    ensure!(kernel_is_clean(guest), "the guest's kernel complained");
    Ok(())
}

/// Checked traffic between machines as they should be.
fn served(fixture: &mut Fixture, own: &Options) -> Result<()> {
    boot(fixture, 2, &BARE, own)?;
    let (a, b) = fixture.lab.pair()?;
    let devices = peers::attach_ours(a, b)?;
    for name in TRAFFIC {
        let program = PROGRAMS.iter().find(|p| p.name == name).context("no such program")?;
        let ran = peers::run(a, b, &devices, program, program.n, None)?;
        ensure!(ran.fault.is_none(), "{name}: {}", ran.fault.unwrap_or_default());
    }
    Ok(())
}

fn row(name: &str, result: &Result<()>) -> Result<Row> {
    exec::check_interrupt()?;
    match result {
        Ok(()) => eprintln!("    {name}: ok"),
        Err(e) => eprintln!("    {name}: FAILED\n{e:#}"),
    }
    Ok(Row::verdict(name, result.is_ok()))
}
