//! A node: temporary directories, a daemon, a kubelet, and an agent that can be killed and started
//! again.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use tokio::task::JoinHandle;
use vhost_rdma_agent::agent::{Agent, Parts, Settings, Undo};
use vhost_rdma_agent::config::{Config, KubeletPaths};
use vhost_rdma_agent::daemon::{Pace, Paced};
use vhost_rdma_agent::events::Events;
use vhost_rdma_agent::files::Dirs;
use vhost_rdma_agent::host::{Host, Inventory};
use vhost_rdma_agent::kubelet::{NodeKubelet, Registrar};
use vhost_rdma_agent_api::{Attach, Attachment, Pod, Reply, Request};

use crate::daemon::FakeDaemon;
use crate::kubelet::FakeKubelet;

pub(crate) type TheAgent = Arc<Agent<Paced<FakeDaemon>, NodeKubelet>>;

pub(crate) const BLUE: &str = "vhost-rdma.io/blue";
pub(crate) const CONFIG: &str = "injection='classic'\n[[pools]]\nname='blue'\nkind='vhost-user'\n\
                                 count=4\nnetwork='blue'\nlimits={max_qps=7}\n\
                                 companion={bridge='br0'}\naddresses='ipam'\n\
                                 socket={owner=107,group=107}\n";

/// None at first.
#[derive(Default)]
pub(crate) struct Hardware(pub(crate) Mutex<Inventory>);

impl Host for Hardware {
    fn inventory(&self) -> Result<Inventory, String> {
        Ok(self.0.lock().unwrap().clone())
    }
}

pub(crate) struct World {
    pub(crate) dir: TempDir,
    pub(crate) daemon: FakeDaemon,
    pub(crate) kubelet: FakeKubelet,
    events: Events,
    agent: Option<TheAgent>,
    registrar: Option<JoinHandle<()>>,
    /// For the agents that are started from now on: see [`Settings`].
    pub(crate) start: Duration,
    pub(crate) patience: Duration,
    pub(crate) rest: Duration,
    pub(crate) pace: Pace,
    pub(crate) own_pod: Option<(String, String)>,
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) undo: Undo,
    pub(crate) cluster: bool,
    pub(crate) channel: Option<vhost_rdma_agent::member::Settings>,
}

pub(crate) fn config(text: &str) -> Config {
    Config::parse(text, Path::new("test.toml")).unwrap()
}

impl World {
    /// Everything runs, the daemon answers.
    pub(crate) async fn new() -> Self {
        Self::with_events(Events::default()).await
    }

    /// The same, with someone who takes events.
    pub(crate) async fn with_events(events: Events) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let daemon = FakeDaemon::new(&dir.path().join("nics"));
        let kubelet = FakeKubelet::start(&dir.path().join("kubelet"));
        let mut world = Self {
            dir,
            daemon,
            kubelet,
            events,
            agent: None,
            registrar: None,
            start: Duration::ZERO,
            patience: Duration::ZERO,
            rest: Duration::from_secs(3600),
            pace: Pace::default(),
            own_pod: None,
            hardware: Arc::default(),
            undo: Undo::Here,
            cluster: false,
            channel: None,
        };
        world.start_agent(CONFIG).await;
        world
    }

    pub(crate) fn agent(&self) -> &TheAgent {
        self.agent.as_ref().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// As if by kill -9: nothing is told to anybody, sockets stay.
    pub(crate) async fn kill_agent(&mut self) {
        if let Some(registrar) = self.registrar.take() {
            registrar.abort();
            let _ = registrar.await;
        }
        let agent = self.agent.take().unwrap();
        // Tasks of calls that were open hold it too, for a moment.
        for _ in 0..1000 {
            if Arc::strong_count(&agent) == 1 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("somebody keeps the agent alive");
    }

    pub(crate) async fn start_agent(&mut self, text: &str) {
        let root = self.path("kubelet");
        let paths = KubeletPaths::new(&root, None);
        let settings = Settings {
            dirs: Dirs { cdi: self.path("cdi"), device_info: self.path("devinfo") },
            cni_dir: self.dir.path().to_owned(),
            socket: self.path("agent.sock"),
            settle: 0,
            reclaim: Duration::ZERO,
            rest: self.rest,
            reconnect: Duration::ZERO,
            auto_cdi: false,
            undo: self.undo,
            start: self.start,
            patience: self.patience,
            own_pod: self.own_pod.clone(),
            cluster: self.cluster,
            channel: self.channel.clone(),
        };
        let parts = Parts {
            settings,
            config: config(text),
            daemon: Paced::new(self.daemon.clone(), self.pace),
            kubelet: NodeKubelet::new(&paths),
            host: self.hardware.clone(),
            events: self.events.clone(),
        };
        let agent = Agent::new(parts, &self.path("state")).unwrap();
        agent.configure(config(text)).await;
        agent.reconcile().await;
        self.registrar =
            Some(tokio::spawn(Registrar::new(Arc::clone(&agent), paths.device_plugins).run()));
        self.agent = Some(agent);
    }

    /// Rounds enough for everything that takes several.
    pub(crate) async fn settle(&self) {
        for _ in 0..5 {
            self.agent().reconcile().await;
        }
    }

    /// Allocates for one container and gives the environment.
    pub(crate) async fn allocate(
        &self,
        ids: &[&str],
    ) -> Result<std::collections::HashMap<String, String>, String> {
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        let mut answers =
            self.agent().allocate("blue", &[ids]).await.map_err(|error| error.to_string())?;
        Ok(answers.remove(0).envs)
    }

    pub(crate) async fn ask(&self, request: Request) -> Reply {
        self.agent().answer(request).await
    }

    pub(crate) async fn state_of(&self, id: &str) -> String {
        let status = self.agent().status().await;
        status.devices.iter().find(|device| device.id == id).unwrap().state.clone()
    }

    /// NICs of the daemon.
    pub(crate) fn nics(&self) -> Vec<String> {
        self.daemon.table().nics.keys().cloned().collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(registrar) = self.registrar.take() {
            registrar.abort();
        }
    }
}

pub(crate) fn attachment(container: &str, if_name: &str) -> Attachment {
    Attachment { container_id: container.to_owned(), if_name: if_name.to_owned() }
}

pub(crate) fn attach(pod: &str, container: &str) -> Attach {
    Attach {
        pod: Pod {
            namespace: "ns".to_owned(),
            name: pod.to_owned(),
            uid: Some(format!("uid-{pod}")),
        },
        attachment: attachment(container, "eth0"),
        netns: format!("/nowhere/{container}"),
        network: "net".to_owned(),
        device_id: None,
        mac: None,
        config: None,
    }
}
