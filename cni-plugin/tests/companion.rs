//! NICs of VMs against the kernel: the companion netdev is made, works, is checked, and goes
//! without a trace, whatever happens on the way.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lab;

use std::io::{Read as _, Write as _};
use std::process::Command;
use std::time::Duration;

use lab::{
    CONTAINER, FakeAgent, Lab, Pod, answer, chained, files_in, until, variables, vhost_user,
};
use rdma_netlink::link::Links;
use serde_json::{Value, json};
use vhost_rdma_agent_api::{Live, Request, State};

#[test]
fn a_tap_with_its_bridge_and_its_way_to_the_network() {
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let (lab, pod) = (Lab::new(), Pod::new());
        let given = lab.ipam();
        let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
        let mut config = chained(&lab, version, &pod);
        config["ipam"] = json!({"type": "ipam"});
        let result = lab.call("ADD", &pod, &config).good();

        let tap = pod.link("rdma0");
        assert_eq!((tap.driver_kind.as_deref(), tap.up, tap.mtu), (Some("tun"), true, 1400));
        assert_eq!((tap.owner, tap.group), (Some(1000), Some(2000)));
        let mac = tap.address.as_ref().unwrap().to_string();
        assert_ne!(mac, "02:00:00:00:00:07", "the bridge would keep the guest's frames");
        let addresses = pod.links().addresses(Some(tap.index)).unwrap();
        assert!(addresses.is_empty(), "the guest owns its addresses: {addresses:?}");
        assert_eq!(lab.left_on_host().len(), 1);

        assert_eq!(result["cniVersion"], version);
        assert_eq!(result["interfaces"][0]["name"], "eth0", "what came before is kept");
        let ours = &result["interfaces"][1];
        assert_eq!((&ours["name"], &ours["mac"]), (&json!("rdma0"), &json!("02:00:00:00:00:07")));
        assert_eq!(ours["sandbox"], pod.path);
        let socket = if version == "1.1.0" {
            json!("/var/run/vhost-rdma/blue-0/vhost.sock")
        } else {
            Value::Null
        };
        assert_eq!(ours["socketPath"], socket);
        assert_eq!(result["ips"][1]["interface"], 1);
        assert_eq!(files_in(&given), [format!("{CONTAINER}.rdma0")]);
        {
            let ledger = agent.ledger();
            let done = ledger.records[0].done.as_ref().unwrap();
            assert_eq!(ledger.records[0].state, State::Attached);
            assert_eq!(json!(done.addresses[0]), result["ips"][1]["address"]);
        }
        if version >= "0.4.0" {
            config["prevResult"] = result;
            assert_eq!(lab.call("CHECK", &pod, &config).good(), Value::Null);
        }
        assert_eq!(lab.call("DEL", &pod, &config).good(), Value::Null);
        assert_eq!((pod.left(), lab.left_on_host()), (vec![], vec![]));
        assert!(agent.ledger().records.is_empty() && files_in(&given).is_empty());
    }
}

/// The VMM's part, by its user: it opens the tap without any privilege, and what it sends arrives
/// on the network's bridge, and back.
#[test]
fn the_pods_user_opens_the_tap_and_frames_pass_both_ways() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let mut nic = vhost_user("blue-0", "rdma0", "vmtap");
    nic.mtu = None;
    let _agent = FakeAgent::start(&lab.socket(), vec![nic]);
    lab.call("ADD", &pod, &chained(&lab, "1.0.0", &pod)).good();
    assert_eq!(
        pod.link("rdma0").driver_kind.as_deref(),
        Some("veth"),
        "the name that was asked for"
    );
    // Another NIC of the same network, as far as the bridge can tell: a socket on a veth behind
    // br0.
    let mut host = Links::open_in(&lab.host).unwrap();
    let veth = rdma_netlink::link::Veth { name: "far", peer: "port", ..Default::default() };
    host.add_veth(&veth).unwrap();
    let (far, port) = (host.by_name("far").unwrap().index, host.by_name("port").unwrap().index);
    let bridge = host.by_name("br0").unwrap().index;
    host.set_master(port, Some(bridge)).unwrap();
    host.set_up(port, true).unwrap();
    host.set_up(far, true).unwrap();
    let address = rdma_netlink::link::NewAddress::new("10.9.0.1/24".parse().unwrap());
    host.add_address(far, &address).unwrap();
    // A guest of a few lines: it takes the tap as user 1000 and asks by ARP who has 10.9.0.1. (The
    // device node is the container's own affair; its mode differs between machines.)
    let script = r#"
