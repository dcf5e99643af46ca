//! Whatever comes on stdin and in the environment: no panic, and an exit status with exactly the
//! document that it promises.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use cni_skel::{
    AddResult, Answer, Args, Attachment, Environment, Error, Network, Plugin, Version, run_with,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Reads everything that a plugin can read.
struct Nosy;

impl Plugin for Nosy {
    fn add(&self, network: &Network, attachment: &Attachment) -> Result<Answer, Error> {
        attachment.args.only(&[])?;
        network.config.own::<serde_json::Map<String, Value>>()?;
        network.config.ipam_kind()?;
        let result = network.config.prev_result(network.version)?.unwrap_or_default();
        for version in Version::ALL {
            let again = AddResult::from_json(&result.to_json(*version), *version)?;
            assert_eq!(again.to_json(*version), result.to_json(*version));
        }
        Ok(result.into())
    }
    fn del(&self, network: &Network, attachment: &Attachment) -> Result<(), Error> {
        self.add(network, attachment).map(drop)
    }
    fn check(&self, network: &Network, attachment: &Attachment) -> Result<(), Error> {
        self.add(network, attachment).map(drop)
    }
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        prop_oneof![
            Just("10.0.0.1/8"),
            Just("fd00::/64"),
            Just("1.0.0"),
            Just("0.4.0"),
            Just("10.0.0.1")
        ]
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, |inner| {
        let key = prop_oneof![
            ".{0,6}",
            prop::sample::select(vec![
                "cniVersion",
                "name",
                "mac",
                "mtu",
                "sandbox",
                "socketPath",
                "pciID",
                "address",
                "gateway",
                "interface",
                "version",
                "dst",
                "gw",
                "priority",
                "interfaces",
                "ips",
                "routes",
                "dns",
                "nameservers",
                "type",
                "containerID",
                "ifname",
                "deviceID",
                "CNIDeviceInfoFile",
            ])
            .prop_map(str::to_owned),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn document() -> impl Strategy<Value = Vec<u8>> {
    let keys = prop::sample::subsequence(
        vec![
            "cniVersion",
            "name",
            "type",
            "args",
            "runtimeConfig",
            "ipam",
            "dns",
            "prevResult",
            "cni.dev/valid-attachments",
            "capabilities",
        ],
        0..10,
    );
    let near = (keys, prop::collection::vec(value(), 10), prop::bool::weighted(0.8)).prop_map(
        |(keys, values, sane)| {
            let mut document = json!({});
            if sane {
                document = json!({"cniVersion": "1.1.0", "name": "net", "type": "nosy"});
            }
            for (key, value) in keys.iter().zip(values).skip(if sane { 3 } else { 0 }) {
                document[*key] = value;
            }
            document.to_string().into_bytes()
        },
    );
    prop_oneof![
        8 => near, 1 => prop::collection::vec(any::<u8>(), 0..200),
        1 => value().prop_map(|v| v.to_string().into_bytes())
    ]
}

fn variable(usual: &'static [&'static str]) -> impl Strategy<Value = Option<OsString>> {
    prop_oneof![
        1 => Just(None),
        6 => prop::sample::select(usual).prop_map(|value| Some(OsString::from(value))),
        1 => prop::collection::vec(1..=255u8, 0..20)
            .prop_map(|bytes| Some(OsString::from_vec(bytes))),
    ]
}

proptest! {
    #![proptest_config(
        ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() }
    )]

    #[test]
    fn every_call_has_its_answer(
        command in variable(&["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"]),
        container in variable(&["c1", "", "_"]),
        netns in variable(&["/run/netns/x", "/proc/self/ns/net", ""]),
        ifname in variable(&["eth0", "a/b", ""]),
        args in variable(&["", "K8S_POD_NAME=a", "IgnoreUnknown=1;x=y", ";;=", "a=1;a=2"]),
        path in variable(&["", ":", "/opt:/bin"]),
        input in document(),
    ) {
        let names = [
            "CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH"
        ];
        let values = [command.clone(), container, netns, ifname, args, path];
        let environment: Environment =
            names.into_iter().zip(values)
                .filter_map(|(name, value)| Some((name, value?)))
                .collect();
        let mut out = Vec::new();
        let status = run_with(&Nosy, &environment, &mut input.as_slice(), &mut out);
        let answers = command.as_deref().is_some_and(|c| c == "ADD" || c == "VERSION");
        if status == 0 && !answers {
            prop_assert!(out.is_empty());
        } else {
            let document: Value = serde_json::from_slice(&out).unwrap();
            prop_assert!(document["cniVersion"].is_string());
            if status == 0 {
                prop_assert!(document["code"].is_null());
            } else {
                prop_assert_eq!(status, 1);
                let code = document["code"].as_u64().unwrap();
                // 999 would be a panic caught.
                prop_assert!([1, 4, 6, 7, 8].contains(&code), "{}", document);
                prop_assert!(!document["msg"].as_str().unwrap().is_empty());
            }
        }
    }

    #[test]
    fn args_read_what_they_show(
        pairs in prop::collection::btree_map("[A-Za-z_]{1,8}", "[^;\\x00]{0,8}", 0..6),
    ) {
        let text: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let args = Args::parse(&text.join(";")).unwrap();
        for (key, value) in &pairs {
            prop_assert_eq!(args.get(key), Some(value.as_str()).filter(|value| !value.is_empty()));
        }
        prop_assert_eq!(Args::parse_lossy(&text.join(";")), args);
    }
}
