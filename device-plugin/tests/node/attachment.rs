//! The CNI plugin's side: what it is told, what is remembered for it.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use vhost_rdma_agent::cni::CniSocket;
use vhost_rdma_agent_api::{
    Attach, Attached, AttachedNic, Detach, Detached, FaultKind, Gc, Intend, Personality, Record,
    Reply, Request, State, Step, call,
};
use vhost_rdma_proto::v1::Session;

use crate::kubelet::eventually;
use crate::world::{BLUE, CONFIG, World, attach, attachment};

async fn granted(pod: &str, ids: &[&str]) -> World {
    let world = World::new().await;
    world.allocate(ids).await.unwrap();
    for id in ids {
        world.kubelet.give(pod, BLUE, id);
    }
    world.settle().await;
    world
}

async fn nics(world: &World, asked: Attach) -> Vec<vhost_rdma_agent_api::Nic> {
    match world.ask(Request::Attach(asked)).await {
        Reply::Nics(nics) => nics,
        other => panic!("{other:?}"),
    }
}

async fn records(world: &World, request: Request) -> Vec<Record> {
    match world.ask(request).await {
        Reply::Records(records) => records,
        other => panic!("{other:?}"),
    }
}

fn detach(container: &str) -> Request {
    Request::Detach(Detach { container_id: container.to_owned(), if_name: None, device_id: None })
}

fn fault_kind(reply: &Reply) -> Option<FaultKind> {
    match reply {
        Reply::Fault(fault) => Some(fault.kind),
        _ => None,
    }
}

/// What a plugin does for `ADD`.
async fn add(world: &World, pod: &str, container: &str) -> Vec<String> {
    let asked = attach(pod, container);
    let given = nics(world, asked.clone()).await;
    let mut done = Vec::new();
    for nic in &given {
        let step = Step::MakeLink { name: nic.if_name.clone(), netns: Some(asked.netns.clone()) };
        let intend =
            Intend { attachment: asked.attachment.clone(), nic: nic.id.clone(), steps: vec![step] };
        assert_eq!(world.ask(Request::Intend(intend)).await, Reply::Done);
        done.push(AttachedNic {
            nic: nic.id.clone(),
            if_name: Some(nic.if_name.clone()),
            addresses: vec!["10.9.0.5/24".to_owned()],
            ..AttachedNic::default()
        });
    }
    let attached = Attached { attachment: asked.attachment, nics: done };
    assert_eq!(world.ask(Request::Attached(attached)).await, Reply::Done);
    given.into_iter().map(|nic| nic.id).collect()
}

#[tokio::test]
async fn a_pod_gets_its_nics_and_one_with_none_gets_none() {
    let world = granted("p", &["blue-0", "blue-2"]).await;
    assert_eq!(nics(&world, attach("other", "c9")).await, []);
    let given = nics(&world, attach("p", "c1")).await;
    assert_eq!(given.iter().map(|nic| nic.id.as_str()).collect::<Vec<_>>(), ["blue-0", "blue-2"]);
    let nic = &given[0];
    assert_eq!(nic.mac.as_ref(), Some(&world.daemon.table().nics["k8s.blue-0"].mac));
    let Personality::VhostUser { dir, socket, companion, .. } = &nic.personality else {
        panic!("{nic:?}")
    };
    assert!(socket.starts_with(dir.as_str()) && std::path::Path::new(socket).exists());
    assert_eq!(
        (companion.bridge.as_deref(), companion.uid, companion.gid),
        (Some("br0"), Some(107), Some(107))
    );
    assert_eq!(companion.tap, nic.if_name);
    // Again, since a runtime repeats what it does not know the end of.
    assert_eq!(nics(&world, attach("p", "c1")).await, given);
}

