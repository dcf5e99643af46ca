//! Each class of what a sandbox denies is tried from within: by the network process itself, which
//! has started, shut itself in and listens to its supervisor; in a build for tests it can be asked
//! to try (`Request::Attempt`, `Order::Attempt`). Every case is a process of its own: what was
//! given away does not come back.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::Profile;
use crate::link::NicId;
use crate::network_process::{
    Answer, Numbered, Report, Request, Start, VERSION, Wire, decode, encode, serve,
};
use crate::outside::{self, Order, Said};
use crate::panics::contained;
use crate::telemetry::{FILTER_ENV, LogFormat};
use crate::worker::{CallError, WorkerConfig, Workers};

/// <asm-generic/fcntl.h>
const F_SETSIG: i64 = 10;
/// As long as anything may take that is to happen at once.
const LONG: Duration = Duration::from_secs(20);
/// Where a case finds a file and a socket of somebody else's.
const PLACE: &str = "VHOST_RDMA_TEST_PLACE";
/// Set: it is to be the process of what NICs on RNICs share.
const SHARED: &str = "VHOST_RDMA_TEST_SHARED";

fn refused<T>(what: io::Result<T>) {
    let Err(error) = what else { panic!("it is allowed") };
    let denied = [libc::EPERM, libc::EACCES];
    assert!(error.raw_os_error().is_some_and(|errno| denied.contains(&errno)), "{error}");
}

/// What a system call says that takes plain numbers.
fn call(number: i64, args: [i64; 4]) -> io::Result<i64> {
    // SAFETY: no case passes an address but null, which the kernel looks at before it uses it.
    match unsafe { libc::syscall(number, args[0], args[1], args[2], args[3]) } {
        -1 => Err(io::Error::last_os_error()),
        done => Ok(done),
    }
}

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

