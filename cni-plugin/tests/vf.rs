//! Functions that go into pods and come back, against the kernel. A veth's end stands for the VF's
//! netdev, as this needs no hardware; RDMA devices are moved in a VM (`cargo xtask vm cni-rdma`).

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lab;

use std::ffi::{OsStr, OsString};

use lab::{CONTAINER, FakeAgent, Kill, Lab, Pod, answer, files_in, variables, vf, vhost_user};
use rdma_netlink::link::{Links, NewAddress, Veth};
use serde_json::{Value, json};
use vhost_rdma_agent_api::Personality;

/// What must be the same before and after.
#[derive(Debug, PartialEq, Eq)]
struct Interface {
    mac: String,
    mtu: u32,
    up: bool,
    alias: Option<String>,
    altnames: Vec<OsString>,
    addresses: Vec<String>,
}

fn with_function(lab: &Lab) {
    let mut host = Links::open_in(&lab.host).unwrap();
    host.add_veth(&Veth { name: "vf0", peer: "wire", mtu: Some(2000), ..Veth::default() }).unwrap();
    let (vf, wire) = (host.by_name("vf0").unwrap().index, host.by_name("wire").unwrap().index);
    host.set_address(vf, &"02:aa:00:00:00:01".parse().unwrap()).unwrap();
    host.set_alias(vf, "port 3, rack 9").unwrap();
    host.add_altname(vf, OsStr::new("enp59s0f0v2")).unwrap();
    host.set_up(wire, true).unwrap();
    host.set_up(vf, true).unwrap();
    host.add_address(vf, &NewAddress::new("192.168.7.1/24".parse().unwrap())).unwrap();
}

fn function(lab: &Lab) -> Option<Interface> {
    let mut host = Links::open_in(&lab.host).unwrap();
    let link = host.by_name("vf0").ok()?;
    let addresses = host.addresses(Some(link.index)).unwrap();
    Some(Interface {
        mac: link.address.unwrap().to_string(),
        mtu: link.mtu,
        up: link.up,
        alias: link.alias,
        altnames: link.altnames,
        addresses: addresses
            .iter()
            .filter(|a| !a.link_local)
            .map(|a| a.prefix.to_string())
            .collect(),
    })
}

fn config(lab: &Lab, version: &str) -> Value {
    let mut config = lab.config(version);
    config["ipam"] = json!({"type": "ipam"});
    config
}

#[test]
fn there_and_back() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    with_function(&lab);
    let before = function(&lab).unwrap();
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    let mut config = config(&lab, "1.1.0");
    let result = lab.call("ADD", &pod, &config).good();
    assert_eq!(function(&lab), None);
    let link = pod.link("net1");
    assert_eq!(
        (link.up, link.mtu, link.address.unwrap().to_string().as_str()),
        (true, 1400, "02:00:00:00:00:07")
    );
    assert_eq!(link.alias.as_deref(), Some("vhost-rdma vf-0 c0ffee"));
    let addresses = pod.links().addresses(Some(link.index)).unwrap();
    assert!(addresses.iter().any(|a| json!(a.prefix.to_string()) == result["ips"][0]["address"]));
    let routes: Vec<String> =
        pod.links().routes().unwrap().iter().map(|r| r.destination.to_string()).collect();
    for route in ["0.0.0.0/0", "172.16.0.0/12"] {
        assert!(routes.iter().any(|there| there == route), "{route}: {routes:?}");
    }
    assert_eq!(
        result["interfaces"],
        json!([{
            "name": "net1", "mac": "02:00:00:00:00:07", "mtu": 1400, "sandbox": pod.path,
            "pciID": ""
        }])
    );
    config["prevResult"] = result;
    lab.call("CHECK", &pod, &config).good();
    let mut links = pod.links();
    let refused = |word: &str| {
        let answer = lab.call("CHECK", &pod, &config);
        assert!(
            answer.code() == 101 && answer.document["msg"].as_str().unwrap().contains(word),
            "{answer:?}"
        );
    };
    links.set_mtu(link.index, 1300).unwrap();
    refused("MTU");
    links.set_mtu(link.index, 1400).unwrap();
    let address = addresses.iter().find(|a| !a.link_local).unwrap().prefix;
    links.delete_address(link.index, address).unwrap();
    refused("address");
    links.add_address(link.index, &NewAddress::new(address)).unwrap();
    refused("route");
    for _ in 0..5 {
        lab.call("DEL", &pod, &config).good();
        assert_eq!(function(&lab).unwrap(), before);
        assert!(
            pod.left().is_empty()
                && files_in(&given).is_empty()
                && agent.ledger().records.is_empty()
        );
    }
}

