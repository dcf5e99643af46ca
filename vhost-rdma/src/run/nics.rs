//! NICs of a daemon, as `run` adds and removes them; and a process that does so in its place.
//!
//! A daemon that others use lives on when `run` ends, and `run` may be killed with no time to clean
//! up. So a process of its own ([`hold`]), in a session of its own, adds the NICs that it is told
//! of on a pipe, and removes them when the pipe ends, however that came. A daemon that is started
//! again or upgraded meanwhile has the NICs that it had: it is asked until it answers, for a while.
//! Who kills all processes of a control group or of a container kills this one too.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use super::{Fault, host};

/// For how long a daemon that does not answer is asked again.
const ASKED: Duration = Duration::from_secs(60);
/// How long `run` waits for the end of the NICs: longer than the daemon does for a process of a
/// network (65 s) is of no use to anybody.
const WAIT: Duration = Duration::from_secs(70);
/// Codes of the command line's failures.
const UNAVAILABLE: &str = "unavailable";
const NOT_FOUND: &str = "not_found";
const PAUSE: Duration = Duration::from_millis(100);

/// What a daemon says instead of doing as it is told.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Refused {
    /// As the command line's failures have it.
    code: String,
    message: String,
}

impl Refused {
    fn here(error: &io::Error) -> Self {
        Self { code: "internal".to_owned(), message: error.to_string() }
    }
}

impl From<Refused> for Fault {
    fn from(refused: Refused) -> Self {
        Self::Daemon(refused.message)
    }
}

/// This program.
pub(super) fn ourselves() -> Result<PathBuf, Fault> {
    std::env::current_exe().map_err(host("find this program"))
}

/// Runs a command of ours; what it said.
pub(super) fn ask(admin: &Path, args: &[&OsStr]) -> Result<Vec<u8>, Refused> {
    let program = std::env::current_exe().map_err(|error| Refused::here(&error))?;
    let mut command = Command::new(program);
    command.arg("--json").arg("--socket").arg(admin).args(args).stdin(Stdio::null());
    let output = command.output().map_err(|error| Refused::here(&error))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap_or_default();
    let word = |name: &str| said["error"][name].as_str().map(str::to_owned);
    Err(Refused {
        code: word("code").unwrap_or_else(|| "internal".to_owned()),
        message: word("message").unwrap_or_else(|| "the daemon refuses".to_owned()),
    })
}

/// A NIC that is to be.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NewNic {
    pub(super) name: String,
    pub(super) network: String,
    /// The first is what programs take that know several kinds (libfabric).
    pub(super) addresses: Vec<IpAddr>,
}

impl NewNic {
    /// Adds it; its socket.
    pub(super) fn add(&self, admin: &Path) -> Result<PathBuf, Refused> {
        let mut args = vec!["nic", "add", &self.name, "--for", "process"];
        args.extend(["--network", &self.network]);
        let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        args.extend(addresses.iter().flat_map(|address| ["--address", address]));
        let said = ask(admin, &args.into_iter().map(OsStr::new).collect::<Vec<_>>())?;
        let nic: serde_json::Value = serde_json::from_slice(&said).unwrap_or_default();
        nic["socket"].as_str().map(PathBuf::from).ok_or_else(|| Refused {
            code: "internal".to_owned(),
            message: "the daemon names no socket".to_owned(),
        })
    }
}

fn remove(admin: &Path, name: &str) -> Result<(), Refused> {
    match ask(admin, &["nic", "rm", name].map(OsStr::new)) {
        // It was never there, or its daemon has forgotten it.
        Err(refused) if refused.code != NOT_FOUND => Err(refused),
        _ => Ok(()),
    }
}

/// Removes these, and says which could not be.
fn remove_all(admin: &Path, names: &[String]) {
    let end = Instant::now() + ASKED;
    for name in names {
        let refused = loop {
            match remove(admin, name) {
                Ok(()) => break None,
                Err(refused) if refused.code == UNAVAILABLE && Instant::now() < end => {
                    std::thread::sleep(PAUSE);
                }
                Err(refused) => break Some(refused),
            }
        };
        if let Some(refused) = refused {
            eprintln!("vhost-rdma: NIC {name} is still there: {refused}");
        }
    }
}

/// The answer to a [`NewNic`].
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Socket(PathBuf),
    Refused(String),
}

/// What the process does: see the module.
///
/// # Errors
/// The host's, before there is a NIC.
pub fn hold(admin: &Path) -> io::Result<ExitCode> {
    // What is meant for the program, or for all that a terminal or a service has, is not for us.
    rustix::process::setsid()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _guard = runtime.enter();
    let kinds = [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
        SignalKind::quit(),
    ];
    let _taken = kinds.map(signal);
    std::env::set_current_dir("/")?;
    let (mut added, mut unsure) = (Vec::new(), Vec::new());
    for line in io::stdin().lock().lines() {
        // One that is cut off was not meant to its end.
        let Ok(nic) = serde_json::from_str::<NewNic>(&line.unwrap_or_default()) else { break };
        let answer = match nic.add(admin) {
            Ok(socket) => {
                added.push(nic.name);
                Answer::Socket(socket)
            }
            Err(refused) => {
                if refused.code == UNAVAILABLE {
                    unsure.push(nic.name);
                }
                Answer::Refused(refused.message)
            }
        };
        let mut said = serde_json::to_vec(&answer)?;
        said.push(b'\n');
        let mut out = io::stdout().lock();
        if out.write_all(&said).and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    remove_all(admin, &added);
    for name in unsure {
        // Most likely it is not there, nor who could tell.
        let _ = remove(admin, &name);
    }
    Ok(ExitCode::SUCCESS)
}

/// That process, as `run` has it. The NICs go when this is dropped.
pub(super) struct Holder {
    admin: PathBuf,
    child: Child,
    /// Nothing once it is to end.
    tell: Option<ChildStdin>,
    hear: BufReader<ChildStdout>,
    names: Vec<String>,
}

impl Holder {
    pub(super) fn start(admin: PathBuf) -> Result<Self, Fault> {
        let action = "start a process that holds NICs";
        let mut command = Command::new(ourselves()?);
        command.arg("--socket").arg(&admin).arg("run-nics");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(host(action))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(tell), Some(out)) => {
                let hear = BufReader::new(out);
                Ok(Self { admin, child, tell: Some(tell), hear, names: Vec::new() })
            }
            _ => Err(host(action)(io::ErrorKind::BrokenPipe.into())),
        }
    }

    pub(super) fn add(&mut self, nic: NewNic) -> Result<PathBuf, Fault> {
        let action = "speak to the process that holds NICs";
        let mut said = serde_json::to_vec(&nic).map_err(io::Error::from).map_err(host(action))?;
        said.push(b'\n');
        let tell = self.tell.as_mut().ok_or(io::ErrorKind::BrokenPipe.into());
        tell.and_then(|tell| tell.write_all(&said)).map_err(host(action))?;
        let mut answer = String::new();
        self.hear.read_line(&mut answer).map_err(host(action))?;
        match serde_json::from_str(&answer).map_err(io::Error::from).map_err(host(action))? {
            Answer::Socket(socket) => {
                self.names.push(nic.name);
                Ok(socket)
            }
            Answer::Refused(why) => Err(Fault::Daemon(why)),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.tell = None;
        let begin = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return,
                // Somebody ended it: it is ours to do.
                Ok(Some(_)) | Err(_) => return remove_all(&self.admin, &self.names),
                Ok(None) if begin.elapsed() > WAIT => return,
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}
