//! Addresses in their usual spellings.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::Error;

/// A link-layer address: 6 bytes on Ethernet, 20 on IP over InfiniBand.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HardwareAddress(Vec<u8>);

impl HardwareAddress {
    /// The longest that the kernel knows (`MAX_ADDR_LEN`).
    const MAX: usize = 32;

    /// An address of these bytes; `None` if there are none or more than the kernel takes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (1..=Self::MAX).contains(&bytes.len()).then(|| Self(bytes.to_vec()))
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// True for an address that stands for "none".
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }
}

impl From<[u8; 6]> for HardwareAddress {
    fn from(mac: [u8; 6]) -> Self {
        Self(mac.to_vec())
    }
}

impl fmt::Display for HardwareAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if n == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl FromStr for HardwareAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let byte = |part: &str| {
            let digits = part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
            digits.then(|| u8::from_str_radix(part, 16).ok()).flatten()
        };
        text.split([':', '-'])
            .map(byte)
            .collect::<Option<Vec<u8>>>()
            .filter(|bytes| bytes.len() == 6 || bytes.len() == 20)
            .map(Self)
            .ok_or_else(|| {
                Error::Invalid(format!(
                    "{text:?} is no hardware address: write bytes in hexadecimal with colons \
                     between them, 6 (Ethernet) or 20 (InfiniBand)"
                ))
            })
    }
}

/// An InfiniBand GUID (EUI-64).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Guid(pub u64);

impl fmt::Display for Guid {
    /// As sysfs and `rdma` write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = [48, 32, 16, 0].map(|shift| (self.0 >> shift) & 0xffff);
        write!(f, "{a:04x}:{b:04x}:{c:04x}:{d:04x}")
    }
}

impl FromStr for Guid {
    type Err = Error;

    /// Takes four groups of four digits, eight of two, or sixteen digits after `0x`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let groups: Vec<&str> = match text.strip_prefix("0x") {
            Some(digits) => vec![digits],
            None => text.split(':').collect(),
        };
        let width = match groups.len() {
            1 => 16,
            4 => 4,
            8 => 2,
            _ => 0,
        };
        let well_formed = groups.iter().all(|group| {
            group.len() == width && group.bytes().all(|digit| digit.is_ascii_hexdigit())
        });
        well_formed
            .then(|| u64::from_str_radix(&groups.concat(), 16).ok())
            .flatten()
            .map(Self)
            .ok_or_else(|| {
                Error::Invalid(format!(
                    "{text:?} is no GUID: write 16 hexadecimal digits, such as 0002:c903:00a1:b2c3"
                ))
            })
    }
}

/// An IP address with the length of its network's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IpPrefix {
    /// The address; host bits are kept.
    pub address: IpAddr,
    /// 0 to 32 or 128.
    pub length: u8,
}

impl IpPrefix {
    /// `None` if the prefix is longer than the address.
    #[must_use]
    pub const fn new(address: IpAddr, length: u8) -> Option<Self> {
        let longest = match address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        };
        if length > longest { None } else { Some(Self { address, length }) }
    }
}

impl fmt::Display for IpPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl FromStr for IpPrefix {
    type Err = Error;

    /// `address/length`; an address alone is a host.
    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Invalid(format!("{text:?} is no IP prefix: write ADDRESS/LENGTH"));
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length.parse().map_err(|_| bad())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let host = if address.is_ipv4() { 32 } else { 128 };
        Self::new(address, length.unwrap_or(host)).ok_or_else(bad)
    }
}

macro_rules! as_text {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    )*};
}

as_text!(HardwareAddress, Guid, IpPrefix);

#[cfg(test)]
mod tests {
    use super::{Guid, HardwareAddress, IpPrefix};

    #[test]
    fn hardware_addresses() {
        let mac: HardwareAddress = "52:54:00:AB:cd:0f".parse().unwrap();
        assert_eq!(mac.as_bytes(), [0x52, 0x54, 0, 0xab, 0xcd, 0xf]);
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:0f");
        for text in [
            "",
            ":",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:0f:01",
            "+2:54:00:ab:cd:0f",
            "525400abcd0f",
            "52:54:00:ab:cd:é",
        ] {
            assert!(text.parse::<HardwareAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn guids() {
        let guid = Guid(0x0002_c903_00a1_b2c3);
        for text in ["0002:c903:00a1:b2c3", "00:02:c9:03:00:a1:b2:c3", "0x0002c90300a1b2c3"] {
            assert_eq!(text.parse::<Guid>().unwrap(), guid, "{text}");
        }
        assert_eq!(guid.to_string(), "0002:c903:00a1:b2c3");
        for text in [
            "",
            "2:c903:00a1:b2c3",
            "0002:c903:00a1",
            "+002:c903:00a1:b2c3",
            "0x1",
            "0002-c903-00a1-b2c3",
        ] {
            assert!(text.parse::<Guid>().is_err(), "{text}");
        }
    }

    #[test]
    fn prefixes() {
        for (text, shown) in [
            ("10.0.0.1/24", "10.0.0.1/24"),
            ("10.0.0.1", "10.0.0.1/32"),
            ("fd00::1/64", "fd00::1/64"),
            ("::/0", "::/0"),
        ] {
            assert_eq!(text.parse::<IpPrefix>().unwrap().to_string(), shown);
        }
        for text in ["", "10.0.0.1/33", "fd00::1/129", "10.0.0/8", "10.0.0.1/", "10.0.0.1/-1"] {
            assert!(text.parse::<IpPrefix>().is_err(), "{text}");
        }
    }
}
