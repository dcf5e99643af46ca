//! A pair of guests with one RDMA device each, and programs run between them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::exec;
use crate::host;
use crate::vm::daemon::{Counters, Daemon};
use crate::vm::guest::{Guest, Job};
use crate::vm::programs::Program;

const SET_UP: Duration = Duration::from_secs(60);
/// In a guest of a guest, too.
const LOAD: Duration = Duration::from_secs(300);
const FOUND: Duration = Duration::from_secs(300);
const LISTEN: Duration = Duration::from_secs(20);
const CLIENT: Duration = Duration::from_secs(90);
const SERVER_END: Duration = Duration::from_secs(15);

/// Modules of the RDMA core that no device pulls in by itself.
const CORE: &str = "modprobe -a ib_uverbs ib_umad rdma_ucm\nulimit -l unlimited\n";

/// Prints the device of `/sys/class/infiniband` and the index of the GID of an IPv4 address. It
/// waits for both: a device is registered by a work item, and its GIDs follow the addresses of the
/// netdev. One process for all entries: a guest of a guest starts three in a second.
const FIND: &str = r#"
n=0
while [ $n -lt 100 ]; do
  g=$(grep -ls ":ffff:@GID@\$" /sys/class/infiniband/*/ports/1/gids/* | head -n 1)
  [ -z "$g" ] || { d=${g%/ports/*}; echo "${d##*/} ${g##*/}"; exit 0; }
  sleep 0.1; n=$((n+1))
done
echo "no RDMA device with the GID @GID@:"; rdma link; dmesg | tail -20
exit 1
"#;

/// What the two guests have.
#[derive(Debug, Clone)]
pub(crate) struct Devices {
    a: (String, String),
    b: (String, String),
}

impl Devices {
    /// The device in guest a (0) or b, and the index of its GID.
    pub(crate) fn of(&self, n: usize) -> &(String, String) {
        if n == 0 { &self.a } else { &self.b }
    }

    /// The device's name in guest a (0) or b.
    pub(crate) fn name(&self, n: usize) -> &str {
        &self.of(n).0
    }

    /// Options that name the device and its IPv4 GID to our own programs.
    pub(crate) fn options(&self, n: usize) -> String {
        let (device, gid) = self.of(n);
        format!("-d {device} -g {gid}")
    }
}

/// What a program did.
#[derive(Debug, Clone)]
pub(crate) struct Ran {
    pub(crate) value: Option<f64>,
    /// Why it does not count, if it does not.
    pub(crate) fault: Option<String>,
}

/// The NICs whose counters must move, and who knows them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Witness<'a> {
    pub(crate) daemon: &'a Daemon,
    pub(crate) client: &'a str,
    pub(crate) server: &'a str,
}

impl Witness<'_> {
    fn read(&self) -> Result<(Counters, Counters)> {
        Ok((self.daemon.counters(self.client)?, self.daemon.counters(self.server)?))
    }
}

const RXE: &str = "modprobe rdma_rxe\nrdma link add rxe0 type rxe netdev eth0\n";

/// Loads rxe on the netdev of both guests.
pub(crate) fn attach_rxe(a: &mut Guest, b: &mut Guest) -> Result<Devices> {
    attach(a, b, &format!("{CORE}{RXE}"))
}

/// Takes rxe away again, so that it and our device are never on one netdev at once.
pub(crate) fn detach_rxe(a: &mut Guest, b: &mut Guest) -> Result<()> {
    for guest in [a, b] {
        guest.must(
            "rdma link delete rxe0 && modprobe -r rdma_rxe \
             && test -z \"$(ls /sys/class/infiniband)\"",
            SET_UP,
        )?;
    }
    Ok(())
}

const OURS: &str = "set -e
test -z \"$(ls /sys/class/infiniband 2>/dev/null)\"
cp /host/products/libvirtio_rdma-rdmav34.so /usr/lib/x86_64-linux-gnu/libibverbs/
cp /host/products/virtio_rdma.driver /etc/libibverbs.d/
insmod /host/products/virtio_rdma.ko
";

