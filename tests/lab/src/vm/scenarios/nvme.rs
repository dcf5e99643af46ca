//! Kernel storage over our device: nvme-rdma in guest a, nvmet-rdma on a RAM disk in guest b.
//!
//! It is the kernel user with the widest appetite: fast registration with a key of its own per
//! request, SEND_WITH_INV from the target, a queue and a completion vector per CPU, QPs drained on
//! every disconnect. fio writes patterns with checksums and reads them back, so a wrong byte is an
//! error and not a number; then a file system is made, filled, unmounted, checked and compared.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::fixture::{self, Fixture, Wish};
use crate::cache::Cache;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::daemon::Counters;
use crate::vm::guest::{Guest, Output};

/// What it can be told
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Release of the guests
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// vCPUs of each guest; the host makes an I/O queue per vCPU
    #[arg(long, default_value_t = 2)]
    cpus: u8,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Default for Args {
    fn default() -> Self {
        Self { debian: Debian::default(), cpus: 2, keep: false, json: None }
    }
}

const STEP: Duration = Duration::from_secs(120);

/// nvmet's configuration is a file system; the queue size keeps the target's memory small.
const TARGET: &str = "set -e
modprobe brd rd_nr=1 rd_size=131072
modprobe -a nvmet nvmet-rdma
mount -t configfs configfs /sys/kernel/config 2>/dev/null || mountpoint -q /sys/kernel/config
cd /sys/kernel/config/nvmet
mkdir subsystems/lab subsystems/lab/namespaces/1
echo 1 > subsystems/lab/attr_allow_any_host
echo -n /dev/ram0 > subsystems/lab/namespaces/1/device_path
echo 1 > subsystems/lab/namespaces/1/enable
mkdir ports/1
echo rdma > ports/1/addr_trtype
echo ipv4 > ports/1/addr_adrfam
echo 10.9.0.2 > ports/1/addr_traddr
echo 4420 > ports/1/addr_trsvcid
ln -s /sys/kernel/config/nvmet/subsystems/lab ports/1/subsystems/lab
";

/// Prints the block device; it appears a moment after the connection.
const CONNECT: &str = "set -e
modprobe nvme-rdma
nvme connect -t rdma -n lab -a 10.9.0.2 -s 4420 -i {queues} >&2
n=0
until [ -b /dev/nvme0n1 ]; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ]; done
cat /sys/class/nvme/nvme0/queue_count
";

const FILES: &str = "set -e
mke2fs -q -t ext4 /dev/nvme0n1
mkdir -p /tmp/m
mount /dev/nvme0n1 /tmp/m
cp -r /usr/share/doc/rdma-core /usr/lib/python3/dist-packages /tmp/m/
dd if=/dev/urandom of=/tmp/random bs=1M count=8 2>/dev/null
cp /tmp/random /tmp/m/random
umount /tmp/m
e2fsck -f -n /dev/nvme0n1
mount /dev/nvme0n1 /tmp/m
cmp /tmp/random /tmp/m/random
diff -r /usr/share/doc/rdma-core /tmp/m/rdma-core
diff -r /usr/lib/python3/dist-packages /tmp/m/dist-packages
umount /tmp/m
";

/// A fio job: name, options, and the bytes that it must write and read.
const JOBS: &[(&str, &str, u64)] = &[
    ("4 KiB random", "--rw=randwrite --bs=4k --size=8m", 8 << 20),
    ("64 KiB random", "--rw=randwrite --bs=64k --size=32m", 32 << 20),
    ("1 MiB sequential", "--rw=write --bs=1m --size=64m", 64 << 20),
    (
        "mixed sizes, two jobs",
        "--rw=randrw --bsrange=512-128k --size=8m --numjobs=2 --offset_increment=32m",
        8 << 20,
    ),
];

/// The part of fio's report that counts.
#[derive(Debug, Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Debug, Deserialize)]
struct Job {
    error: i64,
    total_err: Option<i64>,
    read: Direction,
    write: Direction,
}

#[derive(Debug, Deserialize)]
struct Direction {
    io_bytes: u64,
    bw_bytes: f64,
}

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let wish = Wish {
            debian: self.debian,
            guests: 2,
            cpus: self.cpus,
            keep: self.keep,
            upgrades: true,
            ..Wish::default()
        };
        let mut fixture = Fixture::start(cache, wish)?;
        fixture.attach()?;
        let table = self.steps(&mut fixture);
        let clean = fixture.clean();
        let table = table.inspect_err(|_| {
            eprintln!("the end of the daemon's log:\n{}", fixture.daemon.log_tail(25));
        })?;
        rows::print_table(&table, "vhost-rdma", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(clean && table.iter().all(|r| r.ok))
    }

    fn steps(&self, fixture: &mut Fixture) -> Result<Vec<Row>> {
        let (a, b) = fixture.lab.pair()?;
        b.must(TARGET, STEP)?;
        self.connect(a)?;
        let mut table = Vec::new();
        for (name, options, bytes) in JOBS {
            let before = fixture.daemon.counters(&fixture::nic(0))?;
            let mut row = fio(a, name, options, *bytes)?;
            let moved = fixture.daemon.counters(&fixture::nic(0))?.since(&before);
            row.ok &= through_us(name, &moved, *bytes);
            eprintln!("    {name}: {}", if row.ok { "ok" } else { "FAILED" });
            table.push(row);
        }
        let row = upgraded(fixture)?;
        eprintln!("    {}: {}", row.name, if row.ok { "ok" } else { "FAILED" });
        table.push(row);
        let (a, b) = fixture.lab.pair()?;
        table.push(step(a, "ext4: make, fill, check, compare", FILES)?);
        table.push(step(a, "disconnect", "nvme disconnect -n lab && test ! -e /dev/nvme0n1")?);
        self.connect(a)?;
        table.push(step(a, "data is there after a new connection", "e2fsck -f -n /dev/nvme0n1")?);
        table.push(step(a, "disconnect again", "nvme disconnect -n lab")?);
        table.push(step(
            b,
            "the target lets go of every QP",
            "rm /sys/kernel/config/nvmet/ports/1/subsystems/lab
             n=0; while rdma resource show qp | grep -q nvmet; do sleep 0.2; n=$((n+1)); \
                 [ $n -lt 50 ] || exit 1; done
             rdma resource show qp",
        )?);
        Ok(table)
    }

    fn connect(&self, a: &mut Guest) -> Result<()> {
        let text = a.must(&CONNECT.replace("{queues}", &self.cpus.to_string()), STEP)?;
        let count = text.lines().last().unwrap_or_default().trim();
        // The admin queue counts too.
        if count != (self.cpus + 1).to_string() {
            bail!("the controller has {count} queues instead of {}", self.cpus + 1);
        }
        Ok(())
    }
}

