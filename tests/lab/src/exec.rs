//! Running other programs: with a log, a deadline, progress and certain death.
//!
//! Every child is put into a process group of its own and tied to this process with
//! `PR_SET_PDEATHSIG` (through util-linux' `setpriv`, so that no `unsafe` pre-exec hook is needed):
//! a killed harness leaves no QEMU behind. SIGINT and SIGTERM only set a flag; every wait looks at
//! it and returns an error, so that destructors run on the way out and do the tidying in one place.
//!
//! `PDEATHSIG` follows the *thread* that spawned the child, so children that outlive a call must be
//! started from the main thread.

use std::fs::{self, File, OpenOptions};
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| Arc::new(AtomicBool::new(false)));

/// How many times its time each wait may take.
static PATIENCE: AtomicU32 = AtomicU32::new(1);

/// The longest silence on a terminal-less run before a sign of life is printed.
const HEARTBEAT: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(20);

/// Turns SIGINT, SIGTERM and SIGHUP into a flag that every wait observes; a second one of them ends
/// the process at once.
pub fn catch_signals() -> Result<()> {
    for signal in
        [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP]
    {
        // Order matters: the conditional shutdown is armed only by the flag that the next line
        // sets.
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&INTERRUPTED))?;
        signal_hook::flag::register(signal, Arc::clone(&INTERRUPTED))?;
    }
    Ok(())
}

/// From now on everything may take `times` as long: what waits for guests that are slow by design.
pub(crate) fn be_patient(times: u32) {
    PATIENCE.store(times, Ordering::Relaxed);
}

/// How many times its time everything may take, at least 1.
pub(crate) fn patience() -> u32 {
    PATIENCE.load(Ordering::Relaxed).max(1)
}

/// `time` for those who must be patient.
pub(crate) fn patient(time: Duration) -> Duration {
    time * patience()
}

/// An error once the user asked us to stop.
pub fn check_interrupt() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// A command in its own process group that dies with this thread.
///
/// It is not told of which package the program is that starts it. Cargo tells that in the
/// environment, build scripts read it (`ring` does), and a cargo that we start would compile half
/// of all libraries again.
pub fn tied(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut cmd = Command::new("setpriv");
    cmd.args(["--pdeathsig", "KILL", "--"]).arg(program).process_group(0).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_MANIFEST_") || text.starts_with("CARGO_PKG_") {
            cmd.env_remove(&name);
        }
    }
    cmd
}

/// The same as another user, without a group, a capability or a way to get one.
pub(crate) fn tied_as(user: u32, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let id = user.to_string();
    let mut cmd = Command::new("setpriv");
    cmd.args(["--pdeathsig", "KILL", "--reuid", &id, "--regid", &id, "--clear-groups"]);
    cmd.args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]).arg(program);
    cmd.process_group(0).stdin(Stdio::null());
    cmd
}

/// A command in a mount namespace of its own, so that whatever it mounts is gone when it ends,
/// however it ends.
pub(crate) fn tied_private_mounts(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut cmd = tied("unshare");
    cmd.args(["--mount", "--propagation", "private", "--"]).arg(program);
    cmd
}

/// Ends a whole process group: politely, then not.
pub(crate) fn end_group(child: &mut Child, grace: Duration) {
    if matches!(child.try_wait(), Ok(Some(_))) {
        return;
    }
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else { return };
    let _ = kill_process_group(pid, Signal::TERM);
    let deadline = Instant::now() + grace;
    while Instant::now() < deadline {
        if matches!(child.try_wait(), Ok(Some(_))) {
            break;
        }
        std::thread::sleep(POLL);
    }
    // The leader may be gone while members of its group are not.
    let _ = kill_process_group(pid, Signal::KILL);
    let _ = child.wait();
}

/// A step that shows its name and elapsed seconds.
#[derive(Debug)]
pub(crate) struct Progress {
    what: String,
    start: Instant,
    shown: Instant,
    tty: bool,
}

impl Progress {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        let what = what.into();
        let tty = std::io::stderr().is_terminal();
        if !tty {
            eprintln!("    {what} …");
        }
        let now = Instant::now();
        Self { what, start: now, shown: now, tty }
    }

    /// To be called often; prints seldom.
    pub(crate) fn tick(&mut self) {
        let every = if self.tty { Duration::from_secs(1) } else { HEARTBEAT };
        if self.shown.elapsed() < every {
            return;
        }
        self.shown = Instant::now();
        let secs = self.start.elapsed().as_secs();
        if self.tty {
            eprint!("\r    {} … {secs} s", self.what);
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("    {} … {secs} s", self.what);
        }
    }

    pub(crate) fn done(self, note: &str) {
        let lead = if self.tty { "\r" } else { "" };
        eprintln!("{lead}    {}: {note} ({:.1} s)", self.what, self.start.elapsed().as_secs_f64());
    }
}