#[allow(clippy::too_many_lines, reason = "it is a list")]
fn within_does(case: &str, Before { place, listener, datagram }: &Before) {
    match case {
        "read a file" => refused(File::open(place.join("file"))),
        "write a file" => refused(File::create(place.join("new"))),
        "list a directory" => refused(std::fs::read_dir(place)),
        "remove a file" => refused(std::fs::remove_file(place.join("file"))),
        "read its own maps" => refused(File::open("/proc/self/maps")),
        "open a device" => refused(File::open("/dev/null")),
        "listen on TCP" => refused(TcpListener::bind("127.0.0.1:0")),
        "connect by TCP" => refused(TcpStream::connect("127.0.0.1:9")),
        "connect to a unix socket" => refused(UnixStream::connect(place.join("socket"))),
        "listen on a unix socket" => refused(UnixListener::bind(place.join("another"))),
        "make another kind of socket" => {
            for domain in [libc::AF_UNIX, libc::AF_INET, libc::AF_NETLINK, libc::AF_PACKET] {
                let kind = i64::from(libc::SOCK_DGRAM);
                refused(call(libc::SYS_socket, [domain.into(), kind, 0, 0]));
            }
        }
        "send a datagram to somebody" => {
            // Landlock has no say about a socket's path before ABI 9.
            let sent = UnixDatagram::pair();
            refused(sent.and_then(|(near, _far)| near.send_to(b"x", place.join("datagram"))));
            refused(datagram.send_to(b"x", place.join("datagram")));
        }
        "signal its supervisor by a descriptor" => {
            let parent = i64::from(std::os::unix::process::parent_id());
            let own = i64::from(listener.as_raw_fd());
            refused(call(libc::SYS_fcntl, [own, libc::F_SETOWN.into(), parent, 0]));
            refused(call(libc::SYS_fcntl, [own, F_SETSIG, libc::SIGKILL.into(), 0]));
        }
        "accept" => refused(listener.accept()),
        "run a program" => refused(Command::new("/bin/true").spawn()),
        "fork" => refused(call(libc::SYS_clone, [i64::from(libc::SIGCHLD), 0, 0, 0])),
        "a namespace" => {
            refused(call(libc::SYS_unshare, [i64::from(libc::CLONE_NEWUSER), 0, 0, 0]));
            refused(call(libc::SYS_setns, [i64::from(listener.as_raw_fd()), 0, 0, 0]));
        }
        "signal its supervisor" => {
            let parent = i64::from(std::os::unix::process::parent_id());
            refused(call(libc::SYS_kill, [parent, 0, 0, 0]));
        }
        "trace its supervisor" => {
            let parent = i64::from(std::os::unix::process::parent_id());
            refused(call(libc::SYS_ptrace, [i64::from(libc::PTRACE_ATTACH as i32), parent, 0, 0]));
        }
        "read another's memory" => {
            let parent = i64::from(std::os::unix::process::parent_id());
            refused(call(libc::SYS_process_vm_readv, [parent, 0, 0, 0]));
        }
        "executable memory" => {
            let (prot, flags) =
                (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            refused(call(libc::SYS_mmap, [0, 4096, prot.into(), flags.into()]));
        }
        "io_uring" => refused(call(libc::SYS_io_uring_setup, [1, 0, 0, 0])),
        "bpf" => refused(call(libc::SYS_bpf, [0, 0, 0, 0])),
        "userfaultfd" => refused(call(libc::SYS_userfaultfd, [0, 0, 0, 0])),
        "mount" => refused(call(libc::SYS_mount, [0, 0, 0, 0])),
        "keys" => refused(call(libc::SYS_keyctl, [0, 0, 0, 0])),
        "watch" => {
            refused(call(libc::SYS_perf_event_open, [0, 0, -1, -1]));
            refused(call(libc::SYS_inotify_init1, [0, 0, 0, 0]));
            refused(call(libc::SYS_fanotify_init, [0, 0, 0, 0]));
        }
        "other processes by a descriptor" => {
            let parent = i64::from(std::os::unix::process::parent_id());
            refused(call(libc::SYS_pidfd_open, [parent, 0, 0, 0]));
            refused(call(libc::SYS_pidfd_getfd, [0, 0, 0, 0]));
            refused(call(libc::SYS_pidfd_send_signal, [0, 0, 0, 0]));
        }
        "write another's memory" => {
            let parent = i64::from(std::os::unix::process::parent_id());
            refused(call(libc::SYS_process_vm_writev, [parent, 0, 0, 0]));
        }
        "load a module" => {
            refused(call(libc::SYS_finit_module, [0, 0, 0, 0]));
            refused(call(libc::SYS_kexec_load, [0, 0, 0, 0]));
        }
        "watch, but for files" => {
            refused(call(libc::SYS_perf_event_open, [0, 0, -1, -1]));
            refused(call(libc::SYS_fanotify_init, [0, 0, 0, 0]));
        }
        "write what is said of devices" => {
            let at = "/sys/class/net/lo/mtu";
            assert!(std::fs::read_to_string(at).is_ok(), "it can be read");
            refused(File::options().write(true).open(at));
        }
        "read other files of the kernel" => {
            refused(File::open("/proc/cpuinfo"));
            refused(std::fs::read_dir("/sys/kernel"));
            refused(std::fs::read_dir("/dev"));
        }
        "set what a socket is" => {
            let own = i64::from(listener.as_raw_fd());
            let level = i64::from(libc::SOL_SOCKET);
            refused(call(libc::SYS_setsockopt, [own, level, libc::SO_ATTACH_FILTER.into(), 0]));
            refused(call(libc::SYS_setsockopt, [own, libc::SOL_TCP.into(), 1, 0]));
            let (ip, interface) = (libc::IPPROTO_IP.into(), libc::IP_MULTICAST_IF.into());
            refused(call(libc::SYS_setsockopt, [own, ip, interface, 0]));
        }
        "change the groups of a socket, and no more" => {
            let own = i64::from(listener.as_raw_fd());
            let ipv4 = [libc::IP_ADD_MEMBERSHIP, libc::IP_DROP_MEMBERSHIP];
            let ipv6 = [libc::IPV6_ADD_MEMBERSHIP, libc::IPV6_DROP_MEMBERSHIP];
            for (level, options) in [(libc::IPPROTO_IP, ipv4), (libc::IPPROTO_IPV6, ipv6)] {
                for option in options {
                    let done = call(libc::SYS_setsockopt, [own, level.into(), option.into(), 0]);
                    // From the socket itself, which is of another family and was told no length.
                    let error = done.err().and_then(|error| error.raw_os_error());
                    assert!(matches!(error, Some(libc::EOPNOTSUPP | libc::EINVAL)), "{error:?}");
                }
                let next = i64::from(options[0].max(options[1]) + 1);
                refused(call(libc::SYS_setsockopt, [own, level.into(), next, 0]));
            }
        }
        "another netlink" => {
            let (domain, kind) = (i64::from(libc::AF_NETLINK), i64::from(libc::SOCK_RAW));
            for protocol in [libc::NETLINK_NETFILTER, libc::NETLINK_RDMA, libc::NETLINK_AUDIT] {
                refused(call(libc::SYS_socket, [domain, kind, protocol.into(), 0]));
            }
        }
        "make a socket that is not the Internet's" => {
            let kinds = [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_RAW].map(i64::from);
            for (domain, kind) in [libc::AF_UNIX, libc::AF_PACKET, libc::AF_VSOCK, libc::AF_RDS]
                .into_iter()
                .flat_map(|domain| kinds.map(|kind| (domain, kind)))
                .chain([(libc::AF_INET, kinds[2]), (libc::AF_INET6, kinds[2])])
                .chain([(libc::AF_NETLINK, kinds[1])])
            {
                refused(call(libc::SYS_socket, [domain.into(), kind, 0, 0]));
            }
            refused(UnixDatagram::pair());
        }
        "listen on TCP, by hand" => {
            let (domain, kind) = (i64::from(libc::AF_INET), i64::from(libc::SOCK_STREAM));
            let socket = call(libc::SYS_socket, [domain, kind, 0, 0]).unwrap();
            refused(call(libc::SYS_listen, [socket, 1, 0, 0]));
        }
        "set what a socket is, but for delays and errors" => {
            let (domain, kind) = (i64::from(libc::AF_INET), i64::from(libc::SOCK_STREAM));
            let own = call(libc::SYS_socket, [domain, kind, 0, 0]).unwrap();
            let level = i64::from(libc::SOL_SOCKET);
            for option in [libc::SO_ATTACH_FILTER, libc::SO_ATTACH_BPF, libc::SO_BINDTODEVICE] {
                refused(call(libc::SYS_setsockopt, [own, level, option.into(), 0]));
            }
            let (ip, group) = (libc::IPPROTO_IP.into(), libc::IP_ADD_MEMBERSHIP.into());
            refused(call(libc::SYS_setsockopt, [own, ip, group, 0]));
            refused(call(
                libc::SYS_setsockopt,
                [own, libc::SOL_TCP.into(), libc::TCP_ULP.into(), 0],
            ));
        }
        "read the host's secrets" => {
            for path in ["/etc/passwd", "/etc/shadow", "/root/.profile", "/proc/1/environ"] {
                refused(File::open(path));
            }
            refused(std::fs::read_dir("/etc"));
            assert!(File::open("/etc/hosts").is_ok(), "names are resolved");
        }
        "speak to another daemon" => {
            // Nobody is there, and it may find that out.
            let met = TcpStream::connect("127.0.0.1:1").map_err(|error| error.kind());
            assert_eq!(met.err(), Some(io::ErrorKind::ConnectionRefused));
            let found = std::net::ToSocketAddrs::to_socket_addrs(&("localhost", 1));
            assert!(found.is_ok_and(|mut all| all.next().is_some()), "by its name");
            let socket = std::net::UdpSocket::bind(("127.0.0.1", 0)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket.send_to(&[0], ("127.0.0.1", 9)).unwrap();
        }
        "control a device" => refused(call(libc::SYS_ioctl, [0, 0x5412, 0, 0])),
        "memory shared by name" => {
            refused(call(libc::SYS_shmget, [0, 4096, 0o1600, 0]));
            refused(call(libc::SYS_msgget, [0, 0o1600, 0, 0]));
        }
        "set the time" => refused(call(libc::SYS_clock_settime, [0, 0, 0, 0])),
        "change its limits" => {
            let limits = libc::rlimit { rlim_cur: 8, rlim_max: 8 };
            // SAFETY: the kernel reads the limits, which live.
            let done = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits) };
            refused(if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) });
        }
        "become dumpable" => {
            refused(call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0, 0]));
        }
        "go on working" => {
            let thread = std::thread::Builder::new().name("x".to_owned()).spawn(|| {
                // As a worker does: what signals must never wait for a VMM.
                crate::eventfd::own_context();
                (vec![1u8; 1 << 20].len(), crate::eventfd::has_own_context())
            });
            assert_eq!(thread.unwrap().join().unwrap(), (1 << 20, true));
            let (a, b) = UnixStream::pair().unwrap();
            io::Write::write_all(&mut &a, b"x").unwrap();
            let again = b.try_clone().unwrap();
            assert_eq!(io::Read::read(&mut &again, &mut [0; 1]).unwrap(), 1);
        }
        "a fault of a thread" => {
            let thread = std::thread::spawn(|| {
                // One that is contained leaves nothing behind.
                assert!(contained(|| panic!("and caught")).is_err());
                panic!("on purpose")
            });
            let _ = thread.join();
        }
        "a fault of a worker" => {
            let _ = fault_of_a_worker(None);
        }
        "a fault of a NIC" => {
            assert_eq!(fault_of_a_worker(Some(NicId(3))), Err(CallError::Failed));
        }
        other => panic!("there is no case {other:?}"),
    }
}

