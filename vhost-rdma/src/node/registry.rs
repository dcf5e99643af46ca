//! The registry: the one place that knows which networks and NICs exist, and that keeps every rule
//! about them.

mod peers;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::name::{check_name, near};
use super::peer_set::PeerSets;
use super::types::{
    COMP_VECTORS_MAX, DEFAULT_COMP_VECTORS, DEFAULT_NETWORK, DEFAULT_VNI, Guests, LimitsPatch,
    NetworkConfig, NicConfig, NicLimits, SOCKET_PATH_MAX, SocketAccess, VNI_MAX,
};
use super::{AclEntry, Backing, Error, MacAddr, Peer};

/// What a new NIC is asked to be.
#[derive(Debug, Clone, Default)]
pub struct NicSpec {
    /// Unique on the host.
    pub name: String,
    /// `None` is the default network.
    pub network: Option<String>,
    /// `None` makes one up.
    pub mac: Option<MacAddr>,
    /// Empty is any address that no other NIC of the network holds.
    pub addresses: Vec<IpAddr>,
    /// The virtio device type told to the VMM.
    pub virtio_id: Option<u32>,
    /// `None` is the default number.
    pub comp_vectors: Option<u32>,
    /// Over the defaults.
    pub limits: LimitsPatch,
    /// What carries the verbs.
    pub backing: Backing,
    /// Whose device it is.
    pub guests: Guests,
    /// Who may connect.
    pub access: SocketAccess,
    /// Named in the configuration file.
    pub configured: bool,
    /// What it had before; `None` is the next that no NIC had.
    pub number: Option<u32>,
}

/// A change of a live NIC: what is absent stays as it is.
#[derive(Debug, Clone, Default)]
pub struct NicPatch {
    /// The whole new list.
    pub addresses: Option<Vec<IpAddr>>,
    /// Limits to change.
    pub limits: LimitsPatch,
    /// New user of the socket.
    pub uid: Option<u32>,
    /// New group of the socket.
    pub gid: Option<u32>,
    /// New permission bits of the socket.
    pub mode: Option<u32>,
    /// The whole new access control list of the socket.
    pub acl: Option<Vec<AclEntry>>,
}

/// All that outlives the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Saved {
    /// Every network.
    pub networks: Vec<NetworkConfig>,
    /// Every NIC.
    pub nics: Vec<NicConfig>,
    /// Every peer, but for those of the configuration file.
    #[serde(default)]
    pub peers: Vec<Peer>,
    /// The VNI that was last given to a network that named none.
    #[serde(default)]
    pub last_vni: u32,
    /// The number that was last given to a NIC.
    #[serde(default)]
    pub last_number: u32,
}

/// The networks and NICs of this host.
#[derive(Debug, Clone)]
pub struct Registry {
    nics_dir: PathBuf,
    networks: BTreeMap<String, NetworkConfig>,
    nics: BTreeMap<String, NicConfig>,
    peers: PeerSets,
    /// The VNI that was last given to a network that named none.
    last_vni: u32,
    /// The number that was last given to a NIC.
    last_number: u32,
}

impl Registry {
    /// A registry with the default network, whose NICs have their sockets at
    /// `nics_dir/NAME`.
    #[must_use]
    pub fn new(nics_dir: PathBuf) -> Self {
        let default =
            NetworkConfig { name: DEFAULT_NETWORK.to_owned(), vni: DEFAULT_VNI, configured: false };
        Self {
            nics_dir,
            networks: BTreeMap::from([(default.name.clone(), default)]),
            nics: BTreeMap::new(),
            peers: PeerSets::default(),
            last_vni: DEFAULT_VNI,
            last_number: 0,
        }
    }

    /// All networks by name.
    pub fn networks(&self) -> impl Iterator<Item = &NetworkConfig> {
        self.networks.values()
    }

    /// All NICs by name.
    pub fn nics(&self) -> impl Iterator<Item = &NicConfig> {
        self.nics.values()
    }

    /// How many NICs a network has.
    #[must_use]
    pub fn nics_of(&self, network: &str) -> usize {
        self.nics.values().filter(|nic| nic.network == network).count()
    }

    /// One network.
    ///
    /// # Errors
    /// [`Error::NoSuchNetwork`], with names it may have meant.
    pub fn network(&self, name: &str) -> Result<&NetworkConfig, Error> {
        self.networks.get(name).ok_or_else(|| Error::NoSuchNetwork {
            name: name.to_owned(),
            near: near(name, self.networks.keys().map(String::as_str)),
        })
    }

    /// One NIC.
    ///
    /// # Errors
    /// [`Error::NoSuchNic`], with names it may have meant.
    pub fn nic(&self, name: &str) -> Result<&NicConfig, Error> {
        self.nics.get(name).ok_or_else(|| Error::NoSuchNic {
            name: name.to_owned(),
            near: near(name, self.nics.keys().map(String::as_str)),
        })
    }

