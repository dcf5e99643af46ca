//! Logs: to standard error, for people or as JSON lines; never one for each packet or work request.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The variable that filters logs, such as `debug` or `vhost_rdma::admin=trace,info`.
pub const FILTER_ENV: &str = "VHOST_RDMA_LOG";

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// One line for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging; the default level is `info`.
///
/// # Errors
/// The filter cannot be understood, or logging has been started before.
pub fn start(format: LogFormat) -> Result<(), String> {
    let filter = match std::env::var(FILTER_ENV) {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text)
            .map_err(|error| format!("{FILTER_ENV}={text:?} is not a log filter: {error}"))?,
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
    started.map_err(|error| error.to_string())
}
