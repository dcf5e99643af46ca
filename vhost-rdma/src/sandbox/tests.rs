//! Each class of what a sandbox denies is tried from within: by the network process itself, which
//! has started, shut itself in and listens to its supervisor; in a build for tests it can be asked
//! to try (`Request::Attempt`, `Order::Attempt`). Every case is a process of its own: what was
//! given away does not come back. `cases` has them, `table` holds docs/SANDBOX.md against the
//! lists.

mod cases;
mod table;

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use self::cases::{
    ALLOWED_TO_SPEAK, CASES, ON_RNICS, ON_SHARED, OTHERWISE, SHARED_OTHERWISE, within_does,
};
use super::Profile;
use crate::network_process::{
    Answer, Numbered, Report, Request, Start, VERSION, Wire, decode, encode, serve,
};
use crate::outside::{self, Order, Said};
use crate::panics::contained;
use crate::telemetry::{FILTER_ENV, LogFormat};

/// As long as anything may take that is to happen at once.
const LONG: Duration = Duration::from_secs(20);
/// Where a case finds a file and a socket of somebody else's.
const PLACE: &str = "VHOST_RDMA_TEST_PLACE";
/// Set: it is to be the process of what NICs on RNICs share.
const SHARED: &str = "VHOST_RDMA_TEST_SHARED";

/// What a case finds, made before the process shut itself in.
struct Before {
    place: PathBuf,
    listener: UnixListener,
    datagram: UnixDatagram,
}

static BEFORE: OnceLock<Before> = OnceLock::new();

/// Does what a case says, within; the error is what was not as it should be.
pub(crate) fn attempt(case: &str) -> Result<(), String> {
    let before = BEFORE.get().ok_or("there was no beginning")?;
    contained(|| within_does(case, before)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.unwrap_or_else(|| "it panicked".to_owned())
    })
}

/// What the child does: it serves, and tries. A second process is the subject: it gives away what
/// the test needs, and its supervisor is the test.
#[test]
#[ignore = "run by the tests below, as a process of its own"]
fn within() {
    let place = PathBuf::from(std::env::var_os(PLACE).unwrap());
    let listener = UnixListener::bind(place.join("own")).unwrap();
    let datagram = UnixDatagram::unbound().unwrap();
    assert!(BEFORE.set(Before { place, listener, datagram }).is_ok());
    if std::env::var_os(SHARED).is_some() {
        outside::serve().unwrap();
    } else {
        serve().unwrap();
    }
    // The harness itself would want what is denied now.
    std::process::exit(77);
}

/// A process of this build, and what is said to it.
struct Inside {
    dir: tempfile::TempDir,
    wire: Wire,
    child: Child,
    asked: u64,
    profile: Profile,
}

impl Inside {
    fn start(profile: Profile) -> Self {
        Self::start_with(profile, Stdio::inherit())
    }

    fn start_with(profile: Profile, log: Stdio) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (wire, far) = Wire::pair().unwrap();
        let shared = (profile == Profile::Outside).then_some((SHARED, "yes"));
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sandbox::tests::within", "--ignored", "--nocapture"])
            .args(["--test-threads", "1"])
            .env(PLACE, dir.path())
            .envs(shared)
            .env(FILTER_ENV, "error")
            .stdin(Stdio::from(far))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut inside = Self { dir, wire, child, asked: 0, profile };
        if profile == Profile::Outside {
            let (version, log_format) = (outside::VERSION, LogFormat::Text);
            let (ports, daemons, log) = (vec![], Some(8), None);
            let start = outside::Start { version, ports, daemons, log_format, log };
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            let order = encode(&Order::Start(start)).unwrap();
            inside.wire.send(&order, &[std::os::fd::AsFd::as_fd(&socket)]).unwrap();
            assert_eq!(inside.hear(), Said::Started);
            return inside;
        }
        let rnic = profile == Profile::Rnic;
        let (network, log_format) = ("net".to_owned(), LogFormat::Text);
        let (workers, poll_us, log, qpns) = (2, 10, None, crate::qpn::Key::default());
        let version = VERSION;
        let start = Start { version, network, workers, poll_us, log_format, log, qpns, rnic };
        assert_eq!(inside.ask(Request::Start(start)), Answer::Done);
        inside
    }

    fn say(&mut self, request: Request) -> u64 {
        self.asked += 1;
        let id = self.asked;
        self.wire.send(&encode(&Numbered { id, request }).unwrap(), &[]).unwrap();
        id
    }

    fn ask(&mut self, request: Request) -> Answer {
        let id = self.say(request);
        let told = self.wire.receive().unwrap().expect("it has ended");
        match decode(&told.bytes).unwrap() {
            Report::Answer(of, answer) if of == id => answer,
            other => panic!("{other:?}"),
        }
    }

    fn hear(&self) -> Said {
        decode(&self.wire.receive().unwrap().expect("it has ended").bytes).unwrap()
    }

    /// Has it try what it does not answer.
    fn begin(&mut self, case: &str) {
        let case = case.to_owned();
        if self.profile == Profile::Outside {
            self.wire.send(&encode(&Order::Attempt(case)).unwrap(), &[]).unwrap();
        } else {
            self.say(Request::Attempt(case));
        }
    }

    /// Has it try something; and whether it goes on.
    fn attempt(&mut self, case: &str) {
        let case = case.to_owned();
        if self.profile == Profile::Outside {
            for case in [&case, ALLOWED_TO_SPEAK] {
                let order = encode(&Order::Attempt(case.to_owned())).unwrap();
                self.wire.send(&order, &[]).unwrap();
                assert_eq!(self.hear(), Said::Tried(Ok(())), "{case}");
            }
            return;
        }
        assert_eq!(self.ask(Request::Attempt(case.clone())), Answer::Done, "{case}");
        assert!(matches!(self.ask(Request::Figures), Answer::Figures(_)), "{case}");
    }

    fn end(mut self) {
        drop(self.wire);
        assert_eq!(self.child.wait().unwrap().code(), Some(77));
    }
}

