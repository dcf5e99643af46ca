//! Peers: whom NICs on RNICs may reach beyond this host.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::Error;

/// Who named a peer. Each has entries of its own, and takes away none of another's; where two name
/// the same prefix, the first of these counts.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum PeerSource {
    /// Somebody, one at a time.
    #[default]
    Hand,
    /// The configuration file.
    File,
    /// Who gives the whole set of a network: the cluster's controller, by the node's agent.
    Controller,
}

impl PeerSource {
    /// As users see it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hand => "hand",
            Self::File => "file",
            Self::Controller => "controller",
        }
    }
}

/// Addresses that NICs of a network on an RNIC may connect to. NICs on the daemon's own engine
/// never leave the host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Peer {
    /// The network's name.
    pub network: String,
    /// The address as guests name it, or the first of a prefix.
    pub address: IpAddr,
    /// Bits of the address that count.
    pub prefix_len: u8,
    /// The host that has it, where that is another address.
    pub through: Option<IpAddr>,
    /// The daemon that serves it, as `HOST:PORT`, if one of ours does.
    #[serde(default)]
    pub daemon: Option<String>,
    /// Who named it.
    #[serde(default)]
    pub source: PeerSource,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if self.prefix_len < bits(self.address) {
            write!(f, "/{}", self.prefix_len)?;
        }
        Ok(())
    }
}

const fn bits(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

/// The parts of `HOST:PORT`; an IPv6 address stands in brackets.
#[must_use]
pub fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|&port| port != 0)?;
    if let Some(inner) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        return inner.parse::<std::net::Ipv6Addr>().is_ok().then_some((inner, port));
    }
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    let label = |label: &str| (1..=63).contains(&label.len());
    let is_name = host.len() <= 253 && host.chars().all(known) && host.split('.').all(label);
    is_name.then_some((host, port))
}

impl Peer {
    /// The peer that `text` (an address, or a prefix such as 10.0.0.0/24) names in a network.
    ///
    /// # Errors
    /// [`Error::BadPeer`].
    pub fn parse(network: &str, text: &str, through: Option<&str>) -> Result<Self, Error> {
        let bad = |why| Error::BadPeer { text: text.to_owned(), why };
        let (address, len) = match text.split_once('/') {
            Some((address, len)) => (address, Some(len)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| bad("it is not an IP address"))?;
        let most = bits(address);
        let prefix_len = match len {
            None => most,
            Some(len) => len
                .parse()
                .ok()
                .filter(|len| *len <= most)
                .ok_or_else(|| bad("its prefix length is not one"))?,
        };
        let trailing = match address {
            IpAddr::V4(v4) => u32::from(v4).trailing_zeros(),
            IpAddr::V6(v6) => u128::from(v6).trailing_zeros(),
        };
        if trailing < u32::from(most - prefix_len) {
            return Err(bad("it has bits set behind its prefix"));
        }
        let through = through
            .map(|host| {
                host.parse().map_err(|_| Error::BadPeer {
                    text: host.to_owned(),
                    why: "it is not an IP address",
                })
            })
            .transpose()?;
        let network = network.to_owned();
        Ok(Self { network, address, prefix_len, through, daemon: None, source: PeerSource::Hand })
    }

    /// The same, named by another.
    #[must_use]
    pub fn named_by(self, source: PeerSource) -> Self {
        Self { source, ..self }
    }

    /// The same, served by the daemon at `HOST:PORT`.
    ///
    /// # Errors
    /// [`Error::BadDaemon`].
    pub fn served_by(self, daemon: &str) -> Result<Self, Error> {
        host_and_port(daemon).ok_or_else(|| Error::BadDaemon { text: daemon.to_owned() })?;
        Ok(Self { daemon: Some(daemon.to_owned()), ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_prefixes() {
        for text in ["10.0.0.5", "10.0.0.0/24", "0.0.0.0/0", "fd00::/64", "fd00::7"] {
            assert_eq!(Peer::parse("net", text, None).expect(text).to_string(), text);
        }
        for text in ["", "10.0.0.5/24", "10.0.0.0/33", "10.0.0.0/", "fd00::1/64", "host"] {
            assert!(Peer::parse("net", text, None).is_err(), "{text}");
        }
        assert!(Peer::parse("net", "10.0.0.5", Some("192.0.2.1")).is_ok());
        assert!(Peer::parse("net", "10.0.0.5", Some("192.0.2.0/24")).is_err());
    }

    #[test]
    fn daemons_are_a_host_and_a_port() {
        assert_eq!(host_and_port("b.example:7"), Some(("b.example", 7)));
        assert_eq!(host_and_port("192.0.2.1:4790"), Some(("192.0.2.1", 4790)));
        assert_eq!(host_and_port("[fd00::1]:4790"), Some(("fd00::1", 4790)));
        let peer = || Peer::parse("net", "10.0.0.5", None).expect("good");
        assert!(peer().served_by("b:7").is_ok());
        for text in ["", "b", "b:", "b:0", "b:65536", ":7", "fd00::1:7", "[b]:7", "a b:7", "a..b:7"]
        {
            assert!(peer().served_by(text).is_err(), "{text}");
        }
    }
}
