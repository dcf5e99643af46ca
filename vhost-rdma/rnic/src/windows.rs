//! The memory windows of one NIC: what each shows, what it will show when all that was posted has
//! been executed, and which QPs it ends with.
//!
//! Whose key it is, which domain it belongs to and what a bind may show is decided here, before the
//! hardware is asked: providers take the keys of a bind as they come, and rdma_rxe compares no
//! domain of the region (rxe_mw.c, rxe_check_bind_mw). So a guest can bind its own regions to its
//! own windows only.
//!
//! Work requests execute later than they are posted, and may be flushed. A window's state here is
//! what it will be when all that was posted has been executed; each change under way keeps the
//! state before it, for the case that it fails. A region stays while any of these states shows it.
//! While changes are under way on one QP no other QP changes the window: in which order they would
//! be executed nobody knows, and what the hardware lets a window show must never be more than what
//! is known here.

use std::collections::VecDeque;

use vhost_rdma_engine::nic::owned_numbers::{LINKS, OwnedNumbers};
use vhost_rdma_engine::nic::roster::{Roster, Walk};
use vhost_rdma_engine::nic::shards::Shards;
use vhost_rdma_engine::soft::window::with_low_byte;
use virtio_rdma_abi::{SqWqe, access, mw_type};

use super::region::Mr;
use super::verbs::{HostMr, HostMw, Subject};

/// What a window shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Binding {
    /// The region's lkey.
    region: u32,
    /// The QP that a window of type 2 belongs to.
    qpn: u32,
}

/// What a work request found, for the case that it fails.
#[derive(Clone, Copy, Debug)]
struct Change {
    at: At,
    /// The QP that it is on.
    qpn: u32,
    key: u32,
    binding: Option<Binding>,
}

/// A work request: the life of its queue, and its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) serial: u32,
    pub(super) index: u32,
}

/// A memory window.
#[derive(Debug)]
pub(super) struct Window {
    ctx: u32,
    pub(super) pdn: u32,
    kind: u32,
    key: u32,
    /// `None`: taken from the hardware before its time.
    pub(super) host: Option<HostMw>,
    binding: Option<Binding>,
    /// Oldest first.
    under_way: VecDeque<Change>,
}

/// Bytes of a window, and of its place among those that its context, region and QPs have.
pub(super) const WINDOW: usize = size_of::<Window>() + 3 * 16 + LINKS;
/// Bytes of a change that is under way.
pub(super) const CHANGE: usize = size_of::<Change>();
/// Bytes of the list of a QP's windows.
pub(super) const LIST: usize = size_of::<Few>();

/// Windows of one QP.
type Few = Roster<4>;

impl Window {
    /// One of a context and a domain that shows nothing.
    pub(super) fn new((ctx, pdn): (u32, u32), kind: u32, (host, key): (HostMw, u32)) -> Self {
        let (host, binding, under_way) = (Some(host), None, VecDeque::new());
        Self { ctx, pdn, kind, key, host, binding, under_way }
    }

    fn states(&self) -> impl Iterator<Item = Binding> {
        self.binding.into_iter().chain(self.under_way.iter().filter_map(|change| change.binding))
    }

    /// Whether `poster` may change it now.
    fn is_open_to(&self, poster: Poster) -> bool {
        // All of them are of one QP.
        self.under_way.front().is_none_or(|change| change.at.serial == poster.at.serial)
    }

    /// The QPs whose end is its own: that a window of type 2 was bound by, and that its changes are
    /// under way on. Never more than one of each, since only one QP at a time changes it.
    fn qps(&self) -> [Option<u32>; 2] {
        if self.host.is_none() {
            return [None; 2];
        }
        let first = self.under_way.front();
        let settled = first.map_or(self.binding, |change| change.binding);
        let owner = settled.filter(|_| self.kind == mw_type::TYPE2).map(|binding| binding.qpn);
        let poster = first.map(|change| change.qpn);
        [owner.filter(|_| owner != poster), poster]
    }

    /// Takes note of a work request that will leave it so.
    fn change(&mut self, poster: Poster, key: u32, binding: Option<Binding>) {
        let Poster { at, qpn, .. } = poster;
        self.under_way.push_back(Change { at, qpn, key: self.key, binding: self.binding });
        self.key = key;
        self.binding = binding;
    }

