//! What the host lets this process have.
//!
//! Each VMM that is connected costs some thirty descriptors, and one for each region of its memory.
//! The soft limit that a service manager or a shell hands out (1024, for programs that call
//! select(2)) would end at a few dozen guests; the hard limit is what the operator means.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard one.
pub use vhost_rdma_places::raise_descriptors;

/// What to say where descriptors came for which this process had no room.
#[must_use]
pub fn no_descriptor_left() -> String {
    let limit = getrlimit(Resource::Nofile).current.map_or("none".to_owned(), |n| n.to_string());
    format!(
        "the network's process has run out of descriptors (its limit of open files, RLIMIT_NOFILE, \
         is {limit}): raise LimitNOFILE of the daemon's service and restart it, or let fewer VMs \
         share the network"
    )
}

/// Pages of guests on RNICs are pinned, and `CAP_IPC_LOCK`, by which RLIMIT_MEMLOCK does not count,
/// is about to be given away: who has it now has no limit afterwards.
pub fn keep_locking() {
    use rustix::thread::{CapabilitySet, capabilities};
    let may =
        |sets: rustix::thread::CapabilitySets| sets.effective.contains(CapabilitySet::IPC_LOCK);
    let limit = getrlimit(Resource::Memlock);
    let most = if capabilities(None).is_ok_and(may) { None } else { limit.maximum };
    let set = |most| setrlimit(Resource::Memlock, Rlimit { current: most, maximum: most });
    if let Err(error) = set(most).or_else(|_| set(limit.maximum)) {
        tracing::warn!(%error, ?limit, "the limit of locked memory stays as it is");
    }
}

/// Descriptors that whoever started this process left open are not for the processes that it
/// starts.
pub fn keep_descriptors() {
    let flags = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
    // SAFETY: it closes none, and touches no memory.
    if unsafe { libc::close_range(3, libc::c_uint::MAX, flags) } != 0 {
        let error = std::io::Error::last_os_error();
        // Before Linux 5.11. The service manager leaves none open.
        tracing::debug!(%error, "descriptors that were inherited are passed on");
    }
}

/// The host's memory in bytes, asked once: sysinfo(2).
#[must_use]
pub fn host_memory() -> u64 {
    static MEMORY: OnceLock<u64> = OnceLock::new();
    *MEMORY.get_or_init(|| {
        let info = rustix::system::sysinfo();
        // The fields' types differ between architectures.
        #[allow(clippy::useless_conversion, clippy::unnecessary_fallible_conversions)]
        let units = u64::try_from(info.totalram).unwrap_or(u64::MAX);
        units.saturating_mul(u64::from(info.mem_unit))
    })
}
