//! Processes of the daemon: this same program, executed anew with a socket as its standard input.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;

use crate::network_process::Wire;
use crate::telemetry::FILTER_ENV;

/// This program, whatever has become of its file.
const PROGRAM: &str = "/proc/self/exe";

/// Starts one. It dies with the thread that calls this (PR_SET_PDEATHSIG).
pub(super) fn spawn(arguments: &[&str], socket: OwnedFd) -> io::Result<Child> {
    let mut command = Command::new(PROGRAM);
    command.arg0("vhost-rdma").args(arguments).env_clear().current_dir("/");
    for variable in [FILTER_ENV, "RUST_BACKTRACE"] {
        command.envs(std::env::var_os(variable).map(|value| (variable, value)));
    }
    command.stdin(Stdio::from(socket)).stdout(Stdio::null()).spawn()
}

/// What has ended a process.
pub(super) fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (_, Some(signal)) => format!("was ended by signal {signal}"),
        _ => "ended".to_owned(),
    }
}

/// Nobody speaks by this wire any more; whoever waits for a message finds the end.
pub(super) fn hang_up(wire: &Wire) {
    wire.hang_up();
}

/// A file of memory with something that is too long for a message.
pub(super) fn file_of<T: Serialize + ?Sized>(name: &str, what: &T) -> io::Result<OwnedFd> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    let mut writer = BufWriter::new(&file);
    serde_json::to_writer(&mut writer, what)?;
    writer.flush()?;
    drop(writer);
    Ok(file.into())
}
