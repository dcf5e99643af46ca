//! A `DEL` that nobody else will ask for: the runtime forgot the sandbox, or Multus sends garbage
//! collection to its first delegate only. The CNI plugin knows how to undo what it did; it is
//! called as a runtime would call it. That takes the right to enter namespaces and to move devices,
//! which the agent in a pod does not have: there a helper, a process of its own that listens
//! nowhere, asks the agent what was forgotten and makes the calls.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vhost_rdma_agent_api::{Record, Reply, Request, SOCKET_ENV, call};

use super::{Agent, Undo};
use crate::daemon::Daemon;
use crate::holders::Kubelet;

/// The name under which the plugin is installed, if its configuration was not told.
const PLUGIN: &str = "vhost-rdma-cni";
/// How long the plugin may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the helper is told of an ID. It asks again when it has tried, and what fails that
/// often fails again.
const HELPED: u32 = 3;
/// Between two of the helper's questions.
const HELP: Duration = Duration::from_millis(500);
/// Between two looks whether it has ended.
const LOOK: Duration = Duration::from_millis(20);

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Has everything undone that attachments of this ID did. The state must not be locked: the
    /// plugin asks this agent.
    pub(super) async fn undo(&self, id: &str) -> Result<(), String> {
        if self.settings.undo == Undo::ByHelper {
            return self.await_helper(id).await;
        }
        let records = {
            let state = self.state.lock().await;
            state.ledger.get(id).map(|slot| slot.records.clone()).unwrap_or_default()
        };
        for record in records {
            let (container, if_name) =
                (record.attachment.container_id.clone(), record.attachment.if_name.clone());
            tracing::info!(id, container, if_name, "undoing an attachment that its runtime forgot");
            let call = Call::of(record, &self.settings.cni_dir, &self.settings.socket);
            let made = tokio::task::spawn_blocking(move || call.make());
            made.await.map_err(|error| error.to_string())??;
        }
        let state = self.state.lock().await;
        match state.ledger.get(id).map(|slot| slot.records.len()) {
            None | Some(0) => Ok(()),
            Some(count) => {
                Err(format!("{count} attachment(s) of {id} remain after the CNI plugin's DEL"))
            }
        }
    }
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Attachments that wait for somebody who has them undone: the helper's answer.
    pub(super) async fn forgotten(&self) -> Vec<Record> {
        let mut state = self.state.lock().await;
        let told = |times: &mut u32| {
            *times += 1;
            *times <= HELPED
        };
        let ids: Vec<String> = state
            .forgotten
            .iter_mut()
            .filter_map(|(id, times)| told(times).then(|| id.clone()))
            .collect();
        let slots = ids.iter().filter_map(|id| state.ledger.get(id));
        slots.flat_map(|slot| slot.records.clone()).collect()
    }

    /// Waits until somebody with the right to enter namespaces has had an ID's attachments undone.
    async fn await_helper(&self, id: &str) -> Result<(), String> {
        let end = Instant::now() + PATIENCE;
        let mut state = self.state.lock().await;
        loop {
            let left = state.ledger.get(id).map_or(0, |slot| slot.records.len());
            // Another that waited for the same may have ended that.
            let told = *state.forgotten.entry(id.to_owned()).or_default();
            if left == 0 || told > HELPED || Instant::now() >= end {
                state.forgotten.remove(id);
                drop(state);
                return match (left, told) {
                    (0, _) => Ok(()),
                    (_, 0) => Err(format!(
                        "{left} attachment(s) of {id} wait to be undone; does `vhost-rdma-agent \
                         undo` run on this node?"
                    )),
                    _ => Err(format!(
                        "{left} attachment(s) of {id} cannot be undone; the log of \
                         `vhost-rdma-agent undo` says why"
                    )),
                };
            }
            drop(state);
            tokio::time::sleep(LOOK).await;
            state = self.state.lock().await;
        }
    }
}

/// Serves as the agent's helper until it is told to end: has undone what the agent says, by the
/// plugins in `cni_dir`.
pub(crate) fn help(socket: &Path, cni_dir: &Path, stop: &AtomicBool) {
    let mut silent = false;
    while !stop.load(Ordering::Relaxed) {
        let asked = call(socket, &Request::Forgotten, PATIENCE);
        if let Err(error) = &asked
            && !silent
        {
            tracing::warn!(%error, "the agent does not say what to undo; trying on");
        }
        silent = asked.is_err();
        if let Ok(Reply::Records(records)) = asked {
            for record in records {
                undo(record, cni_dir, socket);
            }
        }
        std::thread::sleep(HELP);
    }
}

/// Has one attachment undone, and says what came of it.
fn undo(record: Record, cni_dir: &Path, socket: &Path) {
    let (id, container) = (record.nic.id.clone(), record.attachment.container_id.clone());
    match Call::of(record, cni_dir, socket).make() {
        Ok(()) => tracing::info!(id, container, "undone what its runtime forgot"),
        Err(error) => {
            tracing::error!(id, container, error, "cannot be undone; it is tried again");
        }
    }
}

/// The program that did it: the one that its configuration names, as a runtime finds it.
fn plugin(dir: &Path, record: &Record) -> PathBuf {
    let named =
        record.config.as_ref().and_then(|config| config.get("type")).and_then(Value::as_str);
    dir.join(named.filter(|name| !name.contains('/') && *name != "..").unwrap_or(PLUGIN))
}

/// What the plugin is told: the configuration that it was called with, or the least that will do.
fn configuration(record: &Record) -> Value {
    record.config.clone().unwrap_or_else(|| {
        json!({
            "cniVersion": "1.0.0",
            "name": record.network,
            "type": PLUGIN,
        })
    })
}

struct Call {
    plugin: PathBuf,
    config: Value,
    netns: String,
    container: String,
    if_name: String,
    /// Where this agent listens.
    socket: PathBuf,
}

impl Call {
    fn of(record: Record, cni_dir: &Path, socket: &Path) -> Self {
        Self {
            plugin: plugin(cni_dir, &record),
            config: configuration(&record),
            netns: if Path::new(&record.netns).exists() { record.netns } else { String::new() },
            container: record.attachment.container_id,
            if_name: record.attachment.if_name,
            socket: socket.to_owned(),
        }
    }

    fn make(self) -> Result<(), String> {
        let fault = |error: &io::Error| {
            format!(
                "cannot run the CNI plugin {}: {error}; say where it is with --cni-dir",
                self.plugin.display()
            )
        };
        let mut child = Command::new(&self.plugin)
            .env_clear()
            .env("CNI_COMMAND", "DEL")
            .env("CNI_CONTAINERID", &self.container)
            .env("CNI_IFNAME", &self.if_name)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_PATH", self.plugin.parent().unwrap_or(Path::new("/opt/cni/bin")))
            .env(SOCKET_ENV, &self.socket)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|error| fault(&error))?;
        if let Some(mut stdin) = child.stdin.take() {
            // A plugin that does not read its configuration says why on standard output.
            let _ = stdin.write_all(self.config.to_string().as_bytes());
        }
        let ended = wait(&mut child).map_err(|error| fault(&error))?;
        if ended {
            return Ok(());
        }
        let mut said = String::new();
        if let Some(stdout) = child.stdout.take() {
            let _ = stdout.take(4096).read_to_string(&mut said);
        }
        Err(format!("the CNI plugin's DEL failed: {}", said.trim()))
    }
}

/// True if it ended well.
fn wait(child: &mut Child) -> io::Result<bool> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("it did not end in {} s", PATIENCE.as_secs()),
            ));
        }
        std::thread::sleep(LOOK);
    }
}
