//! A Linux guest and a driver that was written from the specification alone, on two NICs of one
//! network.
//!
//! `tests/second-driver` shows with two of its kind that the text is enough to build a driver from.
//! Two of a kind may share a misunderstanding, so here it meets `ibv_rc_pingpong` with our kernel
//! driver and provider under it: both ways of calling, both ends looking at the bytes, the NICs'
//! counters as witnesses. The stranger is a process of the host; pingpong's own TCP connection
//! reaches it through QEMU's user-mode network, on the host's loopback.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::fixture::{self, Fixture, Options};
use crate::cache::Cache;
use crate::exec::{self, run_logged, tail, tied, workspace};
use crate::rows::{self, Row};
use crate::vm::guest::Guest;

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
}

const NIC: &str = "stranger";
const NUMBER: u8 = 9;
const BUILD: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_secs(30);
const TALK: Duration = Duration::from_secs(90);
/// Where the guest reaches the host, and where a server listens in it.
const HOST: &str = "10.0.2.2";
const GUEST_PORT: u16 = 18515;

/// A second interface, to the host; and the stranger's address, for which no interface answers ARP.
const ROAD: &str = "set -e
ip link set eth1 up
ip addr add 10.0.2.15/24 dev eth1
ip neigh replace 10.9.0.@N@ lladdr @MAC@ dev eth0 nud permanent
";

const LISTENS: &str = "n=0
until grep -qi ':@PORT@ [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do
  sleep 0.05; n=$((n+1)); [ $n -lt 300 ] || exit 1
done";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caller {
    Linux,
    Stranger,
}

/// A pingpong: who calls, how many messages of how many bytes, and further options of the guest's
/// program.
struct Talk {
    name: &'static str,
    caller: Caller,
    size: u64,
    iters: u64,
    guest: &'static str,
}

/// Sizes within a page, over pages, and such that the region's list has two levels.
const TALKS: &[Talk] = &[
    Talk { name: "Linux calls", caller: Caller::Linux, size: 4096, iters: 200, guest: "" },
    Talk {
        name: "Linux calls, with events",
        caller: Caller::Linux,
        size: 20_001,
        iters: 50,
        guest: "-e",
    },
    Talk {
        name: "the stranger calls",
        caller: Caller::Stranger,
        size: 4096,
        iters: 200,
        guest: "-c",
    },
    Talk {
        name: "the stranger calls, long messages",
        caller: Caller::Stranger,
        size: 1_100_000,
        iters: 5,
        guest: "-c -e",
    },
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let binary = build(cache)?;
        let port = free_port()?;
        let forward = format!("user,id=road,hostfwd=tcp:127.0.0.1:{port}-:{GUEST_PORT}");
        let mut fixture = Fixture::start_as(cache, self.options.wish(1), |mut options| {
            options.extend(["-netdev", &forward, "-device"].map(String::from));
            // Behind the NIC's own interface, which is eth0.
            options.push("virtio-net-pci,netdev=road,addr=1c.0".to_owned());
            options
        })?;
        fixture.daemon.add_nic(NIC, "red", NUMBER)?;
        let device = fixture.attach()?.pop().context("there is no guest")?;
        let road = ROAD.replace("@N@", &NUMBER.to_string());
        let mac = crate::vm::guest::mac(NUMBER);
        first(&mut fixture)?.must(&road.replace("@MAC@", &mac), SHORT)?;
        let mut meeting = Meeting { fixture, binary, device, port };
        let mut table = Vec::new();
        for talk in TALKS.iter().filter(|talk| self.options.chosen(talk.name)) {
            table.push(meeting.row(talk)?);
        }
        let clean = meeting.fixture.clean();
        rows::print_table(&table, "seconds", "-");
        self.options.write(&table)?;
        Ok(clean && !table.is_empty() && table.iter().all(|r| r.ok))
    }
}

fn first(fixture: &mut Fixture) -> Result<&mut Guest> {
    fixture.lab.guests.first_mut().context("there is no guest")
}

fn build(cache: &Cache) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cmd = tied(cargo);
    cmd.current_dir(workspace()).args(["build", "--locked", "-p", "second-driver"]);
    run_logged(&mut cmd, "building the second driver", &cache.log("second-driver"), BUILD)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    Ok(target.join("debug/second-driver"))
}

/// QEMU wants a number; whoever takes it in between makes QEMU say so.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

struct Meeting {
    fixture: Fixture,
    binary: PathBuf,
    /// The guest's device and the index of its IPv4 GID.
    device: (String, String),
    /// Of the host, leads to the guest's server.
    port: u16,
}

