//! Who may reach whom: networks, addresses, contexts, and that a hostile guest harms only itself
//! (5.1, 9, 11).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::daemon::backing;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::{Av, Path, QpSpec, SendWr};
use virtual_guest::spec::{self, err, qps, qpt, status};
use virtual_guest::world::{Node, World, ipv4_gid, ipv6_gid};

#[test]
fn another_network_is_out_of_reach_even_with_the_right_numbers() {
    let world = World::new();
    world.daemon.add_network("other", 200);
    let here = world.node();
    let there = world.node_with("other", &[], GuestConfig::default());
    let (mut a, b) = (here.rc(), there.rc());
    b.qp.to_init(&Path::hasty()).unwrap();
    match b.qp.to_rtr(a.address(), &Path::hasty()) {
        Err(e) => {
            assert_eq!((e.status(), rules().strangers_are_refused), (Some(err::UNREACH), true));
        }
        Ok(()) => b.qp.to_rts(&Path::hasty()).unwrap(),
    }
    a.qp.to_init(&Path::hasty()).unwrap();
    let target = there.area(8);
    match a.qp.to_rtr(b.address(), &Path::hasty()) {
        // Refused, if no NIC of the network may have the address; else a peer that is not there.
        Err(e) => assert_eq!(e.status(), Some(err::UNREACH)),
        Ok(()) => {
            a.qp.to_rts(&Path::hasty()).unwrap();
            let failed =
                a.run(&SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
            assert_eq!(failed.status, status::RETRY_EXC_ERR);
        }
    }
    assert_eq!(target.bytes(), [0; 8]);
}

#[test]
fn two_networks_may_use_the_same_addresses() {
    let world = World::new();
    world.daemon.add_network("other", 200);
    // On an RNIC, behind an address of the host's that stands for all of theirs.
    let backing = match backing() {
        soft if soft == "soft" => soft,
        device => format!("{device}@10.0.0.1"),
    };
    let options = ["--backing", backing.as_str()];
    let nodes: Vec<Node> = ["net", "net", "other", "other"]
        .into_iter()
        .enumerate()
        .map(|(i, network)| {
            let name = format!("twin{i}");
            let socket = world.daemon.add_nic(&name, network, &options);
            let guest = Guest::connect(&socket, GuestConfig::default()).unwrap();
            Node::start(name, socket, guest, ipv4_gid(7, (i % 2) as u8 + 1))
        })
        .collect();
    for (i, pair) in nodes.chunks(2).enumerate() {
        let (mut a, b) = (pair[0].rc(), pair[1].rc());
        a.connect(&b, &Path::hasty());
        b.connect(&a, &Path::hasty());
        let word = pair[1].area(8);
        a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[i as u8 + 1; 8]));
        assert_eq!(word.bytes(), [i as u8 + 1; 8]);
    }
}

#[test]
fn datagrams_stay_in_their_network() {
    let world = World::new();
    world.daemon.add_network("other", 200);
    let (here, there) = (world.node(), world.node_with("other", &[], GuestConfig::default()));
    let (mut a, mut b) = (here.end(&QpSpec::new(qpt::UD)), there.end(&QpSpec::new(qpt::UD)));
    a.qp.start_datagrams(5).unwrap();
    b.qp.start_datagrams(5).unwrap();
    let inbox = there.area(100);
    b.qp.post_recv(1, &[inbox.sge()]);
    if let Ok(ah) = here.ctx.create_ah(here.pdn, &Av::to(there.gid)) {
        a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, 5).inline(&[1; 8]));
    }
    b.rcq.silent(Duration::from_millis(50));
    assert_eq!(inbox.bytes(), [0; 100]);
}

#[test]
fn an_address_that_another_nic_holds_is_refused() {
    let world = World::new();
    let (a, b) = (world.node(), world.node());
    let taken = b.guest.set_gid(1, spec::GID_ROCE_V2, a.gid).unwrap_err();
    assert_eq!(taken.status(), Some(err::EXIST));
    a.guest.set_gid(0, spec::GID_NONE, [0; 16]).unwrap();
    b.guest.set_gid(1, spec::GID_ROCE_V2, ipv4_gid(0, 1)).unwrap();
}

