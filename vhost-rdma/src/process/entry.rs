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

/// Takes a process in.
///
/// # Errors
/// There are as many as there may be, the NIC ends, or the host lacks something.
pub(crate) fn enter(house: &Arc<House>, process: UnixStream) -> io::Result<()> {
    let window = house.admit(&process)?;
    serve(house.clone(), process, window).inspect_err(|_| house.leave(window))
}

fn serve(house: Arc<House>, process: UnixStream, window: u64) -> io::Result<()> {
    let session = Session::new(house.clone(), process, Window::new(window))?;
    let thread = thread::Builder::new().name(format!("process-{window}")).stack_size(STACK);
    thread.spawn(move || {
        session.run();
        house.leave(window);
    })?;
    Ok(())
}
