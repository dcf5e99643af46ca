//! The program, executed with every command, version, variable and bad configuration: the exact
//! exit status, code and message. The skeleton's tests do the same within one process; here it is
//! what a runtime sees, with an agent that knows a pod with one NIC.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lab;

use lab::{FakeAgent, Lab, Pod, variables, vhost_user};
use serde_json::{Value, json};

const COMMANDS: [&str; 6] = ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"];

/// A configuration with all that any command needs.
fn config(lab: &Lab, version: &str) -> Value {
    let mut config = lab.config(version);
    config["prevResult"] = json!({"cniVersion": version});
    config["cni.dev/valid-attachments"] = json!([]);
    config
}

#[test]
fn every_command_in_every_version() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let _agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let versions = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
    for (index, version) in versions.into_iter().enumerate() {
        let mut config = config(&lab, version);
        for command in ["VERSION", "STATUS", "ADD", "CHECK", "GC", "DEL"] {
            let since = match command {
                "CHECK" => 2,
                "GC" | "STATUS" => 4,
                _ => 0,
            };
            let answer = lab.call(command, &pod, &config);
            assert_eq!(answer.code(), u64::from(index < since), "{command} {version}: {answer:?}");
            if answer.code() == 0 && matches!(command, "CHECK" | "GC" | "STATUS" | "DEL") {
                assert_eq!(answer.document, Value::Null, "{command}: nothing on stdout");
            } else {
                assert_eq!(answer.document["cniVersion"], version, "{command}");
            }
            match command {
                "VERSION" => assert_eq!(answer.document["supportedVersions"], json!(versions)),
                "ADD" => config["prevResult"] = answer.document,
                _ => {}
            }
        }
        assert!(pod.left().is_empty(), "{version}");
    }
    for version in ["0.2.0", "1.1.1", "1.3.0", "x", ""] {
        for command in COMMANDS {
            let answer = lab.call(command, &pod, &config(&lab, version));
            assert_eq!(answer.code(), u64::from(command != "VERSION"), "{command} {version}");
            assert_eq!(answer.document["cniVersion"], version);
        }
    }
}

