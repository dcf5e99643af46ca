//! The rtnetlink client against the kernel, in namespaces of its own. Needs root: without it the
//! tests fail, they do not skip.

#![allow(clippy::expect_used, clippy::unwrap_used)] // A test fails where it stands.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use rdma_netlink::link::{Links, NewAddress, NewRoute, Tap, Veth};
use rdma_netlink::{HardwareAddress, Netns};

fn mac(text: &str) -> HardwareAddress {
    text.parse().expect("a MAC address")
}

#[test]
fn a_veth_pair_with_addresses_and_routes() {
    let (host, pod) = (Netns::create().unwrap(), Netns::create().unwrap());
    assert_ne!(host, pod);
    let (mut outside, mut inside) = (Links::open_in(&host).unwrap(), Links::open_in(&pod).unwrap());
    let inner = mac("02:00:00:00:00:07");
    let veth = Veth {
        name: "veth7",
        peer: "eth0",
        peer_netns: Some(&pod),
        peer_address: Some(&inner),
        mtu: Some(1400),
    };
    outside.add_veth(&veth).unwrap();
    assert!(outside.add_veth(&veth).unwrap_err().is_exists());
    outside.add_bridge("br0").unwrap();
    let (near, bridge) = (outside.by_name("veth7").unwrap(), outside.by_name("br0").unwrap());
    assert_eq!(bridge.driver_kind.as_deref(), Some("bridge"));
    outside.set_master(near.index, Some(bridge.index)).unwrap();
    outside.set_up(near.index, true).unwrap();
    outside.set_up(bridge.index, true).unwrap();
    assert_eq!(outside.by_index(near.index).unwrap().master, Some(bridge.index));
    outside.set_master(near.index, None).unwrap();
    assert_eq!(outside.by_index(near.index).unwrap().master, None);

    let eth = inside.by_name("eth0").unwrap();
    assert_eq!((eth.address, eth.mtu, eth.up), (Some(inner), 1400, false));
    inside.set_up(eth.index, true).unwrap();
    let new = NewAddress { prefix: "10.8.0.7/24".parse().unwrap(), no_dad: false };
    inside.add_address(eth.index, &new).unwrap();
    assert!(inside.add_address(eth.index, &new).unwrap_err().is_exists());
    let six = NewAddress { prefix: "fd00::7/64".parse().unwrap(), no_dad: true };
    inside.add_address(eth.index, &six).unwrap();
    let found = inside.addresses(Some(eth.index)).unwrap();
    assert!(found.iter().any(|address| address.prefix == new.prefix));
    assert!(found.iter().any(|address| address.prefix == six.prefix && !address.tentative));

    let default =
        NewRoute::via("0.0.0.0/0".parse().unwrap(), "10.8.0.1".parse().unwrap(), eth.index);
    inside.add_route(&default).unwrap();
    assert!(inside.add_route(&default).unwrap_err().is_exists());
    let lan = NewRoute::on_link("192.0.2.0/24".parse().unwrap(), eth.index);
    inside.add_route(&lan).unwrap();
    let v6 = NewRoute::via("2001:db8::/32".parse().unwrap(), "fd00::1".parse().unwrap(), eth.index);
    inside.add_route(&v6).unwrap();
    let routes = inside.routes().unwrap();
    for wanted in [default, lan, v6] {
        assert!(
            routes.iter().any(|route| route.destination == wanted.destination
                && route.gateway == wanted.gateway
                && route.index == Some(eth.index)),
            "{wanted:?} in {routes:?}"
        );
    }
    inside.delete_route(&default).unwrap();
    assert!(inside.delete_route(&default).unwrap_err().is_not_found());
    inside.delete_address(eth.index, new.prefix).unwrap();
    assert!(inside.delete_address(eth.index, new.prefix).unwrap_err().is_not_found());

    outside.delete(near.index).unwrap();
    assert!(inside.by_name("eth0").unwrap_err().is_not_found());
}

