//! Between the API's messages and the node's types.

use std::net::IpAddr;

use tonic::{Code, Status};
use vhost_rdma_proto::v1;

use super::daemon::{Error, NicView, PeersUpdate, Version};
use super::users::{acl, acl_text, group_id, group_name, user_id, user_name};
use crate::node::{self, AttachError, LimitsPatch, NicPatch, NicSpec, Session, SocketAccess};

/// The gRPC status of an error; its message is the error's own.
pub(super) fn status(error: &Error) -> Status {
    Status::new(code(error), error.to_string())
}

fn code(error: &Error) -> Code {
    use node::Error as E;
    match error {
        Error::Node(error) => match error {
            E::NoSuchNetwork { .. } | E::NoSuchNic { .. } | E::NoSuchPeer { .. } => Code::NotFound,
            E::NameTaken { .. }
            | E::VniTaken { .. }
            | E::MacTaken { .. }
            | E::AddressTaken { .. } => Code::AlreadyExists,
            E::NetworkNotEmpty { .. }
            | E::DefaultNetwork
            | E::NoFreeVni
            | E::PeerOfAnother { .. }
            | E::OldPeers { .. }
            | E::UnknownBase { .. } => Code::FailedPrecondition,
            E::Attach {
                source: AttachError::SocketInUse { .. } | AttachError::Backing(_), ..
            } => Code::FailedPrecondition,
            E::Attach { source: AttachError::Permission { .. }, .. } => Code::PermissionDenied,
            E::Network { .. } | E::Attach { source: AttachError::Resources(_), .. } => {
                Code::ResourceExhausted
            }
            E::Attach { source: AttachError::Io { .. }, .. } => Code::Internal,
            _ => Code::InvalidArgument,
        },
        Error::User(_) => Code::InvalidArgument,
        Error::Store(_) | Error::Configured { .. } | Error::Restore(_) => Code::Internal,
    }
}

fn addresses(texts: Vec<String>) -> Result<Vec<IpAddr>, Error> {
    let parse = |text: String| {
        text.parse().map_err(|_| {
            let why = if text.contains('/') {
                "it has a prefix length"
            } else {
                "it is not an IP address"
            };
            node::Error::BadAddress { text, why }.into()
        })
    };
    texts.into_iter().map(parse).collect()
}

const fn limits(patch: Option<v1::LimitsPatch>) -> LimitsPatch {
    match patch {
        None => LimitsPatch {
            max_contexts: None,
            max_pds: None,
            max_mrs: None,
            max_mr_bytes: None,
            max_kept_bytes: None,
            max_guest_bytes: None,
            max_cqs: None,
            max_srqs: None,
            max_qps: None,
            max_ahs: None,
        },
        Some(patch) => LimitsPatch {
            max_contexts: patch.max_contexts,
            max_pds: patch.max_pds,
            max_mrs: patch.max_mrs,
            max_mr_bytes: patch.max_mr_bytes,
            max_kept_bytes: patch.max_kept_bytes,
            max_guest_bytes: patch.max_guest_bytes,
            max_cqs: patch.max_cqs,
            max_srqs: patch.max_srqs,
            max_qps: patch.max_qps,
            max_ahs: patch.max_ahs,
        },
    }
}

pub(super) fn spec(request: v1::AddNicRequest) -> Result<NicSpec, Error> {
    let access = request.access.unwrap_or_default();
    Ok(NicSpec {
        name: request.name,
        network: Some(request.network).filter(|name| !name.is_empty()),
        mac: Some(request.mac)
            .filter(|mac| !mac.is_empty())
            .map(|mac| mac.parse())
            .transpose()
            .map_err(node::Error::BadMac)?,
        addresses: addresses(request.addresses)?,
        virtio_id: request.virtio_id,
        comp_vectors: request.comp_vectors,
        limits: limits(request.limits),
        backing: request.backing.parse().map_err(node::Error::from)?,
        guests: request.guests.parse().map_err(node::Error::from)?,
        access: SocketAccess {
            uid: access.owner.as_deref().map(user_id).transpose()?,
            gid: access.group.as_deref().map(group_id).transpose()?,
            mode: access.mode.unwrap_or(SocketAccess::default().mode),
            acl: access.acl.map(|list| acl(&list.entries)).transpose()?.unwrap_or_default(),
        },
        configured: false,
        number: None,
    })
}

pub(super) fn patch(request: v1::UpdateNicRequest) -> Result<NicPatch, Error> {
    let access = request.access.unwrap_or_default();
    Ok(NicPatch {
        addresses: request.addresses.map(|list| addresses(list.addresses)).transpose()?,
        limits: limits(request.limits),
        uid: access.owner.as_deref().map(user_id).transpose()?,
        gid: access.group.as_deref().map(group_id).transpose()?,
        mode: access.mode,
        acl: access.acl.map(|list| acl(&list.entries)).transpose()?,
    })
}

