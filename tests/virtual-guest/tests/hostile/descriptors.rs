//! Descriptors that a VMM sends, sockets that look like its own, and memory that it takes away:
//! what each message leaves in the daemon.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtual_guest::guest::{Guest, GuestConfig};
use vmm_sys_util::eventfd::EventFd;

use crate::scene::{SOON, Scene, case};
use crate::vmm::{message, send_with, stream};

const VERSION: u32 = 1;
const SET_VRING_ERR: u32 = 14;
/// VIRTIO_F_VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES.
const FEATURES: u64 = 1 << 32 | 1 << 30;

/// A question's 64-bit answer.
fn ask(stream: &mut UnixStream, request: u32) -> u64 {
    stream.write_all(&message(request, VERSION, 0, &[])).expect("a question");
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).expect("an answer");
    u64::from_le_bytes(answer[12..].try_into().expect("eight bytes"))
}

fn tell(stream: &mut UnixStream, request: u32, value: u64) {
    stream.write_all(&message(request, VERSION, 8, &value.to_le_bytes())).expect("a message");
}

/// The villain's connection, through with the handshake.
fn shaken(scene: &Scene) -> UnixStream {
    let mut stream = stream(scene);
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    stream.write_all(&message(3, VERSION, 0, &[])).expect("SET_OWNER");
    let _features = ask(&mut stream, 1);
    tell(&mut stream, 2, FEATURES);
    let offered = ask(&mut stream, 15);
    tell(&mut stream, 16, offered);
    stream
}

/// Every request that may carry descriptors, and every one that may not: none stays in the daemon
/// but eventfds that it signals.
#[test]
fn a_descriptor_that_is_no_eventfd_is_closed_whatever_it_comes_with() {
    case(|scene| {
        for request in 1..48 {
            for count in [1, 2, 40] {
                let mut stream = shaken(scene);
                let (mut ours, theirs) = UnixStream::pair().expect("two sockets");
                ours.set_read_timeout(Some(SOON)).expect("a timeout");
                let bytes = message(request, VERSION, 8, &0u64.to_le_bytes());
                send_with(&stream, &bytes, theirs.as_fd(), count);
                drop(theirs);
                // The other end is told once nobody has it any more.
                let heard = ours.read(&mut [0]);
                assert!(
                    matches!(heard, Ok(0)),
                    "request {request} keeps {count} descriptors: {heard:?}"
                );
                // The daemon never signals an error: it says that it has understood, and keeps
                // nothing.
                if (request, count) == (SET_VRING_ERR, 1) {
                    assert_eq!(ask(&mut stream, 1) & FEATURES, FEATURES);
                }
            }
        }
        scene.others_go_on();
    });
}

/// What was not offered is not unlocked by saying that it was.
#[test]
fn features_that_were_not_offered_end_the_connection() {
    case(|scene| {
        let mut stream = shaken(scene);
        tell(&mut stream, 16, u64::MAX);
        let heard = stream.read(&mut [0]);
        assert!(matches!(heard, Ok(0) | Err(_)), "{heard:?}");
        assert_ne!(
            heard.err().map(|error| error.kind()),
            Some(std::io::ErrorKind::WouldBlock),
            "it goes on"
        );
    });
}

/// A socket with the path of the victim's, in the hands of somebody else: made while the real one
/// is elsewhere for a moment, as in a mount namespace of one's own.
#[test]
fn a_socket_of_the_victims_path_keeps_the_victim_from_nothing() {
    case(|scene| {
        let victim = scene.world.vacancy();
        let (path, hidden) = (&victim.socket, victim.socket.with_extension("hidden"));
        std::fs::rename(path, &hidden).expect("away");
        let forged = UnixListener::bind(path).expect("a socket in its place");
        let near = UnixStream::connect(path).expect("the forged one");
        let (far, _) = forged.accept().expect("a connection");
        std::fs::remove_file(path).expect("away with it");
        std::fs::rename(&hidden, path).expect("back");
        // Wherever the daemon may keep it.
        let villain = shaken(scene);
        for request in [12, 13, SET_VRING_ERR] {
            let bytes = message(request, VERSION, 8, &1u64.to_le_bytes());
            send_with(&villain, &bytes, far.as_fd(), 1);
        }
        drop(far);
        let begin = Instant::now();
        for _ in 0..5 {
            let guest = Guest::connect(path, GuestConfig::default()).expect("the victim");
            guest.disconnect();
        }
        assert!(begin.elapsed() < SOON, "the victim is shut out");
        drop((near, villain));
        scene.world.daemon.run(&["nic", "rm", &victim.name]);
    });
}

