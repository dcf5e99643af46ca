//! What the tests stand on: a host, pods and bridges in network namespaces of their own, the plugin
//! as a program, and the node agent's side of the conversation.
//!
//! Needs root: without it the tests fail, they do not skip.

#![allow(dead_code, unused_imports, reason = "each test program uses a part of it")]

mod agent;

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rdma_netlink::Netns;
use rdma_netlink::link::{Link, Links};
use serde_json::{Value, json};
use vhost_rdma_agent_api::{Companion, NetnsMode, Nic, Personality, Request};

pub(crate) use agent::{FakeAgent, Kill};

/// Container and interface of most calls.
pub(crate) const CONTAINER: &str = "c0ffee";

/// A host with the bridge `br0`, and the directory that everything of a test is in.
pub(crate) struct Lab {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) host: Netns,
}

/// What a call answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: ExitStatus,
    pub(crate) document: Value,
    pub(crate) stderr: String,
}

impl Answer {
    /// The CNI code; 0 for success.
    pub(crate) fn code(&self) -> u64 {
        if self.status.success() {
            assert!(self.document["code"].is_null(), "{self:?}");
            return 0;
        }
        self.document["code"].as_u64().unwrap_or_else(|| panic!("{self:?}"))
    }

    /// The document of a call that must succeed.
    pub(crate) fn good(self) -> Value {
        assert_eq!(self.code(), 0, "{self:?}");
        self.document
    }

    pub(crate) fn killed(&self) -> bool {
        self.status.signal() == Some(9)
    }
}

impl Lab {
    pub(crate) fn new() -> Self {
        let host = Netns::create().expect("these tests need root: they make network namespaces");
        let mut links = Links::open_in(&host).unwrap();
        let lo = links.by_name("lo").unwrap().index;
        links.set_up(lo, true).unwrap();
        links.add_bridge("br0").unwrap();
        let bridge = links.by_name("br0").unwrap().index;
        links.set_up(bridge, true).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), host }
    }

    /// A script in the place of an IPAM plugin: it files what it gave, one file for each container
    /// and interface.
    pub(crate) fn ipam(&self) -> PathBuf {
        let files = self.dir.path().join("given");
        std::fs::create_dir_all(&files).unwrap();
        let script = format!(
            r#"#!/bin/sh
cd {files} && f="$CNI_CONTAINERID.$CNI_IFNAME"; input=$(cat)
case $CNI_COMMAND in
ADD) echo given > "$f"
  # Who gets which: a number from the name, so that parallel calls do not share one.
  n=$(printf %s "$f" | cksum | cut -d' ' -f1)
  echo "{{\"cniVersion\":\"1.0.0\",\"ips\":[{{\"address\":\"10.$((n / 65536 % 250)).$((n / 256 % 250)).$((n % 250 + 2))/8\",\"gateway\":\"10.0.0.1\"}}],
    \"routes\":[{{\"dst\":\"0.0.0.0/0\"}},{{\"dst\":\"172.16.0.0/12\",\"gw\":\"10.0.0.1\"}}],\"dns\":{{\"nameservers\":[\"10.0.0.1\"]}}}}" ;;
DEL) rm -f "$f" ;;
CHECK) test -e "$f" ||
  {{ echo '{{"cniVersion":"1.0.0","code":100,"msg":"not given"}}'; exit 1; }} ;;
GC) echo "$input" > gc ;;
STATUS) ! test -e broken ||
  {{ echo '{{"cniVersion":"1.1.0","code":50,"msg":"no address left"}}'; exit 1; }} ;;
esac
"#,
            files = files.display()
        );
        self.script("ipam", &script);
        files
    }

    pub(crate) fn script(&self, name: &str, text: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("agent.sock")
    }

    /// Where this host has device information files.
    pub(crate) fn device_info(&self) -> PathBuf {
        self.dir.path().join("devinfo")
    }

    /// Where this host's kubelet has its checkpoint; it need not exist.
    pub(crate) fn kubelet_plugins(&self) -> PathBuf {
        self.dir.path().join("plugins")
    }

    /// What this host's kernel shows of devices; it need not exist.
    pub(crate) fn sysfs(&self) -> PathBuf {
        self.dir.path().join("sys")
    }

    /// A configuration for the plugin alone.
    pub(crate) fn config(&self, version: &str) -> Value {
        json!({ "cniVersion": version, "name": "net", "type": "vhost-rdma" })
    }

    /// Starts a call in the host's namespace.
    pub(crate) fn start(&self, variables: &[(&str, &str)], input: &[u8]) -> Child {
        self.start_as(&[env!("CARGO_BIN_EXE_vhost-rdma-cni")], variables, input)
    }

    /// Likewise under another program, such as strace.
    pub(crate) fn start_as(
        &self,
        program: &[&str],
        variables: &[(&str, &str)],
        input: &[u8],
    ) -> Child {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("VHOST_RDMA_AGENT_SOCKET", self.socket());
        command.env("VHOST_RDMA_DEVICE_INFO_DIR", self.device_info());
        command.env("VHOST_RDMA_KUBELET_PLUGINS", self.kubelet_plugins());
        command.env("VHOST_RDMA_SYSFS", self.sysfs());
        command.envs(variables.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.host.run(|| Ok(command.spawn())).unwrap().unwrap();
        // A plugin that refuses before it reads closes its end.
        let _ = child.stdin.take().unwrap().write_all(input);
        child
    }

    pub(crate) fn run(&self, variables: &[(&str, &str)], input: &Value) -> Answer {
        answer(self.start(variables, input.to_string().as_bytes()))
    }

    /// A call for the container in `pod`.
    pub(crate) fn call(&self, command: &str, pod: &Pod, config: &Value) -> Answer {
        self.run(&variables(command, &pod.path, "eth1", self.dir.path().to_str().unwrap()), config)
    }

    /// Holds a NIC as another call would, until this is dropped.
    pub(crate) fn hold(&self, nic: &str) -> std::fs::File {
        let locks = self.dir.path().join("locks");
        std::fs::create_dir_all(&locks).unwrap();
        let file = std::fs::File::create(locks.join(nic)).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        file
    }

    /// The interfaces of the host beside `lo` and `br0`.
    pub(crate) fn left_on_host(&self) -> Vec<String> {
        names(&self.host, &["lo", "br0"])
    }
}

