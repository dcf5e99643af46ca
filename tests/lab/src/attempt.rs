//! `cargo xtask try`: RDMA between two processes of this machine, with Debian's own programs: no
//! root, no VM, no kernel module.
//!
//! The libraries are built from the distribution's source, the programs unpacked from its packages,
//! and `vhost-rdma run` does the rest. Beside each figure stands TCP over loopback, measured in the
//! same minute. `rping` finds its server by the NIC's address, through our librdmacm, and compares
//! what it sent.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::cache::Cache;
use crate::exec::{capture, run_logged, tied, tied_as};
use crate::host;
use crate::process::products::{daemon, libraries};
use crate::rows::{self, Row};
use crate::vm::rundir::RunDir;

const BUILD_WAIT: Duration = Duration::from_secs(600);
const RUN_WAIT: Duration = Duration::from_secs(60);
/// What the programs are in, and what they are linked with beside libibverbs. Where there are two
/// names, the second is Debian 13's.
const PACKAGES: [&[&str]; 7] = [
    &["ibverbs-utils"],
    &["perftest"],
    &["rdmacm-utils"],
    &["librdmacm1", "librdmacm1t64"],
    &["libibumad3"],
    &["libpci3"],
    // perftest is linked with the providers of hardware.
    &["ibverbs-providers"],
];
/// Two programs, each with a NIC of its own.
const RPING: &str = r#"set -- $VHOST_RDMA_ADDRESSES; address=$1
set -- $(echo "$VHOST_RDMA_DEVICES" | tr : " ")
VHOST_RDMA_DEVICES=$1 rping -s -a $address -v -C 100 > /dev/null & server=$!
for i in 1 2 3 4 5 6 7 8 9; do
  sleep 0.2
  if VHOST_RDMA_DEVICES=$2 rping -c -a $address -v -C 100; then wait $server; exit; fi
done
exit 1"#;
/// "nobody" on every distribution.
const NOBODY: u32 = 65534;
/// Neither a program nor the daemon's two processes may do anything that others may not.
const POWERLESS: &str = r#"n=0
for it in self $(grep -lzE '^(serve|network-process)$' /proc/[0-9]*/cmdline 2> /dev/null); do
  it=${it#/proc/}; it=/proc/${it%/cmdline}/status
  grep -qE '^Uid:(.65534){4}$' $it || continue
  for set in Inh Prm Eff Bnd Amb; do grep -q "^Cap$set:.0*$" $it; done
  grep -q '^NoNewPrivs:.1$' $it; n=$((n+1))
done; [ $n -ge 3 ]"#;
/// Copies what is run to where all may read it.
const STAGE: &str = r#"cp -r -- "$1" "$4/vhost-rdma"; cp -r -- "$2" "$4/libraries"
cp -r -- "$3" "$4/programs"; chmod -R go+rX "$4""#;

/// See the module
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
    /// With a daemon that is not optimised, which is built sooner
    #[arg(long)]
    debug: bool,
    /// Daemon and programs as user 65534, without any capability, with a home of its own: takes
    /// root
    #[arg(long)]
    nobody: bool,
    /// In place of the measurements, a program that gets two devices (`-- sh` for a shell)
    #[arg(last = true)]
    program: Vec<OsString>,
}

/// What is measured: both ends in one shell, each with a device of its own.
struct Program {
    name: &'static str,
    server: &'static str,
    client: &'static str,
    /// The figure in the client's output.
    figure: fn(&str) -> Option<f64>,
    unit: &'static str,
    /// The same over TCP.
    reference: fn() -> Result<f64>,
}

fn pingpong(text: &str) -> Option<f64> {
    text.lines()
        .find_map(|line| line.strip_suffix(" usec/iter")?.split(' ').next_back()?.parse().ok())
}

/// A column of perftest's last line with figures.
pub(crate) fn column(text: &str, at: usize) -> Option<f64> {
    let numbers = |line: &&str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
    let line = text.lines().rfind(numbers)?;
    line.split_whitespace().nth(at)?.parse().ok()
}