#[tokio::test]
async fn multus_gets_the_one_nic_that_it_names() {
    let world = granted("p", &["blue-0", "blue-2"]).await;
    let named =
        |pod: &str, id: &str| Attach { device_id: Some(id.to_owned()), ..attach(pod, "c1") };
    let given = nics(&world, named("p", "blue-2")).await;
    assert_eq!(
        (given.len(), given[0].id.as_str(), given[0].if_name.as_str()),
        (1, "blue-2", "eth0")
    );
    let reply = world.ask(Request::Attach(named("thief", "blue-2"))).await;
    assert_eq!(fault_kind(&reply), Some(FaultKind::Conflict));
    let reply = world.ask(Request::Attach(named("p", "blue-3"))).await;
    assert_eq!(fault_kind(&reply), Some(FaultKind::NotFound));
    let reply = world.ask(Request::Attach(named("p", "0000:00:00.0"))).await;
    assert_eq!(fault_kind(&reply), Some(FaultKind::NotFound));
    // The tap has the name that Multus wants, and the pod's file says so.
    let file = std::fs::read_to_string(world.path("nics/k8s.blue-2/nic.json")).unwrap();
    assert!(file.contains("ifname=eth0,"), "{file}");
}

#[tokio::test]
async fn addresses_from_ipam_bind_the_nic_and_check_sees_what_is() {
    let world = granted("p", &["blue-0"]).await;
    add(&world, "p", "c1").await;
    assert_eq!(world.daemon.table().nics["k8s.blue-0"].addresses, ["10.9.0.5"]);
    let file = std::fs::read_to_string(world.path("nics/k8s.blue-0/nic.json")).unwrap();
    assert!(file.contains("10.9.0.5"), "{file}");
    let check = || Request::Check(attachment("c1", "eth0"));
    let Reply::Checked(checked) = world.ask(check()).await else { panic!() };
    assert_eq!(checked[0].record.state, State::Attached);
    assert_eq!(checked[0].live.differs, Vec::<String>::new());
    assert_eq!(checked[0].live.limits["max_qps"], 7);
    {
        let mut table = world.daemon.table();
        let nic = table.nics.get_mut("k8s.blue-0").unwrap();
        nic.limits.as_mut().unwrap().max_qps = 999;
        nic.addresses.clear();
    }
    let Reply::Checked(checked) = world.ask(check()).await else { panic!() };
    assert_eq!(checked[0].live.differs.len(), 2, "{:?}", checked[0].live.differs);
    let reply = world.ask(Request::Check(attachment("c1", "eth9"))).await;
    assert_eq!(fault_kind(&reply), Some(FaultKind::NotFound));
}

/// IPAM gives an address to another pod as soon as DEL has given it back; the daemon gives it to no
/// two NICs.
#[tokio::test]
async fn an_address_that_del_gave_back_is_free_for_another_nic_at_once() {
    let mut world = granted("p", &["blue-0"]).await;
    world.allocate(&["blue-1"]).await.unwrap();
    world.kubelet.give("q", BLUE, "blue-1");
    world.settle().await;
    add(&world, "p", "c1").await;
    let detached = Detached { attachment: attachment("c1", "eth0"), nics: Vec::new() };
    let addresses = |id: &str| world.daemon.table().nics[id].addresses.clone();
    // The kubelet has not heard yet that the pod is gone, so its NIC is there still.
    assert_eq!(world.ask(Request::Detached(detached)).await, Reply::Done);
    assert_eq!(addresses("k8s.blue-0"), [""; 0]);
    add(&world, "q", "c2").await;
    assert_eq!(addresses("k8s.blue-1"), ["10.9.0.5"]);
    world.settle().await;
    assert_eq!((addresses("k8s.blue-0"), addresses("k8s.blue-1").len()), (Vec::new(), 1));
    // A VMM that is connected still does not get other addresses by the end of its sandbox, and the
    // daemon that is away hears of it later.
    world.daemon.set_session("k8s.blue-1", Session::DriverReady);
    let detached = Detached { attachment: attachment("c2", "eth0"), nics: Vec::new() };
    assert_eq!(world.ask(Request::Detached(detached)).await, Reply::Done);
    world.settle().await;
    assert_eq!(world.daemon.table().nics["k8s.blue-1"].addresses, ["10.9.0.5"]);
    world.daemon.set_session("k8s.blue-1", Session::Absent);
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    world.settle().await;
    assert_eq!(world.daemon.table().nics["k8s.blue-1"].addresses, [""; 0]);
}