#[test]
fn an_address_that_the_nic_was_not_given_is_refused() {
    let world = World::new();
    let name = "pinned";
    let socket = world.daemon.add_nic(name, "net", &["--address", "10.0.9.1"]);
    let guest = Guest::connect(&socket, GuestConfig::default()).unwrap();
    guest.init().unwrap();
    let refused = guest.set_gid(0, spec::GID_ROCE_V2, ipv4_gid(9, 2)).unwrap_err();
    assert_eq!(refused.status(), Some(err::PERM));
    let refused = guest.set_gid(0, spec::GID_ROCE_V2, ipv6_gid(2)).unwrap_err();
    assert_eq!(refused.status(), Some(err::PERM));
    guest.set_gid(0, spec::GID_ROCE_V2, ipv4_gid(9, 1)).unwrap();
}

#[test]
fn objects_of_another_context_do_not_exist() {
    let world = World::new();
    let node = world.node();
    let other = node.guest.open().unwrap();
    let mr = node.mr(64);
    let (a, _b) = world.rc_pair();
    drop(a);
    let end = node.rc();
    assert_eq!(other.destroy_pd(node.pdn).unwrap_err().status(), Some(err::NOENT));
    assert_eq!(other.dereg(mr.lkey).unwrap_err().status(), Some(err::NOENT));
    for (opcode, object) in
        [(spec::cmd::CQ_DESTROY, end.scq.cqn), (spec::cmd::QP_DESTROY, end.qp.qpn)]
    {
        assert_eq!(other.object(opcode, object).unwrap_err().status(), Some(err::NOENT));
    }
    let list =
        virtual_guest::pages::PageList::contiguous(node.guest.ram().regions()[0].gpa(), 1, 0, 12);
    let foreign = other.mr_reg(node.pdn, 0, (0x1000, 64), &list).unwrap_err();
    assert_eq!(foreign.status(), Some(err::NOENT));
    assert_eq!(end.qp.state().unwrap(), qps::RESET);
    let bystander = world.node();
    assert_eq!(bystander.ctx.dereg(mr.lkey).unwrap_err().status(), Some(err::NOENT));
}

/// One guest writes garbage everywhere it can while another's traffic must go on.
#[test]
fn a_guest_that_misbehaves_harms_only_itself() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    let villain = world.node();
    let mut ends: Vec<_> = (0..8).map(|_| villain.rc()).collect();
    for end in &mut ends {
        end.qp.connect(end.address(), &Path::hasty()).unwrap();
    }
    let mut seed = 0x9e37_79b9u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let deadline = Instant::now() + Duration::from_secs(4);
    let mut served = 0;
    // On a machine that is busy it takes longer until the neighbour was served so often; that it
    // is, is the test.
    while Instant::now() < deadline || served <= 100 {
        for end in &mut ends {
            let (ring, at, doorbell) = end.qp.raw_sq(next() as u32 % 64);
            for i in 0..16 {
                ring.store64(at + 8 * i, next(), std::sync::atomic::Ordering::Relaxed);
            }
            doorbell.ring(next() as u32 % 200);
            let cq = end.scq.view();
            cq.store64(next() % 512 * 8, next(), std::sync::atomic::Ordering::Relaxed);
        }
        let page = villain.ctx.doorbell_page(0);
        page.store32((next() % 1024) * 4, next() as u32, std::sync::atomic::Ordering::Relaxed);
        let garbage: Vec<u8> = (0..8).flat_map(|_| next().to_le_bytes()).collect();
        let mut header = garbage.clone();
        (header[0], header[1]) = ((next() % 0x48) as u8, 0);
        if header[0] != spec::cmd::SHUTDOWN as u8 {
            let _answer = villain.guest.raw_control(
                &[&header, &garbage[..(next() % 64) as usize]],
                &[(next() % 200) as u32 + 1],
                Duration::from_secs(3),
            );
        }
        served += 1;
        a.run_ok(
            &SendWr::write(served, &[], word.addr(0), word.rkey()).inline(&served.to_le_bytes()),
        );
        assert_eq!(word.word(0), served);
    }
}

#[test]
fn a_doorbell_storm_does_not_starve_a_neighbour() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    let villain = world.node();
    let mut noisy = villain.rc();
    noisy.qp.connect(noisy.address(), &Path::hasty()).unwrap();
    let blob = villain.area(1 << 20);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut i = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for _ in 0..16 {
                    let wr = SendWr::write(i, &[blob.sge()], blob.addr(0), blob.rkey());
                    noisy.qp.queue_send(&wr);
                    i += 1;
                }
                noisy.qp.ring_sq();
                for _ in 0..16 {
                    if noisy.scq.wait(Duration::from_secs(10)).is_none() {
                        return;
                    }
                }
            }
        });
        for i in 0..200 {
            // How long each takes is a row of the isolation benchmark; here each comes.
            a.run_ok(&SendWr::write(i, &[], word.addr(0), word.rkey()).inline(&i.to_le_bytes()));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