#[test]
fn every_command_without_each_variable_and_with_others() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![]);
    let config = config(&lab, "1.1.0");
    for command in COMMANDS {
        let all = variables(command, &pod.path, "eth1", "/opt/cni/bin");
        for (name, _) in &all[1..] {
            let needed = match *name {
                "CNI_CONTAINERID" | "CNI_IFNAME" => matches!(command, "ADD" | "DEL" | "CHECK"),
                "CNI_NETNS" => matches!(command, "ADD" | "CHECK"),
                _ => false,
            };
            let mut without = all.clone();
            without.retain(|(other, _)| other != name);
            let mut empty = without.clone();
            empty.push((name, ""));
            for given in [without, empty] {
                let answer = lab.run(&given, &config);
                assert_eq!(
                    answer.code(),
                    if needed { 4 } else { 0 },
                    "{command} without {name}: {answer:?}"
                );
                assert!(
                    !needed || answer.document["msg"].as_str().unwrap().contains(name),
                    "{answer:?}"
                );
            }
        }
        let mut more = all.clone();
        more.extend([("CNI_FUTURE", "x"), ("CNI_COMMANDS", "y"), ("HOME", "/")]);
        assert_eq!(lab.run(&more, &config).code(), 0, "{command}");
    }
    assert_eq!(lab.run(&[("CNI_COMMAND", "UPDATE")], &config).code(), 4);
    assert_eq!(lab.run(&[("CNI_CONTAINERID", "x")], &config).code(), 4);
    // Values that are there and bad; `of` are the commands that look.
    let file = lab.dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let gone = lab.dir.path().join("gone");
    let attachment = ["ADD", "DEL", "CHECK"].as_slice();
    let inside = ["ADD", "CHECK"].as_slice();
    let cases: [(&str, &str, u64, &[&str]); 11] = [
        ("CNI_CONTAINERID", "-x", 4, attachment),
        ("CNI_CONTAINERID", "a/b", 4, attachment),
        ("CNI_IFNAME", "a/b", 4, attachment),
        ("CNI_IFNAME", "sixteen-letters!", 4, attachment),
        ("CNI_IFNAME", "..", 4, attachment),
        ("CNI_ARGS", "K8S_POD_NAME", 4, inside),
        ("CNI_ARGS", "MAC=02::;K8S_POD_NAME=x", 4, &["ADD"]),
        ("CNI_ARGS", "IgnoreUnknown=perhaps", 4, &["ADD"]),
        ("CNI_NETNS", gone.to_str().unwrap(), 3, inside),
        ("CNI_NETNS", file.to_str().unwrap(), 4, inside),
        ("CNI_NETNS", "/proc/self/ns/uts", 4, inside),
    ];
    agent.ledger().granted.insert("web-0".to_owned(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    for (name, value, code, of) in cases {
        for command in COMMANDS {
            let mut given = variables(command, &pod.path, "eth1", "/opt/cni/bin");
            given.retain(|(other, _)| *other != name);
            given.push((name, value));
            let answer = lab.run(&given, &config);
            let expected = if of.contains(&command) { code } else { 0 };
            // CHECK without our interface in prevResult differs, once it gets that far.
            if expected == 0 && command == "CHECK" {
                continue;
            }
            assert_eq!(answer.code(), expected, "{command} {name}={value}: {answer:?}");
            assert!(
                expected == 0 || answer.document["msg"].as_str().unwrap().contains(name),
                "{answer:?}"
            );
            if command == "ADD" && expected == 0 {
                lab.call("DEL", &pod, &config).good();
            }
        }
    }
    // The plugin's own namespace: it runs in the lab's host.
    let mut own = variables("ADD", "/proc/self/ns/net", "eth1", "/");
    assert_eq!(lab.run(&own, &config).code(), 8);
    own[0].1 = "DEL";
    assert_eq!(lab.run(&own, &config).code(), 0);
}

#[test]
fn bad_configurations() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let with = |key: &str, value: Value| {
        let mut config = config(&lab, "1.1.0");
        config[key] = value;
        config
    };
    let all = ["ADD", "DEL", "CHECK", "GC", "STATUS"].as_slice();
    let strict = ["ADD", "CHECK", "STATUS"].as_slice();
    let cases: Vec<(&[&str], Value, u64, &str)> = vec![
        (all, json!([]), 6, "stdin"),
        (all, json!("x"), 6, "stdin"),
        (all, with("cniVersion", json!(1)), 6, "cniVersion"),
        (all, with("cniVersion", Value::Null), 1, "cniVersion"),
        (all, with("name", json!("")), 7, "name"),
        (all, with("name", json!("a b")), 7, "name"),
        (all, with("name", json!(1)), 6, "name"),
        (all, with("ipam", json!("host-local")), 6, "ipam"),
        (all, with("runtimeConfig", json!([])), 6, "runtimeConfig"),
        (&["ADD"], with("ipam", json!({"subnet": "10.0.0.0/8"})), 7, "ipam.type"),
        (&["ADD"], with("ipam", json!({"type": "../sh"})), 7, "sh"),
        (&["ADD"], with("ipam", json!({"type": "absent"})), 4, "CNI_PATH"),
        (strict, with("agentSocket", json!("relative")), 7, "agentSocket"),
        (strict, with("agentSocket", json!("/nonexistent/agent.sock")), 7, "agentSocket"),
        (strict, with("agentSocket", json!(5)), 7, "string"),
        (strict, with("deviceID", json!(5)), 7, "string"),
        (&["ADD"], with("deviceID", json!("green-9")), 3, "green-9"),
        (
            strict,
            with("runtimeConfig", json!({"bandwidth": {"ingressRate": 5}})),
            2,
            "bandwidth={\"ingressRate\":5}",
        ),
        (
            strict,
            with("runtimeConfig", json!({"infinibandGUID": "c2:11:22"})),
            2,
            "infinibandGUID=\"c2:11:22\"",
        ),
        (strict, with("runtimeConfig", json!({"mac": "nonsense"})), 7, "mac"),
        (
            &["ADD", "CHECK"],
            with("runtimeConfig", json!({"CNIDeviceInfoFile": "relative"})),
            7,
            "CNIDeviceInfoFile",
        ),
        (&["ADD"], with("prevResult", json!({"cniVersion": "0.1.0"})), 1, "prevResult"),
        (&["ADD", "CHECK"], with("prevResult", json!({"interfaces": 4})), 6, "prevResult"),
        (&["CHECK"], with("prevResult", Value::Null), 7, "prevResult"),
        (
            &["GC"],
            with("cni.dev/valid-attachments", json!([{"containerID": 1}])),
            6,
            "valid-attachments",
        ),
    ];
    for (commands, config, code, word) in cases {
        for command in commands {
            let answer = lab.call(command, &pod, &config);
            assert_eq!(answer.code(), code, "{command} {config}: {answer:?}");
            assert_eq!(answer.status.code(), Some(1));
            let msg = answer.document["msg"].as_str().unwrap();
            assert!(msg.contains(word), "{word}: {msg}");
        }
        // Whatever was wrong, the container can go.
        if ![1, 6].contains(&code) && config["name"] == "net" {
            assert_eq!(lab.call("DEL", &pod, &config).code(), 0, "{config}");
        }
        assert!(pod.left().is_empty() && agent.ledger().records.is_empty(), "{config}");
    }
}

