//! The copy's part that concerns certificates: the authority, its roots, requests.

#![allow(
    clippy::needless_pass_by_value,
    reason = "what changed is handed over: its last copy ends with the change"
)]

use super::{Authority, Key, Mono, Request, Roots, World};

impl World {
    /// Says what time it was when the process started, in seconds since 1970.
    pub fn set_epoch(&mut self, seconds: u64) {
        self.epoch = seconds;
    }

    /// The time on the wall, by a clock that does not jump.
    pub(super) fn wall(&self, now: Mono) -> u64 {
        self.epoch.saturating_add(now.as_secs())
    }

    /// The version of the authority; empty if there is none.
    #[must_use]
    pub fn authority_version(&self) -> &str {
        self.authority.as_ref().map(|authority| authority.version.as_str()).unwrap_or_default()
    }

    /// When the root that signs ends, in seconds since 1970.
    #[must_use]
    pub fn root_until(&self) -> Option<u64> {
        Some(self.authority.as_ref()?.current.as_ref()?.until)
    }

    /// Requests of a node, which may have the addresses now that they wait for.
    pub(super) fn mark_requests(&mut self, node: &str) {
        let requests: Vec<Key> =
            self.index.requests_of(node).map(|name| Key::Request(name.to_owned())).collect();
        self.mark(requests);
    }

    pub(super) fn set_authority(&mut self, new: Option<Authority>) {
        self.authority = new;
        self.mark([Key::Authority]);
        self.mark_all_requests();
    }

    pub(super) fn set_roots(&mut self, new: Option<Roots>, now: Mono) {
        let same =
            |a: &Roots, b: &Roots| (&a.certificates, &a.current) == (&b.certificates, &b.current);
        let unchanged = matches!((&self.roots, &new), (Some(a), Some(b)) if same(a, b));
        if !unchanged {
            self.published_since = new.is_some().then_some(now);
        }
        self.roots = new;
        self.mark([Key::Authority]);
        self.mark_all_requests();
    }

    fn mark_all_requests(&mut self) {
        let open = self.requests.values().filter(|request| !request.done);
        let keys: Vec<Key> = open.map(|request| Key::Request(request.name.clone())).collect();
        self.mark(keys);
    }

    pub(super) fn set_request(&mut self, name: &str, new: Option<Request>, now: Mono) {
        let old = match &new {
            Some(request) => self.requests.insert(name.to_owned(), request.clone()),
            None => self.requests.remove(name),
        };
        for (request, present) in [(&old, false), (&new, true)] {
            let asked = request.as_ref().filter(|r| !r.done).and_then(|r| r.asked.as_ref().ok());
            if let Some(asked) = asked {
                self.index.set_request(&asked.node, name.to_owned(), present);
            }
        }
        if let Some(request) = new.as_ref().filter(|request| !request.done) {
            if self.asked_since.get(name).is_none_or(|(known, _)| *known != request.uid) {
                self.asked_since.insert(name.to_owned(), (request.uid.clone(), now));
            }
            self.mark([Key::Request(name.to_owned())]);
        } else {
            self.asked_since.remove(name);
        }
    }
}
