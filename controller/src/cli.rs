//! The command line.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::core::Settings;

/// Cluster controller of vhost-rdma: networks, address blocks, node specifications and tenants
///
/// Run several: each watches the cluster, one of them writes. All state is in the API server.
#[derive(Debug, Parser)]
#[command(name = "vhost-rdma-controller", version, max_term_width = 100)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the controller, in a pod by its service account, elsewhere by KUBECONFIG
    Serve(ServeArgs),
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
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Namespace of the leases and the network attachment definitions
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = "vhost-rdma")]
    pub namespace: String,
    /// What this replica is called in the lease and in events; no two may have the same
    #[arg(long, value_name = "NAME", env = "POD_NAME", default_value_t = own_name())]
    pub identity: String,
    /// Health (/healthz, /readyz) and metrics (/metrics) over HTTP
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9747")]
    pub http: SocketAddr,
    /// Where agents follow where the addresses of their networks are, over TLS
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9748")]
    pub peers: SocketAddr,
    /// Where the API server asks whether a pod may have its NICs, over TLS
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9749")]
    pub admission: SocketAddr,
    /// Seconds that a node may be gone from the cluster before its address blocks go to others
    #[arg(long, value_name = "SECONDS", default_value_t = 600,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub node_grace: u64,
    /// Seconds that a deleted network waits for pods that use it
    #[arg(long, value_name = "SECONDS", default_value_t = 600,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub network_deadline: u64,
    /// The account of the nodes' agents, as the API server calls it; absent: `vhost-rdma-agent` of
    /// the namespace
    #[arg(long, value_name = "USER")]
    pub agent: Option<String>,
    /// Believe an agent whose token says neither its node nor its pod: any agent can then have a
    /// certificate for any node
    #[arg(long)]
    pub unproven_agents: bool,
    /// Seconds that a node's certificate holds at most
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400,
        value_parser = clap::value_parser!(u64).range(600..=2_592_000))]
    pub certificate_life: u64,
    /// Seconds that a new root is published before it signs
    #[arg(long, value_name = "SECONDS", default_value_t = 3600,
        value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub root_grace: u64,
    /// How many objects are written at a time
    #[arg(long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: u16,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
    /// The same as --log-format json
    #[arg(long)]
    pub json: bool,
}

/// The machine's name and the process: a default for a controller that runs in no pod.
fn own_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}

impl ServeArgs {
    /// What the planners need of it.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            namespace: self.namespace.clone(),
            node_grace: Duration::from_secs(self.node_grace),
            network_deadline: Duration::from_secs(self.network_deadline),
            agent: self.agent.clone().unwrap_or_else(|| {
                format!("system:serviceaccount:{}:vhost-rdma-agent", self.namespace)
            }),
            unproven: self.unproven_agents,
            certificate_life: Duration::from_secs(self.certificate_life),
            root_grace: Duration::from_secs(self.root_grace),
        }
    }

    /// The log's form.
    #[must_use]
    pub fn log(&self) -> LogFormat {
        if self.json { LogFormat::Json } else { self.log_format }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
