//! What a physical function's driver holds for each of its virtual functions.

use std::fmt;
use std::str::FromStr;

use netlink_packet_core::Parseable as _;
use netlink_packet_route::link::{
    LinkVfInfo, VfInfo, VfInfoGuid, VfInfoLinkState, VfInfoMac, VfInfoRate, VfInfoSpoofCheck,
    VfInfoTrust, VfInfoVlan,
};
use serde::{Deserialize, Serialize};

use crate::transport::attr;
use crate::{Error, Guid, HardwareAddress};

/// The settings of one virtual function; `None` where the driver does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfSettings {
    /// Its number, from 0.
    pub index: u32,
    /// The address that the physical function gave it; zero if it chooses its own.
    pub mac: Option<HardwareAddress>,
    /// VLAN that the NIC adds and strips; 0 for none.
    pub vlan: Option<u32>,
    /// Priority in that VLAN.
    pub vlan_qos: Option<u32>,
    /// Guaranteed rate in Mbit/s; 0 for none.
    pub min_tx_rate: Option<u32>,
    /// Greatest rate in Mbit/s; 0 for no bound.
    pub max_tx_rate: Option<u32>,
    /// Frames with another source address are dropped.
    pub spoof_check: Option<bool>,
    /// It may enter promiscuous mode and change its address.
    pub trust: Option<bool>,
    /// What it is told about the link.
    pub link_state: Option<VfLinkState>,
    /// InfiniBand node GUID.
    pub node_guid: Option<Guid>,
    /// InfiniBand port GUID.
    pub port_guid: Option<Guid>,
}

/// What a virtual function is told about the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VfLinkState {
    /// The state of the physical link.
    Auto,
    /// Always up: virtual functions of one NIC reach each other without a cable.
    Enable,
    /// Always down.
    Disable,
}

impl fmt::Display for VfLinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Enable => "enable",
            Self::Disable => "disable",
        })
    }
}

impl FromStr for VfLinkState {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "enable" => Ok(Self::Enable),
            "disable" => Ok(Self::Disable),
            _ => Err(Error::Invalid(format!("{text:?} is no link state: auto, enable or disable"))),
        }
    }
}

/// What to change; `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfChange {
    /// Link-layer address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<HardwareAddress>,
    /// VLAN, 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u32>,
    /// Priority in that VLAN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan_qos: Option<u32>,
    /// Guaranteed rate in Mbit/s, 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_tx_rate: Option<u32>,
    /// Greatest rate in Mbit/s, 0 for no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// Check source addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoof_check: Option<bool>,
    /// Trust it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// What it is told about the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_state: Option<VfLinkState>,
    /// InfiniBand node GUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_guid: Option<Guid>,
    /// InfiniBand port GUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_guid: Option<Guid>,
}

impl VfChange {
    /// True if nothing would change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The change that puts back what `self` would overwrite, as far as `before` knows it.
    #[must_use]
    pub fn inverse(&self, before: &VfSettings) -> Self {
        fn keep<T: Clone, U>(changed: Option<&U>, old: Option<&T>) -> Option<T> {
            changed.and(old).cloned()
        }
        Self {
            mac: keep(self.mac.as_ref(), before.mac.as_ref()),
            vlan: keep(self.vlan.or(self.vlan_qos).as_ref(), before.vlan.as_ref()),
            vlan_qos: keep(self.vlan.or(self.vlan_qos).as_ref(), before.vlan_qos.as_ref()),
            min_tx_rate: keep(self.min_tx_rate.as_ref(), before.min_tx_rate.as_ref()),
            max_tx_rate: keep(self.max_tx_rate.as_ref(), before.max_tx_rate.as_ref()),
            spoof_check: keep(self.spoof_check.as_ref(), before.spoof_check.as_ref()),
            trust: keep(self.trust.as_ref(), before.trust.as_ref()),
            link_state: keep(self.link_state.as_ref(), before.link_state.as_ref()),
            node_guid: keep(self.node_guid.as_ref(), before.node_guid.as_ref()),
            port_guid: keep(self.port_guid.as_ref(), before.port_guid.as_ref()),
        }
    }

    /// The attributes to send, each with what it does, in an order that drivers accept: an address
    /// before what depends on it.
    pub(super) fn requests(&self, vf: u32, before: &VfSettings) -> Vec<(String, VfInfo)> {
        let mut list = Vec::new();
        let mut push = |what: String, info: VfInfo| list.push((what, info));
        if let Some(mac) = &self.mac {
            push(
                format!("address of VF {vf} to {mac}"),
                VfInfo::Mac(VfInfoMac::new(vf, mac.as_bytes())),
            );
        }
        if self.vlan.is_some() || self.vlan_qos.is_some() {
            // One attribute holds both.
            let vlan = self.vlan.or(before.vlan).unwrap_or(0);
            let qos = self.vlan_qos.or(before.vlan_qos).unwrap_or(0);
            push(
                format!("VLAN of VF {vf} to {vlan} priority {qos}"),
                VfInfo::Vlan(VfInfoVlan::new(vf, vlan, qos)),
            );
        }
        if self.min_tx_rate.is_some() || self.max_tx_rate.is_some() {
            let min = self.min_tx_rate.or(before.min_tx_rate).unwrap_or(0);
            let max = self.max_tx_rate.or(before.max_tx_rate).unwrap_or(0);
            push(
                format!("transmit rate of VF {vf} to {min}..{max} Mbit/s"),
                VfInfo::Rate(VfInfoRate::new(vf, min, max)),
            );
        }
        if let Some(on) = self.spoof_check {
            push(
                format!("spoof check of VF {vf} {}", word(on)),
                VfInfo::SpoofCheck(VfInfoSpoofCheck::new(vf, on)),
            );
        }
        if let Some(on) = self.trust {
            push(format!("trust in VF {vf} {}", word(on)), VfInfo::Trust(VfInfoTrust::new(vf, on)));
        }
        if let Some(state) = self.link_state {
            push(
                format!("link state of VF {vf} to {state}"),
                VfInfo::LinkState(VfInfoLinkState::new(vf, state.into())),
            );
        }
        if let Some(guid) = self.node_guid {
            push(
                format!("node GUID of VF {vf} to {guid}"),
                VfInfo::IbNodeGuid(VfInfoGuid::new(vf, guid.0)),
            );
        }
        if let Some(guid) = self.port_guid {
            push(
                format!("port GUID of VF {vf} to {guid}"),
                VfInfo::IbPortGuid(VfInfoGuid::new(vf, guid.0)),
            );
        }
        list
    }
}

