//! Every command, with every variable there, missing, empty or bad, and with configurations of
//! every kind of wrongness: the exact code, and the names in the message that the specification
//! wants there.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used)]

use cni_skel::{
    AddResult, Answer, Attachment, Code, Environment, Error, Network, Plugin, ValidAttachment,
    Version, run_with,
};
use serde_json::{Value, json};

/// Does nothing, and panics when the container's name says so.
struct Quiet;

impl Plugin for Quiet {
    fn add(&self, network: &Network, attachment: &Attachment) -> Result<Answer, Error> {
        assert_ne!(attachment.container_id, "panic");
        Ok(Answer::passed_through(network).unwrap_or_else(|| AddResult::default().into()))
    }
    fn del(&self, _: &Network, attachment: &Attachment) -> Result<(), Error> {
        match attachment.netns.as_deref().and_then(|netns| netns.to_str()) {
            None | Some("/run/netns/pod") => Ok(()),
            Some(other) => Err(Error::new(Code(100), other)),
        }
    }
    fn check(&self, _: &Network, _: &Attachment) -> Result<(), Error> {
        Ok(())
    }
    fn gc(&self, _: &Network, valid: &[ValidAttachment]) -> Result<(), Error> {
        if valid.len() == 3 { Err(Error::new(Code(101), "three")) } else { Ok(()) }
    }
}

fn call(variables: &[(&str, &str)], input: &str) -> (u8, Value) {
    let environment: Environment = variables.iter().copied().collect();
    let mut out = Vec::new();
    let status = run_with(&Quiet, &environment, &mut input.as_bytes(), &mut out);
    let document = if out.is_empty() { Value::Null } else { serde_json::from_slice(&out).unwrap() };
    (status, document)
}

const FULL: [(&str, &str); 5] = [
    ("CNI_CONTAINERID", "c1"),
    ("CNI_NETNS", "/run/netns/pod"),
    ("CNI_IFNAME", "eth0"),
    ("CNI_ARGS", "K8S_POD_NAME=a;IgnoreUnknown=1"),
    ("CNI_PATH", "/opt/cni/bin"),
];

fn config(version: &str) -> Value {
    json!({
        "cniVersion": version, "name": "net", "type": "quiet", "unknown": {"kept": true},
        "prevResult": {"cniVersion": version, "ips": []},
        "cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}],
    })
}

fn variables(command: &'static str) -> Vec<(&'static str, &'static str)> {
    [("CNI_COMMAND", command)].into_iter().chain(FULL).collect()
}

#[test]
fn every_variable_of_every_command_missing_or_empty() {
    let needed = |command| match command {
        "ADD" | "CHECK" => vec!["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"],
        "DEL" => vec!["CNI_CONTAINERID", "CNI_IFNAME"],
        _ => vec![],
    };
    for command in ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"] {
        let (status, document) = call(&variables(command), &config("1.1.0").to_string());
        assert_eq!(status, 0, "{command}: {document}");
        assert_eq!(document.is_null(), !matches!(command, "ADD" | "VERSION"), "{command}");
        for (name, _) in FULL {
            for empty in [false, true] {
                let mut given = variables(command);
                given.retain(|(given, _)| *given != name);
                if empty {
                    given.push((name, ""));
                }
                let (status, document) = call(&given, &config("1.1.0").to_string());
                if needed(command).contains(&name) {
                    assert_eq!((status, &document["code"]), (1, &json!(4)), "{command} {name}");
                    assert_eq!(document["msg"], format!("{name} is missing"));
                    assert_eq!(document["cniVersion"], "1.1.0");
                } else {
                    assert_eq!(status, 0, "{command} without {name}: {document}");
                }
            }
        }
        let (status, _) = call(&[("CNI_COMMAND", command)], &config("1.1.0").to_string());
        assert_eq!(status == 0, needed(command).is_empty(), "{command} alone");
    }
    let (_, document) = call(&[("CNI_COMMAND", "ADD")], &config("1.0.0").to_string());
    assert_eq!(document["msg"], "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME are missing");
}

#[test]
fn bad_values_name_their_variable() {
    let bad = [
        ("CNI_CONTAINERID", vec!["-c", "a/b", "a b", "é", "../x"]),
        ("CNI_IFNAME", vec![".", "..", "a/b", "a:b", "a b", "0123456789abcdef", "a\tb"]),
        ("CNI_ARGS", vec!["a", "=b", "a=1;b"]),
    ];
    for command in ["ADD", "CHECK", "DEL"] {
        for (name, values) in &bad {
            for value in values {
                let mut given = variables(command);
                given.retain(|(given, _)| given != name);
                given.push((name, value));
                let (status, document) = call(&given, &config("1.0.0").to_string());
                if (command, *name) == ("DEL", "CNI_ARGS") {
                    assert_eq!(status, 0, "a container must go, whatever {value:?} means");
                    continue;
                }
                assert_eq!(document["code"], 4, "{command} {name}={value:?}");
                assert!(document["msg"].as_str().unwrap().starts_with(name), "{document}");
            }
        }
    }
}

