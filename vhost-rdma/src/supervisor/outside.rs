//! The process of what NICs on RNICs share ([`crate::outside`]): it is started, told what the
//! operator has decided, and started again when it dies.
//!
//! ```text
//!  Fleet, networks ── orders ──> wire ──> the process
//!       └─ keeps: certificates, peers, networks and their NICs, for the next one
//! ```
//!
//! An order is sent, and never answered. What is ordered and what is kept change together, under
//! one lock, so that a process that comes after another knows what that one did. Sockets and
//! certificates are opened here: the process can open none.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::cgroup::Cgroup;
use super::child::{ending, file_of, hang_up, spawn};
use super::restarts::Restarts;
use crate::channel::{self, Pems, Renewal};
use crate::network_process::{Wire, decode, encode, plain};
use crate::node::{AttachError, NicConfig, Peer, ProcessStatus};
use crate::outside::{Order, Said, Start, VERSION};
use crate::telemetry::LogFormat;

/// What it is called in logs, metrics and cgroups; no network's name has a `+`.
pub(super) const LABEL: &str = "+outside";
/// The program's hidden command.
const COMMAND: &str = "outside-process";
/// How long the process may take to start.
const START: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };
/// How long whoever wants it waits for that.
const READY: Duration = Duration::from_secs(21);
/// How long an order may wait for a process that does not read, which is ended then.
const SEND: Duration = Duration::from_secs(1);

/// How long a network's process waits for this one to read what it tells. It loses nothing
/// meanwhile; then it hangs up, and tells the next one.
const READ: Duration = Duration::from_secs(30);

/// What NICs on RNICs share, as the operator wants it.
#[derive(Debug, Clone)]
pub struct OutsideSettings {
    /// Where third-party hosts reach guests by rdma_cm.
    pub ports: Vec<u16>,
    /// The channel to other daemons.
    pub channel: Option<channel::Settings>,
}

/// What it has in common with other processes.
#[derive(Debug, Clone)]
pub(super) struct Common {
    pub(super) log_format: LogFormat,
    pub(super) log: Option<String>,
}

/// A network's process, which is given a socket to this one, and may be one that is not to be
/// trusted.
pub(super) trait Speaker: Send + Sync {
    /// Has it speak to the process that there is now.
    fn reconnect(&self);
    /// Ends it; another one comes.
    fn give_up(&self);
    fn name(&self) -> &str;
}

/// A network on RNICs.
struct Seat {
    vni: u32,
    /// By name.
    nics: BTreeMap<String, NicConfig>,
    network: Option<Weak<dyn Speaker>>,
}

/// What outlives a process.
#[derive(Default)]
struct State {
    wire: Option<Arc<Wire>>,
    pid: Option<u32>,
    /// How many processes there were.
    life: u64,
    stopping: bool,
    restarts: Restarts,
    /// Why there is none.
    trouble: Option<String>,
    /// The last number that was given away.
    last: u64,
    seats: BTreeMap<u64, Seat>,
    /// By VNI, in a file.
    peers: BTreeMap<u32, OwnedFd>,
    /// The channel's certificates, in a file.
    identity: Option<OwnedFd>,
    log: Option<String>,
}

impl State {
    /// Gives an order to the process, if there is one. One that does not take it is ended, and the
    /// next one is told what is kept.
    fn order(&self, order: &Order, files: &[BorrowedFd<'_>]) {
        let Some(wire) = &self.wire else { return };
        if let Err(error) = say(wire, order, files) {
            tracing::error!(%error, "the process of what NICs on RNICs share takes no orders");
            hang_up(wire);
        }
    }

    fn network(&self, number: u64) -> Option<Arc<dyn Speaker>> {
        self.seats.get(&number)?.network.as_ref()?.upgrade()
    }

    /// All that is kept, to a process that knows nothing.
    fn tell_all(&self, wire: &Wire) -> io::Result<()> {
        if let Some(file) = &self.identity {
            say(wire, &Order::Identity, &[file.as_fd()])?;
        }
        for (vni, file) in &self.peers {
            say(wire, &Order::Peers(*vni), &[file.as_fd()])?;
        }
        for (number, seat) in &self.seats {
            say(wire, &Order::Open(*number, seat.vni), &[])?;
            for nic in seat.nics.values() {
                say(wire, &Order::Put(*number, nic.clone()), &[])?;
            }
        }
        Ok(())
    }
}

fn say(wire: &Wire, order: &Order, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    wire.send(&encode(order).map_err(io::Error::other)?, files)
}

/// What the keeper and everybody else share.
struct Inner {
    ports: Vec<u16>,
    log_format: LogFormat,
    /// Where other daemons connect, and how many may.
    channel: Option<(OwnedFd, usize)>,
    cgroup: Cgroup,
    state: Mutex<State>,
    changed: Condvar,
}

/// See the module. Dropping it ends the process.
pub struct OutsideProcess {
    inner: Arc<Inner>,
    renewal: Option<Renewal>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for OutsideProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutsideProcess").finish_non_exhaustive()
    }
}

