//! A process of the host and a Linux guest on two NICs of one network, connected by rdma_cm.
//!
//! The guest's connection manager is Linux's, the process's the daemon's: so this is where the two
//! meet, both ways of calling. The programs are Debian's on both sides; on the host they have our
//! libraries. Nobody answers ARP for the address of a NIC for processes, so the guest has a fixed
//! neighbour.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::fixture::{Fixture, Options};
use crate::attempt;
use crate::cache::Cache;
use crate::exec::{self, tied};
use crate::process::products;
use crate::rows::{self, Row};
use crate::vm::guest::{self, Guest};

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
}

const NIC: &str = "neighbour";
const NUMBER: u8 = 9;
/// Addresses of the guest and of the process's NIC.
const GUEST: &str = "10.9.0.1";
const HOST: &str = "10.9.0.9";
const SHORT: Duration = Duration::from_secs(30);
const TALK: Duration = Duration::from_secs(60);
/// A client calls until somebody listens. One that dies of a fault (SIGABRT, SIGSEGV) is not
/// started again; rping's own status of a failure is 255.
const CALL: &str = "ulimit -l unlimited; n=0
until timeout 20 $CLIENT; do
case $? in 134|139) exit 1;; esac; n=$((n+1)); [ $n -lt 10 ] || exit 1; sleep 0.3; done";
/// What perftest's client says when it lost its race with the server: after their first connection
/// the server begins to listen for the second, and nothing keeps the client from calling before.
/// Its own repetition then crashes (mended in 26.04, upstream's commit 3d9d8d0). A guest that is
/// emulated loses the race in one of some ten meetings, which says nothing of the device.
pub(crate) const CALLED_TOO_EARLY: &str = "Event: RDMA_CM_EVENT_UNREACHABLE; error: 1.";
/// How often two programs that met too early meet again.
const MEETINGS: u32 = 6;

/// Servers and clients; `@` is where the server is.
const PROGRAMS: &[(&str, &str)] = &[
    ("rping -s -a @ -v -C 20", "rping -c -a @ -v -C 20"),
    ("ucmatose -b @ -C 20", "ucmatose -s @ -C 20"),
    ("udaddy -b @", "udaddy -s @"),
    ("ib_write_bw -R -F -n 1000", "ib_write_bw -R -F -n 1000 @"),
    ("ib_send_bw -R -c UD -F -n 500", "ib_send_bw -R -c UD -F -n 500 @"),
];

impl Args {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let (libraries, programs) = (products::libraries(cache)?, attempt::programs(cache)?);
        let mut fixture = Fixture::start(cache, self.options.wish(1))?;
        let mac = guest::mac(NUMBER);
        let nic = ["nic", "add", NIC, "--for", "process", "--network", "red", "--mac", &mac];
        fixture.daemon.cli(&[&nic[..], &["--address", HOST]].concat())?;
        fixture.attach()?;
        let known = format!("ip neigh replace {HOST} lladdr {mac} dev eth0 nud permanent");
        first(&mut fixture)?.must(&known, SHORT)?;
        let mut meeting = Meeting { fixture, libraries, programs };
        let mut table = Vec::new();
        for (server, client) in PROGRAMS {
            for guest_serves in [true, false] {
                let at = if guest_serves { GUEST } else { HOST };
                let who = if guest_serves { "a process calls" } else { "Linux calls" };
                let program = client.split(' ').next().unwrap_or_default();
                let name = format!("{program}, {who}");
                if self.options.chosen(&name) {
                    let talk = (server.replace('@', at), client.replace('@', at));
                    table.push(meeting.row(name, &talk, guest_serves)?);
                }
            }
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

struct Meeting {
    fixture: Fixture,
    libraries: PathBuf,
    programs: PathBuf,
}

impl Meeting {
    fn row(&mut self, name: String, talk: &(String, String), guest_serves: bool) -> Result<Row> {
        let start = Instant::now();
        let mut said = self.meet(talk, guest_serves)?;
        for _ in 1..MEETINGS {
            if said.is_ok() || !self.log().contains(CALLED_TOO_EARLY) {
                break;
            }
            eprintln!("    {name}: perftest called before its server listened; once more");
            said = self.meet(talk, guest_serves)?;
        }
        match &said {
            Ok(()) => eprintln!("    {name}: ok"),
            Err(e) => eprintln!(
                "    {name}: {e:#}\nthe process: {}\n{}",
                self.log(),
                self.fixture.daemon.log_tail(10)
            ),
        }
        Ok(Row::timed(name, said.is_ok(), start.elapsed().as_secs_f64()))
    }

    /// One meeting; only an interrupt is an error of this.
    fn meet(&mut self, talk: &(String, String), guest_serves: bool) -> Result<Result<()>> {
        let said = if guest_serves { self.guest_serves(talk) } else { self.host_serves(talk) };
        exec::check_interrupt()?;
        Ok(said)
    }

    fn guest_serves(&mut self, (server, client): &(String, String)) -> Result<()> {
        let line = format!("ulimit -l unlimited\nexec timeout 60 {server}");
        let job = first(&mut self.fixture)?.spawn(&line)?;
        let mut caller = self.on_host(&CALL.replace("$CLIENT", client))?;
        let ended = exec::wait(&mut caller, TALK, || {})?;
        if !ended.success() {
            first(&mut self.fixture)?.kill(job)?;
        }
        let served = first(&mut self.fixture)?.wait(job, SHORT)?;
        ensure!(ended.success(), "the process is not content; Linux: {served:?}");
        ensure!(served.ok(), "Linux: {served:?}");
        Ok(())
    }

    fn host_serves(&mut self, (server, client): &(String, String)) -> Result<()> {
        let mut serving = self.on_host(&format!("exec timeout 60 {server}"))?;
        let called = first(&mut self.fixture)?.must(&CALL.replace("$CLIENT", client), TALK);
        let ended =
            exec::wait(&mut serving, if called.is_ok() { SHORT } else { Duration::ZERO }, || {});
        called?;
        ensure!(ended?.success(), "the process is not content");
        Ok(())
    }

    /// What the program with the NIC said.
    fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.fixture.lab.run.path().join("neighbour.log")
    }

    /// A program with the NIC.
    fn on_host(&self, script: &str) -> Result<Child> {
        let mut command: Command = tied("sh");
        let socket = self.fixture.daemon.socket(NIC).with_file_name("process.sock");
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.programs.join("usr/bin").display()));
        command.env("VHOST_RDMA_DEVICES", socket);
        command.env("LD_LIBRARY_PATH", library_path(&self.libraries, &self.programs)?);
        let log = std::fs::File::create(self.log_path())?;
        command.stdout(log.try_clone()?).stderr(log);
        command.args(["-c", script]).spawn().context("cannot start sh")
    }
}

/// Our libraries before those of the programs.
fn library_path(ours: &Path, programs: &Path) -> Result<String> {
    let theirs = attempt::library_path(programs)?;
    Ok(format!("{}:{}", ours.display(), theirs.display()))
}
