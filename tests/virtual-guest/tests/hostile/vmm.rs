//! A VMM that is hostile, slow, silent or dead.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost::VhostBackend;
use virtual_guest::attack::Crowded;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::ram::fd_of;
use virtual_guest::spec;
use virtual_guest::world::{Node, Vacancy};
use vmm_sys_util::eventfd::EventFd;

use crate::scene::{BLOCKED, Noise, SOON, Scene, case};

/// Tells a copy of this program to be a VMM on that socket.
const CHILD: &str = "HOSTILE_VMM_SOCKET";
const CHILD_GID: &str = "HOSTILE_VMM_GID";

/// Clears `O_NONBLOCK` of an open file, which the daemon shares.
fn block(fd: BorrowedFd<'_>) {
    let flags = rustix::fs::fcntl_getfl(fd).expect("flags");
    rustix::fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK).expect("flags");
}

/// The eventfds that tell of used buffers are full and block: made so after the daemon looked at
/// them, and again and again.
#[test]
fn notification_descriptors_that_block_hold_nobody_up() {
    case(|scene| {
        let node = scene.villain();
        let mut end = node.rc();
        end.qp.connect(end.address(), &Path::default()).expect("to itself");
        let word = node.area(8);
        let calls: Vec<EventFd> =
            (0..node.guest.queue_count()).map(|_| EventFd::new(0).expect("it")).collect();
        for (queue, call) in calls.iter().enumerate() {
            node.guest.front(|f| f.set_vring_call(queue, call)).expect("SET_VRING_CALL");
            rustix::io::write(fd_of(call), &(u64::MAX - 1).to_ne_bytes()).expect("room");
            block(fd_of(call));
        }
        scene.during(|| {
            for n in 0..100 {
                end.scq.arm(spec::ARM_ANY);
                end.run_ok(&SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
                calls.iter().for_each(|call| block(fd_of(call)));
            }
            // Another kind of event, and a command whose answer nobody is told of.
            let (_, _, doorbell) = end.qp.raw_sq(0);
            doorbell.ring(9999);
            let kick = node.guest.kick_fd(spec::VQ_CONTROL).expect("it");
            node.guest.with_queue(spec::VQ_CONTROL, |q| {
                let free = q.next_free().expect("a descriptor");
                q.publish(free);
            });
            kick.write(1).expect("a kick");
        });
        scene.others_go_on();
        node.guest.disconnect();
        // The session ends though nobody ever reads those.
        scene.await_state("absent");
        drop(calls);
    });
}

/// A queue that is stopped and started without end: what the daemon had for it goes with it. A
/// place in a list that is left each time would be half a MiB.
#[test]
fn queues_that_are_set_up_without_end_leave_nothing() {
    const TIMES: usize = 8000;
    const NOISE: u64 = 256 << 10;
    case(|scene| {
        let node = scene.villain();
        let index = node.guest.first_kick_queue();
        let again = |times: usize| {
            for _ in 0..times {
                let base = node.guest.stop_ring(index).expect("GET_VRING_BASE");
                node.guest.start_ring(index, base).expect("it starts");
            }
            scene.world.daemon.vitals().memory
        };
        let mut before = again(TIMES / 8);
        // What is kept for each time grows in every round; what an allocator takes for later, once.
        let mut round = || {
            let after = scene.during(|| again(TIMES));
            after.saturating_sub(std::mem::replace(&mut before, after))
        };
        let settles = (0..3).any(|_| round() <= NOISE);
        assert!(settles, "{NOISE} bytes more, and more, in each of three rounds");
    });
}

/// Kicks that somebody else takes away before the daemon does.
#[test]
fn kick_descriptors_that_are_emptied_hold_nobody_up() {
    case(|scene| {
        let node = scene.villain();
        let mut end = node.rc();
        end.qp.connect(end.address(), &Path::default()).expect("to itself");
        let word = node.area(8);
        let kicks: Vec<EventFd> =
            (0..node.guest.queue_count()).map(|q| node.guest.kick_fd(q).expect("it")).collect();
        kicks.iter().for_each(|kick| block(fd_of(kick)));
        scene.during(|| {
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_secs(2) {
                for kick in &kicks {
                    kick.write(1).expect("room");
                    // Emptied at once; where the daemon was faster this would wait, so it is made
                    // to fail instead.
                    rustix::fs::fcntl_setfl(fd_of(kick), OFlags::RDWR | OFlags::NONBLOCK)
                        .expect("it");
                    let _taken = kick.read();
                    block(fd_of(kick));
                }
            }
        });
        end.scq.arm(spec::ARM_ANY);
        end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
        scene.others_go_on();
    });
}

/// Kick descriptors that make whoever watches them wait: other NICs of the network wait for one
/// change, and the NIC is served by them all the same.
#[test]
fn kick_descriptors_that_are_slow_to_watch_have_a_watch_of_their_own() {
    case(|scene| {
        let node = scene.villain();
        let other = scene.world.node();
        let daemon = &scene.world.daemon;
        let serves = ["net", "net+rnic"].into_iter().find_map(|network| daemon.pid_of(network));
        let pid = serves.or_else(|| daemon.supervisor()).expect("the process that serves it");
        let watches = || {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
            let names = tasks.flatten().map(|t| std::fs::read_to_string(t.path().join("comm")));
            names.flatten().filter(|name| name.trim_end() == "watch").count()
        };
        // A thread that a watch starts has its name for a moment.
        let settled = || {
            let look = |_| {
                std::thread::sleep(Duration::from_millis(5));
                watches()
            };
            (0..20).map(look).min()
        };
        let comes_to = |count: Option<usize>, what: &str| {
            let deadline = Instant::now() + SOON * virtual_guest::daemon::patience();
            while settled() != count {
                assert!(Instant::now() < deadline, "{what}: {}, not {count:?}", watches());
            }
        };
        let before = settled();
        let crowd = Crowded::new([200, 500]);
        let set = || node.guest.front(|f| f.set_vring_kick(spec::VQ_CONTROL, &crowd.file));
        scene.during_within(BLOCKED, || {
            crowd.signalled(|| {
                let deadline = Instant::now() + SOON * virtual_guest::daemon::patience();
                while !daemon.log().contains("slow to wait for") {
                    assert!(Instant::now() < deadline, "others wait each time");
                    set().expect("SET_VRING_KICK");
                }
                set().expect("SET_VRING_KICK");
                comes_to(before.map(|count| count + 1), "it has its own");
                for _ in 0..20 {
                    set().expect("SET_VRING_KICK");
                    other.guest.query_device().expect("another guest's command");
                    node.guest.query_device().expect("its own command");
                }
            });
        });
        other.guest.disconnect();
        node.guest.disconnect();
        scene.await_state("absent");
        comes_to(before, "its own watch ends with it");
    });
}

/// A message with its header: request, flags, size; then the payload.
pub(crate) fn message(request: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [request, flags, size] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(payload);
    bytes
}

/// The villain's socket, connected.
#[track_caller]
pub(crate) fn stream(scene: &Scene) -> UnixStream {
    UnixStream::connect(&scene.place.socket).expect("the NIC's socket")
}

/// Sends bytes with as many copies of a descriptor.
pub(crate) fn send_with(stream: &UnixStream, bytes: &[u8], fd: BorrowedFd<'_>, count: usize) {
    let fds = vec![fd; count];
    let mut space = vec![MaybeUninit::uninit(); 2048];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "room for {count}");
    let io = [IoSlice::new(bytes)];
    // The other side may have hung up already.
    let _sent = rustix::net::sendmsg(stream, &io, &mut control, SendFlags::NOSIGNAL);
}

