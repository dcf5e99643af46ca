//! Ports and addresses: what an identifier is bound to, who listens, and whose a queue pair is.
//!
//! Which ports are taken is each NIC's own affair. All are free to everybody, those below 1024 too:
//! no process has a privilege here that another of its NIC lacks.

use std::net::{IpAddr, SocketAddr};

use super::id::{Space, State};
use super::layout::socket_address;
use super::machine::Machine;
use crate::link::Gid;
use crate::nic::Status;

/// Ports that are given to who names none (those of Linux's sockets).
const EPHEMERAL: std::ops::Range<u16> = 32768..60999;

/// A pseudorandom number out of a counter (splitmix64): for what must differ, not for what must be
/// secret.
pub(super) const fn mix(value: u64) -> u64 {
    let a = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    b ^ (b >> 31)
}

pub(super) fn gid_of(ip: IpAddr) -> Gid {
    crate::device::nic::gid(ip)
}

impl Machine {
    pub(super) fn unbind(&mut self, number: u32) {
        let Some(id) = self.ids.get(&number) else { return };
        let Some(port) = id.own.map(|own| (id.space, own.port())) else { return };
        if let Some(users) = self.ports.get_mut(&port) {
            users.retain(|user| *user != number);
            if users.is_empty() {
                self.ports.remove(&port);
            }
        }
    }

    /// Whether two addresses of a port are in each other's way. An IPv4 address in IPv6's form is
    /// the same address (ipv6(7)).
    pub(super) fn overlap(a: (IpAddr, bool), b: (IpAddr, bool)) -> bool {
        let [a, b] = [a, b].map(|(ip, v6only)| (ip.to_canonical(), v6only));
        let covers = |(any, v6only): (IpAddr, bool), other: IpAddr| {
            any.is_unspecified() && (any.is_ipv4() == other.is_ipv4() || any.is_ipv6() && !v6only)
        };
        a.0 == b.0 || covers(a, b.0) || covers(b, a.0)
    }

    /// Whether others stand in the way of an address; `shared`: reuse is enough for both.
    pub(super) fn is_taken(&self, number: u32, at: SocketAddr, listens: bool) -> bool {
        let Some(id) = self.ids.get(&number) else { return true };
        let users = self.ports.get(&(id.space, at.port())).map_or(&[][..], Vec::as_slice);
        users.iter().filter(|user| **user != number).any(|user| {
            let Some((other, own)) = self.ids.get(user).and_then(|it| Some((it, it.own?))) else {
                return false;
            };
            let shared = id.reuse && other.reuse && !(listens && other.state == State::Listening);
            !shared && Self::overlap((at.ip(), id.v6only), (own.ip(), other.v6only))
        })
    }

    /// Binds an identifier; port 0 is any that is free.
    pub(super) fn bind(&mut self, number: u32, at: SocketAddr) -> Result<(), Status> {
        let mut at = at;
        let ip = at.ip();
        if ip.is_loopback() {
            // There is no other way to oneself than the NIC.
            at.set_ip(socket_address(self.gids.first().ok_or(Status::UNREACH)?, 0).ip());
        } else if !ip.is_unspecified() && !self.gids.contains(&gid_of(ip)) {
            return Err(Status::UNREACH);
        }
        if at.port() == 0 {
            let span = u64::from(EPHEMERAL.end - EPHEMERAL.start);
            let begin = mix(u64::from(self.last) << 20 | u64::from(number)) % span;
            let nth = |n: u64| u16::try_from((begin + n) % span).unwrap_or(0);
            let mut ports = (0..span).map(|n| EPHEMERAL.start + nth(n));
            let free = ports.find(|port| {
                at.set_port(*port);
                !self.is_taken(number, at, false)
            });
            at.set_port(free.ok_or(Status::EXIST)?);
        } else if self.is_taken(number, at, false) {
            return Err(Status::EXIST);
        }
        let Some(id) = self.ids.get_mut(&number) else { return Err(Status::NOENT) };
        id.own = Some(at);
        if !at.ip().is_unspecified() {
            id.local = gid_of(at.ip());
        }
        self.ports.entry((id.space, at.port())).or_default().push(number);
        Ok(())
    }

    /// The own address from which another is reached: of its kind, if there is one.
    pub(super) fn source_for(&self, dest: &Gid) -> Option<Gid> {
        let kind = |gid: &Gid| {
            let ip = IpAddr::from(*gid).to_canonical();
            (ip.is_ipv4(), gid[..2] == [0xfe, 0x80])
        };
        let wanted = kind(dest);
        let same = self.gids.iter().find(|gid| kind(gid) == wanted);
        same.or_else(|| self.gids.first()).copied()
    }

    /// Whom an address is; the NIC itself behind those that are everyone's own.
    pub(super) fn peer_at(&self, ip: IpAddr) -> Option<Gid> {
        if ip.is_loopback() || ip.is_unspecified() {
            return self.gids.first().copied();
        }
        Some(gid_of(ip))
    }

    /// One NIC's queue pairs are known by number alone, so that no session may name another's.
    pub(super) fn claim(&mut self, session: u64, number: u32, qpn: u32) -> Result<(), Status> {
        self.unclaim(number);
        let claim = self.claims.entry(qpn).or_insert((session, 0));
        if claim.0 != session {
            return Err(Status::PERM);
        }
        claim.1 += 1;
        if let Some(id) = self.ids.get_mut(&number) {
            id.claimed = true;
            id.mine.qpn = qpn;
        }
        Ok(())
    }

    pub(super) fn unclaim(&mut self, number: u32) {
        let Some(id) = self.ids.get_mut(&number) else { return };
        if !std::mem::take(&mut id.claimed) {
            return;
        }
        let qpn = id.mine.qpn;
        if let Some(claim) = self.claims.get_mut(&qpn) {
            claim.1 = claim.1.saturating_sub(1);
            if claim.1 == 0 {
                self.claims.remove(&qpn);
            }
        }
    }

    /// Who listens at an address.
    pub(super) fn listener(&self, space: Space, at: &Gid, port: u16) -> Option<u32> {
        let ip = IpAddr::from(*at).to_canonical();
        let users = self.ports.get(&(space, port))?;
        let listens = |user: &&u32| {
            let id = self.ids.get(user).filter(|id| id.state == State::Listening);
            id.and_then(|id| Some((id.own?.ip(), id.v6only)))
                .is_some_and(|own| Self::overlap(own, (ip, true)))
        };
        let mut found = users.iter().filter(listens);
        // The more particular one goes before.
        let exact = found.clone().find(|user| {
            self.ids
                .get(user)
                .and_then(|id| id.own)
                .is_some_and(|own| own.ip().to_canonical() == ip)
        });
        exact.or_else(|| found.next()).copied()
    }
}