#[tokio::test]
async fn what_was_intended_outlives_the_agent_and_del_may_be_repeated() {
    let mut world = granted("p", &["blue-0"]).await;
    let asked = attach("p", "c1");
    let given = nics(&world, asked.clone()).await;
    let step = Step::MakeLink { name: "vr-blue-0".to_owned(), netns: None };
    let intend = |id: &str| {
        Request::Intend(Intend {
            attachment: asked.attachment.clone(),
            nic: id.to_owned(),
            steps: vec![step.clone()],
        })
    };
    assert_eq!(world.ask(intend(&given[0].id)).await, Reply::Done);
    assert_eq!(world.ask(intend(&given[0].id)).await, Reply::Done);
    assert_eq!(fault_kind(&world.ask(intend("blue-1")).await), Some(FaultKind::NotFound));
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    let left = records(&world, detach("c1")).await;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].steps, [step]);
    assert_eq!(left[0].state, State::Detaching);
    let detached = Request::Detached(Detached { attachment: asked.attachment, nics: Vec::new() });
    for _ in 0..5 {
        assert_eq!(world.ask(detached.clone()).await, Reply::Done);
        assert_eq!(records(&world, detach("c1")).await, []);
    }
    assert_eq!(world.state_of("blue-0").await, "granted");
}

#[tokio::test]
async fn garbage_is_what_no_valid_attachment_names() {
    let world = granted("p", &["blue-0"]).await;
    add(&world, "p", "c1").await;
    let gc = |network: &str, valid: Vec<_>| Request::Gc(Gc { network: network.to_owned(), valid });
    assert_eq!(records(&world, gc("net", vec![attachment("c1", "eth0")])).await, []);
    assert_eq!(records(&world, gc("other", Vec::new())).await, []);
    assert_eq!(records(&world, gc("net", vec![attachment("c1", "eth1")])).await.len(), 1);
}

