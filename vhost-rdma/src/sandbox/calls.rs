//! The system calls of a network process.
//!
//! A list of what is allowed; all else fails with `EPERM`. It fails rather than kills: what a
//! library tries without need (a cache, a hint) then costs nothing, and is as impossible.
//!
//! | what for | calls |
//! |---|---|
//! | memory | map, unmap, protect, advise; never executable |
//! | threads | `clone` for a thread only, futex, signals to itself |
//! | descriptors that it was given | read, write, poll, epoll, eventfd, asynchronous I/O, messages |
//! | time, random numbers | all |
//!
//! Not on it: `open`, `socket`, `connect`, `execve`, `fork`, `ptrace`, `kill`, `io_uring`, `bpf`,
//! `mount`, `unshare`, keys, and whatever the kernel gets next.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Whatever their arguments.
const PLAIN: &[i64] = &[
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    // Threads.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getrusage,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // Descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_dup3,
    // What a descriptor is: /proc/self/fd. It opens nothing.
    libc::SYS_readlinkat,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    // Time, chance.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    // Answered before this list is asked (`not_there`).
    libc::SYS_clone3,
];

/// Calls that newer machines do without.
#[cfg(target_arch = "x86_64")]
const OLD: &[i64] =
    &[libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_readlink, libc::SYS_stat, libc::SYS_lstat];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[i64] = &[];

/// Allows a call whose arguments are as said: of each its index, the bits that count, and their
/// value.
fn where_bits(
    rules: &mut Rules,
    call: i64,
    arguments: &[(u8, u64, u64)],
) -> Result<(), seccompiler::BackendError> {
    let condition = |&(index, mask, value): &(u8, u64, u64)| {
        let length = SeccompCmpArgLen::Qword;
        SeccompCondition::new(index, length, SeccompCmpOp::MaskedEq(mask), value)
    };
    let conditions = arguments.iter().map(condition).collect::<Result<_, _>>()?;
    rules.entry(call).or_default().push(SeccompRule::new(conditions)?);
    Ok(())
}

fn rules() -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = PLAIN.iter().chain(OLD).map(|call| (*call, Vec::new())).collect();
    let word = u64::from(u32::MAX);
    let exec = libc::PROT_EXEC as u64;
    where_bits(&mut rules, libc::SYS_mmap, &[(2, exec, 0)])?;
    where_bits(&mut rules, libc::SYS_mprotect, &[(2, exec, 0)])?;
    // A thread of this process: no other process, no namespace.
    let thread = libc::CLONE_THREAD as u64;
    where_bits(&mut rules, libc::SYS_clone, &[(0, thread, thread)])?;
    // The name of a thread; nothing else of prctl(2).
    where_bits(&mut rules, libc::SYS_prctl, &[(0, word, libc::PR_SET_NAME as u64)])?;
    // Its own limits, to be read: the new ones are at no address.
    where_bits(&mut rules, libc::SYS_prlimit64, &[(0, word, 0), (2, u64::MAX, 0)])?;
    // abort(3) signals its own process.
    let own = u64::from(std::process::id());
    where_bits(&mut rules, libc::SYS_tgkill, &[(0, word, own)])?;
    // A pair is connected to nobody else.
    where_bits(&mut rules, libc::SYS_socketpair, &[(0, word, libc::AF_UNIX as u64)])?;
    Ok(rules)
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

fn listed(arch: TargetArch) -> Result<BpfProgram, seccompiler::BackendError> {
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    program(rules()?, refused, SeccompAction::Allow, arch)
}

/// Leaves the calling thread the calls on the list; false where the kernel or the machine has no
/// such filters.
pub(super) fn only_ours() -> io::Result<bool> {
    let Ok(arch) = TargetArch::try_from(std::env::consts::ARCH) else { return Ok(false) };
    // Of two filters that refuse, the later one's answer holds; so this one comes first.
    for filter in [not_there(arch), listed(arch)] {
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
