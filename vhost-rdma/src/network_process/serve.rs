//! The process itself: one network's NICs on a data plane of its own, in a sandbox.
//!
//! The first request says what the process is for. Then the worker is started, every thread is
//! sealed, and only then does anything come from a guest. Requests are carried out one after the
//! other: all NICs here are one worker's. A session has threads of its own while there is something
//! to do for it (`device`).
//!
//! The end of the socket is the end of the process, and so is a panic (`panics`). Signals that end
//! a daemon are the supervisor's to answer: a terminal and a service manager send them to every
//! process there is.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nix::sys::signal::{SigSet, Signal};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::bad_message::BadMessage;
use super::exchange::Host;
use super::protocol::{
    Answer, Figures, Numbered, Report, Request, Start, VERSION, check_change, decode, encode,
};
use super::uplink::ToOutside;
use super::wire::{Packet, Wire};
use crate::aside::drop_aside;
use crate::dataplane::LocalDataplane;
use crate::device::{Change, Journal, Kept};
use crate::node::{Dataplane as _, Ending, Peer, WorkerStatus};
use crate::qpn::{Key, Pool};
use crate::sandbox::{Profile, Sealed};
use crate::worker::{Seal, WorkerConfig};
use crate::{limits, panics, sandbox, telemetry};

/// Room for what was saved, to begin with.
const LOAD_PIECE: usize = 1 << 20;

/// Why the process cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Standard input is not a supervisor.
    #[error("a network process is started by the daemon (`vhost-rdma serve`), not by hand: {0}")]
    Supervisor(String),
    /// What the supervisor says makes no sense.
    #[error("the supervisor: {0}")]
    Message(#[from] BadMessage),
    /// The host.
    #[error("{0}")]
    Host(#[from] io::Error),
}

/// A session that is about to be taken up.
struct Left {
    nic: String,
    stream: UnixStream,
    changes: Vec<Kept>,
}

struct Process {
    wire: Arc<Wire>,
    dataplane: LocalDataplane,
    qpns: Qpns,
    /// To NICs of other networks, for those on RNICs.
    uplink: Option<Arc<ToOutside>>,
    /// Where answers and datagrams come from, while somebody is there.
    outside: Option<Arc<Wire>>,
    left: BTreeMap<u64, Left>,
    /// Sessions that cannot be taken up, since a part of them is missing, and why.
    torn: BTreeMap<u64, String>,
    /// All that it has is another's.
    saved: bool,
}

/// Tells the supervisor what a session's VMM says.
struct Telling {
    wire: Arc<Wire>,
    session: u64,
}

/// Serves until the supervisor closes the socket, which is standard input.
///
/// # Errors
/// See [`Fault`].
pub fn serve() -> Result<(), Fault> {
    ignore_signals()?;
    let wire = Arc::new(Wire::new(io::stdin().as_fd().try_clone_to_owned()?));
    let (id, start) = first(&wire)?;
    telemetry::start(start.log_format, Some(&start.network)).map_err(io::Error::other)?;
    panics::end_the_process();
    set_filter(start.log.as_deref());
    limits::raise_descriptors();
    let mut process = match shut_in(&start) {
        Ok(inside) => Process::new(wire, inside),
        Err(error) => {
            let why = Answer::Refused(format!("cannot shut itself in: {error}"));
            wire.send(&encode(&Report::Answer(id, why))?, &[])?;
            return Err(error.into());
        }
    };
    process.tell(&Report::Answer(id, Answer::Done));
    while let Some(packet) = process.hear()? {
        process.take(packet)?;
    }
    if process.saved {
        // Nothing is closed down: streams and memory are the next process's as well.
        std::process::exit(0);
    }
    Ok(())
}

pub(crate) fn ignore_signals() -> io::Result<()> {
    let ours = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGPIPE];
    Ok(ours.into_iter().collect::<SigSet>().thread_block()?)
}

fn first(wire: &Wire) -> Result<(u64, Start), Fault> {
    let nobody = |why: String| Fault::Supervisor(why);
    let packet = wire.receive().map_err(|error| nobody(error.to_string()))?;
    let packet = packet.ok_or_else(|| nobody("nothing is said".to_owned()))?;
    let first: Numbered = decode(&packet.bytes).map_err(|error| nobody(error.to_string()))?;
    match first.request {
        Request::Start(start) if start.version == VERSION => Ok((first.id, start)),
        _ => Err(nobody("it is another build".to_owned())),
    }
}

