//! What a tenant can write: a NetworkAttachmentDefinition, hence every field of the network
//! configuration, and an agent or files of their own anywhere in a pod's file systems that the host
//! sees.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lab;

use std::os::unix::process::CommandExt as _;

use lab::{CONTAINER, FakeAgent, Lab, Pod, variables, vf, vhost_user};
use rdma_netlink::link::{Links, NewAddress, NewRoute, Veth};
use serde_json::json;
use vhost_rdma_agent_api::{Personality, Request, Step};

/// An interface of the host that carries it.
fn with_uplink(lab: &Lab) {
    let mut host = Links::open_in(&lab.host).unwrap();
    host.add_veth(&Veth { name: "uplink", peer: "wire", ..Veth::default() }).unwrap();
    for name in ["uplink", "wire"] {
        let index = host.by_name(name).unwrap().index;
        host.set_up(index, true).unwrap();
    }
}

#[test]
fn an_agent_that_the_configuration_names_is_not_asked() {
    let (lab, pod) = (Lab::new(), Pod::new());
    with_uplink(&lab);
    let theirs = lab.dir.path().join("theirs.sock");
    let fake = FakeAgent::start(&theirs, vec![vf("blue-0", "eth1", "uplink")]);
    let real = FakeAgent::start(&lab.socket(), vec![]);
    let mut config = lab.config("1.1.0");
    config["agentSocket"] = json!(theirs);
    config["deviceID"] = json!("blue-0");
    config["prevResult"] = json!({"cniVersion": "1.1.0"});
    config["cni.dev/valid-attachments"] = json!([]);
    for (command, code) in [("ADD", 7), ("CHECK", 7), ("STATUS", 7), ("DEL", 0), ("GC", 0)] {
        let answer = lab.call(command, &pod, &config);
        assert_eq!(answer.code(), code, "{command}: {answer:?}");
    }
    assert_eq!(fake.ledger().requests, []);
    assert!(!real.ledger().requests.is_empty(), "DEL and GC went to the host's agent");
    assert!(pod.left().is_empty() && lab.left_on_host().contains(&"uplink".to_owned()));
    // Whoever still has the usual value in a configuration means the host's own.
    config["agentSocket"] = json!(lab.socket());
    assert_eq!(lab.call("ADD", &pod, &config).code(), 3);
}

#[test]
fn an_agent_that_is_not_roots_is_not_asked() {
    let (lab, pod) = (Lab::new(), Pod::new());
    std::fs::create_dir(lab.dir.path().join("nobody")).unwrap();
    let socket = lab.dir.path().join("nobody/s");
    let dir = lab.dir.path();
    for path in [dir, &dir.join("nobody")] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    // Answers whatever it is asked with a NIC.
    let script = format!(
        "import socket\ns=socket.socket(socket.AF_UNIX)\ns.bind('{0}')\ns.listen()\n\
         open('{0}.ready','w')\nc,_=s.accept()\nopen('{0}.asked','wb').write(c.recv(9999))\n",
        socket.display()
    );
    let mut child = std::process::Command::new("python3")
        .args(["-c", &script])
        .uid(65534)
        .gid(65534)
        .spawn()
        .unwrap();
    lab::until("a stranger listens", || socket.with_extension("ready").exists());
    let mut given = variables("ADD", &pod.path, "eth1", "/opt/cni/bin");
    given.push(("VHOST_RDMA_AGENT_SOCKET", socket.to_str().unwrap()));
    let answer = lab.run(&given, &lab.config("1.1.0"));
    child.wait().unwrap();
    assert_eq!(answer.code(), 999, "{answer:?}");
    assert!(answer.document["msg"].as_str().unwrap().contains("65534"), "{answer:?}");
    assert_eq!(std::fs::read(socket.with_extension("asked")).unwrap(), b"", "nothing was said");
}

