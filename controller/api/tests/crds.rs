//! The definitions in `manifests/crds` are those of the source, and their rules say what they
//! should.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails")]

mod cases;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kube::CustomResourceExt as _;
use kube::core::cel::{validate_cel, validate_cel_update};
use serde_json::Value;
use vhost_rdma_cluster_api::{
    Cidr, Ipam, Quantity, RdmaIPBlock, RdmaIPBlockSpec, RdmaNetwork, RdmaNetworkSpec, RdmaNic,
    RdmaNicSpec, Rnic, Soft, block_name, check, crd, reference,
};

fn checked_in() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests/crds")
}

#[test]
fn the_manifests_are_those_of_the_source() {
    let files = crd::files().unwrap();
    for (name, text) in &files {
        let path = checked_in().join(name);
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(found == *text, "{} is not what the source says: cargo xtask crds", path.display());
    }
    let made: BTreeSet<_> = files.iter().map(|(name, _)| name.clone()).collect();
    for dir in ["base", "no-cel"] {
        for entry in std::fs::read_dir(checked_in().join(dir)).unwrap() {
            let name = format!("{dir}/{}", entry.unwrap().file_name().to_string_lossy());
            assert!(made.contains(&name), "{name} is of no kind: remove it");
        }
    }
}

#[test]
fn the_reference_is_that_of_the_source() {
    let path = checked_in().join("../../docs/API.md");
    let (found, made) = (std::fs::read_to_string(&path).unwrap(), reference::markdown().unwrap());
    assert!(found == made, "{} is not what the source says: cargo xtask crds", path.display());
    for crd in crd::all().unwrap() {
        assert!(made.contains(&format!("\n## {}\n", crd.spec.names.kind)));
    }
    for rule in messages() {
        assert!(made.contains(&format!("\nRule: {rule}.\n")), "{rule}");
    }
    assert!(made.contains("| **`pools[].name`** | string `^[a-z0-9]"), "{made}");
    let undescribed: Vec<&str> = made.lines().filter(|line| line.ends_with("|  |")).collect();
    assert!(undescribed.is_empty(), "no meaning: {undescribed:#?}");
}

/// Numbers of a schema without both ends.
fn without_ends(schema: &Value, path: &str, found: &mut Vec<String>) {
    let Value::Object(map) = schema else {
        if let Value::Array(all) = schema {
            all.iter().for_each(|one| without_ends(one, path, found));
        }
        return;
    };
    let has = |key: &str| map.contains_key(key);
    // Integers of JSON have no more than 64 bits in an API server.
    let long = map.get("format").and_then(Value::as_str) == Some("int64");
    let integer = map.get("type").and_then(Value::as_str) == Some("integer");
    let number = integer && !long && !has("enum");
    let either = has("x-kubernetes-int-or-string");
    if number && !(has("minimum") && has("maximum")) || either && !has("minimum") {
        found.push(path.to_owned());
    }
    map.iter().for_each(|(key, value)| without_ends(value, &format!("{path}.{key}"), found));
}

/// An API server stores what the schema lets through, whatever its format says; and of a kind that
/// has one object that cannot be read nothing can be watched.
#[test]
fn every_number_has_both_ends_and_those_of_an_older_schema_are_read() {
    for crd in crd::all().unwrap() {
        let mut found = Vec::new();
        let schema = &crd.spec.versions[0].schema;
        without_ends(&serde_json::to_value(schema).unwrap(), &crd.spec.names.kind, &mut found);
        assert!(found.is_empty(), "{found:#?}");
    }
    let stored = |limits: Value| -> RdmaNic {
        let spec = serde_json::json!({ "network": "blue", "limits": limits });
        let metadata = serde_json::json!({ "name": "n" });
        let nic = serde_json::json!({
            "apiVersion": "vhost-rdma.io/v1alpha1", "kind": "RdmaNic", "metadata": metadata,
            "spec": spec,
        });
        serde_json::from_value(nic).unwrap()
    };
    let limits = stored(serde_json::json!({
        "maxQps": 5_000_000_000_u64, "maxCqs": -1, "maxMrs": 7, "maxAhs": null, "maxMrBytes": -1,
        "maxGuestBytes": "9999999999999999999E",
    }))
    .spec
    .limits;
    assert_eq!(
        (limits.max_qps, limits.max_cqs, limits.max_mrs),
        (Some(u32::MAX), Some(0), Some(7))
    );
    assert_eq!((limits.max_ahs, limits.max_pds), (None, None));
    let bytes = |quantity: Option<Quantity>| quantity.unwrap().0;
    assert_eq!(bytes(limits.max_mr_bytes), 0);
    assert_eq!(bytes(limits.max_guest_bytes), i64::MAX.cast_unsigned());
}