impl OutsideProcess {
    /// Starts the process and waits until it is ready.
    pub(super) fn start(
        settings: &OutsideSettings,
        common: Common,
        cgroup: Cgroup,
    ) -> Result<Self, AttachError> {
        let opened = settings.channel.as_ref().map(channel::Settings::open).transpose();
        let opened = opened.map_err(|error| AttachError::Resources(error.to_string()))?;
        let pems = opened.as_ref().and_then(|opened| opened.pems.clone());
        let has_channel = opened.is_some();
        let channel = opened.map(|opened| (OwnedFd::from(opened.listener), opened.daemons));
        let Common { log_format, log } = common;
        let (ports, state) = (settings.ports.clone(), State { log, ..State::default() });
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let inner = Arc::new(Inner { ports, log_format, channel, cgroup, state, changed });
        if let Some(pems) = &pems {
            inner.identify(pems);
        }
        let own = inner.clone();
        let give = move |pems| own.identify(&pems);
        let renewal = has_channel.then(|| Renewal::new(pems, give));
        let own = inner.clone();
        // The process dies with the thread that made it (PR_SET_PDEATHSIG): it is this one.
        let thread = std::thread::Builder::new().name("outside".to_owned());
        let keeper = thread
            .spawn(move || own.keep())
            .map_err(|error| AttachError::io("start a thread", error))?;
        let process = Self { inner, renewal, keeper: Mutex::new(Some(keeper)) };
        process.inner.ready().map_err(|why| {
            AttachError::Resources(format!("the process of what NICs on RNICs share {why}"))
        })?;
        Ok(process)
    }

    /// By which the channel's certificates are renewed, if there is a channel.
    #[must_use]
    pub fn renewal(&self) -> Option<Renewal> {
        self.renewal.clone()
    }

    /// Replaces the peers of a network.
    pub(super) fn set_peers(&self, vni: u32, peers: &[Peer]) {
        match file_of("vhost-rdma-peers", peers) {
            Ok(file) => {
                let mut state = self.inner.state();
                state.order(&Order::Peers(vni), &[file.as_fd()]);
                state.peers.insert(vni, file);
            }
            Err(error) => tracing::error!(vni, %error, "its peers stay as they were"),
        }
    }

    /// A network is gone.
    pub(super) fn forget_network(&self, vni: u32) {
        let mut state = self.inner.state();
        state.peers.remove(&vni);
        state.order(&Order::Forget(vni), &[]);
    }

    /// Has it log by this filter.
    pub(super) fn log(&self, filter: Option<&str>) {
        let mut state = self.inner.state();
        state.log = filter.map(str::to_owned);
        state.order(&Order::Log(state.log.clone()), &[]);
    }

    pub(super) fn process(&self) -> ProcessStatus {
        let state = self.inner.state();
        ProcessStatus {
            network: LABEL.to_owned(),
            pid: state.pid,
            deaths: state.restarts.deaths(),
            failing: state.restarts.failing(Instant::now()),
            memory: self.inner.cgroup.memory(),
        }
    }
}

impl Drop for OutsideProcess {
    fn drop(&mut self) {
        self.end();
    }
}

