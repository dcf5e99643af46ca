//! The registry's rules, each by a request that keeps it and one that breaks it.

use std::path::PathBuf;

use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::{NicPatch, NicSpec, Registry, SOCKET_PATH_MAX};
use crate::node::{Error, Guests, LimitsPatch, MacAddr, NicLimits, VNI_MAX};

fn registry() -> Registry {
    Registry::new(PathBuf::from("/run/vhost-rdma/nics"))
}

fn counter() -> impl FnMut() -> [u8; 6] {
    let mut next = 0_u8;
    move || {
        next = next.wrapping_add(1);
        [0xff, 0, 0, 0, 0, next]
    }
}

fn spec(name: &str) -> NicSpec {
    NicSpec { name: name.to_owned(), ..NicSpec::default() }
}

fn add(registry: &mut Registry, spec: NicSpec) -> Result<(), Error> {
    registry.add_nic(spec, counter()).map(|_| ())
}

#[test]
fn a_fresh_registry_has_the_default_network_and_it_stays() {
    let mut registry = registry();
    assert_eq!(registry.network("default").map(|n| n.vni).ok(), Some(1));
    assert!(matches!(registry.remove_network("default"), Err(Error::DefaultNetwork)));
}

#[test]
fn vnis_are_unique_in_range_and_go_round_by_default() {
    let mut registry = registry();
    assert!(matches!(registry.add_network("a", Some(0), false), Err(Error::BadVni { vni: 0 })));
    assert!(matches!(
        registry.add_network("a", Some(VNI_MAX + 1), false),
        Err(Error::BadVni { .. })
    ));
    assert!(matches!(
        registry.add_network("a", Some(1), false),
        Err(Error::VniTaken { vni: 1, .. })
    ));
    assert_eq!(registry.add_network("a", Some(VNI_MAX), false).unwrap().vni, VNI_MAX);
    assert_eq!(registry.add_network("b", None, false).unwrap().vni, 2);
    assert!(matches!(registry.add_network("b", None, false), Err(Error::NameTaken { .. })));
    registry.remove_network("b").unwrap();
    assert_eq!(registry.add_network("b", None, false).unwrap().vni, 3, "2 rests");
    // Over a restart too.
    let mut again = self::registry();
    again.restore(registry.save()).unwrap();
    again.remove_network("b").unwrap();
    assert_eq!(again.add_network("c", None, false).unwrap().vni, 4);
    // And at the end it goes round.
    again.last_vni = VNI_MAX - 1;
    assert_eq!(again.add_network("d", None, false).unwrap().vni, 2, "the greatest is taken");
}

#[test]
fn a_network_goes_only_when_it_is_empty() {
    let mut registry = registry();
    registry.add_network("blue", None, false).unwrap();
    add(&mut registry, NicSpec { network: Some("blue".to_owned()), ..spec("n1") }).unwrap();
    let refused = registry.remove_network("blue").unwrap_err();
    assert!(
        matches!(&refused, Error::NetworkNotEmpty { count: 1, nics, .. } if nics == &["n1"]),
        "{refused}"
    );
    registry.remove_nic("n1").unwrap();
    registry.remove_network("blue").unwrap();
    assert!(matches!(registry.network("blue"), Err(Error::NoSuchNetwork { .. })));
}

#[test]
fn made_up_macs_are_local_and_distinct_even_if_the_source_repeats_itself() {
    let mut registry = registry();
    for name in ["a", "b", "c"] {
        add(&mut registry, spec(name)).unwrap();
    }
    let macs: Vec<MacAddr> = registry.nics().map(|nic| nic.mac).collect();
    assert_eq!(macs.len(), 3);
    assert!(macs.iter().all(|mac| mac.octets()[0] & 3 == 2));
    assert!(macs[0] != macs[1] && macs[1] != macs[2] && macs[0] != macs[2]);
    assert!(matches!(
        registry.add_nic(spec("d"), || [0xff, 0, 0, 0, 0, 1]),
        Err(Error::MacTaken { .. })
    ));
}

#[test]
fn macs_and_addresses_are_unique_in_a_network_only() {
    let mut registry = registry();
    registry.add_network("blue", None, false).unwrap();
    let mac = "02:00:00:00:00:01".parse().ok();
    let addresses = vec!["10.0.0.5".parse().unwrap()];
    add(&mut registry, NicSpec { mac, addresses: addresses.clone(), ..spec("a") }).unwrap();
    assert!(matches!(
        add(&mut registry, NicSpec { mac, ..spec("b") }),
        Err(Error::MacTaken { .. })
    ));
    assert!(matches!(
        add(&mut registry, NicSpec { addresses: addresses.clone(), ..spec("b") }),
        Err(Error::AddressTaken { .. })
    ));
    add(&mut registry, NicSpec { mac, addresses, network: Some("blue".to_owned()), ..spec("b") })
        .unwrap();
}

