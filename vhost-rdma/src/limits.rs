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
