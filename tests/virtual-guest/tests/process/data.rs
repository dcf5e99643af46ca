//! Processes exchange data.

use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{qpt, status, wc};
use virtual_guest::world::{End, Node, pattern};

use crate::scene::Scene;

fn pair(a: &Node, b: &Node) -> (End, End) {
    let (a, b) = (a.rc(), b.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    (a, b)
}

fn every_verb(mut a: End, mut b: End) {
    for (i, size) in [0u64, 1, 63, 4096, 65_537, 1 << 20].into_iter().enumerate() {
        let data = pattern(i as u64, size as usize);
        let (from, to) = (a.node.area_of(&data), b.node.area(size));
        b.qp.post_recv(7, &[to.sge()]);
        a.run_ok(&SendWr::send(1, &[from.sge()]));
        let received = b.rcq.ok();
        assert_eq!((received.opcode, u64::from(received.byte_len)), (wc::RECV, size));
        assert_eq!(to.bytes(), data);
        let (there, back) = (b.node.area(size), a.node.area(size));
        a.run_ok(&SendWr::write(2, &[from.sge()], there.addr(0), there.rkey()));
        assert_eq!(there.bytes(), data);
        a.run_ok(&SendWr::read(3, &[back.sge()], there.addr(0), there.rkey()));
        assert_eq!(back.bytes(), data);
    }
    let (result, word) = (a.node.area(8), b.node.area(8));
    word.set_word(0, 40);
    let at = (word.addr(0), word.rkey());
    a.run_ok(&SendWr::faa(4, result.sge(), at, 2));
    a.run_ok(&SendWr::cas(5, result.sge(), at, 42, 7));
    assert_eq!((result.word(0), word.word(0)), (42, 7));
}

#[test]
fn two_processes_of_two_nics_exchange_data_by_every_verb() {
    let scene = Scene::new();
    let (a, b) = pair(&scene.blue(), &scene.red());
    every_verb(a, b);
}

#[test]
fn two_processes_of_one_nic_do_so_too() {
    let scene = Scene::new();
    let (a, b) = pair(&scene.blue(), &scene.blue());
    every_verb(a, b);
}

#[test]
fn datagrams_between_processes() {
    const KEY: u32 = 0x1234;
    let scene = Scene::new();
    let spec = QpSpec::new(qpt::UD);
    let (mut a, mut b) = (scene.blue().end(&spec), scene.red().end(&spec));
    for end in [&a, &b] {
        end.qp.start_datagrams(KEY).unwrap();
    }
    let av = virtual_guest::attr::Av::to(b.node.gid);
    let ah = a.node.ctx.create_ah(a.node.pdn, &av).unwrap();
    let (from, to) = (a.node.area_of(&pattern(1, 1000)), b.node.area(1040));
    b.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::datagram(2, &[from.sge()], ah, b.qp.qpn, KEY));
    let received = b.rcq.ok();
    assert_eq!((received.byte_len, received.src_qp), (1040, a.qp.qpn));
    assert_eq!(to.bytes()[40..], pattern(1, 1000));
}

/// Each of three talks to a process of the other NIC; all are there at once.
#[test]
fn three_processes_of_one_nic_do_not_meet() {
    let scene = Scene::new();
    let pairs: Vec<_> = (0..3).map(|_| pair(&scene.blue(), &scene.red())).collect();
    assert_eq!(scene.objects("blue")["contexts"], 3);
    assert_eq!(scene.objects("red")["qps"], 3);
    for (i, (mut a, b)) in pairs.into_iter().enumerate() {
        let data = pattern(i as u64, 5000);
        let (from, to) = (a.node.area_of(&data), b.node.area(5000));
        a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
        assert_eq!(to.bytes(), data);
    }
    scene.awaits_nothing("blue");
    scene.awaits_nothing("red");
}

/// All have their memory at the same addresses: a key is good for its own process's only.
#[test]
fn a_key_of_another_process_is_none() {
    let scene = Scene::new();
    let (mut a, _b) = pair(&scene.blue(), &scene.red());
    let stranger = scene.blue();
    let (mine, its) = (a.node.area_of(&[1; 64]), stranger.area_of(&[2; 64]));
    let foreign = virtual_guest::rings::Sge { lkey: its.mr.lkey, ..mine.sge() };
    assert_eq!(a.run(&SendWr::send(1, &[foreign])).status, status::LOC_PROT_ERR);
    assert_eq!(its.bytes(), [2; 64]);
}

#[test]
fn a_process_that_sleeps_is_heard_when_it_posts() {
    let scene = Scene::new();
    let (mut a, b) = pair(&scene.blue(), &scene.red());
    let (from, to) = (a.node.area_of(&[7; 8]), b.node.area(8));
    for _ in 0..3 {
        // The worker sleeps, and has asked to be kicked.
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(a.node.guest.need_kick());
        a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
    }
    assert!(scene.world.daemon.show_nic("blue")["counters"]["kicks"].as_u64().unwrap() >= 3);
}