#[test]
fn with_the_mac_that_the_runtime_wants() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    with_function(&lab);
    let before = function(&lab).unwrap();
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    let mut config = config(&lab, "1.0.0");
    config["runtimeConfig"] = json!({"mac": "02:bb:00:00:00:09"});
    let result = lab.call("ADD", &pod, &config).good();
    assert_eq!(pod.link("net1").address.unwrap().to_string(), "02:bb:00:00:00:09");
    assert_eq!(result["interfaces"][0]["mac"], "02:bb:00:00:00:09");
    config["prevResult"] = result;
    lab.call("CHECK", &pod, &config).good();
    lab.call("DEL", &pod, &config).good();
    assert_eq!(function(&lab).unwrap(), before);
    // A VM's NIC has one for good.
    agent.ledger().granted.insert("web-0".to_owned(), vec![vhost_user("blue-0", "rdma0", "t")]);
    let answer = lab.call("ADD", &pod, &config);
    assert_eq!(answer.code(), 2, "{answer:?}");
    config["runtimeConfig"]["mac"] = json!("02:00:00:00:00:07");
    lab.call("ADD", &pod, &config).good();
    lab.call("DEL", &pod, &config).good();
    assert!(pod.left().is_empty());
}

#[test]
fn what_the_host_uses_stays() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    with_function(&lab);
    let before = function(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    let config = config(&lab, "1.0.0");
    let mut host = Links::open_in(&lab.host).unwrap();
    let (vf, bridge) = (host.by_name("vf0").unwrap().index, host.by_name("br0").unwrap().index);
    host.set_master(vf, Some(bridge)).unwrap();
    assert_eq!(lab.call("ADD", &pod, &config).code(), 100);
    host.set_master(vf, None).unwrap();
    pod.links().add_bridge("net1").unwrap();
    assert_eq!(lab.call("ADD", &pod, &config).code(), 100);
    assert_eq!((pod.left(), function(&lab)), (vec!["net1".to_owned()], before));
    assert!(agent.ledger().records.is_empty());
}

#[test]
fn a_name_that_was_taken_meanwhile() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    with_function(&lab);
    let before = function(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    let config = config(&lab, "1.0.0");
    lab.call("ADD", &pod, &config).good();
    let mut host = Links::open_in(&lab.host).unwrap();
    host.add_bridge("vf0").unwrap();
    let answer = lab.call("DEL", &pod, &config);
    assert_eq!(answer.code(), 102, "{answer:?}");
    assert!(pod.left().is_empty(), "the pod's namespace can go");
    assert_eq!(agent.ledger().records.len(), 1, "and the next DEL tries again");
    let index = host.by_name("vf0").unwrap().index;
    host.delete(index).unwrap();
    lab.call("DEL", &pod, &config).good();
    assert_eq!(function(&lab), before);
}

#[test]
fn killed_after_each_system_call_that_changes_the_host() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    with_function(&lab);
    let before = function(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    let config = config(&lab, "1.0.0");
    let path = lab.dir.path().to_str().unwrap();
    let mut kills = 0;
    for command in ["ADD", "DEL"] {
        for number in 1.. {
            if command == "DEL" {
                lab.call("ADD", &pod, &config).good();
            }
            let inject = format!("inject=sendto:signal=KILL:when={number}");
            let program = [
                "strace",
                "-f",
                "-qq",
                "-o",
                "/dev/null",
                "-e",
                "trace=sendto",
                "-e",
                &inject,
                env!("CARGO_BIN_EXE_vhost-rdma-cni"),
            ];
            let child = lab.start_as(
                &program,
                &variables(command, &pod.path, "eth1", path),
                config.to_string().as_bytes(),
            );
            let ended = answer(child);
            let done = ended.status.success();
            assert!(done || ended.document.is_null(), "killed, not refused: {ended:?}");
            kills += usize::from(!done);
            lab.call("DEL", &pod, &config).good();
            assert_eq!(function(&lab), before, "{command} {number}");
            assert!(
                pod.left().is_empty()
                    && files_in(&given).is_empty()
                    && agent.ledger().records.is_empty()
            );
            if done {
                break;
            }
        }
    }
    assert!(kills > 20, "only {kills} system calls were found to kill it at");
}

