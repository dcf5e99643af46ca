//! The system calls of the daemon's processes.
//!
//! A list of what is allowed; all else fails with `EPERM`. It fails rather than kills: what a
//! library tries without need (a cache, a hint) then costs nothing, and is as impossible.
//!
//! | what for | calls |
//! |---|---|
//! | memory | map, unmap, protect, advise; never executable |
//! | threads | `clone` for a thread only, futex, signals to itself |
//! | descriptors it was given | read, write, poll, epoll, eventfd, asynchronous I/O, messages |
//! | time, random numbers | all |
//!
//! A process of NICs on RNICs has [`DEVICES`] besides, and that of what they share [`NETWORK`].
//!
//! docs/SANDBOX.md has each of them, and what was tried.
//!
//! Not on the first: `open`, `stat`, `socket`. On the last only: `connect`. On none: `execve`,
//! `fork`, `ptrace`, `kill`, `io_uring`, `bpf`, `mount`, `unshare`, keys, and whatever the kernel
//! gets next.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::Profile;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A call's number, and its name in the C library's header.
type Call = (i64, &'static str);

macro_rules! calls {
    ($($name:ident),* $(,)?) => { &[$((libc::$name, stringify!($name))),*] };
}

/// Whatever their arguments.
const PLAIN: &[Call] = calls![
    // Memory.
    SYS_munmap,
    SYS_mremap,
    SYS_madvise,
    SYS_brk,
    SYS_membarrier,
    SYS_memfd_create,
    SYS_ftruncate,
    SYS_fallocate,
    // Threads.
    SYS_futex,
    SYS_set_robust_list,
    SYS_rseq,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_gettid,
    SYS_getpid,
    SYS_getrusage,
    SYS_exit,
    SYS_exit_group,
    SYS_restart_syscall,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sigaltstack,
    // Descriptors.
    SYS_read,
    SYS_write,
    SYS_readv,
    SYS_writev,
    SYS_pread64,
    SYS_preadv2,
    SYS_lseek,
    SYS_close,
    SYS_fstat,
    SYS_fstatfs,
    SYS_dup,
    SYS_dup3,
    // Whether a VMM's descriptor is an eventfd: /proc/self/fd (`eventfd`). It opens nothing.
    SYS_readlinkat,
    SYS_eventfd2,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_ppoll,
    SYS_io_setup,
    SYS_io_submit,
    SYS_io_getevents,
    SYS_io_destroy,
    SYS_sendmsg,
    SYS_recvmsg,
    SYS_recvfrom,
    SYS_shutdown,
    SYS_getsockopt,
    // Time, chance.
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_nanosleep,
    SYS_gettimeofday,
    SYS_getrandom,
    // Answered before this list is asked (`not_there`).
    SYS_clone3,
];

/// What libibverbs calls beside them, where Landlock says which files there are: it opens devices,
/// lists and reads what the kernel says of them, and sees a node of a device that goes.
///
/// Landlock has no say about what a file is (the warning at `access_fs`, linux/landlock.h), and no
/// filter reads a path. So who has no files has none of these calls. `AT_EMPTY_PATH` is no help: it
/// allows an empty path, and does not ask for one. By descriptor there is `fstat`.
const DEVICES: &[Call] = calls![
    SYS_openat,
    SYS_newfstatat,
    SYS_statx,
    SYS_getdents64,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_statfs,
    SYS_inotify_init1,
    SYS_inotify_add_watch,
    SYS_inotify_rm_watch,
    SYS_bind,
    SYS_getsockname,
];
/// The same, on machines that have them.
#[cfg(target_arch = "x86_64")]
const OLD_DEVICES: &[Call] = calls![SYS_open, SYS_access, SYS_stat, SYS_lstat];
#[cfg(not(target_arch = "x86_64"))]
const OLD_DEVICES: &[Call] = &[];

/// What a process speaks TCP by and resolves names, beside [`DEVICES`]. Landlock has no port to
/// listen at.
const NETWORK: &[Call] = calls![
    SYS_connect,
    SYS_accept4,
    SYS_getpeername,
    SYS_sendmmsg,
    SYS_recvmmsg,
    SYS_uname,
    SYS_sysinfo,
];

/// Sockets of the Internet: streams to other daemons, datagrams for names and neighbours.
const FAMILIES: [libc::c_int; 2] = [libc::AF_INET, libc::AF_INET6];
const KINDS: [libc::c_int; 2] = [libc::SOCK_STREAM, libc::SOCK_DGRAM];
/// What is set of them: by the channel, and by the C library's resolver (resolv/res_send.c).
const INTERNET_OPTIONS: [(libc::c_int, libc::c_int); 3] = [
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_IP, libc::IP_RECVERR),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
];
/// What is asked of them, and set: whether they wait, and how much there is to read.
const INTERNET_CONTROLS: [u64; 2] = [libc::FIONBIO, libc::FIONREAD];