#[test]
fn a_device_information_file_elsewhere_or_of_another_container_is_refused() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "eth1", "eth1")]);
    let victim = lab.dir.path().join(format!("victim-{CONTAINER}"));
    std::fs::write(&victim, "precious").unwrap();
    let infos = lab.device_info();
    std::fs::create_dir(&infos).unwrap();
    let file = |path: &std::path::Path| {
        let mut config = lab.config("1.1.0");
        config["deviceID"] = json!("blue-0");
        config["runtimeConfig"] = json!({"CNIDeviceInfoFile": path});
        config
    };
    let elsewhere = [
        victim.clone(),
        infos.join(format!("../victim-{CONTAINER}")),
        infos.join("net-other_net1"),
        "/etc/cron.d/c0ffee".into(),
    ];
    for path in elsewhere {
        let answer = lab.call("ADD", &pod, &file(&path));
        assert_eq!(answer.code(), 7, "{path:?}: {answer:?}");
        assert!(agent.ledger().requests.is_empty(), "refused before anything was asked");
    }
    // A link that lies there is replaced, not followed.
    let own = infos.join(format!("net-{CONTAINER}_eth1"));
    std::os::unix::fs::symlink(&victim, &own).unwrap();
    lab.call("ADD", &pod, &file(&own)).good();
    assert!(std::fs::read_to_string(&own).unwrap().contains("vhost-user"));
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    lab.call("DEL", &pod, &file(&own)).good();
}

#[test]
fn what_the_host_lives_on_is_not_moved_whatever_the_agent_answers() {
    let (lab, pod) = (Lab::new(), Pod::new());
    with_uplink(&lab);
    let mut host = Links::open_in(&lab.host).unwrap();
    let uplink = host.by_name("uplink").unwrap().index;
    host.add_address(uplink, &NewAddress::new("192.0.2.2/24".parse().unwrap())).unwrap();
    let gateway = "192.0.2.1".parse().unwrap();
    host.add_route(&NewRoute::via("0.0.0.0/0".parse().unwrap(), gateway, uplink)).unwrap();
    let agent = FakeAgent::start(&lab.socket(), vec![vf("vf-0", "net1", "uplink")]);
    let answer = lab.call("ADD", &pod, &lab.config("1.1.0"));
    assert!(answer.document["msg"].as_str().unwrap().contains("default route"), "{answer:?}");
    // One that is not the function's.
    let mut nic = vf("vf-0", "net1", "wire");
    let Personality::Vf { pci, .. } = &mut nic.personality else { panic!() };
    "0000:03:00.1".clone_into(pci);
    agent.ledger().granted.insert("web-0".to_owned(), vec![nic]);
    let answer = lab.call("ADD", &pod, &lab.config("1.1.0"));
    assert_eq!(answer.code(), 100, "{answer:?}");
    assert!(pod.left().is_empty());
    assert_eq!(lab.left_on_host().len(), 2);
}

#[test]
fn a_link_of_the_host_that_is_not_ours_is_not_removed() {
    let (lab, pod) = (Lab::new(), Pod::new());
    with_uplink(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    lab.call("ADD", &pod, &lab.config("1.1.0")).good();
    let step = Step::MakeLink { name: "uplink".to_owned(), netns: None };
    agent.ledger().records[0].steps.push(step);
    let answer = lab.call("DEL", &pod, &lab.config("1.1.0"));
    assert!(answer.document["msg"].as_str().unwrap().contains("never made"), "{answer:?}");
    assert!(lab.left_on_host().contains(&"uplink".to_owned()));
    agent.ledger().records[0].steps.pop();
    lab.call("DEL", &pod, &lab.config("1.1.0")).good();
}

#[test]
fn a_configuration_may_not_be_as_long_as_it_likes() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let mut config = lab.config("1.1.0");
    // What a DEL does not need is not kept.
    config["junk"] = json!("x".repeat(1 << 20));
    lab.call("ADD", &pod, &config).good();
    let kept = |request: &Request| match request {
        Request::Attach(attach) => attach.config.clone(),
        _ => None,
    };
    let kept = agent.ledger().requests.iter().find_map(kept).unwrap();
    assert!(kept.get("junk").is_none() && kept["name"] == "net", "{kept}");
    lab.call("DEL", &pod, &config).good();
    config["args"] = json!({"junk": "x".repeat(40 << 10)});
    agent.ledger().requests.clear();
    assert_eq!(lab.call("ADD", &pod, &config).code(), 7);
    assert_eq!(agent.ledger().requests, []);
}