/// Whether nothing of a pattern repeats without end.
fn is_bounded(pattern: &str) -> bool {
    pattern.starts_with('^')
        && pattern.ends_with('$')
        && !pattern.contains(['*', '+', '|'])
        && !pattern.contains(",}")
}

/// Strings of a schema that can be as long as an object.
fn endless(schema: &Value, path: &str, found: &mut Vec<String>) {
    let Value::Object(map) = schema else {
        if let Value::Array(all) = schema {
            all.iter().for_each(|one| endless(one, path, found));
        }
        return;
    };
    let bounded = map.contains_key("maxLength")
        || map.contains_key("enum")
        || map.get("pattern").and_then(Value::as_str).is_some_and(is_bounded);
    if map.get("type").and_then(Value::as_str) == Some("string") && !bounded {
        found.push(path.to_owned());
    }
    map.iter().for_each(|(key, value)| endless(value, &format!("{path}.{key}"), found));
}

#[test]
fn what_a_user_writes_is_not_as_long_as_an_object_can_be() {
    // The one kind that is not an administrator's, the controller's or an agent's.
    let crd = serde_json::to_value(RdmaNic::crd()).unwrap();
    let schema = crd.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec").unwrap();
    let mut found = Vec::new();
    endless(schema, "spec", &mut found);
    assert!(schema.to_string().contains("maxLength") && found.is_empty(), "{found:?}");
    let mut open = Vec::new();
    endless(&serde_json::json!({ "a": { "type": "string", "pattern": "^a+$" } }), "x", &mut open);
    assert_eq!(open, ["x.a"]);
}

/// Every value under a key of this name, at any depth.
fn find<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get(key));
            map.values().for_each(|v| find(v, key, found));
        }
        Value::Array(all) => all.iter().for_each(|v| find(v, key, found)),
        _ => {}
    }
}

#[test]
fn an_old_server_gets_no_rules_and_the_same_schema_otherwise() {
    let mut rules = 0;
    for kind in crd::all().unwrap() {
        let with = crd::manifest(&kind, true).unwrap();
        let without = crd::manifest(&kind, false).unwrap();
        rules += with.matches("x-kubernetes-validations").count();
        assert!(!without.contains("x-kubernetes-validations"));
        assert!(!without.contains("oldSelf"));
        let columns = |text: &str| text.matches("jsonPath").count();
        assert_eq!(columns(&with), columns(&without));
    }
    assert!(rules >= 4, "only {rules} objects have rules");
}

#[test]
fn every_kind_can_be_typed_and_watched() {
    for kind in crd::all().unwrap() {
        let names = &kind.spec.names;
        assert!(names.short_names.as_ref().is_some_and(|s| !s.is_empty()), "{}", names.kind);
        assert_eq!(names.categories.as_deref(), Some(&["vhost-rdma".to_owned()][..]));
        let version = &kind.spec.versions[0];
        assert!(
            version.subresources.as_ref().is_some_and(|s| s.status.is_some()),
            "{}",
            names.kind
        );
        let columns = version.additional_printer_columns.as_ref().unwrap();
        assert_eq!(columns.last().unwrap().name, "Age", "{}", names.kind);
    }
}

/// Structural schemas need a type everywhere, and conditions are merged by their type.
#[test]
fn conditions_are_a_map_and_no_field_is_of_any_type() {
    for kind in crd::all().unwrap() {
        let value = serde_json::to_value(&kind).unwrap();
        let mut conditions = Vec::new();
        find(&value, "conditions", &mut conditions);
        for list in conditions {
            assert_eq!(list["x-kubernetes-list-type"], "map", "{}", kind.spec.names.kind);
        }
        let mut preserved = Vec::new();
        find(&value, "x-kubernetes-preserve-unknown-fields", &mut preserved);
        assert!(preserved.is_empty(), "{}", kind.spec.names.kind);
    }
}

