//! Connections that come and go.

use std::io::Write;
use std::os::unix::net::UnixStream;

use super::{Attack, Ground, Strike, with_ram};
use crate::guest::Guest;
use crate::world::Node;

pub(super) const ALL: &[Attack] = &[
    Attack::new("connections", "connections that say nothing, or half a word", connections)
        .by_monitors(),
    Attack::new("drivers", "a driver that loads, makes a queue pair and is killed", drivers)
        .by_monitors(),
];

fn connections(ground: &Ground<'_>) -> Box<dyn Strike> {
    let socket = ground.places[0].socket.clone();
    Box::new(move || {
        for n in 0..20 {
            let Ok(mut stream) = UnixStream::connect(&socket) else { continue };
            if n % 2 == 0 {
                let _refused = stream.write_all(&[1, 0, 0, 0, 1]);
            }
        }
    })
}

fn drivers(ground: &Ground<'_>) -> Box<dyn Strike> {
    let place = ground.places[0].clone();
    Box::new(move || {
        // The one before may not be gone yet.
        let Ok(guest) = Guest::connect(&place.socket, with_ram(8)) else { return };
        let (name, socket) = (place.name.clone(), place.socket.clone());
        let node = Node::start(name, socket, guest, place.gid);
        let end = node.rc();
        let _state = end.qp.connect(end.address(), &super::Path::default());
        node.guest.disconnect();
    })
}