    fn bind(
        &mut self,
        poster: Poster,
        wqe: &SqWqe,
        mrs: &Shards<Mr>,
    ) -> Result<(Subject, Option<Binding>), Denied> {
        let (present, new, len) = (wqe.imm.get(), wqe.rkey.get(), wqe.arg0.get());
        let its_own = self.key == present && self.pdn == poster.pdn;
        let host = self.host.filter(|_| its_own && self.is_open_to(poster)).ok_or(Denied)?;
        // IBTA o10-36.2.2: a type 1 window has addresses.
        let based = self.kind == mw_type::TYPE2 || wqe.aux.get() & access::ZERO_BASED == 0;
        // IBTA o10-37.2.34: a type 2 window is bound from the free state only, and never with
        // length 0.
        let is_free = self.kind == mw_type::TYPE1 || (self.binding.is_none() && len != 0);
        if !is_free || !based {
            return Err(Denied);
        }
        let region = u32::try_from(wqe.arg1.get() & u64::from(u32::MAX)).map_err(|_| Denied)?;
        let part: Option<HostMr> = if len == 0 {
            None
        } else {
            let mr = mrs.get(&region).filter(|mr| mr.pdn == poster.pdn).ok_or(Denied)?;
            Some(mr.bindable((wqe.remote_addr.get(), len), wqe.aux.get()).ok_or(Denied)?)
        };
        let binding = part.map(|_| Binding { region, qpn: poster.qpn });
        self.change(poster, with_low_byte(present, new), binding);
        Ok((Subject::Window(host, part), binding))
    }
}

/// How many states of windows show a region, by its lkey.
#[derive(Debug, Default)]
struct Shown(Shards<u32>);

impl Shown {
    fn more(&mut self, binding: Option<Binding>) {
        let Some(Binding { region, .. }) = binding else { return };
        if let Some(count) = self.0.get_mut(&region) {
            *count += 1;
        } else {
            self.0.insert(region, 1);
        }
    }

    fn less(&mut self, binding: Option<Binding>) {
        let Some(Binding { region, .. }) = binding else { return };
        let Some(count) = self.0.get_mut(&region) else { return };
        *count -= 1;
        if *count == 0 {
            self.0.remove(&region);
        }
    }
}

/// The QP that a work request is posted on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Poster {
    pub(super) qpn: u32,
    pub(super) pdn: u32,
    pub(super) at: At,
}

/// It may not be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Denied;

/// The windows of one NIC, by the upper 24 bits of their keys. There may be as many as regions:
/// nothing here looks at all of them, and no table grows in one go.
#[derive(Debug, Default)]
pub(super) struct Windows {
    by_number: Shards<Window>,
    numbers: OwnedNumbers,
    shown: Shown,
    /// Windows that end with a QP, by its number.
    of_qp: Shards<Few>,
}

impl Windows {
    /// The number of the window that a key names.
    pub(super) const fn number(key: u32) -> u32 {
        key >> 8
    }

    pub(super) const fn len(&self) -> usize {
        self.by_number.len()
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.by_number.contains_key(&number)
    }

    /// Whose a window is.
    pub(super) fn context(&self, number: u32) -> Option<u32> {
        self.by_number.get(&number).map(|window| window.ctx)
    }

    /// One of a context's.
    pub(super) fn first_of(&self, ctx: u32) -> Option<u32> {
        self.numbers.first_of(ctx)
    }

    /// A walk over all.
    pub(super) fn walk(&self) -> Walk {
        self.numbers.all().walk()
    }

    /// The next of a walk.
    pub(super) fn next(&self, walk: &mut Walk) -> Option<u32> {
        walk.next(self.numbers.all())
    }

    /// A walk over those that end with a QP.
    pub(super) fn walk_of(&self, qpn: u32) -> Walk {
        self.of_qp.get(&qpn).map(Roster::walk).unwrap_or_default()
    }

    /// The next of such a walk.
    pub(super) fn next_of(&self, qpn: u32, walk: &mut Walk) -> Option<u32> {
        walk.next(self.of_qp.get(&qpn)?)
    }

    /// Whether a change of a window is under way in this life of a QP.
    pub(super) fn waits_for(&self, number: u32, serial: u32) -> bool {
        let window = self.by_number.get(&number);
        window.and_then(|w| w.under_way.front()).is_some_and(|change| change.at.serial == serial)
    }

    /// Whether a window shows a region whose memory is gone, or may do so.
    pub(super) fn shows_lost(&self, number: u32, mrs: &Shards<Mr>) -> bool {
        let lost = |binding: Binding| mrs.get(&binding.region).is_none_or(Mr::is_lost);
        self.by_number.get(&number).is_some_and(|window| window.states().any(lost))
    }

    /// Whether one shows a region, or may do so.
    pub(super) fn show(&self, region: u32) -> bool {
        self.shown.0.contains_key(&region)
    }

