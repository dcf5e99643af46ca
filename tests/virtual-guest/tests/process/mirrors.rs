//! Mirrored regions: memory that a process keeps to itself, and processes that do not do their
//! part.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use virtual_guest::control::Mr;
use virtual_guest::process::{Job, Mirrors, job, op};
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::{access, err, send, status};
use virtual_guest::trips::{Queues, Trips, most};
use virtual_guest::world::{End, Node, pattern};

use crate::scene::{Scene, status as refused};

const HALF: u64 = 256 << 10;
const RIGHTS: u32 = access::ALL | access::MIRRORED;
/// Long enough for a job to come.
const SOON: Duration = Duration::from_secs(20);
/// Longer than a requester waits for an owner.
const LONG: Duration = Duration::from_secs(30);

/// A process's private memory, in words, and the thread that copies.
struct Owner {
    mr: Mr,
    words: Arc<Vec<AtomicU64>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn region(node: &Node) -> Mr {
    node.ctx.mr(node.pdn, 2 * HALF, RIGHTS).unwrap()
}

impl Owner {
    fn new(node: &Node) -> Self {
        let channel = node.guest.process().mirrors().unwrap();
        let mr = region(node);
        let words: Arc<Vec<AtomicU64>> =
            Arc::new((0..HALF / 8).map(|_| AtomicU64::new(0)).collect());
        let ends = Arc::new(AtomicBool::new(false));
        let (copy, memory, stop) = (mr.clone(), words.clone(), ends.clone());
        let thread = std::thread::spawn(move || serve(&channel, &copy, &memory, &stop));
        Self { mr, words, ends, thread: Some(thread) }
    }

    fn at(&self, offset: u64) -> (u64, u32) {
        (self.mr.addr(offset), self.mr.rkey)
    }

    fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let words = self.words.iter().skip(offset as usize / 8);
        let bytes = words.flat_map(|word| word.load(Ordering::SeqCst).to_le_bytes());
        bytes.take(len).collect()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        self.thread.take().map(JoinHandle::join);
    }
}

fn byte(words: &[AtomicU64], at: u64, change: Option<u8>) -> u8 {
    let (word, shift) = (&words[at as usize / 8], 8 * (at % 8));
    if let Some(byte) = change {
        let set = |old: u64| Some(old & !(0xff << shift) | u64::from(byte) << shift);
        word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, set).unwrap();
    }
    (word.load(Ordering::SeqCst) >> shift) as u8
}

/// What a process's library does.
fn serve(channel: &Mirrors, mr: &Mr, words: &[AtomicU64], ends: &AtomicBool) {
    while !ends.load(Ordering::SeqCst) {
        let Some(asked) = channel.job(Duration::from_millis(20)) else { continue };
        assert_eq!(asked.key, mr.rkey);
        let at = asked.address - mr.addr(0);
        assert!(at + u64::from(asked.length) <= HALF);
        let word = &words[at as usize / 8];
        let [first, second] = asked.operands;
        let value = match asked.kind {
            job::ARRIVED => {
                let bytes = mr.view().vec(at, asked.length.into());
                for (at, arrived) in (at..).zip(bytes) {
                    byte(words, at, Some(arrived));
                }
                0
            }
            job::WANTED => {
                let range = at..at + u64::from(asked.length);
                let bytes: Vec<u8> = range.map(|at| byte(words, at, None)).collect();
                mr.view().write(HALF + at, &bytes);
                0
            }
            job::COMPARE_SWAP => {
                let order = Ordering::SeqCst;
                word.compare_exchange(first, second, order, order).unwrap_or_else(|word| word)
            }
            job::FETCH_ADD => word.fetch_add(first, Ordering::SeqCst),
            kind => panic!("kind {kind}"),
        };
        if channel.answer(asked.number, 0, value).is_err() {
            return;
        }
    }
}

