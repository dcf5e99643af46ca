//! Who has to be found on the network first: peers of address handles and of connections.
//!
//! RoCE puts a MAC address before each packet, so the host asks the network for that of the peer
//! (ARP, neighbour discovery) when an address handle is made and when a QP goes to RTR, and waits
//! for the answer up to a second (Linux drivers/infiniband/core/addr.c,
//! rdma_addr_find_l2_eth_by_grh). A guest chooses its peers, so the worker does not wait with it:
//! an address handle is made on the thread that carries the NIC's commands out
//! ([`BlockingJob`](vhost_rdma_engine::nic::BlockingJob)), and before a QP is connected one is made
//! there and dropped, after which the host knows the peer. Where NICs of other networks are not in
//! this process, it is asked there as well whether the peer's QP is one of theirs
//! ([`Uplink`](super::Uplink)). Such a process sends no datagrams of its own, so what asks the
//! network is asked for there too, and the handle is tried again.

use std::thread;
use std::time::{Duration, Instant};

use easy_ext::ext;
use vhost_rdma_engine::link::is_multicast;
use vhost_rdma_engine::nic::work::Begun;
use vhost_rdma_engine::nic::{Reply, Status};
use virtio_rdma_abi::Av;

use super::addresses::Addresses as _;
use super::directory::Directory;
use super::findings::{Finding, Found, Purpose};
use super::mcast::Mcast as _;
use super::nic::{Handle, Nic, Rnic};
use super::refusal::Control as _;
use super::verbs::{HostDomain, HostError, HostPd, MadeAh, Result as HostResult};

/// How long a neighbour is looked for: about as long as the kernel looks. An attempt may itself
/// take that long, where the kernel makes the handle.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long its first answer is waited for; the next ones twice as long each.
const FIRST_WAIT: Duration = Duration::from_millis(10);

/// Whether this says that a neighbour is not known, or may not be asked for.
const fn is_unknown(HostError(errno): HostError) -> bool {
    matches!(
        errno,
        libc::EPERM
            | libc::EACCES
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::EDESTADDRREQ
            | libc::ETIMEDOUT
    )
}

/// Makes the address handle, once the neighbour is found. Waits for it.
fn find(domain: &dyn HostDomain, directory: &Directory, at: &Av) -> HostResult<MadeAh> {
    let (begin, mut wait) = (Instant::now(), FIRST_WAIT);
    loop {
        let outcome = domain.create_ah(at);
        let Some(uplink) = directory.uplink() else { return outcome };
        match outcome {
            Err(error) if is_unknown(error) && begin.elapsed() < PATIENCE => {
                uplink.find(at.dgid);
                thread::sleep(wait);
                wait *= 2;
            }
            // The sandbox's answer is not the guest's matter.
            Err(error) if is_unknown(error) => return Err(HostError(libc::EHOSTUNREACH)),
            outcome => return outcome,
        }
    }
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
        let place = &self.backing.place;
        let (directory, device) = (place.directory.clone(), place.device.clone());
        Ok(self.aside(move || {
            let may = match &purpose {
                Purpose::Connection { attr, here, .. } => {
                    directory.ask_about(&device, (resolved.dgid, attr.dest_qpn.get()), *here)
                }
                Purpose::Handle(..) => true,
            };
            let outcome = find(domain.as_ref(), &directory, &resolved);
            Finding::Peer(Found { ctx, purpose, may, outcome })
        }))
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