/// Answers of the kernel's about links, routes and neighbours, which libibverbs reads to make an
/// address handle (rdma-core libibverbs/neigh.c). Who has no capability changes nothing by it.
const NETLINK: (libc::c_int, libc::c_int) = (libc::AF_NETLINK, libc::NETLINK_ROUTE);
/// What libnl sets of such a socket (libnl lib/socket.c).
const OPTIONS: [libc::c_int; 2] = [libc::SO_SNDBUF, libc::SO_RCVBUF];

/// Groups come and go by sockets that were made before, and that carry nothing (`rnic/`).
const MEMBERSHIPS: [(libc::c_int, libc::c_int); 4] = [
    (libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP),
    (libc::IPPROTO_IP, libc::IP_DROP_MEMBERSHIP),
    (libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP),
    (libc::IPPROTO_IPV6, libc::IPV6_DROP_MEMBERSHIP),
];

/// The group of ioctl(2) that drives RDMA devices (`RDMA_IOCTL_MAGIC`, rdma/rdma_user_ioctl.h).
const RDMA: u64 = 0x1b00;
const GROUP: u64 = 0xff00;

/// Calls that newer machines do without.
#[cfg(target_arch = "x86_64")]
const OLD: &[Call] = calls![SYS_poll, SYS_epoll_wait, SYS_readlink];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[Call] = &[];

/// What may be done to a descriptor: `F_SETOWN` and `F_SETSIG` are not, by which the kernel would
/// send any signal to any process of this user.
const FCNTL: [libc::c_int; 7] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// Kinds of pairs: one of datagrams would reach every datagram socket that has a path.
const PAIRS: [libc::c_int; 2] = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET];
/// The kind, without its flags.
const KIND: u64 = 0xf;

/// What a thread is never made with.
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Of some of a call's arguments the index, the bits that count, and their value.
type Arguments = Vec<(u8, u64, u64)>;
/// What may be called, each with arguments like one of these; without any, with whatever arguments.
type Allowed = BTreeMap<i64, Vec<Arguments>>;

/// Allows a call whose arguments are as said.
fn where_bits(allowed: &mut Allowed, call: i64, arguments: &[(u8, u64, u64)]) {
    allowed.entry(call).or_default().push(arguments.to_vec());
}

/// Options of sockets, by level and name.
fn may_set(allowed: &mut Allowed, options: &[(libc::c_int, libc::c_int)]) {
    let word = u64::from(u32::MAX);
    for (level, option) in options {
        let arguments = [(1, word, *level as u64), (2, word, *option as u64)];
        where_bits(allowed, libc::SYS_setsockopt, &arguments);
    }
}

fn allowed(profile: Profile) -> Allowed {
    let word = u64::from(u32::MAX);
    let mut allowed: Allowed =
        PLAIN.iter().chain(OLD).map(|(call, _)| (*call, Vec::new())).collect();
    if profile != Profile::Soft {
        allowed.extend(DEVICES.iter().chain(OLD_DEVICES).map(|(call, _)| (*call, Vec::new())));
        where_bits(&mut allowed, libc::SYS_ioctl, &[(1, GROUP, RDMA)]);
        let (domain, protocol) = (NETLINK.0 as u64, NETLINK.1 as u64);
        let arguments = [(0, word, domain), (1, KIND, libc::SOCK_RAW as u64), (2, word, protocol)];
        where_bits(&mut allowed, libc::SYS_socket, &arguments);
        for option in OPTIONS {
            let arguments = [(1, word, libc::SOL_SOCKET as u64), (2, word, option as u64)];
            where_bits(&mut allowed, libc::SYS_setsockopt, &arguments);
        }
        where_bits(&mut allowed, libc::SYS_setsockopt, &[(1, word, libc::SOL_NETLINK as u64)]);
    }
    if profile == Profile::Rnic {
        may_set(&mut allowed, &MEMBERSHIPS);
    }
    if profile == Profile::Outside {
        allowed.extend(NETWORK.iter().map(|(call, _)| (*call, Vec::new())));
        for (family, kind) in FAMILIES.into_iter().flat_map(|f| KINDS.map(|kind| (f, kind))) {
            let arguments = [(0, word, family as u64), (1, KIND, kind as u64)];
            where_bits(&mut allowed, libc::SYS_socket, &arguments);
        }
        may_set(&mut allowed, &INTERNET_OPTIONS);
        for control in INTERNET_CONTROLS {
            where_bits(&mut allowed, libc::SYS_ioctl, &[(1, word, control)]);
        }
        // To whom it likes, as it connects to whom it likes.
        allowed.insert(libc::SYS_sendto, Vec::new());
    }
    let exec = libc::PROT_EXEC as u64;
    where_bits(&mut allowed, libc::SYS_mmap, &[(2, exec, 0)]);
    where_bits(&mut allowed, libc::SYS_mprotect, &[(2, exec, 0)]);
    // A thread of this process: no other process, no namespace.
    let thread = libc::CLONE_THREAD as u64;
    let looked_at = thread | u64::from(NAMESPACES.cast_unsigned());
    where_bits(&mut allowed, libc::SYS_clone, &[(0, looked_at, thread)]);
    // The name of a thread; nothing else of prctl(2).
    where_bits(&mut allowed, libc::SYS_prctl, &[(0, word, libc::PR_SET_NAME as u64)]);
    // Its own limits, to be read: the new ones are at no address.
    where_bits(&mut allowed, libc::SYS_prlimit64, &[(0, word, 0), (2, u64::MAX, 0)]);
    // abort(3) signals its own process.
    let own = u64::from(std::process::id());
    where_bits(&mut allowed, libc::SYS_tgkill, &[(0, word, own)]);
    // A pair is connected to nobody else.
    for kind in PAIRS {
        let kind = u64::from(kind.cast_unsigned());
        let arguments = [(0, word, libc::AF_UNIX as u64), (1, KIND, kind)];
        where_bits(&mut allowed, libc::SYS_socketpair, &arguments);
    }
    // To whoever the socket is connected to: no address.
    if profile != Profile::Outside {
        where_bits(&mut allowed, libc::SYS_sendto, &[(4, u64::MAX, 0)]);
    }
    for command in FCNTL {
        let command = u64::from(command.cast_unsigned());
        where_bits(&mut allowed, libc::SYS_fcntl, &[(1, word, command)]);
    }
    allowed
}

