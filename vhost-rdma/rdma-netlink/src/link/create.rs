//! Interfaces that are made of software.

use std::os::fd::{AsFd as _, AsRawFd as _};

use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage,
};

use super::client::{Links, check_name};
use crate::{HardwareAddress, Netns, Result};

/// A pair of interfaces; what enters one leaves the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct Veth<'a> {
    /// The end in this namespace.
    pub name: &'a str,
    /// The other end.
    pub peer: &'a str,
    /// Where the other end is made; `None` for this namespace.
    pub peer_netns: Option<&'a Netns>,
    /// Address of the other end; random if not given.
    pub peer_address: Option<&'a HardwareAddress>,
    /// MTU of both ends.
    pub mtu: Option<u32>,
}

impl Links {
    /// Makes a pair of interfaces, both down.
    ///
    /// # Errors
    /// [`Error::is_exists`](crate::Error::is_exists) if one of the names is taken; neither end
    /// exists then.
    pub fn add_veth(&mut self, veth: &Veth<'_>) -> Result<()> {
        check_name(veth.name)?;
        check_name(veth.peer)?;
        let mut peer = LinkMessage::default();
        peer.attributes.push(LinkAttribute::IfName(veth.peer.to_owned()));
        if let Some(netns) = veth.peer_netns {
            peer.attributes.push(LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()));
        }
        if let Some(address) = veth.peer_address {
            peer.attributes.push(LinkAttribute::Address(address.as_bytes().to_vec()));
        }
        peer.attributes.extend(veth.mtu.map(LinkAttribute::Mtu));
        let info = vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ];
        let mut attributes = vec![LinkAttribute::IfName(veth.name.to_owned())];
        attributes.extend(veth.mtu.map(LinkAttribute::Mtu));
        attributes.push(LinkAttribute::LinkInfo(info));
        self.create(attributes, &format!("make the interfaces {} and {}", veth.name, veth.peer))
    }

    /// Makes a bridge without ports, down.
    ///
    /// # Errors
    /// [`Error::is_exists`](crate::Error::is_exists) if the name is taken.
    pub fn add_bridge(&mut self, name: &str) -> Result<()> {
        self.add(name, InfoKind::Bridge)
    }

    /// Makes an interface that drops what is sent, for tests and as a place for addresses.
    ///
    /// # Errors
    /// [`Error::is_exists`](crate::Error::is_exists) if the name is taken.
    pub fn add_dummy(&mut self, name: &str) -> Result<()> {
        self.add(name, InfoKind::Dummy)
    }

    fn add(&mut self, name: &str, kind: InfoKind) -> Result<()> {
        check_name(name)?;
        let what = format!("make the {kind} interface {name}");
        let info = LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]);
        self.create(vec![LinkAttribute::IfName(name.to_owned()), info], &what)
    }
}