/// A plugin of the tenant's choice that never takes an address back does not keep the NIC. Whether
/// it gave any decides what is owed.
#[test]
fn an_ipam_that_takes_nothing_back_keeps_no_nic() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let mut config = lab.config("1.1.0");
    config["ipam"] = json!({"type": "ipam"});
    let mut collect = config.clone();
    collect["cni.dev/valid-attachments"] = json!([]);
    let says = r#"echo '{"cniVersion":"1.0.0","code":100,"msg":"never"}'; exit 1"#;
    let gives = r#"echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/8"}]}'"#;
    let ipam = |add: &str, del: &str| {
        let cases = format!("case $CNI_COMMAND in ADD) {add} ;; DEL) {del} ;; esac");
        lab.script("ipam", &format!("#!/bin/sh\ncat > /dev/null\n{cases}\n"));
    };
    for (n, (add, added, owes)) in [
        (says, false, false),
        (r#"echo '{"cniVersion":"1.0.0"}'"#, true, false),
        ("kill -9 $$", false, true),
        ("echo junk", false, true),
        (gives, true, true),
    ]
    .into_iter()
    .enumerate()
    {
        ipam(add, says);
        assert_eq!(lab.call("ADD", &pod, &config).code() == 0, added, "{add}");
        assert_eq!(agent.ledger().records.len() == 1, added || owes, "{add}");
        // What is owed is tried again by DEL and by GC, and what is still owed fails neither.
        for command in ["DEL", "DEL", "GC"] {
            lab.call(command, &pod, &collect).good();
            let ledger = agent.ledger();
            assert!(ledger.records.is_empty(), "{add} {command}");
            assert_eq!(ledger.owed.len() == 1, owes, "{add} {command}");
        }
        assert!(pod.left().is_empty() && lab.left_on_host().is_empty(), "{add}");
        ipam(add, "exit 0");
        lab.call(["DEL", "GC"][n % 2], &pod, &collect).good();
        assert!(agent.ledger().owed.is_empty(), "{add}");
    }
}

fn filed(agent: &FakeAgent) -> (usize, usize) {
    let ledger = agent.ledger();
    (ledger.records.len(), ledger.owed.len())
}

/// The address is all that is forgiven, and an agent that cannot remember it keeps the NIC.
#[test]
fn what_an_ipam_owes_is_all_that_del_lets_go() {
    let (lab, pod) = (Lab::new(), Pod::new());
    let agent = FakeAgent::start(&lab.socket(), vec![vhost_user("blue-0", "rdma0", "rdma0")]);
    let mut config = lab.config("1.1.0");
    config["ipam"] = json!({"type": "ipam"});
    let script = |del: &str| {
        let gives = r#"echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/8"}]}'"#;
        let cases = format!("case $CNI_COMMAND in ADD) {gives} ;; DEL) {del} ;; esac");
        lab.script("ipam", &format!("#!/bin/sh\ncat > /dev/null\n{cases}\n"));
    };
    script("exit 1");
    lab.call("ADD", &pod, &config).good();
    let step = Step::Other { name: "of-another-release".to_owned(), data: json!({}) };
    agent.ledger().records[0].steps.push(step);
    assert_eq!(lab.call("DEL", &pod, &config).code(), 102);
    assert_eq!(filed(&agent), (1, 0));
    agent.ledger().records[0].steps.pop();
    agent.ledger().old = true;
    assert_ne!(lab.call("DEL", &pod, &config).code(), 0);
    assert_eq!(filed(&agent), (1, 0));
    agent.ledger().old = false;
    lab.call("DEL", &pod, &config).good();
    let owed = agent.ledger().owed.clone();
    assert_eq!(filed(&agent), (0, 1));
    assert!(matches!(owed[0].steps[..], [Step::Ipam { .. }]), "{owed:?}");
}