impl Meeting {
    fn row(&mut self, talk: &Talk) -> Result<Row> {
        let start = Instant::now();
        let said = self.talk(talk);
        exec::check_interrupt()?;
        match &said {
            Ok(()) => eprintln!("    {}: ok", talk.name),
            Err(e) => eprintln!(
                "    {}: {e:#}\nthe stranger:\n{}the daemon:\n{}",
                talk.name,
                self.stranger_tail(),
                self.fixture.daemon.log_tail(10)
            ),
        }
        Ok(Row::timed(talk.name, said.is_ok(), start.elapsed().as_secs_f64()))
    }

    fn talk(&mut self, talk: &Talk) -> Result<()> {
        let nics = [fixture::nic(0), NIC.to_owned()];
        let before = nics.each_ref().map(|nic| self.fixture.daemon.counters(nic));
        match talk.caller {
            Caller::Linux => self.linux_calls(talk)?,
            Caller::Stranger => self.stranger_calls(talk)?,
        }
        let log = self.stranger_tail();
        ensure!(log.contains("data right"), "the stranger did not look at the data");
        for (nic, before) in nics.iter().zip(before) {
            let moved = self.fixture.daemon.counters(nic)?.since(&before?).bytes();
            let claimed = 2 * talk.size * talk.iters;
            ensure!(moved >= claimed, "{nic} moved {moved} of {claimed} bytes");
        }
        Ok(())
    }

    fn linux_calls(&mut self, talk: &Talk) -> Result<()> {
        let mut stranger = self.stranger(talk, ["--listen", "0"])?;
        let port = exec::wait_for("the stranger to listen", SHORT, || {
            let said = self.stranger_tail();
            let port =
                said.lines().find_map(|l| l.rsplit_once("listening on port ")?.1.parse().ok());
            if port.is_none() && stranger.try_wait()?.is_some() {
                bail!("it ended");
            }
            Ok(port)
        });
        let called = port.and_then(|port: u16| {
            let line = self.pingpong(talk, &format!("-p {port} {HOST}"));
            first(&mut self.fixture)?.must(&line, TALK)
        });
        let ended =
            exec::wait(&mut stranger, if called.is_ok() { SHORT } else { Duration::ZERO }, || {});
        called?;
        ensure!(ended?.success(), "the stranger is not content");
        Ok(())
    }

    fn stranger_calls(&mut self, talk: &Talk) -> Result<()> {
        let line = self.pingpong(talk, &format!("-p {GUEST_PORT}"));
        let guest = first(&mut self.fixture)?;
        let server = guest.spawn(&line)?;
        guest.must(&LISTENS.replace("@PORT@", &format!("{GUEST_PORT:04X}")), SHORT)?;
        let to = format!("127.0.0.1:{}", self.port);
        let mut stranger = self.stranger(talk, ["--connect", &to])?;
        let ended = exec::wait(&mut stranger, TALK, || {});
        let content = ended.is_ok_and(|status| status.success());
        let patience = if content { SHORT } else { Duration::from_secs(1) };
        let server = first(&mut self.fixture)?.wait(server, patience)?;
        ensure!(content, "the stranger is not content; Linux: {server:?}");
        ensure!(server.ok() && !server.text.contains("invalid data"), "Linux: {server:?}");
        Ok(())
    }

    fn pingpong(&self, talk: &Talk, rest: &str) -> String {
        let (device, gid) = &self.device;
        let Talk { size, iters, guest, .. } = talk;
        format!(
            "ulimit -l unlimited\nexec ibv_rc_pingpong -d {device} -g {gid} -s {size} -n {iters} \
             {guest} {rest}\n"
        )
    }

    fn stranger(&self, talk: &Talk, side: [&str; 2]) -> Result<Child> {
        let log = File::create(self.stranger_log())?;
        let mut cmd = tied(&self.binary);
        cmd.arg("--socket").arg(self.fixture.daemon.socket(NIC)).args(side);
        cmd.args(["--address", &format!("10.9.0.{NUMBER}"), "--verify", "--timeout", "60"]);
        cmd.args(["--size", &talk.size.to_string(), "--iters", &talk.iters.to_string()]);
        let child = cmd.stdout(log.try_clone()?).stderr(log).spawn();
        child.with_context(|| format!("cannot start {}", self.binary.display()))
    }

    fn stranger_log(&self) -> PathBuf {
        self.fixture.lab.run.path().join("stranger.log")
    }

    fn stranger_tail(&self) -> String {
        tail(&self.stranger_log(), 0, 10)
    }
}