#[test]
fn commands() {
    let (status, document) = call(&FULL, "");
    assert_eq!((status, &document["code"]), (1, &json!(4)));
    assert_eq!(document["msg"], "CNI_COMMAND is missing");
    for command in ["add", "ADD ", "UPDATE", "é"] {
        let (status, document) = call(&[("CNI_COMMAND", command)], &config("0.4.0").to_string());
        assert_eq!((status, &document["code"]), (1, &json!(4)));
        assert!(document["msg"].as_str().unwrap().starts_with("CNI_COMMAND="), "{document}");
    }
}

#[test]
fn every_command_in_every_version() {
    let since = |command| match command {
        "ADD" | "DEL" | "VERSION" => Version::V0_3_0,
        "CHECK" => Version::V0_4_0,
        _ => Version::V1_1_0,
    };
    for version in Version::ALL {
        for command in ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"] {
            let (status, document) =
                call(&variables(command), &config(version.as_str()).to_string());
            if *version >= since(command) {
                assert_eq!(status, 0, "{command} {version}: {document}");
            } else {
                assert_eq!(document["code"], 1, "{command} {version}");
            }
            if !document.is_null() {
                assert_eq!(document["cniVersion"], version.as_str(), "{command}");
            }
        }
    }
    for version in ["0.1.0", "0.2.0", "1.1.1", "1.3.0", "2.0.0", "", "x"] {
        for command in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
            let (status, document) = call(&variables(command), &config(version).to_string());
            assert_eq!((status, &document["code"]), (1, &json!(1)), "{command} {version}");
            assert_eq!(document["cniVersion"], version, "the caller's version is echoed");
            assert!(document["details"].as_str().unwrap().contains("0.4.0, 1.0.0, 1.1.0"));
        }
    }
}

