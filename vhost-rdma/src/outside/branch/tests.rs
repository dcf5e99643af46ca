//! Two networks' processes on one RNIC, one of which says what it likes.

use std::path::PathBuf;

use super::*;
use crate::cm::{MAD_LEN, Mad};
use crate::node::{Guests, NicLimits, SocketAccess};
use crate::rnic::{Carrier, NicQuota, Peer, Remote};

const DEVICE: &str = "rxe0";
/// Of the host, for NICs whose addresses are mapped.
const HOST: &str = "192.0.2.1";

fn mac(number: u8) -> Mac {
    [2, 0, 0, 0, 0, number]
}

fn address(last: u8) -> Gid {
    gid_of([10, 0, 0, last].into())
}

/// A NIC on the RNIC, by its number: `rnic:DEVICE`, or that with an address of the host.
fn nic(vni: u32, number: u8, backing: &str, addresses: &[u8]) -> NicConfig {
    NicConfig {
        number: 0,
        name: format!("nic{number}"),
        network: format!("net{vni}"),
        vni,
        mac: format!("02:00:00:00:00:{number:02x}").parse().unwrap(),
        addresses: addresses.iter().map(|last| [10, 0, 0, *last].into()).collect(),
        virtio_id: None,
        comp_vectors: 1,
        limits: NicLimits { max_qps: 4, ..NicLimits::default() },
        backing: backing.parse().unwrap(),
        guests: Guests::Vm,
        socket: PathBuf::new(),
        access: SocketAccess::default(),
        configured: false,
    }
}

fn mapped(vni: u32, number: u8, addresses: &[u8]) -> NicConfig {
    nic(vni, number, &format!("rnic:{DEVICE}@{HOST}"), addresses)
}

fn flat(vni: u32, number: u8, addresses: &[u8]) -> NicConfig {
    nic(vni, number, &format!("rnic:{DEVICE}"), addresses)
}

/// What goes to other daemons: how much of each NIC waits, and nobody takes it.
#[derive(Default)]
struct Away(Mutex<Vec<(Mad, crate::rnic::QuotaPermit)>>);

impl Carrier for Away {
    fn carry(&self, quota: &NicQuota, _: &Arc<str>, _: &str, mad: Mad) -> bool {
        let Some(permit) = quota.take() else { return false };
        self.0.lock().unwrap().push((mad, permit));
        true
    }
}

/// The branches of two networks, and what leaves the host.
struct Scene {
    outside: Arc<Outside>,
    away: Arc<Away>,
    one: Branch,
    other: Branch,
}

impl Scene {
    fn new() -> Self {
        let (outside, away) = (Arc::<Outside>::default(), Arc::<Away>::default());
        outside.directory().set_carrier(away.clone());
        for vni in [1, 2] {
            let remote = Remote {
                daemon: "h:1".into(),
                host: "h".into(),
                network: format!("net{vni}").into(),
            };
            let (address, through) = ([10, 0, 9, 0].into(), None);
            let peer = Peer { address, prefix_len: 24, through, remote: Some(remote) };
            outside.directory().set_peers(vni, vec![peer]);
        }
        let branch = |vni| Branch::new(outside.clone(), vni, Arc::new(|| {}));
        let (one, other) = (branch(1), branch(2));
        Self { outside, away, one, other }
    }
}

fn claims(branch: &Branch, nic: Mac, gid: Gid) -> bool {
    match branch.take(Told::Asked(Some(7), Asked::Address(nic, gid))) {
        Some(Host::Settled(7, Settled::Address(granted))) => granted,
        other => panic!("{other:?}"),
    }
}

fn far(branch: &Branch, device: &str, qpn: u32) -> Far {
    let asked = Asked::Peer { device: device.to_owned(), gid: gid_of(HOST.parse().unwrap()), qpn };
    match branch.take(Told::Asked(Some(7), asked)) {
        Some(Host::Settled(7, Settled::Peer(far))) => far,
        other => panic!("{other:?}"),
    }
}

fn queues(branch: &Branch, new: impl IntoIterator<Item = u32>, gone: &[u32]) {
    let (device, new) = (DEVICE.to_owned(), new.into_iter().collect());
    assert_eq!(branch.take(Told::Queues { device, new, gone: gone.to_vec() }), None);
}

fn mad(source: Gid, dest: Gid) -> Mad {
    Mad { source, dest, traffic_class: 0, sl: 0, bytes: [7; MAD_LEN] }
}

