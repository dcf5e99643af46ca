//! The NICs that a shard has: software's, which it runs among their peers, and those that bring
//! their own verbs.

use super::{NicId, Shard};
use crate::nic::doorbell::Post;
use crate::nic::on_shard::{OnShard, Provided};
use crate::soft::SoftNic;

/// A NIC of a shard.
#[derive(Debug)]
pub(super) enum AnyNic {
    /// The engine's own.
    Own(Box<SoftNic>),
    /// One that brings its verbs.
    Provided(Box<dyn Provided>),
}

impl AnyNic {
    /// What both can.
    #[inline]
    pub(super) fn on_shard(&mut self) -> &mut dyn OnShard {
        match self {
            Self::Own(nic) => nic.as_mut(),
            Self::Provided(nic) => nic.as_mut(),
        }
    }

    /// One of the engine's own, to look at.
    pub(super) fn own(&self) -> Option<&SoftNic> {
        match self {
            Self::Own(nic) => Some(nic),
            Self::Provided(_) => None,
        }
    }

    /// The same, to look at.
    #[inline]
    pub(super) fn on_shard_ref(&self) -> &dyn OnShard {
        match self {
            Self::Own(nic) => nic.as_ref(),
            Self::Provided(nic) => nic.as_ref(),
        }
    }

    /// See [`OnShard::scan`].
    #[inline]
    pub(super) fn scan(&mut self, posts: &mut Vec<Post>, brief: bool) -> bool {
        match self {
            Self::Own(nic) => nic.scan(posts, brief),
            Self::Provided(nic) => nic.scan(posts, brief),
        }
    }

    /// Whether there are completions or events that the guest has not been told of.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        match self {
            Self::Own(nic) => OnShard::has_news(nic.as_ref()),
            Self::Provided(nic) => nic.has_news(),
        }
    }
}

impl Shard {
    /// Adds a NIC that brings its own verbs; it waits for INIT.
    pub fn add_provided(&mut self, mut nic: Box<dyn Provided>) -> NicId {
        nic.set_meter(self.meter.clone());
        let id = self.new_number();
        self.slots.put(id, AnyNic::Provided(nic));
        id
    }

    /// Ends connections of a provider's NIC to peers that it may not reach any more.
    pub fn peers_changed(&mut self, id: NicId) {
        if let Some(AnyNic::Provided(nic)) = self.slots.any_mut(id) {
            nic.peers_changed();
        }
    }
}