/// A worker's job that panics, for this NIC.
fn fault_of_a_worker(nic: Option<NicId>) -> Result<(), CallError> {
    let workers = Workers::start(WorkerConfig::default()).unwrap();
    workers.handles()[0].call(nic, LONG, |_, _| panic!("on purpose"))
}

/// Cases that have a narrower one for who serves NICs on RNICs.
const OTHERWISE: [&str; 1] = ["watch"];
/// Cases that have a narrower one, or none, for who serves what they share.
const SHARED_OTHERWISE: [&str; 7] = [
    "go on working",
    "watch",
    "make another kind of socket",
    "send a datagram to somebody",
    "set what a socket is",
    "connect by TCP",
    "accept",
];
/// Cases of theirs.
const ON_SHARED: [&str; 8] = [
    "watch, but for files",
    "write what is said of devices",
    "read other files of the kernel",
    "make a socket that is not the Internet's",
    "listen on TCP, by hand",
    "set what a socket is, but for delays and errors",
    "read the host's secrets",
    "speak to another daemon",
];
/// What is allowed.
const ALLOWED: [&str; 2] = ["go on working", "speak to another daemon"];
/// Cases of theirs.
const ON_RNICS: [&str; 4] = [
    "watch, but for files",
    "write what is said of devices",
    "read other files of the kernel",
    "change the groups of a socket, and no more",
];