fn pair(a: &Node, b: &Node) -> (End, End) {
    let (a, b) = (a.rc(), b.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    (a, b)
}

#[test]
fn peers_reach_memory_that_is_not_shared() {
    let scene = Scene::new();
    let (mut a, b) = pair(&scene.blue(), &scene.red());
    let owner = Owner::new(&b.node);
    for (i, size) in [1u64, 8, 63, 4096, HALF].into_iter().enumerate() {
        let data = pattern(i as u64 + 1, size as usize);
        let (from, to) = (a.node.area_of(&data), a.node.area(size));
        let (address, key) = owner.at(0);
        a.run_ok(&SendWr::write(1, &[from.sge()], address, key));
        assert!(owner.bytes(0, size as usize) == data, "{size}");
        a.run_ok(&SendWr::read(2, &[to.sge()], address, key));
        assert!(to.bytes() == data, "{size}");
    }
    let result = a.node.area(8);
    owner.words[1].store(40, Ordering::SeqCst);
    a.run_ok(&SendWr::faa(3, result.sge(), owner.at(8), 2));
    assert_eq!((result.word(0), owner.words[1].load(Ordering::SeqCst)), (40, 42));
    a.run_ok(&SendWr::cas(4, result.sge(), owner.at(8), 42, 7));
    assert_eq!((result.word(0), owner.words[1].load(Ordering::SeqCst)), (42, 7));
}

/// The owner may be asked for a request before its turn, but not before what the request waits for:
/// a fenced write sends what the read before it brings, and who is told of writes finds them.
#[test]
fn owners_are_asked_ahead_of_nothing_that_counts() {
    let scene = Scene::new();
    let (mut a, mut b) = pair(&scene.blue(), &scene.red());
    let owner = Owner::new(&b.node);
    let (carried, told) = (a.node.area(64), b.node.area(8));
    for round in 1..=20u64 {
        for (i, word) in owner.words.iter().take(8).enumerate() {
            word.store(round << 8 | i as u64, Ordering::SeqCst);
        }
        let plain = a.node.area_of(&pattern(round, 64));
        b.qp.post_recv(round, &[told.sge()]);
        let (from, key) = owner.at(0);
        a.qp.queue_send(&SendWr::read(1, &[carried.sge()], from, key));
        let back = SendWr::write(2, &[carried.sge()], owner.at(4096).0, key);
        a.qp.queue_send(&back.flag(send::FENCE));
        for i in 0..8 {
            let at = owner.at(8192 + 64 * i).0;
            a.qp.queue_send(&SendWr::write(3 + i, &[plain.sge()], at, key));
        }
        a.qp.queue_send(&SendWr::send(11, &[a.node.area(8).sge()]));
        a.qp.ring_sq();
        assert_eq!(b.rcq.one().status, status::SUCCESS);
        assert_eq!(owner.bytes(4096, 64), owner.bytes(0, 64), "{round}: sent before it was read");
        assert_eq!(owner.bytes(8192, 512), pattern(round, 64).repeat(8), "{round}: told too early");
        for id in 1..=11 {
            let cqe = a.scq.one();
            assert_eq!((cqe.wr_id, cqe.status), (id, status::SUCCESS));
        }
    }
}

#[test]
fn a_peer_knows_of_one_half() {
    let scene = Scene::new();
    let owner = scene.red();
    let _channel = owner.guest.process().mirrors().unwrap();
    let mr = region(&owner);
    for offset in [HALF - 4, HALF, 2 * HALF - 8] {
        let (mut a, b) = (scene.blue().rc(), owner.rc());
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        let from = a.node.area(8);
        let write = SendWr::write(1, &[from.sge()], mr.addr(offset), mr.rkey);
        assert_eq!(a.run(&write).status, status::REM_ACCESS_ERR, "{offset:#x}");
    }
}

/// The process's processors and its peers add to one word at the same time.
#[test]
fn atomics_lose_nothing_against_the_processs_own() {
    const EACH: u64 = 300;
    let scene = Scene::new();
    let (mut a, b) = pair(&scene.blue(), &scene.red());
    let owner = Owner::new(&b.node);
    let words = owner.words.clone();
    let adder = std::thread::spawn(move || {
        for _ in 0..EACH * 100 {
            words[0].fetch_add(1, Ordering::SeqCst);
        }
    });
    let result = a.node.area(8);
    for _ in 0..EACH {
        a.run_ok(&SendWr::faa(1, result.sge(), owner.at(0), 1));
    }
    adder.join().unwrap();
    assert_eq!(owner.words[0].load(Ordering::SeqCst), EACH * 101);
}

/// A pair whose traffic goes on: the 99th percentile of what its round trips took.
fn bystander_works(scene: &Scene, pair: &mut (End, End)) -> Duration {
    let (a, b) = pair;
    let (from, to) = (a.node.area_of(&pattern(3, 4096)), b.node.area(4096));
    let write = SendWr::write(1, &[from.sge()], to.addr(0), to.rkey());
    let queues = Queues::of_network(&scene.world.daemon, "net").and_mine();
    let mut trips = Trips::default();
    (0..100).for_each(|_| trips.record(queues.time(|| _ = a.run_ok(&write))));
    trips.p99().0
}

#[test]
fn an_owner_that_hangs_keeps_its_peer_waiting_and_nobody_else() {
    let scene = Scene::new();
    let mut bystander = pair(&scene.blue(), &scene.red());
    let alone = bystander_works(&scene, &mut bystander);
    let (mut a, b) = pair(&scene.blue(), &scene.red());
    let channel = b.node.guest.process().mirrors().unwrap();
    let mr = region(&b.node);
    let from = a.node.area(64);
    a.qp.post_send(&SendWr::write(1, &[from.sge()], mr.addr(0), mr.rkey));
    let asked = channel.job(SOON).unwrap();
    assert_eq!((asked.kind, asked.length), (job::ARRIVED, 64));
    let p99 = bystander_works(&scene, &mut bystander);
    assert!(p99 <= most(alone), "{alone:?} alone, {p99:?} beside it");
    let failed = a.scq.wait(LONG).expect("an end");
    assert_eq!(failed.status, status::RETRY_EXC_ERR);
    // Too late, and of no use to anybody.
    channel.answer(asked.number, 0, 0).unwrap();
    bystander_works(&scene, &mut bystander);
    assert!(b.node.guest.process().address(0).is_ok(), "the session is there");
    drop((a, b, bystander));
    scene.awaits_nothing("red");
}

#[test]
fn an_owner_without_the_memory_says_so() {
    let scene = Scene::new();
    let (mut a, b) = pair(&scene.blue(), &scene.red());
    let channel = b.node.guest.process().mirrors().unwrap();
    let mr = region(&b.node);
    let to = a.node.area(64);
    a.qp.post_send(&SendWr::read(1, &[to.sge()], mr.addr(0), mr.rkey));
    let asked: Job = channel.job(SOON).unwrap();
    channel.answer(asked.number, err::FAULT, 0).unwrap();
    assert_eq!(a.scq.one().status, status::REM_OP_ERR);
    assert_eq!(to.bytes(), [0; 64]);
}

#[test]
fn answers_that_nobody_asked_for_end_the_session() {
    let scene = Scene::new();
    let mut bystander = pair(&scene.blue(), &scene.red());
    for nonsense in 0..5 {
        let (a, b) = pair(&scene.blue(), &scene.red());
        let channel = b.node.guest.process().mirrors().unwrap();
        let mr = region(&b.node);
        let from = a.node.area(64);
        let mut qp = a.qp;
        qp.post_send(&SendWr::write(1, &[from.sge()], mr.addr(0), mr.rkey));
        let asked = channel.job(SOON).unwrap();
        match nonsense {
            0 => channel.answer(asked.number + 1, 0, 0).unwrap(),
            1 => channel.say(&[0; 23]).unwrap(),
            2 => channel.say(&[0xff; 300]).unwrap(),
            3 => {
                channel.answer(asked.number, 0, 0).unwrap();
                let _ = channel.answer(asked.number, 0, 0);
            }
            // Nobody will ever answer.
            _ => drop(channel),
        }
        let begin = Instant::now();
        while b.node.guest.process().address(0).is_ok() {
            assert!(begin.elapsed() < SOON, "{nonsense}: the session goes on");
            std::thread::sleep(Duration::from_millis(5));
        }
        bystander_works(&scene, &mut bystander);
    }
    drop(bystander);
    scene.awaits_nothing("red");
}

/// As where the program's table of descriptors is full: the channel is gone before anything is
/// asked of it. The session goes on as if it had not asked for one.
#[test]
fn a_channel_that_did_not_arrive_can_be_asked_for_again() {
    let scene = Scene::new();
    let (mut a, b) = pair(&scene.blue(), &scene.red());
    let process = b.node.guest.process();
    for _ in 0..20 {
        drop(process.mirrors().unwrap());
        assert_eq!(refused(b.node.ctx.mr(b.node.pdn, 2 * HALF, RIGHTS).map(drop)), err::INVAL);
    }
    let owner = Owner::new(&b.node);
    assert_eq!(refused(process.mirrors().map(drop)), err::EXIST);
    let from = a.node.area(64);
    from.set(&pattern(3, 64));
    let (to, key) = owner.at(8);
    a.run_ok(&SendWr::write(1, &[from.sge()], to, key));
    assert_eq!(owner.bytes(8, 64), pattern(3, 64));
}

#[test]
fn an_owner_that_is_gone_leaves_nothing() {
    let scene = Scene::new();
    let mut a = scene.blue().rc();
    let b = scene.red().rc();
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let channel = b.node.guest.process().mirrors().unwrap();
    let mr = region(&b.node);
    let from = a.node.area(64);
    a.qp.post_send(&SendWr::write(1, &[from.sge()], mr.addr(0), mr.rkey));
    channel.job(SOON).unwrap();
    drop((mr, channel, b));
    scene.awaits_nothing("red");
    assert_eq!(a.scq.wait(LONG).expect("an end").status, status::RETRY_EXC_ERR);
}

#[test]
fn what_has_no_owner_cannot_be_mirrored() {
    let scene = Scene::new();
    let node = scene.red();
    assert_eq!(refused(node.ctx.mr(node.pdn, 2 * HALF, RIGHTS)), err::INVAL);
    let process = node.guest.process();
    let channel = process.mirrors().unwrap();
    assert_eq!(refused(process.mirrors()), err::EXIST);
    node.ctx.mr(node.pdn, 2 * HALF, RIGHTS).unwrap();
    assert_eq!(refused(node.ctx.mr(node.pdn, 8191, RIGHTS)), err::INVAL);
    drop(channel);
    // Before there is a context.
    let guest = virtual_guest::guest::Guest::of_process(scene.blue_socket()).unwrap();
    assert_eq!(guest.process().ask(op::MIRROR_ADD, &[], &[]).unwrap().0, err::STATE);
    // A driver of a VM has no such regions.
    let vm = scene.world.node();
    assert_eq!(refused(vm.ctx.mr(vm.pdn, 2 * HALF, RIGHTS)), err::INVAL);
}
