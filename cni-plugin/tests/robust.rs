//! Whatever comes on stdin and in the environment of the plugin: one document with a code, or
//! success with what success prints; no panic, no change of the host. The agent's socket leads
//! nowhere and the namespace is no pod's, so nothing here may succeed but removal.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used)]

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use cni_skel::{Environment, run_with};
use proptest::prelude::*;
use serde_json::{Value, json};
use vhost_rdma_cni::{Host, VhostRdma};

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        ".{0,10}".prop_map(Value::from),
        prop::sample::select(vec![
            "0.4.0",
            "1.0.0",
            "1.1.0",
            "10.0.0.1/8",
            "02:00:00:00:00:01",
            "/x",
            "..",
            "/"
        ])
        .prop_map(Value::from),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(3, 24, 4, |inner| {
        let key = prop_oneof![
            ".{0,5}",
            prop::sample::select(vec![
                "cniVersion",
                "interfaces",
                "ips",
                "address",
                "interface",
                "mac",
                "deviceID",
                "CNIDeviceInfoFile",
                "type",
                "containerID",
                "ifname"
            ])
            .prop_map(str::to_owned),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn document() -> impl Strategy<Value = Vec<u8>> {
    let key = prop::sample::select(vec![
        "cniVersion",
        "name",
        "deviceID",
        "runtimeConfig",
        "prevResult",
        "cni.dev/valid-attachments",
        "dns",
        "args",
        "agentSocket",
    ]);
    let near = prop::collection::vec((key, value()), 0..4).prop_map(|fields| {
        let mut document = json!({"cniVersion": "1.1.0", "name": "net", "type": "vhost-rdma"});
        for (key, value) in fields {
            document[key] = value;
        }
        document.to_string().into_bytes()
    });
    prop_oneof![9 => near, 1 => prop::collection::vec(any::<u8>(), 0..100)]
}

fn variable(usual: &'static [&'static str]) -> impl Strategy<Value = Option<OsString>> {
    prop_oneof![
        1 => Just(None),
        8 => prop::sample::select(usual).prop_map(|value| Some(OsString::from(value))),
        1 => prop::collection::vec(1..=255u8, 0..12)
            .prop_map(|bytes| Some(OsString::from_vec(bytes))),
    ]
}

proptest! {
    #![proptest_config(
        ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() }
    )]

    #[test]
    fn every_call_has_its_answer(
        command in variable(&["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"]),
        container in variable(&["fuzz-1"]),
        netns in variable(&["/nonexistent/netns", "/proc/self/ns/uts", ""]),
        ifname in variable(&["eth0"]),
        args in variable(&["K8S_POD_NAMESPACE=a;K8S_POD_NAME=b", "", "x=y", "IgnoreUnknown=1;x=y"]),
        input in document(),
    ) {
        let names = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"];
        let values = [command.clone(), container, netns, ifname, args];
        let mut environment: Vec<(OsString, OsString)> =
            names.iter().zip(values)
                .filter_map(|(name, value)| Some(((*name).into(), value?)))
                .collect();
        environment.push(("CNI_PATH".into(), "/nonexistent/bin".into()));
        let environment: Environment = environment.into_iter().collect();
        let mut out = Vec::new();
        // The default is an agent that may be real.
        let host = Host { agent: "/nonexistent/agent.sock".into(), ..Host::default() };
        let status = run_with(&VhostRdma { host }, &environment, &mut input.as_slice(), &mut out);
        if status == 0 {
            let command = command.unwrap_or_default();
            prop_assert!(
                command == "DEL" || command == "VERSION" || command == "ADD",
                "{command:?}"
            );
            prop_assert_eq!(out.is_empty(), command == "DEL");
        } else {
            let document: Value = serde_json::from_slice(&out).unwrap();
            let code = document["code"].as_u64().unwrap();
            // 999 would be a panic that was caught.
            prop_assert!([1, 2, 3, 4, 6, 7, 11, 50].contains(&code), "{}", document);
        }
    }
}