const CASES: [&str; 38] = [
    "make another kind of socket",
    "send a datagram to somebody",
    "signal its supervisor by a descriptor",
    "watch",
    "other processes by a descriptor",
    "write another's memory",
    "load a module",
    "set what a socket is",
    "another netlink",
    "control a device",
    "memory shared by name",
    "read a file",
    "write a file",
    "list a directory",
    "remove a file",
    "read its own maps",
    "open a device",
    "listen on TCP",
    "connect by TCP",
    "connect to a unix socket",
    "listen on a unix socket",
    "accept",
    "run a program",
    "fork",
    "a namespace",
    "signal its supervisor",
    "trace its supervisor",
    "read another's memory",
    "executable memory",
    "io_uring",
    "bpf",
    "userfaultfd",
    "mount",
    "keys",
    "set the time",
    "change its limits",
    "become dumpable",
    "go on working",
];

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
            for case in [&case, "speak to another daemon"] {
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

fn no_thread_of(inside: Inside) {
    // A thread gives itself its name.
    let last = if inside.profile == Profile::Outside { "cm-channel" } else { "vrdma-shard" };
    let comm = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let is_there = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", inside.child.id())).unwrap();
        tasks.flatten().any(|task| comm(task).is_ok_and(|name| name.starts_with(last)))
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
    let has = |name: &str| names.iter().filter(|other| other.starts_with(name)).count();
    let of = match inside.profile {
        Profile::Soft => (2, 0, 0),
        Profile::Rnic => (2, 1, 0),
        Profile::Outside => (0, 0, 1),
    };
    assert_eq!((has("vrdma-shard"), has("uplink"), has("cm-channel")), of, "{names:?}");
    inside.end();
}

/// What is in quotation marks at the beginning of a table's rows.
fn named(text: &str, mark: char) -> BTreeSet<&str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_prefix(mark)?.split(mark).next())
        .collect()
}

#[test]
fn the_table_of_calls_is_the_list() {
    const TEXT: &str = include_str!("../../../docs/SANDBOX.md");
    let (calls, tried) = TEXT.split_once("## What is tried").unwrap();
    let (_, calls) = calls.split_once("## System calls that are allowed").unwrap();
    let (calls, more) = calls.split_once("### For NICs on RNICs").unwrap();
    let (more, shared) = more.split_once("### For what they share").unwrap();
    let told = named(calls, '`');
    let all = super::calls::names(Profile::Soft);
    let on_rnics = super::calls::names(Profile::Rnic);
    // The tables are those of x86-64, which has all of them.
    if cfg!(target_arch = "x86_64") {
        assert_eq!(told, all);
        let more: BTreeSet<&str> =
            named(more, '`').into_iter().filter(|name| !name.starts_with('/')).collect();
        assert_eq!(more, on_rnics.difference(&all).copied().collect());
        let of_shared = super::calls::names(Profile::Outside);
        assert!(of_shared.is_superset(&on_rnics));
        let shared: BTreeSet<&str> =
            named(shared, '`').into_iter().filter(|name| !name.starts_with('/')).collect();
        // What is on the second list in a narrower form.
        let wider = ["socket", "setsockopt", "ioctl", "sendto"];
        assert_eq!(shared, of_shared.difference(&on_rnics).copied().chain(wider).collect());
    }
    let told: BTreeSet<&str> = named(tried, '"');
    let tried = CASES.into_iter().chain(ON_RNICS).chain(ON_SHARED);
    let tried = tried.filter(|case| !ALLOWED.contains(case)).collect();
    assert_eq!(told, tried);
}
