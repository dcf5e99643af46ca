//! One function for each command: a call of the API, then something shown.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::CommandFactory as _;
use tonic::transport::Channel;
use vhost_rdma_proto::v1;
use vhost_rdma_proto::v1::admin_client::AdminClient;
use vhost_rdma_vmm as vmm;

use super::args::{
    AccessArgs, Cli, Command, LimitArgs, NetworkCommand, NicAdd, NicCommand, NicSet, PeerCommand,
};
use super::view::{
    Changed, Network, Peer, PeersReplaced, Reloaded, Removed, Restarted, ShownNic, Status,
    Upgraded, Versions, options, print, show,
};
use super::{Failure, client, peer_set, vf};
use crate::config;

/// Runs any command but `serve`.
///
/// # Errors
/// A [`Failure`], which has been shown to nobody yet.
pub fn run(cli: Cli) -> Result<(), Failure> {
    let json = cli.json;
    match cli.command {
        Command::Vf(args) => return vf::run(args, json),
        Command::Man { dir } => return man(dir.as_deref()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "vhost-rdma", &mut script);
            return print(&script);
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Failure::Io { action: "start".to_owned(), source })?;
    let socket = cli.socket.unwrap_or_else(config::default_admin_socket);
    runtime.block_on(async {
        match cli.command {
            Command::Version => version(json, &socket).await,
            Command::Status => {
                let status =
                    client::connect(&socket).await?.get_status(v1::GetStatusRequest {}).await?;
                show(json, &Status::from(status.into_inner()))
            }
            Command::Reload => {
                let done = client::connect(&socket).await?.reload(v1::ReloadRequest {}).await?;
                let done = Reloaded::from(done.into_inner());
                show(json, &done)?;
                done.failed.first().map_or(Ok(()), |why| Err(Failure::Partly(why.clone())))
            }
            Command::Upgrade { force } => upgrade(json, &socket, force).await,
            Command::Network(command) => {
                network(json, client::connect(&socket).await?, command).await
            }
            Command::Peer(command) => peer(json, client::connect(&socket).await?, command).await,
            Command::Nic(command) => nic(json, client::connect(&socket).await?, command).await,
            Command::Serve(_)
            | Command::Keep { .. }
            | Command::Run { .. }
            | Command::RunNics
            | Command::Kept { .. }
            | Command::NetworkProcess { .. }
            | Command::OutsideProcess
            | Command::Vf(_)
            | Command::Man { .. }
            | Command::Completions { .. } => Ok(()),
        }
    })
}

fn man(dir: Option<&Path>) -> Result<(), Failure> {
    let fault = |source| Failure::Io { action: "write the manual".to_owned(), source };
    match dir {
        Some(dir) => std::fs::create_dir_all(dir)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
            .map_err(|source| Failure::Io {
                action: format!("write the manual into {}", dir.display()),
                source,
            }),
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(fault)?;
            print(&page)
        }
    }
}

/// Works without a daemon; only one that is there but may not be asked is a failure.
async fn version(json: bool, socket: &Path) -> Result<(), Failure> {
    let daemon = match client::connect(socket).await {
        Ok(mut client) => {
            Some(client.get_status(v1::GetStatusRequest {}).await?.into_inner().version)
        }
        Err(Failure::Unreachable(_)) => None,
        Err(other) => return Err(other),
    };
    show(json, &Versions { client: env!("CARGO_PKG_VERSION"), daemon })
}

/// How long the next program may take to answer.
const UPGRADE: Duration = Duration::from_secs(60);

