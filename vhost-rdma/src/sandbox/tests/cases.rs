//! What is tried, and what must come of it.

use std::fs::File;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::Command;

use super::{Before, LONG};
use crate::link::NicId;
use crate::panics::contained;
use crate::worker::{CallError, WorkerConfig, Workers};

/// <asm-generic/fcntl.h>
const F_SETSIG: i64 = 10;
/// <linux/seccomp.h>: which actions there are.
const SECCOMP_GET_ACTION_AVAIL: i64 = 2;

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

#[allow(clippy::too_many_lines, reason = "it is a list")]
pub(super) fn within_does(case: &str, Before { place, listener, datagram }: &Before) {
    match case {
        "read a file" => refused(File::open(place.join("file"))),
        "write a file" => refused(File::create(place.join("new"))),
        "ask what a file is" => {
            refused(std::fs::metadata(place.join("file")));
            // Of no path: who may ask hears that (EFAULT).
            let here = i64::from(libc::AT_FDCWD);
            refused(call(libc::SYS_newfstatat, [here, 0, 0, 0]));
            refused(call(libc::SYS_newfstatat, [here, 0, 0, libc::AT_EMPTY_PATH.into()]));
            refused(call(libc::SYS_statx, [here, 0, 0, 0]));
            refused(call(libc::SYS_faccessat, [here, 0, 0, 0]));
            refused(call(libc::SYS_faccessat2, [here, 0, 0, 0]));
            refused(call(libc::SYS_statfs, [0, 0, 0, 0]));
            #[cfg(target_arch = "x86_64")]
            for old in [libc::SYS_stat, libc::SYS_lstat, libc::SYS_access] {
                refused(call(old, [0, 0, 0, 0]));
            }
        }
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
        "fork" => {
            refused(call(libc::SYS_clone, [i64::from(libc::SIGCHLD), 0, 0, 0]));
            let newer = call(libc::SYS_clone3, [0, 0, 0, 0]).map_err(|e| e.raw_os_error());
            assert_eq!(newer, Err(Some(libc::ENOSYS)), "so the C library takes the older one");
        }
        "a namespace" => {
            refused(call(libc::SYS_unshare, [i64::from(libc::CLONE_NEWUSER), 0, 0, 0]));
            refused(call(libc::SYS_setns, [i64::from(listener.as_raw_fd()), 0, 0, 0]));
        }
        "signal its supervisor" => {
            let parent = i64::from(std::os::unix::process::parent_id());
            refused(call(libc::SYS_kill, [parent, 0, 0, 0]));
            // By abort(3) a process signals itself alone.
            refused(call(libc::SYS_tgkill, [parent, parent, 0, 0]));
            refused(call(libc::SYS_tkill, [parent, 0, 0, 0]));
            refused(call(libc::SYS_rt_sigqueueinfo, [parent, 0, 0, 0]));
            refused(call(libc::SYS_rt_tgsigqueueinfo, [parent, parent, 0, 0]));
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
            // Nothing is there: who may call it hears that (ENOMEM).
            refused(call(libc::SYS_mprotect, [0, 4096, prot.into(), 0]));
            refused(call(libc::SYS_pkey_mprotect, [0, 4096, prot.into(), -1]));
        }
        "become somebody else" => {
            // The same as before: who may call it may do that.
            refused(call(libc::SYS_setresuid, [-1, -1, -1, 0]));
            refused(call(libc::SYS_setresgid, [-1, -1, -1, 0]));
            refused(call(libc::SYS_setreuid, [-1, -1, 0, 0]));
            refused(call(libc::SYS_setregid, [-1, -1, 0, 0]));
            refused(call(libc::SYS_setuid, [0, 0, 0, 0]));
            refused(call(libc::SYS_setgid, [0, 0, 0, 0]));
            refused(call(libc::SYS_setfsuid, [-1, 0, 0, 0]));
            refused(call(libc::SYS_setgroups, [0, 0, 0, 0]));
            refused(call(libc::SYS_capset, [0, 0, 0, 0]));
        }
        "another root" => {
            refused(call(libc::SYS_chroot, [0, 0, 0, 0]));
            refused(call(libc::SYS_pivot_root, [0, 0, 0, 0]));
            refused(call(libc::SYS_fchdir, [i64::from(listener.as_raw_fd()), 0, 0, 0]));
        }
        "change whose a file is" => {
            let own = i64::from(listener.as_raw_fd());
            refused(call(libc::SYS_fchmod, [own, 0o777, 0, 0]));
            refused(call(libc::SYS_fchown, [own, -1, -1, 0]));
            refused(call(libc::SYS_fchmodat, [libc::AT_FDCWD.into(), 0, 0o777, 0]));
            refused(call(libc::SYS_fchownat, [libc::AT_FDCWD.into(), 0, -1, -1]));
            refused(call(libc::SYS_fsetxattr, [own, 0, 0, 0]));
        }
        "change when it runs" => {
            refused(call(libc::SYS_sched_setscheduler, [0, libc::SCHED_OTHER.into(), 0, 0]));
            refused(call(libc::SYS_sched_setparam, [0, 0, 0, 0]));
            refused(call(libc::SYS_sched_setattr, [0, 0, 0, 0]));
            refused(call(libc::SYS_sched_setaffinity, [0, 0, 0, 0]));
            refused(call(libc::SYS_setpriority, [libc::PRIO_PROCESS.into(), 0, 0, 0]));
            refused(call(libc::SYS_ioprio_set, [1, 0, 0, 0]));
        }
        "change its filter" => {
            refused(call(libc::SYS_seccomp, [SECCOMP_GET_ACTION_AVAIL, 0, 0, 0]));
            refused(call(libc::SYS_prctl, [libc::PR_GET_SECCOMP.into(), 0, 0, 0]));
            refused(call(libc::SYS_prctl, [libc::PR_SET_SECCOMP.into(), 0, 0, 0]));
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
pub(super) const OTHERWISE: [&str; 2] = ["watch", "ask what a file is"];
/// Cases that have a narrower one, or none, for who serves what they share.
pub(super) const SHARED_OTHERWISE: [&str; 8] = [
    "go on working",
    "watch",
    "ask what a file is",
    "make another kind of socket",
    "send a datagram to somebody",
    "set what a socket is",
    "connect by TCP",
    "accept",
];
/// Cases of who serves what they share.
pub(super) const ON_SHARED: [&str; 8] = [
    "watch, but for files",
    "write what is said of devices",
    "read other files of the kernel",
    "make a socket that is not the Internet's",
    "listen on TCP, by hand",
    "set what a socket is, but for delays and errors",
    "read the host's secrets",
    "speak to another daemon",
];
/// What who serves what they share may do.
pub(super) const ALLOWED_TO_SPEAK: &str = "speak to another daemon";
/// What is allowed.
pub(super) const ALLOWED: [&str; 2] = ["go on working", ALLOWED_TO_SPEAK];
/// Cases of who serves NICs on RNICs.
pub(super) const ON_RNICS: [&str; 4] = [
    "watch, but for files",
    "write what is said of devices",
    "read other files of the kernel",
    "change the groups of a socket, and no more",
];

/// Cases of all.
pub(super) const CASES: [&str; 44] = [
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
    "ask what a file is",
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
    "become somebody else",
    "another root",
    "change whose a file is",
    "change when it runs",
    "change its filter",
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
