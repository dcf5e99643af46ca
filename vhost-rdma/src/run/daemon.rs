//! The daemon of a program that is run: one that runs already, or one of its own.

use std::ffi::OsStr;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{Fault, host};
use crate::config;

/// How long a daemon may take to begin.
const START: Duration = Duration::from_secs(10);
/// The name of an admin socket in a runtime directory.
const ADMIN: &str = "admin.sock";

/// One that is ours ends with this.
struct Own {
    child: Child,
    dir: PathBuf,
}

/// See the module. NICs that were added go when this is dropped.
pub(super) struct Daemon {
    admin: PathBuf,
    own: Option<Own>,
    nics: Mutex<Vec<String>>,
}

fn listens(admin: &Path) -> bool {
    UnixStream::connect(admin).is_ok()
}

/// This program.
fn ourselves() -> Result<PathBuf, Fault> {
    std::env::current_exe().map_err(host("find this program"))
}

/// A new directory that nobody else can open.
fn private_dir() -> io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt as _;
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let base = base.filter(|dir| dir.is_dir()).unwrap_or_else(std::env::temp_dir);
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let dir = base.join(format!("vhost-rdma-run-{:016x}", u64::from_ne_bytes(random)));
    std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
    Ok(dir)
}

/// An address for programs that know IPv4 alone (`ib_write_bw -R`): of 198.18.0.0/15, which is for
/// measurements and nobody's (RFC 2544). Two of a network are the same once in many thousand times;
/// the daemon refuses the second.
fn v4(random: u64) -> Ipv4Addr {
    let host = u32::try_from(random % ((1 << 17) - 2)).unwrap_or(0) + 1;
    Ipv4Addr::from(u32::from_be_bytes([198, 18, 0, 0]) + host)
}

impl Daemon {
    /// The one that runs, if it lets us in; else one of our own, with this network.
    pub(super) fn of(network: Option<&str>) -> Result<Self, Fault> {
        let admin = config::default_admin_socket();
        let nics = Mutex::default();
        if listens(&admin) {
            return Ok(Self { admin, own: None, nics });
        }
        let dir = private_dir().map_err(host("make a directory for the daemon"))?;
        let admin = dir.join(ADMIN);
        let child = Command::new(ourselves()?)
            .args(["serve", "--ephemeral", "--with-parent", "--runtime-dir"])
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // Keys of a terminal are for the program, which may do with them what it likes.
            .process_group(0)
            .env_remove("NOTIFY_SOCKET")
            .env("VHOST_RDMA_LOG", std::env::var_os("VHOST_RDMA_LOG").unwrap_or("error".into()))
            .spawn()
            .map_err(host("start a daemon"))?;
        let mut daemon = Self { admin, own: Some(Own { child, dir }), nics };
        daemon.wait()?;
        if let Some(network) = network.filter(|name| *name != crate::node::DEFAULT_NETWORK) {
            daemon.ask(&["network", "add", network].map(OsStr::new))?;
        }
        Ok(daemon)
    }

    fn wait(&mut self) -> Result<(), Fault> {
        let begin = Instant::now();
        while !listens(&self.admin) {
            let child = self.own.as_mut().map(|own| own.child.try_wait());
            if matches!(child, Some(Ok(Some(_)) | Err(_))) || begin.elapsed() > START {
                return Err(Fault::Daemon("the daemon does not start; it says why above".into()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Runs a command of ours; what it said.
    fn ask(&self, args: &[&OsStr]) -> Result<Vec<u8>, Fault> {
        let mut command = Command::new(ourselves()?);
        command.arg("--json").arg("--socket").arg(&self.admin).args(args).stdin(Stdio::null());
        let output = command.output().map_err(host("ask the daemon"))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = serde_json::from_slice::<serde_json::Value>(&output.stderr).ok();
        let message = said.and_then(|said| Some(said["error"]["message"].as_str()?.to_owned()));
        Err(Fault::Daemon(message.unwrap_or_else(|| "the daemon refuses".to_owned())))
    }

    /// Adds NICs; their sockets, and their IPv4 addresses.
    pub(super) fn add_nics(
        &self,
        count: u32,
        network: Option<&str>,
    ) -> Result<Vec<(PathBuf, Ipv4Addr)>, Fault> {
        // Another may have the same address: once more, with another.
        (0..count).map(|_| self.add_nic(network).or_else(|_| self.add_nic(network))).collect()
    }

    fn add_nic(&self, network: Option<&str>) -> Result<(PathBuf, Ipv4Addr), Fault> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| Fault::Host {
            action: "get random numbers".into(),
            source: io::Error::other(error),
        })?;
        let random = u64::from_ne_bytes(random);
        let name = format!("run-{random:016x}");
        // RFC 4193: of our own, and nobody else's.
        let groups = random.to_be_bytes();
        let [a, b, c, d] = [0, 2, 4, 6].map(|at| {
            u16::from_be_bytes([
                groups.get(at).copied().unwrap_or(0),
                groups.get(at + 1).copied().unwrap_or(0),
            ])
        });
        let address = std::net::Ipv6Addr::new(0xfd76, 0x7264, 0x6d61, 0, a, b, c, d).to_string();
        // First, since programs that know both kinds (libfabric) take the first for all of them.
        let v4 = v4(random);
        let first = v4.to_string();
        let network = network.unwrap_or(crate::node::DEFAULT_NETWORK);
        let args = ["nic", "add", &name, "--for", "process", "--network", network, "--address"];
        let args = args.into_iter().chain([first.as_str(), "--address", address.as_str()]);
        let said = self.ask(&args.map(OsStr::new).collect::<Vec<_>>())?;
        self.nics.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(name);
        let nic: serde_json::Value = serde_json::from_slice(&said).unwrap_or_default();
        let socket = nic["socket"].as_str().map(PathBuf::from);
        socket
            .map(|socket| (socket, v4))
            .ok_or_else(|| Fault::Daemon("the daemon names no socket".to_owned()))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(Own { child, dir }) = &mut self.own {
            // It ends by itself as its parent does; but its directory is to go now.
            let pid = rustix::process::Pid::from_child(child);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let _ = child.wait();
            let _ = std::fs::remove_dir_all(dir);
            return;
        }
        let nics = std::mem::take(
            &mut *self.nics.lock().unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        for name in nics {
            if let Err(error) = self.ask(&["nic", "rm", &name].map(OsStr::new)) {
                eprintln!("vhost-rdma: NIC {name} is still there: {error}");
            }
        }
    }
}
