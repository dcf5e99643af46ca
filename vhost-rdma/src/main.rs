//! The vhost-rdma daemon and its command line: puts the parts together, and turns every failure into a message and an exit status.

use std::process::ExitCode;

use anyhow::anyhow;
use clap::Parser as _;
use vhost_rdma::admin::{self, RunError, ServeError, Settings};
use vhost_rdma::channel::{self, Files};
use vhost_rdma::cli::{self, Cli, Command, Failure, ServeArgs, exit_code};
use vhost_rdma::device::DeviceBackend;
use vhost_rdma::node::{AttachError, Backend};
use vhost_rdma::worker::WorkerConfig;
use vhost_rdma::{config, telemetry};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.json;
    let failed = match cli.command {
        Command::Serve(args) => {
            serve(*args).map_err(|error| (serve_code(&error), error.to_string()))
        }
        _ => cli::run(cli).map_err(|failure: Failure| (failure.code(), failure.to_string())),
    };
    let Err((code, message)) = failed else { return ExitCode::SUCCESS };
    if json {
        eprintln!("{}", serde_json::json!({ "error": { "code": code, "message": message } }));
    } else {
        eprintln!("vhost-rdma: {message}");
    }
    ExitCode::from(exit_code(code))
}

fn serve(args: ServeArgs) -> anyhow::Result<()> {
    telemetry::start(args.log_format).map_err(|error| anyhow!(error))?;
    let file = match &args.config {
        Some(path) => config::File::read(path)?,
        None => config::File::default(),
    };
    let workers = config::check_workers(
        args.workers.or(file.workers).unwrap_or_else(config::default_workers),
    )?;
    let channel = channel_settings(&args, &file);
    let ports = if args.cm_ports.is_empty() { file.cm_ports.clone() } else { args.cm_ports };
    let poll_us = args.poll_us.or(file.poll_us).unwrap_or(config::DEFAULT_POLL_US);
    let metrics = match (args.metrics, &file.metrics) {
        (Some(address), _) => Some(address),
        (None, Some(text)) => Some(
            text.parse().map_err(|error: String| anyhow!("in the configuration file, {error}"))?,
        ),
        (None, None) => None,
    };
    let settings = Settings {
        runtime_dir: match args.runtime_dir.or_else(|| file.runtime_dir.clone()) {
            Some(dir) => dir,
            None => config::default_runtime_dir()?,
        },
        workers,
        poll_us,
        ephemeral: args.ephemeral || file.ephemeral,
        admin: config::Access {
            owner: args.admin_owner.or_else(|| file.admin.owner.clone()),
            group: args.admin_group.or_else(|| file.admin.group.clone()),
            mode: args.admin_mode.or(file.admin.mode),
            acl: file.admin.acl.clone(),
        },
        metrics,
        file,
    };
    let cm = CmSettings { channel, ports };
    admin::run(&settings, || backend(workers, poll_us, cm))?;
    Ok(())
}

/// The device layer.
fn backend(workers: u32, poll_us: u32, cm: CmSettings) -> Result<impl Backend, AttachError> {
    let mut device = DeviceBackend::start(WorkerConfig { workers, poll_us })
        .map_err(|error| AttachError::io("start the workers", error))?;
    device.set_cm_ports(cm.ports);
    if let Some(settings) = &cm.channel {
        let opened = device.open_channel(settings);
        opened.map_err(|error| AttachError::Resources(error.to_string()))?;
    }
    Ok(device)
}

/// How rdma_cm of guests on RNICs reaches others.
struct CmSettings {
    channel: Option<channel::Settings>,
    ports: Vec<u16>,
}

/// How rdma_cm goes to other daemons: as the command line says, else the configuration file.
fn channel_settings(args: &ServeArgs, file: &config::File) -> Option<channel::Settings> {
    let given = (args.cm_listen, &args.cm_cert, &args.cm_key, &args.cm_ca);
    let (listen, cert, key, ca) = match (given, &file.cm) {
        ((Some(listen), Some(cert), Some(key), Some(ca)), _) => (listen, cert, key, ca),
        (_, Some(cm)) => (cm.listen, &cm.cert, &cm.key, &cm.ca),
        _ => return None,
    };
    let files = Files { cert: cert.clone(), key: key.clone(), ca: ca.clone() };
    Some(channel::Settings { listen, files })
}

fn serve_code(error: &anyhow::Error) -> &'static str {
    if error.downcast_ref::<config::ConfigError>().is_some() {
        return "invalid_argument";
    }
    match error.downcast_ref::<RunError<AttachError>>() {
        Some(RunError::Serve(error)) => match error {
            ServeError::Running { .. }
            | ServeError::Socket { source: AttachError::SocketInUse { .. }, .. } => {
                "failed_precondition"
            }
            ServeError::PathTooLong { .. } | ServeError::User(_) | ServeError::Start(_) => {
                "invalid_argument"
            }
            ServeError::Directory { source, .. }
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                "permission_denied"
            }
            ServeError::Socket { source: AttachError::Permission { .. }, .. } => {
                "permission_denied"
            }
            _ => "internal",
        },
        _ => "internal",
    }
}
