//! The command line: the agent itself, and what an operator says to one that runs.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use vhost_rdma_agent_api::{
    CallError, DEFAULT_SOCKET, Fault, FaultKind, Reply, Request, SOCKET_ENV, Status, Target, call,
};

/// The port of the controller's lists of peers.
const PEERS_PORT: u16 = 9748;
/// How long a command waits for the agent.
const PATIENCE: Duration = Duration::from_secs(30);

/// Kubernetes node agent of vhost-rdma: kubelet device plugin, allocation ledger, server of the CNI
/// plugin
#[derive(Debug, Parser)]
#[command(name = "vhost-rdma-agent", version, max_term_width = 100)]
pub struct Cli {
    /// The agent's socket
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        default_value = DEFAULT_SOCKET,
        env = SOCKET_ENV
    )]
    pub socket: PathBuf,
    /// Print JSON (`status`, `check`)
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent
    Serve(Box<ServeArgs>),
    /// Have the CNI plugin undo what runtimes forgot, when an agent with `--undo by-helper` says
    /// what
    Undo {
        /// Where the CNI plugin is
        #[arg(long, value_name = "DIR", default_value = "/opt/cni/bin")]
        cni_dir: PathBuf,
    },
    /// Show pools, NICs and what is wrong
    Status,
    /// Grant a NIC to nobody until `uncordon`; a pod that has it keeps it
    Cordon {
        /// Its ID
        id: String,
    },
    /// Put a NIC back into service
    Uncordon {
        /// Its ID
        id: String,
    },
    /// Check a configuration file and show the pools that it makes on this node
    Check {
        /// The file
        config: PathBuf,
    },
    /// Print the manual page, or write one for each command
    Man {
        /// Where to write them
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Print a completion script
    Completions {
        /// For which shell
        shell: clap_complete::Shell,
    },
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// One line for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// `serve`
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration file (TOML): the pools of this node; read again when it changes and at SIGHUP
    #[arg(long, value_name = "FILE", default_value = "/etc/vhost-rdma-agent/config.toml")]
    pub config: PathBuf,
    /// Where the ledger is kept; it must survive a reboot
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vhost-rdma-agent")]
    pub state_dir: PathBuf,
    /// The daemon's admin socket
    #[arg(long, value_name = "PATH", default_value = "/run/vhost-rdma/admin.sock")]
    pub daemon: PathBuf,
    /// The kubelet's root directory
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_root: PathBuf,
    /// The kubelet's plugin directory [default: device-plugins in the kubelet's root directory; a
    /// kubelet before 1.21 uses /var/lib/kubelet/device-plugins whatever its root directory is]
    #[arg(long, value_name = "DIR")]
    pub device_plugin_dir: Option<PathBuf>,
    /// Where CDI specifications go
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// Where device information for network plugins goes
    #[arg(long, value_name = "DIR", default_value = "/var/run/k8s.cni.cncf.io/devinfo/dp")]
    pub device_info_dir: PathBuf,
    /// Where the CNI plugin is, for a DEL that no runtime asks for
    #[arg(long, value_name = "DIR", default_value = "/opt/cni/bin")]
    pub cni_dir: PathBuf,
    /// Who calls it then
    #[arg(long, value_enum, default_value_t)]
    pub undo: crate::agent::Undo,
    /// Health and metrics over HTTP; none by default
    #[arg(long, value_name = "IP:PORT")]
    pub http: Option<SocketAddr>,
    /// This node's name in the cluster; without it there are no Kubernetes events
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// Offer what the cluster's controller says of this node (its RdmaNode), beside the file
    #[arg(long, requires = "node_name")]
    pub cluster: bool,
    /// This node's address at which other nodes' daemons reach its own: the daemon has a
    /// certificate for it and follows the controller's lists of peers; none by default
    #[arg(long, value_name = "IP", requires = "cluster")]
    pub channel_address: Option<IpAddr>,
    /// The port there: that of the daemon's --cm-listen
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 4790,
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub channel_port: u16,
    /// Where the certificate is put for the daemon, whose --cm-cert, --cm-key and --cm-ca are
    /// current/cert.pem, key.pem and ca.pem in there
    #[arg(long, value_name = "DIR", default_value = "/run/vhost-rdma/channel")]
    pub channel_dir: PathBuf,
    /// The controller's namespace [default: that of the agent's pod, else vhost-rdma]
    #[arg(long, value_name = "NAME")]
    pub controller_namespace: Option<String>,
    /// Where the controller's lists of peers are [default:
    /// vhost-rdma-controller.NAMESPACE.svc:9748]
    #[arg(long, value_name = "HOST:PORT")]
    pub controller: Option<String>,
    /// The agent's own pod: a kubelet that lists it has heard of all its pods, also after it was
    /// started again
    #[arg(long, value_name = "NAME", env = "POD_NAME", requires = "pod_namespace")]
    pub pod_name: Option<String>,
    /// Its namespace
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", requires = "pod_name")]
    pub pod_namespace: Option<String>,
    /// Seconds that a daemon may take to answer first, in which NICs that pods have count as
    /// healthy
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 120,
        value_parser = clap::value_parser!(u64).range(0..=3600)
    )]
    pub start: u64,
    /// Seconds that an allocation may wait for a daemon; the kubelet admits no other pod meanwhile
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 15,
        value_parser = clap::value_parser!(u64).range(0..=60)
    )]
    pub allocate_wait: u64,
    /// Seconds between two looks at daemon and kubelet
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 2,
        value_parser = clap::value_parser!(u64).range(1..=60)
    )]
    pub interval: u64,
    /// Seconds without a holder after which a NIC is taken back
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    pub reclaim: u64,
    /// Seconds that a VMM may take to connect to a daemon that was started again, before its NIC
    /// counts as lost
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(0..=3600)
    )]
    pub reconnect: u64,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

