//! Ready-made scenes: a daemon with a network, guests on it, connected queue pairs.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::control::{Ctx, Mr};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestConfig, Result};
use crate::qp::{Path, Qp, QpSpec, SendWr};
use crate::rings::{Cq, Cqe, Sge};
use crate::spec::{self, access};

/// Ends the program if it is not dropped in time: a test that hangs must fail, and soon.
#[derive(Debug)]
pub struct Watchdog {
    done: Arc<AtomicBool>,
    wake: mpsc::Sender<()>,
}

impl Watchdog {
    /// Starts to watch.
    pub fn new(limit: Duration) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let (wake, woken) = mpsc::channel();
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        let seen = Arc::clone(&done);
        std::thread::spawn(move || {
            let _over = woken.recv_timeout(limit);
            if !seen.load(Ordering::SeqCst) {
                eprintln!("{name} did not end within {limit:?}");
                std::process::exit(124);
            }
        });
        Self { done, wake }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
        let _gone = self.wake.send(());
    }
}

/// Sets it when it goes, also by a panic: threads that go on until then end with who waits.
#[derive(Debug)]
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A daemon with the network `net`.
#[derive(Debug)]
pub struct World {
    /// The daemon.
    pub daemon: Daemon,
    next: AtomicU16,
    _watchdog: Watchdog,
}

/// A guest whose driver is ready, with a context and a protection domain.
#[derive(Debug, Clone)]
pub struct Node {
    /// The NIC's name.
    pub name: String,
    /// The NIC's socket.
    pub socket: PathBuf,
    /// The guest.
    pub guest: Guest,
    /// A process's context.
    pub ctx: Ctx,
    /// A protection domain.
    pub pdn: u32,
    /// The GID at index 0.
    pub gid: [u8; 16],
}

/// How one comes to a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Door {
    /// As a guest, by its monitor's connection.
    #[default]
    Monitor,
    /// As a process.
    Process,
}

/// A NIC whose guest has yet to come.
#[derive(Debug, Clone)]
pub struct Vacancy {
    /// Who may come.
    pub door: Door,
    /// The NIC's name.
    pub name: String,
    /// The NIC's socket.
    pub socket: PathBuf,
    /// The address that its guest will have.
    pub gid: [u8; 16],
}

/// A queue pair with two completion queues of its own.
#[derive(Debug)]
pub struct End {
    /// Where it lives.
    pub node: Node,
    /// The queue pair.
    pub qp: Qp,
    /// Completions of sends.
    pub scq: Cq,
    /// Completions of receives.
    pub rcq: Cq,
}

/// The GID of an IPv4 address 10.0.`net`.`host`.
pub fn ipv4_gid(net: u8, host: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, net, host]
}

/// An IPv6 GID.
pub fn ipv6_gid(host: u8) -> [u8; 16] {
    [0xfd, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]
}

/// Bytes that tell their place: no two positions within reach have the same neighbourhood.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// A daemon with the network `net`, bounded to two minutes.
    pub fn new() -> Self {
        Self::with(&DaemonOptions::default(), Duration::from_secs(120))
    }

    /// As [`Self::new`], with options and a limit.
    pub fn with(options: &DaemonOptions, limit: Duration) -> Self {
        // A build is no part of the test, and may take longer than one.
        let _built = crate::daemon::binary();
        let watchdog = Watchdog::new(limit * crate::daemon::patience());
        let daemon = Daemon::spawn(options);
        daemon.add_network("net", 100);
        Self { daemon, next: AtomicU16::new(1), _watchdog: watchdog }
    }

    /// A new NIC on `net` with a guest whose driver is ready.
    #[track_caller]
    pub fn node(&self) -> Node {
        self.node_with("net", &[], GuestConfig::default())
    }

    /// As [`Self::node`], on another network, with options of `nic add`, and another guest.
    #[track_caller]
    pub fn node_with(&self, network: &str, options: &[&str], config: GuestConfig) -> Node {
        let place = self.vacancy_with(network, options);
        place.enter(config).unwrap_or_else(|e| panic!("{}: {e}\n{}", place.name, self.daemon.log()))
    }

    /// A new NIC on `net` without a guest.
    #[track_caller]
    pub fn vacancy(&self) -> Vacancy {
        self.vacancy_with("net", &[])
    }

    /// As [`Self::vacancy`], on another network and with options of `nic add`.
    #[track_caller]
    pub fn vacancy_with(&self, network: &str, options: &[&str]) -> Vacancy {
        self.vacancy_by(Door::Monitor, network, options)
    }

    /// As [`Self::vacancy_with`], for whoever comes by this door.
    #[track_caller]
    pub fn vacancy_by(&self, door: Door, network: &str, options: &[&str]) -> Vacancy {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("nic{n}");
        let [net, host] = n.to_be_bytes();
        let address = format!("10.0.{net}.{host}");
        let socket = match door {
            Door::Monitor => self.daemon.add_nic(&name, network, options),
            Door::Process => {
                let options = [&["--address", &address], options].concat();
                self.daemon.add_process_nic(&name, network, &options)
            }
        };
        Vacancy { door, name, socket, gid: ipv4_gid(net, host) }
    }

    /// Two guests with a connected pair of RC queue pairs.
    #[track_caller]
    pub fn rc_pair(&self) -> (End, End) {
        self.pair(&QpSpec::new(spec::qpt::RC), &Path::default())
    }

    /// Two guests with a connected pair of queue pairs.
    #[track_caller]
    pub fn pair(&self, spec: &QpSpec, path: &Path) -> (End, End) {
        let (a, b) = (self.node(), self.node());
        let (a, b) = (a.end(spec), b.end(spec));
        a.connect(&b, path);
        b.connect(&a, path);
        (a, b)
    }
}