#[test]
fn messages_that_make_no_sense_end_their_connection_at_most() {
    const VERSION: u32 = 1;
    const NEED_REPLY: u32 = 8;
    let requests = 0..48;
    case(|scene| {
        let null = File::open("/dev/null").expect("it");
        let mut noise = Noise(0x0b5e55ed);
        for request in requests.clone() {
            for size in [0, 1, 8, 12, 256, 4096, 0x7fff_ffff, u32::MAX] {
                let payload: Vec<u8> = (0..size.min(600)).map(|_| noise.next() as u8 % 4).collect();
                let mut stream = stream(scene);
                let bytes = message(request, VERSION | NEED_REPLY, size, &payload);
                match noise.next() % 3 {
                    0 => send_with(&stream, &bytes, null.as_fd(), 1 + noise.next() as usize % 40),
                    _ => drop(stream.write_all(&bytes)),
                }
            }
        }
        scene.others_go_on();
        for flags in [0, 2, 3, 0xffff_ffff] {
            drop(stream(scene).write_all(&message(1, flags, 0, &[])));
        }
        // After the handshake too, where messages reach further.
        for request in requests.clone() {
            let node = scene.villain();
            let payload: Vec<u8> = (0..40).map(|_| noise.next() as u8 % 3).collect();
            let junk = message(request, VERSION, payload.len() as u32, &payload);
            let queue = noise.next() as usize % 300;
            let _refused = node.guest.front(|f| {
                let _ = f.set_vring_num(queue, noise.next() as u16);
                let _ = f.set_vring_base(queue, noise.next() as u16);
                f.get_vring_base(queue)
            });
            drop(junk);
            node.guest.disconnect();
        }
    });
}

