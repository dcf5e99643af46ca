//! An interface as the kernel describes it. No I/O.
//!
//! Attributes are decoded one by one by `netlink-packet-route`, and only those that are wanted: one
//! that a newer kernel has changed must not hide the interface.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use netlink_packet_core::{NLA_TYPE_MASK, Nla as _, ParseableParametrized as _};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{
    InfoData, InfoTun, LinkAttribute, LinkFlags, LinkHeader, LinkInfo, LinkLayerType, State,
};
use serde::{Serialize, Serializer};

use super::vf::VfSettings;
use crate::HardwareAddress;
use crate::transport::attr;

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Link {
    /// Identifies it in its namespace.
    pub index: u32,
    /// Its name at this moment.
    pub name: String,
    /// Its other names, of any bytes: no other interface of its namespace can have one of them, and
    /// they go along to another namespace.
    #[serde(serialize_with = "lossy")]
    pub altnames: Vec<OsString>,
    /// What frames look like.
    pub kind: LinkKind,
    /// The software behind it (`veth`, `bridge`, `tun`, `vlan`, …); none for hardware.
    pub driver_kind: Option<String>,
    /// Link-layer address.
    pub address: Option<HardwareAddress>,
    /// The address that the hardware came with.
    pub permanent_address: Option<HardwareAddress>,
    /// Largest packet.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// There is a signal.
    pub carrier: bool,
    /// Operational state in the words of `ip link`: `up`, `down`, `lowerlayerdown`, …
    pub state: String,
    /// The bridge or bond that it belongs to.
    pub master: Option<u32>,
    /// The interface below it, or its peer.
    pub lower: Option<u32>,
    /// Taps: the user who may open it.
    pub owner: Option<u32>,
    /// Taps: the group whose members may.
    pub group: Option<u32>,
    /// A description that somebody set.
    pub alias: Option<String>,
    /// Device that it is part of, such as a PCI address, with the name of its bus.
    pub parent: Option<String>,
    /// Bus of `parent`.
    pub parent_bus: Option<String>,
    /// Number of virtual functions of this physical one.
    pub vf_count: u32,
    /// What is set for each of them.
    pub vfs: Vec<VfSettings>,
}

/// What frames look like (`ARPHRD_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LinkKind {
    /// Ethernet.
    Ethernet,
    /// IP over InfiniBand.
    InfiniBand,
    /// The loopback interface.
    Loopback,
    /// Anything else.
    Other,
}

impl From<LinkLayerType> for LinkKind {
    fn from(kind: LinkLayerType) -> Self {
        match kind {
            LinkLayerType::Ether => Self::Ethernet,
            LinkLayerType::Infiniband => Self::InfiniBand,
            LinkLayerType::Loopback => Self::Loopback,
            _ => Self::Other,
        }
    }
}

/// `IFLA_VFINFO_LIST`, which is decoded here: its parser in the library fails on an empty list.
const IFLA_VFINFO_LIST: u16 = 22;
/// `IFLA_PROP_LIST`, decoded here: the library takes names of UTF-8 only.
pub(super) const IFLA_PROP_LIST: u16 = 52;
/// `IFLA_ALT_IFNAME`.
pub(super) const IFLA_ALT_IFNAME: u16 = 53;
/// What is not decoded: statistics and per-protocol settings, which are large and change between
/// kernels.
const SKIPPED: [u16; 5] = [7, 12, 23, 24, 26];

