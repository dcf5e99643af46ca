//! Commands: of noise, and without end.

use std::time::{Duration, Instant};

use virtual_guest::process::op;
use virtual_guest::spec::{cmd, event};
use virtual_guest::world::{Door, Node};

use crate::DOOR;
use crate::scene::{Noise, SOON, case};

const TIME: Duration = Duration::from_secs(2);

/// Whatever a request says, it is answered.
#[track_caller]
fn answered(node: &Node, opcode: u16, request: &[u8]) {
    if DOOR == Door::Process {
        // Named like an object, without a channel.
        let answer =
            node.guest.process().ask(op::COMMAND, &[&[7; 8], &[0; 8], request].concat(), &[]);
        assert!(answer.is_ok(), "opcode {opcode:#x}: {answer:?}");
        return;
    }
    let answer = node.guest.raw_control(&[request], &[256], SOON);
    let (len, _) = answer.expect("the control queue").expect("an answer");
    assert!(len >= 8, "opcode {opcode:#x}: {len} bytes");
}

#[test]
fn requests_of_every_opcode_with_noise_are_answered() {
    case(|scene| {
        let node = scene.villain();
        let mut noise = Noise(0x0dd_ba11);
        scene.during(|| {
            for n in 0..3000u32 {
                let mut request: Vec<u8> =
                    (0..16).flat_map(|_| noise.next().to_le_bytes()).collect();
                let opcode = (n % 0x50) as u16;
                if opcode == cmd::SHUTDOWN || opcode == cmd::INIT {
                    continue;
                }
                request[..2].copy_from_slice(&opcode.to_le_bytes());
                // Its own context, or any.
                let ctx = if n % 3 == 0 { noise.next() as u32 } else { node.ctx.id() };
                request[4..8].copy_from_slice(&ctx.to_le_bytes());
                // Small numbers reach further.
                for byte in request[16..].iter_mut().skip((n % 7) as usize) {
                    if !noise.next().is_multiple_of(3) {
                        *byte = (noise.next() % 4) as u8;
                    }
                }
                let len = 16 + (noise.next() % 112) as usize;
                answered(&node, opcode, &request[..len]);
            }
        });
        while let Ok(Some(event)) = node.guest.async_event(Duration::ZERO) {
            assert_ne!(event.kind, event::DEVICE_FATAL);
        }
    });
}

#[test]
fn commands_without_end() {
    case(|scene| {
        let node = scene.villain();
        let deadline = Instant::now() + TIME;
        let mut sent = 0;
        scene.during(|| {
            while Instant::now() < deadline || sent < 100 {
                node.guest.works();
                let pdn = node.ctx.create_pd().expect("PD_CREATE");
                node.ctx.destroy_pd(pdn).expect("PD_DESTROY");
                sent += 3;
            }
        });
    });
}