pub(crate) fn set_filter(log: Option<&str>) {
    match telemetry::Filter::new(log) {
        Ok(filter) => filter.take_effect(),
        Err(error) => tracing::error!(error, "the log's filter stays as it was"),
    }
}

/// Where memory is short the kernel is to end a network's process rather than the supervisor, which
/// starts it again.
fn be_first_to_go() {
    const PATH: &str = "/proc/self/oom_score_adj";
    const MORE: i32 = 200;
    let present = std::fs::read_to_string(PATH).ok().and_then(|text| text.trim().parse().ok());
    let wanted = (present.unwrap_or(0) + MORE).min(1000).to_string();
    if let Err(error) = std::fs::write(PATH, wanted) {
        tracing::debug!(%error, "the memory killer makes no difference");
    }
}

/// The QPNs of the process, and an eventfd that a worker signals when they run short.
struct Qpns {
    pool: Arc<Pool>,
    bell: OwnedFd,
}

impl Qpns {
    fn new(key: Key) -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let ring = bell.try_clone()?;
        let ask = move || {
            // It waits for nobody: it is ours, and not a guest's to fill.
            let _ = rustix::io::write(&ring, &1u64.to_ne_bytes());
        };
        Ok(Self { pool: Arc::new(Pool::lent(key, Box::new(ask))), bell })
    }
}

/// What a process has once it is shut in.
struct Inside {
    dataplane: LocalDataplane,
    qpns: Qpns,
    uplink: Option<Arc<ToOutside>>,
}

/// Starts the worker and seals every thread.
fn shut_in(start: &Start) -> io::Result<Inside> {
    be_first_to_go();
    if start.rnic {
        limits::keep_locking();
    }
    sandbox::close_in()?;
    // What needs a file, for the last time.
    crate::device::prepare();
    if start.rnic {
        crate::rnic::prepare();
    }
    // A worker opens what the scheduler says of it (`worker::turn_stats`), and gives names away
    // after that, by itself. Those that serve RNICs cannot: all threads have to share credentials
    // there (`sandbox::forget_names`). They do without that file.
    let (seal, profile): (Seal, _) = if start.rnic {
        (|| sandbox::seal(Profile::Rnic).map(drop), Profile::Rnic)
    } else {
        let alone = || {
            sandbox::forget_names(Profile::Soft)?;
            sandbox::seal(Profile::Soft).map(drop)
        };
        (alone, Profile::Soft)
    };
    let shared = start.rnic.then(|| sandbox::forget_names(profile)).transpose()?;
    let Start { workers, poll_us, .. } = *start;
    let config = WorkerConfig { workers, poll_us, spread: workers > 1, seal: Some(seal) };
    let qpns = Qpns::new(start.qpns)?;
    let dataplane = LocalDataplane::start_beside(config, &qpns.pool)?;
    let landlock = shared.map_or_else(|| sandbox::forget_names(profile), Ok)?;
    let uplink = start.rnic.then(|| ToOutside::start(Some(seal))).transpose()?;
    if let Some(uplink) = &uplink {
        dataplane.set_uplink(uplink.clone());
    }
    let sealed = Sealed { landlock, seccomp: sandbox::seal(profile)? };
    tracing::info!(pid = std::process::id(), sandbox = %sealed, "serving the network");
    Ok(Inside { dataplane, qpns, uplink })
}