impl Link {
    /// Decodes the payload of `RTM_NEWLINK`.
    pub(super) fn decode(payload: &[u8]) -> Result<Self, String> {
        let header = LinkHeader::parse(payload).map_err(|error| error.to_string())?;
        let mut link = Self {
            index: header.index,
            name: String::new(),
            altnames: Vec::new(),
            kind: header.link_layer_type.into(),
            driver_kind: None,
            address: None,
            permanent_address: None,
            mtu: 0,
            up: header.flags.contains(LinkFlags::Up),
            carrier: header.flags.contains(LinkFlags::LowerUp),
            state: "unknown".to_owned(),
            master: None,
            lower: None,
            owner: None,
            group: None,
            alias: None,
            parent: None,
            parent_bus: None,
            vf_count: 0,
            vfs: Vec::new(),
        };
        for nla in attr::raw(payload.get(HEADER..).unwrap_or_default()) {
            match nla.kind() & NLA_TYPE_MASK {
                IFLA_VFINFO_LIST => link.vfs = VfSettings::list(attr::value(&nla)),
                IFLA_PROP_LIST => link.altnames = altnames(attr::value(&nla)),
                kind if SKIPPED.contains(&kind) => {}
                _ => {
                    if let Ok(attribute) =
                        LinkAttribute::parse_with_param(&nla, AddressFamily::Unspec)
                    {
                        link.take(attribute);
                    }
                }
            }
        }
        if link.name.is_empty() {
            return Err("an interface without a name".to_owned());
        }
        Ok(link)
    }

    fn take(&mut self, attribute: LinkAttribute) {
        match attribute {
            LinkAttribute::IfName(name) => self.name = name,
            LinkAttribute::Address(bytes) => self.address = HardwareAddress::new(&bytes),
            LinkAttribute::PermAddress(bytes) => {
                self.permanent_address = HardwareAddress::new(&bytes);
            }
            LinkAttribute::Mtu(mtu) => self.mtu = mtu,
            LinkAttribute::OperState(state) => self.state = state_name(state).to_owned(),
            LinkAttribute::Controller(index) => self.master = Some(index),
            LinkAttribute::Link(index) => self.lower = Some(index),
            LinkAttribute::IfAlias(text) => self.alias = Some(text),
            LinkAttribute::ParentDevName(name) => self.parent = Some(name),
            LinkAttribute::ParentDevBusName(name) => self.parent_bus = Some(name),
            LinkAttribute::NumVf(count) => self.vf_count = count,
            LinkAttribute::LinkInfo(list) => list.into_iter().for_each(|info| self.take_info(info)),
            _ => {}
        }
    }

    fn take_info(&mut self, info: LinkInfo) {
        match info {
            LinkInfo::Kind(kind) => self.driver_kind = Some(kind.to_string()),
            LinkInfo::Data(InfoData::Tun(list)) => {
                for info in list {
                    let InfoTun::Other(nla) = info else { continue };
                    let mut value = [0; 4];
                    if nla.value_len() != value.len() {
                        continue;
                    }
                    nla.emit_value(&mut value);
                    match nla.kind() {
                        IFLA_TUN_OWNER => self.owner = Some(u32::from_ne_bytes(value)),
                        IFLA_TUN_GROUP => self.group = Some(u32::from_ne_bytes(value)),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
}

fn altnames(list: &[u8]) -> Vec<OsString> {
    let names = attr::each(list).filter(|(kind, _)| *kind == IFLA_ALT_IFNAME);
    names.map(|(_, name)| OsString::from_vec(attr::bytes(name).to_vec())).collect()
}

fn lossy<S: Serializer>(names: &[OsString], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(names.iter().map(|name| name.to_string_lossy()))
}

/// `linux/if_link.h`.
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;

/// `struct ifinfomsg`.
const HEADER: usize = 16;

const fn state_name(state: State) -> &'static str {
    match state {
        State::Up => "up",
        State::Down => "down",
        State::LowerLayerDown => "lowerlayerdown",
        State::Dormant => "dormant",
        State::Testing => "testing",
        State::NotPresent => "notpresent",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};

    use super::Link;

    proptest! {
        #[test]
        fn any_bytes_are_a_link_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Link::decode(&bytes);
        }

        /// Random bytes seldom form an attribute: here they always do.
        #[test]
        fn any_attributes_are_a_link(
            list in prop::collection::vec(
                (0..70_u16, prop::collection::vec(any::<u8>(), 0..64)), 0..10
            )
        ) {
            let mut bytes = vec![0; 16];
            crate::transport::attr::put(&mut bytes, 3, b"eth0\0");
            for (kind, value) in &list {
                crate::transport::attr::put(&mut bytes, *kind, value);
            }
            let _ = Link::decode(&bytes);
        }
    }
}
