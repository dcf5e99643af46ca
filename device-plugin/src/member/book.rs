//! Where the addresses of other nodes are: the lists that the controller sends, one for each
//! network, and the last whole state of each on the disk.
//!
//! A list comes whole or as a change of what is there, in one message or in several, and counts
//! when its last message has come: half a list is none. What is sent is looked at as if anybody had
//! sent it: a network that the node does not host, an entry that is no range of addresses, a change
//! of a list that is not there, or more than a network can have end the stream, and nothing has
//! changed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde::{Deserialize, Serialize};
use vhost_rdma_cluster_api::Cidr;
use vhost_rdma_cluster_api::peers::Digest;
use vhost_rdma_cluster_api::peers::v1::{Held, PeerEntry, Update};

use crate::sealed::Sealed;

/// Entries of one network, at most: the daemon takes no more.
pub const ENTRIES_MAX: usize = 1 << 16;
const HEADER: &str = "vhost-rdma-agent-peers 1\n";
const FILE: &str = "peers";
/// A longer one was not written by us.
const SIZE_MAX: u64 = 256 << 20;

/// Where a block of addresses is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The host's address, where that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub through: Option<IpAddr>,
    /// The daemon there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon: Option<SocketAddr>,
}

/// Blocks of addresses and where they are.
pub type Places = BTreeMap<Cidr, Place>;

/// The list of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// Whose count it is.
    pub epoch: u64,
    /// The number of the list.
    pub generation: u64,
    /// What it says.
    #[serde(with = "pairs")]
    pub places: Places,
}

impl List {
    /// What it says, as the controller works it out too.
    fn digest(&self) -> Digest {
        let text = |at: Option<String>| at.unwrap_or_default();
        let of = self.places.iter().map(|(cidr, Place { through, daemon })| {
            let through = text(through.map(|at| at.to_string()));
            Digest::of(cidr, &through, &text(daemon.map(|at| at.to_string())))
        });
        of.fold(Digest::default(), Digest::and)
    }
}

/// JSON has texts for keys only.
mod pairs {
    use serde::{Deserialize as _, Deserializer, Serializer};
    use vhost_rdma_cluster_api::Cidr;

    use super::{Place, Places};

    pub(super) fn serialize<S: Serializer>(places: &Places, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(places)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Places, D::Error> {
        Ok(Vec::<(Cidr, Place)>::deserialize(from)?.into_iter().collect())
    }
}

/// Why an update is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUpdate {
    /// Another node's business.
    #[error("the controller speaks of the network {0:?}, which this node does not host")]
    Stranger(String),
    /// Not an address, a range, an endpoint.
    #[error("the controller sent {0:?}, which is no {1}")]
    Form(String, &'static str),
    /// Twice in one list.
    #[error("the controller sent {0} twice in one list")]
    Twice(Cidr),
    /// A change of something else.
    #[error("the controller sent a change of a list that is not here")]
    Base,
    /// Of two lists at once.
    #[error("the controller sent a part of another list before the end of the first")]
    Mixed,
    /// Too many.
    #[error("the controller sent a list of more than {ENTRIES_MAX} entries")]
    TooMany,
}

/// A list that has begun to come.
#[derive(Debug)]
struct Partial {
    whole: bool,
    epoch: u64,
    generation: u64,
    add: Places,
    remove: BTreeSet<Cidr>,
}

/// Lists that have begun to come on one stream; they end with it.
#[derive(Debug, Default)]
pub struct Incoming(BTreeMap<String, Partial>);

/// All lists, by the networks' UIDs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Book {
    lists: BTreeMap<String, List>,
}

impl Book {
    fn file(state_dir: &Path) -> Sealed {
        Sealed::new(state_dir, FILE, HEADER, SIZE_MAX)
    }

    /// The last one that was written; one that is damaged is not believed.
    #[must_use]
    pub fn read(state_dir: &Path) -> Self {
        let read = Self::file(state_dir).read();
        let read = read.unwrap_or_else(|error| {
            tracing::error!(%error, "the last list of peers is not believed");
            None
        });
        read.unwrap_or_default()
    }

