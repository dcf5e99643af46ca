//! Logs: to standard error, for people or as JSON lines; never one for each packet or work request.

use std::io::{self, IsTerminal as _};
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The variable that filters logs, such as `debug` or `vhost_rdma::admin=trace,info`. It wins over
/// the configuration file.
pub const FILTER_ENV: &str = "VHOST_RDMA_LOG";
/// What is logged where nothing says what.
const DEFAULT: &str = "info";

/// How log lines look.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    clap::ValueEnum,
    serde::Serialize,
    serde::Deserialize,
)]
pub enum LogFormat {
    /// One line for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

type Replace = Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>;

/// How the filter of the log that was started is replaced.
static REPLACE: OnceLock<Replace> = OnceLock::new();

/// Bytes of a filter, at most: each process is told of it in one message.
const FILTER_MAX: usize = 4096;

/// A filter that was understood.
#[derive(Debug)]
pub struct Filter(EnvFilter);

impl Filter {
    /// What the environment says, else `configured`, else the default.
    ///
    /// # Errors
    /// It cannot be understood, or is too long.
    pub fn new(configured: Option<&str>) -> Result<Self, String> {
        let environment = std::env::var(FILTER_ENV).ok().filter(|text| !text.is_empty());
        let (from, text) = match (&environment, configured) {
            (Some(text), _) => (FILTER_ENV, text.as_str()),
            (None, Some(text)) => ("log", text),
            (None, None) => ("log", DEFAULT),
        };
        if text.len() > FILTER_MAX {
            let len = text.len();
            return Err(format!("{from}: a log filter of {len} bytes; {FILTER_MAX} are the most"));
        }
        EnvFilter::try_new(text)
            .map(Self)
            .map_err(|error| format!("{from}={text:?} is not a log filter: {error}"))
    }

    /// Logs by this from now on.
    pub fn take_effect(self) {
        let replaced = REPLACE.get().map_or(Ok(()), |replace| replace(self.0));
        if let Err(error) = replaced {
            tracing::error!(error, "the log's filter stays as it was");
        }
    }
}

/// Where lines go: to standard error, each in one piece, with the network that it is of.
#[derive(Clone)]
struct Lines {
    /// What ends a line for people, or begins an object.
    text: String,
    json: String,
}

impl Lines {
    fn new(network: Option<&str>) -> Self {
        let Some(network) = network else {
            return Self { text: String::new(), json: String::new() };
        };
        let quoted = serde_json::Value::from(network);
        Self { text: format!(" network={quoted}"), json: format!("{{\"network\":{quoted},") }
    }

    /// `line` with the network's name.
    fn label(&self, line: &[u8]) -> Vec<u8> {
        if let Some(rest) = line.strip_prefix(b"{") {
            return [self.json.as_bytes(), rest].concat();
        }
        let body = line.strip_suffix(b"\n").unwrap_or(line);
        [body, self.text.as_bytes(), b"\n"].concat()
    }
}

impl io::Write for Lines {
    /// A line comes in one piece.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let labelled = if self.text.is_empty() { None } else { Some(self.label(line)) };
        io::stderr().lock().write_all(labelled.as_deref().unwrap_or(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts logging; the default level is `info`. A process of one network says which.
///
/// # Errors
/// The filter cannot be understood, or logging has been started before.
pub fn start(format: LogFormat, network: Option<&str>) -> Result<(), String> {
    let lines = Lines::new(network);
    let Filter(filter) = Filter::new(None)?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || lines.clone())
        .with_ansi(format == LogFormat::Text && io::stderr().is_terminal());
    let replace: Replace = match format {
        LogFormat::Text => {
            let builder = builder.with_filter_reloading();
            let handle = builder.reload_handle();
            builder.finish().try_init().map_err(|error| error.to_string())?;
            Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()))
        }
        LogFormat::Json => {
            let builder = builder.json().flatten_event(true).with_filter_reloading();
            let handle = builder.reload_handle();
            builder.finish().try_init().map_err(|error| error.to_string())?;
            Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()))
        }
    };
    // Only the first start gets here.
    let _ = REPLACE.set(replace);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{FILTER_MAX, Filter, Lines};

    #[test]
    fn a_filter_has_a_longest() {
        let of = |len| format!("{:>len$}", "info").replace(' ', "a");
        assert!(Filter::new(Some(&of(FILTER_MAX))).is_ok());
        let refused = Filter::new(Some(&of(FILTER_MAX + 1))).unwrap_err();
        assert!(refused.contains("log: a log filter of 4097 bytes"), "{refused}");
    }

    #[test]
    fn each_line_says_its_network() {
        let lines = Lines::new(Some("blue"));
        assert_eq!(lines.label(b"INFO a b=1\n"), b"INFO a b=1 network=\"blue\"\n");
        assert_eq!(lines.label(b"{\"a\":1}\n"), b"{\"network\":\"blue\",\"a\":1}\n");
    }
}
