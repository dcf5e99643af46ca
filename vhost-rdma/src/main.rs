//! The vhost-rdma daemon and its command line: puts the parts together, and turns every failure
//! into a message and an exit status.

use std::ffi::CStr;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::anyhow;
use clap::Parser as _;
use vhost_rdma::admin::{self, Next, RunError, ServeError, Settings};
use vhost_rdma::channel::{self, ChannelError, Files, Renewal, Renewed};
use vhost_rdma::cli::{self, Cli, Command, Failure, ServeArgs, exit_code};
use vhost_rdma::config::ConfigError;
use vhost_rdma::dataplane::{LocalDataplane, Outside};
use vhost_rdma::network_process;
use vhost_rdma::node::{AttachError, Dataplane};
use vhost_rdma::store::{READS, Sockets, Store, keep};
use vhost_rdma::supervisor::{
    CgroupLimits, Estate, Fleet, FleetSettings, OutsideSettings, Supervisor, saved_version,
};
use vhost_rdma::telemetry::LogFormat;
use vhost_rdma::worker::WorkerConfig;
use vhost_rdma::{config, limits, outside, run, telemetry};

/// No thread may hold a lock that a worker needs, and the C library's allocator has one for each
/// arena: a worker that frees what a session's thread allocated waits for that thread, which may
/// have lost its processor meanwhile. Turns of 6 to 34 ms came of it (`bench isolation --
/// context_ends`). Here such a free is one atomic exchange.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What `ps`, `top` and whoever asks who has a device open call each process. One that was executed
/// as `/proc/self/exe`, as networks' processes and upgraded daemons are, would be called `exe`.
const NAME: &CStr = c"vhost-rdma";

