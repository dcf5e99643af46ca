//! A daemon in a temporary directory, and the command line pointed at it.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(20);

/// The binary, cut off from the environment that could lead it to another daemon.
pub(crate) fn vhost_rdma() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vhost-rdma"));
    command
        .env_remove("VHOST_RDMA_SOCKET")
        .env_remove("VHOST_RDMA_LOG")
        .env_remove("NOTIFY_SOCKET");
    command
}

/// What a command said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Said {
    /// The output of a command that must have succeeded.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.status, 0, "{self:?}");
        self.out
    }

    /// The same as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// A command that must have failed with this status, all of these words in its message and
    /// nothing on standard output.
    #[track_caller]
    pub(crate) fn fails(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, status, "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "{word:?} is not in {:?}", self.err);
        }
        assert_eq!(self.out, "");
        assert_eq!(self.err.trim_end().lines().count(), 1, "one sentence, not {:?}", self.err);
    }
}

/// A running `vhost-rdma serve`.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) dir: TempDir,
    child: Child,
    log: mpsc::Receiver<String>,
}

impl Daemon {
    pub(crate) fn start() -> Self {
        Self::start_in(TempDir::with_prefix("vr").unwrap(), &[])
    }

    /// Waits until it says over the notify socket that it is ready.
    pub(crate) fn start_in(dir: TempDir, options: &[&str]) -> Self {
        let notify = dir.path().join("notify");
        let _ = std::fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut child = vhost_rdma()
            .args(["serve", "--runtime-dir"])
            .arg(dir.path().join("run"))
            .args(options)
            .env("NOTIFY_SOCKET", &notify)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = child.stderr.take().unwrap();
        let (sender, log) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(stderr)
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        let mut message = [0; 64];
        // A receive with a time limit is not begun again after a signal (signal(7)), here the end
        // of some other test's child.
        let ready = loop {
            match socket.recv(&mut message) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // What it gives its service manager to keep.
                Ok(length) if message[..length].starts_with(b"FDSTORE") => {}
                received => break received,
            }
        };
        let mut daemon = Self { dir, child, log };
        match ready {
            Ok(length) => assert_eq!(&message[..length], b"READY=1\n"),
            Err(error) => {
                let log = daemon.kill();
                panic!("the daemon is not ready: {error}; it said {log:?}");
            }
        }
        daemon
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.run_dir().join("admin.sock")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs a command against this daemon.
    pub(crate) fn cli(&self, args: &[&str]) -> Said {
        cli(&self.socket(), args)
    }

    /// SIGTERM, and the log once it has ended.
    pub(crate) fn stop(mut self) -> (TempDir, Vec<String>) {
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.child),
            rustix::process::Signal::TERM,
        )
        .unwrap();
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begin.elapsed() < PATIENCE, "the daemon does not stop");
            std::thread::sleep(Duration::from_millis(5));
        };
        let log: Vec<String> = self.log.iter().collect();
        assert!(status.success(), "{log:?}");
        let dir = std::mem::replace(&mut self.dir, TempDir::with_prefix("vr").unwrap());
        (dir, log)
    }

    /// SIGKILL: nothing is cleaned up.
    pub(crate) fn kill(&mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.log.iter().collect()
    }

    /// The directory of a daemon that was killed.
    pub(crate) fn into_dir(mut self) -> TempDir {
        std::mem::replace(&mut self.dir, TempDir::with_prefix("vr").unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn cli(socket: &Path, args: &[&str]) -> Said {
    vhost_rdma().arg("--socket").arg(socket).args(args).output().unwrap().into()
}

/// A `serve` that is expected not to come up.
pub(crate) fn serve_fails(args: &[&str]) -> Said {
    let mut child = vhost_rdma()
        .arg("serve")
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("serve {args:?} came up");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut said = Said {
        status: child.wait().unwrap().code().unwrap_or(-1),
        out: String::new(),
        err: String::new(),
    };
    child.stdout.take().unwrap().read_to_string(&mut said.out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut said.err).unwrap();
    said
}
