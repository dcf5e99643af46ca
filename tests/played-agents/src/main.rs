//! The agents of thousands of nodes, played by one process, for a controller that cannot tell.
//!
//! API server, controller, objects, accounts and rights are real. A played agent does what a real
//! one does there (`device-plugin/src/follow.rs`): it follows its node's object, writes its status
//! as the same patch with as many NICs, at most a few times a second, and asks for a block itself
//! before it calls the block its own. Some have certificates by the controller's signer and follow
//! its lists of peers over mTLS. What is not real: there is no kubelet, no daemon and no pod behind
//! them, and they share one watch, since five thousand would be a test of the API server.
//!
//! It does one thing for each line of its input and answers with one line of JSON: `fill NODES`,
//! `change KIND TIMES`, `tidy`, `count`. Whoever runs it (`cargo xtask k8s scale`) measures
//! meanwhile.

mod agents;
mod changes;
mod objects;
mod peers;

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use agents::Agents;

/// What is played.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Args {
    /// The account that makes nodes and networks
    #[arg(long)]
    admin: String,
    /// The account of the agents
    #[arg(long)]
    account: String,
    /// NICs of each node
    #[arg(long)]
    nics: u32,
    /// Nodes that have a network of their own together
    #[arg(long)]
    group: u32,
    /// Agents that follow lists of peers: the first ones
    #[arg(long)]
    peers: u32,
    /// Where the controller has these lists
    #[arg(long, default_value = "127.0.0.1:9748")]
    controller: String,
}

async fn client(path: &str) -> Result<Client> {
    let file = Kubeconfig::read_from(path).with_context(|| format!("cannot read {path}"))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let args = Args::parse();
    // Of two providers none would be the default.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (admin, account) = (client(&args.admin).await?, client(&args.account).await?);
    let agents = Agents::new(account, admin, args);
    agents.follow();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        match act(&agents, &line).await {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("{}", serde_json::json!({ "error": format!("{error:#}") })),
        }
    }
    Ok(())
}

async fn act(agents: &Arc<Agents>, line: &str) -> Result<serde_json::Value> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["fill", nodes] => objects::fill(agents, nodes.parse()?).await,
        ["change", kind, times] => changes::change(agents, kind, times.parse()?).await,
        ["tidy"] => changes::tidy(agents).await,
        ["count"] => Ok(agents.count()),
        ["told"] => peers::told(agents).await,
        _ => bail!("what is {line:?}?"),
    }
}
