//! Multicast groups that the port's interface receives because QPs of this context are in them.
//!
//! Attaching a QP tells the RNIC what to do with datagrams of a group, and nothing to switches and
//! to the host's own stack: without a membership (IGMP, MLD) nobody sends them here. rdma_cm makes
//! one for its own joins (cma.c, cma_igmp_send); a socket of ours is in each group. By it the host
//! also loops its own datagrams back, as IBTA has it.
//!
//! A process in a sandbox makes no sockets, so these are made before, and only their groups change
//! afterwards. They are bound, which happens once, and shut down: nothing is sent by them
//! (`EPIPE`), and they get no port that anybody knows. Linux queues what comes to that port all the
//! same, so their buffers are as small as they can be: nobody reads it.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::net::{Shutdown, shutdown, sockopt};
use vhost_rdma_engine::link::Gid;

use crate::verbs::{HostError, HostQp, Result};

/// Sockets of each family. One is in twenty groups of IPv4 (`net.ipv4.igmp_max_memberships`).
const SOCKETS: usize = 16;

/// A group, and an address and the index of the interface that receives it. A socket is in a group
/// once for an interface, whichever of its addresses is named (`ip_mc_join_group`).
type Place = (Gid, Gid, u32);

/// What this process is a member by.
#[derive(Debug)]
struct Members {
    v4: Vec<UdpSocket>,
    v6: Vec<UdpSocket>,
    /// Which socket of its family is in a group, and for how many.
    joined: BTreeMap<Place, (usize, usize)>,
}

static MEMBERS: LazyLock<Mutex<Members>> = LazyLock::new(|| Mutex::new(Members::new()));

fn members() -> MutexGuard<'static, Members> {
    MEMBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the sockets.
pub(super) fn prepare() {
    drop(members());
}

/// A socket that is there to be in groups.
fn silent(own: IpAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddr::new(own, 0))?;
    // The kernel makes it the least that it allows.
    sockopt::set_socket_recv_buffer_size(&socket, 0)?;
    // Said of a socket that is connected to nobody, and done all the same (inet_shutdown).
    match shutdown(&socket, Shutdown::Both) {
        Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

impl Members {
    /// A host without one of the families has no groups of it.
    fn new() -> Self {
        let made = |own: IpAddr| {
            let one = |_| {
                let failed = |error: &_| {
                    tracing::warn!(%own, %error, "no more sockets for multicast groups");
                };
                silent(own).inspect_err(failed).ok()
            };
            (0..SOCKETS).map_while(one).collect()
        };
        let (v4, v6) = (made(Ipv4Addr::UNSPECIFIED.into()), made(Ipv6Addr::UNSPECIFIED.into()));
        Self { v4, v6, joined: BTreeMap::new() }
    }

    fn change(&self, at: usize, (group, own, interface): &Place, joins: bool) -> io::Result<()> {
        let canonical = |gid: &Gid| IpAddr::from(*gid).to_canonical();
        let none = || io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
        match (canonical(group), canonical(own)) {
            (IpAddr::V4(group), IpAddr::V4(own)) => {
                let socket = self.v4.get(at).ok_or_else(none)?;
                // The address is for where there is no index.
                if joins {
                    sockopt::set_ip_add_membership_with_ifindex(socket, &group, &own, *interface)?;
                } else {
                    sockopt::set_ip_drop_membership_with_ifindex(socket, &group, &own, *interface)?;
                }
                Ok(())
            }
            (IpAddr::V6(group), IpAddr::V6(_)) => {
                let socket = self.v6.get(at).ok_or_else(none)?;
                if joins {
                    socket.join_multicast_v6(&group, *interface)
                } else {
                    socket.leave_multicast_v6(&group, *interface)
                }
            }
            _ => Err(none()),
        }
    }

    fn join(&mut self, place: Place) -> io::Result<()> {
        if let Some((_, many)) = self.joined.get_mut(&place) {
            *many += 1;
            return Ok(());
        }
        let mut at = 0;
        while let Err(error) = self.change(at, &place, true) {
            at += 1;
            // A socket that is in as many groups as it may be; or that is in this one, by another
            // address of an interface whose index nobody knows.
            let next = matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EADDRINUSE));
            if !next || at == SOCKETS {
                return Err(error);
            }
        }
        self.joined.insert(place, (at, 1));
        Ok(())
    }

    fn leave(&mut self, place: &Place) {
        let Some((at, many)) = self.joined.get_mut(place) else { return };
        *many -= 1;
        if *many == 0 {
            let at = *at;
            self.joined.remove(place);
            // The interface may be gone, and the membership with it.
            let _ = self.change(at, place, false);
        }
    }
}

