//! How Multus calls the plugin, replayed: recordings of what libcni does with what Multus hands it
//! (`multus/README.md` says how they were made, and that the Multus program itself did not run).

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lab;

use lab::{FakeAgent, Lab, Pod, answer, files_in, vhost_user};
use serde::Deserialize;
use serde_json::{Value, json};

/// What stands in the recordings for things that each replay has of its own.
const NETNS: &str = "/var/run/netns/cni-3f1f9a52-0d5e-4f5a-8a52-6f2f3d1d7e90";
const SOCKET: &str = "/run/vhost-rdma-agent/agent.sock";
const DEVICE_INFO: &str = "/var/run/k8s.cni.cncf.io/devinfo/cni";

#[derive(Deserialize)]
struct Call {
    environment: std::collections::BTreeMap<String, String>,
    stdin: String,
}

fn recorded(text: &str) -> Vec<Call> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn replay(recording: &str) {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let agent = FakeAgent::start(
        &lab.socket(),
        vec![vhost_user("blue-0", "rdma0", "vmtap"), vhost_user("blue-1", "rdma1", "t1")],
    );
    let infos = lab.device_info();
    std::fs::create_dir(&infos).unwrap();
    let own = |text: &str| {
        text.replace(NETNS, &pod.path)
            .replace(SOCKET, lab.socket().to_str().unwrap())
            .replace(DEVICE_INFO, infos.to_str().unwrap())
    };
    let mut result = Value::Null;
    let mut commands = Vec::new();
    for call in recorded(recording) {
        let mut environment = call.environment;
        environment.values_mut().for_each(|value| *value = own(value));
        environment.insert("CNI_PATH".to_owned(), lab.dir.path().to_str().unwrap().to_owned());
        let mut stdin: Value = serde_json::from_str(&own(&call.stdin)).unwrap();
        // The recording plugin answered with an interface that there was not; what libcni keeps is
        // the answer of whom it called.
        if let Some(previous) = stdin.get_mut("prevResult") {
            *previous = result.clone();
        }
        let command = environment["CNI_COMMAND"].clone();
        let info = stdin["runtimeConfig"]["CNIDeviceInfoFile"].as_str().unwrap().to_owned();
        if command == "ADD" {
            // CmdAdd copies the device plugin's file there before it calls
            // (CopyDeviceInfoForCNIFromDP).
            std::fs::write(&info, r#"{"type":"vhost-user","version":"1.1.0"}"#).unwrap();
        }
        let variables: Vec<(&str, &str)> =
            environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let document = answer(lab.start(&variables, stdin.to_string().as_bytes())).good();
        match command.as_str() {
            "ADD" => {
                assert_eq!(document["interfaces"][0]["name"], "net1");
                assert_eq!(pod.link("vmtap").driver_kind.as_deref(), Some("tun"));
                assert_eq!(agent.ledger().records.len(), 1, "the one with the deviceID");
                assert_eq!(files_in(&given).len(), 1);
                let said: Value = serde_json::from_slice(&std::fs::read(&info).unwrap()).unwrap();
                assert_eq!(
                    said,
                    json!({"type": "vhost-user", "version": "1.1.0",
                    "vhost-user": {
                        "mode": "client", "path": "/var/run/vhost-rdma/blue-0/vhost.sock"
                    }})
                );
                result = document;
            }
            "DEL" => {
                assert!(pod.left().is_empty() && lab.left_on_host().is_empty());
                assert!(agent.ledger().records.is_empty() && files_in(&given).is_empty());
            }
            _ => {}
        }
        commands.push(command);
    }
    assert_eq!(commands, ["ADD", "CHECK", "DEL", "DEL", "ADD", "CHECK", "DEL"]);
}

#[test]
fn recorded_calls_replayed_0_4_0() {
    replay(include_str!("multus/calls-0.4.0.jsonl"));
}

#[test]
fn recorded_calls_replayed_1_0_0() {
    replay(include_str!("multus/calls-1.0.0.jsonl"));
}