    /// Adds a network; without `vni` it gets the next free one.
    ///
    /// # Errors
    /// A bad or taken name or VNI.
    pub fn add_network(
        &mut self,
        name: &str,
        vni: Option<u32>,
        configured: bool,
    ) -> Result<&NetworkConfig, Error> {
        self.check_network(name)?;
        let vni = match vni {
            Some(vni) => self.check_vni(vni)?,
            None => {
                self.last_vni = self.free_vni()?;
                self.last_vni
            }
        };
        let network = NetworkConfig { name: name.to_owned(), vni, configured };
        Ok(self.networks.entry(network.name.clone()).or_insert(network))
    }

    /// Whether there can be another network, of this name.
    ///
    /// # Errors
    /// A bad or taken name.
    pub fn check_network(&self, name: &str) -> Result<(), Error> {
        check_name("network", name)?;
        if self.networks.contains_key(name) {
            return Err(Error::NameTaken {
                what: "network",
                verb: "network",
                name: name.to_owned(),
            });
        }
        Ok(())
    }

    fn check_vni(&self, vni: u32) -> Result<u32, Error> {
        if vni == 0 || vni > VNI_MAX {
            return Err(Error::BadVni { vni });
        }
        match self.networks.values().find(|network| network.vni == vni) {
            Some(owner) => Err(Error::VniTaken { vni, network: owner.name.clone() }),
            None => Ok(vni),
        }
    }

    /// Goes round, so that a VNI rests before it comes back: who still knows the old network by it,
    /// a log or a packet on its way, does not take the new one for it.
    fn free_vni(&self) -> Result<u32, Error> {
        let taken: BTreeSet<u32> = self.networks.values().map(|network| network.vni).collect();
        let (after, before) = (self.last_vni.saturating_add(1)..=VNI_MAX, 1..=self.last_vni);
        after.chain(before).find(|vni| !taken.contains(vni)).ok_or(Error::NoFreeVni)
    }

    /// Removes an empty network.
    ///
    /// # Errors
    /// It does not exist, still has NICs, or is the default one.
    pub fn remove_network(&mut self, name: &str) -> Result<NetworkConfig, Error> {
        let network = self.network(name)?.clone();
        let mut nics: Vec<String> = self
            .nics
            .values()
            .filter(|nic| nic.network == name)
            .map(|nic| nic.name.clone())
            .collect();
        if !nics.is_empty() {
            let count = nics.len();
            nics.truncate(5);
            return Err(Error::NetworkNotEmpty { name: name.to_owned(), count, nics });
        }
        if name == DEFAULT_NETWORK {
            return Err(Error::DefaultNetwork);
        }
        self.networks.remove(name);
        self.peers.forget(name);
        Ok(network)
    }

    /// Adds a NIC; `random` gives six octets for a MAC address at each call.
    ///
    /// # Errors
    /// Whatever rule the request breaks.
    pub fn add_nic(
        &mut self,
        spec: NicSpec,
        random: impl FnMut() -> [u8; 6],
    ) -> Result<&NicConfig, Error> {
        check_name("NIC", &spec.name)?;
        if self.nics.contains_key(&spec.name) {
            return Err(Error::NameTaken { what: "NIC", verb: "nic", name: spec.name });
        }
        let network = self.network(spec.network.as_deref().unwrap_or(DEFAULT_NETWORK))?.clone();
        let mac = match spec.mac {
            Some(mac) => mac,
            None => self.free_mac(&network.name, random),
        };
        let number = self.number(spec.number);
        let nic = NicConfig {
            number,
            socket: self.nics_dir.join(&spec.name).join(spec.guests.socket()),
            name: spec.name,
            network: network.name,
            vni: network.vni,
            mac,
            addresses: spec.addresses,
            virtio_id: spec.virtio_id,
            comp_vectors: comp_vectors(spec.comp_vectors)?,
            limits: spec.limits.apply(NicLimits::default()),
            backing: spec.backing,
            guests: spec.guests,
            access: spec.access,
            configured: spec.configured,
        };
        self.check_nic(&nic)?;
        self.last_number = self.last_number.max(number);
        Ok(self.nics.entry(nic.name.clone()).or_insert(nic))
    }

    /// The number that a NIC had, if it is no other's, or one that none had: what knows the old NIC
    /// by it, a log or a message on its way, does not take the new one for it. Four thousand
    /// million NICs later they come back.
    fn number(&self, former: Option<u32>) -> u32 {
        let taken = |number: u32| self.nics.values().any(|nic| nic.number == number);
        let former = former.filter(|&former| former != 0);
        let new = self.last_number.checked_add(1).map(|first| first..=u32::MAX);
        let mut all = former.into_iter().chain(new.into_iter().flatten()).chain(1..=u32::MAX);
        all.find(|&number| !taken(number)).unwrap_or_default()
    }

