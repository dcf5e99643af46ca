//! Processes that try everything, beside one that works.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use virtual_guest::guest::Guest;
use virtual_guest::process::{self, op, piece, request};
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::ram::{Ram, View};
use virtual_guest::spec::{Put, cmd, err};
use virtual_guest::world::{Area, End};

use crate::owners::sealed;
use crate::scene::{Scene, status};

const BYTES: u64 = 7777;

/// A pair whose traffic has to go on, and where its bytes are.
struct Bystander {
    end: End,
    areas: [Area; 2],
    _peer: End,
}

impl Bystander {
    fn of(scene: &Scene) -> Self {
        let (a, b) = (scene.blue().rc(), scene.red().rc());
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        let areas = [a.node.area(BYTES), b.node.area(BYTES)];
        Self { end: a, areas, _peer: b }
    }

    fn works(&mut self) {
        let Self { end: a, areas: [from, to], .. } = self;
        let seed = u64::from(from.bytes()[0]) + 1;
        let data = virtual_guest::world::pattern(seed, BYTES as usize);
        from.set(&data);
        a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
        assert_eq!(to.bytes(), data);
    }
}

fn memfd(flags: MemfdFlags, len: u64, seals: SealFlags) -> File {
    let fd = memfd_create("hostile", flags | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd.into()
}

#[test]
fn descriptors_of_every_wrong_kind_are_refused() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    let guest = Guest::of_process(scene.blue_socket()).unwrap();
    let process = guest.process();
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let wrong = virtual_guest::attack::no_memory();
    for (n, file) in wrong.iter().enumerate() {
        let at = (0x10_0000, 0x1000, 0);
        assert_eq!(status(process.add_memory(at, file.as_fd())), err::PERM, "{n}");
    }
    // Sealed against writing, it is no memory for a device either.
    let frozen = memfd(MemfdFlags::empty(), 0x1000, both | SealFlags::WRITE);
    let refused = process.add_memory((0x10_0000, 0x1000, 0), frozen.as_fd());
    assert_eq!(status(refused), err::PERM);
    bystander.works();
}

#[test]
fn pieces_of_memory_that_cannot_be() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    let guest = Guest::of_process(scene.blue_socket()).unwrap();
    let process = guest.process();
    let file = sealed(0x4000);
    for at in [
        (0x10_0000, 0x5000, 0),
        (0x10_0000, 0x4000, 0x1000),
        (0x10_0000, 0, 0),
        (0x10_0000, 1, 0),
        (0x10_0000, 0x1000, 1),
        (0x10_0000, u64::MAX, 0),
        (0x10_0000, 0x1000, u64::MAX - 0xfff),
        (1 << 47, 0x1000, 0),
        ((1 << 47) - 0x1000, 0x2000, 0),
        (u64::MAX - 0xfff, 0x1000, 0),
        // Where the guest's own memory is.
        (0x4000_0000, 0x1000, 0),
    ] {
        status(process.add_memory(at, file.as_fd()));
    }
    process.add_memory((0x10_0000, 0x4000, 0), file.as_fd()).unwrap();
    assert_eq!(status(process.remove_memory(0x10_1000, 0x1000)), err::NOENT);
    assert_eq!(status(process.remove_memory(0x10_0000, 0x1000)), err::NOENT);
    process.remove_memory(0x10_0000, 0x4000).unwrap();
    assert_eq!(status(process.remove_memory(0x10_0000, 0x4000)), err::NOENT);
    // As many as there may be, and the next.
    let mut last = err::OK;
    for n in 0..200u64 {
        let at = (0x10_0000 + n * 0x1000, 0x1000, 0);
        last = process.ask(op::MEMORY_ADD, &piece(at), &[file.as_fd()]).unwrap().0;
        if last != err::OK {
            break;
        }
    }
    assert_eq!(last, err::NOMEM);
    bystander.works();
}

#[test]
fn memory_under_live_objects_takes_only_its_own_process_along() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    let node = scene.blue();
    let ram = node.guest.ram().regions()[0].clone();
    // Doorbell pages lie there: it cannot go while the context is there.
    let process = node.guest.process();
    assert_eq!(status(process.remove_memory(ram.gpa(), ram.size())), err::BUSY);
    // It cannot be cut, and holes in it are full of zeroes.
    assert!(ftruncate(ram.fd(), 0x1000).is_err());
    let (mut a, b) = (node.rc(), node.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let (from, to) = (node.area_of(&[1; 64]), node.area(64));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
    let _ = rustix::fs::fallocate(ram.fd(), punch, 0, ram.size());
    bystander.works();
    drop((a, b, node));
    bystander.works();
    // Memory of its own under a region and a ring.
    let node = scene.blue();
    let process = node.guest.process();
    process.add_memory((0x100_0000, 0x10000, 0), sealed(0x10000).as_fd()).unwrap();
    let list = Put::new().u64(0x100_0000).u32(16).u32(0).u8(12).zero(7).done(24);
    let head = Put::new().u32(node.pdn).u32(1).u64(0x1000).u64(0x10000).done(24);
    node.ctx.command(cmd::MR_REG, &[head, list].concat(), 8).unwrap();
    process.remove_memory(0x100_0000, 0x10000).unwrap();
    bystander.works();
    node.mr(4096);
}

