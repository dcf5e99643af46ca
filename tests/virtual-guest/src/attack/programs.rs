//! What a program does with its own memory, its descriptors and its processes: it hangs where it
//! should copy, unmaps what is registered, hands over what is no memory, becomes another program,
//! and multiplies.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Attack, Ground, Strike, alone, breathe, rc, with_ram};
use crate::bomb::Bomb;
use crate::control::Mr;
use crate::own::{Fleeting, Hanging};
use crate::pages::PageList;
use crate::process::{Job, Mirrors, job, op, piece, request};
use crate::qp::{Path, SendWr};
use crate::spec::{PAGE, access, err};
use crate::world::{Door, End, Ends, Node, Vacancy};

pub(super) const ALL: &[Attack] = &[
    Attack::new("hangs", "peers that reach memory at which its owner hangs (userfaultfd)", hangs)
        .by(2)
        .by_processes(),
    Attack::new("unmaps", "memory that its owner unmaps under its peers' requests", unmaps)
        .by(2)
        .by_processes(),
    Attack::new("wrong_files", "descriptors of the wrong kind for memory", wrong_files)
        .by_processes(),
    Attack::new("execs", "programs that become another in the middle of a transfer", execs)
        .by_processes(),
    Attack::new("bomb", "a fork bomb of 256 processes at the door", bomb).within(32).by_processes(),
];

/// Where memory is shared.
const SHARED: u64 = 0x2_0000_0000;
/// Bytes that a peer knows of a mirrored region; the other half is the owner's way back.
const HALF: u64 = 64 << 10;
/// How long a strike waits for what the device may never do.
const PATIENCE: Duration = Duration::from_secs(20);

/// A mirrored region of one villain, and queue pairs of another that reach it.
struct Mirrored {
    owner: Node,
    channel: Mirrors,
    pairs: Vec<(End, End)>,
    from: Mr,
}

impl Mirrored {
    fn new(ground: &Ground<'_>) -> Self {
        let [owner, peer] = [ground.nth(0, with_ram(16)), ground.nth(1, with_ram(16))];
        let channel = owner.guest.process().mirrors().expect("MIRROR_ADD");
        let from = peer.mr(HALF);
        let count = ground.sized(16, 4);
        let pairs = (0..count).map(|_| (peer.rc(), owner.rc())).collect();
        Self { owner, channel, pairs, from }
    }

    fn region(&self) -> Mr {
        let flags = access::ALL | access::MIRRORED;
        self.owner.ctx.mr(self.owner.pdn, 2 * HALF, flags).expect("MR_REG")
    }

    /// Connects all pairs anew, and posts writes and reads of a memory; whoever waits for the owner
    /// gives up soon.
    fn post(&mut self, address: u64, rkey: u32) {
        let path = Path { timeout: 6, retry_cnt: 0, ..Path::default() };
        for (asks, serves) in &mut self.pairs {
            let _state = (asks.qp.reset(&[&asks.scq]), serves.qp.reset(&[&serves.scq]));
            let there = serves.qp.connect(asks.address(), &path).is_ok();
            if !there || asks.qp.connect(serves.address(), &path).is_err() {
                continue;
            }
            for n in 0..4 {
                let sge = self.from.sge(0, HALF as u32);
                asks.qp.queue_send(&SendWr::write(n, &[sge], address, rkey));
                asks.qp.queue_send(&SendWr::read(n, &[sge], address, rkey));
            }
            asks.qp.ring_sq();
        }
    }

    /// The owner's thread: does each job by `copy` until `ends`, and answers what came of it.
    fn serve(&self, ends: &AtomicBool, mut copy: impl FnMut(Job) -> u32) {
        while !ends.load(Ordering::Relaxed) {
            let Some(asked) = self.channel.job(Duration::from_millis(2)) else { continue };
            if self.channel.answer(asked.number, copy(asked), 0).is_err() {
                return;
            }
        }
    }
}

