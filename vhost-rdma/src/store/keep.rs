//! `vhost-rdma keep -- serve …`: a small parent that starts the daemon again and keeps its store.
//!
//! It is to the daemon what systemd is with `FileDescriptorStoreMax=` and `Restart=on-failure`. It
//! opens nothing, reads no file and parses nothing but the daemon's own short datagrams. They come
//! by a pair of sockets that each daemon gets anew: one with a name could be found by anybody
//! (/proc/net/unix), who would keep the parent busy, or its descriptors.
//!
//! A child cannot be given descriptors without `unsafe`; so the child is first this program again
//! ([`become_child`]), which takes them over a socket and becomes the daemon. Their names are in a
//! table, as those of an upgrade are: a variable, which is systemd's way, has room for 128 KiB
//! (`MAX_ARG_STRLEN`).
//!
//! A daemon that ends with status 0, or before it was ready for the first time (its options are
//! wrong), is not started again, and its status is this process's.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};
use rustix::process::{Pid, WaitOptions, kill_process, set_parent_process_death_signal, wait};

use super::successor::become_heir;
use super::{FIRST, Heirloom, NOTIFY, PARENT};
use crate::aside::drop_aside;
use crate::network_process::Wire;
use crate::{limits, socket, telemetry};

/// Descriptors that are kept for a daemon.
const MOST: usize = 1 << 16;
/// Bytes of a datagram that are looked at; names are short.
const TEXT: usize = 1024;
const FIRST_WAIT: Duration = Duration::from_millis(100);
const MOST_WAIT: Duration = Duration::from_secs(30);
/// A daemon that lived so long did not die of its start.
const CALM: Duration = Duration::from_secs(60);
/// Datagrams that are taken before the next look at signals and at the child.
const TAKEN: usize = 64;
/// Ends the descriptors that are handed down.
const END: &[u8] = b"\0";