#[test]
fn messages_of_every_length_are_answered_or_end_the_session() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    for (greeted, ops) in [(false, [0..10u32, 15..20]), (true, [0..10, 15..20])] {
        for number in ops.into_iter().flatten() {
            for len in
                [0usize, 1, 7, 8, 12, 16, 23, 24, 31, 32, 33, 40, 64, 320, 511, 512, 513, 4000]
            {
                let socket = process::knock(scene.blue_socket()).unwrap();
                let (_process, socket) = if greeted {
                    let (process, _) = process::Process::hello(socket).unwrap();
                    let socket = process.socket().try_clone_to_owned().unwrap();
                    (Some(process), socket)
                } else {
                    (None, socket)
                };
                let message = request(number, &vec![0xa5; 4000]);
                let files: &[BorrowedFd<'_>] = if len % 3 == 0 { &[socket.as_fd()] } else { &[] };
                if len > 0 {
                    process::send(&socket, &message[..len], files).unwrap();
                    // An answer, or the end.
                    let answer = process::ask_none(&socket);
                    assert!(
                        answer.is_ok() || !(8..=512).contains(&len) || !files.is_empty(),
                        "{number} {len}"
                    );
                    // One channel more is nothing to be refused.
                    let channel = greeted && number == op::CHANNEL_ADD && len == 8;
                    if let Some((status, ..)) = answer.ok().filter(|_| !channel) {
                        assert_ne!(status, err::OK, "{number} {len}");
                    }
                }
            }
        }
    }
    bystander.works();
    drop(bystander);
    scene.awaits_nothing("blue");
}

#[test]
fn commands_of_noise_hurt_nobody() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    let node = scene.blue();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..3000 {
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let opcode = (next() % 0x48) as u16;
        let len = next() as usize % 200;
        let header = Put::new().u16(opcode).zero(2).u32(next() as u32 % 4).u64(0).done(16);
        let body: Vec<u8> =
            (0..len).map(|_| if next() % 3 == 0 { next() as u8 } else { 0 }).collect();
        node.guest.process().command((1, 0), &[header, body].concat()).unwrap();
    }
    bystander.works();
}

#[test]
fn many_connections_that_say_nothing_keep_nobody_out_for_ever() {
    let scene = Scene::with(&["--max-contexts", "20"]);
    let mut bystander = Bystander::of(&scene);
    let mute: Vec<_> = (0..60).filter_map(|_| process::knock(scene.blue_socket()).ok()).collect();
    bystander.works();
    drop(mute);
    let begin = Instant::now();
    while Guest::of_process(scene.blue_socket()).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(60), "nobody gets in");
    }
    bystander.works();
}

/// A socket that a child has as well does not end with the parent's descriptor; the session is one
/// process's, and ends when the last has let go, or when either shuts it down.
#[test]
fn a_socket_that_two_have_is_one_session() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    let guest = Guest::of_process(scene.blue_socket()).unwrap();
    let ctx = guest.open().unwrap();
    let inherited = guest.process().socket().try_clone_to_owned().unwrap();
    drop(ctx);
    drop(guest);
    // Whoever has it goes on.
    let header = Put::new().u16(cmd::PD_CREATE).zero(2).u32(0).u64(0).done(16);
    let given = Put::new().u64(0).u32(0).u32(0).done(16);
    let create = request(op::COMMAND, &[given, header].concat());
    assert_eq!(process::ask(&inherited, &create, &[]).unwrap().0, err::OK);
    rustix::net::shutdown(&inherited, rustix::net::Shutdown::Both).unwrap();
    assert!(process::ask(&inherited, &create, &[]).is_err());
    bystander.works();
    drop(bystander);
    scene.awaits_nothing("blue");
}

#[test]
fn commands_at_once_with_the_end() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    for n in 0..100 {
        let node = scene.blue();
        let _ends = (node.rc(), node.rc());
        let socket = node.guest.process().socket().try_clone_to_owned().unwrap();
        let header = Put::new().u16(cmd::PD_CREATE).zero(2).u32(0).u64(0).done(16);
        let given = Put::new().u64(0).u32(0).u32(0).done(16);
        let create = request(op::COMMAND, &[given, header].concat());
        for _ in 0..n % 10 {
            let _ = process::send(&socket, &create, &[]);
        }
        node.guest.disconnect();
        bystander.works();
    }
    drop(bystander);
    scene.awaits_nothing("blue");
}

/// Whoever makes the daemon keep things pays for them, and is refused at the limit.
#[test]
fn what_is_kept_has_a_limit() {
    let scene = Scene::with(&["--max-kept-bytes", "4M", "--max-pds", "1000000"]);
    let mut bystander = Bystander::of(&scene);
    let node = scene.blue();
    let refused = (0..100_000).map(|_| node.ctx.create_pd()).find_map(Result::err);
    assert_eq!(status::<()>(Err(refused.expect("a limit"))), err::NOMEM);
    assert_eq!(status(node.guest.process().channel()), err::NOMEM);
    drop(node);
    bystander.works();
}

#[test]
fn the_status_page_cannot_be_written() {
    let scene = Scene::new();
    let mut bystander = Bystander::of(&scene);
    let socket = process::knock(scene.blue_socket()).unwrap();
    let hello = Put::new().u32(1).u32(0).done(8);
    let (_, _, files) = process::ask(&socket, &request(op::HELLO, &hello), &[]).unwrap();
    let status = &files[0];
    assert!(rustix::io::pwrite(status, &[0; 128], 0).is_err());
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(status, punch, 0, 4096).is_err());
    assert!(ftruncate(status, 0).is_err() && ftruncate(status, 8192).is_err());
    assert!(fcntl_add_seals(status, SealFlags::WRITE).is_err());
    // To be read it can be mapped, and to be written it cannot.
    let ram = Ram::sealed(0x1000, 0x1000).unwrap();
    assert!(ram.add_file(0x10_0000, 4096, status.try_clone().unwrap()).is_err());
    assert!(View::of_file(status.try_clone().unwrap(), 4096).is_ok());
    bystander.works();
}
