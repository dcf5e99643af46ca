//! The program that this process becomes: another build of it, with what this one keeps.
//!
//! An upgrade needs no service manager. The process stays the same, and so do the descriptors that
//! it does not close; the next program learns from a table which of them are whose. The table is a
//! file of memory, since a variable has room for few names.
//!
//! The program is the file that this one was started from, as it is now. It is never one that
//! somebody names: whoever may use the admin socket is not to run what it likes as this user.

use std::env;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

use super::Heirloom;
use crate::socket;

/// Names the table's descriptor, and the process that it is for.
const TABLE: &str = "VHOST_RDMA_HANDED_DOWN";
/// What a program says before the version of the saved state that it reads.
pub const READS: &str = "it would start, and reads saved state of version ";
/// How long a program may take to say its version, or whether it would start.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of what it says that are read.
const SAID: u64 = 4096;

/// The program that this process can become.
#[derive(Debug, Clone)]
pub struct Successor {
    program: PathBuf,
}

impl Successor {
    /// The file that this process was started from. To be asked before it can be replaced.
    ///
    /// # Errors
    /// The host does not say.
    pub fn find() -> io::Result<Self> {
        Ok(Self { program: env::current_exe()? })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.program
    }

    /// The version that the file there says of itself.
    ///
    /// # Errors
    /// Why it is no program of ours.
    pub fn version(&self) -> Result<String, String> {
        let mut command = Command::new(&self.program);
        let said = ask(command.arg("--version"), "say its version")?;
        if !said.status.success() {
            return Err(format!("its --version ends with {}", said.status));
        }
        let text = said.out.trim();
        let version = text.strip_prefix("vhost-rdma ");
        version.map(str::to_owned).ok_or_else(|| format!("it says {text:?}"))
    }

    /// Whether the file there would start with the arguments of this one: what is wrong with its
    /// configuration is to be known while there is a program that goes on. The version of saved
    /// state that it reads, if it says so.
    ///
    /// # Errors
    /// What it says.
    pub fn check(&self) -> Result<Option<String>, String> {
        let mut command = Command::new(&self.program);
        let said = ask(command.args(env::args_os().skip(1)).arg("--check"), "look at its options")?;
        // One that cannot be asked is as good as those before it were.
        if said.status.success() || said.errors.contains("unexpected argument '--check'") {
            let mut lines = said.out.lines();
            return Ok(lines.find_map(|line| Some(line.strip_prefix(READS)?.trim().to_owned())));
        }
        Err(said.errors.trim().trim_start_matches("vhost-rdma: ").to_owned())
    }
}

/// What a program has said.
struct Said {
    status: ExitStatus,
    out: String,
    errors: String,
}

/// Has a program say something, to the end.
fn ask(command: &mut Command, what: &str) -> Result<Said, String> {
    // Files take what it says, however much that is, and nobody has to read meanwhile.
    let file = || memfd_create("vhost-rdma-said", MemfdFlags::CLOEXEC).map(File::from);
    let (mut out, mut errors) = match (file(), file()) {
        (Ok(out), Ok(errors)) => (out, errors),
        (Err(error), _) | (_, Err(error)) => return Err(error.to_string()),
    };
    let copy = |file: &File| file.try_clone().map_err(|error| error.to_string());
    command.stdin(Stdio::null()).stdout(copy(&out)?).stderr(copy(&errors)?);
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let until = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it does not {what}"));
            }
        }
    };
    let text = |file: &mut File| {
        let mut bytes = Vec::new();
        let read = file.rewind().and_then(|()| file.take(SAID).read_to_end(&mut bytes));
        read.map(|_| String::from_utf8_lossy(&bytes).into_owned()).map_err(|e| e.to_string())
    };
    Ok(Said { status, out: text(&mut out)?, errors: text(&mut errors)? })
}

/// Becomes the next program, which finds `heirlooms` ([`super::Store::open`]); it returns only if
/// it cannot. The arguments are those of this one.
#[must_use]
pub fn become_successor(program: &Path, heirlooms: &[Heirloom]) -> io::Error {
    let mut next = Command::new(program);
    next.arg0("vhost-rdma").args(env::args_os().skip(1));
    become_heir(next, heirlooms)
}

/// Becomes the program of `next`, which finds `heirlooms`; it returns only if it cannot.
pub(super) fn become_heir(mut next: Command, heirlooms: &[Heirloom]) -> io::Error {
    match table(heirlooms) {
        // Open until it is there.
        Ok(table) => {
            // What this program was started with is closed, or in the table under another number.
            for old in [super::COUNT, super::PROCESS, super::NAMES] {
                next.env_remove(old);
            }
            next.env(TABLE, format!("{}:{}", std::process::id(), table.as_raw_fd()));
            next.exec()
        }
        Err(error) => error,
    }
}

/// Has all descriptors stay open, and a table of them.
fn table(heirlooms: &[Heirloom]) -> io::Result<OwnedFd> {
    let numbers = heirlooms.iter().map(|(name, file)| (name.as_str(), file.as_raw_fd()));
    let text = serde_json::to_vec(&numbers.collect::<Vec<_>>())?;
    let mut file = File::from(memfd_create("vhost-rdma-table", MemfdFlags::CLOEXEC)?);
    file.write_all(&text)?;
    file.rewind()?;
    for (_, file) in heirlooms {
        fcntl_setfd(file, FdFlags::empty())?;
    }
    fcntl_setfd(file.as_fd(), FdFlags::empty())?;
    Ok(file.into())
}

/// What the program before this one left. To be called once, and before anything is opened.
pub(super) fn inherited() -> Vec<Heirloom> {
    let Some((pid, number)) = env::var(TABLE).ok().and_then(|text| parse(&text)) else {
        return Vec::new();
    };
    if pid != std::process::id() {
        return Vec::new();
    }
    let read = socket::inherit(number).and_then(|table| {
        let mut text = Vec::new();
        File::from(table).read_to_end(&mut text)?;
        Ok(serde_json::from_slice::<Vec<(String, RawFd)>>(&text)?)
    });
    let numbers = read.unwrap_or_else(|error| {
        tracing::error!(%error, "what the last program left cannot be read");
        Vec::new()
    });
    let inherit = |(name, number): (String, RawFd)| match socket::inherit(number) {
        Ok(file) => Some((name, file)),
        Err(error) => {
            tracing::error!(name, number, %error, "a descriptor was promised and is not there");
            None
        }
    };
    numbers.into_iter().filter_map(inherit).collect()
}

fn parse(text: &str) -> Option<(u32, RawFd)> {
    let (pid, number) = text.split_once(':')?;
    Some((pid.parse().ok()?, number.parse().ok()?))
}
