//! Selectors: which functions of the host belong to a pool. Within one field any value may match;
//! of all fields given, each must.

use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// One selector; a field that is empty says nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Selector {
    /// PCI vendors, four hexadecimal digits.
    pub vendor: Vec<String>,
    /// PCI devices, four hexadecimal digits.
    pub device: Vec<String>,
    /// Kernel drivers.
    pub driver: Vec<String>,
    /// PCI addresses.
    pub pci: Vec<String>,
    /// PFs by netdev, with VF numbers: `ens1f0#0-3,7`.
    #[serde(deserialize_with = "pfs")]
    pub pf: Vec<PfSelector>,
    /// PFs by PCI address.
    pub pf_pci: Vec<String>,
    /// RDMA devices.
    pub rdma: Vec<String>,
    /// Netdevs.
    pub netdev: Vec<String>,
    /// Link layers: `ethernet`, `infiniband`.
    pub link: Vec<String>,
    /// NUMA nodes.
    pub numa: Vec<u32>,
}

impl Selector {
    /// Says it nothing?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A PF's netdev and the numbers of its VFs; no numbers are all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PfSelector {
    /// The netdev's name.
    pub netdev: String,
    /// Inclusive ranges.
    pub vfs: Vec<(u32, u32)>,
}

impl PfSelector {
    /// Is this VF meant?
    #[must_use]
    pub fn has(&self, vf: u32) -> bool {
        self.vfs.is_empty() || self.vfs.iter().any(|(first, last)| (*first..=*last).contains(&vf))
    }
}

impl FromStr for PfSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("PF {text:?} is not valid: write NETDEV or NETDEV#0-3,7");
        let (netdev, vfs) =
            text.split_once('#').map_or((text, None), |(name, vfs)| (name, Some(vfs)));
        if netdev.is_empty() {
            return Err(bad());
        }
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
            (range.0 <= range.1).then_some(range)
        };
        let vfs = match vfs {
            None => Vec::new(),
            Some(vfs) => vfs.split(',').map(range).collect::<Option<Vec<_>>>().ok_or_else(bad)?,
        };
        Ok(Self { netdev: netdev.to_owned(), vfs })
    }
}

fn pfs<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<PfSelector>, D::Error> {
    Vec::<String>::deserialize(input)?
        .iter()
        .map(|text| text.parse().map_err(serde::de::Error::custom))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::PfSelector;

    #[test]
    fn pfs_and_ranges() {
        let pf: PfSelector = "eth0#0-3,7".parse().unwrap();
        assert!(pf.has(0) && pf.has(3) && pf.has(7) && !pf.has(4));
        assert!("eth0".parse::<PfSelector>().unwrap().has(99));
        for text in ["", "#1", "eth0#", "eth0#3-1", "eth0#a", "eth0#1,"] {
            assert!(text.parse::<PfSelector>().is_err(), "{text}");
        }
    }
}
