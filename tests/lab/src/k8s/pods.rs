//! Pods of the tests: the virtual guest as their program, no privileges, no path of the host, and
//! what they say of themselves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::exec::{self, wait_for};
use crate::k8s::kubectl::Kubectl;
use crate::k8s::node::Node;
use crate::k8s::ours::GUEST_IMAGE;

const WAIT: Duration = Duration::from_secs(180);
const PORT: u16 = 7471;
/// The RAM of `vguest-pod`.
const GUEST_RAM: &str = "16Mi";

/// A pod to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    /// Whose NIC; none if it wants none.
    pub(crate) pool: Option<&'a str>,
    /// More arguments of the program.
    pub(crate) args: &'a [&'a str],
    /// Its guest's memory is huge pages.
    pub(crate) huge: bool,
    /// What it runs in the virtual guest's place: an image and a command.
    pub(crate) plain: Option<(&'a str, &'a [&'a str])>,
}

impl<'a> Wanted<'a> {
    pub(crate) fn new(name: &'a str, pool: &'a str) -> Self {
        Self { name, pool: Some(pool), args: &[], huge: false, plain: None }
    }

    /// The pod's specification. What the "restricted" Pod Security Standard asks for, word by word;
    /// the memory limit covers the guest's RAM.
    fn spec(&self) -> Value {
        let mut limits = json!({"memory": "96Mi", "cpu": "250m"});
        if let (Some(pool), Some(map)) = (self.pool, limits.as_object_mut()) {
            map.insert(resource(pool), json!(1));
            if self.huge {
                map.insert("hugepages-2Mi".to_owned(), json!(GUEST_RAM));
            }
        }
        let (image, command) = match (self.plain, self.pool) {
            (Some(plain), _) => plain,
            (None, Some(_)) => (GUEST_IMAGE, &["/bin/vguest-pod"][..]),
            (None, None) => (GUEST_IMAGE, &["/bin/sleep", "1000000"][..]),
        };
        json!({
            "automountServiceAccountToken": false,
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 1000, "runAsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "vm",
                "image": image,
                "imagePullPolicy": "Never",
                "command": command,
                "args": self.args,
                // The virtual guest's own patience, and of its queue pairs.
                "env": [
                    {"name": "VHOST_RDMA_PATIENCE", "value": exec::patience().to_string()},
                ],
                "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                },
                "resources": {"limits": limits, "requests": {"cpu": "10m"}},
            }],
        })
    }

    pub(crate) fn manifest(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "labels": {"app": self.name}},
            "spec": self.spec(),
        })
    }

    /// As many of it as `replicas`, kept at that number by the cluster.
    pub(crate) fn replica_set(&self, replicas: u32) -> Value {
        json!({
            "apiVersion": "apps/v1", "kind": "ReplicaSet",
            "metadata": {"name": self.name},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": self.name}},
                "template": {"metadata": {"labels": {"app": self.name}}, "spec": self.spec()},
            },
        })
    }
}

/// The extended resource of a pool.
pub(crate) fn resource(pool: &str) -> String {
    format!("vhost-rdma.io/{pool}")
}

/// A running pod with one NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) ip: String,
    /// The ID that it was given.
    pub(crate) id: String,
    pub(crate) env: BTreeMap<String, String>,
}

impl Pod {
    /// What the agent's variable `VHOST_RDMA_<POOL>_0_<what>` says.
    pub(crate) fn variable(&self, pool: &str, what: &str) -> Result<&str> {
        let name = format!("VHOST_RDMA_{}_0_{what}", pool.to_uppercase());
        self.env
            .get(&name)
            .map(String::as_str)
            .with_context(|| format!("pod {} has no {name}", self.name))
    }
}

/// The session's state as the virtual guest sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) number: u64,
    /// How often its device was started over the same connection.
    pub(crate) life: u64,
    pub(crate) mac: String,
    pub(crate) qpn: u64,
}

/// Pods of a cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pods<'a> {
    pub(crate) node: &'a Node,
    pub(crate) kubectl: Kubectl<'a>,
}

impl<'a> Pods<'a> {
    pub(crate) fn new(node: &'a Node) -> Self {
        Self { node, kubectl: Kubectl::new(node) }
    }

    /// Creates a pod and waits until it runs and its guest has a session.
    pub(crate) fn start(&self, wanted: &Wanted<'_>) -> Result<Pod> {
        self.kubectl.create(&wanted.manifest())?;
        self.kubectl.wait_phase(wanted.name, "Running", WAIT)?;
        let pod = self.look(wanted.name, wanted.pool)?;
        if wanted.pool.is_some() && wanted.plain.is_none() {
            self.wait_session(&pod, 1)?;
        }
        Ok(pod)
    }

    /// Creates a replica set without waiting for anything.
    pub(crate) fn create_set(&self, wanted: &Wanted<'_>, replicas: u32) -> Result<()> {
        self.kubectl.create(&wanted.replica_set(replicas))
    }

