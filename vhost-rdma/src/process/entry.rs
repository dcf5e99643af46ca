//! How a process comes in: a place in the house, a session, and a thread that serves it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use super::house::House;
use super::memory::Window;
use super::session::Session;

/// Stack of a session's thread.
const STACK: usize = 256 << 10;

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

/// Takes a process in.
///
/// # Errors
/// There are as many as there may be, the NIC ends, or the host lacks something.
pub(crate) fn enter(house: &Arc<House>, process: UnixStream) -> io::Result<()> {
    let window = house.admit(&process)?;
    let place = Place { house: house.clone(), window };
    let session = Session::new(house.clone(), process, Window::new(window))?;
    let thread = thread::Builder::new().name(format!("process-{window}")).stack_size(STACK);
    thread.spawn(move || {
        session.run();
        drop(place);
    })?;
    house.entered(window);
    Ok(())
}