fn attempt_all(profile: Profile, cases: impl IntoIterator<Item = &'static str>) {
    for case in cases {
        let mut inside = Inside::start(profile);
        let place = inside.dir.path();
        File::create(place.join("file")).unwrap();
        let _reader = UnixDatagram::bind(place.join("datagram")).unwrap();
        let _somebody = UnixListener::bind(place.join("socket")).unwrap();
        inside.attempt(case);
        inside.end();
    }
}

#[test]
fn what_is_denied_is_refused_and_the_rest_goes_on() {
    attempt_all(Profile::Soft, CASES);
}

/// All but one case, and what is otherwise there: which devices there are may be read and nothing
/// be written, and only RDMA devices are driven.
#[test]
fn who_serves_rnics_is_refused_all_the_same_but_for_devices() {
    let same = CASES.into_iter().filter(|case| !OTHERWISE.contains(case));
    attempt_all(Profile::Rnic, same.chain(ON_RNICS));
}

/// It speaks TCP and resolves names besides, and reads no other file.
#[test]
fn who_serves_what_they_share_is_refused_the_same_but_for_the_internet() {
    let same = CASES.into_iter().filter(|case| !SHARED_OTHERWISE.contains(case));
    attempt_all(Profile::Outside, same.chain(ON_SHARED));
}

/// The supervisor starts another in its place, as after any death
/// (`processes::a_guest_whose_process_was_killed_starts_anew_over_the_same_connection`).
#[test]
fn a_panic_ends_the_process_and_is_told() {
    for profile in [Profile::Soft, Profile::Rnic, Profile::Outside] {
        for case in ["a fault of a thread", "a fault of a worker"] {
            if (profile, case) == (Profile::Outside, "a fault of a worker") {
                // It has none.
                continue;
            }
            let log = tempfile::NamedTempFile::new().unwrap();
            let mut inside = Inside::start_with(profile, log.reopen().unwrap().into());
            inside.begin(case);
            let deadline = Instant::now() + LONG;
            let ended = loop {
                match inside.child.try_wait().unwrap() {
                    None if Instant::now() < deadline => {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    ended => break ended,
                }
            };
            let _ = inside.child.kill();
            let log = std::fs::read_to_string(&log).unwrap();
            let ended = ended.unwrap_or_else(|| panic!("{case}: it lives on\n{log}"));
            assert_eq!(ended.signal(), Some(libc::SIGABRT), "{case}\n{log}");
            assert!(log.contains("panicked at") && log.contains("on purpose"), "{case}\n{log}");
            let whose = if profile == Profile::Outside { "+outside" } else { "net" };
            assert!(log.contains(&format!("network={whose:?}")), "whose it is: {case}\n{log}");
        }
    }
}

#[test]
fn a_panic_for_which_one_nic_is_to_blame_ends_no_process() {
    attempt_all(Profile::Soft, ["a fault of a NIC"]);
}

/// Looked at from outside: within, nothing can be read any more.
#[test]
fn no_thread_has_a_capability_or_is_outside() {
    for profile in [Profile::Soft, Profile::Rnic, Profile::Outside] {
        no_thread_of(Inside::start(profile));
    }
}

/// Threads of each kind.
fn counted(names: &[String]) -> [usize; 3] {
    let has = |kind: &str| names.iter().filter(|name| name.starts_with(kind)).count();
    ["vrdma-shard", "uplink", "cm-channel"].map(has)
}

fn no_thread_of(inside: Inside) {
    let of = match inside.profile {
        Profile::Soft => [2, 0, 0],
        Profile::Rnic => [2, 1, 0],
        Profile::Outside => [0, 0, 1],
    };
    // A thread gives itself its name; until then it has that of the thread that made it.
    let is_there = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", inside.child.id())).unwrap();
        let names = tasks
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        counted(&names.collect::<Vec<_>>()) == of
    };
    let begin = Instant::now();
    while !is_there() && begin.elapsed() < LONG {
        std::thread::yield_now();
    }
    let tasks = std::fs::read_dir(format!("/proc/{}/task", inside.child.id())).unwrap();
    let mut names = Vec::new();
    for task in tasks.flatten() {
        let text = std::fs::read_to_string(task.path().join("status")).unwrap();
        let field = |key: &str| {
            text.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned()
        };
        // The harness's own thread, which only waits for the test's.
        if task.file_name().to_str().unwrap() == inside.child.id().to_string() {
            continue;
        }
        names.push(field("Name:"));
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(set), "0000000000000000", "{set} of {}", names.last().unwrap());
        }
        assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".to_owned(), "2".to_owned()));
    }
    assert_eq!(counted(&names), of, "{names:?}");
    // What the scheduler says of a worker (`worker::turn_stats`), opened before it shut itself in.
    let files = std::fs::read_dir(format!("/proc/{}/fd", inside.child.id())).unwrap();
    let of_scheduler = files
        .flatten()
        .filter_map(|file| std::fs::read_link(file.path()).ok())
        .filter(|target| target.ends_with("schedstat"))
        .count();
    assert_eq!(of_scheduler, if inside.profile == Profile::Soft { 2 } else { 0 });
    inside.end();
}