#[test]
fn a_process_speaks_for_the_addresses_of_its_own_nics_alone() {
    let scene = Scene::new();
    scene.one.put(&mapped(1, 1, &[1]));
    scene.one.put(&mapped(1, 2, &[]));
    scene.other.put(&mapped(2, 1, &[]));
    assert!(claims(&scene.one, mac(1), address(1)));
    assert!(claims(&scene.one, mac(1), link_local(mac(1))), "its own, always");
    assert!(!claims(&scene.one, mac(1), address(3)), "the operator gave it others");
    assert!(!claims(&scene.one, mac(9), address(9)), "there is no such NIC");
    assert!(!claims(&scene.one, mac(2), address(1)), "another of the network has it");
    assert!(claims(&scene.other, mac(1), address(1)), "another network's is another");
    // What another network has cannot be given away, nor what another NIC has.
    assert_eq!(scene.one.take(Told::Release { nic: mac(2), gid: address(1) }), None);
    assert!(!claims(&scene.one, mac(2), address(1)));
    assert_eq!(scene.one.take(Told::Release { nic: mac(1), gid: address(1) }), None);
    assert!(claims(&scene.one, mac(2), address(1)));
}

#[test]
fn a_host_address_that_a_guest_has_for_its_own_is_one_guests_in_all_networks() {
    let scene = Scene::new();
    scene.one.put(&flat(1, 1, &[]));
    scene.other.put(&flat(2, 2, &[]));
    assert!(claims(&scene.one, mac(1), address(1)));
    assert!(!claims(&scene.other, mac(2), address(1)));
    scene.one.mourn();
    assert!(claims(&scene.other, mac(2), address(1)), "it went with the process");
    assert!(!claims(&scene.one, mac(1), address(1)));
    scene.other.take_away(&flat(2, 2, &[]));
    assert!(claims(&scene.one, mac(1), address(1)), "and with the NIC");
}

#[test]
fn no_more_addresses_are_kept_than_a_nic_has_room_for() {
    let scene = Scene::new();
    scene.one.put(&mapped(1, 1, &[]));
    let many = (0..1000u16).map(u16::to_be_bytes).map(|[a, b]| gid_of([10, 1, a, b].into()));
    let granted = many.filter(|gid| claims(&scene.one, mac(1), *gid)).count();
    assert_eq!(granted, usize::from(GID_TABLE_LEN));
}

#[test]
fn of_queue_pairs_a_process_is_believed_for_its_own_network_alone() {
    let scene = Scene::new();
    scene.one.put(&mapped(1, 1, &[]));
    scene.other.put(&mapped(2, 1, &[]));
    queues(&scene.other, [17], &[]);
    assert!(far(&scene.one, DEVICE, 17).is_others);
    assert!(!far(&scene.other, DEVICE, 17).is_others, "its own");
    // It says that the other's is its own, and then that it is gone.
    queues(&scene.one, [17], &[]);
    assert!(!far(&scene.other, DEVICE, 17).is_others, "that takes nothing from the other");
    queues(&scene.one, [], &[17, 18]);
    assert!(far(&scene.one, DEVICE, 17).is_others, "it is still the other's");
    assert!(!far(&scene.one, "mlx5_0", 17).is_others, "nothing is told of other devices");
    scene.other.mourn();
    assert!(!far(&scene.one, DEVICE, 17).is_others);
}

#[test]
fn a_network_that_is_gone_takes_nothing_from_the_next_one_of_its_number() {
    let scene = Scene::new();
    scene.one.put(&flat(1, 1, &[]));
    assert!(claims(&scene.one, mac(1), address(1)));
    queues(&scene.one, [17], &[]);
    scene.one.close();
    assert!(!far(&scene.other, DEVICE, 17).is_others, "it went with the network");
    let next = Branch::new(scene.outside.clone(), 1, Arc::new(|| {}));
    next.put(&flat(1, 1, &[]));
    scene.other.put(&mapped(2, 1, &[]));
    assert!(claims(&next, mac(1), address(1)));
    queues(&next, [18], &[]);
    // The process of the first ends only now, and says something before.
    queues(&scene.one, [19], &[18]);
    assert_eq!(scene.one.take(Told::Release { nic: mac(1), gid: address(1) }), None);
    scene.one.mourn();
    assert!(far(&scene.other, DEVICE, 18).is_others, "the next one's");
    assert!(!far(&scene.other, DEVICE, 19).is_others, "nobody's");
    scene.other.put(&flat(2, 2, &[]));
    assert!(!claims(&scene.other, mac(2), address(1)), "the next one has it");
}

#[test]
fn no_more_queue_pairs_are_kept_than_the_nics_may_have() {
    let scene = Scene::new();
    scene.one.put(&mapped(1, 1, &[]));
    scene.other.put(&mapped(2, 1, &[]));
    queues(&scene.one, 100..1100, &[]);
    let known = |qpn: &u32| far(&scene.other, DEVICE, *qpn).is_others;
    assert_eq!((100..1100).filter(known).count(), 4, "its limit");
    queues(&scene.one, [2000], &[100]);
    assert!(known(&2000) && !known(&100), "what is given back can be told anew");
    // Devices that no NIC is on are nobody's.
    let told = Told::Queues { device: "mlx5_0".to_owned(), new: vec![1], gone: vec![] };
    assert_eq!(scene.one.take(told), None);
    scene.other.put(&nic(2, 2, "rnic:mlx5_0", &[]));
    assert!(!far(&scene.other, "mlx5_0", 1).is_others);
}