fn main() -> ExitCode {
    // Without it everything works all the same.
    let _named = rustix::thread::set_name(NAME);
    let cli = Cli::parse();
    let json = cli.json;
    let failed = match cli.command {
        Command::Keep { log_format, command } => match keep::run(log_format, &command) {
            Ok(status) => return status,
            Err(error) => Err(("internal", error.to_string())),
        },
        Command::Kept { command } => Err(("internal", keep::become_child(&command).to_string())),
        Command::Serve(args) => {
            serve(*args).map_err(|error| (serve_code(&error), error.to_string()))
        }
        Command::Run { nics, network, connect, command } => {
            match run::run(&run::Wanted { nics, socket: cli.socket, network, connect, command }) {
                Ok(status) => return status,
                Err(fault) => Err((run_code(&fault), fault.to_string())),
            }
        }
        Command::RunNics => {
            let socket = cli.socket.unwrap_or_else(config::default_admin_socket);
            match run::hold(&socket) {
                Ok(status) => return status,
                Err(error) => Err(("internal", error.to_string())),
            }
        }
        Command::NetworkProcess { .. } => {
            network_process::serve().map_err(|fault| ("internal", fault.to_string()))
        }
        Command::OutsideProcess => {
            outside::serve().map_err(|fault| ("internal", fault.to_string()))
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

fn run_code(fault: &run::Fault) -> &'static str {
    match fault {
        run::Fault::Program(_) => "invalid_argument",
        run::Fault::Libraries => "not_found",
        run::Fault::Daemon(_) => "failed_precondition",
        run::Fault::Host { .. } => "internal",
    }
}

/// Whether a daemon would start so. Nothing is changed, and one that runs does not notice.
fn check(args: &ServeArgs) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    telemetry::Filter::new(plan.log.as_deref()).map_err(|error| anyhow!(error))?;
    admin::check(&plan.settings)?;
    // Read by the program that this one is to replace.
    println!("{}{}", READS, saved_version());
    Ok(())
}

fn serve(args: ServeArgs) -> anyhow::Result<()> {
    if args.check {
        return check(&args);
    }
    if args.with_parent {
        // This is the first thread, which lives as long as the process.
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    }
    telemetry::start(args.log_format, None).map_err(|error| anyhow!(error))?;
    let (store, heirlooms) = Store::open();
    let (sockets, heirlooms) = Sockets::read(store.clone(), heirlooms);
    let estate = Estate::read(store, heirlooms);
    limits::raise_descriptors();
    limits::keep_descriptors();
    let plan = Plan::new(&args)?;
    telemetry::Filter::new(plan.log.as_deref()).map_err(|error| anyhow!(error))?.take_effect();
    let reached = Arc::new(Reached::default());
    let settings = plan.settings.clone();
    let reload =
        Reloader { args, running: Arc::new(Mutex::new(plan.clone())), reached: reached.clone() };
    let reload = move || reload.next().map_err(|error| error.to_string());
    let nics = Arc::clone(&sockets);
    let backend = || dataplane(&plan, &reached, estate).map(|all| Supervisor::new(all, nics));
    admin::run(&settings, backend, Box::new(reload), &sockets)?;
    Ok(())
}

/// What command line and configuration file ask for together.
#[derive(Clone)]
struct Plan {
    settings: Settings,
    channel: Option<channel::Settings>,
    ports: Vec<u16>,
    log: Option<String>,
    log_format: LogFormat,
    one_process: bool,
    cgroup: CgroupLimits,
}

impl Plan {
    fn new(args: &ServeArgs) -> anyhow::Result<Self> {
        let file = match &args.config {
            Some(path) => config::File::read(path)?,
            None => config::File::default(),
        };
        let workers = config::check_workers(
            args.workers.or(file.workers).unwrap_or_else(config::default_workers),
        )?;
        let channel = channel_settings(args, &file)?;
        let given = !args.cm_ports.is_empty();
        let ports = if given { args.cm_ports.clone() } else { file.cm_ports.clone() };
        if !args.one_process {
            config::check_ports(&ports)?;
        }
        let metrics = match (&args.metrics, &file.metrics) {
            (Some(address), _) => Some(address.clone()),
            (None, Some(text)) => {
                let parsed = text.parse();
                Some(
                    parsed
                        .map_err(|error: String| anyhow!("in the configuration file, {error}"))?,
                )
            }
            (None, None) => None,
        };
        let settings = Settings {
            runtime_dir: match args.runtime_dir.clone().or_else(|| file.runtime_dir.clone()) {
                Some(dir) => dir,
                None => config::default_runtime_dir()?,
            },
            workers,
            network_workers: config::check_workers(
                args.network_workers.or(file.network_workers).unwrap_or(1),
            )?,
            poll_us: args.poll_us.or(file.poll_us).unwrap_or(config::DEFAULT_POLL_US),
            ephemeral: args.ephemeral || file.ephemeral,
            admin: config::Access {
                owner: args.admin_owner.clone().or_else(|| file.admin.owner.clone()),
                group: args.admin_group.clone().or_else(|| file.admin.group.clone()),
                mode: args.admin_mode.or(file.admin.mode),
                acl: file.admin.acl.clone(),
            },
            metrics,
            file,
        };
        let log = settings.file.log.clone();
        let (log_format, one_process) = (args.log_format, args.one_process);
        let cgroup = CgroupLimits {
            memory: args.network_memory_max.or(settings.file.network_memory_max),
            pids: args.network_pids_max.or(settings.file.network_pids_max),
        };
        Ok(Self { settings, channel, ports, log, log_format, one_process, cgroup })
    }

    /// What a new plan has otherwise and a running daemon cannot take over.
    fn restarts(&self, new: &Self) -> Vec<String> {
        let (ours, theirs) = (&self.settings, &new.settings);
        let listen = |plan: &Self| plan.channel.as_ref().map(|channel| channel.listen);
        let daemons = |plan: &Self| plan.channel.as_ref().map(|channel| channel.daemons);
        let differ = [
            ("runtime_dir", ours.runtime_dir != theirs.runtime_dir),
            ("workers", ours.workers != theirs.workers),
            ("network_workers", ours.network_workers != theirs.network_workers),
            ("network_memory_max", self.cgroup.memory != new.cgroup.memory),
            ("network_pids_max", self.cgroup.pids != new.cgroup.pids),
            ("poll_us", ours.poll_us != theirs.poll_us),
            ("ephemeral", ours.ephemeral != theirs.ephemeral),
            ("metrics", ours.metrics != theirs.metrics),
            ("cm.listen", listen(self) != listen(new)),
            ("cm.daemons", daemons(self) != daemons(new)),
            ("cm_ports", self.ports != new.ports),
        ];
        let differ = differ.into_iter().filter(|(_, is)| *is);
        differ.map(|(what, _)| format!("{what} takes a restart")).collect()
    }
}

/// What of a running daemon takes a changed configuration over.
#[derive(Default)]
struct Reached {
    renewal: OnceLock<Renewal>,
    fleet: OnceLock<Arc<Fleet>>,
}

/// Reads everything again.
struct Reloader {
    args: ServeArgs,
    /// What is in effect.
    running: Arc<Mutex<Plan>>,
    reached: Arc<Reached>,
}

impl Reloader {
    fn next(&self) -> anyhow::Result<Next> {
        let new = Plan::new(&self.args)?;
        let filter = telemetry::Filter::new(new.log.as_deref()).map_err(|error| anyhow!(error))?;
        // Also where the same files are named: what is in them may be new.
        let renewed = match (self.reached.renewal.get(), &new.channel) {
            (Some(renewal), Some(channel)) => Some(renewal.read(channel)?),
            _ => None,
        };
        let (running, reached) = (Arc::clone(&self.running), Arc::clone(&self.reached));
        let kept = running.lock().unwrap_or_else(PoisonError::into_inner).restarts(&new);
        let Settings { file, admin, .. } = new.settings.clone();
        let commit = move || {
            let mut changed = Vec::new();
            let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
            if running.log != new.log {
                running.log = new.log;
                filter.take_effect();
                if let Some(fleet) = reached.fleet.get() {
                    fleet.log(running.log.as_deref());
                }
                changed.push("what is logged".to_owned());
            }
            if renewed.map(Renewed::take_effect) == Some(true) {
                changed.push("the channel's certificates".to_owned());
            }
            changed
        };
        Ok(Next { file, admin, kept, commit: Box::new(commit) })
    }
}

/// What serves NICs: a process for each network, or this one.
fn dataplane(
    plan: &Plan,
    reached: &Arc<Reached>,
    estate: Estate,
) -> Result<Arc<dyn Dataplane>, AttachError> {
    if plan.one_process {
        Ok(Arc::new(local(plan, reached)?))
    } else {
        fleet(plan, reached, estate).map(|fleet| fleet as Arc<dyn Dataplane>)
    }
}

fn fleet(plan: &Plan, reached: &Arc<Reached>, estate: Estate) -> Result<Arc<Fleet>, AttachError> {
    let settings = FleetSettings {
        workers: plan.settings.network_workers,
        poll_us: plan.settings.poll_us,
        limits: plan.cgroup,
        runtime_dir: plan.settings.runtime_dir.clone(),
        log_format: plan.log_format,
        log: plan.log.clone(),
    };
    let outside = OutsideSettings { ports: plan.ports.clone(), channel: plan.channel.clone() };
    let fleet = Fleet::new(settings, estate, outside);
    let fleet = Arc::new(fleet.map_err(|error| AttachError::io("draw random numbers", error))?);
    if plan.channel.is_some() {
        // Other daemons may speak first. There is one channel.
        let _ = fleet.outside()?.renewal().map(|renewal| reached.renewal.set(renewal));
    }
    // There is one.
    let _ = reached.fleet.set(Arc::clone(&fleet));
    Ok(fleet)
}

/// A data plane in this process.
fn local(plan: &Plan, reached: &Reached) -> Result<LocalDataplane, AttachError> {
    let Settings { workers, poll_us, .. } = plan.settings;
    let config = WorkerConfig { workers, poll_us, ..WorkerConfig::default() };
    LocalDataplane::start_with(config, Arc::new(shared_outside(plan, reached)?))
        .map_err(|error| AttachError::io("start the workers", error))
}

/// What NICs on RNICs share, in this process.
fn shared_outside(plan: &Plan, reached: &Reached) -> Result<Outside, AttachError> {
    let mut outside = Outside::new(plan.ports.clone());
    if let Some(settings) = &plan.channel {
        let told = |error: ChannelError| AttachError::Resources(error.to_string());
        let opened = settings.open().map_err(told)?;
        let pems = opened.pems.clone();
        let identity = outside.run_channel(opened).map_err(told)?;
        let give = move |pems| {
            if let Err(error) = identity.give(&pems) {
                tracing::error!(%error, "the channel's certificates stay as they were");
            }
        };
        // There is one channel.
        let _ = reached.renewal.set(Renewal::new(pems, give));
    }
    Ok(outside)
}

/// How rdma_cm goes to other daemons: as the command line says, else the configuration file.
fn channel_settings(
    args: &ServeArgs,
    file: &config::File,
) -> Result<Option<channel::Settings>, ConfigError> {
    let given = (args.cm_listen, &args.cm_cert, &args.cm_key, &args.cm_ca);
    let (listen, cert, key, ca) = match (given, &file.cm) {
        ((Some(listen), Some(cert), Some(key), Some(ca)), _) => (listen, cert, key, ca),
        (_, Some(cm)) => (cm.listen, &cm.cert, &cm.key, &cm.ca),
        _ => return Ok(None),
    };
    let files = Files { cert: cert.clone(), key: key.clone(), ca: ca.clone() };
    let chosen = args.cm_daemons.or(file.cm.as_ref().and_then(|cm| cm.daemons));
    let daemons = config::check_daemons(chosen.unwrap_or(config::DEFAULT_DAEMONS))?;
    let daemons = usize::try_from(daemons).unwrap_or(usize::MAX);
    let wait = args.cm_wait || file.cm.as_ref().is_some_and(|cm| cm.wait);
    Ok(Some(channel::Settings { listen, files, daemons, wait }))
}

fn serve_code(error: &anyhow::Error) -> &'static str {
    if error.downcast_ref::<ConfigError>().is_some() {
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