fn fio(a: &mut Guest, name: &str, options: &str, bytes: u64) -> Result<Row> {
    let out = a.run(&line(options), STEP)?;
    report(a, (name, bytes), &out)
}

fn line(options: &str) -> String {
    format!(
        "fio --name=lab --filename=/dev/nvme0n1 --ioengine=libaio --direct=1 --iodepth=8 \
         --verify=crc32c --do_verify=1 --verify_fatal=1 {options} --output-format=json \
         --output=/host/fio.json"
    )
}

/// The network's process and the daemon are replaced, several times, while data is written and then
/// while it is read and compared. The kernels notice nothing, and no byte is wrong.
fn upgraded(fixture: &mut Fixture) -> Result<Row> {
    const NAME: &str = "fio verifies while the daemon is upgraded";
    const BYTES: u64 = 64 << 20;
    /// What the kernel says when a queue has failed.
    const TOLD: &str =
        "dmesg | grep -ciE 'nvme.*(reconnect|error recovery|timeout|I/O error)' || true";
    let (a, _) = fixture.lab.pair()?;
    let before = a.must(TOLD, STEP)?;
    let job = a.spawn(&line("--rw=randwrite --bs=16k --size=64m --rate=8m,8m"))?;
    let mut pauses = Vec::new();
    let ended = loop {
        let (a, _) = fixture.lab.pair()?;
        if let Some(status) = a.finished(job)? {
            break status;
        }
        std::thread::sleep(Duration::from_millis(700));
        let daemon = &fixture.daemon;
        let said = if pauses.len() % 2 == 0 {
            daemon.cli(&["network", "restart", "red", "--json"])?
        } else {
            fixture.install_other(pauses.len() / 2)?;
            daemon.cli(&["upgrade", "--json"])?
        };
        let said: serde_json::Value = serde_json::from_str(&said).context("its JSON")?;
        pauses
            .push(said["pause_us"].as_u64().context("it does not say how long NICs stood still")?);
    };
    let (a, _) = fixture.lab.pair()?;
    let out = a.wait(job, STEP)?;
    let mut row = report(a, (NAME, BYTES), &out)?;
    let after = a.must(TOLD, STEP)?;
    row.ok &= ended == 0 && pauses.len() >= 6 && before == after;
    let longest = pauses.iter().max().copied().unwrap_or_default();
    eprintln!("    {} times while fio ran, the longest pause {longest} us", pauses.len());
    if before != after {
        eprintln!(
            "the host's kernel noticed: {} complaints, {} before",
            after.trim(),
            before.trim()
        );
    }
    Ok(row)
}

/// What fio has to say of a job.
fn report(a: &Guest, (name, bytes): (&str, u64), out: &Output) -> Result<Row> {
    let mut row = Row { unit: "MB/s".into(), ..Row::verdict(name, out.ok()) };
    if !out.ok() {
        eprintln!("fio ended with {:?}:\n{}", out.status, out.text);
        return Ok(row);
    }
    let text = std::fs::read_to_string(a.share().join("fio.json"))?;
    // fio writes notes before the JSON.
    let json = text.find('{').and_then(|at| text.get(at..)).unwrap_or_default();
    let report: Report = serde_json::from_str(json)
        .with_context(|| format!("fio's report is not what it should be:\n{text}"))?;
    let written: u64 = report.jobs.iter().map(|j| j.write.io_bytes).sum();
    let read: u64 = report.jobs.iter().map(|j| j.read.io_bytes).sum();
    let errors =
        report.jobs.iter().any(|j| j.error != 0 || j.total_err.is_some_and(|errors| errors != 0));
    row.ok = !errors && written > 0 && read > 0 && written + read >= 2 * bytes.min(written);
    row.value = Some(report.jobs.iter().map(|j| j.write.bw_bytes).sum::<f64>() / 1e6);
    if !row.ok {
        eprintln!("fio wrote {written} and read {read} bytes, errors: {errors}");
    }
    Ok(row)
}

/// The payload must have gone through our device and not by another way.
fn through_us(name: &str, moved: &Counters, bytes: u64) -> bool {
    let ok = moved.bytes() >= bytes;
    if !ok {
        eprintln!("{name}: only {} bytes of {bytes} went through the NIC", moved.bytes());
    }
    ok
}

fn step(guest: &mut Guest, name: &str, script: &str) -> Result<Row> {
    let out = guest.run(script, STEP)?;
    eprintln!("    {name}: {}", if out.ok() { "ok" } else { "FAILED" });
    if !out.ok() {
        eprintln!("{:?}\n{}", out.status, out.text);
    }
    Ok(Row::verdict(name, out.ok()))
}