impl Vacancy {
    /// Comes to the NIC, with a context and a protection domain.
    pub fn enter(&self, config: GuestConfig) -> Result<Node> {
        let Self { door, name, socket, gid } = self.clone();
        let guest = match door {
            Door::Monitor => Guest::connect(&socket, config)?,
            Door::Process => Guest::of_process_with(&socket, config)?,
        };
        if door == Door::Monitor {
            guest.init()?;
            guest.set_gid(0, spec::GID_ROCE_V2, gid)?;
        }
        let ctx = guest.open()?;
        let pdn = ctx.create_pd()?;
        Ok(Node { name, socket, guest, ctx, pdn, gid })
    }

    /// One more context with a domain at the NIC where `node` is: the same guest's, or another
    /// process.
    pub fn another(&self, node: &Node, config: GuestConfig) -> Result<Node> {
        if self.door == Door::Process {
            return self.enter(config);
        }
        let ctx = node.guest.open()?;
        let pdn = ctx.create_pd()?;
        Ok(Node { ctx, pdn, ..node.clone() })
    }

    /// A context ends, with all that is in it; a process's with its session.
    pub fn leave(&self, node: &Node) -> Result<()> {
        match self.door {
            Door::Monitor => node.ctx.destroy(),
            Door::Process => {
                node.guest.disconnect();
                Ok(())
            }
        }
    }
}

impl Node {
    /// QP 1 in RTS, in a context and a domain of the kernel's.
    #[track_caller]
    pub fn gsi(&self) -> End {
        let ctx = self.guest.kernel().expect("a kernel context with a doorbell page");
        let pdn = ctx.create_pd().expect("PD_CREATE");
        let scq = Cq::create(&ctx, 64, 0).expect("CQ_CREATE");
        let rcq = Cq::create(&ctx, 64, 0).expect("CQ_CREATE");
        let qp = Qp::create(&ctx, pdn, &scq, &rcq, &QpSpec::new(spec::qpt::GSI));
        let qp = qp.expect("QP_CREATE");
        qp.start_datagrams(spec::GSI_QKEY).expect("GSI to RTS");
        let node = Self { ctx, pdn, ..self.clone() };
        End { node, qp, scq, rcq }
    }

    /// A process at a NIC for processes, whose address this is.
    #[track_caller]
    pub fn process(name: &str, socket: &std::path::Path, gid: [u8; 16]) -> Self {
        let (name, socket) = (name.to_owned(), socket.to_owned());
        let place = Vacancy { door: Door::Process, name, socket, gid };
        place.enter(GuestConfig::default()).expect("a session")
    }

    /// INIT, GID 0, a context and a protection domain.
    #[track_caller]
    pub fn start(name: String, socket: PathBuf, guest: Guest, gid: [u8; 16]) -> Self {
        guest.init().expect("INIT");
        guest.set_gid(0, spec::GID_ROCE_V2, gid).expect("GID_SET");
        let ctx = guest.open().expect("CONTEXT_CREATE");
        let pdn = ctx.create_pd().expect("PD_CREATE");
        Self { name, socket, guest, ctx, pdn, gid }
    }

    /// A buffer of `len` zero bytes with all access.
    #[track_caller]
    pub fn mr(&self, len: u64) -> Mr {
        self.ctx.mr(self.pdn, len, access::ALL).expect("MR_REG")
    }

    /// A buffer that holds `bytes`.
    #[track_caller]
    pub fn mr_with(&self, bytes: &[u8]) -> Mr {
        let mr = self.mr(bytes.len() as u64);
        mr.view().write(0, bytes);
        mr
    }

    /// A completion queue on vector 0.
    #[track_caller]
    pub fn cq(&self, entries: u32) -> Cq {
        Cq::create(&self.ctx, entries, 0).expect("CQ_CREATE")
    }

    /// A queue pair with completion queues of 256 entries.
    #[track_caller]
    pub fn end(&self, spec: &QpSpec) -> End {
        self.end_with(spec, self.cq(256), self.cq(256))
    }

