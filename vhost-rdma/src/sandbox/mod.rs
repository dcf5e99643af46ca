//! What the daemon's processes may still do: compute, and use what they were given.
//!
//! A process that parses what guests and VMMs say is the one that a bug would hand to them. So it
//! gives away whatever serving a network does not take, in an order in which each step is still
//! allowed:
//!
//! - [`close_in`]: no core dump, no debugger, no capability, and none can come back; the kernel
//!   kills the process when its supervisor ends. Before any other thread.
//! - [`forget_names`]: no file, no port, no other process by name. Landlock gives the calling
//!   thread credentials of its own, which it shares with the threads that it makes. So each worker
//!   calls it, once it has opened what it reads of itself, and then the thread that made them.
//!   Who serves RNICs ([`Profile::Rnic`]) calls it before any other thread: the kernel takes a
//!   `write` to an RDMA device only from who has the credentials that opened it
//!   (`ib_safe_file_access`, rdma/ib.h). It still opens devices of RDMA, and reads what the kernel
//!   says of devices: each life of a NIC has a context of its own, so it cannot be done before. Who
//!   serves what they share ([`Profile::Outside`]) does so too, and resolves names.
//! - [`seal`]: no socket of another domain, no program, no other process. It holds for the calling
//!   thread and those that it makes from then on, so each thread that is there calls it.
//!
//! Landlock says no to files where a name is resolved, seccomp (`calls`) to system calls that are
//! not on a list: each would do without the other for most of it. A kernel without one of them
//! gives the rest; the log says what is missing.

#![cfg_attr(not(test), forbid(unsafe_code))]

mod calls;

use std::fmt;
use std::io;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, Signal, set_dumpable_behavior,
    set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Rights of Landlock that are taken away, as far as the kernel knows them.
const LANDLOCK: ABI = ABI::V6;

/// What the process serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// NICs on the daemon's own engine.
    Soft,
    /// NICs on RNICs.
    Rnic,
    /// What they share: the channel to other daemons, and the host's connection manager.
    Outside,
}

/// Nodes of RDMA devices: opened, and driven by ioctl(2).
const NODES: &str = "/dev/infiniband";
/// What libibverbs finds devices by, and what their drivers ask of processors.
const DEVICES: [&str; 3] = ["/sys/class", "/sys/devices", "/sys/bus/pci/devices"];

/// What name resolution reads (resolver(5), nsswitch.conf(5), getaddrinfo(3)): other daemons may be
/// named. Those that are there when the process begins.
const NAMES: [&str; 9] = [
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/run/systemd/resolve",
    "/run/resolvconf",
    "/run/NetworkManager/resolv.conf",
];

impl Profile {
    /// The files that still have a name, and what may be done with them.
    fn files(self) -> [(&'static [&'static str], BitFlags<AccessFs>); 3] {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let nodes = read | AccessFs::WriteFile | AccessFs::IoctlDev;
        match self {
            Self::Soft => [(&[], read); 3],
            Self::Rnic => [(&[NODES], nodes), (&DEVICES, read), (&[], read)],
            Self::Outside => [(&[NODES], nodes), (&DEVICES, read), (&NAMES, read)],
        }
    }

    /// What it cannot do with TCP ports. Its socket for other daemons was opened before.
    fn ports(self) -> BitFlags<AccessNet> {
        match self {
            Self::Soft | Self::Rnic => AccessNet::from_all(LANDLOCK),
            Self::Outside => AccessNet::BindTcp.into(),
        }
    }
}

/// Which parts of the sandbox this host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealed {
    /// Landlock.
    pub landlock: Landlock,
    /// A list of system calls.
    pub seccomp: bool,
}

/// How far Landlock goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landlock {
    /// All that we ask for.
    Whole,
    /// Files at least: the kernel is older than what we ask for.
    Partly,
    /// The kernel has none.
    None,
}

impl fmt::Display for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let landlock = match self.landlock {
            Landlock::Whole => "Landlock",
            Landlock::Partly => "an older Landlock",
            Landlock::None => "no Landlock",
        };
        let seccomp = if self.seccomp { "seccomp" } else { "no seccomp" };
        write!(f, "{landlock}, {seccomp}")
    }
}

/// Gives away what only privilege brings, and what others could read.
///
/// # Errors
/// Something of it is refused, which no host does.
pub fn close_in() -> io::Result<()> {
    // To be called by the thread that lives as long as the process. Whoever made this process lives
    // as long as it wants it to, too: the signal comes with the end of that thread.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // Read from /proc/self by kernels before 6.4, which is root's once this is not dumpable, and
    // gone with the file systems.
    let _ = rustix::param::page_size();
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // A core would hold the memory of guests.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    drop_capabilities()?;
    set_no_new_privs(true)?;
    Ok(())
}

fn drop_capabilities() -> io::Result<()> {
    clear_ambient_capability_set()?;
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // Beyond the last one; or nobody who could take it up again: only root's programs do,
            // and there are no new privileges.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let none = CapabilitySet::empty();
    Ok(set_capabilities(
        None,
        CapabilitySets { effective: none, permitted: none, inheritable: none },
    )?)
}

/// Leaves the calling thread, and all that it will make, the system calls on the profile's list;
/// false where the kernel has no such filters.
///
/// # Errors
/// The kernel has what is asked for, and refuses.
pub fn seal(profile: Profile) -> io::Result<bool> {
    calls::only_ours(profile)
}

/// No file, directory, TCP port or abstract socket can be named any more, but for the profile's,
/// and no process outside be signalled: by the calling thread, and by all that it will make.
///
/// # Errors
/// As [`seal`].
pub fn forget_names(profile: Profile) -> io::Result<Landlock> {
    let [nodes, devices, names] = profile.files();
    let rules = |(paths, access)| path_beneath_rules(paths, access);
    let made = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))
        .and_then(|rules| rules.handle_access(profile.ports()))
        .and_then(|rules| rules.scope(Scope::from_all(LANDLOCK)))
        .and_then(Ruleset::create)
        .and_then(|made| made.add_rules(rules(nodes)))
        .and_then(|made| made.add_rules(rules(devices)))
        .and_then(|made| made.add_rules(rules(names)))
        .and_then(landlock::RulesetCreated::restrict_self);
    match made.map_err(io::Error::other)?.ruleset {
        RulesetStatus::FullyEnforced => Ok(Landlock::Whole),
        RulesetStatus::PartiallyEnforced => Ok(Landlock::Partly),
        RulesetStatus::NotEnforced => Ok(Landlock::None),
    }
}

#[cfg(test)]
pub(crate) mod tests;