/// Runs the daemon until it ends for good; its status.
///
/// # Errors
/// The host refuses what a parent needs.
pub fn run(format: telemetry::LogFormat, command: &[OsString]) -> io::Result<ExitCode> {
    telemetry::start(format, None).map_err(io::Error::other)?;
    limits::raise_descriptors();
    let mut parent = Parent::new(command)?;
    loop {
        let begin = Instant::now();
        let status = parent.live()?;
        if parent.is_over(status) {
            return Ok(ExitCode::from(
                status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1),
            ));
        }
        parent.wait = if begin.elapsed() >= CALM { FIRST_WAIT } else { parent.wait * 2 };
        parent.wait = parent.wait.min(MOST_WAIT);
        let wait_ms = parent.wait.as_millis();
        let kept = parent.kept.len();
        tracing::error!(%status, wait_ms, kept, "the daemon ended; it is started again");
        parent.pause()?;
        if parent.asked {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

struct Parent {
    program: PathBuf,
    command: Vec<OsString>,
    /// Where the daemon talks to; none before the first.
    socket: Option<OwnedFd>,
    signals: SignalFd,
    kept: VecDeque<Heirloom>,
    /// It was, at least once.
    ready: bool,
    /// Somebody wants it to end.
    asked: bool,
    wait: Duration,
}

impl Parent {
    fn new(command: &[OsString]) -> io::Result<Self> {
        let ours = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD];
        let ours: SigSet = ours.into_iter().collect();
        ours.thread_block()?;
        let signals = SignalFd::with_flags(&ours, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Self {
            // By its name: what stands there when the daemon is started again may be a newer one.
            program: std::env::current_exe()?,
            command: command.to_vec(),
            socket: None,
            signals,
            kept: VecDeque::new(),
            ready: false,
            asked: false,
            wait: FIRST_WAIT / 2,
        })
    }

    /// One life of the daemon.
    fn live(&mut self) -> io::Result<ExitStatus> {
        let child = self.spawn()?;
        let pid = Pid::from_child(&child);
        loop {
            let mut fds = vec![PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN)];
            fds.extend(self.socket.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
            poll(&mut fds, None)?;
            self.listen(pid)?;
            self.heed(Some(pid))?;
            if let Some(status) = reap(pid)? {
                // What it had said is in the queue.
                while self.listen(pid)? {}
                return Ok(status);
            }
        }
    }

    fn is_over(&self, status: ExitStatus) -> bool {
        self.asked || status.success() || (!self.ready && status.code().is_some())
    }

    /// Waits before the next one, unless somebody wants the end.
    fn pause(&mut self) -> io::Result<()> {
        let until = Instant::now() + self.wait;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut fds = [PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&timeout))?;
            self.heed(None)?;
            if self.asked {
                break;
            }
        }
        Ok(())
    }

    fn spawn(&mut self) -> io::Result<Child> {
        let (own, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        set_socket_passcred(&own, true)?;
        self.socket = Some(own);
        let (wire, far) = Wire::pair()?;
        let mut command = Command::new(&self.program);
        command.arg("kept").arg("--").args(&self.command);
        // Another parent's is none of its.
        command.env_remove(NOTIFY).env("FDSTORE", MOST.to_string());
        let child = command.stdin(Stdio::from(far)).spawn()?;
        if let Err(error) = self.hand_down(&wire, &theirs) {
            // Without the end of it the child ends, and is looked at then.
            tracing::error!(%error, "the daemon is not there to take what was kept");
        }
        Ok(child)
    }

    fn hand_down(&self, wire: &Wire, theirs: &OwnedFd) -> io::Result<()> {
        wire.send(PARENT.as_bytes(), &[theirs.as_fd()])?;
        for (name, file) in &self.kept {
            wire.send(name.as_bytes(), &[file.as_fd()])?;
        }
        wire.send(END, &[])
    }

    /// Takes signals: those that are the daemon's are passed on.
    fn heed(&mut self, pid: Option<Pid>) -> io::Result<()> {
        while let Some(info) = self.signals.read_signal()? {
            let signal = match i32::try_from(info.ssi_signo).ok().map(Signal::try_from) {
                Some(Ok(Signal::SIGTERM | Signal::SIGINT)) => {
                    self.asked = true;
                    rustix::process::Signal::TERM
                }
                Some(Ok(Signal::SIGHUP)) => rustix::process::Signal::HUP,
                _ => continue,
            };
            if let Some(pid) = pid {
                // One that has just ended is found in a moment.
                let _ = kill_process(pid, signal);
            }
        }
        Ok(())
    }

    /// Takes what the daemon said; whether there may be more.
    fn listen(&mut self, pid: Pid) -> io::Result<bool> {
        for _ in 0..TAKEN {
            let Some(socket) = &self.socket else { return Ok(false) };
            let mut bytes = [0; TEXT];
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8), ScmCredentials(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let got = match recvmsg(socket, &mut parts, &mut control, flags) {
                Ok(got) => got.bytes,
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                // Nobody has the other end any more, and all was read.
                Err(rustix::io::Errno::CONNRESET) => continue,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let (mut files, mut own) = (Vec::new(), false);
            for message in control.drain() {
                match message {
                    RecvAncillaryMessage::ScmRights(rights) => files.extend(rights),
                    RecvAncillaryMessage::ScmCredentials(who) => own = who.pid == pid,
                    _ => {}
                }
            }
            let text = String::from_utf8_lossy(bytes.get(..got).unwrap_or_default());
            if own {
                self.take(&text, files);
            }
        }
        Ok(true)
    }

    fn take(&mut self, text: &str, files: Vec<OwnedFd>) {
        let has = |line: &str| text.lines().any(|l| l == line);
        self.ready |= has("READY=1");
        let Some(name) = text.lines().find_map(|line| line.strip_prefix("FDNAME=")) else { return };
        if has("FDSTOREREMOVE=1") {
            // Of VMMs, too.
            let (gone, kept) = self.kept.drain(..).partition(|(kept, _)| kept == name);
            self.kept = kept;
            drop_aside::<VecDeque<Heirloom>>(name, gone);
        } else if has("FDSTORE=1") && fits(name) {
            for file in files {
                if self.kept.iter().any(|(_, kept)| is_the_same(kept, &file)) {
                    // It is kept, so this is not the last of it.
                    continue;
                }
                if self.kept.len() >= MOST {
                    tracing::error!(name, "the daemon keeps too much; this is not kept");
                    return;
                }
                self.kept.push_back((name.to_owned(), file));
            }
        }
    }
}

/// As in systemd, what is there already changes nothing, whatever its name (`same_fd` in
/// service_add_fd_store). Anonymous files, such as eventfds, have no identity that we could see.
fn is_the_same(old: &OwnedFd, new: &OwnedFd) -> bool {
    let file = |fd: &OwnedFd| {
        let stat = fstat(fd).ok()?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        matches!(kind, FileType::Socket | FileType::RegularFile)
            .then_some((stat.st_dev, stat.st_ino))
    };
    file(old).is_some_and(|old| Some(old) == file(new))
}

/// As systemd has it: it goes into a variable whose parts colons separate.
fn fits(name: &str) -> bool {
    !name.is_empty() && name.len() <= 255 && name.bytes().all(|b| b.is_ascii_graphic() && b != b':')
}

/// Takes every process that has ended; the daemon's own end. The others are those that it left to
/// us, where we are the first process of a container.
fn reap(daemon: Pid) -> io::Result<Option<ExitStatus>> {
    let mut own = None;
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == daemon => {
                own = Some(std::os::unix::process::ExitStatusExt::from_raw(status.as_raw()));
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(own),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Takes what is handed down at standard input, and becomes the daemon. It returns only if it
/// cannot.
#[must_use]
pub fn become_child(command: &[OsString]) -> io::Error {
    match prepare() {
        Ok(heirlooms) => {
            let mut daemon = Command::new("/proc/self/exe");
            daemon.arg0("vhost-rdma").args(command).stdin(Stdio::null());
            become_heir(daemon, &heirlooms)
        }
        Err(error) => error,
    }
}

fn prepare() -> io::Result<Vec<Heirloom>> {
    socket::close_strangers();
    // A parent that is killed leaves nobody behind.
    set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    SigSet::empty().thread_set_mask()?;
    limits::raise_descriptors();
    let wire = Wire::new(fcntl_dupfd_cloexec(io::stdin(), FIRST)?);
    let mut heirlooms = Vec::new();
    while let Some(packet) = wire.receive()? {
        if packet.bytes == END {
            return Ok(heirlooms);
        }
        let name = String::from_utf8(packet.bytes).map_err(io::Error::other)?;
        let [file] = <[OwnedFd; 1]>::try_from(packet.files)
            .map_err(|_| io::Error::other("a descriptor is missing"))?;
        heirlooms.push((name, file));
    }
    Err(io::Error::other("what is handed down has no end"))
}