import fcntl, os, struct, sys, time, select
f = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
os.setgroups([]); os.setgid(2000); os.setuid(1000)
fcntl.ioctl(f, 0x400454ca, struct.pack('16sH22x', b'vmtap', 0x5002))
mac = bytes([2, 0, 0, 0, 0, 7])
ask = b'\xff' * 6 + mac + b'\x08\x06' + bytes([0, 1, 8, 0, 6, 4, 0, 1])
ask += mac + bytes([10, 9, 0, 2]) + b'\0' * 6 + bytes([10, 9, 0, 1])
end = time.time() + 20
while time.time() < end:
    os.write(f, b'\0' * 10 + ask)
    stop = time.time() + 0.5
    while select.select([f], [], [], max(0, stop - time.time()))[0]:
        frame = os.read(f, 2000)[10:]
        arp = frame[12:14] == b'\x08\x06' and frame[28:32] == bytes([10, 9, 0, 1])
        if frame[:6] == mac and arp:
            print('answered'); sys.exit(0)
sys.exit('no answer')
"#;
    let mut command = Command::new("python3");
    command.args(["-c", script]);
    let guest = pod.netns.run(|| Ok(command.output())).unwrap().unwrap();
    assert_eq!(String::from_utf8_lossy(&guest.stdout), "answered\n", "{guest:?}");
    lab.call("DEL", &pod, &chained(&lab, "1.0.0", &pod)).good();
    assert_eq!(pod.left(), Vec::<String>::new());
}

#[test]
fn a_pod_without_a_nic_goes_through_untouched() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![]);
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let config = chained(&lab, version, &pod);
        assert_eq!(lab.call("ADD", &pod, &config).good(), config["prevResult"]);
        lab.call("CHECK", &pod, &config).good();
        lab.call("DEL", &pod, &config).good();
    }
    assert_eq!(pod.left(), Vec::<String>::new());
    // Not a pod at all (`ctr run --cni`): the agent is not even asked.
    agent.ledger().requests.clear();
    let mut bare = variables("ADD", &pod.path, "eth1", "/none");
    bare.retain(|(name, _)| *name != "CNI_ARGS");
    let config = chained(&lab, "1.0.0", &pod);
    assert_eq!(lab.run(&bare, &config).good(), config["prevResult"]);
    assert!(agent.ledger().requests.is_empty());
    // Alone it was attached to a pod that lacks what it attaches.
    assert_eq!(lab.call("ADD", &pod, &lab.config("1.0.0")).code(), 7);
}

#[test]
fn several_nics_of_one_pod() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let nics =
        (0..4).map(|n| vhost_user(&format!("blue-{n}"), &format!("rdma{n}"), &format!("t{n}")));
    let agent = FakeAgent::start(&lab.socket(), nics.collect());
    let mut config = chained(&lab, "1.1.0", &pod);
    config["ipam"] = json!({"type": "ipam"});
    let result = lab.call("ADD", &pod, &config).good();
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 1 + 4 * 2);
    for n in 0..4 {
        let ip = &result["ips"][1 + n];
        let interface = ip["interface"].as_u64().unwrap();
        assert_eq!(
            result["interfaces"][usize::try_from(interface).unwrap()]["name"],
            format!("rdma{n}")
        );
    }
    assert_eq!((pod.left().len(), lab.left_on_host().len(), files_in(&given).len()), (12, 4, 4));
    config["prevResult"] = result;
    lab.call("CHECK", &pod, &config).good();
    lab.call("DEL", &pod, &config).good();
    assert_eq!((pod.left(), lab.left_on_host(), files_in(&given)), (vec![], vec![], vec![]));
    assert!(agent.ledger().records.is_empty());
}