    /// Writes it down.
    ///
    /// # Errors
    /// The disk is full or broken.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        Self::file(state_dir).write(self)
    }

    /// What the controller is told.
    #[must_use]
    pub fn held(&self) -> Vec<Held> {
        let held = self.lists.iter().map(|(uid, list)| Held {
            network_uid: uid.clone(),
            epoch: list.epoch,
            generation: list.generation,
            digest: list.digest().to_bytes(),
        });
        held.collect()
    }

    /// The list of a network.
    #[must_use]
    pub fn list(&self, uid: &str) -> Option<&List> {
        self.lists.get(uid)
    }

    /// How many entries there are.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.lists.values().map(|list| list.places.len()).sum()
    }

    /// Forgets networks that the node has nothing to do with any more; false if there are none.
    pub fn retain(&mut self, hosted: impl Fn(&str) -> bool) -> bool {
        let before = self.lists.len();
        self.lists.retain(|uid, _| hosted(uid));
        self.lists.len() < before
    }

    /// Takes an update of a network that the node hosts, if `hosts` says so of its UID and name;
    /// true if a list is complete with it.
    ///
    /// # Errors
    /// It is not good, and nothing has changed. The stream should end.
    pub fn take(
        &mut self,
        incoming: &mut Incoming,
        update: Update,
        hosts: impl Fn(&str, &str) -> bool,
    ) -> Result<bool, BadUpdate> {
        if !hosts(&update.network_uid, &update.network) {
            return Err(BadUpdate::Stranger(update.network));
        }
        let (uid, more) = (update.network_uid.clone(), update.more);
        if update.same {
            if incoming.0.contains_key(&uid) {
                return Err(BadUpdate::Mixed);
            }
            let (epoch, generation) = (update.epoch, update.generation);
            let list = self.lists.get_mut(&uid).ok_or(BadUpdate::Base)?;
            (list.epoch, list.generation) = (epoch, generation);
            return Ok(true);
        }
        let partial = incoming.0.entry(uid.clone()).or_insert_with(|| Partial {
            whole: update.whole,
            epoch: update.epoch,
            generation: update.generation,
            add: Places::new(),
            remove: BTreeSet::new(),
        });
        partial.extend(update)?;
        if more {
            return Ok(false);
        }
        let Some(partial) = incoming.0.remove(&uid) else { return Ok(false) };
        let list = partial.onto(self.lists.get(&uid))?;
        self.lists.insert(uid, list);
        Ok(true)
    }
}

impl Partial {
    fn extend(&mut self, update: Update) -> Result<(), BadUpdate> {
        let same = (self.whole, self.epoch, self.generation)
            == (update.whole, update.epoch, update.generation);
        if !same {
            return Err(BadUpdate::Mixed);
        }
        let most = ENTRIES_MAX.saturating_sub(self.add.len().max(self.remove.len()));
        if update.add.len() > most || update.remove.len() > most {
            return Err(BadUpdate::TooMany);
        }
        for entry in update.add {
            let (cidr, place) = place(entry)?;
            if self.add.insert(cidr, place).is_some() {
                return Err(BadUpdate::Twice(cidr));
            }
        }
        for text in update.remove {
            self.remove.insert(text.parse().map_err(|_| BadUpdate::Form(text, "address range"))?);
        }
        Ok(())
    }

    fn onto(self, held: Option<&List>) -> Result<List, BadUpdate> {
        let Self { whole, epoch, generation, add, remove } = self;
        if whole {
            return Ok(List { epoch, generation, places: add });
        }
        let follows = |held: &&List| held.epoch == epoch && held.generation < generation;
        let mut places = held.filter(follows).ok_or(BadUpdate::Base)?.places.clone();
        places.retain(|cidr, _| !remove.contains(cidr));
        places.extend(add);
        if places.len() > ENTRIES_MAX {
            return Err(BadUpdate::TooMany);
        }
        Ok(List { epoch, generation, places })
    }
}