/// Each descriptor of a queue takes the place of the one before.
#[test]
fn a_session_holds_no_more_descriptors_than_its_queues_have_places() {
    case(|scene| {
        let node = scene.villain();
        let queues = node.guest.queue_count();
        let before = scene.world.daemon.vitals().files;
        for n in 0..1000 {
            let queue = n % queues;
            let fd = EventFd::new(0).expect("an eventfd");
            node.guest.front(|f| f.set_vring_call(queue, &fd)).expect("SET_VRING_CALL");
            node.guest.front(|f| f.set_vring_err(queue, &fd)).expect("SET_VRING_ERR");
        }
        // Kicks of queues that work would go astray: those of a queue that has no work.
        for _ in 0..200 {
            let fd = EventFd::new(0).expect("an eventfd");
            node.guest.front(|f| f.set_vring_kick(queues - 1, &fd)).expect("SET_VRING_KICK");
        }
        let after = scene.world.daemon.vitals().files;
        assert!(after <= before + 4, "{before} descriptors, then {after}");
        scene.others_go_on();
    });
}

/// No descriptor is left for a new connection: it is refused at once and the log says why; who is
/// connected goes on.
#[test]
fn a_daemon_without_descriptors_refuses_and_says_so() {
    case(|scene| {
        let daemon = &scene.world.daemon;
        let pid = Pid::from_raw(daemon.pid().cast_signed());
        let (now, most) = open_files(daemon.pid());
        assert_eq!(now, most, "the daemon raises its limit when it starts");
        let highest = highest_file(daemon.pid()) + 1;
        let limit = |soft| Rlimit { current: Some(soft), maximum: Some(most) };
        prlimit(pid, Resource::Nofile, limit(highest)).expect("a limit");
        // The numbers that are free below it.
        let mut held = Vec::new();
        let deadline = Instant::now() + SOON;
        while (files(daemon.pid()).count() as u64) < highest {
            assert!(Instant::now() < deadline, "there are always some free");
            held.push(UnixStream::connect(daemon.admin_socket()).expect("the admin socket"));
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut stream = stream(scene);
        stream.set_read_timeout(Some(SOON)).expect("a timeout");
        let heard = stream.read(&mut [0]);
        scene.others_go_on();
        prlimit(pid, Resource::Nofile, limit(now)).expect("the limit is back");
        drop(held);
        assert!(matches!(heard, Ok(0)), "the VMM waits for ever: {heard:?}");
        let log = daemon.log();
        assert!(log.contains("a VMM is turned away"), "{log}");
    });
}

/// The soft and the hard limit of open files.
fn open_files(pid: u32) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("limits");
    let line = text.lines().find(|line| line.starts_with("Max open files")).expect("open files");
    let mut words = line.split_whitespace().skip(3).map(|word| word.parse().expect("a number"));
    (words.next().expect("soft"), words.next().expect("hard"))
}

fn highest_file(pid: u32) -> u64 {
    files(pid).max().expect("at least one")
}

/// The descriptors of a process.
fn files(pid: u32) -> impl Iterator<Item = u64> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    files.flatten().filter_map(|file| file.file_name().to_str()?.parse().ok())
}

/// All memory that there was is gone, and comes back: nothing of the NIC has.
#[test]
fn the_last_region_is_unplugged_and_the_connection_goes_on() {
    case(|scene| {
        let mut front = Frontend::from_stream(stream(scene), 8);
        front.set_owner().expect("SET_OWNER");
        let offered = front.get_features().expect("GET_FEATURES");
        let protocol = front.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
        front
            .set_features(offered & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
            .expect("SET_FEATURES");
        front.set_protocol_features(protocol).expect("SET_PROTOCOL_FEATURES");
        assert!(protocol.contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS));
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
        ftruncate(&file, 1 << 20).expect("a mebibyte");
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: 1 << 20,
            userspace_addr: 0x7000_0000,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        for _ in 0..10 {
            front.add_mem_region(&region).expect("ADD_MEM_REG");
            front.remove_mem_region(&region).expect("REM_MEM_REG");
            let shown = scene.world.daemon.show_nic(&scene.place.name);
            assert_eq!(shown["session"], "connected", "{shown}");
            assert!(shown["error"].is_null(), "{shown}");
        }
    });
}