#[test]
fn killed_at_each_word_with_the_agent() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    with_function(&lab);
    let before = function(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    let config = config(&lab, "1.0.0");
    for number in 0..3 {
        for when in [Kill::Before(number), Kill::After(number)] {
            agent.kill(Some(when));
            assert!(lab.call("ADD", &pod, &config).killed());
            agent.kill(None);
            lab.call("DEL", &pod, &config).good();
            assert_eq!(function(&lab), before, "{when:?}");
            assert!(pod.left().is_empty() && agent.ledger().records.is_empty());
        }
    }
}

fn for_processes(id: &str, if_name: &str) -> vhost_rdma_agent_api::Nic {
    let mut nic = vf(id, if_name, "x");
    nic.personality = Personality::Process {
        dir: format!("/run/vhost-rdma/nics/{id}"),
        socket: format!("/run/vhost-rdma/nics/{id}/process.sock"),
        container_socket: format!("/run/vhost-rdma/process/{id}/process.sock"),
    };
    nic
}

/// In a chain without an IPAM plugin of its own, the first NIC for processes has the pod's address.
#[test]
fn a_nic_for_processes_has_the_pods_address() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let nics = vec![for_processes("p-1", "rdma0"), for_processes("p-2", "rdma1")];
    let agent = FakeAgent::start(&lab.socket(), nics);
    let mut config = config(&lab, "1.1.0");
    config.as_object_mut().unwrap().remove("ipam");
    config["prevResult"] = json!({
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0", "sandbox": pod.path}],
        "ips": [{"address": "10.244.0.7/24", "interface": 0}],
    });
    let result = lab.call("ADD", &pod, &config).good();
    let ips = result["ips"].as_array().unwrap();
    assert_eq!((ips.len(), &ips[0]["address"]), (1, &json!("10.244.0.7/24")), "told twice");
    let has = |id: &str| {
        let ledger = agent.ledger();
        let record = ledger.records.iter().find(|record| record.nic.id == id).unwrap();
        record.done.as_ref().unwrap().addresses.clone()
    };
    assert_eq!((has("p-1"), has("p-2")), (vec!["10.244.0.7/24".to_owned()], Vec::new()));
    config["prevResult"] = result;
    lab.call("DEL", &pod, &config).good();
}

/// With one, each asks for its own.
#[test]
fn nics_for_processes_ask_for_addresses() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![for_processes("p-1", "rdma0")]);
    let config = config(&lab, "1.1.0");
    let result = lab.call("ADD", &pod, &config).good();
    assert_eq!(result["ips"].as_array().unwrap().len(), 1);
    assert_eq!(files_in(&given), [format!("{CONTAINER}.rdma0")]);
    lab.call("DEL", &pod, &config).good();
    assert!(files_in(&given).is_empty() && agent.ledger().records.is_empty());
}

/// Kinds without an interface: nothing to do in the pod, but addresses for a function on vfio.
#[test]
fn vfio_and_shared() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let mut vfio = vf("vf-1", "net1", "x");
    vfio.personality = Personality::VfVfio { pci: "0000:3b:00.2".to_owned() };
    let mut shared = vf("mlx-1", "rdma1", "x");
    shared.mac = None;
    shared.mtu = None;
    shared.personality = Personality::Shared {
        pci: Some("0000:3b:00.0".to_owned()),
        netdev: None,
        rdma_device: "mlx5_0".to_owned(),
        netns_mode: vhost_rdma_agent_api::NetnsMode::Shared,
    };
    let agent = FakeAgent::start(&lab.socket(), vec![vfio, shared]);
    let mut config = config(&lab, "1.1.0");
    let result = lab.call("ADD", &pod, &config).good();
    assert_eq!(result["interfaces"][0]["pciID"], "0000:3b:00.2");
    assert_eq!(
        result["interfaces"][1],
        json!({"name": "rdma1", "sandbox": pod.path, "pciID": "0000:3b:00.0"})
    );
    assert_eq!(
        (result["ips"].as_array().unwrap().len(), files_in(&given)),
        (1, vec![format!("{CONTAINER}.net1")])
    );
    assert!(pod.left().is_empty());
    config["prevResult"] = result;
    let answer = lab.call("CHECK", &pod, &config);
    let msg = answer.document["msg"].as_str().unwrap();
    assert!(
        msg.contains("not bound to vfio-pci") && msg.contains("mlx5_0"),
        "there is neither here: {msg}"
    );
    lab.call("DEL", &pod, &config).good();
    assert!(files_in(&given).is_empty() && agent.ledger().records.is_empty());
}