fn place(entry: PeerEntry) -> Result<(Cidr, Place), BadUpdate> {
    let PeerEntry { cidr, through, daemon } = entry;
    let cidr = cidr.parse().map_err(|_| BadUpdate::Form(cidr, "address range"))?;
    let through = Some(through).filter(|text| !text.is_empty());
    let through = through.map(|text| text.parse().map_err(|_| BadUpdate::Form(text, "address")));
    let daemon = Some(daemon).filter(|text| !text.is_empty());
    let daemon = daemon.map(|text| text.parse().map_err(|_| BadUpdate::Form(text, "endpoint")));
    Ok((cidr, Place { through: through.transpose()?, daemon: daemon.transpose()? }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(cidr: &str, through: &str) -> PeerEntry {
        PeerEntry { cidr: cidr.to_owned(), through: through.to_owned(), daemon: String::new() }
    }

    fn update(generation: u64, whole: bool, add: &[&str], remove: &[&str]) -> Update {
        Update {
            network: "red".to_owned(),
            network_uid: "u".to_owned(),
            epoch: 1,
            generation,
            whole,
            add: add.iter().map(|cidr| entry(cidr, "192.0.2.1")).collect(),
            remove: remove.iter().map(|cidr| (*cidr).to_owned()).collect(),
            more: false,
            same: false,
        }
    }

    fn hosts(uid: &str, network: &str) -> bool {
        (uid, network) == ("u", "red")
    }

    fn shown(book: &Book) -> Vec<String> {
        let list = book.list("u").into_iter().flat_map(|list| list.places.keys());
        list.map(ToString::to_string).collect()
    }

    #[test]
    fn a_list_counts_when_it_is_all_there() {
        let (mut book, mut incoming) = (Book::default(), Incoming::default());
        let mut take = |update| book.take(&mut incoming, update, hosts);
        let half = Update { more: true, ..update(7, true, &["10.0.0.0/26"], &[]) };
        assert_eq!(take(half.clone()), Ok(false));
        assert_eq!(take(update(7, true, &["10.0.0.64/26"], &[])), Ok(true));
        assert_eq!(shown(&book), ["10.0.0.0/26", "10.0.0.64/26"]);
        // Half of one, and then the stream ends.
        let mut cut = Incoming::default();
        let other = Update { generation: 8, ..half };
        assert_eq!(book.take(&mut cut, other, hosts), Ok(false));
        drop(cut);
        let mut next = Incoming::default();
        let change = update(8, false, &["10.0.1.0/26"], &["10.0.0.0/26"]);
        assert_eq!(book.take(&mut next, change, hosts), Ok(true));
        assert_eq!(shown(&book), ["10.0.0.64/26", "10.0.1.0/26"]);
        assert_eq!(book.held()[0].generation, 8);
        assert!(!book.retain(|uid| uid == "u") && book.retain(|_| false));
        assert_eq!(book.entries(), 0);
    }

    #[test]
    fn a_controller_that_begins_anew_need_not_send_what_is_as_it_was() {
        let (mut book, mut incoming) = (Book::default(), Incoming::default());
        let same = Update { epoch: 2, same: true, ..update(3, false, &[], &[]) };
        let taken = book.take(&mut incoming, same.clone(), hosts);
        assert_eq!(taken, Err(BadUpdate::Base), "of a list that is not here");
        let whole = update(7, true, &["10.0.0.0/26", "10.0.0.64/26"], &[]);
        book.take(&mut incoming, whole, hosts).unwrap();
        let before = book.held()[0].clone();
        assert_eq!(book.take(&mut incoming, same.clone(), hosts), Ok(true));
        let now = book.held()[0].clone();
        assert_eq!((now.epoch, now.generation), (2, 3));
        assert_eq!(now.digest, before.digest);
        assert_eq!(shown(&book), ["10.0.0.0/26", "10.0.0.64/26"]);
        let next = Update { epoch: 2, ..update(4, false, &[], &["10.0.0.0/26"]) };
        let half = Update { more: true, ..next.clone() };
        assert_eq!(book.take(&mut incoming, half, hosts), Ok(false));
        assert_eq!(book.take(&mut incoming, same, hosts), Err(BadUpdate::Mixed));
        assert_eq!(book.take(&mut Incoming::default(), next, hosts), Ok(true));
        let one = Digest::of(&"10.0.0.64/26".parse().unwrap(), "192.0.2.1", "");
        assert_eq!(book.held()[0].digest, one.to_bytes());
    }

    #[test]
    fn what_is_not_good_changes_nothing() {
        let mut book = Book::default();
        book.take(&mut Incoming::default(), update(7, true, &["10.0.0.0/26"], &[]), hosts).unwrap();
        let before = book.clone();
        let many: Vec<PeerEntry> = (0..=ENTRIES_MAX)
            .map(|n| entry(&format!("fd00::{:x}:{:x}/128", n >> 16, n & 0xffff), ""))
            .collect();
        let good = update(8, true, &["10.0.1.0/26"], &[]);
        let daemon = |text: &str| PeerEntry { daemon: text.to_owned(), ..entry("10.0.1.0/26", "") };
        let with = |add: Vec<PeerEntry>| Update { add, ..good.clone() };
        let bad = [
            ("another network", Update { network_uid: "other".to_owned(), ..good.clone() }),
            ("another name", Update { network: "blue".to_owned(), ..good.clone() }),
            ("no range", with(vec![entry("10.0.0.300/26", "")])),
            ("bits behind", with(vec![entry("10.0.0.1/26", "")])),
            ("no address", with(vec![entry("10.0.1.0/26", "host")])),
            ("no endpoint", with(vec![daemon("host:1")])),
            ("no port", with(vec![daemon("192.0.2.1")])),
            ("twice", with(vec![entry("10.0.1.0/26", ""), entry("10.0.1.0/26", "")])),
            ("too many", with(many.clone())),
            ("another epoch", Update { epoch: 2, ..update(8, false, &["10.0.1.0/26"], &[]) }),
            ("not after", update(7, false, &["10.0.1.0/26"], &[])),
            ("bad removal", update(8, false, &[], &["everything"])),
        ];
        for (what, update) in bad {
            let taken = book.take(&mut Incoming::default(), update, hosts);
            assert!(taken.is_err(), "{what}");
            assert_eq!(book, before, "{what}");
        }
        // A flood of parts is not kept either.
        let mut incoming = Incoming::default();
        let part = |from: usize| {
            let add = many[from..from + 20_000].to_vec();
            Update { more: true, ..with(add) }
        };
        let taken: Vec<bool> = [0, 20_000, 40_000]
            .map(|from| book.take(&mut incoming, part(from), hosts).is_ok())
            .into();
        assert_eq!(taken, [true; 3]);
        let more = Update { more: true, ..with(many[60_000 - 1..].to_vec()) };
        assert!(book.take(&mut incoming, more, hosts).is_err());
        let mut incoming = Incoming::default();
        book.take(&mut incoming, part(0), hosts).unwrap();
        let other = Update { generation: 9, ..part(20_000) };
        assert_eq!(book.take(&mut incoming, other, hosts), Err(BadUpdate::Mixed));
        assert_eq!(book, before);
    }

    #[test]
    fn what_was_written_is_read_and_what_is_damaged_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Book::read(dir.path()), Book::default());
        let mut book = Book::default();
        let mut full = update(7, true, &["10.0.0.0/26", "fd00::/64"], &[]);
        full.add[0].daemon = "[fd00::1]:4790".to_owned();
        book.take(&mut Incoming::default(), full, hosts).unwrap();
        book.write(dir.path()).unwrap();
        assert_eq!(Book::read(dir.path()), book);
        let good = std::fs::read(dir.path().join(FILE)).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(dir.path().join(FILE), &bad).unwrap();
            assert_eq!(Book::read(dir.path()), Book::default(), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_nothing_panics_and_a_refusal_changes_nothing(
            updates in prop::collection::vec((
                0..3u64, 0..4u64, any::<bool>(), any::<bool>(),
                prop::collection::vec("(10\\.0\\.[01]\\.0/2[46]|x)", 0..3),
                prop::collection::vec("(10\\.0\\.[01]\\.0/24|)", 0..2),
            ), 0..12),
        ) {
            let (mut book, mut incoming) = (Book::default(), Incoming::default());
            for (epoch, generation, whole, more, add, remove) in updates {
                let add = add.iter().map(|cidr| entry(cidr, "")).collect();
                let update = Update {
                    epoch, generation, whole, more, add, remove, ..update(0, false, &[], &[])
                };
                let before = book.clone();
                match book.take(&mut incoming, update, hosts) {
                    Ok(true) => prop_assert_eq!(book.list("u").unwrap().generation, generation),
                    Ok(false) => prop_assert_eq!(&book, &before),
                    Err(_) => {
                        prop_assert_eq!(&book, &before);
                        incoming = Incoming::default();
                    }
                }
            }
        }
    }
}