#[test]
fn addresses_that_no_nic_can_have_are_refused() {
    let mut registry = registry();
    for text in [
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "127.0.0.1",
        "::1",
        "255.255.255.255",
        "::ffff:10.0.0.1",
    ] {
        let addresses = vec![text.parse().unwrap()];
        assert!(
            matches!(
                add(&mut registry, NicSpec { addresses, ..spec("a") }),
                Err(Error::BadAddress { .. })
            ),
            "{text}"
        );
    }
    let twice = vec!["10.0.0.1".parse().unwrap(); 2];
    assert!(matches!(
        add(&mut registry, NicSpec { addresses: twice, ..spec("a") }),
        Err(Error::BadAddress { .. })
    ));
    assert_eq!(registry.nics().count(), 0);
}

#[test]
fn the_socket_path_fits_sun_path_to_the_byte() {
    let tail = "/a/vhost.sock".len();
    let mut fits =
        Registry::new(PathBuf::from(format!("/{}", "d".repeat(SOCKET_PATH_MAX - tail - 1))));
    let nic =
        fits.clone().add_nic(spec("a"), counter()).map(|nic| nic.socket.as_os_str().len()).ok();
    assert_eq!(nic, Some(SOCKET_PATH_MAX));
    assert!(matches!(
        fits.add_nic(spec("ab"), counter()),
        Err(Error::PathTooLong { length: 108, .. })
    ));
}

#[test]
fn an_unknown_nic_gets_names_that_were_meant() {
    let mut registry = registry();
    add(&mut registry, spec("storage-1")).unwrap();
    let text = registry.nic("storage1").unwrap_err().to_string();
    assert!(text.contains("did you mean \"storage-1\"?"), "{text}");
}

#[test]
fn an_update_changes_what_it_names_and_a_refused_one_nothing() {
    let mut registry = registry();
    add(&mut registry, spec("a")).unwrap();
    let before = registry.nic("a").unwrap().clone();
    let limits = LimitsPatch { max_qps: Some(7), ..LimitsPatch::default() };
    let after = registry
        .update_nic("a", NicPatch { limits, mode: Some(0o600), ..NicPatch::default() })
        .unwrap()
        .clone();
    assert_eq!(after.limits, NicLimits { max_qps: 7, ..before.limits });
    assert_eq!((after.access.mode, after.mac), (0o600, before.mac));
    let zero = LimitsPatch { max_cqs: Some(0), max_qps: Some(9), ..LimitsPatch::default() };
    let refused = registry.update_nic("a", NicPatch { limits: zero, ..NicPatch::default() });
    assert!(matches!(refused, Err(Error::ZeroLimit { field: "max_cqs" })));
    assert!(matches!(
        registry.update_nic("a", NicPatch { mode: Some(0o1000), ..NicPatch::default() }),
        Err(Error::BadMode { .. })
    ));
    assert_eq!(registry.nic("a").unwrap(), &after);
}

#[test]
fn saved_state_comes_back_the_same_and_moves_with_the_directory() {
    let mut registry = registry();
    registry.add_network("blue", Some(77), false).unwrap();
    add(&mut registry, NicSpec { network: Some("blue".to_owned()), ..spec("a") }).unwrap();
    add(&mut registry, NicSpec { guests: Guests::Process, ..spec("p") }).unwrap();
    let text = serde_json::to_string(&registry.save()).unwrap();
    let mut other = Registry::new(PathBuf::from("/elsewhere"));
    other.restore(serde_json::from_str(&text).unwrap()).unwrap();
    let (old, new) = (registry.nic("a").unwrap(), other.nic("a").unwrap());
    assert_eq!((old.mac, old.vni, &old.limits), (new.mac, new.vni, &new.limits));
    assert_eq!(new.socket, PathBuf::from("/elsewhere/a/vhost.sock"));
    let (old, new) = (registry.nic("p").unwrap(), other.nic("p").unwrap());
    assert_eq!(new.socket, PathBuf::from("/elsewhere/p/process.sock"));
    assert_eq!(old.socket.file_name(), new.socket.file_name());
    assert_eq!(other.network("blue").unwrap().vni, 77);
}