    /// A queue pair with these completion queues.
    #[track_caller]
    pub fn end_with(&self, spec: &QpSpec, scq: Cq, rcq: Cq) -> End {
        let qp = Qp::create(&self.ctx, self.pdn, &scq, &rcq, spec).expect("QP_CREATE");
        End { node: self.clone(), qp, scq, rcq }
    }

    /// An RC queue pair.
    #[track_caller]
    pub fn rc(&self) -> End {
        self.end(&QpSpec::new(spec::qpt::RC))
    }
}

impl End {
    /// What a peer needs to know.
    pub fn address(&self) -> ([u8; 16], u32) {
        (self.node.gid, self.qp.qpn)
    }

    /// Is it connected to itself?
    #[track_caller]
    pub fn is_its_own_peer(&self) -> bool {
        self.qp.query().expect("QP_QUERY").dest_qpn == self.qp.qpn
    }

    /// RESET to RTS towards `peer`.
    #[track_caller]
    pub fn connect(&self, peer: &Self, path: &Path) {
        self.qp.connect(peer.address(), path).expect("RESET to RTS");
    }

    /// Posts a send and takes its completion.
    #[track_caller]
    pub fn run(&mut self, request: &SendWr) -> Cqe {
        self.qp.post_send(request);
        let cqe = self.scq.one();
        assert_eq!((cqe.wr_id, cqe.qpn), (request.wr_id, self.qp.qpn), "{cqe:?}");
        cqe
    }

    /// As [`Self::run`], for what must succeed.
    #[track_caller]
    pub fn run_ok(&mut self, request: &SendWr) -> Cqe {
        let cqe = self.run(request);
        assert_eq!(cqe.status, spec::status::SUCCESS, "{cqe:?}");
        cqe
    }
}

/// Bytes on either side of an [`Area`] that nobody may touch.
pub const GUARD: u64 = 192;
const GUARD_BYTE: u8 = 0x5a;

/// A part of a region with guard bytes around it, all inside the region: a copy that is off by one
/// byte shows.
#[derive(Debug, Clone)]
pub struct Area {
    /// The region.
    pub mr: Mr,
    len: u64,
}

impl Node {
    /// An area of `len` zero bytes with these access flags, in scattered pages.
    #[track_caller]
    pub fn area_with(&self, len: u64, flags: u32) -> Area {
        let mr = self.ctx.mr(self.pdn, len + 2 * GUARD, flags).expect("MR_REG");
        mr.view().fill(0, GUARD, GUARD_BYTE);
        mr.view().fill(GUARD + len, GUARD, GUARD_BYTE);
        Area { mr, len }
    }

    /// An area with all access.
    #[track_caller]
    pub fn area(&self, len: u64) -> Area {
        self.area_with(len, access::ALL)
    }

    /// An area that holds `bytes`.
    #[track_caller]
    pub fn area_of(&self, bytes: &[u8]) -> Area {
        let area = self.area(bytes.len() as u64);
        area.mr.view().write(GUARD, bytes);
        area
    }
}

impl Area {
    /// Its bytes, after a look at the guards.
    #[track_caller]
    pub fn bytes(&self) -> Vec<u8> {
        for at in [0, GUARD + self.len] {
            let guard = self.mr.view().vec(at, GUARD);
            assert!(guard.iter().all(|b| *b == GUARD_BYTE), "guard bytes were overwritten");
        }
        self.mr.view().vec(GUARD, self.len)
    }

    /// Sets all bytes.
    pub fn set(&self, bytes: &[u8]) {
        self.mr.view().write(GUARD, bytes);
    }

    /// The address of byte `offset`.
    pub fn addr(&self, offset: u64) -> u64 {
        self.mr.addr(GUARD + offset)
    }

    /// The remote key.
    pub fn rkey(&self) -> u32 {
        self.mr.rkey
    }

    /// One element over a part.
    pub fn part(&self, offset: u64, length: u64) -> Sge {
        self.mr.sge(GUARD + offset, length as u32)
    }

    /// One element over everything.
    pub fn sge(&self) -> Sge {
        self.part(0, self.len)
    }

    /// `n` elements of different lengths over everything, one of them empty if the area is short.
    pub fn parts(&self, n: u64) -> Vec<Sge> {
        let mut at = 0;
        let mut parts = Vec::new();
        for i in 0..n {
            let left = self.len - at;
            let length = if i + 1 == n { left } else { (left / (n - i) / 2 + i * 3).min(left) };
            parts.push(self.part(at, length));
            at += length;
        }
        parts
    }

    /// The word at byte `offset`.
    pub fn word(&self, offset: u64) -> u64 {
        self.mr.view().load64(GUARD + offset, Ordering::SeqCst)
    }

    /// Stores a word at byte `offset`.
    pub fn set_word(&self, offset: u64, value: u64) {
        self.mr.view().store64(GUARD + offset, value, Ordering::SeqCst);
    }

    /// What a guest CPU does with `lock xadd` at byte `offset`.
    pub fn fetch_add(&self, offset: u64, value: u64) -> u64 {
        self.mr.view().fetch_add64(GUARD + offset, value)
    }
}
