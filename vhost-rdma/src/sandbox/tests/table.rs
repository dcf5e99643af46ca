//! docs/SANDBOX.md against the lists: which calls there are, and with which arguments.

use std::collections::{BTreeMap, BTreeSet};

use super::Profile;
use super::cases::{ALLOWED, CASES, ON_RNICS, ON_SHARED};
use crate::sandbox::calls::{named, old};

const TEXT: &str = include_str!("../../../../docs/SANDBOX.md");
/// What the last column says of what is not by arguments: which machines have the call, what
/// Landlock leaves of it, that there is no such limit.
const NOT_BY_ARGUMENTS: [(&str, &str); 3] = [
    ("openat", "files that Landlock leaves, see below"),
    ("connect", "TCP and UDP"),
    ("sendto", "any address"),
];
const OLD: &str = "x86-64 only";

/// Arguments of a call.
type Example = [i64; 5];

/// What a row's last column means: arguments that pass by it, and such that do not.
struct Only {
    table: Profile,
    call: &'static str,
    words: &'static str,
    passes: Vec<Example>,
    fails: Vec<Example>,
}

/// Cells of the tables' rows, in which a name comes first.
fn rows(text: &str) -> Vec<[&str; 3]> {
    let rows = text.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix("| `")?.split('|').map(str::trim).collect();
        let [call, purpose, only, ""] = cells[..] else { return None };
        Some([call.trim_end_matches('`'), purpose, only])
    });
    rows.collect()
}

