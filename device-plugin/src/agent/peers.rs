//! Gives the daemon the peers of networks on RNICs: what the controller's lists say, and what a
//! network allows beyond it.
//!
//! The daemon is told what is different from what it was told before, with a count of the agent's
//! own: so it does not matter to it whose lists there were, and an agent that is started again, or
//! a daemon that is, begins with the whole. It is looked at in every round, at no cost as long as
//! neither lists nor networks nor the daemon are others.

use std::collections::BTreeMap;

use tokio::sync::Mutex;
use vhost_rdma_cluster_api::Cidr;
use vhost_rdma_cluster_api::peers::v1::{Held, Update};
use vhost_rdma_proto::v1;

use super::{Agent, State};
use crate::daemon::{Daemon, DaemonError};
use crate::holders::Kubelet;
use crate::member::Channel;
use crate::member::book::{BadUpdate, Book, Incoming, Place, Places};

/// A network on an RNIC, as the controller says it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reaching {
    name: String,
    uid: String,
    vni: u32,
    allow: Vec<Cidr>,
}

/// What is wanted, but for the lists.
type Wanted = (String, Vec<Reaching>);

/// What the daemon was told of a network.
#[derive(Debug)]
struct Told {
    uid: String,
    generation: u64,
    places: Places,
}

/// The lists, and what the daemon was told of them.
#[derive(Debug)]
pub(super) struct Teller {
    book: Book,
    /// Another one for each run of the agent.
    epoch: u64,
    generation: u64,
    told: BTreeMap<String, Told>,
    /// Which run of the daemon that was.
    instance: String,
    /// For which networks and run of the daemon `told` is all that is to be said.
    done: Option<Wanted>,
    /// Why the daemon did not take them last time.
    fault: String,
}

impl Teller {
    pub(super) fn new(book: Book) -> Mutex<Self> {
        let mut bytes = [0; 8];
        if let Err(error) = getrandom::fill(&mut bytes) {
            tracing::warn!(%error, "no random source; the daemon may take old peers for new ones");
        }
        let epoch = u64::from_ne_bytes(bytes);
        Mutex::new(Self {
            book,
            epoch,
            generation: 0,
            told: BTreeMap::new(),
            instance: String::new(),
            done: None,
            fault: String::new(),
        })
    }

    /// What the daemon should have.
    fn places(&self, network: &Reaching) -> Places {
        let allowed = network.allow.iter().map(|cidr| (*cidr, Place::default()));
        let mut places: Places = allowed.collect();
        let list = self.book.list(&network.uid).into_iter().flat_map(|list| &list.places);
        places.extend(list.map(|(cidr, place)| (*cidr, place.clone())));
        places
    }
}

/// What has to be said so that there is `new` where there was `old`; all of it if nothing was.
fn request(network: &str, old: Option<&Told>, new: &Places) -> v1::ReplacePeersRequest {
    let empty = Places::new();
    let there = old.map_or(&empty, |told| &told.places);
    let changed = new.iter().filter(|(cidr, place)| there.get(cidr) != Some(place));
    let text = |value: Option<String>| value.unwrap_or_default();
    let add = changed.map(|(cidr, place)| v1::Peer {
        address: cidr.to_string(),
        through: text(place.through.map(|through| through.to_string())),
        daemon: text(place.daemon.map(|daemon| daemon.to_string())),
        ..v1::Peer::default()
    });
    let gone = there.keys().filter(|cidr| !new.contains_key(cidr));
    v1::ReplacePeersRequest {
        network: network.to_owned(),
        add: add.collect(),
        remove: gone.map(ToString::to_string).collect(),
        base: old.map(|told| told.generation),
        version: None,
    }
}