/// Each job hangs the thread that does it, in memory of its own, until the peers have waited a
/// while; then it is done, and too late for some.
fn hangs(ground: &Ground<'_>) -> Box<dyn Strike> {
    let mut mirrored = Mirrored::new(ground);
    let region = mirrored.region();
    Box::new(move || {
        let memory = Hanging::new(PAGE as usize).expect("userfaultfd(2)");
        mirrored.post(region.addr(0), region.rkey);
        let (ends, hung) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|threads| {
            let _ends = Ends(&ends);
            let copies = threads.spawn(|| {
                mirrored.serve(&ends, |_| {
                    hung.store(true, Ordering::Relaxed);
                    memory.touch(0);
                    err::OK
                });
            });
            let begin = Instant::now();
            while !hung.load(Ordering::Relaxed) && begin.elapsed() < PATIENCE {
                breathe();
            }
            std::thread::sleep(Duration::from_millis(5));
            assert!(!copies.is_finished(), "the owner does not hang");
            memory.let_go();
        });
    })
}

/// What is private goes under the thread that copies; what is shared is taken back, and its region
/// with it, while the device copies.
fn unmaps(ground: &Ground<'_>) -> Box<dyn Strike> {
    let mut mirrored = Mirrored::new(ground);
    let list = PageList::contiguous(SHARED, (HALF / PAGE) as u32, 0, 12);
    Box::new(move || {
        let memory = Fleeting::new(HALF as usize).expect("memory");
        let region = mirrored.region();
        mirrored.post(region.addr(0), region.rkey);
        let ends = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let _ends = Ends(&ends);
            threads.spawn(|| mirrored.serve(&ends, |asked| copies(&memory, &region, asked)));
            (0..4).for_each(|_| breathe());
            memory.take_away().expect("a mapping");
            (0..4).for_each(|_| breathe());
            let _gone = mirrored.owner.ctx.dereg(region.lkey);
        });
        let (owner, guest) = (mirrored.owner.clone(), &mirrored.owner.guest.clone());
        let _there = guest.add_memory(SHARED, HALF).expect("memory");
        let (lkey, rkey) =
            owner.ctx.mr_reg(owner.pdn, access::ALL, (SHARED, HALF), &list).expect("MR_REG");
        mirrored.post(SHARED, rkey);
        breathe();
        guest.remove_memory(SHARED).expect("it is there");
        breathe();
        let _gone = owner.ctx.dereg(lkey);
    })
}

/// What a library does for a peer: to its process's memory, or from there.
fn copies(memory: &Fleeting, region: &Mr, asked: Job) -> u32 {
    let at = asked.address.wrapping_sub(region.addr(0));
    let inside = at < HALF && u64::from(asked.length) <= HALF - at;
    if asked.key != region.rkey || !inside {
        // Of a region that is gone already.
        return err::FAULT;
    }
    let done = if asked.kind == job::ARRIVED {
        memory.write(at as usize, &region.view().vec(at, asked.length.into()))
    } else {
        let mut bytes = vec![0; asked.length as usize];
        let read = memory.read(at as usize, &mut bytes);
        read.map(|()| region.view().write(HALF + at, &bytes))
    };
    done.map_or(err::FAULT, |()| err::OK)
}

/// A file of this length that is no memory. It lies where this program was built, or where a
/// machine without that place has a disk: `/tmp` may be a tmpfs, as it is on Debian 13.
///
/// # Panics
/// There is no disk.
#[must_use]
pub fn on_disk(len: u64) -> File {
    /// `TMPFS_MAGIC` (uapi/linux/magic.h).
    const TMPFS: u64 = 0x0102_1994;
    let own = std::env::current_exe().expect("its path");
    let dir = std::env::var_os("VHOST_RDMA_DISK").map(std::path::PathBuf::from);
    let dir = dir.as_deref().or(own.parent()).expect("a directory");
    let file = tempfile::tempfile_in(dir).expect("a file");
    file.set_len(len).expect("its length");
    let kind = rustix::fs::fstatfs(&file).expect("fstatfs").f_type;
    assert_ne!(kind.cast_unsigned(), TMPFS, "{} is on a tmpfs: set VHOST_RDMA_DISK", dir.display());
    file
}