/// `kubectl apply -k` of 1.20 makes null of an empty text, and the API server refuses that.
#[test]
fn no_default_is_an_empty_text() {
    for crd in crd::all().unwrap() {
        let value = serde_json::to_value(&crd).unwrap();
        let mut defaults = Vec::new();
        find(&value, "default", &mut defaults);
        assert!(defaults.iter().all(|value| value.as_str() != Some("")), "{:?}", crd.metadata.name);
    }
}

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn soft() -> RdmaNetworkSpec {
    RdmaNetworkSpec { soft: Some(Soft {}), ..RdmaNetworkSpec::default() }
}

fn network(spec: RdmaNetworkSpec) -> RdmaNetwork {
    RdmaNetwork::new("blue", spec)
}

fn on(fabric: &str) -> RdmaNetworkSpec {
    let rnic = Rnic { fabric: fabric.to_owned(), ..Rnic::default() };
    RdmaNetworkSpec { rnic: Some(rnic), ..RdmaNetworkSpec::default() }
}

/// What the rules of all definitions say.
fn messages() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for crd in crd::all().unwrap() {
        let value = serde_json::to_value(&crd).unwrap();
        let mut rules = Vec::new();
        find(&value, "x-kubernetes-validations", &mut rules);
        let rules = rules.iter().flat_map(|rules| rules.as_array().unwrap());
        found.extend(rules.map(|rule| rule["message"].as_str().unwrap().to_owned()));
    }
    found
}

/// A real server is asked the same table (`cargo xtask k8s definitions`): each rule has a case that
/// it alone refuses.
#[test]
fn each_rule_has_a_case() {
    let refused: BTreeSet<String> =
        cases::all().iter().filter_map(|case| case.refused.map(str::to_owned)).collect();
    let rules = messages();
    assert!(rules.len() >= 8, "{rules:?}");
    assert!(rules.is_subset(&refused), "no case for {:?}", rules.difference(&refused));
}

/// What the library says of a case.
fn by_the_library<K>(case: &cases::Case) -> Result<(), String>
where
    K: kube::CustomResourceExt + serde::Serialize + serde::de::DeserializeOwned,
{
    let object = |spec| serde_json::from_value::<K>(case.whole(spec)).map_err(|e| e.to_string());
    let new = object(&case.spec)?;
    let result = match &case.before {
        None => validate_cel(&new),
        Some(before) => validate_cel_update(&new, &object(before)?),
    };
    result.map_err(|errors| errors.to_string())
}

#[test]
fn a_library_says_of_the_rules_what_a_server_does() {
    let rules = messages();
    for case in cases::all() {
        let by_a_rule = case.refused.is_some_and(|says| rules.contains(says));
        if case.refused.is_some() && !by_a_rule {
            continue;
        }
        let said = match case.kind {
            "RdmaNetwork" => by_the_library::<RdmaNetwork>(&case),
            "RdmaIPBlock" => by_the_library::<RdmaIPBlock>(&case),
            "RdmaNic" => by_the_library::<RdmaNic>(&case),
            _ if by_a_rule => panic!("{} has rules", case.kind),
            _ => continue,
        };
        let refusal = said.err();
        let same = match (case.refused, &refusal) {
            (None, None) => true,
            (Some(says), Some(said)) => said.contains(says),
            _ => false,
        };
        assert!(same, "{}: {}: {refusal:?}", case.kind, case.name);
    }
}

#[test]
fn a_network_has_exactly_one_backing() {
    let both = RdmaNetworkSpec { soft: Some(Soft {}), ..on("storage") };
    for (spec, valid) in
        [(soft(), true), (on("storage"), true), (both, false), (RdmaNetworkSpec::default(), false)]
    {
        assert_eq!(validate_cel(&network(spec.clone())).is_ok(), valid, "CEL: {spec:?}");
        assert_eq!(check::network("blue", &spec, None).is_empty(), valid, "check: {spec:?}");
    }
}

