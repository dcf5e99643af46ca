//! What the host lets this process have.
//!
//! Each VMM that is connected costs some thirty descriptors, and one for each region of its memory. The soft limit that a service
//! manager or a shell hands out (1024, for programs that call select(2)) would end at a few dozen guests; the hard limit is what
//! the operator means.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard one.
pub fn raise_descriptors() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(from = ?current, to = ?maximum, "more open files"),
        Err(error) => {
            tracing::warn!(%error, limit = ?current, "the limit of open files stays as it is");
        }
    }
}

/// Descriptors that whoever started this process left open are not for the processes that it starts.
pub fn keep_descriptors() {
    let flags = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
    // SAFETY: it closes none, and touches no memory.
    if unsafe { libc::close_range(3, libc::c_uint::MAX, flags) } != 0 {
        let error = std::io::Error::last_os_error();
        // Before Linux 5.11. The service manager leaves none open.
        tracing::debug!(%error, "descriptors that were inherited are passed on");
    }
}
