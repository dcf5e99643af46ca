//! The vhost-rdma controller and its command line.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::Parser as _;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt as _;
use vhost_rdma_controller::cli::{Cli, Command, LogFormat, ServeArgs};
use vhost_rdma_controller::serve;

/// The variable that filters logs, such as `debug` or `vhost_rdma_controller::engine=trace,info`.
const FILTER_ENV: &str = "VHOST_RDMA_CONTROLLER_LOG";

fn main() -> ExitCode {
    let Command::Serve(args) = Cli::parse().command;
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vhost-rdma-controller: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &ServeArgs) -> anyhow::Result<()> {
    log(args.log())?;
    vhost_rdma_places::raise_descriptors();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(serve::run(args))?;
    Ok(())
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