#[test]
fn an_agent_that_is_away() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let config = config(&lab, "1.1.0");
    for (command, code) in [("ADD", 11), ("CHECK", 11), ("GC", 11), ("STATUS", 50), ("DEL", 0)] {
        let answer = lab.call(command, &pod, &config);
        assert_eq!(answer.code(), code, "{command}: {answer:?}");
        let names_it = |answer: &lab::Answer| {
            answer.document["msg"].as_str().unwrap().contains(lab.socket().to_str().unwrap())
        };
        assert!(code == 0 || names_it(&answer), "{answer:?}");
    }
}

/// In a chain the plugin is called for every pod of the node.
#[test]
fn pods_without_a_nic_start_while_the_agent_is_away() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let chained = lab::chained(&lab, "1.0.0", &pod);
    assert_eq!(lab.call("ADD", &pod, &chained).code(), 11, "there is no kubelet to tell");
    std::fs::create_dir(lab.kubelet_plugins()).unwrap();
    let note = |uid: &str| {
        let entry = json!(
            {"PodUID": uid, "ResourceName": "vhost-rdma.io/blue", "DeviceIDs": {"-1": ["blue-0"]}}
        );
        let text = json!({"Data": {"PodDeviceEntries": [entry]}}).to_string();
        std::fs::write(lab.kubelet_plugins().join("kubelet_internal_checkpoint"), text).unwrap();
    };
    note("another");
    let passed = lab.call("ADD", &pod, &chained).good();
    assert_eq!(passed, chained["prevResult"], "untouched");
    lab.call("DEL", &pod, &chained).good();
    note("u-1");
    assert_eq!(lab.call("ADD", &pod, &chained).code(), 11, "this one has a NIC");
    // Multus names a NIC: that pod has one.
    note("another");
    let mut named = chained;
    named["deviceID"] = json!("blue-0");
    assert_eq!(lab.call("ADD", &pod, &named).code(), 11);
    // And alone nothing can be passed through.
    assert_eq!(lab.call("ADD", &pod, &lab.config("1.0.0")).code(), 11);
}

#[test]
fn addresses_that_the_runtime_asks_for() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "eth1", "eth1")]);
    let mut config = lab.config("1.0.0");
    config["runtimeConfig"] = json!({"ips": ["10.77.0.9/24", "fd00::9/64"]});
    let result = lab.call("ADD", &pod, &config).good();
    let addresses = |result: &Value| {
        let ips = result["ips"].as_array().unwrap().clone();
        ips.into_iter().map(|ip| ip["address"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(addresses(&result), ["10.77.0.9/24", "fd00::9/64"]);
    assert_eq!(agent.ledger().records[0].done.as_ref().unwrap().addresses.len(), 2);
    lab.call("DEL", &pod, &config).good();
    // An IPAM plugin that does not know the capability gives others: that is told, and given back.
    config["ipam"] = json!({"type": "ipam"});
    let answer = lab.call("ADD", &pod, &config);
    assert_eq!(answer.code(), 2, "{answer:?}");
    assert!(answer.document["msg"].as_str().unwrap().contains("10.77.0.9/24"), "{answer:?}");
    assert!(lab::files_in(&given).is_empty() && pod.left().is_empty());
}
