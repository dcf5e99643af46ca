//! How a process comes in: a thread, a place in the house, a session.
//!
//! The thread is there first. Who comes is a stranger, and to close what a stranger has sent can
//! take as long as the stranger likes (`aside`). So nobody else waits: a process is let in, served
//! and turned away on a thread of its own, and its sockets are closed when its place is free again.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::house::{House, NotIn};
use super::memory::Window;
use super::messages::Answer;
use super::session::Session;
use super::socket;
use crate::nic::Status;

/// Stack of a session's thread.
const STACK: usize = 256 << 10;
/// Threads of a NIC that part with processes which were turned away. Where there are more, who
/// comes next is not answered before its own is done, and the door lets one in at a time.
const PARTING: u32 = 4;

/// A place in a house, which is given back with it.
struct Place {
    house: Arc<House>,
    window: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.house.leave(self.window);
    }
}

/// One of those that part with a process.
struct Parting(Arc<AtomicU32>);

impl Parting {
    /// Another one, and whether there are few.
    fn begin(partings: &Arc<AtomicU32>) -> (Self, bool) {
        let others = partings.fetch_add(1, Ordering::Relaxed);
        (Self(partings.clone()), others < PARTING)
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes a process in, and waits for nobody. `told` is told that it is in; or why not: there are as
/// many as there may be, the NIC ends, or the host lacks something.
pub(crate) fn enter(
    house: &Arc<House>,
    process: UnixStream,
    told: impl FnOnce(io::Result<()>) + Send + 'static,
) {
    let came = Arc::new(Mutex::new(Some((process, told))));
    let take = |from: &Mutex<Option<_>>| from.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (own, host) = (came.clone(), house.clone());
    let thread = thread::Builder::new().name("process".to_owned()).stack_size(STACK);
    let started = thread.spawn(move || {
        if let Some((process, told)) = take(&own) {
            visit(host, process, told);
        }
    });
    // Not closed here, which may take long: the next thread that there is does it.
    if let Err(error) = started
        && let Some((process, told)) = take(&came)
    {
        house.leave_to_others(process);
        told(Err(error));
    }
}

/// A process from its first moment to its last.
fn visit(house: Arc<House>, process: UnixStream, told: impl FnOnce(io::Result<()>)) {
    let left_over = house.left_over();
    match house.admit(&process) {
        Ok(window) => {
            let place = Place { house: house.clone(), window };
            match Session::new(house.clone(), process, Window::new(window)) {
                Ok(mut session) => {
                    house.entered(window, session.bell());
                    told(Ok(()));
                    drop(house);
                    session.run();
                    drop(place);
                    // Its sockets, and what is in them.
                    drop(session);
                }
                Err((process, error)) => {
                    drop(place);
                    turn_away(house, (process, NotIn::Host(error)), told);
                }
            }
        }
        Err(why) => turn_away(house, (process, why), told),
    }
    drop(left_over);
}

/// Parts with a process that does not come in. The house may end meanwhile.
fn turn_away(
    house: Arc<House>,
    (process, why): (UnixStream, NotIn),
    told: impl FnOnce(io::Result<()>),
) {
    let (parting, few) = Parting::begin(house.partings());
    drop(house);
    let is_full = matches!(why, NotIn::Full);
    let part = || {
        if is_full {
            // It is told, whether it has asked already or not.
            socket::last_word(process.as_fd(), Answer::of(Status::NOMEM).bytes());
        }
        drop(process);
    };
    let error = Err(io::Error::other(why));
    if few {
        told(error);
        part();
    } else {
        part();
        told(error);
    }
    drop(parting);
}