impl ServeArgs {
    /// How the node takes part in the channel between nodes, if it does.
    #[must_use]
    pub fn channel(&self) -> Option<crate::member::Settings> {
        let address = self.channel_address?;
        let namespace = self.controller_namespace.clone().or_else(|| self.pod_namespace.clone());
        let namespace = namespace.unwrap_or_else(|| "vhost-rdma".to_owned());
        let controller_name = format!("vhost-rdma-controller.{namespace}.svc");
        let given = self.controller.clone();
        Some(crate::member::Settings {
            node: self.node_name.clone()?,
            endpoint: SocketAddr::new(address, self.channel_port),
            shared: self.channel_dir.clone(),
            controller: given.unwrap_or_else(|| format!("{controller_name}:{PEERS_PORT}")),
            controller_name,
            namespace,
        })
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The agent refused or cannot be reached.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A configuration that is not valid.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// Anything else.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Failure {
    /// The exit status, as the daemon's command line has them.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) => 2,
            Self::Call(CallError::Unreachable { .. } | CallError::Broken { .. }) => 3,
            Self::Call(CallError::Stranger { .. }) => 1,
            Self::Call(CallError::Fault(Fault { kind, .. })) => match kind {
                FaultKind::BadRequest => 2,
                FaultKind::TryAgain | FaultKind::NotReady => 3,
                FaultKind::NotFound => 4,
                FaultKind::Conflict => 5,
                FaultKind::Internal => 1,
            },
            Self::Io { .. } => 1,
        }
    }
}

/// Runs any command but `serve`.
///
/// # Errors
/// See [`Failure`].
pub fn run(cli: &Cli) -> Result<(), Failure> {
    match &cli.command {
        Command::Serve(_) | Command::Undo { .. } => Ok(()),
        Command::Status => match call(&cli.socket, &Request::Status, PATIENCE)? {
            Reply::Status(status) => show(cli.json, &status),
            _ => Ok(()),
        },
        Command::Cordon { id } => {
            call(&cli.socket, &Request::Cordon(Target { id: id.clone() }), PATIENCE)?;
            Ok(())
        }
        Command::Uncordon { id } => {
            call(&cli.socket, &Request::Uncordon(Target { id: id.clone() }), PATIENCE)?;
            Ok(())
        }
        Command::Check { config } => check(cli.json, config),
        Command::Man { dir } => man(dir.as_deref()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "vhost-rdma-agent", &mut script);
            print(&script)
        }
    }
}