#[test]
fn what_a_network_is_cannot_be_changed() {
    let with = |vni| RdmaNetworkSpec { vni: Some(vni), ..soft() };
    let sized = |block_size| {
        let ipam = Ipam { cidrs: vec![cidr("10.9.0.0/16")], named: Vec::new(), block_size };
        RdmaNetworkSpec { ipam: Some(ipam), ..soft() }
    };
    for (old, new, valid) in [
        (with(7), with(7), true),
        (with(7), with(8), false),
        (with(7), soft(), false),
        (soft(), with(7), false),
        (soft(), on("storage"), false),
        (on("storage"), on("storage"), true),
        (on("storage"), on("compute"), false),
        (soft(), RdmaNetworkSpec { mtu: Some(1500), ..soft() }, true),
        (sized(64), sized(16), false),
        (sized(64), sized(64), true),
        (sized(64), soft(), true),
        (soft(), sized(16), true),
    ] {
        let result = validate_cel_update(&network(new.clone()), &network(old.clone()));
        assert_eq!(result.is_ok(), valid, "{old:?} to {new:?}");
    }
    assert!(!check::network("blue", &with(8), Some(7)).is_empty());
    assert!(check::network("blue", &with(7), Some(7)).is_empty());
}

#[test]
fn the_name_of_a_network_has_a_bound() {
    let long = "x".repeat(41);
    assert!(validate_cel(&RdmaNetwork::new(&long, soft())).is_err());
    assert!(validate_cel(&RdmaNetwork::new(&long[1..], soft())).is_ok());
    assert!(validate_cel(&RdmaNetwork::new("a.b", soft())).is_err());
    assert!(!check::network(&long, &soft(), None).is_empty());
    assert!(!check::network("a.b", &soft(), None).is_empty());
}

#[test]
fn a_block_is_bound_once() {
    let range = cidr("10.0.0.0/26");
    let bound = RdmaIPBlockSpec {
        network: "blue".to_owned(),
        network_uid: "u".to_owned(),
        cidr: range,
        node: "n1".to_owned(),
        releasing: false,
    };
    let block =
        |spec: &RdmaIPBlockSpec| RdmaIPBlock::new(&block_name("blue", &range), spec.clone());
    let other = RdmaIPBlockSpec { node: "n2".to_owned(), ..bound.clone() };
    let releasing = RdmaIPBlockSpec { releasing: true, ..bound.clone() };
    for (old, new, valid) in [
        (&bound, &bound, true),
        (&bound, &other, false),
        (&bound, &releasing, true),
        (&releasing, &bound, false),
    ] {
        assert_eq!(validate_cel_update(&block(new), &block(old)).is_ok(), valid, "{new:?}");
    }
}

#[test]
fn a_nic_stays_in_its_network() {
    let nic = |network: &str| {
        let spec = RdmaNicSpec { network: network.to_owned(), ..RdmaNicSpec::default() };
        RdmaNic::new("db", spec)
    };
    assert!(validate_cel_update(&nic("blue"), &nic("blue")).is_ok());
    assert!(validate_cel_update(&nic("red"), &nic("blue")).is_err());
}