#[test]
fn del_as_often_as_you_like_and_without_a_namespace() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let mut config = chained(&lab, "1.0.0", &pod);
    config["ipam"] = json!({"type": "ipam"});
    lab.call("ADD", &pod, &config).good();
    let path = lab.dir.path().to_str().unwrap().to_owned();
    drop(pod);
    until("the namespace's end", || lab.left_on_host().is_empty());
    config.as_object_mut().unwrap().remove("prevResult");
    for round in 0..5 {
        let answer = lab.run(&variables("DEL", "", "eth1", &path), &config);
        assert_eq!(answer.code(), 0, "{round}: {answer:?}");
        assert!(agent.ledger().records.is_empty() && files_in(&given).is_empty());
    }
    // And for a container that nobody ever heard of, with as little as the specification allows.
    let least = [("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "unknown"), ("CNI_IFNAME", "eth1")];
    assert_eq!(lab.run(&least, &lab.config("0.4.0")).code(), 0);
}

#[test]
fn check_sees_what_was_changed() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "vmtap")]);
    let mut config = chained(&lab, "1.0.0", &pod);
    config["ipam"] = json!({"type": "ipam"});
    config["prevResult"] = lab.call("ADD", &pod, &config).good();
    let check = || lab.call("CHECK", &pod, &config);
    check().good();
    let refused = |word: &str| {
        let answer = check();
        assert_eq!(answer.code(), 101, "{word}: {answer:?}");
        assert!(answer.document["msg"].as_str().unwrap().contains(word), "{word}: {answer:?}");
    };
    let (tap, mut links) = (pod.link("vmtap").index, pod.links());
    links.set_up(tap, false).unwrap();
    refused("vmtap in the pod is down");
    links.set_up(tap, true).unwrap();
    let master = pod.link("vmtap").master;
    links.set_master(tap, None).unwrap();
    refused("no port");
    links.set_master(tap, master).unwrap();
    check().good();
    let mut host = Links::open_in(&lab.host).unwrap();
    let outer = host.by_name(&lab.left_on_host()[0]).unwrap().index;
    host.set_master(outer, None).unwrap();
    refused("no port of br0");
    let bridge = host.by_name("br0").unwrap().index;
    host.set_master(outer, Some(bridge)).unwrap();
    for (live, word) in [
        (
            Live { healthy: false, reason: Some("link down".to_owned()), ..Live::default() },
            "link down",
        ),
        (Live { healthy: true, session: Some("failed".to_owned()), ..Live::default() }, "session"),
        (
            Live {
                healthy: true,
                differs: vec!["limit of QPs is 5, not 9".to_owned()],
                ..Live::default()
            },
            "limit of QPs",
        ),
    ] {
        agent.ledger().live = Some(live);
        refused(word);
    }
    agent.ledger().live = None;
    agent.ledger().records[0].state = State::Attaching;
    refused("not finished");
    agent.ledger().records[0].state = State::Attached;
    check().good();
    std::fs::remove_file(given.join(format!("{CONTAINER}.rdma0"))).unwrap();
    assert_eq!(check().code(), 100, "IPAM's own code");
    std::fs::write(given.join(format!("{CONTAINER}.rdma0")), "given").unwrap();
    links.delete(tap).unwrap();
    refused("no interface vmtap");
    // A result without our interface is not what ADD answered.
    config["prevResult"]["interfaces"].as_array_mut().unwrap().remove(1);
    let answer = lab.call("CHECK", &pod, &config);
    assert!(answer.document["msg"].as_str().unwrap().contains("prevResult"), "{answer:?}");
    // What is half gone goes all the same.
    lab.call("DEL", &pod, &config).good();
    assert_eq!((pod.left(), lab.left_on_host()), (vec![], vec![]));
}

