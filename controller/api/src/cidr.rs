//! Address ranges: `10.0.0.0/16`, `fd00::/48`.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Four octets.
macro_rules! v4 {
    () => {
        "((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])[.]){3}\
         (25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    };
}

/// What the schema lets through: an IPv4 or IPv6 range (RFC 4291 §2.2 without embedded IPv4
/// addresses but mapped ones, which is how those are written). An API server stores nothing else,
/// so nothing is stored that could not be read. What is behind the prefix no pattern sees.
pub(crate) const PATTERN: &str = concat!(
    "^(",
    v4!(),
    "/(3[0-2]|[12]?[0-9])|(",
    "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|",
    "([0-9a-fA-F]{1,4}:){1,7}:|",
    "([0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}|",
    "([0-9a-fA-F]{1,4}:){1,5}(:[0-9a-fA-F]{1,4}){1,2}|",
    "([0-9a-fA-F]{1,4}:){1,4}(:[0-9a-fA-F]{1,4}){1,3}|",
    "([0-9a-fA-F]{1,4}:){1,3}(:[0-9a-fA-F]{1,4}){1,4}|",
    "([0-9a-fA-F]{1,4}:){1,2}(:[0-9a-fA-F]{1,4}){1,5}|",
    "[0-9a-fA-F]{1,4}:(:[0-9a-fA-F]{1,4}){1,6}|",
    ":(:[0-9a-fA-F]{1,4}){1,7}|::|::[fF]{4}:",
    v4!(),
    ")/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$",
);

/// The longest text that has this shape.
const LENGTH_MAX: usize = "1111:2222:3333:4444:5555:6666:7777:8888/128".len();

/// A range of addresses that begins at a multiple of its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    address: IpAddr,
    length: u8,
}

/// A text that is no [`Cidr`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    /// Its form.
    #[error("{0:?} is not an address range such as 10.0.0.0/16 or fd00::/48")]
    Form(String),
    /// It has bits behind the prefix.
    #[error("{0:?} has bits behind its prefix: the range that holds it is {1}")]
    Bits(String, Cidr),
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    }
}

impl Cidr {
    /// The range of `length` leading bits that holds `address`; nothing if there are not so many.
    #[must_use]
    pub fn holding(address: IpAddr, length: u8) -> Option<Self> {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        if length > bits {
            return None;
        }
        let kept = number(address) & Self::mask(bits - length);
        Some(Self { address: Self::address(address.is_ipv4(), kept), length })
    }

    /// All bits but the last `host`.
    fn mask(host: u8) -> u128 {
        u128::MAX.checked_shl(u32::from(host)).unwrap_or(0)
    }

    fn address(v4: bool, number: u128) -> IpAddr {
        if v4 {
            #[allow(clippy::cast_possible_truncation, reason = "an IPv4 address has 32 bits")]
            IpAddr::V4(Ipv4Addr::from(number as u32))
        } else {
            IpAddr::V6(Ipv6Addr::from(number))
        }
    }

    /// The first address.
    #[must_use]
    pub fn first(&self) -> IpAddr {
        self.address
    }

    /// How many leading bits are fixed.
    #[must_use]
    pub fn length(&self) -> u8 {
        self.length
    }

    fn host_bits(&self) -> u8 {
        if self.address.is_ipv4() { 32 - self.length } else { 128 - self.length }
    }

    /// Whether `address` lies in it.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4()
            && number(address) & Self::mask(self.host_bits()) == number(self.address)
    }

    /// Whether all of `other` lies in it.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.length <= other.length && self.contains(other.address)
    }

    /// Whether any address lies in both.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.covers(other) || other.covers(self)
    }

    /// How many blocks of `size` addresses it has; a range that is smaller than one is one block.
    #[must_use]
    pub fn blocks(&self, size: u32) -> u64 {
        let bits = self.host_bits().saturating_sub(block_bits(size));
        1_u64.checked_shl(u32::from(bits)).unwrap_or(u64::MAX)
    }

    /// Its `index`th block of `size` addresses.
    #[must_use]
    pub fn block(&self, size: u32, index: u64) -> Option<Self> {
        if index >= self.blocks(size) {
            return None;
        }
        let host = block_bits(size).min(self.host_bits());
        let offset = u128::from(index).checked_shl(u32::from(host))?;
        Some(Self {
            address: Self::address(self.address.is_ipv4(), number(self.address) | offset),
            length: self.length + self.host_bits() - host,
        })
    }

    /// Its text with characters that a name of the API may have, the same for no other range.
    #[must_use]
    pub fn name(&self) -> String {
        match self.address {
            IpAddr::V4(v4) => format!("{v4}-{}", self.length),
            // Every group is written out: `::` is not unique in a name without colons.
            IpAddr::V6(v6) => {
                let groups: Vec<String> = v6.segments().iter().map(|g| format!("{g:x}")).collect();
                format!("{}-{}", groups.join("-"), self.length)
            }
        }
    }
}