    fn free_mac(&self, network: &str, mut random: impl FnMut() -> [u8; 6]) -> MacAddr {
        // 46 random bits: a second try is already unlikely, and only a broken source could repeat
        // itself for ever.
        let mut mac = MacAddr::local(random());
        for _ in 0..64 {
            if !self.nics.values().any(|nic| nic.network == network && nic.mac == mac) {
                break;
            }
            mac = MacAddr::local(random());
        }
        mac
    }

    /// Every rule about one NIC beside those it is compared with; a NIC of the same name is the one
    /// that it replaces.
    fn check_nic(&self, nic: &NicConfig) -> Result<(), Error> {
        let path = nic.socket.display().to_string();
        let length = nic.socket.as_os_str().len();
        if length > SOCKET_PATH_MAX {
            return Err(Error::PathTooLong { path, length });
        }
        if let Some(id) = nic.virtio_id.filter(|id| !(1..=63).contains(id)) {
            return Err(Error::BadVirtioId { id });
        }
        if !(1..=COMP_VECTORS_MAX).contains(&nic.comp_vectors) {
            return Err(Error::BadVectors { vectors: nic.comp_vectors.into() });
        }
        if nic.guests == Guests::Process && nic.backing != Backing::Soft {
            return Err(Error::ProcessBacking { backing: nic.backing.to_string() });
        }
        if nic.access.mode > 0o777 {
            return Err(Error::BadMode { mode: nic.access.mode });
        }
        check_limits(&nic.limits)?;
        let mut seen = BTreeSet::new();
        for address in &nic.addresses {
            check_address(*address)?;
            if !seen.insert(address) {
                return Err(Error::BadAddress {
                    text: address.to_string(),
                    why: "it is given twice",
                });
            }
        }
        for other in self
            .nics
            .values()
            .filter(|other| other.network == nic.network && other.name != nic.name)
        {
            if other.mac == nic.mac {
                return Err(Error::MacTaken { mac: nic.mac, nic: other.name.clone() });
            }
            if let Some(address) =
                nic.addresses.iter().find(|address| other.addresses.contains(address))
            {
                return Err(Error::AddressTaken { address: *address, nic: other.name.clone() });
            }
        }
        Ok(())
    }

    /// Changes a NIC.
    ///
    /// # Errors
    /// Whatever rule the new values break; the old ones then stay.
    pub fn update_nic(&mut self, name: &str, patch: NicPatch) -> Result<&NicConfig, Error> {
        let mut nic = self.nic(name)?.clone();
        nic.limits = patch.limits.apply(nic.limits);
        if let Some(addresses) = patch.addresses {
            nic.addresses = addresses;
        }
        nic.access = SocketAccess {
            uid: patch.uid.or(nic.access.uid),
            gid: patch.gid.or(nic.access.gid),
            mode: patch.mode.unwrap_or(nic.access.mode),
            acl: patch.acl.unwrap_or(nic.access.acl),
        };
        self.check_nic(&nic)?;
        self.put(nic);
        self.nic(name)
    }

    /// Puts a NIC in the place of that of the same name, as it was checked before.
    pub(crate) fn put(&mut self, nic: NicConfig) {
        self.last_number = self.last_number.max(nic.number);
        self.nics.insert(nic.name.clone(), nic);
    }

    /// Puts a network in its place, as it was checked before, and the VNI that was last given.
    pub(crate) fn put_network(&mut self, network: NetworkConfig, last_vni: u32) {
        self.networks.insert(network.name.clone(), network);
        self.last_vni = last_vni;
    }

    /// The VNI that was last given to a network that named none.
    pub(crate) const fn last_vni(&self) -> u32 {
        self.last_vni
    }

    /// Takes over in what `new` differs from `old`, unless something of it is somebody else's here.
    /// Peers stay as they are.
    ///
    /// # Errors
    /// The first thing that is; nothing has changed.
    pub(crate) fn adopt(&mut self, old: &Self, new: &Self) -> Result<(), Error> {
        let mut own = self.clone();
        let networks = new.networks.values();
        for network in networks.filter(|network| old.networks.get(&network.name) != Some(network)) {
            let owner = own.networks.values().find(|other| other.vni == network.vni);
            if let Some(owner) = owner.filter(|owner| owner.name != network.name) {
                let (vni, network) = (network.vni, owner.name.clone());
                return Err(Error::VniTaken { vni, network });
            }
            own.networks.insert(network.name.clone(), network.clone());
        }
        let nics = new.nics.values();
        for nic in nics.filter(|nic| old.nics.get(&nic.name) != Some(nic)) {
            let other = own.nics.get(&nic.name).filter(|other| other.network != nic.network);
            if let Some(other) = other {
                let name = other.name.clone();
                return Err(Error::NameTaken { what: "NIC", verb: "nic", name });
            }
            own.check_nic(nic)?;
            own.put(nic.clone());
        }
        own.last_vni = own.last_vni.max(new.last_vni);
        own.last_number = own.last_number.max(new.last_number);
        *self = own;
        Ok(())
    }

