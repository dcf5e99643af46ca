//! The vhost-rdma node agent and its command line: puts the parts together, and turns every failure
//! into a message and an exit status.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::anyhow;
use clap::Parser as _;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt as _;
use vhost_rdma_agent::cli::{self, Cli, Command, LogFormat};
use vhost_rdma_agent::serve;

/// The variable that filters logs, such as `debug` or `vhost_rdma_agent::agent=trace,info`.
const FILTER_ENV: &str = "VHOST_RDMA_AGENT_LOG";

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.json;
    let failed = match cli.command {
        Command::Serve(args) => log(args.log_format)
            .and_then(|()| Ok(serve::run(*args, cli.socket)?))
            .map_err(|error| (1, error.to_string())),
        Command::Undo { cni_dir } => log(LogFormat::Text)
            .and_then(|()| Ok(serve::help(&cli.socket, &cni_dir)?))
            .map_err(|error| (1, error.to_string())),
        _ => cli::run(&cli).map_err(|failure| (failure.exit_code(), failure.to_string())),
    };
    let Err((code, message)) = failed else { return ExitCode::SUCCESS };
    if json {
        eprintln!("{}", serde_json::json!({ "error": { "message": message } }));
    } else {
        eprintln!("vhost-rdma-agent: {message}");
    }
    ExitCode::from(code)
}

fn log(format: LogFormat) -> anyhow::Result<()> {
    let filter = match std::env::var(FILTER_ENV) {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text)
            .map_err(|error| anyhow!("{FILTER_ENV}={text:?} is not a log filter: {error}"))?,
        _ => EnvFilter::new("info"),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(format == LogFormat::Text && std::io::stderr().is_terminal());
    let started = match format {
        LogFormat::Text => builder.finish().try_init(),
        LogFormat::Json => builder.json().flatten_event(true).finish().try_init(),
    };
    started.map_err(|error| anyhow!(error.to_string()))
}
