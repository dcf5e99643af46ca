//! What becomes of the guests when another program takes this one's place.

use super::Daemon;
use crate::node::{Backend, Heirloom, Session};

impl<B: Backend> Daemon<B> {
    /// Whether another program could go on with everything; the NICs whose guests lose their device
    /// all the same, if that is what `force` asks for.
    ///
    /// # Errors
    /// What would be lost, and what to do.
    pub fn may_upgrade(&self, force: bool) -> Result<Vec<String>, String> {
        let lost = self.backend.would_lose();
        if !lost.is_empty() && !force {
            return Err(format!(
                "guests of {} would lose their device: only NICs of VMs on the daemon's own engine \
                 go on; stop them first, or use --force",
                lost.join(", ")
            ));
        }
        let known = self.known();
        let forgotten = known.registry.nics().find(|nic| !nic.configured);
        match forgotten.filter(|_| self.is_ephemeral()) {
            Some(nic) => Err(format!(
                "an ephemeral daemon forgets NICs that its configuration file does not name, such \
                 as {}; start it without --ephemeral",
                nic.name
            )),
            None => Ok(lost),
        }
    }

    /// Whether the next program reads what this one hands down, `reads` being what it says of that;
    /// the NICs whose guests lose their device all the same, if that is what `force` asks for.
    ///
    /// # Errors
    /// What would be lost, and what to do.
    pub fn is_read_by(&self, reads: Option<&str>, force: bool) -> Result<Vec<String>, String> {
        let (Some(reads), Some(ours)) = (reads, self.backend.saved_version()) else {
            return Ok(Vec::new());
        };
        if reads == ours {
            return Ok(Vec::new());
        }
        let names: Vec<String> = {
            let known = self.known();
            known.registry.nics().map(|nic| nic.name.clone()).collect()
        };
        let served = |name: &String| self.backend.status(name).session != Session::Absent;
        let lost: Vec<String> = names.into_iter().filter(served).collect();
        if lost.is_empty() || force {
            return Ok(lost);
        }
        Err(format!(
            "the next program reads saved state of version {reads}, and this one's is of version \
             {ours}: guests of {} would lose their device; stop them first, or use --force",
            lost.join(", ")
        ))
    }

    /// What the next program needs to go on; see [`Backend::hand_down`].
    pub fn hand_down(&self) -> Vec<Heirloom> {
        // Nobody changes anything any more.
        std::mem::forget(self.turns.whole());
        self.backend.hand_down()
    }
}
