//! A pod with a CDI device, without a kubelet: asks the agent for IDs as a kubelet does, and hands
//! what it answers to a container runtime as a kubelet of version 1.29 or newer does.
//!
//! ```text
//! cri-pod --runtime SOCKET --plugin SOCKET --image IMAGE --id ID … -- COMMAND …
//! ```
//!
//! The container runs to its end; its output, and before it the CDI names that the agent gave, go
//! to standard output, its status is ours. For runtimes that know the CDI field of CRI, where no
//! such kubelet is to be had.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use vhost_rdma_agent::v1beta1::device_plugin_client::DevicePluginClient;
use vhost_rdma_agent::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
};

use cri::runtime_service_client::RuntimeServiceClient;

/// The container runtime interface, as far as it is needed here.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    dead_code,
    clippy::all,
    clippy::pedantic,
    clippy::use_self,
    clippy::wildcard_imports
)]
mod cri {
    tonic::include_proto!("runtime.v1");
}

const POLL: Duration = Duration::from_millis(200);
const LOGS: &str = "/var/log/pods/cri-pod";
const LOG: &str = "0.log";

/// A pod with a CDI device, without a kubelet
#[derive(Debug, Parser)]
struct Cli {
    /// The runtime's socket
    #[arg(long, default_value = "/run/containerd/containerd.sock")]
    runtime: PathBuf,
    /// The agent's socket for the pool
    #[arg(long)]
    plugin: PathBuf,
    /// The container's image, which the runtime has
    #[arg(long)]
    image: String,
    /// IDs that the container gets
    #[arg(long = "id", required = true)]
    ids: Vec<String>,
    /// The user that the container runs as
    #[arg(long, default_value_t = 1000)]
    user: i64,
    /// What runs in the container
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

async fn channel(socket: &Path) -> Result<Channel> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let connected = endpoint.connect_with_connector(connector).await;
    connected.with_context(|| format!("cannot connect to {}", socket.display()))
}

/// What the agent answers a kubelet for one container; with CDI that must be names, and no device
/// beside them.
async fn allocate(cli: &Cli) -> Result<ContainerAllocateResponse> {
    let mut plugin = DevicePluginClient::new(channel(&cli.plugin).await?);
    let wanted = ContainerAllocateRequest { devices_ids: cli.ids.clone() };
    let answer = plugin.allocate(AllocateRequest { container_requests: vec![wanted] }).await?;
    let mut answers = answer.into_inner().container_responses;
    let answer = answers.pop().context("the agent answered for no container")?;
    ensure!(
        answer.cdi_devices.len() == cli.ids.len(),
        "the agent gave {} CDI names for {} IDs: is its injection cdi?",
        answer.cdi_devices.len(),
        cli.ids.len()
    );
    ensure!(
        answer.devices.is_empty() && answer.mounts.is_empty(),
        "the agent gave devices or mounts beside CDI names: {answer:?}"
    );
    Ok(answer)
}

fn container(cli: &Cli, given: ContainerAllocateResponse) -> cri::ContainerConfig {
    let devices = given.cdi_devices.into_iter().map(|device| cri::CdiDevice { name: device.name });
    let envs = given.envs.into_iter().map(|(key, value)| cri::KeyValue { key, value });
    let security = cri::LinuxContainerSecurityContext {
        run_as_user: Some(cri::Int64Value { value: cli.user }),
        no_new_privs: true,
    };
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: cli.image.clone() }),
        command: cli.command.clone(),
        args: Vec::new(),
        envs: envs.collect(),
        log_path: LOG.into(),
        linux: Some(cri::LinuxContainerConfig { security_context: Some(security) }),
        cdi_devices: devices.collect(),
    }
}

/// Runs the container in a sandbox that exists; its exit status.
async fn run(
    cli: &Cli,
    runtime: &mut RuntimeServiceClient<Channel>,
    sandbox: (&str, &cri::PodSandboxConfig),
) -> Result<i32> {
    let given = allocate(cli).await?;
    for device in &given.cdi_devices {
        println!("cdi {}", device.name);
    }
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: sandbox.0.into(),
        config: Some(container(cli, given)),
        sandbox_config: Some(sandbox.1.clone()),
    };
    let made = runtime.create_container(request).await.context("CreateContainer")?;
    let container_id = made.into_inner().container_id;
    let start = cri::StartContainerRequest { container_id: container_id.clone() };
    runtime.start_container(start).await.context("StartContainer")?;
    loop {
        let ask = cri::ContainerStatusRequest { container_id: container_id.clone() };
        let status = runtime.container_status(ask).await.context("ContainerStatus")?;
        let status = status.into_inner().status.context("a container without a status")?;
        match status.state() {
            cri::ContainerState::ContainerExited => return Ok(status.exit_code),
            cri::ContainerState::ContainerUnknown => {
                bail!("the runtime lost the container: {} {}", status.reason, status.message)
            }
            _ => tokio::time::sleep(POLL).await,
        }
    }
}

/// The lines of a log as runtimes write it: time, stream, tag, text (KEP "CRI container log
/// format").
fn print_log() -> Result<()> {
    let path = Path::new(LOGS).join(LOG);
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    for line in text.lines() {
        println!("{}", line.splitn(4, ' ').nth(3).unwrap_or_default());
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    let mut runtime = RuntimeServiceClient::new(channel(&cli.runtime).await?);
    let _ = std::fs::remove_dir_all(LOGS);
    std::fs::create_dir_all(LOGS).with_context(|| format!("cannot make {LOGS}"))?;
    let config = cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: "cri-pod".into(),
            uid: std::process::id().to_string(),
            namespace: "default".into(),
            attempt: 0,
        }),
        hostname: "cri-pod".into(),
        log_directory: LOGS.into(),
        linux: Some(cri::LinuxPodSandboxConfig::default()),
    };
    let request =
        cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let pod = runtime.run_pod_sandbox(request).await.context("RunPodSandbox")?;
    let pod_sandbox_id = pod.into_inner().pod_sandbox_id;
    let ended = run(&cli, &mut runtime, (&pod_sandbox_id, &config)).await;
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
    runtime.stop_pod_sandbox(stop).await.context("StopPodSandbox")?;
    let remove = cri::RemovePodSandboxRequest { pod_sandbox_id };
    runtime.remove_pod_sandbox(remove).await.context("RemovePodSandbox")?;
    let status = ended?;
    print_log()?;
    Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
}