#[test]
fn an_interface_moves_between_namespaces_under_another_name() {
    let (here, there) = (Netns::create().unwrap(), Netns::create().unwrap());
    let (mut near, mut far) = (Links::open_in(&here).unwrap(), Links::open_in(&there).unwrap());
    near.add_veth(&Veth { name: "d0", peer: "d1", ..Veth::default() }).unwrap();
    far.add_bridge("taken").unwrap();
    let link = near.by_name("d0").unwrap();
    near.set_alias(link.index, "pod 7").unwrap();
    near.set_address(link.index, &mac("02:00:00:00:00:08")).unwrap();
    near.set_mtu(link.index, 9000).unwrap();
    assert!(near.move_to(link.index, &there, Some("taken")).unwrap_err().is_exists());
    assert_eq!(near.by_name("d0").unwrap().alias.as_deref(), Some("pod 7"));
    near.move_to(link.index, &there, Some("net1")).unwrap();
    assert!(near.by_name("d0").unwrap_err().is_not_found());
    let moved = far.by_name("net1").unwrap();
    assert_eq!((moved.mtu, moved.address), (9000, Some(mac("02:00:00:00:00:08"))));
    far.rename(moved.index, "net2").unwrap();
    assert_eq!(far.by_index(moved.index).unwrap().name, "net2");
    let names: Vec<_> = far.list().unwrap().into_iter().map(|link| link.name).collect();
    assert!(
        names.iter().any(|name| name == "net2") && names.iter().any(|name| name == "lo"),
        "{names:?}"
    );
    for name in ["", ".", "..", "a/b", "a b", "sixteen-letters-"] {
        assert!(far.by_name(name).is_err(), "{name:?}");
    }
}

/// As many as the kernel takes fill a message of 64 KiB: they do not hide the interface, nor the
/// others of its namespace.
#[test]
fn other_names_are_listed_and_taken_away() {
    let (here, there) = (Netns::create().unwrap(), Netns::create().unwrap());
    let mut near = Links::open_in(&here).unwrap();
    near.add_veth(&Veth { name: "d0", peer: "d1", ..Veth::default() }).unwrap();
    let index = near.by_name("d0").unwrap().index;
    let other = near.by_name("d1").unwrap().index;
    let odd = OsStr::from_bytes(b"\xff\xfe");
    for name in [OsStr::new("other"), odd] {
        near.add_altname(index, name).unwrap();
        assert!(near.add_altname(other, name).unwrap_err().is_exists());
    }
    assert!(near.rename(other, "other").unwrap_err().is_exists());
    assert_eq!(near.by_name("other").unwrap().name, "d0");
    assert_eq!(near.by_index(index).unwrap().altnames, [OsStr::new("other"), odd]);
    for name in [OsStr::new(""), OsStr::new("a\0b"), OsStr::new(&"x".repeat(128))] {
        assert!(near.add_altname(index, name).is_err(), "{name:?}");
    }
    let filled = (0..).find(|n| near.add_altname(index, OsStr::new(&format!("{n:0127}"))).is_err());
    assert!(filled.unwrap() > 400, "{filled:?}");
    let names = |links: &mut Links| {
        let listed = links.list().unwrap();
        assert!(listed.iter().any(|link| link.name == "d1"));
        listed.into_iter().find(|link| link.name == "d0").unwrap().altnames
    };
    assert_eq!(names(&mut near).len(), filled.unwrap() + 2);
    let link = near.by_name("d0").unwrap();
    for name in &link.altnames {
        near.delete_altname(index, name).unwrap();
        assert!(near.delete_altname(index, name).unwrap_err().is_not_found());
    }
    assert!(names(&mut near).is_empty());
    // One that is taken elsewhere is in the way there.
    near.add_altname(index, OsStr::new("taken")).unwrap();
    Links::open_in(&there).unwrap().add_bridge("taken").unwrap();
    assert!(near.move_to(index, &there, Some("d9")).unwrap_err().is_exists());
}

#[test]
fn a_tap_belongs_to_a_user_and_outlives_its_maker() {
    let netns = Netns::create().unwrap();
    let tap = Tap {
        name: "tap7",
        netns: Some(&netns),
        owner: Some(1000),
        group: Some(1001),
        multi_queue: false,
    };
    tap.create().unwrap();
    assert!(tap.create().is_err());
    let mut links = Links::open_in(&netns).unwrap();
    let link = links.by_name("tap7").unwrap();
    assert_eq!(link.driver_kind.as_deref(), Some("tun"));
    links.set_address(link.index, &mac("02:00:00:00:00:09")).unwrap();
    links.delete(link.index).unwrap();
    assert!(links.by_name("tap7").unwrap_err().is_not_found());
}

#[test]
fn what_is_no_namespace_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(Netns::from_path(file.path()).is_err());
    assert!(Netns::from_path("/proc/self/ns/uts").is_err());
    assert!(Netns::from_path("/nonexistent").unwrap_err().is_not_found());
    assert_eq!(Netns::current().unwrap(), Netns::from_pid(std::process::id()).unwrap());
}
