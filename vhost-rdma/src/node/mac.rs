//! Ethernet addresses: how they are written, which of them a NIC may have, and how one is made up.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Text that is no address of a NIC.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "MAC address {text:?} is not valid: {why}; write it as 02:00:00:00:00:01, or leave --mac away \
     to get a free one"
)]
pub struct BadMac {
    /// As given.
    pub text: String,
    /// The rule that it breaks.
    pub why: &'static str,
}

/// A unicast Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddr([u8; 6]);

impl MacAddr {
    /// The six octets in transmission order.
    #[must_use]
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }

    /// A locally administered unicast address from six random octets: bit 1 of the first octet set,
    /// bit 0 clear (IEEE 802-2014 §8.2).
    #[must_use]
    pub const fn local(mut random: [u8; 6]) -> Self {
        random[0] = (random[0] & 0xfc) | 0x02;
        Self(random)
    }
}

impl FromStr for MacAddr {
    type Err = BadMac;

    fn from_str(text: &str) -> Result<Self, BadMac> {
        let bad = |why: &'static str| BadMac { text: text.to_owned(), why };
        let mut octets = [0_u8; 6];
        let mut parts = text.split([':', '-']);
        for octet in &mut octets {
            let part = parts.next().ok_or_else(|| bad("it has fewer than six parts"))?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(bad("each part must be two hexadecimal digits"));
            }
            *octet = u8::from_str_radix(part, 16)
                .map_err(|_| bad("each part must be two hexadecimal digits"))?;
        }
        if parts.next().is_some() {
            return Err(bad("it has more than six parts"));
        }
        if octets[0] & 1 != 0 {
            return Err(bad("it is a multicast address (the first octet is odd)"));
        }
        if octets == [0; 6] {
            return Err(bad("it is all zero"));
        }
        Ok(Self(octets))
    }
}

impl TryFrom<String> for MacAddr {
    type Error = BadMac;

    fn try_from(text: String) -> Result<Self, BadMac> {
        text.parse()
    }
}

impl From<MacAddr> for String {
    fn from(mac: MacAddr) -> Self {
        mac.to_string()
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::MacAddr;

    #[test]
    fn refuses_what_is_not_a_unicast_address() {
        for text in [
            "",
            "02:00",
            "02:00:00:00:00:00:01",
            "0:0:0:0:0:1",
            "zz:00:00:00:00:01",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
            "+2:00:00:00:00:01",
        ] {
            assert!(text.parse::<MacAddr>().is_err(), "{text:?} was taken");
        }
    }

    proptest! {
        #[test]
        fn made_up_addresses_are_local_unicast_and_round_trip(random in any::<[u8; 6]>()) {
            let mac = MacAddr::local(random);
            prop_assert_eq!(mac.octets()[0] & 3, 2);
            prop_assert_eq!(mac.to_string().parse::<MacAddr>().ok(), Some(mac));
        }

        #[test]
        fn any_text_is_taken_or_refused_without_a_panic(text in ".*") {
            if let Ok(mac) = text.parse::<MacAddr>() {
                prop_assert!(mac.to_string().eq_ignore_ascii_case(&text.replace('-', ":")));
            }
        }
    }
}