/// What is no memory for a device, whatever it is.
///
/// # Panics
/// The host lacks something that each has.
pub fn no_memory() -> Vec<OwnedFd> {
    let (read, write) = std::io::pipe().expect("a pipe");
    let (socket, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
    let disk = on_disk(PAGE);
    let open = |path: &str| OwnedFd::from(File::open(path).expect(path));
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
    let mut all = vec![disk.into(), read.into(), write.into(), socket.into()];
    // The last is of shared memory, and no file.
    let paths = ["/dev/null", "/dev/zero", "/proc/self/mem", "/proc/self/status", ".", "/dev/shm"];
    all.extend(paths.map(open));
    all.extend([event.expect("an eventfd"), epoll.expect("an epoll instance")]);
    all
}

fn wrong_files(ground: &Ground<'_>) -> Box<dyn Strike> {
    let place = ground.places[0].clone();
    let wrong = no_memory();
    Box::new(move || {
        let Ok(node) = place.enter(with_ram(8)) else { return };
        let process = node.guest.process();
        let body = piece((SHARED, PAGE, 0));
        for file in &wrong {
            let _refused = process.ask(op::MEMORY_ADD, &body, &[file.as_fd()]);
        }
        // Where none belongs, and as many as a packet has: that ends the session.
        let many: Vec<BorrowedFd<'_>> =
            wrong.iter().cycle().take(16).map(|file| file.as_fd()).collect();
        let _gone = crate::process::send(process.socket(), &request(op::CHANNEL_ADD, &[]), &many);
        node.guest.disconnect();
    })
}

/// A program's own name for the socket of the NIC to which it comes to become another.
const SOCKET: &str = "VHOST_RDMA_BECOMES_ANOTHER";

/// Whether this process is one of those.
pub fn is_to_become_another() -> bool {
    std::env::var_os(SOCKET).is_some()
}

/// What such a process does: it begins to transfer 64 MiB, and is true(1) in the midst of it.
///
/// # Panics
/// It is none, or it cannot.
pub fn become_another() {
    let socket = std::env::var_os(SOCKET).expect("the socket of a NIC");
    let (door, name) = (Door::Process, "own".to_owned());
    let place = Vacancy { door, name, socket: socket.into(), gid: [0; 16] };
    // Who is turned away has come while another still goes.
    let Ok(mut node) = place.enter(with_ram(8)) else { return };
    node.gid = node.guest.process().address(0).expect("ADDRESS");
    let area = node.mr(2 << 20);
    let mut end = alone(&node, &rc(64, 1), 128);
    for n in 0..64 {
        let half = area.sge(0, 1 << 20);
        end.qp.queue_send(&SendWr::write(n, &[half], area.addr(1 << 20), area.rkey));
    }
    end.qp.ring_sq();
    let failed = Command::new("true").exec();
    panic!("true (coreutils): {failed}");
}

/// The program that runs this code once more: the benchmark, which looks for
/// [`is_to_become_another`], or a test, whose program has a case for it.
fn execs(ground: &Ground<'_>) -> Box<dyn Strike> {
    let socket = ground.places[0].socket.clone();
    let program = std::env::current_exe().expect("a program");
    Box::new(move || {
        let mut child = Command::new(&program);
        child.args(["--exact", "attacks::becomes_another", "--ignored", "--nocapture"]);
        child.env(SOCKET, &socket).stdin(Stdio::null()).stdout(Stdio::null());
        let status = child.status().expect("the program runs");
        assert!(status.success(), "{status}");
    })
}

/// One for as long as the attack goes on.
struct Lit {
    door: std::path::PathBuf,
    bomb: Option<Bomb>,
}

impl Strike for Lit {
    fn strike(&mut self) {
        let bomb = self.bomb.get_or_insert_with(|| Bomb::at(&self.door));
        bomb.grows();
        breathe();
    }

    fn rest(&mut self) {
        self.bomb = None;
    }
}

fn bomb(ground: &Ground<'_>) -> Box<dyn Strike> {
    Box::new(Lit { door: ground.places[0].socket.clone(), bomb: None })
}