/// No address, of the same family as another.
fn unspecified(own: &Gid) -> Gid {
    match IpAddr::from(*own).to_canonical() {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.to_ipv6_mapped().octets(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.octets(),
    }
}

#[derive(Debug)]
struct Group {
    place: Place,
    qps: Vec<HostQp>,
}

impl Drop for Group {
    fn drop(&mut self) {
        members().leave(&self.place);
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Groups(BTreeMap<Gid, Group>);

impl Groups {
    /// One more QP is in a group, of the interface that has this address and index.
    pub(super) fn join(
        &mut self,
        group: &Gid,
        qp: HostQp,
        (own, interface): (&Gid, u32),
    ) -> Result<()> {
        if let Some(joined) = self.0.get_mut(group) {
            joined.qps.push(qp);
            return Ok(());
        }
        let failed = |error: io::Error| HostError(error.raw_os_error().unwrap_or(libc::EIO));
        let place = (*group, if interface == 0 { *own } else { unspecified(own) }, interface);
        members().join(place).map_err(failed)?;
        self.0.insert(*group, Group { place, qps: vec![qp] });
        Ok(())
    }

    /// One less is.
    pub(super) fn leave(&mut self, group: &Gid, qp: HostQp) {
        if let Some(joined) = self.0.get_mut(group) {
            joined.qps.retain(|&member| member != qp);
            if joined.qps.is_empty() {
                self.0.remove(group);
            }
        }
    }

    /// All who are in one, which is to end.
    pub(super) fn clear(&mut self) -> Vec<(HostQp, Gid)> {
        let groups = std::mem::take(&mut self.0).into_iter();
        let members = |(gid, mut group): (Gid, Group)| {
            std::mem::take(&mut group.qps).into_iter().map(move |qp| (qp, gid))
        };
        groups.flat_map(members).collect()
    }

    /// QPs in all groups together.
    pub(super) fn attachments(&self) -> usize {
        self.0.values().map(|group| group.qps.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(address: Ipv4Addr) -> Gid {
        address.to_ipv6_mapped().octets()
    }

    #[test]
    fn nothing_is_sent_by_a_member_and_it_gets_no_other_port() {
        let member = silent(Ipv4Addr::UNSPECIFIED.into()).unwrap();
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        let error = member.send_to(b"x", other.local_addr().unwrap()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
        let any = rustix::net::SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
        assert_eq!(rustix::net::bind(&member, &any), Err(rustix::io::Errno::INVAL));
    }

    #[test]
    fn little_is_kept_of_what_comes_to_its_port() {
        let member = silent(Ipv4Addr::LOCALHOST.into()).unwrap();
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..100 {
            other.send_to(&[0; 1000], member.local_addr().unwrap()).unwrap();
        }
        member.set_nonblocking(true).unwrap();
        let mut bytes = [0; 1000];
        let kept = (0..100).take_while(|_| member.recv(&mut bytes).is_ok_and(|len| len > 0));
        assert!(kept.count() < 5);
    }

    #[test]
    fn two_addresses_of_one_interface_are_in_a_group() {
        let group = gid(Ipv4Addr::new(239, 9, 9, 8));
        let own = [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2)].map(gid);
        let socket = silent(Ipv4Addr::UNSPECIFIED.into()).unwrap();
        let loopback = rustix::net::netdevice::name_to_index(&socket, "lo").unwrap();
        for interface in [0, loopback] {
            let mut nics = [Groups::default(), Groups::default()];
            let of_it = || {
                let members = members();
                let these = members.joined.iter().filter(|(place, _)| place.0 == group);
                these.map(|(_, &(_, many))| many).collect::<Vec<_>>()
            };
            for (nic, own) in nics.iter_mut().zip(&own) {
                nic.join(&group, HostQp(1), (own, interface)).unwrap();
            }
            assert_eq!(of_it(), if interface == 0 { vec![1, 1] } else { vec![2] });
            nics[0].leave(&group, HostQp(1));
            assert_eq!(of_it(), [1]);
            drop(nics);
            assert!(of_it().is_empty());
        }
    }

    #[test]
    fn a_group_is_left_by_the_last_and_there_are_many() {
        let mut members = Members::new();
        let own = gid(Ipv4Addr::LOCALHOST);
        let place = |n: u8| (gid(Ipv4Addr::new(239, 9, 9, n)), own, 0);
        for n in 0..50 {
            members.join(place(n)).unwrap();
            members.join(place(n)).unwrap();
        }
        assert_eq!(members.joined.len(), 50);
        let is_member = |n| members.change(members.joined[&place(n)].0, &place(n), true).is_err();
        assert!(is_member(0) && is_member(49), "who is in a group cannot join it");
        for n in 0..50 {
            members.leave(&place(n));
            assert!(members.joined.contains_key(&place(n)));
            members.leave(&place(n));
        }
        assert!(members.joined.is_empty());
        assert!(members.change(0, &place(0), false).is_err(), "it was left");
    }
}