async fn upgrade(json: bool, socket: &Path, force: bool) -> Result<(), Failure> {
    let mut client = client::connect(socket).await?;
    let before = client.get_status(v1::GetStatusRequest {}).await?.into_inner();
    let begin = Instant::now();
    let answer = match client.upgrade(v1::UpgradeRequest { force }).await {
        Ok(answer) => Some(answer.into_inner()),
        // A daemon with much to do may be another program before its answer has left.
        Err(status) => match Failure::from(status) {
            Failure::Unreachable(_) => None,
            refused => return Err(refused),
        },
    };
    drop(client);
    let after = loop {
        if let Ok(mut client) = client::connect(socket).await
            && let Ok(status) = client.get_status(v1::GetStatusRequest {}).await
            && status.get_ref().instance != before.instance
        {
            break status.into_inner();
        }
        if begin.elapsed() > UPGRADE {
            let program = answer.map_or_else(|| "the next program".to_owned(), |of| of.program);
            return Err(Failure::Unreachable(format!(
                "{program} does not answer as the daemon; its log tells why"
            )));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let ms = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
    let (ready_before, ready) = (before.nics_ready, after.nics_ready);
    let (from, to) = (before.version, after.version);
    let lost = answer.map(|answer| answer.lost).unwrap_or_default();
    let pause_us = Some(after.upgrade_pause_us).filter(|pause| *pause > 0);
    show(json, &Upgraded { from, to, ready_before, ready, lost, ms, pause_us })?;
    if ready < ready_before {
        let lost = ready_before - ready;
        return Err(Failure::Partly(format!("{lost} guests lost their device")));
    }
    Ok(())
}

async fn network(
    json: bool,
    mut client: AdminClient<Channel>,
    command: NetworkCommand,
) -> Result<(), Failure> {
    match command {
        NetworkCommand::Add { name, vni } => {
            let added = client.add_network(v1::AddNetworkRequest { name, vni }).await?;
            show(json, &Network::from(added.into_inner()))
        }
        NetworkCommand::Rm { name } => {
            let answer =
                client.remove_network(v1::RemoveNetworkRequest { name: name.clone() }).await?;
            show(json, &removed(name, answer.into_inner().warning))
        }
        NetworkCommand::Restart { name } => {
            let done = client.restart_network(v1::RestartNetworkRequest { name }).await?;
            let done = Restarted::from(done.into_inner());
            show(json, &done)?;
            let lost =
                |nic: &String| Failure::Partly(format!("the guest of {nic} lost its device"));
            done.lost.first().map_or(Ok(()), |nic| Err(lost(nic)))
        }
        NetworkCommand::List => {
            let list = client.list_networks(v1::ListNetworksRequest {}).await?;
            show(
                json,
                &list.into_inner().networks.into_iter().map(Network::from).collect::<Vec<_>>(),
            )
        }
    }
}

async fn peer(
    json: bool,
    mut client: AdminClient<Channel>,
    command: PeerCommand,
) -> Result<(), Failure> {
    match command {
        PeerCommand::Add { address, network, through, daemon } => {
            let (through, daemon) = (through.unwrap_or_default(), daemon.unwrap_or_default());
            let added = client
                .add_peer(v1::Peer { network, address, through, daemon, ..v1::Peer::default() })
                .await?;
            show(json, &Peer::from(added.into_inner()))
        }
        PeerCommand::Rm { address, network } => {
            let gone = v1::Peer { network, address: address.clone(), ..v1::Peer::default() };
            client.remove_peer(gone).await?;
            show(json, &removed(address, String::new()))
        }
        PeerCommand::Replace { network, file, generation, epoch } => {
            let add = peer_set::read(&file)?;
            let version = generation.map(|generation| v1::PeersVersion { epoch, generation });
            let request = v1::ReplacePeersRequest { network, version, add, ..Default::default() };
            show(json, &PeersReplaced::from(client.replace_peers(request).await?.into_inner()))
        }
        PeerCommand::List { network } => {
            let network = network.unwrap_or_default();
            let list = client.list_peers(v1::ListPeersRequest { network }).await?;
            show(json, &list.into_inner().peers.into_iter().map(Peer::from).collect::<Vec<_>>())
        }
    }
}

async fn nic(
    json: bool,
    mut client: AdminClient<Channel>,
    command: NicCommand,
) -> Result<(), Failure> {
    match command {
        NicCommand::Add(args) => {
            let added = client.add_nic(add_request(*args)).await?;
            show(json, &Changed(added.into_inner().into()))
        }
        NicCommand::Rm { name } => {
            let answer = client.remove_nic(v1::RemoveNicRequest { name: name.clone() }).await?;
            show(json, &removed(name, answer.into_inner().warning))
        }
        NicCommand::Set(args) => {
            let changed = client.update_nic(update_request(*args)?).await?;
            show(json, &Changed(changed.into_inner().into()))
        }
        NicCommand::List { network } => {
            let list = client
                .list_nics(v1::ListNicsRequest { network: network.unwrap_or_default() })
                .await?;
            show(json, &list.into_inner().nics.into_iter().map(ShownNic::from).collect::<Vec<_>>())
        }
        NicCommand::Show { name } => show(json, &get(&mut client, name).await?),
        NicCommand::QemuArgs(args) => {
            let nic = get(&mut client, args.name.clone()).await?;
            let choices = vmm::QemuArgs {
                virtio_id: args.virtio_id,
                netdev: args.netdev,
                memory: (!args.no_memory).then_some(args.memory),
                index: args.index,
                vectors: args.vectors,
            };
            options(json, &vmm::qemu(&nic.for_vmm(), &choices)?)
        }
        NicCommand::CloudHypervisorArgs(args) => {
            let nic = get(&mut client, args.name.clone()).await?;
            let choices = vmm::CloudHypervisorArgs {
                virtio_id: args.virtio_id,
                tap: args.tap,
                memory: (!args.no_memory).then_some(args.memory),
            };
            options(json, &vmm::cloud_hypervisor(&nic.for_vmm(), &choices)?)
        }
    }
}

async fn get(client: &mut AdminClient<Channel>, name: String) -> Result<ShownNic, Failure> {
    Ok(client.get_nic(v1::GetNicRequest { name }).await?.into_inner().into())
}

fn removed(name: String, warning: String) -> Removed {
    Removed { removed: name, warning: Some(warning).filter(|warning| !warning.is_empty()) }
}

const fn limits(args: LimitArgs) -> v1::LimitsPatch {
    v1::LimitsPatch {
        max_contexts: args.max_contexts,
        max_pds: args.max_pds,
        max_mrs: args.max_mrs,
        max_mr_bytes: args.max_mr_bytes,
        max_kept_bytes: args.max_kept_bytes,
        max_guest_bytes: args.max_guest_bytes,
        max_cqs: args.max_cqs,
        max_srqs: args.max_srqs,
        max_qps: args.max_qps,
        max_ahs: args.max_ahs,
    }
}

/// With `no_acl` an empty list is one that takes the present one's place.
fn access(args: AccessArgs, no_acl: bool) -> v1::SocketAccess {
    let acl = (no_acl || !args.acl.is_empty()).then_some(v1::SocketAcl { entries: args.acl });
    v1::SocketAccess { owner: args.owner, group: args.group, mode: args.mode, acl }
}

fn add_request(args: NicAdd) -> v1::AddNicRequest {
    v1::AddNicRequest {
        name: args.name,
        network: args.network,
        mac: args.mac.unwrap_or_default(),
        addresses: args.addresses,
        virtio_id: args.virtio_id,
        limits: Some(limits(args.limits)),
        access: Some(access(args.access, false)),
        backing: args.backing,
        guests: args.guests,
        comp_vectors: args.vectors,
    }
}

fn update_request(args: NicSet) -> Result<v1::UpdateNicRequest, Failure> {
    let addresses = (args.any_address || !args.addresses.is_empty())
        .then_some(v1::Addresses { addresses: args.addresses });
    let request = v1::UpdateNicRequest {
        name: args.name,
        addresses,
        limits: Some(limits(args.limits)),
        access: Some(access(args.access, args.no_acl)),
    };
    let unchanged = request.addresses.is_none()
        && request.limits == Some(v1::LimitsPatch::default())
        && request.access == Some(v1::SocketAccess::default());
    if unchanged {
        return Err(Failure::Usage(
            "nothing to change: give at least one option, such as --max-qps; `vhost-rdma nic set \
             --help` shows all"
                .to_owned(),
        ));
    }
    Ok(request)
}