const PROGRAMS: [Program; 3] = [
    Program {
        name: "ibv_rc_pingpong -c, 4 KiB",
        server: "ibv_rc_pingpong -c -g 0 -n 2000 -d vhost_rdma0",
        client: "ibv_rc_pingpong -c -g 0 -n 2000 -d vhost_rdma1 127.0.0.1",
        figure: pingpong,
        unit: "us",
        reference: || round_trip(4096),
    },
    Program {
        name: "ib_write_bw, 64 KiB",
        server: "ib_write_bw -F -x 0 -d vhost_rdma0",
        client: "ib_write_bw -F -x 0 -d vhost_rdma1 127.0.0.1",
        figure: |text| column(text, 3),
        unit: "MiB/s",
        reference: bandwidth,
    },
    Program {
        name: "ib_send_lat, 2 bytes",
        server: "ib_send_lat -F -x 0 -d vhost_rdma0",
        client: "ib_send_lat -F -x 0 -d vhost_rdma1 127.0.0.1",
        figure: |text| column(text, 4),
        unit: "us",
        // perftest says what one way takes.
        reference: || Ok(round_trip(2)? / 2.0),
    },
];

/// Both ends of a TCP connection over loopback, each with a thread.
fn over_tcp<T: Send>(
    serve: impl FnOnce(TcpStream) -> Result<()> + Send,
    client: impl FnOnce(TcpStream) -> Result<T> + Send,
) -> Result<T> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let server = scope.spawn(move || {
            let (stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            serve(stream)
        });
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let found = client(stream);
        match server.join() {
            Ok(served) => served.and(found),
            Err(_) => bail!("the server of the TCP measurement panicked"),
        }
    })
}

/// Microseconds.
pub(crate) fn round_trip(bytes: usize) -> Result<f64> {
    const TIMES: u32 = 2000;
    let exchange = move |mut stream: TcpStream, first: bool| -> Result<f64> {
        let (begin, mut buffer) = (Instant::now(), vec![1; bytes]);
        for _ in 0..TIMES {
            if first {
                stream.write_all(&buffer)?;
            }
            stream.read_exact(&mut buffer)?;
            if !first {
                stream.write_all(&buffer)?;
            }
        }
        Ok(begin.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES))
    };
    over_tcp(move |stream| exchange(stream, false).map(drop), move |stream| exchange(stream, true))
}

/// Pieces a second, each of so many bytes and written by a system call of its own.
pub(crate) fn pieces(bytes: usize, times: u32) -> Result<f64> {
    let total = bytes * usize::try_from(times)?;
    over_tcp(
        move |mut stream| {
            let (mut room, mut left) = (vec![0; 65_536], total);
            while left > 0 {
                let most = left.min(room.len());
                let got = stream.read(room.get_mut(..most).unwrap_or_default())?;
                ensure!(got > 0, "the TCP connection ended early");
                left -= got;
            }
            Ok(stream.write_all(&[1])?)
        },
        move |mut stream| {
            let (begin, piece) = (Instant::now(), vec![1u8; bytes]);
            for _ in 0..times {
                stream.write_all(&piece)?;
            }
            stream.read_exact(&mut [0])?;
            Ok(f64::from(times) / begin.elapsed().as_secs_f64())
        },
    )
}

/// MiB a second, in pieces of 64 KiB.
pub(crate) fn bandwidth() -> Result<f64> {
    Ok(pieces(65_536, 10_000)? / 16.0)
}

/// Debian's programs, of this machine's release; no package is installed.
pub(crate) fn programs(cache: &Cache) -> Result<PathBuf> {
    let names = PACKAGES.concat();
    let versions = capture(tied("apt-cache").arg("policy").args(names), RUN_WAIT)?;
    let packages = chosen(&versions)?;
    cache.artefact("process-programs", &versions, |tmp| {
        let log = cache.log("process-programs");
        let mut download = tied("apt-get");
        download.current_dir(tmp).arg("download").args(&packages);
        run_logged(&mut download, "downloading programs", &log, BUILD_WAIT)?;
        let script = "cd \"$1\"; for deb in *.deb; do dpkg-deb -x \"$deb\" .; rm \"$deb\"; done";
        let mut unpack = tied("sh");
        run_logged(unpack.args(["-ec", script, "sh"]).arg(tmp), "unpacking", &log, BUILD_WAIT)
    })
}

