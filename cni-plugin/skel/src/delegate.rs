//! Delegation: one plugin runs another, for addresses above all.
//!
//! The delegate gets the configuration as it came and the same variables, with the command and,
//! where the caller gives its interfaces names of its own, the interface replaced: IPAM plugins
//! file what they give under container and interface. Its stdout is read and never mixed with ours;
//! what it says on stderr is passed on. If an ADD fails half way the delegate's DEL runs before the
//! error is returned, as the specification asks.

use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use crate::environment::Command;
use crate::result::AddResult;
use crate::run::Network;
use crate::{Code, Error};

/// How long a delegate may take. DHCP is the slowest that is known, and gives up earlier.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The most that is read of a delegate's output.
const MOST_OUTPUT: u64 = 4 << 20;

/// Another plugin, to be run on behalf of this one.
#[derive(Debug, Clone)]
pub struct Delegate<'a> {
    network: &'a Network,
    kind: &'a str,
    ifname: Option<&'a str>,
    config: Option<Vec<u8>>,
    timeout: Duration,
}

impl<'a> Delegate<'a> {
    /// The plugin `kind` for the network.
    #[must_use]
    pub const fn new(network: &'a Network, kind: &'a str) -> Self {
        Self { network, kind, ifname: None, config: None, timeout: DEFAULT_TIMEOUT }
    }

    /// Another interface than the one of the call.
    #[must_use]
    pub const fn ifname(mut self, ifname: &'a str) -> Self {
        self.ifname = Some(ifname);
        self
    }

    /// Another configuration than the one of the call.
    #[must_use]
    pub fn config(mut self, config: &Map<String, Value>) -> Self {
        self.config = serde_json::to_vec(config).ok();
        self
    }

    /// Another bound than [`DEFAULT_TIMEOUT`].
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sees that the plugin is there: a caller that makes other things first finds out before it
    /// makes them.
    ///
    /// # Errors
    /// Code 4 or 7.
    pub fn installed(&self) -> Result<(), Error> {
        find(self.kind, &self.search_path(), self.network.path.is_empty()).map(drop)
    }

    /// Runs the command and returns what the plugin printed.
    ///
    /// # Errors
    /// The plugin's own error with its code; 4 or 7 if it cannot be found, 5 if it cannot be run,
    /// 11 if it takes too long, 999 if it fails without saying why.
    pub fn run(&self, command: Command) -> Result<Vec<u8>, Error> {
        Ok(self.ask(command)?)
    }

    fn ask(&self, command: Command) -> Result<Vec<u8>, Refusal> {
        let what = format!("{} {}", self.kind, command.as_str());
        let path = self.search_path();
        let program = find(self.kind, &path, self.network.path.is_empty())?;
        let mut process = Process::new(program);
        for (name, _) in std::env::vars_os() {
            if name.as_encoded_bytes().starts_with(b"CNI_") {
                process.env_remove(name);
            }
        }
        process.envs(self.network.environment.iter());
        process.env("CNI_COMMAND", command.as_str());
        process.env("CNI_PATH", std::env::join_paths(&path).unwrap_or_default());
        if let Some(ifname) = self.ifname {
            process.env("CNI_IFNAME", ifname);
        }
        let input = self.config.clone().unwrap_or_else(|| self.network.stdin.clone());
        let output = converse(process, input, self.timeout).map_err(|error| {
            let code = match error.kind() {
                io::ErrorKind::TimedOut => Code::TRY_AGAIN,
                _ => Code::IO,
            };
            Error::new(code, format!("{what}: {error}"))
        })?;
        // A runtime collects stderr; whether it still listens is not our affair.
        let _ = io::stderr().write_all(&output.stderr);
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(Error::from_json(&output.stdout).map_or_else(
            || {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                let msg = format!("{what} ended with {} and no CNI error", output.status);
                Error::new(Code::INTERNAL, msg).details(said).into()
            },
            |error| Refusal { error: error.during(&what), said: true },
        ))
    }

    /// `CNI_PATH`, or where this very program lies: plugins are installed together.
    fn search_path(&self) -> Vec<PathBuf> {
        if !self.network.path.is_empty() {
            return self.network.path.clone();
        }
        let own = std::env::current_exe().ok();
        own.and_then(|own| own.parent().map(Path::to_path_buf)).into_iter().collect()
    }
}

/// Why a delegate did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What failed.
    pub error: Error,
    /// The plugin says so itself, so an IPAM plugin has given nothing. Otherwise it was killed,
    /// say, and nobody knows.
    pub said: bool,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, said: false }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        refusal.error
    }
}

/// The IPAM plugin of a network.
#[derive(Debug, Clone)]
pub struct Ipam<'a>(Delegate<'a>);

impl<'a> Ipam<'a> {
    /// The plugin that the configuration names, if it names one.
    ///
    /// # Errors
    /// Code 7 for an `ipam` without a type.
    pub fn of(network: &'a Network) -> Result<Option<Self>, Error> {
        Ok(network.config.ipam_kind()?.map(|kind| Self(Delegate::new(network, kind))))
    }

    /// For another interface than the one of the call.
    #[must_use]
    pub fn ifname(self, ifname: &'a str) -> Self {
        Self(self.0.ifname(ifname))
    }

    /// With another configuration than the one of the call.
    #[must_use]
    pub fn config(self, config: &Map<String, Value>) -> Self {
        Self(self.0.config(config))
    }