/// Networks whose NICs leave the host.
fn reaching(state: &State) -> Vec<Reaching> {
    let networks = state.standing.spec.networks.iter().filter(|network| network.fabric.is_some());
    let of = networks.map(|network| Reaching {
        name: network.name.clone(),
        uid: network.uid.clone(),
        vni: network.vni,
        allow: network.allow.clone(),
    });
    of.collect()
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// An event of the node, whose text is the news.
    pub(crate) fn tells(&self, reason: &'static str, note: &str, warning: bool) {
        self.events.configuration(reason, note, warning);
    }

    /// The node's part in the channel between nodes, if it takes part.
    #[must_use]
    pub const fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    /// Something of the channel is to be reported.
    pub async fn channel_changed(&self) {
        let state = self.state.lock().await;
        self.note(&state);
    }

    /// Has the daemon read its files again.
    ///
    /// # Errors
    /// It does not answer, or refuses the file. What else the file asks for and could not be had is
    /// the operator's business, and in both logs.
    pub async fn reload_daemon(&self) -> Result<(), DaemonError> {
        let v1::ReloadResponse { changed: _, kept, failed } = self.daemon.reload().await?;
        for why in kept {
            tracing::warn!(why, "the daemon keeps what it had");
        }
        for why in failed {
            tracing::error!(why, "the daemon could not take over what its file asks for");
        }
        Ok(())
    }

    /// The lists that the controller need not send again.
    pub async fn held_peers(&self) -> Vec<Held> {
        let hosted = self.reaching().await;
        let teller = self.teller.lock().await;
        let hosts = |held: &Held| hosted.iter().any(|of| of.uid == held.network_uid);
        teller.book.held().into_iter().filter(hosts).collect()
    }

    async fn reaching(&self) -> Vec<Reaching> {
        reaching(&*self.state.lock().await)
    }

    /// Takes what the controller sends; true if a list is complete by it.
    ///
    /// # Errors
    /// It is not good, and nothing has changed.
    pub async fn take_peers(
        &self,
        incoming: &mut Incoming,
        update: Update,
    ) -> Result<bool, BadUpdate> {
        // One that is being left is still this node's, as far as the controller has heard.
        let hosted: Vec<(String, String)> = {
            let state = self.state.lock().await;
            let leaving = state.standing.leaving().map(|(uid, of)| (uid.clone(), of.name.clone()));
            reaching(&state).into_iter().map(|of| (of.uid, of.name)).chain(leaving).collect()
        };
        let hosts = |uid: &str, name: &str| hosted.iter().any(|(u, n)| u == uid && n == name);
        let mut teller = self.teller.lock().await;
        let complete = teller.book.take(incoming, update, hosts)?;
        if complete {
            teller.done = None;
        }
        Ok(complete)
    }

    /// Writes the lists down and tells the daemon.
    ///
    /// # Errors
    /// The disk is full or broken; the daemon knows nothing of them then.
    pub async fn keep_peers(&self) -> std::io::Result<()> {
        let hosted: Vec<String> = {
            let state = self.state.lock().await;
            state.standing.hosted.keys().cloned().collect()
        };
        let book = {
            let mut teller = self.teller.lock().await;
            teller.book.retain(|uid| hosted.iter().any(|of| of == uid));
            teller.book.clone()
        };
        let dir = self.state_dir.clone();
        let entries = book.entries();
        tokio::task::spawn_blocking(move || book.write(&dir))
            .await
            .map_err(std::io::Error::other)??;
        if let Some(channel) = &self.channel {
            channel.count(entries);
        }
        self.tell_peers().await;
        // For metrics, and a condition that says whether the daemon took them.
        self.channel_changed().await;
        Ok(())
    }

    /// Tells the daemon what it does not know yet. What fails is tried again in the next round.
    pub async fn tell_peers(&self) {
        let state = self.state.lock().await;
        let Some(view) = &state.daemon.view else { return };
        let wanted: Wanted = (view.instance.clone(), reaching(&state));
        // With the state: a network that is named now is not removed from the daemon before this is
        // over (`leave_networks`), and made again by it. If somebody is at it, the next round is.
        let Ok(mut teller) = self.teller.try_lock() else { return };
        drop(state);
        if teller.done.as_ref() == Some(&wanted) {
            return;
        }
        if teller.instance != wanted.0 {
            // Another run of the daemon: it may know anything.
            teller.told.clear();
            teller.instance.clone_from(&wanted.0);
        }
        let told = self.tell(&mut teller, &wanted.1).await;
        if let Some(channel) = &self.channel {
            channel.refused(told.as_ref().err().map(ToString::to_string));
        }
        match told {
            Ok(()) => {
                teller.done = Some(wanted);
                teller.fault.clear();
            }
            Err(error) => {
                teller.done = None;
                // Once: it may be away for long.
                let why = error.to_string();
                if teller.fault != why {
                    tracing::warn!(why, "the daemon has not taken the peers; it is tried again");
                    teller.fault = why;
                }
            }
        }
    }

    /// Tells all networks, whatever becomes of one of them; the first fault is the answer.
    async fn tell(&self, teller: &mut Teller, networks: &[Reaching]) -> Result<(), DaemonError> {
        teller.told.retain(|name, _| networks.iter().any(|of| of.name == *name));
        let mut done = Ok(());
        for network in networks {
            done = done.and(self.tell_one(teller, network).await);
        }
        done
    }

    async fn tell_one(&self, teller: &mut Teller, network: &Reaching) -> Result<(), DaemonError> {
        let places = teller.places(network);
        let old = teller.told.get(&network.name).filter(|told| told.uid == network.uid);
        if old.is_some_and(|told| told.places == places) {
            return Ok(());
        }
        if old.is_none() {
            self.daemon.ensure_network(&network.name, Some(network.vni)).await?;
        }
        let (epoch, generation) = (teller.epoch, teller.generation + 1);
        let version = Some(v1::PeersVersion { epoch, generation });
        let mut request =
            v1::ReplacePeersRequest { version, ..request(&network.name, old, &places) };
        let mut done = self.daemon.replace_peers(request.clone()).await;
        if request.base.is_some() && matches!(done, Err(DaemonError::Refused(_))) {
            // It was started again, or somebody else spoke.
            request =
                v1::ReplacePeersRequest { version, ..self::request(&network.name, None, &places) };
            done = self.daemon.replace_peers(request).await;
        }
        teller.generation = generation;
        teller.told.remove(&network.name);
        done?;
        let told = Told { uid: network.uid.clone(), generation, places };
        teller.told.insert(network.name.clone(), told);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(of: &[(&str, Option<&str>)]) -> Places {
        let place = |through: &Option<&str>| Place {
            through: through.map(|text| text.parse().unwrap()),
            daemon: None,
        };
        of.iter().map(|(cidr, through)| (cidr.parse().unwrap(), place(through))).collect()
    }

    #[test]
    fn what_is_said_is_what_is_different() {
        let old = places(&[("10.0.0.0/26", None), ("10.0.1.0/26", None), ("10.0.2.0/26", None)]);
        let new = places(&[
            ("10.0.0.0/26", None),
            ("10.0.1.0/26", Some("192.0.2.1")),
            ("10.0.3.0/26", None),
        ]);
        let told = Told { uid: "u".to_owned(), generation: 7, places: old };
        let said = request("red", Some(&told), &new);
        let added: Vec<&str> = said.add.iter().map(|peer| peer.address.as_str()).collect();
        assert_eq!(added, ["10.0.1.0/26", "10.0.3.0/26"]);
        assert_eq!((said.remove, said.base), (vec!["10.0.2.0/26".to_owned()], Some(7)));
        let whole = request("red", None, &new);
        assert_eq!((whole.add.len(), whole.remove.len(), whole.base), (3, 0, None));
    }
}