/// Runs `cmd` with its output appended to `log`; an error carries the tail of the log and says
/// where the whole is.
pub fn run_logged(cmd: &mut Command, what: &str, log: &Path, timeout: Duration) -> Result<()> {
    if let Some(dir) = log.parent() {
        fs::create_dir_all(dir)?;
    }
    let mut out = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    let from = out.metadata()?.len();
    writeln!(out, "## {what}: {cmd:?}")?;
    let mut progress = Progress::new(what);
    let mut child = cmd
        .stdout(out.try_clone()?)
        .stderr(out)
        .spawn()
        .with_context(|| format!("cannot start {:?}", cmd.get_program()))?;
    let status = wait(&mut child, timeout, || progress.tick());
    match status {
        Ok(status) if status.success() => {
            progress.done("done");
            Ok(())
        }
        other => {
            progress.done("FAILED");
            let why = other.map_or_else(|e| format!("{e:#}"), |s| s.to_string());
            bail!(
                "{what} failed: {why}\n{}\nThe whole log is {}",
                tail(log, from, 25),
                log.display()
            )
        }
    }
}

/// Runs a short command and returns its standard output; its standard error goes into the error.
pub fn capture(cmd: &mut Command, timeout: Duration) -> Result<String> {
    let mut child = cmd
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {:?}", cmd.get_program()))?;
    // Both pipes are drained beside the wait, or a chatty child would block on a full pipe until
    // the deadline.
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = wait(&mut child, patient(timeout), || {});
    let out = out.join().unwrap_or_default();
    let err = err.join().unwrap_or_default();
    check_interrupt()?;
    let status = status.with_context(|| brief(cmd))?;
    if !status.success() {
        bail!("{}: {status}\n{}", brief(cmd), err.trim_end());
    }
    Ok(out)
}

/// A command line for a message: the words of [`tied`] and of apt's many options say nothing to the
/// reader.
fn brief(cmd: &Command) -> String {
    let words: Vec<String> = std::iter::once(cmd.get_program())
        .chain(cmd.get_args())
        .map(|w| w.to_string_lossy().into_owned())
        .collect();
    let words =
        words.iter().skip_while(|w| ["setpriv", "--pdeathsig", "KILL", "--"].contains(&w.as_str()));
    let mut out: Vec<&str> = Vec::new();
    let mut option = false;
    for word in words {
        if option || word == "-o" {
            option = !option;
        } else {
            out.push(word);
        }
    }
    format!("`{}`", out.join(" "))
}

fn drain(from: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            let _ = from.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for `child` with a deadline; a child that overstays, or that is alive when the user
/// interrupts, is ended.
pub fn wait(child: &mut Child, timeout: Duration, mut each: impl FnMut()) -> Result<ExitStatus> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if let Err(e) = check_interrupt() {
            end_group(child, Duration::from_secs(5));
            return Err(e);
        }
        if Instant::now() >= deadline {
            end_group(child, Duration::from_secs(5));
            bail!("no end within {} s", timeout.as_secs());
        }
        each();
        std::thread::sleep(POLL);
    }
}

/// Waits until `ready` gives something; `what` is named in the error.
pub(crate) fn wait_for<T>(
    what: &str,
    timeout: Duration,
    mut ready: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let timeout = patient(timeout);
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        check_interrupt()?;
        if Instant::now() >= deadline {
            bail!("waited {} s in vain for {what}", timeout.as_secs());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The last `lines` lines of a file from offset `from` on.
pub(crate) fn tail(path: &Path, from: u64, lines: usize) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut f = File::open(path)?;
        let end = f.metadata()?.len();
        f.seek(SeekFrom::Start(from.max(end.saturating_sub(64 * 1024))))?;
        let mut bytes = Vec::new();
        f.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    let start = all.len().saturating_sub(lines);
    all.get(start..).unwrap_or_default().iter().map(|l| format!("    | {l}\n")).collect()
}

/// The workspace's root: two levels above this crate.
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}
