//! Routes of the main table.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable as _};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use serde::Serialize;

use super::client::{Links, emit};
use crate::transport::socket::Request;
use crate::{Error, IpPrefix, Result};

const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;

/// A unicast route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Route {
    /// Where to.
    pub destination: IpPrefix,
    /// Next hop; none if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Interface that it leaves by.
    pub index: Option<u32>,
    /// The lower, the better.
    pub metric: Option<u32>,
    /// Routing table.
    pub table: u32,
}

/// A route to add or delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewRoute {
    /// Where to; `0.0.0.0/0` or `::/0` is the default route.
    pub destination: IpPrefix,
    /// Next hop.
    pub gateway: Option<IpAddr>,
    /// Interface that it leaves by.
    pub index: u32,
    /// The lower, the better.
    pub metric: Option<u32>,
    /// Routing table; `None` for the main one.
    pub table: Option<u32>,
}

impl NewRoute {
    /// By way of a gateway.
    #[must_use]
    pub const fn via(destination: IpPrefix, gateway: IpAddr, index: u32) -> Self {
        Self { destination, gateway: Some(gateway), index, metric: None, table: None }
    }

    /// To a network that is on the link.
    #[must_use]
    pub const fn on_link(destination: IpPrefix, index: u32) -> Self {
        Self { destination, gateway: None, index, metric: None, table: None }
    }
}

impl Links {
    /// Adds a route.
    ///
    /// # Errors
    /// [`Error::is_exists`] if there is such a route; the interface must be up and the gateway
    /// reachable.
    pub fn add_route(&mut self, new: &NewRoute) -> Result<()> {
        let what = format!("add a route to {}", new.destination);
        let message = message(new)?;
        self.send(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &message, &what)
    }

    /// Removes a route.
    ///
    /// # Errors
    /// [`Error::is_not_found`] if there is none.
    pub fn delete_route(&mut self, route: &NewRoute) -> Result<()> {
        let what = format!("delete the route to {}", route.destination);
        self.send(RTM_DELROUTE, 0, &message(route)?, &what)
    }

    /// All unicast routes of all tables, both families.
    ///
    /// # Errors
    /// The kernel refuses, or its answer makes no sense.
    pub fn routes(&mut self) -> Result<Vec<Route>> {
        let what = "list the routes";
        let payload = emit(&RouteMessage::default());
        let request = Request { message_type: RTM_GETROUTE, flags: 0, payload: &payload, what };
        self.channel().dump(request, |payload| {
            let message = RouteMessage::parse(payload)
                .map_err(|error| Error::decode(what, error.to_string()))?;
            Ok(decode(&message))
        })
    }
}

fn message(new: &NewRoute) -> Result<RouteMessage> {
    let v4 = new.destination.address.is_ipv4();
    if new.gateway.is_some_and(|gateway| gateway.is_ipv4() != v4) {
        return Err(Error::Invalid(format!(
            "the gateway of a route to {} is of the other IP version",
            new.destination
        )));
    }
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 },
        destination_prefix_length: new.destination.length,
        table: RouteHeader::RT_TABLE_MAIN,
        protocol: RouteProtocol::Boot,
        scope: if new.gateway.is_some() || !v4 { RouteScope::Universe } else { RouteScope::Link },
        kind: RouteType::Unicast,
        ..RouteHeader::default()
    };
    if let Some(table) = new.table {
        message.header.table = u8::try_from(table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
        message.attributes.push(RouteAttribute::Table(table));
    }
    if new.destination.length > 0 {
        message.attributes.push(RouteAttribute::Destination(address(new.destination.address)));
    }
    message.attributes.extend(new.gateway.map(|gateway| RouteAttribute::Gateway(address(gateway))));
    message.attributes.push(RouteAttribute::Oif(new.index));
    message.attributes.extend(new.metric.map(RouteAttribute::Priority));
    Ok(message)
}

const fn address(ip: IpAddr) -> RouteAddress {
    match ip {
        IpAddr::V4(ip) => RouteAddress::Inet(ip),
        IpAddr::V6(ip) => RouteAddress::Inet6(ip),
    }
}

const fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

fn decode(message: &RouteMessage) -> Option<Route> {
    if message.header.kind != RouteType::Unicast {
        return None;
    }
    let any = match message.header.address_family {
        AddressFamily::Inet => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let (mut destination, mut gateway, mut index, mut metric) = (any, None, None, None);
    let mut table = u32::from(message.header.table);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = ip(address)?,
            RouteAttribute::Gateway(address) => gateway = ip(address),
            RouteAttribute::Oif(oif) => index = Some(*oif),
            RouteAttribute::Priority(priority) => metric = Some(*priority),
            RouteAttribute::Table(number) => table = *number,
            _ => {}
        }
    }
    let destination = IpPrefix::new(destination, message.header.destination_prefix_length)?;
    Some(Route { destination, gateway, index, metric, table })
}
