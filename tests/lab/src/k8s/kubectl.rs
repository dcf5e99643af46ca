//! The API server as a user reaches it: `kubectl` in the node, JSON out.

use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::exec::{capture, patience, wait_for};
use crate::k8s::node::Node;

const COMMAND_WAIT: Duration = Duration::from_secs(60);
const DELETE_WAIT: Duration = Duration::from_secs(180);

/// Between two questions to an API server that is slow.
const NAP: Duration = Duration::from_secs(5);

/// Whether the API server, or the way to it, says that it had no time.
fn is_slow(said: &str) -> bool {
    const WORDS: [&str; 5] = [
        "Error from server (Timeout)",
        "Error from server (ServiceUnavailable)",
        "etcdserver: request timed out",
        "Client.Timeout exceeded",
        "TLS handshake timeout",
    ];
    WORDS.iter().any(|word| said.contains(word))
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Kubectl<'a> {
    node: &'a Node,
}

impl<'a> Kubectl<'a> {
    pub(crate) fn new(node: &'a Node) -> Self {
        Self { node }
    }

    /// One command; its standard output. What can be asked twice is, if the API server is too slow
    /// to answer: on a machine that is emulated it is, while pods poll.
    pub(crate) fn run(&self, args: &[&str]) -> Result<String> {
        let repeatable = matches!(args.first(), Some(&("get" | "delete")));
        for _ in 1..patience() {
            match self.run_once(args) {
                Err(error) if repeatable && is_slow(&format!("{error:#}")) => {
                    std::thread::sleep(NAP);
                }
                other => return other,
            }
        }
        self.run_once(args)
    }

    fn run_once(&self, args: &[&str]) -> Result<String> {
        let mut cmd = self.node.command("kubectl");
        capture(cmd.arg("--kubeconfig=/lab/pki/admin.kubeconfig").args(args), COMMAND_WAIT)
    }

    /// `kubectl get … -o json`.
    pub(crate) fn get(&self, args: &[&str]) -> Result<Value> {
        let mut all = vec!["get", "-o", "json"];
        all.extend_from_slice(args);
        let text = self.run(&all)?;
        serde_json::from_str(&text).with_context(|| format!("kubectl {args:?} gave no JSON"))
    }

    /// Creates what the manifest says.
    pub(crate) fn create(&self, manifest: &Value) -> Result<()> {
        self.send("create", manifest)
    }

    /// Creates or changes what the manifest says.
    pub(crate) fn apply(&self, manifest: &Value) -> Result<()> {
        self.send("apply", manifest)
    }

    fn send(&self, verb: &str, manifest: &Value) -> Result<()> {
        let mut cmd = self.node.command("kubectl");
        cmd.args(["--kubeconfig=/lab/pki/admin.kubeconfig", verb, "-f", "-"]);
        let mut child =
            cmd.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(manifest.to_string().as_bytes())?;
        }
        let out = child.wait_with_output()?;
        if !out.status.success() {
            bail!("kubectl {verb}: {}", String::from_utf8_lossy(&out.stderr).trim_end());
        }
        Ok(())
    }

    /// A pod, if there is one of this name.
    pub(crate) fn pod(&self, name: &str) -> Result<Option<Value>> {
        let text = self.run(&["get", "pod", name, "-o", "json", "--ignore-not-found"])?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&text)?))
    }

    /// Waits until a pod is in `phase`; the pod. One that fails instead is an error with what is
    /// known of it.
    pub(crate) fn wait_phase(&self, name: &str, phase: &str, timeout: Duration) -> Result<Value> {
        let outcome = wait_for(&format!("pod {name} to be {phase}"), timeout, || {
            let Some(pod) = self.pod(name)? else { return Ok(None) };
            let now = pod.pointer("/status/phase").and_then(Value::as_str).unwrap_or("");
            if now == phase {
                return Ok(Some(pod));
            }
            if ["Failed", "Succeeded"].contains(&now) {
                bail!("pod {name} is {now}");
            }
            std::thread::sleep(Duration::from_millis(100));
            Ok(None)
        });
        outcome.with_context(|| self.tell(name))
    }

    /// What a person would look at when a pod does not do as it should.
    pub(crate) fn tell(&self, name: &str) -> String {
        let status = self
            .run(&["get", "pod", name, "-o", "jsonpath={.status}"])
            .unwrap_or_else(|e| format!("{e:#}"));
        let events = self
            .run(&[
                "get",
                "events",
                "--field-selector",
                &format!("involvedObject.name={name}"),
                "-o",
                "jsonpath={range .items[*]}{.reason}: {.message}{'\\n'}{end}",
            ])
            .unwrap_or_default();
        let logs = self.run(&["logs", name, "--tail=20"]).unwrap_or_default();
        format!("pod {name}: {status}\nevents:\n{events}\nits output:\n{logs}")
    }

    /// Waits for an Event of the agent about a pod or the node; its text.
    pub(crate) fn wait_event(&self, reason: &str, object: &str) -> Result<String> {
        let selector = format!("reason={reason},involvedObject.name={object}");
        wait_for(&format!("an Event {reason} about {object}"), DELETE_WAIT, || {
            std::thread::sleep(Duration::from_millis(300));
            let list = self.get(&["events", "-A", "--field-selector", &selector])?;
            let events = list.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
            let found = events
                .iter()
                .find(|e| e.get("reportingComponent") == Some(&"vhost-rdma-agent".into()));
            Ok(found
                .map(|e| e.get("message").and_then(Value::as_str).unwrap_or_default().to_owned()))
        })
    }

    /// Deletes pods and waits until they are gone: this kubelet reports the end of a pod up to ten
    /// seconds late.
    pub(crate) fn delete_pods(&self, names: &[&str]) -> Result<()> {
        let mut args = vec!["delete", "pod", "--wait=false", "--ignore-not-found"];
        args.extend_from_slice(names);
        self.run(&args)?;
        for name in names {
            self.wait_gone(&["pod", name])?;
        }
        Ok(())
    }

    /// Waits until nothing that these words select is there.
    pub(crate) fn wait_gone(&self, what: &[&str]) -> Result<()> {
        let mut args = vec!["get", "-o", "name", "--ignore-not-found"];
        args.extend_from_slice(what);
        wait_for(&format!("{} to be gone", what.join(" ")), DELETE_WAIT, || {
            std::thread::sleep(Duration::from_millis(200));
            Ok(self.run(&args)?.trim().is_empty().then_some(()))
        })
    }

    /// How much of an extended resource the first node offers.
    pub(crate) fn allocatable(&self, resource: &str) -> Result<Option<String>> {
        self.allocatable_on("node1", resource)
    }

    /// How much of an extended resource a node offers.
    pub(crate) fn allocatable_on(&self, node: &str, resource: &str) -> Result<Option<String>> {
        let node = self.get(&["node", node])?;
        Ok(node
            .pointer("/status/allocatable")
            .and_then(|a| a.get(resource))
            .and_then(Value::as_str)
            .map(ToOwned::to_owned))
    }
}
