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
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

use super::Heirloom;
use crate::socket;

/// Names the table's descriptor, and the process that it is for.
const TABLE: &str = "VHOST_RDMA_HANDED_DOWN";
/// How long a program may take to say its version.
const PATIENCE: Duration = Duration::from_secs(5);

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
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().map_err(|e| e.to_string())?;
        let until = Instant::now() + PATIENCE;
        loop {
            match child.try_wait().map_err(|error| error.to_string())? {
                Some(status) if status.success() => break,
                Some(status) => return Err(format!("its --version ends with {status}")),
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                None => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err("it does not say its version".to_owned());
                }
            }
        }
        let mut text = String::new();
        let mut said = child.stdout.take().into_iter();
        said.try_for_each(|said| said.take(1024).read_to_string(&mut text).map(drop))
            .map_err(|error| error.to_string())?;
        let version = text.trim().strip_prefix("vhost-rdma ");
        version.map(str::to_owned).ok_or_else(|| format!("it says {:?}", text.trim()))
    }
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