#[test]
fn check_waits_for_what_is_on_its_way() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let _agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let mut config = chained(&lab, "1.0.0", &pod);
    config["prevResult"] = lab.call("ADD", &pod, &config).good();
    let (tap, mut links) = (pod.link("rdma0").index, pod.links());
    links.set_up(tap, false).unwrap();
    let child =
        lab.start(&variables("CHECK", &pod.path, "eth1", "/"), config.to_string().as_bytes());
    std::thread::sleep(Duration::from_millis(500));
    links.set_up(tap, true).unwrap();
    answer(child).good();
}

#[test]
fn what_is_in_the_way_is_refused_and_stays() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "vmtap")]);
    let config = chained(&lab, "1.0.0", &pod);
    for name in ["rdma0", "vmtap"] {
        pod.links().add_bridge(name).unwrap();
        let answer = lab.call("ADD", &pod, &config);
        assert_eq!(answer.code(), 100, "{answer:?}");
        assert!(answer.document["msg"].as_str().unwrap().contains(name), "{answer:?}");
        assert_eq!(pod.left(), [name], "somebody else's");
        assert!(agent.ledger().records.is_empty());
        let index = pod.link(name).index;
        pod.links().delete(index).unwrap();
    }
    // A second ADD for what is attached is refused, and the attachment stays as it is.
    lab.call("ADD", &pod, &config).good();
    assert_eq!(lab.call("ADD", &pod, &config).code(), 100);
    assert_eq!((pod.left().len(), agent.ledger().records.len()), (3, 1));
    lab.call("DEL", &pod, &config).good();
    // The host lacks the network's bridge.
    let mut host = Links::open_in(&lab.host).unwrap();
    let bridge = host.by_name("br0").unwrap().index;
    host.delete(bridge).unwrap();
    let answer = lab.call("ADD", &pod, &config);
    assert_eq!(answer.code(), 7, "{answer:?}");
    assert!(answer.document["msg"].as_str().unwrap().contains("br0"), "{answer:?}");
    assert!(pod.left().is_empty() && agent.ledger().records.is_empty());
}

/// In a chain most pods have no NIC, and of those the agent knows nothing.
#[test]
fn gc_and_check_of_a_chain_pass_over_pods_without_a_nic() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let mut config = chained(&lab, "1.1.0", &pod);
    config["ipam"] = json!({"type": "ipam"});
    lab.call("ADD", &pod, &config).good();
    let mut plain = variables("CHECK", &pod.path, "eth1", lab.dir.path().to_str().unwrap());
    plain[1].1 = "plain";
    plain[4].1 = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=plain";
    lab.run(&plain, &config).good();
    // Alone, a network of one NIC that nobody attached is a difference.
    let mut one = config.clone();
    one["deviceID"] = json!("blue-1");
    assert_eq!(lab.run(&plain, &one).code(), 101);
    let valid = json!([
        {"containerID": "plain", "ifname": "eth1"}, {"containerID": CONTAINER, "ifname": "eth1"}
    ]);
    let mut collect = config.clone();
    collect["cni.dev/valid-attachments"] = valid;
    lab.call("GC", &pod, &collect).good();
    let told: Value = serde_json::from_slice(&std::fs::read(given.join("gc")).unwrap()).unwrap();
    let told = told["cni.dev/valid-attachments"].as_array().unwrap();
    assert!(told.contains(&json!({"containerID": CONTAINER, "ifname": "rdma0"})), "{told:?}");
    assert!(told.contains(&json!({"containerID": "plain", "ifname": "eth1"})), "{told:?}");
    // An agent that is away has not said that there is nothing.
    agent.stop();
    assert_eq!(lab.run(&plain, &config).code(), 11);
}

