//! Who has to be found on the network first: peers of address handles and of connections.
//!
//! RoCE puts a MAC address before each packet, so the host asks the network for that of the peer
//! (ARP, neighbour discovery) when an address handle is made and when a QP goes to RTR, and waits
//! for the answer up to a second (Linux drivers/infiniband/core/addr.c,
//! rdma_addr_find_l2_eth_by_grh). A guest chooses its peers, so the worker does not wait with it:
//! an address handle is made on the thread that carries the NIC's commands out ([`BlockingJob`](vhost_rdma_engine::nic::BlockingJob)),
//! and before a QP is connected one is made there and dropped, after which the host knows the peer.

use easy_ext::ext;
use vhost_rdma_engine::link::is_multicast;
use vhost_rdma_engine::nic::dispatch::Begun;
use vhost_rdma_engine::nic::nic::NicState;
use vhost_rdma_engine::nic::{DeferredDrop, Reply, Status};
use virtio_rdma_abi::{Av, QpAttr};

use super::addresses::Addresses as _;
use super::control::Control as _;
use super::control::Finding;
use super::mcast::Mcast as _;
use super::modify::Modify as _;
use super::nic::{Handle, Nic, Rnic};
use super::verbs::{HostPd, MadeAh, Result as HostResult};

/// What a peer is looked for.
#[derive(Debug)]
pub(super) enum Purpose {
    /// An address handle in a domain.
    Handle(u32, Av),
    /// The connection of a QP.
    Connection(u32, Box<QpAttr>),
}

/// What became of a search.
#[derive(Debug)]
pub(super) struct Found {
    ctx: u32,
    purpose: Purpose,
    outcome: HostResult<MadeAh>,
}

#[ext(Reach)]
pub(super) impl Nic {
    /// Looks for a peer at `resolved`, an address of the host's network.
    fn look_for(
        &mut self,
        ctx: u32,
        purpose: Purpose,
        (pd, resolved): (HostPd, Av),
    ) -> Result<Begun<Rnic>, Status> {
        let domain = self.backing.host.domain(pd).map_err(|error| self.refused(error))?;
        Ok(self.aside(move || {
            Finding::Peer(Found { ctx, purpose, outcome: domain.create_ah(&resolved) })
        }))
    }

    /// The rest of the command, once the peer was looked for.
    fn found(&mut self, found: Found) -> Result<Begun<Rnic>, Status> {
        let Found { ctx, purpose, outcome } = found;
        let ah = match outcome {
            Ok(ah) => ah,
            Err(error) => {
                tracing::debug!(device = self.backing.place.device, %error, "a peer is not found");
                return Err(self.refused(error));
            }
        };
        let state = match self.life {
            NicState::Ready | NicState::Paused => Ok(()),
            NicState::Failed => Err(Status::FATAL),
            NicState::Idle => Err(Status::STATE),
        };
        match (state, purpose) {
            (Ok(()), Purpose::Handle(pdn, av)) => self.take_in(ctx, pdn, av, ah).map(Begun::Done),
            (Ok(()), Purpose::Connection(qpn, attr)) => {
                self.deferred_drops.push(DeferredDrop::new(ah));
                self.change_qp(ctx, qpn, &attr)
            }
            (Err(status), _) => {
                self.deferred_drops.push(DeferredDrop::new(ah));
                Err(status)
            }
        }
    }

    fn create_ah(&mut self, ctx: u32, pdn: u32, av: &Av) -> Result<Begun<Rnic>, Status> {
        let pd = self.host_pd(ctx, pdn)?;
        let resolved = self.destination(av)?;
        self.look_for(ctx, Purpose::Handle(pdn, *av), (pd, resolved))
    }

    fn destination(&self, av: &Av) -> Result<Av, Status> {
        if is_multicast(&av.dgid) { self.resolve_group(av) } else { self.resolve(av) }
    }

    fn take_in(&mut self, ctx: u32, pdn: u32, av: Av, ah: MadeAh) -> Result<Reply, Status> {
        self.host_pd(ctx, pdn)?;
        // Peers may have been taken away meanwhile.
        self.destination(&av)?;
        let host = self.backing.host.adopt_ah(ah).map_err(|error| self.refused(error))?;
        self.insert_ah((ctx, pdn), av, Handle { host, revoked: false })
    }
}