/// From its beginning: its end is not where it was left, since several processes have it open.
pub(crate) fn read_all(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; LOAD_PIECE];
    let mut len = 0;
    loop {
        match file.read_at(bytes.get_mut(len..).unwrap_or_default(), len as u64) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if len == bytes.len() {
            bytes.resize(2 * len, 0);
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

fn one<T: From<OwnedFd>>(files: Vec<OwnedFd>) -> Option<T> {
    files.into_iter().next().map(T::from)
}

fn answer<E: std::fmt::Display>(done: Result<(), E>) -> Answer {
    match done {
        Ok(()) => Answer::Done,
        Err(error) => Answer::Refused(error.to_string()),
    }
}

impl Process {
    fn new(wire: Arc<Wire>, inside: Inside) -> Self {
        let Inside { dataplane, qpns, uplink } = inside;
        let (left, torn) = (BTreeMap::new(), BTreeMap::new());
        Self { wire, dataplane, qpns, uplink, outside: None, left, torn, saved: false }
    }

    /// What the supervisor says next. Meanwhile a worker may run short.
    fn hear(&mut self) -> io::Result<Option<Packet>> {
        loop {
            let [supervisor, short, outside] = self.wait()?;
            if supervisor {
                return self.wire.receive();
            }
            if short {
                let _ = crate::eventfd::take(self.qpns.bell.as_fd());
                self.tell(&Report::Short);
            }
            if outside {
                self.hear_outside();
            }
        }
    }

    /// Whether the supervisor has something to say, a worker runs short, and somebody outside has
    /// something to say.
    fn wait(&self) -> io::Result<[bool; 3]> {
        let mut fds: ArrayVec<PollFd<'_>, 3> = ArrayVec::new();
        fds.push(PollFd::new(&*self.wire, PollFlags::IN));
        fds.push(PollFd::new(&self.qpns.bell, PollFlags::IN));
        fds.extend(self.outside.as_ref().map(|wire| PollFd::new(&**wire, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok([0, 1, 2].map(|at| fds.get(at).is_some_and(|fd| !fd.revents().is_empty())))
    }

    fn tell(&self, report: &Report) {
        tell(&self.wire, report, &[]);
    }

    fn take(&mut self, packet: Packet) -> Result<(), Fault> {
        let Packet { bytes, files, files_lost } = packet;
        let Numbered { id, request } = decode(&bytes)?;
        let done = match request {
            _ if files_lost => self.refuse(&request, limits::no_descriptor_left()),
            Request::Enter(nic) => {
                self.let_in(id, &nic, files);
                return Ok(());
            }
            request => self.carry_out(request, files),
        };
        self.tell(&Report::Answer(id, done));
        Ok(())
    }

    /// Does nothing with a request whose descriptors are not those that it says. A session that it
    /// is a part of ends: with fewer, its guest would be served by memory that is not its own.
    fn refuse(&mut self, request: &Request, why: String) -> Answer {
        tracing::error!(why, "a request is refused");
        if let Request::TakeUp(_, session) | Request::Kept(session, _) = request {
            self.left.remove(session);
            self.torn.insert(*session, why.clone());
        }
        Answer::Refused(why)
    }

    fn carry_out(&mut self, request: Request, files: Vec<OwnedFd>) -> Answer {
        if self.saved {
            return Answer::Refused("another process goes on".to_owned());
        }
        match request {
            Request::Start(_) => Answer::Refused("it has started already".to_owned()),
            Request::Lend(blocks) => {
                blocks.into_iter().for_each(|block| self.qpns.pool.lend(block));
                Answer::Done
            }
            Request::Add(nic) => answer(self.dataplane.add(&nic)),
            Request::Update(nic) => answer(self.dataplane.update(&nic)),
            Request::Remove(name) => {
                self.dataplane.remove(&name);
                Answer::Done
            }
            Request::Connect(nic, session) => answer(self.connect(&nic, session, files)),
            Request::Enter(_) => Answer::Refused("it is not answered here".to_owned()),
            Request::TakeUp(nic, session) => {
                let Some(stream) = one(files) else {
                    return Answer::Refused("there is no stream".to_owned());
                };
                self.torn.remove(&session);
                self.left.insert(session, Left { nic, stream, changes: Vec::new() });
                Answer::Done
            }
            Request::Kept(session, change) => {
                if let Err(error) = check_change(&change, files.len()) {
                    return self.refuse(&Request::Kept(session, change), error.to_string());
                }
                if let Some(left) = self.left.get_mut(&session) {
                    left.changes.push((change, files.into_iter().map(File::from).collect()));
                }
                Answer::Done
            }
            Request::GoOn(session) => answer(self.go_on(session)),
            Request::Save => match one(files) {
                Some(file) => self.save(&file),
                None => Answer::Refused("there is no file".to_owned()),
            },
            Request::Load => match one(files) {
                Some(file) => answer(self.load(&file)),
                None => Answer::Refused("there is no file".to_owned()),
            },
            Request::Run => Answer::Saved(self.dataplane.run_loaded()),
            Request::Status(name) => Answer::Status(Box::new(self.dataplane.status(&name))),
            Request::Figures => Answer::Figures(Box::new(self.figures())),
            Request::Log(log) => {
                set_filter(log.as_deref());
                Answer::Done
            }
            Request::Peers(vni) => answer(self.set_peers(vni, files)),
            Request::Outside => match (one(files), &self.uplink) {
                (Some(socket), Some(uplink)) => {
                    let wire = Arc::new(Wire::new(socket));
                    uplink.attach(wire.clone(), self.dataplane.directory().held());
                    self.outside = Some(wire);
                    Answer::Done
                }
                _ => Answer::Refused("there is no socket, or no use for it".to_owned()),
            },
            #[cfg(test)]
            Request::Attempt(case) => answer(sandbox::tests::attempt(&case)),
        }
    }

    /// A process comes in, or does not. That can take long, so it is answered from elsewhere.
    fn let_in(&self, id: u64, nic: &str, files: Vec<OwnedFd>) {
        let wire = self.wire.clone();
        let told = move |done: io::Result<()>| tell(&wire, &Report::Answer(id, answer(done)), &[]);
        match one(files) {
            Some(stream) if self.saved => {
                drop_aside(nic, stream);
                told(Err(io::Error::other("another process goes on")));
            }
            Some(stream) => self.dataplane.let_in(nic, stream, told),
            None => told(Err(io::Error::other("there is no stream"))),
        }
    }

    fn set_peers(&self, vni: u32, files: Vec<OwnedFd>) -> Result<(), String> {
        let file: File = one(files).ok_or("there is no file")?;
        let bytes = read_all(&file).map_err(|error| error.to_string())?;
        let peers: Vec<Peer> = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
        self.dataplane.set_peers(vni, &peers);
        Ok(())
    }

    /// What is said to NICs on RNICs by who knows all of them. The supervisor gives another socket
    /// when that one has died.
    fn hear_outside(&mut self) {
        let Some(wire) = &self.outside else { return };
        let host = match wire.try_hear() {
            Ok(Some(packet)) => decode::<Host>(&packet.bytes).map_err(|error| error.to_string()),
            Ok(None) => Err("it has ended".to_owned()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => Err(error.to_string()),
        };
        match host {
            Ok(Host::Settled(number, settled)) => {
                if let Some(uplink) = &self.uplink {
                    uplink.settle(number, settled);
                }
            }
            Ok(Host::Datagram { device, vni, datagram }) => {
                // What finds nobody, or no room, is lost, as on a wire.
                if let Some(mad) = datagram.mad() {
                    self.dataplane.directory().deliver(&device, vni, mad);
                }
            }
            Err(why) => {
                tracing::info!(why, "nobody knows of other networks for now");
                self.outside = None;
                if let Some(uplink) = &self.uplink {
                    uplink.detach();
                }
            }
        }
    }

    fn save(&mut self, mut file: &File) -> Answer {
        self.saved = true;
        let saved = self.dataplane.save().map_err(|error| error.to_string());
        let written = saved.and_then(|(bytes, names)| {
            file.write_all(&bytes).map_err(|error| error.to_string())?;
            Ok(names)
        });
        written.map_or_else(Answer::Refused, Answer::Saved)
    }

    fn load(&self, file: &File) -> Result<(), String> {
        let bytes = read_all(file).map_err(|error| error.to_string())?;
        self.dataplane.load(&bytes).map_err(|error| error.to_string())
    }

    fn journal(&self, session: u64) -> Arc<dyn Journal> {
        Arc::new(Telling { wire: self.wire.clone(), session })
    }

    fn connect(&self, nic: &str, session: u64, files: Vec<OwnedFd>) -> io::Result<()> {
        let stream = one(files).ok_or_else(|| io::Error::other("there is no stream"))?;
        self.dataplane.connect_noted(nic, stream, self.journal(session))
    }

    fn go_on(&mut self, session: u64) -> io::Result<()> {
        if let Some(why) = self.torn.remove(&session) {
            return Err(io::Error::other(why));
        }
        let left = self.left.remove(&session);
        let Left { nic, stream, changes } =
            left.ok_or_else(|| io::Error::other("there is no such session"))?;
        let journal = self.journal(session);
        self.dataplane.take_up(&nic, stream, (changes, journal))
    }

    fn figures(&self) -> Figures {
        let workers = self.dataplane.workers().into_iter();
        let worker = workers.reduce(WorkerStatus::beside).unwrap_or_default();
        let nanos = |seconds: f64| {
            u64::try_from(Duration::from_secs_f64(seconds.max(0.0)).as_nanos()).unwrap_or(u64::MAX)
        };
        Figures {
            turns: worker.turns.iter().map(|(_, turns)| *turns).collect(),
            busy: nanos(worker.busy),
            longest: nanos(worker.longest),
            charged: nanos(worker.charged),
            stalled: nanos(worker.stalled),
        }
    }
}

impl Journal for Telling {
    fn begun(&self) {
        tell(&self.wire, &Report::Begun(self.session), &[]);
    }

    fn changed(&self, change: Change, files: &[BorrowedFd<'_>]) {
        tell(&self.wire, &Report::Changed(self.session, change), files);
    }

    fn done(&self) {
        tell(&self.wire, &Report::Done(self.session), &[]);
    }

    fn ended(&self, ending: &Ending) {
        tell(&self.wire, &Report::Ended(self.session, ending.clone()), &[]);
    }
}

/// A supervisor that cannot be told is gone, which the thread that reads from it learns, too.
fn tell(wire: &Wire, report: &Report, files: &[BorrowedFd<'_>]) {
    let sent = encode(report).map_err(io::Error::other).and_then(|b| wire.send(&b, files));
    if let Err(error) = sent {
        tracing::debug!(%error, "the supervisor was not told");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Piece;

    /// A process, and what it answers to a request with these descriptors.
    struct Scene {
        process: Process,
        supervisor: Wire,
    }

    impl Scene {
        fn new() -> Self {
            let (supervisor, far) = Wire::pair().unwrap();
            let qpns = Qpns::new(Key::default()).unwrap();
            let dataplane =
                LocalDataplane::start_beside(WorkerConfig::default(), &qpns.pool).unwrap();
            let inside = Inside { dataplane, qpns, uplink: None };
            Self { process: Process::new(Arc::new(Wire::new(far)), inside), supervisor }
        }

        fn answer(&mut self, request: Request, files: usize, files_lost: bool) -> Answer {
            let bytes = encode(&Numbered { id: 7, request }).unwrap();
            let file = || OwnedFd::from(UnixStream::pair().unwrap().0);
            let files = std::iter::repeat_with(file).take(files).collect();
            self.process.take(Packet { bytes, files, files_lost }).unwrap();
            let told = self.supervisor.receive().unwrap().unwrap();
            match decode(&told.bytes).unwrap() {
                Report::Answer(7, answer) => answer,
                other => panic!("{other:?}"),
            }
        }

        fn refusal(&mut self, request: Request, files: usize, files_lost: bool) -> String {
            match self.answer(request, files, files_lost) {
                Answer::Refused(why) => why,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn who_has_no_descriptor_left_says_so_and_what_to_do() {
        let mut scene = Scene::new();
        let nic = || "nic".to_owned();
        for request in [
            Request::Connect(nic(), 1),
            Request::Enter(nic()),
            Request::TakeUp(nic(), 1),
            Request::Save,
            Request::Load,
        ] {
            let why = scene.refusal(request.clone(), 0, true);
            assert!(why.contains("RLIMIT_NOFILE") && why.contains("LimitNOFILE"), "{why}");
        }
        assert!(!scene.process.saved, "it goes on serving");
    }

    #[test]
    fn a_session_of_which_a_part_is_missing_is_not_taken_up() {
        let piece = |start| Piece { start, len: 4096, vmm: start, offset: 0 };
        let memory = || Change::Memory(vec![piece(0), piece(4096)]);
        for (files, lost, what) in [(1, true, "LimitNOFILE"), (1, false, "descriptors")] {
            let mut scene = Scene::new();
            let begun = scene.answer(Request::TakeUp("nic".to_owned(), 3), 1, false);
            assert_eq!(begun, Answer::Done);
            let why = scene.refusal(Request::Kept(3, memory()), files, lost);
            assert!(why.contains(what), "{why}");
            // The supervisor does not wait for each answer, and goes on.
            scene.answer(Request::Kept(3, Change::Kick(0)), 1, false);
            let why = scene.refusal(Request::GoOn(3), 0, false);
            assert!(why.contains(what), "{why}");
        }
    }
}