#[test]
fn gc_removes_what_is_stale_and_only_that() {
    let (lab, pod, other) = (Lab::new(), Pod::new(), Pod::new());
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    agent.ledger().granted.insert("web-1".to_owned(), vec![vhost_user("blue-1", "rdma0", "rdma0")]);
    let mut config = chained(&lab, "1.1.0", &pod);
    config["ipam"] = json!({"type": "ipam"});
    lab.call("ADD", &pod, &config).good();
    let path = lab.dir.path().to_str().unwrap();
    let mut second = variables("ADD", &other.path, "eth1", path);
    second[1].1 = "second";
    second[4].1 = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1";
    lab.run(&second, &config).good();
    let collect = |valid: Value| {
        let mut config = config.clone();
        config["cni.dev/valid-attachments"] = valid;
        lab.run(&[("CNI_COMMAND", "GC"), ("CNI_PATH", path)], &config)
    };
    let both = json!(
        [{"containerID": CONTAINER, "ifname": "eth1"}, {"containerID": "second", "ifname": "eth1"}]
    );
    collect(both).good();
    assert_eq!(agent.ledger().records.len(), 2);
    collect(json!([{"containerID": "second", "ifname": "eth1"}])).good();
    assert_eq!((pod.left(), other.left().len(), lab.left_on_host().len()), (vec![], 3, 1));
    // The IPAM plugin was told the name that the address was given under.
    let told: Value = serde_json::from_slice(&std::fs::read(given.join("gc")).unwrap()).unwrap();
    let told = told["cni.dev/valid-attachments"].as_array().unwrap().clone();
    assert!(told.contains(&json!({"containerID": "second", "ifname": "rdma0"})), "{told:?}");
    assert!(!told.contains(&json!({"containerID": CONTAINER, "ifname": "rdma0"})), "{told:?}");
    // One that cannot be put back does not keep the others; the list itself is demanded.
    assert_eq!(lab.run(&[("CNI_COMMAND", "GC")], &config).code(), 7);
    assert_eq!(agent.ledger().records.len(), 1);
    collect(json!([])).good();
    assert_eq!((other.left(), lab.left_on_host()), (vec![], vec![]));
}

#[test]
fn a_hundred_pods_at_once() {
    let lab = Lab::new();
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![]);
    let pods: Vec<Pod> = (0..100).map(|_| Pod::new()).collect();
    for n in 0..100 {
        let nic = vhost_user(&format!("blue-{n}"), "rdma0", "rdma0");
        agent.ledger().granted.insert(format!("pod-{n}"), vec![nic]);
    }
    let mut config = lab.config("1.0.0");
    config["ipam"] = json!({"type": "ipam"});
    let input = config.to_string();
    let all = |command: &str| {
        let calls: Vec<_> = pods
            .iter()
            .enumerate()
            .map(|(n, pod)| {
                let (id, args) =
                    (format!("container-{n}"), format!("K8S_POD_NAMESPACE=x;K8S_POD_NAME=pod-{n}"));
                let mut variables =
                    variables(command, &pod.path, "eth1", lab.dir.path().to_str().unwrap());
                (variables[1].1, variables[4].1) = (&id, &args);
                lab.start(&variables, input.as_bytes())
            })
            .collect();
        calls.into_iter().map(|child| answer(child).good()).collect::<Vec<Value>>()
    };
    let results = all("ADD");
    let mut addresses: Vec<&str> =
        results.iter().map(|r| r["ips"][0]["address"].as_str().unwrap()).collect();
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), 100);
    assert_eq!(
        (lab.left_on_host().len(), files_in(&given).len(), agent.ledger().records.len()),
        (100, 100, 100)
    );
    assert!(pods.iter().all(|pod| pod.left().len() == 3));
    all("DEL");
    assert_eq!(
        (lab.left_on_host(), files_in(&given), agent.ledger().records.len()),
        (vec![], vec![], 0)
    );
    assert!(pods.iter().all(|pod| pod.left().is_empty()));
}

