//! The cluster's side: servers and controller in a namespace of their own, and what an
//! administrator tells them.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::node::{Host, Products};
use crate::cache::Cache;
use crate::exec::wait_for;
use crate::k8s::cluster::{self, NAMESPACE, ours_is};
use crate::k8s::kubectl::Kubectl;
use crate::k8s::node::{Life, Node};
use crate::k8s::ours::CONTROLLER;
use crate::k8s::parts::Parts;
use crate::k8s::{plane, trust};

pub(super) const WAIT: Duration = Duration::from_secs(180);
/// Where the VMs find servers and controller: an address of their namespace.
pub(super) const SERVERS: &str = "10.222.0.1";
pub(super) const PEERS_PORT: u16 = 9748;
/// The network that is looked at, and one that it must not reach.
pub(super) const AMBER: &str = "amber";
pub(super) const BERYL: &str = "beryl";
const SECRET: &str = "vhost-rdma-channel-ca";

/// The servers, the controller, and the parts that they are made of.
pub(super) struct Plane {
    pub(super) node: Node,
}

pub(super) fn pause() {
    std::thread::sleep(Duration::from_millis(300));
}

impl Plane {
    /// Everything of the cluster but nodes.
    pub(super) fn start(cache: &Cache, products: &Products) -> Result<Self> {
        let parts = Parts::prepare(cache)?;
        let node = Node::start(&format!("vm-{}", std::process::id()), &parts.root, Life::Ours)?;
        let plane = Self { node };
        plane::start_servers(&plane.node, &parts)?;
        let program = products.controller();
        fs::copy(&program, plane.node.path("/usr/bin").join(CONTROLLER))
            .with_context(|| format!("cannot copy {}", program.display()))?;
        cluster::defined(&plane.node)?;
        plane.start_controller()?;
        plane.told()?;
        Ok(plane)
    }

    pub(super) fn kubectl(&self) -> Kubectl<'_> {
        Kubectl::new(&self.node)
    }

    pub(super) fn start_controller(&self) -> Result<()> {
        let open = format!("{SERVERS}:{PEERS_PORT}");
        cluster::start_controller_on(&self.node, &["--peers", &open])
    }

    /// What the administrator wants: a tenant's two networks, on every node with an rxe device.
    fn told(&self) -> Result<()> {
        let kubectl = self.kubectl();
        let network = |name: &str, cidr: &str| {
            let ipam = json!({"cidrs": [cidr], "blockSize": 16});
            ours_is("RdmaNetwork", name, &json!({"rnic": {"fabric": "rack"}, "ipam": ipam}))
        };
        let pool = |name: &str| json!({"name": name, "network": name, "count": 2});
        let rnic = json!({
            "selector": {"devices": ["rxe0"]}, "fabric": "rack", "hostAddress": "10.9.0.0/24",
        });
        let policy = json!({
            "nodeSelector": {}, "rnics": [rnic], "pools": [pool(AMBER), pool(BERYL)],
        });
        let tenant = json!({
            "namespaceSelector": {"matchLabels": {"team": "geology"}}, "networks": [AMBER, BERYL],
        });
        for object in [
            network(AMBER, "10.78.0.0/16"),
            network(BERYL, "10.79.0.0/16"),
            ours_is("RdmaTenant", "geology", &tenant),
            ours_is("RdmaNodePolicy", "rack", &policy),
        ] {
            kubectl.apply(&object)?;
        }
        for name in ["vhost-rdma-agent", "default"] {
            // The manifests may have made it.
            kubectl.run(&["create", "serviceaccount", name, "-n", NAMESPACE]).ok();
        }
        Ok(())
    }

    /// A node of the cluster with its address, as a kubelet would say it, and the account of its
    /// agent: the text of a kubeconfig whose authority is at `ca`.
    pub(super) fn join(&self, host: &Host, ca: &str) -> Result<String> {
        let kubectl = self.kubectl();
        let script = trust::NODE;
        self.node.sh("mkdir -p /lab/trust")?;
        self.node.run(&["sh", "-ec", script, "sh", &host.node, &host.address])?;
        let name = format!("agent-{}", host.node);
        // What a DaemonSet's pod is to the API server: it stays, however its node is.
        kubectl.create(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "nodeName": host.node, "serviceAccountName": "vhost-rdma-agent",
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "agent", "image": "localhost/pause:lab"}],
            },
        }))?;
        self.node.run(&["sh", "-ec", trust::TOKEN, "sh", &name])?;
        let made = self.node.path("/lab/trust/agent.kubeconfig");
        let text = fs::read_to_string(&made).with_context(|| made.display().to_string())?;
        let text = text.replace("https://127.0.0.1:6443", &format!("https://{SERVERS}:6443"));
        Ok(text.replace("/lab/pki/ca.crt", ca))
    }

    /// A node's object.
    pub(super) fn object(&self, host: &Host) -> Result<Value> {
        self.kubectl().get(&["rdmanode", &host.node])
    }

    /// The block of a network that the controller gave to a node.
    pub(super) fn block(&self, host: &Host, network: &str) -> Result<String> {
        let found = wait_for(&format!("a block of {network} for {}", host.node), WAIT, || {
            pause();
            let object = self.object(host)?;
            let all = object.pointer("/spec/blocks").and_then(Value::as_array).cloned();
            let mut all = all.into_iter().flatten();
            let own = all.find(|block| block.get("network") == Some(&network.into()));
            Ok(own.and_then(|block| block.get("cidr")?.as_str().map(str::to_owned)))
        });
        found.with_context(|| format!("{:?}", self.object(host)))
    }

    /// The root of a node's certificate, if all of its conditions of the channel hold.
    pub(super) fn certified(&self, host: &Host) -> Result<Option<String>> {
        let object = self.object(host)?;
        let all = object.pointer("/status/conditions").and_then(Value::as_array);
        let holds = |kind: &str| {
            let mut of = all.into_iter().flatten();
            of.any(|c| {
                c.get("type") == Some(&kind.into()) && c.get("status") == Some(&"True".into())
            })
        };
        let issuer = object.pointer("/status/channel/certificate/issuer").and_then(Value::as_str);
        Ok(issuer.filter(|_| holds("Certified") && holds("PeersFollowed")).map(str::to_owned))
    }

    /// How many roots are believed, and which one signs.
    pub(super) fn roots(&self) -> Result<(usize, String)> {
        let map =
            self.kubectl().get(&["configmap", "vhost-rdma-channel-roots", "-n", NAMESPACE])?;
        let text = |key: &str| map.pointer(&format!("/data/{key}")).and_then(Value::as_str);
        let all = text("ca.crt").context("no roots")?.matches("BEGIN CERTIFICATE").count();
        Ok((all, text("current").context("nothing says which root signs")?.to_owned()))
    }

    /// Asks for another root.
    pub(super) fn rotate(&self) -> Result<()> {
        let now = "vhost-rdma.io/rotate=now";
        let words = ["annotate", "secret", SECRET, "-n", NAMESPACE, now, "--overwrite"];
        self.kubectl().run(&words).map(drop)
    }

    /// Kills the API server and the controller.
    pub(super) fn away(&self) -> Result<()> {
        for server in [CONTROLLER, "kube-apiserver"] {
            self.node.kill(server, "KILL")?;
        }
        Ok(())
    }
}