/// The first half of a message, and then nothing: that NIC waits, and can still be removed.
#[test]
fn half_a_message_holds_up_its_own_nic_only() {
    case(|scene| {
        let mut stream = stream(scene);
        stream.write_all(&[1, 0, 0, 0, 1]).expect("five bytes");
        scene.during(|| std::thread::sleep(Duration::from_millis(500)));
        let begin = Instant::now();
        let extra = scene.world.vacancy();
        let mut silent = UnixStream::connect(&extra.socket).expect("the NIC's socket");
        silent.write_all(&message(1, 1, 0, &[])[..7]).expect("seven bytes");
        scene.world.daemon.run(&["nic", "rm", &extra.name]);
        assert!(begin.elapsed() < SOON, "a silent VMM keeps its NIC");
        drop(stream);
    });
}

/// Questions without end from somebody who never listens.
#[test]
fn questions_whose_answers_nobody_reads() {
    case(|scene| {
        let mut stream = stream(scene);
        stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a timeout");
        let question = message(1, 1, 0, &[]);
        let many: Vec<u8> = question.iter().copied().cycle().take(12 * 10_000).collect();
        scene.during(|| {
            for _ in 0..50 {
                if stream.write_all(&many).is_err() {
                    break;
                }
            }
        });
        scene.others_go_on();
    });
}

/// What the child does: a driver with traffic, until it is killed. A second process that dies so is
/// the subject: a thread would leave its sockets and memory with the test's process.
#[test]
#[ignore = "run by the test below, as a process of its own"]
fn be_a_vmm() {
    let socket = std::env::var_os(CHILD).expect("the socket");
    let gid: u128 = std::env::var(CHILD_GID).expect("the address").parse().expect("a number");
    let guest = Guest::connect(socket.as_ref(), GuestConfig::default()).expect("a connection");
    let node = Node::start("child".into(), socket.into(), guest, gid.to_be_bytes());
    let mut end = node.rc();
    end.qp.connect(end.address(), &Path::default()).expect("to itself");
    let area = node.area(256 << 10);
    let write = SendWr::write(1, &[area.sge()], area.addr(0), area.rkey());
    println!("in traffic");
    std::io::stdout().flush().expect("standard output");
    loop {
        for _ in 0..32 {
            end.qp.queue_send(&write);
        }
        end.qp.ring_sq();
        (0..32).for_each(|_| assert_eq!(end.scq.ok().status, 0));
    }
}

#[test]
fn a_vmm_that_is_killed_in_traffic_leaves_nothing() {
    case(|scene| {
        let Vacancy { socket, gid, .. } = &scene.place;
        for _ in 0..5 {
            let mut child = Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", "vmm::be_a_vmm", "--ignored", "--nocapture"])
                .env(CHILD, socket)
                .env(CHILD_GID, u128::from_be_bytes(*gid).to_string())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a child");
            let mut out = child.stdout.take().expect("its output");
            let mut said = Vec::new();
            let mut byte = [0];
            while !said.ends_with(b"in traffic\n") {
                let read = out.read(&mut byte).expect("its output");
                assert!(read == 1, "the child ended: {}", String::from_utf8_lossy(&said));
                said.push(byte[0]);
            }
            scene.await_state("driver_ready");
            scene.during(|| {
                std::thread::sleep(Duration::from_millis(50));
                child.kill().expect("SIGKILL");
                child.wait().expect("its end");
            });
            scene.await_state("absent");
        }
    });
}