pub(super) fn peer_of(message: &v1::Peer) -> Result<node::Peer, Error> {
    let network =
        if message.network.is_empty() { node::DEFAULT_NETWORK } else { message.network.as_str() };
    let through = Some(message.through.as_str()).filter(|host| !host.is_empty());
    let peer = node::Peer::parse(network, &message.address, through)?;
    if message.daemon.is_empty() {
        return Ok(peer);
    }
    Ok(peer.served_by(&message.daemon)?)
}

pub(super) fn peer(peer: &node::Peer) -> v1::Peer {
    v1::Peer {
        network: peer.network.clone(),
        address: peer.to_string(),
        through: peer.through.map(|host| host.to_string()).unwrap_or_default(),
        daemon: peer.daemon.clone().unwrap_or_default(),
        source: peer.source.name().to_owned(),
    }
}

pub(super) fn peers_update(request: v1::ReplacePeersRequest) -> Result<PeersUpdate, Error> {
    let v1::ReplacePeersRequest { network, version, base, add, remove } = request;
    let network = if network.is_empty() { node::DEFAULT_NETWORK.to_owned() } else { network };
    let of = |message: v1::Peer| {
        if !message.network.is_empty() && message.network != network {
            let why = "it is of another network";
            return Err(node::Error::BadPeer { text: message.address, why }.into());
        }
        peer_of(&v1::Peer { network: network.clone(), ..message })
    };
    let add = add.into_iter().map(of).collect::<Result<_, Error>>()?;
    let gone = remove.iter().map(|text| node::Peer::parse(&network, text, None));
    let remove = gone.collect::<Result<_, _>>()?;
    let version = version.map(|of| Version { epoch: of.epoch, generation: of.generation });
    Ok(PeersUpdate { network, version, base, add, remove })
}

pub(super) fn nic(view: NicView) -> v1::Nic {
    let NicView { config, status } = view;
    let num_queues = config.num_queues();
    let access = config.access;
    let uid = access.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let gid = access.gid.unwrap_or_else(|| rustix::process::getegid().as_raw());
    v1::Nic {
        name: config.name,
        number: config.number,
        network: config.network,
        vni: config.vni,
        mac: config.mac.to_string(),
        addresses: config.addresses.iter().map(IpAddr::to_string).collect(),
        virtio_id: config.virtio_id,
        guests: config.guests.name().to_owned(),
        backing: config.backing.to_string(),
        socket: config.socket.display().to_string(),
        access: Some(v1::SocketAccess {
            owner: Some(user_name(uid)),
            group: Some(group_name(gid)),
            mode: Some(access.mode),
            acl: Some(v1::SocketAcl { entries: access.acl.iter().map(acl_text).collect() }),
        }),
        limits: Some(v1::Limits {
            max_contexts: config.limits.max_contexts,
            max_pds: config.limits.max_pds,
            max_mrs: config.limits.max_mrs,
            max_mr_bytes: config.limits.max_mr_bytes,
            max_kept_bytes: config.limits.max_kept_bytes,
            max_guest_bytes: config.limits.max_guest_bytes,
            max_cqs: config.limits.max_cqs,
            max_srqs: config.limits.max_srqs,
            max_qps: config.limits.max_qps,
            max_ahs: config.limits.max_ahs,
        }),
        configured: config.configured,
        session: session(status.session).into(),
        error: status.error.unwrap_or_default(),
        counters: Some(counters(&status.counters)),
        objects: Some(objects(&status.objects)),
        gids: status.gids.iter().map(IpAddr::to_string).collect(),
        comp_vectors: config.comp_vectors.into(),
        num_queues: num_queues.into(),
        interrupted: status.interrupted,
        worker: status.worker,
        silent: status.silent,
    }
}

const fn session(session: Session) -> v1::Session {
    match session {
        Session::Absent => v1::Session::Absent,
        Session::Connected => v1::Session::Connected,
        Session::DriverReady => v1::Session::DriverReady,
        Session::Failed => v1::Session::Failed,
    }
}

const fn counters(c: &node::Counters) -> v1::Counters {
    v1::Counters {
        tx_bytes: c.tx_bytes,
        rx_bytes: c.rx_bytes,
        tx_messages: c.tx_messages,
        rx_messages: c.rx_messages,
        rnr_naks: c.rnr_naks,
        retries: c.retries,
        access_errors: c.access_errors,
        control_commands: c.control_commands,
        kicks: c.kicks,
        events: c.events,
        completions: c.completions,
        page_faults: c.page_faults,
        moves: c.moves,
    }
}

const fn objects(o: &node::Objects) -> v1::Objects {
    v1::Objects {
        contexts: o.contexts,
        pds: o.pds,
        mrs: o.mrs,
        mr_bytes: o.mr_bytes,
        cqs: o.cqs,
        srqs: o.srqs,
        qps: o.qps,
        ahs: o.ahs,
        kept_bytes: o.kept_bytes,
    }
}