/// Loads our driver and installs our provider.
pub(crate) fn attach_ours(a: &mut Guest, b: &mut Guest) -> Result<Devices> {
    attach(a, b, &format!("{CORE}{OURS}"))
}

/// The same in a guest of any number: its device and the index of its IPv4 GID.
pub(crate) fn attach_ours_to(guest: &mut Guest) -> Result<(String, String)> {
    attach_one(guest, &format!("{CORE}{OURS}"))
}

/// The driver and the provider alone.
pub(crate) fn load_ours(guest: &mut Guest) -> Result<()> {
    guest.must(&format!("{CORE}{OURS}"), LOAD).map(|_| ())
}

/// rxe in a guest of any number.
pub(crate) fn attach_rxe_to(guest: &mut Guest) -> Result<(String, String)> {
    attach_one(guest, &format!("{CORE}{RXE}"))
}

fn attach_one(guest: &mut Guest, script: &str) -> Result<(String, String)> {
    guest.must(script, SET_UP)?;
    find_one(guest)
}

/// The device and the GID index of the guest's 10.9.0.x.
fn find_one(guest: &mut Guest) -> Result<(String, String)> {
    let find = format!("ip=$(hostname | tr ab 12)\n{}", FIND.replace("@GID@", "0a09:000$ip"));
    found(guest, &find)
}

/// The device and the GID index of an IPv4 address.
pub(crate) fn find_address(guest: &mut Guest, address: &str) -> Result<(String, String)> {
    let [a, b, c, d] = address.parse::<std::net::Ipv4Addr>()?.octets();
    found(guest, &FIND.replace("@GID@", &format!("{a:02x}{b:02x}:{c:02x}{d:02x}")))
}

fn found(guest: &mut Guest, find: &str) -> Result<(String, String)> {
    let line = guest.must(find, FOUND)?;
    let (dev, gid) = line.trim().split_once(' ').context("the guest did not name its device")?;
    Ok((dev.to_owned(), gid.to_owned()))
}

fn attach(a: &mut Guest, b: &mut Guest, script: &str) -> Result<Devices> {
    for guest in [&mut *a, &mut *b] {
        guest.must(script, SET_UP)?;
    }
    find(a, b)
}

/// Waits for the devices of two guests that have their drivers.
pub(crate) fn find(a: &mut Guest, b: &mut Guest) -> Result<Devices> {
    let devices = Devices { a: find_one(a)?, b: find_one(b)? };
    // Neighbour entries exist before the first datagram that nobody repeats.
    a.must("ping -q -c 2 -i 0.2 -W 5 10.9.0.2", SET_UP)?;
    Ok(devices)
}

/// perftest's own.
const ENDLESS_PORT: u16 = 18515;

/// How long endless traffic waits for a peer that does not answer before it ends: 8 ACK timeouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Half a second, perftest's own.
    Short,
    /// 17 seconds, times what guests that are slow by design take longer.
    Long,
}

impl Patience {
    /// The ACK timeout as perftest takes it, the exponent of 2 in units of 4.096 us; its own is 14.
    fn ack_timeout(self) -> u32 {
        match self {
            Self::Short => 14,
            Self::Long => 19 + exec::patience().ilog2(),
        }
    }
}

/// Traffic from a to b that does not end by itself within the patience of any scenario: the
/// client's and the server's job.
pub(crate) fn endless(
    a: &mut Guest,
    b: &mut Guest,
    devices: &Devices,
    patience: Patience,
) -> Result<(Job, Job)> {
    let timeout = patience.ack_timeout();
    let line = format!("ib_write_bw -d {{dev}} -x {{gid}} -D 600 -s 65536 -F -u {timeout}");
    let server = start_server(b, &devices.b, (&line, ENDLESS_PORT), 0)?;
    let client = a.spawn(&command(&format!("{line} {{peer}}"), &devices.a, 0))?;
    Ok((client, server))
}