#[test]
fn what_cel_cannot_know_the_controller_checks() {
    let ipam = |ranges: &[&str], block_size| RdmaNetworkSpec {
        ipam: Some(Ipam {
            cidrs: ranges.iter().map(|r| cidr(r)).collect(),
            named: Vec::new(),
            block_size,
        }),
        ..soft()
    };
    let mut named = ipam(&["10.0.0.0/16"], 64);
    named.ipam.as_mut().unwrap().named = vec![cidr("10.1.0.0/24")];
    assert!(check::network("blue", &named, None).is_empty());
    let nic = |address: &str, mac: &str| RdmaNicSpec {
        network: "blue".to_owned(),
        address: Some(address.to_owned()),
        mac: Some(mac.to_owned()),
        ..RdmaNicSpec::default()
    };
    assert!(check::nic(&nic("10.1.0.7", "02:00:00:00:00:01"), &named).is_empty());
    for (address, mac, says) in [
        ("10.0.0.7", "02:00:00:00:00:01", "ipam.named"),
        ("10.1.0.7", "00:00:00:00:00:00", "no MAC address"),
        ("...", "02:00:00:00:00:01", "not an IP address"),
    ] {
        let wrong = check::nic(&nic(address, mac), &named).join("; ");
        assert!(wrong.contains(says), "{wrong:?} does not say {says:?}");
    }
    let mut both = named.clone();
    both.ipam.as_mut().unwrap().named = vec![cidr("10.0.3.0/24")];
    assert!(check::network("blue", &ipam(&["10.0.0.0/16", "fd00::/64"], 64), None).is_empty());
    for (spec, says) in [
        (ipam(&["10.0.0.0/16", "10.0.1.0/24"], 64), "overlap"),
        (both, "overlap"),
        (ipam(&["10.0.0.0/16"], 48), "power of two"),
        (ipam(&[], 64), "at least one range"),
        (RdmaNetworkSpec { allow: vec![cidr("192.0.2.0/24")], ..soft() }, "allow"),
    ] {
        let wrong = check::network("blue", &spec, None).join("; ");
        assert!(wrong.contains(says), "{wrong:?} does not say {says:?}");
    }
}

/// What a schema lets through an API server stores, and of a kind that has one object that cannot
/// be read nothing can be watched.
#[test]
fn every_range_that_the_schema_takes_is_read() {
    let crd = serde_json::to_value(RdmaNetwork::crd()).unwrap();
    let pattern = crd
        .pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties")
        .and_then(|properties| properties.pointer("/allow/items/pattern"))
        .and_then(Value::as_str)
        .unwrap();
    let pattern = regex::Regex::new(pattern).unwrap();
    let taken = [
        "10.0.0.0/16",
        "0.0.0.0/0",
        "255.255.255.255/32",
        "::/0",
        "::1/128",
        "fd00::/48",
        "1:2:3:4:5:6:7:8/128",
        "1::8/127",
        "1:2:3:4:5:6:7::/112",
        "::2:3:4:5:6:7:8/128",
        "fd00:0:0:1::/64",
        "::ffff:10.0.0.0/120",
        "FD00::A/128",
        // What is behind the prefix no pattern can see.
        "10.0.0.1/16",
        "fd00::1/48",
    ];
    for text in taken {
        assert!(pattern.is_match(text), "{text}");
        let read: Result<Cidr, _> = serde_json::from_value(text.into());
        assert!(read.is_ok(), "{text}: {read:?}");
    }
    let refused = [
        "10.0.0.0",
        "10.0.0/16",
        "10.0.0.256/32",
        "10.0.0.0/33",
        "10.0.0.0/016",
        "01.0.0.0/8",
        "::/129",
        "1:2/64",
        "1:2:3:4:5:6:7:8:9/64",
        "1::2::3/64",
        "1:2:3:4:5:6:7:8::/64",
        "12345::/16",
        ":/8",
        "::/",
        "10.0.0.0/8 ",
        "::ffff:10.0.0.256/120",
    ];
    for text in refused {
        assert!(!pattern.is_match(text), "{text}");
    }
}

/// Texts of which many are nearly ranges.
const RANGE_LIKE: &str = "([0-9a-f]{1,3}[:.]){0,8}(:[0-9a-f]{1,3}){0,7}:{0,2}/[0-9]{1,3}";

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig {
        failure_persistence: None,
        ..proptest::prelude::ProptestConfig::default()
    })]

    #[test]
    fn whatever_range_the_schema_takes_is_read(text in RANGE_LIKE) {
        let schema = serde_json::to_value(schemars::schema_for!(Cidr)).unwrap();
        let pattern = regex::Regex::new(schema["pattern"].as_str().unwrap()).unwrap();
        if pattern.is_match(&text) {
            let read: Result<Cidr, _> = serde_json::from_value(text.clone().into());
            proptest::prop_assert!(read.is_ok(), "{text}: {read:?}");
        }
    }
}

#[test]
fn a_mac_address_is_that_of_one_station() {
    assert!(crd::manifest(&RdmaNic::crd(), false).unwrap().contains("[02468ace]"));
}