const fn word(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

impl From<VfLinkState> for netlink_packet_route::link::VfLinkState {
    fn from(state: VfLinkState) -> Self {
        match state {
            VfLinkState::Auto => Self::Auto,
            VfLinkState::Enable => Self::Enable,
            VfLinkState::Disable => Self::Disable,
        }
    }
}

/// `IFLA_VF_INFO`.
const IFLA_VF_INFO: u16 = 1;

impl VfSettings {
    /// Decodes `IFLA_VFINFO_LIST`.
    pub(super) fn list(value: &[u8]) -> Vec<Self> {
        attr::each(value)
            .filter(|(kind, _)| *kind == IFLA_VF_INFO)
            .map(|(_, one)| {
                let mut settings = Self::default();
                for nla in attr::raw(one) {
                    if let Ok(info) = VfInfo::parse(&nla) {
                        settings.take(&info);
                    }
                }
                settings
            })
            .collect()
    }

    fn take(&mut self, info: &VfInfo) {
        use netlink_packet_route::link::VfLinkState as Said;
        match info {
            VfInfo::Mac(info) => {
                self.index = info.vf_id;
                // The attribute always has room for the longest address: 20 bytes are used on
                // InfiniBand, 6 elsewhere.
                let longer = info.mac.iter().skip(6).any(|byte| *byte != 0);
                self.mac =
                    info.mac.get(..if longer { 20 } else { 6 }).and_then(HardwareAddress::new);
            }
            VfInfo::Vlan(info) => {
                self.vlan = Some(info.vlan_id);
                self.vlan_qos = Some(info.qos);
            }
            VfInfo::Rate(info) => {
                self.min_tx_rate = Some(info.min_tx_rate);
                self.max_tx_rate = Some(info.max_tx_rate);
            }
            VfInfo::SpoofCheck(info) => self.spoof_check = Some(info.enabled),
            VfInfo::Trust(info) => self.trust = Some(info.enabled),
            VfInfo::LinkState(info) => {
                self.link_state = match info.state {
                    Said::Auto => Some(VfLinkState::Auto),
                    Said::Enable => Some(VfLinkState::Enable),
                    Said::Disable => Some(VfLinkState::Disable),
                    _ => None,
                };
            }
            VfInfo::IbNodeGuid(info) => self.node_guid = guid(info.guid),
            VfInfo::IbPortGuid(info) => self.port_guid = guid(info.guid),
            _ => {}
        }
    }
}

/// The kernel writes zero where no GUID was ever set.
fn guid(value: u64) -> Option<Guid> {
    (value != 0).then_some(Guid(value))
}

/// One setting as the kernel takes it.
pub(super) fn vf_info(info: VfInfo) -> Vec<LinkVfInfo> {
    vec![LinkVfInfo(vec![info])]
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable as _;
    use netlink_packet_route::link::LinkAttribute;

    use super::{VfChange, VfLinkState, VfSettings, vf_info};
    use crate::Guid;
    use crate::transport::attr;

    /// What a change sends is what a reader of the list sees: kernel drivers only copy it.
    #[test]
    fn settings_round_trip() {
        let change = VfChange {
            mac: Some("52:54:00:00:00:07".parse().unwrap()),
            vlan: Some(17),
            vlan_qos: Some(3),
            min_tx_rate: Some(10),
            max_tx_rate: Some(200),
            spoof_check: Some(true),
            trust: Some(false),
            link_state: Some(VfLinkState::Enable),
            node_guid: Some(Guid(1 << 63)),
            port_guid: Some(Guid(5)),
        };
        let infos = change.requests(7, &VfSettings::default()).into_iter().map(|(_, info)| info);
        let list = LinkAttribute::VfInfoList(vec![netlink_packet_route::link::LinkVfInfo(
            infos.collect(),
        )]);
        let mut bytes = vec![0; list.buffer_len()];
        list.emit(&mut bytes);
        let (_, value) = attr::each(&bytes).next().unwrap();
        let read = VfSettings::list(value);
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].index, 7);
        assert_eq!(change.inverse(&read[0]), change);
    }

    #[test]
    fn half_a_rate_keeps_the_other_half() {
        let before =
            VfSettings { min_tx_rate: Some(5), max_tx_rate: Some(50), ..VfSettings::default() };
        let change = VfChange { max_tx_rate: Some(80), ..VfChange::default() };
        let requests = change.requests(0, &before);
        assert_eq!(requests.len(), 1);
        assert_eq!(requests[0].0, "transmit rate of VF 0 to 5..80 Mbit/s");
        assert_eq!(
            change.inverse(&before),
            VfChange { max_tx_rate: Some(50), ..VfChange::default() }
        );
        assert_eq!(vf_info(requests[0].1.clone()).len(), 1);
    }
}