    /// Changes a window, and the lists of the QPs that it ends with.
    fn alter<R>(
        &mut self,
        number: u32,
        change: impl FnOnce(&mut Window, &mut Shown) -> R,
    ) -> Option<R> {
        let window = self.by_number.get_mut(&number)?;
        let before = window.qps();
        let result = change(window, &mut self.shown);
        let after = window.qps();
        if before != after {
            self.list(number, before, after);
        }
        Some(result)
    }

    /// Moves a window from lists of QPs to others.
    fn list(&mut self, number: u32, before: [Option<u32>; 2], after: [Option<u32>; 2]) {
        for qpn in before.into_iter().flatten() {
            let Some(few) = self.of_qp.get_mut(&qpn) else { continue };
            few.remove(number);
            if few.is_empty() {
                self.of_qp.remove(&qpn);
            }
        }
        for qpn in after.into_iter().flatten() {
            if !self.of_qp.contains_key(&qpn) {
                self.of_qp.insert(qpn, Few::default());
            }
            if let Some(few) = self.of_qp.get_mut(&qpn) {
                few.insert(number);
            }
        }
    }

    pub(super) fn insert(&mut self, number: u32, window: Window) {
        self.numbers.insert(number, window.ctx);
        self.by_number.insert(number, window);
    }

    pub(super) fn remove(&mut self, number: u32) -> Option<Window> {
        let window = self.by_number.remove(&number)?;
        self.numbers.remove(number);
        self.list(number, window.qps(), [None; 2]);
        window.states().for_each(|binding| self.shown.less(Some(binding)));
        Some(window)
    }

    /// Takes a window from the hardware; the caller frees it. What was under way is unknown from
    /// now on.
    pub(super) fn kill(&mut self, number: u32) -> Option<HostMw> {
        let kill = |window: &mut Window, shown: &mut Shown| {
            window.under_way.drain(..).for_each(|change| shown.less(change.binding));
            window.host.take()
        };
        self.alter(number, kill).flatten()
    }

    /// Binds or unbinds a window, as a work request of `poster` asks; what the hardware is to be
    /// asked about.
    pub(super) fn bind(
        &mut self,
        poster: Poster,
        wqe: &SqWqe,
        mrs: &Shards<Mr>,
    ) -> Result<Subject, Denied> {
        let bind = |window: &mut Window, shown: &mut Shown| {
            let (subject, binding) = window.bind(poster, wqe, mrs)?;
            shown.more(binding);
            Ok(subject)
        };
        self.alter(Self::number(wqe.imm.get()), bind).ok_or(Denied)?
    }

    /// Frees a window of type 2, as a work request of its QP asks.
    pub(super) fn invalidate(&mut self, poster: Poster, key: u32) -> Result<(), Denied> {
        let free = |window: &mut Window, _: &mut Shown| {
            let its_own = window.binding.is_some_and(|binding| binding.qpn == poster.qpn);
            let known = window.host.is_some() && window.key == key && window.kind == mw_type::TYPE2;
            if !(its_own && known && window.is_open_to(poster)) {
                return Err(Denied);
            }
            window.change(poster, key, None);
            Ok(())
        };
        self.alter(Self::number(key), free).ok_or(Denied)?
    }

    /// A peer has freed a window of type 2.
    pub(super) fn freed_by_peer(&mut self, key: u32) {
        let free = |window: &mut Window, shown: &mut Shown| {
            if window.kind != mw_type::TYPE2 {
                return;
            }
            if window.key == key {
                shown.less(window.binding.take());
            }
            for change in window.under_way.iter_mut().filter(|change| change.key == key) {
                shown.less(change.binding.take());
            }
        };
        self.alter(Self::number(key), free);
    }

    /// A change was executed.
    pub(super) fn done(&mut self, number: u32, at: At) {
        let done = |window: &mut Window, shown: &mut Shown| {
            // The oldest, as a rule: a QP executes in order.
            let first = window.under_way.iter().position(|change| change.at == at);
            if let Some(change) = first.and_then(|first| window.under_way.remove(first)) {
                shown.less(change.binding);
            }
        };
        self.alter(number, done);
    }

    /// A change was not made, and none of those behind it: they are on the same QP.
    pub(super) fn failed(&mut self, number: u32, at: At) {
        let failed = |window: &mut Window, shown: &mut Shown| {
            let Some(first) = window.under_way.iter().position(|change| change.at == at) else {
                return;
            };
            shown.less(window.binding);
            let mut undone = window.under_way.drain(first..);
            if let Some(before) = undone.next() {
                window.key = before.key;
                window.binding = before.binding;
            }
            undone.for_each(|change| shown.less(change.binding));
        };
        self.alter(number, failed);
    }
}