/// Those of [`PACKAGES`] that this machine's release has, by what `apt-cache policy` says of all.
fn chosen(policy: &str) -> Result<Vec<&'static str>> {
    let has = |name: &str| {
        let mut lines = policy.lines().skip_while(|line| line.strip_suffix(':') != Some(name));
        let candidate = lines.find_map(|line| line.trim_start().strip_prefix("Candidate: "));
        candidate.is_some_and(|version| version != "(none)")
    };
    let first = |names: &&'static [&'static str]| {
        let name = names.iter().find(|name| has(name)).copied();
        name.with_context(|| {
            let names = names.join(" or ");
            format!("apt knows no package {names}: `apt-get update`, as root, gets its lists")
        })
    };
    PACKAGES.iter().map(first).collect()
}

/// What is there to be run with.
struct Lab {
    daemon: PathBuf,
    libraries: PathBuf,
    programs: PathBuf,
    /// Where all this is, for a user who may not look into ours.
    stage: Option<RunDir>,
}

impl Lab {
    fn new(cache: &Cache, debug: bool) -> Result<Self> {
        let (daemon, libraries) = (daemon(cache, debug)?, libraries(cache)?);
        Ok(Self { daemon, libraries, programs: programs(cache)?, stage: None })
    }

    /// The same for user 65534: copies that all may read, and a home.
    fn for_nobody(self) -> Result<Self> {
        host::require_root()?;
        let stage = RunDir::new()?;
        let at = |name| stage.path().join(name);
        let mut copy = tied("sh");
        copy.args(["-ec", STAGE, "sh"]).args([&self.daemon, &self.libraries, &self.programs]);
        capture(copy.arg(stage.path()), RUN_WAIT)?;
        fs::create_dir(at("home"))?;
        chown(at("home"), Some(NOBODY), Some(NOBODY))?;
        Ok(Self {
            daemon: at("vhost-rdma"),
            libraries: at("libraries"),
            programs: at("programs"),
            stage: Some(stage),
        })
    }

    /// `vhost-rdma run`, for whatever is to follow.
    fn with_two_devices(&self) -> Result<Command> {
        let of_programs = |path: &str| self.programs.join(path).display().to_string();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut run = match &self.stage {
            None => tied(&self.daemon),
            Some(stage) => {
                let mut run = tied_as(NOBODY, &self.daemon);
                let home = stage.path().join("home");
                run.env_clear().env("HOME", &home).env("TMPDIR", &home).current_dir(&home);
                run
            }
        };
        run.env("VHOST_RDMA_LIBRARIES", &self.libraries);
        run.env("PATH", format!("{}:{path}", of_programs("usr/bin")));
        run.env("LD_LIBRARY_PATH", library_path(&self.programs)?);
        run.args(["run", "--nics", "2", "--"]);
        Ok(run)
    }

    fn run(&self, script: &str) -> Result<String> {
        capture(self.with_two_devices()?.args(["sh", "-ec", script]), RUN_WAIT)
    }

    fn row(&self, program: &Program) -> Result<Row> {
        let Program { name, server, client, figure, unit, reference } = program;
        let reference = reference()?;
        // The server is there when its port is, which the client tries again and again.
        let script = format!(
            "{server} > /dev/null & for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; \
             if {client}; then wait; exit 0; fi; done; exit 1"
        );
        let value = match self.run(&script) {
            Ok(text) => figure(&text),
            Err(error) => {
                eprintln!("{name}: {error:#}");
                None
            }
        };
        Ok(Row {
            name: (*name).to_owned(),
            ok: value.is_some(),
            value,
            reference: Some(reference),
            ratio: value.map(|value| value / reference),
            unit: (*unit).to_owned(),
            target: String::new(),
        })
    }
}

