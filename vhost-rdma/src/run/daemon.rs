//! The daemon of a program that is run: one that runs already, or one of its own.

use std::ffi::OsStr;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::nics::{Holder, NewNic, ask, ourselves};
use super::{Fault, host};
use crate::config;

/// How long a daemon may take to begin.
const START: Duration = Duration::from_secs(10);
/// The name of an admin socket in a runtime directory.
const ADMIN: &str = "admin.sock";

/// One that is ours ends when this is dropped, and its NICs with it.
pub(super) struct OwnDaemon {
    admin: PathBuf,
    child: Child,
    dir: PathBuf,
}

/// See the module. NICs that were added go when this is dropped.
pub(super) enum Daemon {
    Own(OwnDaemon),
    /// Others use it too.
    Shared(Holder),
}

fn listens(admin: &Path) -> bool {
    UnixStream::connect(admin).is_ok()
}

/// A new directory that nobody else can open.
fn private_dir() -> io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt as _;
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let base = base.filter(|dir| dir.is_dir()).unwrap_or_else(std::env::temp_dir);
    let mut random = [0; 8];
    crate::random::fill(&mut random)?;
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

impl OwnDaemon {
    /// With this network.
    fn start(network: Option<&str>) -> Result<Self, Fault> {
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
        let mut daemon = Self { admin, child, dir };
        daemon.wait()?;
        if let Some(network) = network.filter(|name| *name != crate::node::DEFAULT_NETWORK) {
            ask(&daemon.admin, &["network", "add", network].map(OsStr::new))?;
        }
        Ok(daemon)
    }

    fn wait(&mut self) -> Result<(), Fault> {
        let begin = Instant::now();
        while !listens(&self.admin) {
            let ended = !matches!(self.child.try_wait(), Ok(None));
            if ended || begin.elapsed() > START {
                return Err(Fault::Daemon("the daemon does not start; it says why above".into()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        // It ends by itself as its parent does; but its directory is to go now.
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Daemon {
    /// The one at this socket; where none is named the one that runs, if it lets us in; else one of
    /// our own, with this network.
    pub(super) fn of(socket: Option<&Path>, network: Option<&str>) -> Result<Self, Fault> {
        let named = socket.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.into()));
        let admin = named.clone().unwrap_or_else(config::default_admin_socket);
        // One that is named has its own words for why it is not reached.
        if named.is_some() || listens(&admin) {
            return Ok(Self::Shared(Holder::start(admin)?));
        }
        Ok(Self::Own(OwnDaemon::start(network)?))
    }

    /// Adds NICs; their sockets, and their IPv4 addresses.
    pub(super) fn add_nics(
        &mut self,
        count: u32,
        network: Option<&str>,
    ) -> Result<Vec<(PathBuf, Ipv4Addr)>, Fault> {
        let add = |_| {
            let first = self.add_nic(network);
            // Another may have the same address: once more, with another.
            first.or_else(|_| self.add_nic(network))
        };
        (0..count).map(add).collect()
    }

    fn add_nic(&mut self, network: Option<&str>) -> Result<(PathBuf, Ipv4Addr), Fault> {
        let mut random = [0; 8];
        crate::random::fill(&mut random).map_err(host("get random numbers"))?;
        let random = u64::from_ne_bytes(random);
        let v4 = v4(random);
        // RFC 4193: of our own, and nobody else's.
        let v6 = Ipv6Addr::from_bits(0xfd76_7264_6d61_0000 << 64 | u128::from(random));
        let nic = NewNic {
            name: format!("run-{random:016x}"),
            network: network.unwrap_or(crate::node::DEFAULT_NETWORK).to_owned(),
            // First, since programs that know both kinds (libfabric) take the first for all.
            addresses: vec![v4.into(), v6.into()],
        };
        let socket = match self {
            Self::Own(own) => nic.add(&own.admin)?,
            Self::Shared(holder) => holder.add(nic)?,
        };
        Ok((socket, v4))
    }
}