#[test]
fn a_datagram_goes_out_from_an_address_that_its_nic_holds_and_in_its_share() {
    let scene = Scene::new();
    scene.one.put(&mapped(1, 1, &[]));
    scene.one.put(&mapped(1, 2, &[]));
    let dest = gid_of([10, 0, 9, 9].into());
    let send = |nic, source| {
        let datagram = Datagram::of(&mad(source, dest));
        assert_eq!(scene.one.take(Told::Datagram(nic, datagram)), None);
        scene.away.0.lock().unwrap().len()
    };
    assert_eq!(send(mac(1), address(1)), 0, "it does not hold it yet");
    assert!(claims(&scene.one, mac(1), address(1)));
    assert_eq!(send(mac(1), address(1)), 1);
    assert_eq!(send(mac(2), address(1)), 1, "another's");
    assert_eq!(send(mac(9), address(1)), 1, "nobody's");
    for _ in 0..1000 {
        send(mac(1), address(1));
    }
    let share = crate::rnic::PER_NIC;
    assert!(claims(&scene.one, mac(2), address(2)));
    assert_eq!(send(mac(2), address(2)), share + 1, "a flood takes its own share");
}

#[test]
fn what_comes_for_a_nic_is_handed_out_in_turns_and_bounded() {
    let scene = Scene::new();
    for number in [1, 2] {
        scene.one.put(&mapped(1, number, &[]));
        assert!(claims(&scene.one, mac(number), address(number)));
    }
    let peer = gid_of([10, 0, 9, 9].into());
    let arrives = |last| {
        let may_be = |host: &str| host == "h";
        scene.outside.directory().accept("net1", mad(peer, address(last)), may_be).unwrap();
    };
    for _ in 0..1000 {
        arrives(1);
    }
    arrives(2);
    let mut got = Vec::new();
    let mut turn = || {
        scene.one.deliver(|host| match host {
            Host::Datagram { device, vni: 1, datagram } if device == DEVICE => {
                got.push(datagram.mad().unwrap().dest);
            }
            other => panic!("{other:?}"),
        })
    };
    assert!(!turn(), "there is more");
    while !turn() {}
    assert_eq!(got.iter().position(|dest| *dest == address(2)), Some(TURN));
    assert_eq!(got.len(), crate::cm::ROOM + 1);
}

#[test]
fn whatever_a_process_says_is_dealt_with() {
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    let gid = || (0..6u8).prop_map(address);
    let nic = || (0..4u8).prop_map(mac);
    let device = || prop_oneof![Just(DEVICE.to_owned()), Just("x".to_owned())];
    let some = || proptest::collection::vec(0..8u32, 0..6);
    let told = prop_oneof![
        (nic(), gid()).prop_map(|(nic, gid)| Told::Asked(None, Asked::Address(nic, gid))),
        (device(), gid(), 0..8u32)
            .prop_map(|(device, gid, qpn)| Told::Asked(Some(1), Asked::Peer { device, gid, qpn })),
        (nic(), gid()).prop_map(|(nic, gid)| Told::Release { nic, gid }),
        (device(), some(), some()).prop_map(|(device, new, gone)| Told::Queues {
            device,
            new,
            gone
        }),
        (nic(), gid(), gid())
            .prop_map(|(nic, from, to)| Told::Datagram(nic, Datagram::of(&mad(from, to)))),
    ];
    let steps = proptest::collection::vec(told, 0..60);
    TestRunner::default()
        .run(&steps, |steps| {
            let scene = Scene::new();
            scene.one.put(&flat(1, 1, &[]));
            scene.one.put(&flat(1, 2, &[2]));
            scene.other.put(&flat(2, 3, &[]));
            prop_assert!(claims(&scene.other, mac(3), address(5)));
            queues(&scene.other, [7], &[]);
            for told in steps {
                scene.one.take(told);
            }
            // The other network has what it had.
            prop_assert!(claims(&scene.other, mac(3), address(5)));
            prop_assert!(!claims(&scene.one, mac(1), address(5)));
            prop_assert!(!far(&scene.other, DEVICE, 7).is_others);
            let kept = scene.one.state();
            prop_assert!(kept.told <= 8 && kept.posts.values().all(|post| post.has.len() <= 6));
            Ok(())
        })
        .unwrap();
}