/// A chain's configuration, with the result of the plugin before.
pub(crate) fn chained(lab: &Lab, version: &str, pod: &Pod) -> Value {
    let mut config = lab.config(version);
    config["prevResult"] = json!({
        "cniVersion": version,
        "interfaces": [{"name": "eth0", "mac": "02:11:22:33:44:55", "sandbox": pod.path}],
        "ips": [{"address": "10.244.0.9/24", "interface": 0}],
        "dns": {},
    });
    if version < "1.0.0" {
        config["prevResult"]["ips"][0]["version"] = json!("4");
    }
    config
}

/// Waits for the end of a call.
pub(crate) fn answer(child: Child) -> Answer {
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let document = match stdout.trim() {
        "" => Value::Null,
        text => serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}")),
    };
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Answer { status: output.status, document, stderr }
}

/// All variables, as Kubernetes' runtimes set them.
pub(crate) fn variables<'a>(
    command: &'a str,
    netns: &'a str,
    ifname: &'a str,
    path: &'a str,
) -> Vec<(&'a str, &'a str)> {
    vec![
        ("CNI_COMMAND", command),
        ("CNI_CONTAINERID", CONTAINER),
        ("CNI_NETNS", netns),
        ("CNI_IFNAME", ifname),
        (
            "CNI_ARGS",
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;\
             K8S_POD_INFRA_CONTAINER_ID=c0ffee;K8S_POD_UID=u-1",
        ),
        ("CNI_PATH", path),
    ]
}

/// A pod's namespace with a path that names it while this lives.
pub(crate) struct Pod {
    pub(crate) netns: Netns,
    pub(crate) path: String,
}

impl Pod {
    pub(crate) fn new() -> Self {
        use std::os::fd::AsFd as _;
        let netns = Netns::create().unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), netns.as_fd().as_raw_fd());
        Self { netns, path }
    }

    pub(crate) fn links(&self) -> Links {
        Links::open_in(&self.netns).unwrap()
    }

    pub(crate) fn link(&self, name: &str) -> Link {
        self.links().by_name(name).unwrap()
    }

    /// Its interfaces beside `lo`.
    pub(crate) fn left(&self) -> Vec<String> {
        names(&self.netns, &["lo"])
    }
}

pub(crate) fn names(netns: &Netns, but: &[&str]) -> Vec<String> {
    let listed = Links::open_in(netns).unwrap().list().unwrap();
    listed.into_iter().map(|link| link.name).filter(|name| !but.contains(&name.as_str())).collect()
}

/// A NIC for a VM, with a companion on `br0`.
pub(crate) fn vhost_user(id: &str, if_name: &str, tap: &str) -> Nic {
    Nic {
        id: id.to_owned(),
        pool: "blue".to_owned(),
        network: "blue".to_owned(),
        if_name: if_name.to_owned(),
        mac: Some("02:00:00:00:00:07".to_owned()),
        addresses: Vec::new(),
        mtu: Some(1400),
        personality: Personality::VhostUser {
            dir: format!("/run/vhost-rdma-agent/nics/{id}"),
            socket: format!("/run/vhost-rdma-agent/nics/{id}/vhost.sock"),
            container_socket: format!("/var/run/vhost-rdma/{id}/vhost.sock"),
            companion: Companion {
                bridge: Some("br0".to_owned()),
                tap: tap.to_owned(),
                uid: Some(1000),
                gid: Some(2000),
            },
        },
    }
}

/// A VF without an RDMA device: this machine's kernel has none. A veth's end stands for the netdev.
pub(crate) fn vf(id: &str, if_name: &str, netdev: &str) -> Nic {
    Nic {
        personality: Personality::Vf {
            pci: String::new(),
            netdev: Some(netdev.to_owned()),
            rdma_device: String::new(),
            netns_mode: NetnsMode::Exclusive,
        },
        ..vhost_user(id, if_name, "")
    }
}

/// Waits until somebody was told what there is to undo.
pub(crate) fn until_detach(agent: &FakeAgent) {
    let told = |request: &Request| matches!(request, Request::Detach(_));
    until("a DEL", || agent.ledger().requests.iter().any(told));
}

/// Waits for something, with a bound.
pub(crate) fn until(what: &str, mut there: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(30);
    while !there() {
        assert!(std::time::Instant::now() < end, "{what} does not come about");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn files_in(dir: &Path) -> Vec<String> {
    let read = std::fs::read_dir(dir).unwrap();
    read.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