    /// As [`Delegate::timeout`].
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self(self.0.timeout(timeout))
    }

    /// As [`Delegate::installed`].
    ///
    /// # Errors
    /// Code 4 or 7.
    pub fn installed(&self) -> Result<(), Error> {
        self.0.installed()
    }

    /// Asks for addresses. What was given is taken back if the answer cannot be read.
    ///
    /// # Errors
    /// As [`Delegate::run`]; 6 for an answer that does not decode.
    pub fn add(&self) -> Result<AddResult, Refusal> {
        let read = |bytes: Vec<u8>| -> Result<AddResult, Refusal> {
            let what = self.0.kind;
            let value: Value = serde_json::from_slice(&bytes)
                .map_err(|error| crate::error::undecodable("its answer", &error).during(what))?;
            Ok(AddResult::from_json(&value, self.0.network.version)
                .map_err(|error| error.during(what))?)
        };
        self.0.ask(Command::Add).and_then(read).map_err(|Refusal { error, said }| {
            match self.del() {
                Ok(()) => Refusal { error, said },
                Err(undo) => {
                    let details = format!("{} taking the address back: {undo}", error.details);
                    Refusal { error: error.details(details.trim_start()), said }
                }
            }
        })
    }

    /// Gives the addresses back.
    ///
    /// # Errors
    /// As [`Delegate::run`].
    pub fn del(&self) -> Result<(), Error> {
        self.0.run(Command::Del).map(drop)
    }

    /// Asks whether they are still given.
    ///
    /// # Errors
    /// As [`Delegate::run`].
    pub fn check(&self) -> Result<(), Error> {
        self.0.run(Command::Check).map(drop)
    }

    /// Passes GC on.
    ///
    /// # Errors
    /// As [`Delegate::run`].
    pub fn gc(&self) -> Result<(), Error> {
        self.0.run(Command::Gc).map(drop)
    }

    /// Passes STATUS on.
    ///
    /// # Errors
    /// As [`Delegate::run`].
    pub fn status(&self) -> Result<(), Error> {
        self.0.run(Command::Status).map(drop)
    }
}

fn find(kind: &str, path: &[PathBuf], unset: bool) -> Result<PathBuf, Error> {
    if kind.contains(['/', '\0']) || matches!(kind, "" | "." | "..") {
        let msg = format!("{kind:?} is no plugin's file name");
        return Err(Error::new(Code::INVALID_CONFIG, msg));
    }
    let runs = |file: &PathBuf| {
        file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    path.iter().map(|dir| dir.join(kind)).find(runs).ok_or_else(|| {
        let dirs: Vec<_> = path.iter().map(|dir| dir.display().to_string()).collect();
        let unset = if unset { " (not set; this plugin's own directory)" } else { "" };
        let msg = format!(
            "there is no plugin {kind:?} in CNI_PATH{unset}: looked in {}",
            dirs.join(", ")
        );
        Error::new(Code::INVALID_ENVIRONMENT, msg)
    })
}

struct Output {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// Feeds, reads and awaits a process, within the bound. The threads are not joined: a grandchild
/// may hold the pipes open.
fn converse(mut process: Process, input: Vec<u8>, timeout: Duration) -> io::Result<Output> {
    let until = Instant::now() + timeout;
    let mut child =
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let talked = talk(&mut child, input).and_then(|(stdout, stderr)| {
        let stdout = collect(&stdout, until)?;
        let status = wait(&mut child, until)?;
        // Its end is what counts; who inherited stderr may keep it longer.
        let stderr = collect(&stderr, Instant::now() + Duration::from_millis(100));
        Ok(Output { status, stdout, stderr: stderr.unwrap_or_default() })
    });
    if talked.is_err() {
        // It may have ended in this moment; then there is nothing to kill.
        let _ = child.kill();
        let _ = child.wait();
    }
    talked
}

type Collected = Receiver<io::Result<Vec<u8>>>;

fn talk(child: &mut Child, input: Vec<u8>) -> io::Result<(Collected, Collected)> {
    if let Some(mut stdin) = child.stdin.take() {
        // A plugin that ends without reading its input is judged by its status.
        thread::Builder::new().spawn(move || drop(stdin.write_all(&input)))?;
    }
    Ok((gather(child.stdout.take())?, gather(child.stderr.take())?))
}

fn gather(pipe: Option<impl Read + Send + 'static>) -> io::Result<Collected> {
    let (send, receive) = channel();
    thread::Builder::new().spawn(move || {
        let mut bytes = Vec::new();
        let read = pipe.map_or(Ok(0), |pipe| pipe.take(MOST_OUTPUT).read_to_end(&mut bytes));
        // The receiver is gone if the bound has passed.
        let _ = send.send(read.map(|_| bytes));
    })?;
    Ok(receive)
}

fn collect(from: &Collected, until: Instant) -> io::Result<Vec<u8>> {
    let left = until.saturating_duration_since(Instant::now());
    from.recv_timeout(left).unwrap_or_else(|_| Err(too_slow()))
}

/// Output has ended, so the process is ending: look often at first.
fn wait(child: &mut Child, until: Instant) -> io::Result<ExitStatus> {
    let mut pause = Duration::from_micros(20);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= until {
            return Err(too_slow());
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn too_slow() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not end; it was killed")
}
