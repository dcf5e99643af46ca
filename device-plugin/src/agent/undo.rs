//! A `DEL` that nobody else will ask for: the runtime forgot the sandbox, or Multus sends garbage collection to its first delegate
//! only. The CNI plugin knows how to undo what it did; the agent calls it as a runtime would.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vhost_rdma_agent_api::Record;

use super::Agent;
use crate::daemon::Daemon;
use crate::kubelet::Kubelet;

/// The name under which the plugin is installed, if its configuration was not told.
const PLUGIN: &str = "vhost-rdma-cni";
/// How long the plugin may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks whether it has ended.
const LOOK: Duration = Duration::from_millis(20);

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Has everything undone that attachments of this ID did. The state must not be locked: the plugin asks this agent.
    pub(super) async fn undo(&self, id: &str) -> Result<(), String> {
        let records = {
            let state = self.state.lock().await;
            state.ledger.get(id).map(|slot| slot.records.clone()).unwrap_or_default()
        };
        for record in records {
            let (container, if_name) =
                (record.attachment.container_id.clone(), record.attachment.if_name.clone());
            tracing::info!(id, container, if_name, "undoing an attachment that its runtime forgot");
            let call = Call {
                plugin: plugin(&self.settings.cni_dir, &record),
                config: configuration(&record, &self.settings.socket),
                netns: if Path::new(&record.netns).exists() { record.netns } else { String::new() },
                container,
                if_name,
            };
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

/// The program that did it: the one that its configuration names, as a runtime finds it.
fn plugin(dir: &Path, record: &Record) -> PathBuf {
    let named =
        record.config.as_ref().and_then(|config| config.get("type")).and_then(Value::as_str);
    dir.join(named.filter(|name| !name.contains('/') && *name != "..").unwrap_or(PLUGIN))
}

/// What the plugin is told: the configuration that it was called with, or the least that names this agent.
fn configuration(record: &Record, socket: &Path) -> Value {
    record.config.clone().unwrap_or_else(|| {
        json!({
            "cniVersion": "1.0.0",
            "name": record.network,
            "type": PLUGIN,
            "agentSocket": socket,
        })
    })
}

struct Call {
    plugin: PathBuf,
    config: Value,
    netns: String,
    container: String,
    if_name: String,
}

impl Call {
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