#[test]
fn without_the_agent() {
    let (lab, pod, plain) = (Lab::new(), Pod::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let config = chained(&lab, "1.1.0", &pod);
    lab.call("ADD", &pod, &config).good();
    agent.stop();
    let code = |command: &str, pod: &Pod, id: &str| {
        let mut variables = variables(command, &pod.path, "eth1", "/");
        variables[1].1 = id;
        let answer = lab.run(&variables, &config);
        (answer.code(), answer.document["msg"].as_str().unwrap_or_default().contains("node agent"))
    };
    assert_eq!(
        code("ADD", &plain, "other"),
        (11, true),
        "whether the pod has a NIC cannot be known"
    );
    assert_eq!(code("CHECK", &pod, CONTAINER), (11, true));
    assert_eq!(code("STATUS", &pod, CONTAINER), (50, true));
    // A pod that visibly has none may go; one that has waits for the agent.
    assert_eq!(code("DEL", &plain, "other"), (0, false));
    assert_eq!(code("DEL", &pod, CONTAINER), (11, true));
    assert_eq!(pod.left().len(), 3);
}

#[test]
fn status() {
    use vhost_rdma_agent_api::{Attachment, DeviceStatus, Status};
    let lab = Lab::new();
    let given = lab.ipam();
    let agent = FakeAgent::start(&lab.socket(), vec![]);
    let mut config = lab.config("1.1.0");
    config["ipam"] = json!({"type": "ipam"});
    let path = lab.dir.path().to_str().unwrap();
    let ask = || lab.run(&[("CNI_COMMAND", "STATUS"), ("CNI_PATH", path)], &config);
    assert_eq!(ask().good(), Value::Null);
    std::fs::write(given.join("broken"), "").unwrap();
    assert_eq!(ask().code(), 50, "IPAM's");
    std::fs::remove_file(given.join("broken")).unwrap();
    let mut device = DeviceStatus {
        id: "blue-0".to_owned(),
        pool: "blue".to_owned(),
        state: "granted".to_owned(),
        healthy: false,
        reason: None,
        cordoned: false,
        pod: None,
        container: None,
        attachments: vec![],
        session: None,
    };
    let not_ready = |device: &DeviceStatus| Status {
        problems: vec!["the daemon does not answer".to_owned()],
        devices: vec![device.clone()],
        ..Status::default()
    };
    agent.ledger().status = Some(not_ready(&device));
    let answer = ask();
    assert_eq!(answer.code(), 50);
    assert_eq!(answer.document["details"], "the daemon does not answer");
    let attachment = Attachment { container_id: "c".to_owned(), if_name: "e".to_owned() };
    device.attachments.push(attachment);
    agent.ledger().status = Some(not_ready(&device));
    assert_eq!(ask().code(), 51, "pods that are there are affected");
    assert!(agent.ledger().requests.iter().all(|request| *request == Request::Status));
}

/// Stdin of a terminal, closed stdout, arguments: what people do.
#[test]
fn by_hand() {
    let run = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_vhost-rdma-cni")).args(args).env_clear().output().unwrap()
    };
    let help = run(&["--help"]);
    assert!(
        help.status.success()
            && String::from_utf8(help.stdout).unwrap().contains("VHOST_RDMA_AGENT_SOCKET")
    );
    assert_eq!(
        String::from_utf8(run(&["-V"]).stdout).unwrap(),
        format!("vhost-rdma-cni {}\n", env!("CARGO_PKG_VERSION"))
    );
    assert_eq!(run(&["add"]).status.code(), Some(2));
    let mut child = Command::new(env!("CARGO_BIN_EXE_vhost-rdma-cni"))
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"{\"cniVersion\":\"1.0.0\"}").unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(text.ends_with("}\n") && text.contains("\"cniVersion\":\"1.0.0\""), "{text}");
    assert!(child.wait().unwrap().success());
}