impl OutsideProcess {
    /// Ends the process for good, and waits for that.
    pub(super) fn end(&self) {
        {
            let mut state = self.inner.state();
            state.stopping = true;
            if let Some(wire) = &state.wire {
                hang_up(wire);
            }
        }
        self.inner.changed.notify_all();
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if keeper.is_some_and(|keeper| keeper.join().is_err()) {
            tracing::error!("the keeper of what NICs on RNICs share panicked");
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ready(&self) -> Result<(), String> {
        let away = |state: &mut State| state.wire.is_none() && state.trouble.is_none();
        let waited = self.changed.wait_timeout_while(self.state(), READY, away);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match (&state.wire, &state.trouble) {
            (Some(_), _) => Ok(()),
            (None, Some(why)) => Err(why.clone()),
            (None, None) => Err("does not start".to_owned()),
        }
    }

    fn identify(&self, pems: &Pems) {
        match file_of("vhost-rdma-identity", pems) {
            Ok(file) => {
                let mut state = self.state();
                state.order(&Order::Identity, &[file.as_fd()]);
                state.identity = Some(file);
            }
            Err(error) => {
                tracing::error!(%error, "the channel's certificates stay as they were");
            }
        }
    }

    /// Keeps a process running until it is time to end.
    fn keep(&self) {
        loop {
            let begin = Instant::now();
            let why = match self.begin() {
                Ok(process) => self.live(process),
                Err(error) => format!("cannot be started: {error}"),
            };
            let mut state = self.state();
            (state.wire, state.pid) = (None, None);
            if state.stopping {
                return;
            }
            let wait = state.restarts.died(Instant::now(), begin.elapsed());
            state.trouble = Some(why.clone());
            let wait_ms = wait.as_millis();
            tracing::error!(why, wait_ms, "the process of what NICs on RNICs share ended");
            self.changed.notify_all();
            let going = |state: &mut State| !state.stopping;
            let _ = self.changed.wait_timeout_while(state, wait, going);
        }
    }

    /// Starts a process, and waits until it is shut in.
    fn begin(&self) -> io::Result<Process> {
        let (wire, far) = Wire::pair()?;
        wire.set_patience(SEND)?;
        let child = spawn(&[COMMAND], far)?;
        let mut process = Process { child, wire: Arc::new(wire) };
        self.cgroup.enter(process.child.id())?;
        let start = Start {
            version: VERSION,
            ports: self.ports.clone(),
            daemons: self.channel.as_ref().map(|(_, daemons)| *daemons),
            log_format: self.log_format,
            log: self.state().log.clone(),
        };
        let listener: Vec<_> = self.channel.iter().map(|(socket, _)| socket.as_fd()).collect();
        say(&process.wire, &Order::Start(start), &listener)?;
        if poll(&mut [PollFd::new(&*process.wire, PollFlags::IN)], Some(&START))? == 0 {
            return Err(io::Error::other("it does not answer"));
        }
        match hear(&process.wire)? {
            Some(Said::Started) => Ok(process),
            Some(Said::Refused(why)) => Err(io::Error::other(why)),
            Some(_) => Err(io::Error::other("it answers something else")),
            None => Err(io::Error::other(process.end())),
        }
    }

    /// Tells a process all that it has to know, and listens to it until it ends; why.
    fn live(&self, mut process: Process) -> String {
        let networks: Vec<Weak<dyn Speaker>> = {
            let mut state = self.state();
            // Who ends it looks for the wire, and waits for this thread.
            if state.stopping {
                return String::new();
            }
            if let Err(error) = state.tell_all(&process.wire) {
                return format!("takes no orders: {error}");
            }
            state.wire = Some(process.wire.clone());
            state.pid = Some(process.child.id());
            state.life += 1;
            state.trouble = None;
            state.seats.values().filter_map(|seat| seat.network.clone()).collect()
        };
        self.changed.notify_all();
        // Each tells again what it has.
        networks.iter().filter_map(Weak::upgrade).for_each(|network| network.reconnect());
        loop {
            match hear(&process.wire) {
                Ok(Some(Said::Nonsense(number))) => {
                    let network = self.state().network(number);
                    if let Some(network) = network {
                        let name = network.name();
                        tracing::error!(network = name, "its process is not to be trusted");
                        network.give_up();
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) => return process.end(),
                Err(error) => return format!("cannot be listened to: {error}"),
            }
        }
    }
}

/// A process that was started. Dropping it kills it.
struct Process {
    child: Child,
    wire: Arc<Wire>,
}

/// What the process says next, fit to be shown.
fn hear(wire: &Wire) -> io::Result<Option<Said>> {
    let Some(packet) = wire.receive()? else { return Ok(None) };
    match decode(&packet.bytes).map_err(io::Error::other)? {
        Said::Refused(why) => Ok(Some(Said::Refused(plain(why)))),
        said => Ok(Some(said)),
    }
}

impl Process {
    /// Ends it, if it has not ended; how it did.
    fn end(&mut self) -> String {
        hang_up(&self.wire);
        let _ = self.child.kill();
        self.child.wait().map_or_else(|error| error.to_string(), ending)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// What one network has to do with it.
pub(super) struct Branch {
    outside: Arc<OutsideProcess>,
    number: u64,
    /// The life of the process that the network's own speaks to; held while it is given a socket.
    attached: Mutex<u64>,
}

impl Branch {
    /// A network of this VNI is there.
    pub(super) fn new(outside: Arc<OutsideProcess>, vni: u32) -> Self {
        let number = {
            let mut state = outside.inner.state();
            state.last += 1;
            let number = state.last;
            state.order(&Order::Open(number, vni), &[]);
            state.seats.insert(number, Seat { vni, nics: BTreeMap::new(), network: None });
            number
        };
        Self { outside, number, attached: Mutex::new(0) }
    }

    /// It is this one.
    pub(super) fn of(&self, network: Weak<dyn Speaker>) {
        if let Some(seat) = self.outside.inner.state().seats.get_mut(&self.number) {
            seat.network = Some(network);
        }
    }

    /// A NIC has come, or has changed.
    pub(super) fn put(&self, nic: &NicConfig) {
        let mut state = self.outside.inner.state();
        if let Some(seat) = state.seats.get_mut(&self.number) {
            seat.nics.insert(nic.name.clone(), nic.clone());
            state.order(&Order::Put(self.number, nic.clone()), &[]);
        }
    }

    /// A NIC is gone.
    pub(super) fn take_away(&self, nic: &NicConfig) {
        let mut state = self.outside.inner.state();
        if let Some(seat) = state.seats.get_mut(&self.number) {
            seat.nics.remove(&nic.name);
            state.order(&Order::TakeAway(self.number, nic.clone()), &[]);
        }
    }

    /// The network is gone, and its process may not have ended.
    pub(super) fn close(&self) {
        let mut state = self.outside.inner.state();
        if state.seats.remove(&self.number).is_some() {
            state.order(&Order::Close(self.number), &[]);
        }
    }

    /// Makes a socket between the network's process, which is given its end by `tell`, and the
    /// process that there is.
    pub(super) fn connect(
        &self,
        tell: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let (near, far) = Wire::pair()?;
        // Who gets it may set nothing of a socket.
        let far = Wire::new(far);
        far.set_patience(READ)?;
        {
            let state = self.outside.inner.state();
            state.order(&Order::Attach(self.number), &[near.as_fd()]);
            *attached = state.life;
        }
        tell(far.as_fd())
    }

    /// Whether there is another process than the one that the network's own speaks to.
    pub(super) fn is_stale(&self) -> bool {
        let attached = *self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        attached != self.outside.inner.state().life
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::sockopt::{Timeout, socket_timeout};

    use super::*;
    use crate::network_process::TEXT_MAX;

    /// One that has not been started.
    fn outside() -> OutsideProcess {
        let inner = Inner {
            ports: vec![],
            log_format: LogFormat::default(),
            channel: None,
            cgroup: Cgroup::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        OutsideProcess { inner: Arc::new(inner), renewal: None, keeper: Mutex::new(None) }
    }

    #[test]
    fn a_networks_process_does_not_wait_for_ever_for_one_that_does_not_read() {
        let branch = Branch::new(Arc::new(outside()), 7);
        let mut patience = None;
        let connected = branch.connect(|far| {
            patience = socket_timeout(far, Timeout::Send)?;
            Ok(())
        });
        connected.unwrap();
        assert_eq!(patience, Some(READ));
    }

    #[test]
    fn what_the_process_says_is_a_line_for_people_however_it_says_it() {
        let (wire, far) = Wire::pair().unwrap();
        let process = Wire::new(far);
        let name = format!("{{\"{}\":1}}", "\u{9b}".repeat(50 << 10));
        process.send(name.as_bytes(), &[]).unwrap();
        let refusal = Said::Refused("\x1b[2J\n".repeat(4 << 10));
        process.send(&encode(&refusal).unwrap(), &[]).unwrap();
        let unknown = hear(&wire).unwrap_err().to_string();
        let Some(Said::Refused(why)) = hear(&wire).unwrap() else { panic!("no refusal") };
        for text in [unknown, why] {
            let length = text.chars().count();
            assert!(length <= TEXT_MAX + 100, "{length} characters");
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
    }
}
