//! `vhost-rdma run`: a program with an RDMA device, without root and without configuration.
//!
//! If no daemon runs, one is started that lives as long as the program. It gets NICs for processes,
//! the program their sockets (`VHOST_RDMA_DEVICES`), their addresses (`VHOST_RDMA_ADDRESSES`) and
//! the libraries (`LD_LIBRARY_PATH`, and `VHOST_RDMA_LIBRARIES` for who hands them on), and when
//! the program ends everything goes (`nics`). What is asked of the daemon is asked by this same
//! program, as anybody would. Signals are handed on to the program.
//!
//! What cannot be served is said in one line before anything is started: a library path means
//! nothing to a static program, to another C library, and to a program with more rights than ours.

#![forbid(unsafe_code)]

mod child;
mod daemon;
mod elf;
mod nics;
mod program;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use self::daemon::Daemon;
pub use self::nics::hold;

/// Where the libraries are; programs are told too, whoever starts a container with them.
const LIBRARIES: &str = "VHOST_RDMA_LIBRARIES";
/// Sockets of NICs, for the libraries.
const DEVICES: &str = "VHOST_RDMA_DEVICES";
/// Their IPv4 addresses, for whoever writes a script: what rdma_cm programs connect to.
const ADDRESSES: &str = "VHOST_RDMA_ADDRESSES";
/// `0`: the program's heap stays what it is.
const SHARED_HEAP: &str = "VHOST_RDMA_SHARED_HEAP";
/// Where packages put them.
const INSTALLED: [&str; 2] = ["/usr/lib/vhost-rdma", "/usr/local/lib/vhost-rdma"];
/// What stands for the distribution's.
const LIBIBVERBS: &str = "libibverbs.so.1";
const HEAP: &str = "libvhost_rdma_heap.so";
/// Files that programs look for beside a device.
const FILES: &str = "libvhost_rdma_files.so";

/// What to run, and with what.
#[derive(Debug)]
pub struct Wanted {
    /// NICs, each a device of the program.
    pub nics: u32,
    /// The admin socket of the daemon, if one is named.
    pub socket: Option<PathBuf>,
    /// Their network.
    pub network: Option<String>,
    /// Sockets of NICs that there are already.
    pub connect: Vec<PathBuf>,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// Why a program does not run.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It cannot be served.
    #[error("{0}")]
    Program(#[from] program::Unfit),
    /// There are no libraries.
    #[error(
        "the libraries of NICs for processes are not there: build them with \
         vhost-rdma/process/build.sh RDMA_CORE_SOURCE DIR, and name DIR/lib in {LIBRARIES}"
    )]
    Libraries,
    /// The daemon refuses.
    #[error("{0}")]
    Daemon(String),
    /// The host.
    #[error("cannot {action}: {source}")]
    Host {
        /// What was tried.
        action: String,
        /// What it said.
        source: io::Error,
    },
}

fn host(action: impl Into<String>) -> impl FnOnce(io::Error) -> Fault {
    let action = action.into();
    move |source| Fault::Host { action, source }
}

/// The folder with our libraries.
fn libraries() -> Option<PathBuf> {
    let named = std::env::var_os(LIBRARIES).map(PathBuf::from);
    let beside = std::env::current_exe().ok();
    let beside = beside.and_then(|exe| Some(exe.parent()?.parent()?.join("lib/vhost-rdma")));
    let mut all = named.into_iter().chain(beside).chain(INSTALLED.map(PathBuf::from));
    let found = all.find(|dir| dir.join(LIBIBVERBS).exists())?;
    // A program may change its directory.
    Some(std::path::absolute(&found).unwrap_or(found))
}

/// `first` before what a variable has.
fn before(first: &Path, variable: &str) -> OsString {
    let mut all = first.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os(variable).filter(|rest| !rest.is_empty()) {
        all.push(":");
        all.push(rest);
    }
    all
}

/// Runs it to its end; its exit status.
///
/// # Errors
/// See [`Fault`].
pub fn run(wanted: &Wanted) -> Result<ExitCode, Fault> {
    let program = wanted.command.first().map_or(OsStr::new(""), OsString::as_os_str);
    program::check(program)?;
    let libraries = libraries().ok_or(Fault::Libraries)?;
    let network = wanted.network.as_deref();
    let mut daemon = match wanted.connect.is_empty() {
        true => Some(Daemon::of(wanted.socket.as_deref(), network)?),
        false => None,
    };
    let (sockets, addresses): (Vec<_>, Vec<_>) = match &mut daemon {
        Some(daemon) => daemon.add_nics(wanted.nics, network)?.into_iter().unzip(),
        None => {
            let absolute = wanted.connect.iter().map(std::path::absolute);
            let sockets = absolute.collect::<io::Result<_>>();
            (sockets.map_err(host("find the present directory"))?, Vec::new())
        }
    };
    let devices = sockets.iter().map(|socket| socket.as_os_str()).collect::<Vec<_>>();
    let mut command = Command::new(program);
    command.args(wanted.command.get(1..).unwrap_or_default());
    command.env(DEVICES, devices.join(OsStr::new(":")));
    if !addresses.is_empty() {
        let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        command.env(ADDRESSES, all.join(" "));
    }
    command.env(LIBRARIES, &libraries);
    command.env("LD_LIBRARY_PATH", before(&libraries, "LD_LIBRARY_PATH"));
    let heap = std::env::var_os(SHARED_HEAP).is_none_or(|heap| heap != "0");
    let preloaded = heap.then_some(HEAP).into_iter().chain([FILES]);
    let preloaded = preloaded.map(|name| libraries.join(name)).filter(|path| path.exists());
    let mut preloaded: Vec<_> = preloaded.map(PathBuf::into_os_string).collect();
    if let Some(first) = program::first_of_all(program).filter(|_| !preloaded.is_empty()) {
        preloaded.insert(0, first.into());
    }
    let preloaded = preloaded.join(OsStr::new(":"));
    if !preloaded.is_empty() {
        command.env("LD_PRELOAD", before(Path::new(&preloaded), "LD_PRELOAD"));
    }
    let action = format!("run {}", program.display());
    let status = child::run(|| command.spawn()).map_err(host(action))?;
    drop(daemon);
    // As a shell tells of a signal.
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}
