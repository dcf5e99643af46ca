//! A VM that comes and goes: connections that end in every way, memory that is plugged and
//! unplugged, drivers that begin anew.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Dice, Shared};
use crate::guest::{Guest, GuestConfig};
use crate::pages::Buf;
use crate::qp::{Path, SendWr};
use crate::spec::{access, status};
use crate::world::{Node, Vacancy};

/// Where memory is plugged, and how much.
const PLUGGED: (u64, u64) = (0x1_0000_0000, 2 << 20);

/// One life after the other.
pub(super) fn run(place: &Vacancy, shared: &Shared, mut dice: Dice) {
    while shared.goes_on() {
        shared.round(|| life(place, &mut dice));
        shared.lives.fetch_add(1, Ordering::Relaxed);
    }
}

fn life(place: &Vacancy, dice: &mut Dice) {
    let config = GuestConfig {
        ram_bytes: 8 << 20,
        timeout: super::PATIENCE,
        memory_table: dice.coin(),
        event_buffers: if dice.coin() { 48 } else { 0 },
        ..GuestConfig::default()
    };
    // The last connection may not be over yet for the daemon; this one waits until it is.
    let guest = Guest::connect(&place.socket, config).expect("a connection");
    let mut node = Node::start(place.name.clone(), place.socket.clone(), guest, place.gid);
    for _ in 0..1 + dice.roll(3) {
        live(&node, dice);
        node = match dice.roll(4) {
            0 => {
                node.guest.shutdown().expect("SHUTDOWN");
                begin(&node)
            }
            1 => {
                node.guest.reset().expect("a reset");
                begin(&node)
            }
            2 => {
                node.guest.pause_and_continue().expect("a pause");
                node
            }
            _ => node,
        };
    }
    node.guest.disconnect();
}

fn begin(node: &Node) -> Node {
    Node::start(node.name.clone(), node.socket.clone(), node.guest.clone(), node.gid)
}

fn live(node: &Node, dice: &mut Dice) {
    let mut end = node.rc();
    end.qp.connect(end.address(), &Path::default()).expect("to itself");
    let word = node.area(8);
    end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[7; 8]));
    if dice.coin() {
        node.guest.add_memory(PLUGGED.0, PLUGGED.1).expect("ADD_MEM_REG");
        let buf = Arc::new(Buf::contiguous_in(node.guest.ram(), PLUGGED.0, 64 << 10));
        let mr = node.ctx.register(node.pdn, buf, access::ALL).expect("MR_REG");
        let into = SendWr::write(2, &[word.sge()], mr.addr(8), mr.rkey);
        end.run_ok(&into);
        node.guest.remove_memory(PLUGGED.0).expect("REM_MEM_REG");
        assert_eq!(end.run(&into).status, status::REM_ACCESS_ERR, "a region whose memory is gone");
        node.ctx.dereg(mr.lkey).expect("MR_DEREG");
    }
}
