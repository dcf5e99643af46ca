//! IP addresses of interfaces.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable as _};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeader, AddressMessage, AddressScope,
};
use serde::Serialize;

use super::client::{Links, emit};
use crate::transport::socket::Request;
use crate::{Error, IpPrefix, Result};

const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;

/// An address that an interface has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Address {
    /// Its interface.
    pub index: u32,
    /// The address and its network.
    pub prefix: IpPrefix,
    /// Of this link only (fe80::/10, or so declared).
    pub link_local: bool,
    /// Duplicate detection has not ended.
    pub tentative: bool,
    /// Somebody else has it.
    pub failed: bool,
}

/// An address to add.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewAddress {
    /// The address and its network.
    pub prefix: IpPrefix,
    /// IPv6: usable at once, without looking for duplicates. For addresses that an allocator gave.
    pub no_dad: bool,
}

impl NewAddress {
    /// With the usual settings.
    #[must_use]
    pub const fn new(prefix: IpPrefix) -> Self {
        Self { prefix, no_dad: false }
    }
}

impl Links {
    /// Adds an address, and with it the route to its network.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the interface has it.
    pub fn add_address(&mut self, index: u32, new: &NewAddress) -> Result<()> {
        let mut message = message(index, new.prefix);
        if new.no_dad && new.prefix.address.is_ipv6() {
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        if let (IpAddr::V4(address), 1..=30) = (new.prefix.address, new.prefix.length) {
            let host = u32::MAX >> new.prefix.length;
            message
                .attributes
                .push(AddressAttribute::Broadcast((u32::from(address) | host).into()));
        }
        let what = format!("give {} to network interface {index}", new.prefix);
        self.send(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, &message, &what)
    }

    /// Takes an address away.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if the interface does not have it.
    pub fn delete_address(&mut self, index: u32, prefix: IpPrefix) -> Result<()> {
        self.send(
            RTM_DELADDR,
            0,
            &message(index, prefix),
            &format!("take {prefix} from network interface {index}"),
        )
    }

    /// The addresses of an interface, or of all.
    ///
    /// # Errors
    /// The kernel refuses, or its answer makes no sense.
    pub fn addresses(&mut self, index: Option<u32>) -> Result<Vec<Address>> {
        let what = "list the IP addresses";
        let payload = emit(&AddressMessage::default());
        let request = Request { message_type: RTM_GETADDR, flags: 0, payload: &payload, what };
        self.channel().dump(request, |payload| {
            let message = AddressMessage::parse(payload)
                .map_err(|error| Error::decode(what, error.to_string()))?;
            Ok(decode(&message).filter(|address| index.is_none_or(|index| index == address.index)))
        })
    }
}

fn message(index: u32, prefix: IpPrefix) -> AddressMessage {
    let family = if prefix.address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let mut message = AddressMessage::default();
    message.header =
        AddressHeader { family, prefix_len: prefix.length, index, ..AddressHeader::default() };
    // On a broadcast link both are the same; the kernel takes IPv4 addresses from the one and IPv6
    // from the other.
    message.attributes =
        vec![AddressAttribute::Local(prefix.address), AddressAttribute::Address(prefix.address)];
    message
}

fn decode(message: &AddressMessage) -> Option<Address> {
    let (mut local, mut address, mut flags) = (None, None, AddressFlags::empty());
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::Flags(bits) => flags = *bits,
            _ => {}
        }
    }
    // On a point-to-point link `Address` is the peer's.
    let prefix = IpPrefix::new(local.or(address)?, message.header.prefix_len)?;
    Some(Address {
        index: message.header.index,
        prefix,
        link_local: message.header.scope == AddressScope::Link,
        tentative: flags.contains(AddressFlags::Tentative),
        failed: flags.contains(AddressFlags::Dadfailed),
    })
}