/// A script that runs one line of a program list.
pub(crate) fn command(text: &str, device: &(String, String), n: u32) -> String {
    // perftest's own ACK timeout of 67 ms would have each request repeated in a guest of a guest.
    let patient = if text.starts_with("ib_") && host::is_emulated() { " -u 20" } else { "" };
    let line = text
        .replace("{dev}", &device.0)
        .replace("{gid}", &device.1)
        .replace("{n}", &n.to_string())
        .replace("{peer}", "10.9.0.2");
    format!("ulimit -l unlimited\nexport PATH=$PATH:/host/products\nexec {line}{patient}\n")
}

/// Runs one program between the guests with `n` iterations; a program that fails is a [`Ran`] with
/// a fault, an error is a broken lab.
pub(crate) fn run(
    a: &mut Guest,
    b: &mut Guest,
    devices: &Devices,
    program: &Program,
    n: u32,
    witness: Option<Witness<'_>>,
) -> Result<Ran> {
    let before = witness.map(|w| w.read()).transpose()?;
    let server = if program.server.is_empty() {
        None
    } else {
        Some(start_server(b, &devices.b, (program.server, program.port), n)?)
    };
    let start = Instant::now();
    let out = a.run(&command(program.client, &devices.a, n), CLIENT)?;
    let seconds = start.elapsed().as_secs_f64();
    let mut fault = None;
    if !out.ok() {
        fault = Some(format!(
            "client: {}\n{}",
            out.status.map_or_else(|| "no end".into(), |s| format!("exit status {s}")),
            last_lines(&out.text)
        ));
    } else if !out.text.contains(program.expect) {
        fault = Some(format!(
            "client: its output lacks `{}`\n{}",
            program.expect,
            last_lines(&out.text)
        ));
    }
    if let Some(server) = server {
        let limit = if fault.is_some() { Duration::from_secs(1) } else { SERVER_END };
        let end = b.wait(server, limit)?;
        if !end.ok() {
            let how = end.status.map_or_else(|| "no end".into(), |s| format!("exit status {s}"));
            fault = Some(format!(
                "{}server: {how}\n{}",
                fault.unwrap_or_default(),
                last_lines(&end.text)
            ));
        }
    }
    let mut value = None;
    if fault.is_none() {
        match program.figure.read(&out.text, seconds) {
            Ok(v) => value = Some(v),
            Err(e) => fault = Some(format!("client: {e}\n{}", last_lines(&out.text))),
        }
    }
    if let (None, Some(w), Some(before)) = (&fault, witness, before) {
        fault = counter_fault(program.claim.of(n, &out.text), &before, &w.read()?);
    }
    Ok(Ran { value, fault })
}

/// Each end must have moved what the program says it moved: the data is not believed to have gone
/// through our device otherwise.
fn counter_fault(
    (bytes, messages): (u64, u64),
    before: &(Counters, Counters),
    after: &(Counters, Counters),
) -> Option<String> {
    let client = after.0.since(&before.0);
    let server = after.1.since(&before.1);
    let short = [client, server].iter().any(|c| c.bytes() < bytes || c.messages() < messages);
    short.then(|| {
        format!(
            "the NICs' counters grew by less than {bytes} bytes and {messages} messages: client \
             {client:?}, server {server:?}\n"
        )
    })
}

/// Starts a server and waits until it listens.
pub(crate) fn start_server(
    b: &mut Guest,
    device: &(String, String),
    (line, port): (&str, u16),
    n: u32,
) -> Result<Job> {
    let job = b.spawn(&command(line, device, n))?;
    let probe = if port == 0 {
        "rdma resource show cm_id 2>/dev/null | grep -q LISTEN".to_owned()
    } else {
        format!("grep -qi ':{port:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6")
    };
    let wait =
        format!("n=0; until {probe}; do sleep 0.05; n=$((n+1)); [ $n -lt 300 ] || exit 1; done");
    // A server that never listens is told by the client's failure, together with what the server
    // said.
    b.run(&wait, LISTEN)?;
    exec::check_interrupt()?;
    Ok(job)
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(12)).map(|l| format!("    | {l}\n")).collect()
}
