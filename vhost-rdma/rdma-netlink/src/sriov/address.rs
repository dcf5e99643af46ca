//! Addresses of PCI functions.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::Error;

/// `domain:bus:device.function`, such as `0000:3b:02.1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    /// The domain may be left away if it is 0.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).ok_or_else(|| {
            Error::Invalid(format!(
                "{text:?} is no PCI address: write DOMAIN:BUS:DEVICE.FUNCTION, such as 0000:3b:02.1"
            ))
        })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let hex = |digits: &str, most: usize| {
        let good = (1..=most).contains(&digits.len())
            && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        good.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
    };
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
    Some(PciAddress {
        // Virtual domains (VMD, Hyper-V) are longer than four digits.
        domain: hex(domain, 8)?,
        bus: u8::try_from(hex(bus, 2)?).ok()?,
        device: u8::try_from(hex(device, 2)?).ok().filter(|device| *device < 32)?,
        function: u8::try_from(hex(function, 1)?).ok().filter(|function| *function < 8)?,
    })
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::PciAddress;

    #[test]
    fn addresses() {
        for (text, shown) in [
            ("0000:3b:02.1", "0000:3b:02.1"),
            ("3B:1f.7", "0000:3b:1f.7"),
            ("10000:01:00.0", "10000:01:00.0"),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "3b",
            "3b:02",
            "3b:20.0",
            "3b:02.8",
            "g:02.1",
            "0000:3b:02.1.1",
            "+0:3b:02.1",
            ":3b:02.1",
            "../3b:02.1",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
