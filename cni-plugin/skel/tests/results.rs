//! Results of each version, there and back.

use cni_skel::{AddResult, Args, Cidr, Error, Interface, NetworkConfig, Version};
use serde_json::{Value, json};

fn newest() -> Value {
    json!({
        "cniVersion": "1.1.0",
        "interfaces": [
            {"name": "rdma0", "mac": "02:00:00:00:00:01", "mtu": 9000, "sandbox": "/run/netns/p",
             "socketPath": "/run/v/s.sock", "pciID": "0000:3b:00.1"},
            {"name": "veth1"},
        ],
        "ips": [
            {"address": "10.1.0.2/16", "gateway": "10.1.0.1", "interface": 0},
            {"address": "fd00::2/64", "interface": 0},
        ],
        "routes": [{
            "dst": "0.0.0.0/0", "gw": "10.1.0.1", "mtu": 1400, "advmss": 1360, "priority": 5,
            "table": 9, "scope": 0
        }],
        "dns": {"nameservers": ["10.1.0.1"], "domain": "x", "search": ["y"], "options": ["z"]},
        "vendor": true,
    })
}

#[test]
fn each_version_has_its_fields() {
    let result = AddResult::from_json(&newest(), Version::V1_1_0).unwrap();
    assert_eq!(result.to_json(Version::V1_1_0), newest());

    let mut at_1_0 = newest();
    at_1_0["cniVersion"] = json!("1.0.0");
    at_1_0["interfaces"][0] =
        json!({"name": "rdma0", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/p"});
    at_1_0["routes"][0] = json!({"dst": "0.0.0.0/0", "gw": "10.1.0.1"});
    assert_eq!(result.to_json(Version::V1_0_0), at_1_0);

    for version in [Version::V0_3_0, Version::V0_3_1, Version::V0_4_0] {
        let mut old = at_1_0.clone();
        old["cniVersion"] = json!(version.as_str());
        old["ips"][0]["version"] = json!("4");
        old["ips"][1]["version"] = json!("6");
        assert_eq!(result.to_json(version), old);
        // The old form reads back, and its `version` does not leak into a new one.
        let back = AddResult::from_json(&old, Version::V1_1_0).unwrap();
        assert_eq!(back.to_json(Version::V1_0_0), at_1_0);
    }
}

#[test]
fn nulls_of_go_are_empty_lists() {
    let value = json!({
        "cniVersion": "1.0.0", "interfaces": null, "ips": null, "routes": null,
        "dns": {"search": null}
    });
    let result = AddResult::from_json(&value, Version::V1_0_0).unwrap();
    assert_eq!(result, AddResult::default());
    assert_eq!(result.to_json(Version::V1_0_0), json!({"cniVersion": "1.0.0", "dns": {}}));
}

#[test]
fn a_further_interface_gets_the_next_index_and_ours_come_after_theirs() {
    let mut result = AddResult::from_json(&newest(), Version::V1_1_0).unwrap();
    let ipam = json!({
        "cniVersion": "1.0.0", "ips": [{"address": "10.9.0.2/24"}],
        "routes": [{"dst": "10.8.0.0/16"}], "dns": {"nameservers": ["9.9.9.9"]}
    });
    let ipam = AddResult::from_json(&ipam, Version::V1_0_0).unwrap();
    result.attach(Interface { name: "net1".to_owned(), ..Interface::default() }, ipam);
    assert_eq!((result.interfaces.len(), result.ips.len(), result.routes.len()), (3, 3, 2));
    assert_eq!(result.ips[2].interface, Some(2));
    assert_eq!(result.dns.nameservers, ["10.1.0.1"], "who came first names the servers");
}

#[test]
fn cidrs() {
    for good in ["10.0.0.1/8", "0.0.0.0/0", "::/0", "fd00::1/128"] {
        assert_eq!(good.parse::<Cidr>().unwrap().to_string(), good);
    }
    for bad in
        ["", "10.0.0.1", "10.0.0.1/33", "::/129", "10.0.0/8", "x/8", "10.0.0.1/-1", "10.0.0.1/8/8"]
    {
        assert!(bad.parse::<Cidr>().is_err(), "{bad}");
    }
}

#[test]
fn args_of_kubernetes_and_strangers() {
    let text = "IgnoreUnknown=true;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;\
                K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u-1;X=a=b;";
    let args = Args::parse(text).unwrap();
    assert_eq!((args.pod_namespace(), args.pod_name()), (Some("shop"), Some("web-0")));
    assert_eq!(
        (args.pod_uid(), args.pod_sandbox(), args.get("X")),
        (Some("u-1"), Some("c1"), Some("a=b"))
    );
    assert!(args.only(&[]).is_ok());
    let strict = |text: &str, known: &[&str]| Args::parse(text).and_then(|args| args.only(known));
    assert!(strict("K8S_POD_NAME=x;MAC=1", &["MAC"]).is_ok());
    assert!(strict("MAC=1;IgnoreUnknown=1", &[]).is_ok());
    // As Multus says it: its own pairs, then the runtime's. The last of two holds.
    assert!(
        strict("IgnoreUnknown=true;K8S_POD_NAME=x;IgnoreUnknown=1;K8S_POD_NAME=x;MAC=1", &[])
            .is_ok()
    );
    assert!(strict("IgnoreUnknown=1;MAC=1;IgnoreUnknown=0", &[]).is_err());
    for (text, word) in
        [("MAC=1", "MAC"), ("MAC=1;IgnoreUnknown=0", "MAC"), ("IgnoreUnknown=maybe", "maybe")]
    {
        let Error { code, msg, .. } = strict(text, &[]).unwrap_err();
        assert_eq!(code.0, 4);
        assert!(msg.contains("CNI_ARGS") && msg.contains(word), "{msg}");
    }
}

#[test]
fn runtime_config_is_typed_and_the_rest_is_kept() {
    let config = NetworkConfig::parse(
        json!({"name": "n", "runtimeConfig": {"mac": "02::1", "ips": ["10.0.0.5/24"],
            "deviceID": "d-1", "CNIDeviceInfoFile": "/x", "bandwidth": {"ingressRate": 1}},
            "own": 5})
        .to_string()
        .as_bytes(),
    )
    .unwrap();
    assert_eq!(config.runtime.device_id.as_deref(), Some("d-1"));
    assert_eq!(config.runtime.rest.keys().collect::<Vec<_>>(), ["bandwidth"]);
    #[derive(serde::Deserialize)]
    struct Own {
        own: u8,
    }
    assert_eq!(config.own::<Own>().unwrap().own, 5);
    #[derive(Debug, serde::Deserialize)]
    struct Wrong {
        #[serde(rename = "own")]
        _own: String,
    }
    assert_eq!(config.own::<Wrong>().unwrap_err().code.0, 7);
}