fn print(bytes: &[u8]) -> Result<(), Failure> {
    match std::io::stdout().write_all(bytes) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|source| Failure::Io { action: "print", source }),
    }
}

fn man(dir: Option<&Path>) -> Result<(), Failure> {
    let fault = |source| Failure::Io { action: "write the manual", source };
    match dir {
        Some(dir) => std::fs::create_dir_all(dir)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
            .map_err(fault),
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(fault)?;
            print(&page)
        }
    }
}

fn check(json: bool, path: &Path) -> Result<(), Failure> {
    let config = crate::config::Config::read(path)?;
    let inventory =
        crate::host::Host::inventory(&crate::host::NodeHost::default()).map_err(|error| {
            Failure::Io { action: "look at the hardware", source: std::io::Error::other(error) }
        })?;
    let pools = crate::pool::Pools::build(&config, &inventory);
    if json {
        let list: Vec<_> = pools
            .pools
            .iter()
            .map(|pool| {
                let ids: Vec<&String> = pool.devices.keys().collect();
                serde_json::json!(
                    { "resource": pool.resource, "kind": pool.config.kind, "ids": ids }
                )
            })
            .collect();
        let document = serde_json::json!({ "pools": list, "warnings": pools.problems });
        return print(format!("{document:#}\n").as_bytes());
    }
    let mut text = String::new();
    for pool in &pools.pools {
        text += &format!("{}  {}  {} IDs\n", pool.resource, pool.config.kind, pool.devices.len());
    }
    for problem in &pools.problems {
        text += &format!("warning: {problem}\n");
    }
    print(text.as_bytes())
}

fn show(json: bool, status: &Status) -> Result<(), Failure> {
    if json {
        let mut text = serde_json::to_string_pretty(status).unwrap_or_default();
        text.push('\n');
        return print(text.as_bytes());
    }
    let mut text = format!(
        "vhost-rdma-agent {} {}\n",
        status.version,
        if status.ready { "ready" } else { "NOT ready" }
    );
    for problem in &status.problems {
        text += &format!("! {problem}\n");
    }
    let width = |names: &mut dyn Iterator<Item = usize>| names.max().unwrap_or(0).max(8);
    let resource = width(&mut status.pools.iter().map(|pool| pool.resource.len()));
    text += &format!(
        "\n{:resource$}  {:10}  {:>7} {:>7} {:>7} {:>7}  kubelet\n",
        "RESOURCE", "KIND", "TOTAL", "HEALTHY", "GRANTED", "FREE"
    );
    for pool in &status.pools {
        text += &format!(
            "{:resource$}  {:10}  {:>7} {:>7} {:>7} {:>7}  {}\n",
            pool.resource,
            pool.kind.as_str(),
            pool.total,
            pool.healthy,
            pool.granted,
            pool.free,
            if pool.registered { "registered" } else { "not registered" }
        );
    }
    let interesting: Vec<_> = status
        .devices
        .iter()
        .filter(|device| device.state != "free" || !device.healthy || device.cordoned)
        .collect();
    if !interesting.is_empty() {
        let id = width(&mut interesting.iter().map(|device| device.id.len()));
        text += &format!("\n{:id$}  {:10}  {:12}  POD\n", "ID", "STATE", "SESSION");
        for device in interesting {
            let pod = device.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name));
            let reason = device.reason.as_ref().map(|reason| format!("  ! {reason}"));
            text += &format!(
                "{:id$}  {:10}  {:12}  {}{}\n",
                device.id,
                device.state,
                device.session.as_deref().unwrap_or("-"),
                pod.as_deref().unwrap_or("-"),
                reason.unwrap_or_default()
            );
        }
    }
    print(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }
}