/// A pod that may make interfaces describes one as we describe ours.
#[test]
fn what_a_pod_calls_a_function_is_none() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    with_function(&lab);
    let before = function(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    let mut links = pod.links();
    let mut forge = |name: &str| {
        links.add_bridge(name).unwrap();
        let index = links.by_name(name).unwrap().index;
        links.set_alias(index, &format!("vhost-rdma vf-0 {CONTAINER}")).unwrap();
    };
    // One before it in the kernel's list, and one behind.
    forge("first");
    lab.call("ADD", &pod, &config(&lab, "1.0.0")).good();
    forge("second");
    lab.call("DEL", &pod, &config(&lab, "1.0.0")).good();
    assert_eq!(function(&lab), before);
    assert_eq!(pod.left(), ["first", "second"]);
    assert!(agent.ledger().records.is_empty());
}

/// Other names go along with an interface, and are in the way of others like its own: a pod gives
/// its function names of the host's, as many as the kernel takes, and takes away those that it had.
#[test]
fn other_names_that_a_pod_gives_stay_behind() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    with_function(&lab);
    let before = function(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    lab.call("ADD", &pod, &config(&lab, "1.0.0")).good();
    let mut links = pod.links();
    let index = links.by_name("net1").unwrap().index;
    let had = pod.link("net1").altnames;
    links.set_up(index, false).unwrap();
    // Its own name as another, so that the next pod's interface is in the way.
    links.rename(index, "x").unwrap();
    for name in ["net1", "eth0", "br0", "wire", "vf0"] {
        links.add_altname(index, OsStr::new(name)).unwrap();
    }
    let filled =
        (0..).find(|n| links.add_altname(index, OsStr::new(&format!("{n:0127}"))).is_err());
    assert!(filled.unwrap() > 400, "{filled:?}");
    lab.call("DEL", &pod, &config(&lab, "1.0.0")).good();
    assert_eq!(function(&lab), before);
    assert!(pod.left().is_empty() && agent.ledger().records.is_empty());
    assert!(had.is_empty(), "the host's names are of no use in a pod: {had:?}");
    let next = Pod::new();
    next.links().add_bridge("eth0").unwrap();
    lab.call("ADD", &next, &config(&lab, "1.0.0")).good();
    lab.call("DEL", &next, &config(&lab, "1.0.0")).good();
    assert_eq!(function(&lab), before);
}

/// A function that the kernel gave back with its pod's namespace has the names that the pod gave
/// it: also one of another function, whose pod goes after it.
#[test]
fn a_name_of_anothers_function_is_given_back_to_it() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    with_function(&lab);
    let before = function(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "vf0")]);
    lab.call("ADD", &pod, &config(&lab, "1.0.0")).good();
    // Another pod's, which is back on the host while that pod has not ended.
    let mut host = Links::open_in(&lab.host).unwrap();
    host.add_veth(&Veth { name: "hostile", peer: "its-wire", ..Veth::default() }).unwrap();
    let hostile = host.by_name("hostile").unwrap().index;
    host.add_altname(hostile, OsStr::new("vf0")).unwrap();
    host.set_alias(hostile, "of the other").unwrap();
    host.add_address(hostile, &NewAddress::new("192.168.9.1/24".parse().unwrap())).unwrap();
    lab.call("DEL", &pod, &config(&lab, "1.0.0")).good();
    assert_eq!(function(&lab), before);
    let hostile = host.by_index(hostile).unwrap();
    assert_eq!((hostile.altnames.len(), hostile.alias.as_deref()), (0, Some("of the other")));
    assert_eq!(host.addresses(Some(hostile.index)).unwrap().len(), 1, "nobody else's either");
    assert!(agent.ledger().records.is_empty());
    // Nor is it taken for the function when that is asked for by name.
    let vf0 = host.by_name("vf0").unwrap().index;
    host.set_up(vf0, false).unwrap();
    host.rename(vf0, "elsewhere").unwrap();
    host.add_altname(hostile.index, OsStr::new("vf0")).unwrap();
    assert_eq!(lab.call("ADD", &pod, &config(&lab, "1.0.0")).code(), 100);
    assert!(host.by_index(hostile.index).is_ok() && pod.left().is_empty());
}