impl Lab {
    /// A hundred exchanges over a connection of rdma_cm.
    fn rping(&self) -> Row {
        let said = self.run(RPING);
        let pings = said.as_ref().map_or(0, |said| said.matches("ping data: rdma-ping-").count());
        if let Err(error) = said {
            eprintln!("rping: {error:#}");
        }
        let value = Some(f64::from(u32::try_from(pings).unwrap_or(u32::MAX)));
        Row { value, ..Row::verdict("rping -v -C 100: exchanges", pings == 100) }
    }
}

/// The one folder of libraries in a root, whatever the machine's name is.
pub(crate) fn library_path(root: &Path) -> Result<PathBuf> {
    let mut dirs = fs::read_dir(root.join("usr/lib"))?.flatten().map(|entry| entry.path());
    let found = dirs.find(|dir| dir.to_string_lossy().contains("-linux-gnu"));
    found.context("the packages have no libraries")
}

impl Args {
    /// What CI runs, which is root.
    pub fn as_nobody() -> Self {
        Self { nobody: true, ..Self::default() }
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let lab = Lab::new(cache, self.debug)?;
        let lab = if self.nobody { lab.for_nobody()? } else { lab };
        if !self.program.is_empty() {
            return Ok(lab.with_two_devices()?.args(&self.program).status()?.success());
        }
        let begin = Instant::now();
        let devices = lab.run("ibv_devinfo")?;
        let both = devices.matches("PORT_ACTIVE").count() == 2;
        println!("{devices}");
        let mut rows = vec![Row::verdict("ibv_devinfo: two active ports", both)];
        if self.nobody {
            let found = lab.run(POWERLESS).inspect_err(|error| eprintln!("{error:#}"));
            rows.push(Row::verdict("user 65534, no capability", found.is_ok()));
        }
        for program in &PROGRAMS {
            rows.push(lab.row(program)?);
        }
        rows.push(lab.rping());
        if let Some(stage) = &lab.stage {
            let left = fs::read_dir(stage.path().join("home"))?.count();
            rows.push(Row::verdict("nothing is left in its home", left == 0));
        }
        rows::print_table(&rows, "vhost-rdma", "TCP");
        let user = if self.nobody { NOBODY.to_string() } else { user() };
        println!("{:.1} s, as user {user}", begin.elapsed().as_secs_f64());
        if let Some(path) = &self.json {
            rows::write_json(path, &rows)?;
        }
        Ok(rows.iter().all(|row| row.ok))
    }
}

fn user() -> String {
    capture(tied("id").arg("-un"), RUN_WAIT).map_or_else(|_| "?".into(), |name| name.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found() {
        let text = "8192000 bytes in 0.12 seconds = 555.54 Mbit/sec\n\
                    1000 iters in 0.12 seconds = 117.97 usec/iter";
        assert_eq!(pingpong(text), Some(117.97));
        let text = concat!(
            "---\n",
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n",
            " 65536      5000             8542.31            376.44 \t\t   0.006023\n",
            "---"
        );
        assert_eq!(column(text, 3), Some(376.44));
        assert_eq!((pingpong(""), column("", 3)), (None, None));
    }

    #[test]
    fn each_release_has_its_names() {
        let policy = |names: &[&str]| {
            let block = |name: &&str| {
                let candidate = if name.starts_with('-') { "(none)" } else { "56.1-1" };
                let name = name.trim_start_matches('-');
                format!("{name}:\n  Installed: (none)\n  Candidate: {candidate}\n")
            };
            names.iter().map(block).collect::<String>()
        };
        let same = ["ibverbs-utils", "perftest", "rdmacm-utils", "libibumad3", "libpci3"];
        let of = |more: &[&str]| {
            let names = [&same[..], more, &["ibverbs-providers"]].concat();
            chosen(&policy(&names)).map(|chosen| chosen[3])
        };
        assert_eq!(of(&["librdmacm1"]).unwrap(), "librdmacm1");
        assert_eq!(of(&["-librdmacm1", "librdmacm1t64"]).unwrap(), "librdmacm1t64");
        assert!(of(&[]).unwrap_err().to_string().contains("apt-get update"));
    }

    #[test]
    fn tcp_is_measured() {
        assert!(round_trip(2).unwrap() > 0.0 && bandwidth().unwrap() > 0.0);
    }
}
