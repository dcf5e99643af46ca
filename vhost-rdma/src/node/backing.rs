//! What carries a NIC's verbs.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What carries a NIC's verbs; fixed at creation, since it decides capabilities and who chooses
/// keys and QPNs.
///
/// Written `soft`, `rnic:DEVICE`, or `rnic:DEVICE@ADDRESS`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Backing {
    /// The daemon's own engine.
    #[default]
    Soft,
    /// An RNIC of this host.
    Rnic {
        /// The name of its RDMA device.
        device: String,
        /// The host's address that stands for all of the guest's; none if the guest's addresses are
        /// the host's own.
        through: Option<IpAddr>,
    },
}

/// Not a backing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "backing {text:?} is not known: write soft, rnic:DEVICE (`rdma link` lists devices), or \
     rnic:DEVICE@ADDRESS with an address of the host that stands for the guest's"
)]
pub struct BadBacking {
    /// As given.
    pub text: String,
}

impl FromStr for Backing {
    type Err = BadBacking;

    fn from_str(text: &str) -> Result<Self, BadBacking> {
        let bad = || BadBacking { text: text.to_owned() };
        if text.is_empty() || text == "soft" {
            return Ok(Self::Soft);
        }
        let rest = text.strip_prefix("rnic:").ok_or_else(bad)?;
        let (device, through) = match rest.split_once('@') {
            Some((device, address)) => (device, Some(address.parse().map_err(|_| bad())?)),
            None => (rest, None),
        };
        // The names of the kernel's RDMA devices (IB_DEVICE_NAME_MAX is 64 with its end).
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if device.is_empty() || device.len() > 63 || !device.chars().all(known) {
            return Err(bad());
        }
        Ok(Self::Rnic { device: device.to_owned(), through })
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Soft => f.write_str("soft"),
            Self::Rnic { device, through: None } => write!(f, "rnic:{device}"),
            Self::Rnic { device, through: Some(address) } => write!(f, "rnic:{device}@{address}"),
        }
    }
}

impl TryFrom<String> for Backing {
    type Error = BadBacking;

    fn try_from(text: String) -> Result<Self, BadBacking> {
        text.parse()
    }
}

impl From<Backing> for String {
    fn from(backing: Backing) -> Self {
        backing.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for text in ["soft", "rnic:mlx5_0", "rnic:rxe0@192.0.2.7", "rnic:bnxt_re0@2001:db8::1"] {
            let backing: Backing = text.parse().expect(text);
            assert_eq!(backing.to_string(), text);
            let json = serde_json::to_string(&backing).expect("a string");
            assert_eq!(json, format!("{text:?}"));
            assert_eq!(serde_json::from_str::<Backing>(&json).expect("the same"), backing);
        }
    }

    #[test]
    fn what_is_no_backing_is_refused() {
        for text in
            ["hard", "rnic", "rnic:", "rnic:a b", "rnic:../x", "rnic:a@", "rnic:a@b", "Soft"]
        {
            assert!(text.parse::<Backing>().is_err(), "{text}");
        }
    }
}
