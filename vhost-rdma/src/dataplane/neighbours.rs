//! Looks for neighbours on the host's network, in the place of processes that may not.
//!
//! RoCE puts a MAC address before each packet. libibverbs finds it in the kernel's table of
//! neighbours, which a process in a sandbox may read. If it is not there, libibverbs sends a
//! datagram, for which the kernel asks the network (rdma-core libibverbs/neigh.c). A process that
//! sends datagrams reaches whatever listens to them, so that is done here: the process chooses the
//! address, and nothing else of what is sent.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::link::Gid;

/// Who listens there throws away what comes (RFC 863).
const PORT: u16 = 9;
/// Searches of a network in a window, and how long that is. An attempt at a handle takes seven at
/// most.
const SEARCHES: u32 = 64;
const WINDOW: Duration = Duration::from_millis(100);

/// See the module. Its sockets are made with the first search.
#[derive(Debug, Default)]
pub struct Neighbours {
    v4: OnceLock<Option<UdpSocket>>,
    v6: OnceLock<Option<UdpSocket>>,
}

/// The address that is looked for; none for one that no neighbour has, or that needs no search.
fn neighbour(gid: Gid) -> Option<IpAddr> {
    let address = Ipv6Addr::from(gid).to_canonical();
    let is_one = match address {
        IpAddr::V4(v4) => !v4.is_multicast() && !v4.is_broadcast(),
        // A link-local address has its MAC address within.
        IpAddr::V6(v6) => !v6.is_multicast() && !v6.is_unicast_link_local(),
    };
    (is_one && !address.is_unspecified() && !address.is_loopback()).then_some(address)
}

fn open(any: IpAddr) -> Option<UdpSocket> {
    let made = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.set_nonblocking(true)?;
        Ok(socket)
    });
    made.inspect_err(|error| tracing::warn!(%error, "neighbours cannot be looked for")).ok()
}

impl Neighbours {
    /// Has the kernel look for the neighbour with this address. Does not wait for it.
    pub fn look_for(&self, gid: Gid) {
        let Some(address) = neighbour(gid) else { return };
        let socket = match address {
            IpAddr::V4(_) => self.v4.get_or_init(|| open(Ipv4Addr::UNSPECIFIED.into())),
            IpAddr::V6(_) => self.v6.get_or_init(|| open(Ipv6Addr::UNSPECIFIED.into())),
        };
        let Some(socket) = socket else { return };
        let sent = socket.send_to(&[0], (address, PORT));
        // That nobody listens is said to whoever sends next.
        if let Err(error) = sent
            && error.kind() != io::ErrorKind::ConnectionRefused
        {
            tracing::debug!(%address, %error, "a neighbour is not looked for");
        }
    }
}

/// How often a network may have neighbours looked for.
#[derive(Debug)]
pub struct Searches {
    since: Instant,
    count: u32,
}

impl Default for Searches {
    fn default() -> Self {
        Self { since: Instant::now(), count: 0 }
    }
}

impl Searches {
    /// Whether there may be one more now, which is counted.
    pub fn may(&mut self) -> bool {
        if self.since.elapsed() >= WINDOW {
            *self = Self::default();
        }
        self.count += 1;
        self.count <= SEARCHES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(address: [u8; 4]) -> Gid {
        Ipv4Addr::from(address).to_ipv6_mapped().octets()
    }

    #[test]
    fn only_what_a_neighbour_can_have_is_looked_for() {
        assert_eq!(neighbour(mapped([192, 0, 2, 1])), Some([192, 0, 2, 1].into()));
        let global: Ipv6Addr = "2001:db8::1".parse().unwrap();
        assert_eq!(neighbour(global.octets()), Some(global.into()));
        for none in [[127, 0, 0, 1], [0; 4], [255; 4], [224, 0, 0, 1]] {
            assert_eq!(neighbour(mapped(none)), None, "{none:?}");
        }
        for none in ["::", "::1", "fe80::1", "ff02::1"] {
            assert_eq!(neighbour(none.parse::<Ipv6Addr>().unwrap().octets()), None, "{none}");
        }
    }

    #[test]
    fn a_network_has_its_share_of_searches() {
        let mut searches = Searches::default();
        let begin = Instant::now();
        let granted = (0..100_000).filter(|_| searches.may()).count();
        let windows = begin.elapsed().as_millis() / WINDOW.as_millis() + 1;
        let most = u128::from(SEARCHES) * windows;
        assert!(granted >= SEARCHES as usize && granted as u128 <= most, "{granted} of {most}");
    }
}
