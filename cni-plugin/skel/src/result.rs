//! Results of ADD, in one shape for all versions.
//!
//! [`AddResult`] is the newest version's; reading and writing convert. Whoever stands in a chain
//! changes a few entries and must not lose what others wrote, so fields that are not known are kept
//! in every structure. Writing an older version drops what that version does not have.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::error::undecodable;
use crate::{Code, Error, Version};

/// Fields that are not known, kept as they came.
pub type Extra = Map<String, Value>;

/// The result of ADD.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AddResult {
    /// Interfaces that were made or found.
    #[serde(deserialize_with = "null_is_default")]
    pub interfaces: Vec<Interface>,
    /// Addresses, by index of their interface.
    #[serde(deserialize_with = "null_is_default")]
    pub ips: Vec<Ip>,
    /// Routes.
    #[serde(deserialize_with = "null_is_default")]
    pub routes: Vec<Route>,
    /// Name resolution.
    #[serde(deserialize_with = "null_is_default")]
    pub dns: Dns,
    /// Others.
    #[serde(flatten)]
    pub extra: Extra,
}

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its hardware address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its MTU (1.1.0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Path of the namespace that it is in; nothing for one of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// The socket that makes it, for vhost-user (1.1.0).
    #[serde(rename = "socketPath", skip_serializing_if = "Option::is_none")]
    pub socket_path: Option<String>,
    /// Its PCI function (1.1.0).
    #[serde(rename = "pciID", skip_serializing_if = "Option::is_none")]
    pub pci_id: Option<String>,
    /// Others.
    #[serde(flatten)]
    pub extra: Extra,
}

/// An address.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ip {
    /// Address and length of the prefix.
    pub address: Cidr,
    /// The gateway of its network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Index in [`AddResult::interfaces`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// Others.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// Where to.
    pub dst: Cidr,
    /// By which next hop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// MTU (1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Advertised MSS (1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advmss: Option<u32>,
    /// Metric (1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Table (1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// Scope (1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u32>,
    /// Others.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Name resolution.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Servers, best first.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub nameservers: Vec<String>,
    /// The domain of short names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Search list.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub search: Vec<String>,
    /// Options of the resolver.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub options: Vec<String>,
}

impl Dns {
    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl AddResult {
    /// Reads a result of the version that it names, or else of `version`.
    ///
    /// # Errors
    /// Code 1 for a version that is unknown, 6 if it does not decode.
    pub fn from_json(value: &Value, version: Version) -> Result<Self, Error> {
        let said = value.get("cniVersion").and_then(Value::as_str).unwrap_or(version.as_str());
        if said.parse::<Version>().is_err() {
            let msg = format!("a result of version {said:?} cannot be read");
            return Err(Error::new(Code::INCOMPATIBLE_VERSION, msg));
        }
        let mut result =
            Self::deserialize(value).map_err(|error| undecodable("the result", &error))?;
        result.extra.remove("cniVersion");
        for ip in &mut result.ips {
            ip.extra.remove("version");
        }
        Ok(result)
    }

    /// Writes it as `version` wants it.
    #[must_use]
    pub fn to_json(&self, version: Version) -> Value {
        let mut result = self.clone();
        if version < Version::V1_1_0 {
            result.forget_what_1_1_0_brought();
        }
        if version < Version::V1_0_0 {
            for ip in &mut result.ips {
                let of = if ip.address.address.is_ipv4() { "4" } else { "6" };
                ip.extra.insert("version".to_owned(), Value::from(of));
            }
        }
        result.extra.insert("cniVersion".to_owned(), Value::from(version.as_str()));
        // Plain structures with string keys: this can not fail, and an empty object would still be
        // valid JSON.
        let mut document = serde_json::to_value(&result).unwrap_or_default();
        if let Some(map) = document.as_object_mut() {
            for key in ["interfaces", "ips", "routes"] {
                if map.get(key).and_then(Value::as_array).is_some_and(Vec::is_empty) {
                    map.remove(key);
                }
            }
        }
        document
    }

    fn forget_what_1_1_0_brought(&mut self) {
        for interface in &mut self.interfaces {
            (interface.mtu, interface.socket_path, interface.pci_id) = (None, None, None);
        }
        for route in &mut self.routes {
            (route.mtu, route.advmss, route.priority) = (None, None, None);
            (route.table, route.scope) = (None, None);
        }
    }

    /// Adds an interface, and the addresses, routes and (if there are none yet) names that `ipam`
    /// gave for it.
    pub fn attach(&mut self, interface: Interface, ipam: Self) {
        let index = self.interfaces.len();
        self.interfaces.push(interface);
        self.ips.extend(ipam.ips.into_iter().map(|ip| Ip { interface: Some(index), ..ip }));
        self.routes.extend(ipam.routes);
        if self.dns.is_empty() {
            self.dns = ipam.dns;
        }
    }
}

/// An address and the length of its network's prefix, as `10.1.2.3/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cidr {
    /// The address; bits beyond the prefix are kept.
    pub address: IpAddr,
    /// Length of the prefix.
    pub prefix: u8,
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is not of the form ADDRESS/LENGTH");
        let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let prefix: u8 = prefix.parse().map_err(|_| bad())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        if prefix > most { Err(bad()) } else { Ok(Self { address, prefix }) }
    }
}

impl Serialize for Cidr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Go writes a nil slice as null.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