#[tokio::test]
async fn a_sandbox_that_its_runtime_forgot_is_undone_by_the_plugin_before_anyone_else_gets_the_nic()
{
    let world = granted("p", &["blue-0"]).await;
    add(&world, "p", "c1").await;
    let (called, done) = (world.path("called"), world.path("done"));
    let plugin = world.path("vhost-rdma-cni");
    let script = format!(
        "#!/bin/sh\nenv > {called}.new; cat >> {called}.new; mv {called}.new {called}\n\
         while [ ! -e {done} ]; do sleep 0.01; done\n",
        called = called.display(),
        done = done.display()
    );
    std::fs::write(&plugin, script).unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
    world.kubelet.delete("p");
    world.daemon.set_session("k8s.blue-0", Session::Absent);
    let agent = Arc::clone(world.agent());
    // The kubelet gives the ID to another pod at once.
    let allocated =
        tokio::spawn(async move { agent.allocate("blue", &[vec!["blue-0".to_owned()]]).await });
    let text = eventually("the plugin is called", || std::fs::read_to_string(&called).ok()).await;
    for expected in [
        "CNI_COMMAND=DEL",
        "CNI_CONTAINERID=c1",
        "CNI_IFNAME=eth0",
        "\"name\":\"net\"",
        "VHOST_RDMA_AGENT_SOCKET=",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(records(&world, detach("c1")).await.len(), 1);
    let detached = Detached { attachment: attachment("c1", "eth0"), nics: Vec::new() };
    world.ask(Request::Detached(detached)).await;
    std::fs::write(&done, "").unwrap();
    allocated.await.unwrap().unwrap();
    assert_eq!(world.state_of("blue-0").await, "granted");
}

#[tokio::test]
async fn a_plugin_that_fails_keeps_the_nic_from_everyone() {
    let world = granted("p", &["blue-0"]).await;
    add(&world, "p", "c1").await;
    let plugin = world.path("vhost-rdma-cni");
    std::fs::write(&plugin, "#!/bin/sh\necho '{\"code\":5,\"msg\":\"broken\"}'\nexit 1\n").unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
    world.kubelet.delete("p");
    world.settle().await;
    let refused = world.allocate(&["blue-0"]).await.unwrap_err();
    assert!(refused.contains("broken"), "{refused}");
    assert_eq!(world.nics(), ["k8s.blue-0"]);
}

#[tokio::test]
async fn the_socket_speaks_the_contract_and_only_root_may_open_it() {
    let world = granted("p", &["blue-0"]).await;
    let path = world.path("agent.sock");
    let socket = CniSocket::bind(&path).unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let server = tokio::spawn(socket.serve(Arc::clone(world.agent())));
    let (asked, at) = (Request::Attach(attach("p", "c1")), path.clone());
    let patience = std::time::Duration::from_secs(30);
    let reply = tokio::task::spawn_blocking(move || call(&at, &asked, patience)).await.unwrap();
    assert!(matches!(reply, Ok(Reply::Nics(nics)) if nics.len() == 1));
    let at = path.clone();
    let junk = tokio::task::spawn_blocking(move || {
        use std::io::{Read as _, Write as _};
        let mut stream = std::os::unix::net::UnixStream::connect(at).unwrap();
        stream.write_all(b"{\"version\":99}\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        said
    });
    assert!(junk.await.unwrap().contains("bad-request"));
    server.abort();
    let _ = server.await;
    assert!(!path.exists());
}

#[tokio::test]
async fn a_vms_nic_gets_the_mac_that_the_runtime_asks_for_before_a_vmm_saw_it() {
    const MAC: &str = "02:00:00:00:00:07";
    let mut world = granted("p", &["blue-0"]).await;
    let with = |mac: &str| Attach { mac: Some(mac.to_owned()), ..attach("p", "c1") };
    let before = world.daemon.table().nics["k8s.blue-0"].mac.clone();
    for bad in ["", "02:00:00:00:00", "03:00:00:00:00:07", "00:00:00:00:00:00", "02:0:00:00:00:071"]
    {
        let reply = world.ask(Request::Attach(with(bad))).await;
        assert_eq!(fault_kind(&reply), Some(FaultKind::BadRequest), "{bad}");
    }
    let given = nics(&world, with(MAC)).await;
    assert_eq!(given[0].mac.as_deref(), Some(MAC));
    assert_eq!(world.daemon.table().nics["k8s.blue-0"].mac, MAC);
    let file = std::fs::read_to_string(world.path("nics/k8s.blue-0/nic.json")).unwrap();
    assert!(file.contains(MAC) && !file.contains(&before), "{file}");
    // It is the NIC's from now on, whoever starts again.
    world.kill_agent().await;
    world.daemon.table().nics.clear();
    world.start_agent(CONFIG).await;
    world.settle().await;
    assert_eq!(world.daemon.table().nics["k8s.blue-0"].mac, MAC);
    // Another's is another's, and the NIC stays what it was.
    world.allocate(&["blue-1"]).await.unwrap();
    world.kubelet.give("q", BLUE, "blue-1");
    let own = world.daemon.table().nics["k8s.blue-1"].mac.clone();
    let theirs = Attach { mac: Some(MAC.to_owned()), ..attach("q", "c2") };
    let reply = world.ask(Request::Attach(theirs)).await;
    assert_eq!(fault_kind(&reply), Some(FaultKind::Conflict));
    assert_eq!(world.daemon.table().nics["k8s.blue-1"].mac, own);
    // And a guest that runs keeps its own.
    world.daemon.set_session("k8s.blue-0", Session::DriverReady);
    world.settle().await;
    let reply = world.ask(Request::Attach(with("02:00:00:00:00:08"))).await;
    assert_eq!(fault_kind(&reply), Some(FaultKind::Conflict));
    assert_eq!(world.daemon.table().nics["k8s.blue-0"].mac, MAC);
}

/// Not left behind by a test that fails.
struct Helper(std::process::Child);

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

#[tokio::test]
async fn an_agent_without_rights_has_a_helper_undo_what_was_forgotten() {
    let mut world = World::new().await;
    world.undo = vhost_rdma_agent::agent::Undo::ByHelper;
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    add(&world, "p", "c1").await;
    // The plugin itself says what it was told, and that it is undone.
    let socket = world.path("agent.sock");
    let plugin = world.path("vhost-rdma-cni");
    let script = "#!/usr/bin/python3\nimport os,socket,sys\n\
                  open(os.path.dirname(sys.argv[0])+'/called',\
                  'w').write(os.environ['CNI_COMMAND']+os.environ['CNI_CONTAINERID'])\n\
                  s=socket.socket(socket.AF_UNIX)\n\
                  s.connect(os.environ['VHOST_RDMA_AGENT_SOCKET'])\n\
                  s.sendall(b'{\"version\":1,\"op\":\"detached\",\"container_id\":\"c1\",\
                  \"if_name\":\"eth0\"}\\n')\ns.recv(99)\n";
    std::fs::write(&plugin, script).unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
    let server = tokio::spawn(CniSocket::bind(&socket).unwrap().serve(Arc::clone(world.agent())));
    let helper = std::process::Command::new(env!("CARGO_BIN_EXE_vhost-rdma-agent"))
        .arg("--socket")
        .arg(&socket)
        .args(["undo", "--cni-dir"])
        .arg(world.dir.path())
        .spawn();
    let mut helper = Helper(helper.unwrap());
    assert_eq!(records(&world, Request::Forgotten).await, []);
    world.kubelet.delete("p");
    world.settle().await;
    assert!(world.nics().is_empty());
    assert_eq!(std::fs::read_to_string(world.path("called")).unwrap(), "DELc1");
    let pid = rustix::process::Pid::from_child(&helper.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let ended = tokio::task::spawn_blocking(move || helper.0.wait().unwrap()).await.unwrap();
    assert!(ended.success(), "it ends when it is told to");
    server.abort();
}

/// A pod names a network as often as it likes, and what its DEL leaves stays.
#[tokio::test]
async fn more_attachments_than_can_be_kept_are_refused_and_those_that_there_are_end() {
    let mut world = granted("p", &["blue-0"]).await;
    let config = serde_json::json!({ "name": "x".repeat(60 << 10) });
    let named = |if_name: &str| Attach {
        attachment: attachment("c1", if_name),
        config: Some(config.clone()),
        device_id: Some("blue-0".to_owned()),
        ..attach("p", "c1")
    };
    let mut names: Vec<String> = Vec::new();
    let refused = loop {
        let if_name = format!("net{}", names.len());
        match world.ask(Request::Attach(named(&if_name))).await {
            Reply::Nics(_) => {}
            other => break other,
        }
        let begun = Detach {
            container_id: "c1".to_owned(),
            if_name: Some(if_name.clone()),
            device_id: None,
        };
        assert_eq!(records(&world, Request::Detach(begun)).await.len(), 1);
        names.push(if_name);
        assert!(names.len() < 40, "nothing is refused");
    };
    assert_eq!(fault_kind(&refused), Some(FaultKind::Conflict), "{refused:?}");
    // What was taken can be read again, and ends.
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    assert_eq!(records(&world, detach("c1")).await.len(), names.len());
    for name in &names {
        let detached = Detached { attachment: attachment("c1", name), nics: Vec::new() };
        assert_eq!(world.ask(Request::Detached(detached)).await, Reply::Done);
    }
    assert_eq!(nics(&world, named("net0")).await.len(), 1);
}