/// The tables of system calls, by whose they are.
fn tables() -> [(Profile, Vec<[&'static str; 3]>); 3] {
    let (calls, _) = TEXT.split_once("## What is tried").unwrap();
    let (_, calls) = calls.split_once("## System calls that are allowed").unwrap();
    let (calls, more) = calls.split_once("### For NICs on RNICs").unwrap();
    let (more, shared) = more.split_once("### For what they share").unwrap();
    [(Profile::Soft, rows(calls)), (Profile::Rnic, rows(more)), (Profile::Outside, rows(shared))]
}

#[test]
fn the_table_of_calls_is_the_list() {
    // The tables are those of x86-64, which has all of them.
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let [soft, rnic, outside] =
        tables().map(|(_, rows)| rows.into_iter().map(|[call, ..]| call).collect::<BTreeSet<_>>());
    let [all, on_rnics, of_shared] = [Profile::Soft, Profile::Rnic, Profile::Outside]
        .map(|profile| named(profile).into_keys().collect::<BTreeSet<_>>());
    assert_eq!(soft, all);
    assert_eq!(rnic, on_rnics.difference(&all).copied().collect());
    assert!(of_shared.is_superset(&on_rnics));
    // What is on the second list in a narrower form.
    let wider = ["socket", "setsockopt", "ioctl", "sendto"];
    assert_eq!(outside, of_shared.difference(&on_rnics).copied().chain(wider).collect());
}

/// By arguments that pass and such that do not: each condition of the lists is one that a row
/// names, and each row that names one has it.
#[test]
fn the_last_column_is_what_the_lists_look_at() {
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let only = only();
    let mut told = BTreeSet::new();
    for (table, rows) in tables() {
        let (ours, old) = (named(table), old());
        for [call, purpose, words] in rows {
            if words == OLD {
                assert!(old.contains(call), "{call} is newer");
            } else if words.is_empty() || NOT_BY_ARGUMENTS.contains(&(call, words)) {
                assert!(ours[call].is_empty(), "{call} ({purpose}) is looked at: {words:?}");
                assert!(!old.contains(call), "{call} is old");
            } else {
                told.insert((call, words));
            }
        }
    }
    assert_eq!(told, only.iter().map(|row| (row.call, row.words)).collect());
    for profile in [Profile::Soft, Profile::Rnic, Profile::Outside] {
        let of = |row: &&Only| {
            let wider = ALL_OF_SHARED.contains(&row.call) && row.table != Profile::Outside;
            let same = row.table == profile || row.table == Profile::Soft;
            let of_second = row.table == Profile::Rnic && row.words != GROUPS;
            same && !(profile == Profile::Outside && wider)
                || profile == Profile::Outside && of_second
        };
        looked_at(profile, &only.iter().filter(of).collect::<Vec<_>>());
    }
}

/// What who serves what they share may call with any arguments.
const ALL_OF_SHARED: [&str; 1] = ["sendto"];
/// What who serves what they share may not.
const GROUPS: &str = "to join and leave a group";

/// Whether these rows are all that a list looks at.
fn looked_at(profile: Profile, rows: &[&Only]) {
    let ours = named(profile);
    let passes = |ways: &[Vec<(u8, u64, u64)>], example: &Example| {
        let like = |way: &Vec<(u8, u64, u64)>| {
            way.iter().all(|(at, mask, value)| {
                example[usize::from(*at)].cast_unsigned() & mask == value & mask
            })
        };
        ways.iter().map(like).collect::<Vec<_>>()
    };
    let mut shown: BTreeMap<&str, Vec<bool>> = BTreeMap::new();
    for row in rows {
        let ways = &ours[row.call];
        assert!(!ways.is_empty() && !row.passes.is_empty() && !row.fails.is_empty());
        let shown = shown.entry(row.call).or_insert_with(|| vec![false; ways.len()]);
        for example in &row.passes {
            let by = passes(ways, example);
            let told = format!("{profile:?} {} {example:?}: {}", row.call, row.words);
            assert!(by.contains(&true), "does not pass: {told}");
            shown.iter_mut().zip(by).for_each(|(shown, by)| *shown |= by);
        }
        if row.table == profile {
            for example in &row.fails {
                let told = format!("{profile:?} {} {example:?}: {}", row.call, row.words);
                assert!(!passes(ways, example).contains(&true), "passes: {told}");
            }
        }
    }
    for (call, ways) in &ours {
        let shown = shown.remove(call).unwrap_or_default();
        assert_eq!(shown, vec![true; ways.len()], "{profile:?} {call}: what no row says");
    }
    assert!(shown.is_empty());
}

#[allow(clippy::too_many_lines, reason = "it is a list")]
fn only() -> Vec<Only> {
    use libc::{
        AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_UNIX, CLONE_NEWCGROUP, CLONE_NEWIPC,
        CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWUTS, CLONE_SETTLS,
        CLONE_THREAD, CLONE_VM, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, NETLINK_NETFILTER,
        NETLINK_ROUTE, PROT_EXEC, PROT_READ, PROT_WRITE, SIGABRT, SIGCHLD, SOCK_CLOEXEC,
        SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET, SOCK_STREAM, SOL_NETLINK, SOL_SOCKET,
    };
    const RDMA_WRITE_READ: i64 = 0xc018_1b01;
    const TIOCSTI: i64 = 0x5412;
    let own = i64::from(std::process::id());
    let of = |table, call, words, passes, fails| Only { table, call, words, passes, fails };
    // Arguments that are looked at, by their places; the others are nothing.
    let at = |places: &[(usize, i32)]| {
        let mut example = Example::default();
        places.iter().for_each(|(place, value)| example[*place] = (*value).into());
        example
    };
    let first = |value: i32| at(&[(0, value)]);
    let second = |value: i32| at(&[(1, value)]);
    let memory = |prot: i32| at(&[(1, 4096), (2, prot)]);
    let socket = |domain, kind, protocol| at(&[(0, domain), (1, kind), (2, protocol)]);
    let option = |level, name| at(&[(0, 3), (1, level), (2, name)]);
    let executable = || {
        let passes = vec![memory(0), memory(PROT_READ), memory(PROT_READ | PROT_WRITE)];
        (passes, vec![memory(PROT_EXEC), memory(PROT_READ | PROT_WRITE | PROT_EXEC)])
    };
    let ((maps, no_maps), (protects, no_protects)) = (executable(), executable());
    let namespaces = [
        CLONE_NEWNS,
        CLONE_NEWCGROUP,
        CLONE_NEWUTS,
        CLONE_NEWIPC,
        CLONE_NEWUSER,
        CLONE_NEWPID,
        CLONE_NEWNET,
    ];
    let processes = [SIGCHLD, CLONE_VM | SIGCHLD].into_iter();
    let processes = processes.chain(namespaces.map(|namespace| CLONE_THREAD | namespace));
    let controls = [
        libc::F_DUPFD_CLOEXEC,
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_GET_SEALS,
        libc::F_ADD_SEALS,
    ];
    let no_controls = [libc::F_SETOWN, 10, libc::F_SETLK, libc::F_NOTIFY, libc::F_SETPIPE_SZ];
    let options = [(IPPROTO_IP, libc::IP_ADD_MEMBERSHIP), (IPPROTO_IP, libc::IP_DROP_MEMBERSHIP)]
        .into_iter()
        .chain([(IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP)])
        .chain([(IPPROTO_IPV6, libc::IPV6_DROP_MEMBERSHIP)]);
    let (soft, rnic, outside) = (Profile::Soft, Profile::Rnic, Profile::Outside);
    vec![
        of(soft, "mmap", "nothing executable", maps, no_maps),
        of(soft, "mprotect", "nothing executable", protects, no_protects),
        of(
            soft,
            "clone",
            "a thread of this process, in the same namespaces",
            vec![first(CLONE_THREAD), first(CLONE_THREAD | CLONE_VM | CLONE_SETTLS)],
            processes.map(first).collect(),
        ),
        of(
            soft,
            "prctl",
            "`PR_SET_NAME`",
            vec![first(libc::PR_SET_NAME)],
            vec![first(libc::PR_SET_DUMPABLE), first(libc::PR_SET_SECCOMP)],
        ),
        of(
            soft,
            "prlimit64",
            "its own limits, to be read",
            vec![[0, 7, 0, 1, 0]],
            vec![[own + 1, 7, 0, 1, 0], [0, 7, 1, 0, 0]],
        ),
        of(
            soft,
            "tgkill",
            "itself, by abort(3)",
            vec![[own, own, SIGABRT.into(), 0, 0]],
            vec![[own + 1, own + 1, SIGABRT.into(), 0, 0], [own + 1, own, 0, 0, 0]],
        ),
        of(
            soft,
            "socketpair",
            "`AF_UNIX`, `SOCK_STREAM` or `SOCK_SEQPACKET`",
            vec![
                socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0),
                socket(AF_UNIX, SOCK_SEQPACKET, 0),
            ],
            vec![socket(AF_UNIX, SOCK_DGRAM, 0), socket(AF_INET, SOCK_STREAM, 0)],
        ),
        of(
            soft,
            "sendto",
            "no address",
            vec![[3, 0, 0, 0, 0]],
            vec![[3, 0, 0, 0, 1], [3, 0, 0, 0, 1 << 40]],
        ),
        of(
            soft,
            "fcntl",
            "close-on-exec, duplicates, flags, seals",
            controls.map(second).to_vec(),
            no_controls.map(second).to_vec(),
        ),
        of(
            rnic,
            "socket",
            "netlink, of routes",
            vec![socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE)],
            vec![
                socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER),
                socket(AF_NETLINK, SOCK_DGRAM, NETLINK_ROUTE),
                socket(AF_INET, SOCK_STREAM, 0),
                socket(AF_UNIX, SOCK_STREAM, 0),
            ],
        ),
        of(
            rnic,
            "setsockopt",
            "sizes of buffers",
            vec![option(SOL_SOCKET, libc::SO_SNDBUF), option(SOL_SOCKET, libc::SO_RCVBUF)],
            vec![option(SOL_SOCKET, libc::SO_ATTACH_FILTER), option(SOL_SOCKET, libc::SO_MARK)],
        ),
        of(
            rnic,
            "setsockopt",
            "what netlink has",
            vec![option(SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP), option(SOL_NETLINK, 11)],
            vec![option(SOL_NETLINK + 1, 1)],
        ),
        of(
            rnic,
            "setsockopt",
            GROUPS,
            options.map(|(level, name)| option(level, name)).collect(),
            vec![
                option(IPPROTO_IP, libc::IP_MULTICAST_IF),
                option(IPPROTO_IPV6, libc::IPV6_MULTICAST_IF),
            ],
        ),
        of(
            rnic,
            "ioctl",
            "the group of RDMA devices (`0x1b`)",
            vec![[3, RDMA_WRITE_READ, 0, 0, 0]],
            vec![[3, TIOCSTI, 0, 0, 0], [3, 0xc018_1c01, 0, 0, 0]],
        ),
        of(
            outside,
            "socket",
            "TCP and UDP besides",
            [AF_INET, AF_INET6]
                .into_iter()
                .flat_map(|domain| [SOCK_STREAM, SOCK_DGRAM].map(|kind| socket(domain, kind, 0)))
                .collect(),
            vec![
                socket(AF_INET, SOCK_RAW, 0),
                socket(AF_PACKET, SOCK_DGRAM, 0),
                socket(AF_UNIX, SOCK_STREAM, 0),
            ],
        ),
        of(
            outside,
            "setsockopt",
            "`TCP_NODELAY`, `IP_RECVERR` and `IPV6_RECVERR` besides",
            vec![
                option(IPPROTO_TCP, libc::TCP_NODELAY),
                option(IPPROTO_IP, libc::IP_RECVERR),
                option(IPPROTO_IPV6, libc::IPV6_RECVERR),
            ],
            vec![
                option(IPPROTO_TCP, libc::TCP_ULP),
                option(IPPROTO_IP, libc::IP_ADD_MEMBERSHIP),
                option(IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP),
            ],
        ),
        of(
            outside,
            "ioctl",
            "`FIONBIO`, `FIONREAD` besides",
            vec![
                [3, libc::FIONBIO.cast_signed(), 0, 0, 0],
                [3, libc::FIONREAD.cast_signed(), 0, 0, 0],
            ],
            vec![[3, TIOCSTI, 0, 0, 0]],
        ),
    ]
}

/// What is in quotation marks at the beginning of a table's rows.
#[test]
fn the_table_of_what_is_tried_is_the_list() {
    let (_, tried) = TEXT.split_once("## What is tried").unwrap();
    let told: BTreeSet<&str> =
        tried.lines().filter_map(|line| line.strip_prefix("| \"")?.split('"').next()).collect();
    let cases = CASES.into_iter().chain(ON_RNICS).chain(ON_SHARED);
    assert_eq!(told, cases.filter(|case| !ALLOWED.contains(case)).collect());
}