fn rules(profile: Profile) -> Result<Rules, seccompiler::BackendError> {
    let condition = |&(index, mask, value): &(u8, u64, u64)| {
        let length = SeccompCmpArgLen::Qword;
        SeccompCondition::new(index, length, SeccompCmpOp::MaskedEq(mask), value)
    };
    let rule = |arguments: &Arguments| {
        SeccompRule::new(arguments.iter().map(condition).collect::<Result<_, _>>()?)
    };
    let rules = |(call, ways): (i64, Vec<Arguments>)| {
        Ok((call, ways.iter().map(rule).collect::<Result<_, _>>()?))
    };
    allowed(profile).into_iter().map(rules).collect()
}

/// All that may be called, by name: with which arguments, or with any.
#[cfg(test)]
pub(super) fn named(profile: Profile) -> BTreeMap<&'static str, Vec<Arguments>> {
    const LOOKED_AT: &[Call] = calls![
        SYS_mmap,
        SYS_mprotect,
        SYS_clone,
        SYS_prctl,
        SYS_prlimit64,
        SYS_tgkill,
        SYS_socketpair,
        SYS_sendto,
        SYS_fcntl,
        SYS_ioctl,
        SYS_socket,
        SYS_setsockopt,
    ];
    let known = || [PLAIN, OLD, LOOKED_AT, DEVICES, OLD_DEVICES, NETWORK].into_iter().flatten();
    let name =
        |number: &i64| known().find(|(known, _)| known == number).expect("every call has a name").1;
    let all = allowed(profile).into_iter();
    let named = all.map(|(number, ways)| (name(&number).trim_start_matches("SYS_"), ways));
    named.filter(|(name, _)| *name != "clone3").collect()
}

/// Calls that only older machines have.
#[cfg(test)]
pub(super) fn old() -> std::collections::BTreeSet<&'static str> {
    [OLD, OLD_DEVICES].into_iter().flatten().map(|(_, n)| n.trim_start_matches("SYS_")).collect()
}

fn program(
    rules: Rules,
    otherwise: SeccompAction,
    matched: SeccompAction,
    arch: TargetArch,
) -> Result<BpfProgram, seccompiler::BackendError> {
    SeccompFilter::new(rules, otherwise, matched, arch)?.try_into()
}

/// `clone3` hides its flags in memory, where no filter looks. Told that there is none, the C
/// library uses `clone`.
fn not_there(arch: TargetArch) -> Result<BpfProgram, seccompiler::BackendError> {
    let rules = Rules::from([(libc::SYS_clone3, Vec::new())]);
    program(rules, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32), arch)
}

fn listed(profile: Profile, arch: TargetArch) -> Result<BpfProgram, seccompiler::BackendError> {
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    program(rules(profile)?, refused, SeccompAction::Allow, arch)
}

/// Leaves the calling thread the calls on the list; false where the kernel or the machine has no
/// such filters.
pub(super) fn only_ours(profile: Profile) -> io::Result<bool> {
    let Ok(arch) = TargetArch::try_from(std::env::consts::ARCH) else { return Ok(false) };
    // Of two filters that refuse, the later one's answer holds; so this one comes first.
    for filter in [not_there(arch), listed(profile, arch)] {
        let filter = filter.map_err(io::Error::other)?;
        match apply_filter(&filter) {
            Ok(()) => {}
            // CONFIG_SECCOMP_FILTER is not set.
            Err(seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error))
                if error.raw_os_error() == Some(libc::EINVAL)
                    || error.raw_os_error() == Some(libc::ENOSYS) =>
            {
                return Ok(false);
            }
            Err(error) => return Err(io::Error::other(error)),
        }
    }
    Ok(true)
}