    /// Waits until a replica set has all of its pods running; a pod that failed has been replaced
    /// by then. The pods.
    pub(crate) fn wait_set(&self, wanted: &Wanted<'_>, replicas: usize) -> Result<Vec<Pod>> {
        let mut names = Vec::new();
        let outcome = wait_for(&format!("{replicas} pods of {}", wanted.name), WAIT, || {
            std::thread::sleep(Duration::from_millis(200));
            names = self.running(wanted.name)?;
            Ok((names.len() >= replicas).then_some(()))
        });
        outcome.with_context(|| {
            self.kubectl.run(&["get", "pods", "-o", "wide"]).unwrap_or_else(|e| format!("{e:#}"))
        })?;
        let pods: Vec<Pod> =
            names.iter().map(|n| self.look(n, wanted.pool)).collect::<Result<_>>()?;
        for pod in &pods {
            self.wait_session(pod, 1)?;
        }
        Ok(pods)
    }

    /// Names of the running pods with this label that nobody is deleting.
    pub(crate) fn running(&self, app: &str) -> Result<Vec<String>> {
        let list = self.kubectl.get(&["pods", "-l", &format!("app={app}")])?;
        let items = list.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
        Ok(items
            .iter()
            .filter(|p| {
                p.pointer("/status/phase").and_then(Value::as_str) == Some("Running")
                    && p.pointer("/metadata/deletionTimestamp").is_none()
            })
            .filter_map(|p| p.pointer("/metadata/name").and_then(Value::as_str))
            .map(ToOwned::to_owned)
            .collect())
    }

    /// Deletes a replica set and waits until its pods are gone.
    pub(crate) fn delete_set(&self, name: &str) -> Result<()> {
        self.kubectl.run(&["delete", "replicaset", name, "--wait=false"])?;
        self.kubectl.wait_gone(&["pods", "-l", &format!("app={name}")])
    }

    /// What a running pod is and was given.
    pub(crate) fn look(&self, name: &str, pool: Option<&str>) -> Result<Pod> {
        let pod = self.kubectl.get(&["pod", name])?;
        let ip = pod.pointer("/status/podIP").and_then(Value::as_str).context("no pod IP")?;
        let text = self.kubectl.run(&["exec", name, "--", "/bin/env"])?;
        let env: BTreeMap<String, String> = text
            .lines()
            .filter_map(|l| l.split_once('='))
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect();
        let mut seen = Pod { name: name.to_owned(), ip: ip.to_owned(), id: String::new(), env };
        if let Some(pool) = pool {
            seen.id = seen.variable(pool, "ID")?.to_owned();
        }
        Ok(seen)
    }

    /// A request to the program of a pod.
    pub(crate) fn ask(&self, pod: &Pod, request: &Value) -> Result<Value> {
        let script = format!("echo '{request}' | busybox nc -w 40 {} {PORT}", pod.ip);
        let text = self.node.sh(&script).with_context(|| format!("pod {}", pod.name))?;
        let answer: Value = serde_json::from_str(&text)
            .with_context(|| format!("pod {} answered {text:?} to {request}", pod.name))?;
        match answer.get("error").and_then(Value::as_str) {
            Some(error) => bail!("pod {}: {error}", pod.name),
            None => Ok(answer),
        }
    }

    /// The session of a pod, if there is one.
    pub(crate) fn session(&self, pod: &Pod) -> Result<Option<Session>> {
        let status = self.ask(pod, &json!({"do": "status"}))?;
        if status.get("connected") != Some(&json!(true)) {
            return Ok(None);
        }
        let number = |key| status.get(key).and_then(Value::as_u64).unwrap_or_default();
        let mac: Vec<u8> = serde_json::from_value(status.get("mac").cloned().unwrap_or_default())?;
        let mac: Vec<String> = mac.iter().map(|b| format!("{b:02x}")).collect();
        let (life, mac) = (number("life"), mac.join(":"));
        Ok(Some(Session { number: number("session"), life, mac, qpn: number("qpn") }))
    }

    /// Waits for session `number` of a pod.
    pub(crate) fn wait_session(&self, pod: &Pod, number: u64) -> Result<Session> {
        self.wait_life(pod, number, 1)
    }

    /// Waits until the device of a pod has been started `life` times in session `number`.
    pub(crate) fn wait_life(&self, pod: &Pod, number: u64, life: u64) -> Result<Session> {
        let begun = Instant::now();
        loop {
            let last = match self.session(pod) {
                Ok(Some(s)) if (s.number, s.life) == (number, life) => return Ok(s),
                Ok(other) => format!("{other:?}"),
                Err(e) => format!("{e:#}"),
            };
            exec::check_interrupt()?;
            if begun.elapsed() > exec::patient(WAIT) {
                bail!(
                    "pod {} does not come to session {number}, life {life}: {last}\n{}",
                    pod.name,
                    self.kubectl.tell(&pod.name)
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// WRITE, READ and SEND both ways between two pods, every byte compared by the side that
    /// received it; the bytes of payload that moved.
    pub(crate) fn transfer(&self, from: &Pod, to: &Pod, bytes: u32) -> Result<u64> {
        let peer = format!("{}:{PORT}", to.ip);
        let answer = self.ask(from, &json!({"do": "transfer", "peer": peer, "bytes": bytes}))?;
        let moved = answer.get("bytes").and_then(Value::as_u64).context("no byte count")?;
        ensure!(moved == 4 * u64::from(bytes), "{moved} bytes moved, not four times {bytes}");
        Ok(moved)
    }
}