/// Over networks, over a restart, and after its end.
#[test]
fn a_nics_number_is_no_others_on_the_host() {
    let mut registry = registry();
    registry.add_network("blue", None, false).unwrap();
    let number = |registry: &Registry, name: &str| registry.nic(name).unwrap().number;
    for (name, network) in [("a", "default"), ("b", "blue"), ("c", "default")] {
        add(&mut registry, NicSpec { network: Some(network.to_owned()), ..spec(name) }).unwrap();
    }
    assert_eq!(["a", "b", "c"].map(|name| number(&registry, name)), [1, 2, 3]);
    registry.remove_nic("c").unwrap();
    let mut again = self::registry();
    again.restore(registry.save()).unwrap();
    assert_eq!(["a", "b"].map(|name| number(&again, name)), [1, 2]);
    add(&mut again, spec("c")).unwrap();
    assert_eq!(number(&again, "c"), 4, "3 was another's");
    // One that takes the place of one that was, and is none of those that are.
    add(&mut again, NicSpec { number: Some(9), ..spec("d") }).unwrap();
    add(&mut again, NicSpec { number: Some(2), ..spec("e") }).unwrap();
    add(&mut again, NicSpec { number: Some(0), ..spec("f") }).unwrap();
    assert_eq!(["d", "e", "f"].map(|name| number(&again, name)), [9, 10, 11]);
    // Of an earlier build, which gave none.
    let mut saved = again.save();
    saved.last_number = 0;
    saved.nics.iter_mut().for_each(|nic| nic.number = 0);
    let mut newer = self::registry();
    newer.restore(saved).unwrap();
    let numbers: std::collections::BTreeSet<u32> = newer.nics().map(|nic| nic.number).collect();
    assert_eq!(numbers.len(), 6);
    assert!(!numbers.contains(&0));
    // And where there are no more, one that is free.
    newer.last_number = u32::MAX;
    let free = newer.remove_nic("a").unwrap().number;
    add(&mut newer, spec("g")).unwrap();
    assert_eq!(number(&newer, "g"), free);
}

#[test]
fn saved_state_that_breaks_a_rule_is_refused() {
    let mut registry = registry();
    add(&mut registry, spec("a")).unwrap();
    let mut saved = registry.save();
    saved.nics[0].network = "gone".to_owned();
    assert!(matches!(
        Registry::new(PathBuf::from("/x")).restore(saved),
        Err(Error::NoSuchNetwork { .. })
    ));
}

#[derive(Debug, Clone)]
enum Step {
    AddNetwork(u8, Option<u32>),
    RemoveNetwork(u8),
    AddNic(u8, u8, Option<u8>),
    RemoveNic(u8),
    SetAddress(u8, u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..4_u8, proptest::option::of(0..5_u32)).prop_map(|(n, vni)| Step::AddNetwork(n, vni)),
        (0..4_u8).prop_map(Step::RemoveNetwork),
        (0..8_u8, 0..4_u8, proptest::option::of(0..3_u8))
            .prop_map(|(n, net, ip)| Step::AddNic(n, net, ip)),
        (0..8_u8).prop_map(Step::RemoveNic),
        (0..8_u8, any::<u8>()).prop_map(|(n, ip)| Step::SetAddress(n, ip % 3)),
    ]
}

proptest! {
    #[test]
    fn no_sequence_of_requests_breaks_a_rule(steps in proptest::collection::vec(step(), 0..60)) {
        let mut registry = registry();
        let mut random = counter();
        let ip = |n: u8| format!("10.0.0.{}", n + 1).parse().unwrap();
        for step in steps {
            // Refusals are part of the model: what matters is the state that is left.
            let _ = match step {
                Step::AddNetwork(n, vni) => {
                    registry.add_network(&format!("net{n}"), vni, false).map(|_| ())
                }
                Step::RemoveNetwork(n) => registry.remove_network(&format!("net{n}")).map(|_| ()),
                Step::AddNic(n, net, address) => registry
                    .add_nic(
                        NicSpec {
                            network: Some(format!("net{net}")),
                            addresses: address.map(ip).into_iter().collect(),
                            ..spec(&format!("nic{n}"))
                        },
                        &mut random,
                    )
                    .map(|_| ()),
                Step::RemoveNic(n) => registry.remove_nic(&format!("nic{n}")).map(|_| ()),
                Step::SetAddress(n, address) => registry
                    .update_nic(
                        &format!("nic{n}"),
                        NicPatch { addresses: Some(vec![ip(address)]), ..NicPatch::default() }
                    )
                    .map(|_| ()),
            };
        }
        let nics: Vec<_> = registry.nics().cloned().collect();
        for (i, nic) in nics.iter().enumerate() {
            prop_assert_eq!(registry.network(&nic.network).unwrap().vni, nic.vni);
            for other in &nics[i + 1..] {
                if other.vni == nic.vni {
                    prop_assert!(other.mac != nic.mac);
                    prop_assert!(!nic.addresses.iter().any(|a| other.addresses.contains(a)));
                }
            }
        }
        let mut vnis: Vec<u32> = registry.networks().map(|n| n.vni).collect();
        vnis.sort_unstable();
        vnis.dedup();
        prop_assert_eq!(vnis.len(), registry.networks().count());
        let mut copy = self::registry();
        prop_assert!(copy.restore(registry.save()).is_ok());
        prop_assert_eq!(copy.save().nics, registry.save().nics);
    }
}