    /// Has this network, and its NICs, be as they are there.
    pub(crate) fn take_network(&mut self, from: &Self, name: &str) {
        match from.networks.get(name) {
            Some(network) => {
                self.networks.insert(name.to_owned(), network.clone());
            }
            None => {
                self.networks.remove(name);
            }
        }
        self.nics.retain(|_, nic| nic.network != name);
        let nics = from.nics.values().filter(|nic| nic.network == name);
        self.nics.extend(nics.map(|nic| (nic.name.clone(), nic.clone())));
    }

    /// Removes a NIC.
    ///
    /// # Errors
    /// It does not exist.
    pub fn remove_nic(&mut self, name: &str) -> Result<NicConfig, Error> {
        let nic = self.nic(name)?.clone();
        self.nics.remove(name);
        Ok(nic)
    }

    /// All that outlives the daemon.
    #[must_use]
    pub fn save(&self) -> Saved {
        Saved {
            networks: self.networks.values().cloned().collect(),
            nics: self.nics.values().cloned().collect(),
            peers: self.peers.saved(),
            last_vni: self.last_vni,
            last_number: self.last_number,
        }
    }

    /// Marks a network as named in the configuration file.
    pub fn mark_configured(&mut self, network: &str) {
        if let Some(network) = self.networks.get_mut(network) {
            network.configured = true;
        }
    }

    /// Takes over saved state beside what is already there, by the rules that hold today: sockets
    /// move with the directory, VNIs come from the networks.
    ///
    /// # Errors
    /// The first thing in it that breaks a rule.
    pub fn restore(&mut self, saved: Saved) -> Result<(), Error> {
        self.last_vni = saved.last_vni.min(VNI_MAX).max(self.last_vni);
        self.last_number = saved.last_number.max(self.last_number);
        for network in saved.networks.into_iter().filter(|network| network.name != DEFAULT_NETWORK)
        {
            self.add_network(&network.name, Some(network.vni), false)?;
        }
        for mut nic in saved.nics {
            if self.nics.contains_key(&nic.name) {
                continue;
            }
            check_name("NIC", &nic.name)?;
            nic.vni = self.network(&nic.network)?.vni;
            nic.socket = self.nics_dir.join(&nic.name).join(nic.guests.socket());
            nic.configured = false;
            // An earlier build gave none.
            nic.number = self.number(Some(nic.number));
            self.check_nic(&nic)?;
            self.put(nic);
        }
        saved.peers.into_iter().try_for_each(|peer| self.add_peer(peer))
    }
}

fn comp_vectors(asked: Option<u32>) -> Result<u16, Error> {
    match asked {
        None => Ok(DEFAULT_COMP_VECTORS),
        Some(vectors) => u16::try_from(vectors).map_err(|_| Error::BadVectors { vectors }),
    }
}

/// No shared receive queues or address handles is a device that RC programs can use; none of
/// anything else is no device.
fn check_limits(limits: &NicLimits) -> Result<(), Error> {
    let fields = [
        ("max_contexts", u64::from(limits.max_contexts)),
        ("max_pds", limits.max_pds.into()),
        ("max_mrs", limits.max_mrs.into()),
        ("max_mr_bytes", limits.max_mr_bytes),
        ("max_kept_bytes", limits.max_kept_bytes),
        ("max_guest_bytes", limits.max_guest_bytes),
        ("max_cqs", limits.max_cqs.into()),
        ("max_qps", limits.max_qps.into()),
    ];
    match fields.into_iter().find(|(_, value)| *value == 0) {
        Some((field, _)) => Err(Error::ZeroLimit { field }),
        None => Ok(()),
    }
}

fn check_address(address: IpAddr) -> Result<(), Error> {
    let why = match address {
        _ if address.is_unspecified() => "it is the unspecified address",
        _ if address.is_multicast() => "it is a multicast address",
        _ if address.is_loopback() => "it is a loopback address",
        IpAddr::V4(v4) if v4.is_broadcast() => "it is the broadcast address",
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => {
            "it is an IPv4-mapped address, write the IPv4 address instead"
        }
        _ => return Ok(()),
    };
    Err(Error::BadAddress { text: address.to_string(), why })
}

#[cfg(test)]
mod tests;