/// The bits of a block's size, which is a power of two.
fn block_bits(size: u32) -> u8 {
    u8::try_from(size.max(1).ilog2()).unwrap_or(31)
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let bad = || CidrError::Form(text.chars().take(64).collect());
        let (address, length) = text.split_once('/').ok_or_else(bad)?;
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        if !length.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad());
        }
        let length = length.parse().map_err(|_| bad())?;
        let range = Self::holding(address, length).ok_or_else(bad)?;
        if range.address != address {
            return Err(CidrError::Bits(text.to_owned(), range));
        }
        Ok(range)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl Serialize for Cidr {
    fn serialize<S: Serializer>(&self, output: S) -> Result<S::Ok, S::Error> {
        output.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        // `10.0.0.1/16` has the right shape, so it is stored; and one object that cannot be read
        // keeps its whole kind from being watched. It means the range that holds the address.
        match Cow::<'de, str>::deserialize(input)?.parse() {
            Ok(range) | Err(CidrError::Bits(_, range)) => Ok(range),
            Err(error) => Err(serde::de::Error::custom(error)),
        }
    }
}

impl JsonSchema for Cidr {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Cidr".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": PATTERN, "maxLength": LENGTH_MAX })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn text_and_names() {
        for (text, name) in [
            ("10.0.0.0/16", "10.0.0.0-16"),
            ("0.0.0.0/0", "0.0.0.0-0"),
            ("fd00::/48", "fd00-0-0-0-0-0-0-0-48"),
            ("::1/128", "0-0-0-0-0-0-0-1-128"),
        ] {
            assert_eq!(range(text).to_string(), text);
            assert_eq!(range(text).name(), name);
        }
        for text in ["", "10.0.0.0", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/+8", "x/8"] {
            assert!(matches!(text.parse::<Cidr>(), Err(CidrError::Form(_))), "{text}");
        }
        let error = "10.0.0.1/16".parse::<Cidr>().unwrap_err();
        assert!(error.to_string().ends_with("the range that holds it is 10.0.0.0/16"), "{error}");
    }

    #[test]
    fn blocks_tile_their_range() {
        let net = range("10.0.0.0/22");
        assert_eq!(net.blocks(256), 4);
        assert_eq!(net.block(256, 3), Some(range("10.0.3.0/24")));
        assert_eq!(net.block(256, 4), None);
        assert_eq!(range("10.0.0.0/28").blocks(64), 1);
        assert_eq!(range("10.0.0.0/28").block(64, 0), Some(range("10.0.0.0/28")));
        assert_eq!(range("fd00::/48").blocks(64), u64::MAX);
        assert_eq!(range("fd00::/120").block(64, 2), Some(range("fd00::80/122")));
    }

    proptest! {
        #[test]
        fn blocks_are_inside_and_apart(
            address in any::<[u8; 16]>(), v4 in any::<bool>(), length in 0_u8..=32,
            bits in 0_u32..=16, a in any::<u64>(), b in any::<u64>(),
        ) {
            let address = if v4 {
                IpAddr::from([address[0], address[1], address[2], address[3]])
            } else {
                IpAddr::from(address)
            };
            let net = Cidr::holding(address, length).unwrap();
            let size = 1 << bits;
            let (a, b) = (a % net.blocks(size), b % net.blocks(size));
            let (first, second) = (net.block(size, a).unwrap(), net.block(size, b).unwrap());
            prop_assert!(net.covers(&first));
            prop_assert_eq!(a == b, first.overlaps(&second));
            prop_assert_eq!(a == b, first.name() == second.name());
            prop_assert_eq!(first.to_string().parse::<Cidr>(), Ok(first));
        }
    }
}