#[test]
fn version_answers_whatever_comes() {
    for (input, said) in [
        (r#"{"cniVersion": "0.4.0"}"#, "0.4.0"),
        (r#"{"cniVersion": "9.9.9"}"#, "9.9.9"),
        ("", "1.1.0"),
        ("{", "1.1.0"),
        (r#"{"cniVersion": 1}"#, "1.1.0"),
    ] {
        let (status, document) = call(&[("CNI_COMMAND", "VERSION")], input);
        assert_eq!(status, 0);
        let supported = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
        assert_eq!(document, json!({"cniVersion": said, "supportedVersions": supported}));
    }
}

#[test]
fn bad_configurations() {
    let with = |key: &str, value: Value| {
        let mut config = config("1.1.0");
        config[key] = value;
        config.to_string()
    };
    let without = |key: &str| {
        let mut config = config("1.1.0");
        config.as_object_mut().unwrap().remove(key);
        config.to_string()
    };
    let attachment = ["ADD", "DEL", "CHECK"].as_slice();
    let all = ["ADD", "DEL", "CHECK", "GC", "STATUS"].as_slice();
    let cases: Vec<(&[&str], String, u32)> = vec![
        (all, String::new(), 6),
        (all, "{".to_owned(), 6),
        (all, "[]".to_owned(), 6),
        (all, "\"x\"".to_owned(), 6),
        (all, "\u{0}".to_owned(), 6),
        (all, "[".repeat(100_000), 6),
        (all, without("cniVersion"), 1),
        (all, with("cniVersion", json!(1)), 6),
        (all, with("cniVersion", json!(null)), 1),
        (all, without("name"), 7),
        (all, with("name", json!("")), 7),
        (all, with("name", json!("a/b")), 7),
        (all, with("name", json!(["a"])), 6),
        (all, with("runtimeConfig", json!("x")), 6),
        (all, with("runtimeConfig", json!({"ips": ["10.0.0.1"]})), 6),
        (all, with("runtimeConfig", json!({"mac": 5})), 6),
        (all, with("ipam", json!([])), 6),
        (all, with("dns", json!({"nameservers": 4})), 6),
        (all, with("args", json!("x")), 6),
        (&["CHECK"], without("prevResult"), 7),
        (&["CHECK"], with("prevResult", Value::Null), 7),
        (&["ADD"], with("prevResult", json!({"cniVersion": "7"})), 1),
        (&["ADD"], with("prevResult", json!({"cniVersion": "1.0.0", "ips": 4})), 6),
        (&["GC"], without("cni.dev/valid-attachments"), 7),
        (&["GC"], with("cni.dev/valid-attachments", json!([{"containerID": 1}])), 6),
    ];
    for (commands, input, code) in &cases {
        for command in *commands {
            let (status, document) = call(&variables(command), input);
            let shown: String = input.chars().take(200).collect();
            assert_eq!((status, &document["code"]), (1, &json!(code)), "{command} {shown}");
            assert!(!document["msg"].as_str().unwrap().is_empty());
        }
    }
    // What the specification does not forbid.
    for input in
        [without("prevResult"), without("type"), with("ipam", json!({})), with("dns", Value::Null)]
    {
        for command in attachment.iter().filter(|c| **c != "CHECK") {
            assert_eq!(call(&variables(command), &input).0, 0, "{command} {input}");
        }
    }
}

#[test]
fn gc_reads_either_name_of_the_list_and_null_for_an_empty_one() {
    let base = json!({"cniVersion": "1.1.0", "name": "net", "type": "quiet"});
    let three = json!([
        {"containerID": "a", "ifname": "e"}, {"containerID": "b", "ifname": "e"},
        {"containerID": "c", "ifname": "e"}
    ]);
    for (key, value, status) in [
        ("cni.dev/valid-attachments", three.clone(), 1),
        ("cni.dev/attachments", three, 1),
        ("cni.dev/valid-attachments", Value::Null, 0),
        ("cni.dev/valid-attachments", json!([]), 0),
    ] {
        let mut config = base.clone();
        config[key] = value;
        assert_eq!(call(&[("CNI_COMMAND", "GC")], &config.to_string()).0, status, "{key}");
    }
}

#[test]
fn own_namespace_is_refused_by_add_and_taken_for_gone_by_del() {
    let mut given = variables("ADD");
    given.retain(|(name, _)| *name != "CNI_NETNS");
    given.push(("CNI_NETNS", "/proc/self/ns/net"));
    let (status, document) = call(&given, &config("1.0.0").to_string());
    assert_eq!((status, &document["code"]), (1, &json!(8)));
    for allow in ["1", "true", "TRUE"] {
        let mut given = given.clone();
        given.push(("CNI_NETNS_OVERRIDE", allow));
        assert_eq!(call(&given, &config("1.0.0").to_string()).0, 0);
    }
    given[0] = ("CNI_COMMAND", "DEL");
    assert_eq!(call(&given, &config("1.0.0").to_string()).0, 0);
    let mut given = variables("DEL");
    given.retain(|(name, _)| *name != "CNI_NETNS");
    given.push(("CNI_NETNS", "/run/netns/other"));
    let (_, document) = call(&given, &config("1.0.0").to_string());
    assert_eq!(document["msg"], "/run/netns/other", "a vanished path is the plugin's to judge");
}

#[test]
fn a_panic_is_an_error_document() {
    let mut given = variables("ADD");
    given.retain(|(name, _)| *name != "CNI_CONTAINERID");
    given.push(("CNI_CONTAINERID", "panic"));
    let (status, document) = call(&given, &config("1.0.0").to_string());
    assert_eq!(
        (status, &document["code"], &document["cniVersion"]),
        (1, &json!(999), &json!("1.0.0"))
    );
}

#[test]
fn input_that_fails_or_never_ends() {
    struct Fails;
    impl std::io::Read for Fails {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("gone"))
        }
    }
    let environment: Environment = variables("ADD").into_iter().collect();
    for input in [&mut Fails as &mut dyn std::io::Read, &mut std::io::repeat(b' ')] {
        let mut out = Vec::new();
        assert_eq!(run_with(&Quiet, &environment, input, &mut out), 1);
        assert_eq!(serde_json::from_slice::<Value>(&out).unwrap()["code"], 5);
    }
}

#[test]
fn prev_result_goes_through_as_it_came() {
    let prev = json!({
        "cniVersion": "1.0.0", "kubernetes": {"x": [1, 2.5, null]},
        "interfaces": [{"name": "eth0", "vendor": {"a": 1}}],
        "ips": [{"address": "10.0.0.2/24", "interface": 0, "odd": []}], "dns": {},
    });
    let mut config = config("1.0.0");
    config["prevResult"] = prev.clone();
    assert_eq!(call(&variables("ADD"), &config.to_string()), (0, prev));
    // One of another version is converted, and keeps what it holds.
    config["cniVersion"] = json!("0.4.0");
    let (_, document) = call(&variables("ADD"), &config.to_string());
    assert_eq!(
        document["ips"][0],
        json!({"address": "10.0.0.2/24", "interface": 0, "odd": [], "version": "4"})
    );
    assert_eq!(
        (&document["cniVersion"], &document["kubernetes"]["x"][1]),
        (&json!("0.4.0"), &json!(2.5))
    );
}
