//! Memory windows (IBTA 10.6.7): a host window each, bound and unbound by work requests of the guest.
//!
//! Whose key it is, which domain it belongs to and what a bind may show is decided here, before the hardware is asked: providers take the
//! keys of a bind as they come, and rdma_rxe compares no domain of the region (rxe_mw.c, rxe_check_bind_mw). So a guest can bind its own
//! regions to its own windows only.
//!
//! Work requests execute later than they are posted, and may be flushed. A window's state here is what it will be when all that was
//! posted has been executed; each change under way keeps the state before it, for the case that it fails. A region stays while any of
//! these states shows it. While changes are under way on one QP no other QP changes the window: in which order they would be executed nobody
//! knows, and what the hardware lets a window show must never be more than what is known here.
//!
//! A window whose state cannot be known any more (the QP of its bind was destroyed or reset before the answer), or that would hold up the
//! end of a QP or of memory that is gone, is taken from the hardware at once: its keys open nothing, and its number waits for MW_DEALLOC.

use rustc_hash::FxHashMap;
use virtio_rdma_abi::{SqWqe, access, mw_type};

use super::mr::Mr;
use super::nic::Nic;
use super::verbs::{HostMr, HostMw, Subject};
use crate::engine::limits::WINDOWS_PER_MR;
use crate::engine::quota::Kind;
use crate::engine::roster::{Roster, Walk};
use crate::engine::window::with_low_byte;
use crate::engine::{Reply, Status};

/// Windows that may be made in vain: a number that a dead one still has is no good for a new one.
const TRIES: usize = 8;

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
struct Window {
    ctx: u32,
    pdn: u32,
    kind: u32,
    key: u32,
    /// `None`: taken from the hardware before its time.
    host: Option<HostMw>,
    binding: Option<Binding>,
    /// Oldest first.
    under_way: Vec<Change>,
}

/// Bytes of a window.
pub(super) const WINDOW: usize = size_of::<Window>();
/// Bytes of a change that is under way.
pub(super) const CHANGE: usize = size_of::<Change>();

impl Window {
    fn states(&self) -> impl Iterator<Item = Binding> {
        self.binding.into_iter().chain(self.under_way.iter().filter_map(|change| change.binding))
    }

    /// Whether `poster` may change it now.
    fn is_open_to(&self, poster: Poster) -> bool {
        self.under_way.iter().all(|change| change.at.serial == poster.at.serial)
    }

    /// Takes note of a work request that will leave it so.
    fn change(&mut self, at: At, key: u32, binding: Option<Binding>) {
        self.under_way.push(Change { at, key: self.key, binding: self.binding });
        self.key = key;
        self.binding = binding;
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

/// The windows of one NIC, by the upper 24 bits of their keys.
#[derive(Debug, Default)]
pub(super) struct Windows(FxHashMap<u32, Window>, Roster);

impl Windows {
    /// The number of the window that a key names.
    pub(super) const fn number(key: u32) -> u32 {
        key >> 8
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whose a window is.
    pub(super) fn context(&self, number: u32) -> Option<u32> {
        self.0.get(&number).map(|window| window.ctx)
    }

    /// A walk over all.
    pub(super) fn walk(&self) -> Walk {
        self.1.walk()
    }

    /// The next of a walk.
    pub(super) fn next(&self, walk: &mut Walk) -> Option<u32> {
        walk.next(&self.1)
    }

    /// Whether a window shows a region whose memory is gone, or may do so.
    pub(super) fn shows_lost(&self, number: u32, mrs: &FxHashMap<u32, Mr>) -> bool {
        let lost = |binding: Binding| mrs.get(&binding.region).is_none_or(Mr::is_lost);
        self.0.get(&number).is_some_and(|window| window.states().any(lost))
    }

    /// Whether one shows a region, or may do so.
    pub(super) fn show(&self, region: u32) -> bool {
        self.0.values().any(|window| window.states().any(|binding| binding.region == region))
    }

    /// Binds or unbinds a window, as a work request of `poster` asks; what the hardware is to be asked about.
    pub(super) fn bind(
        &mut self,
        poster: Poster,
        wqe: &SqWqe,
        mrs: &FxHashMap<u32, Mr>,
    ) -> Result<Subject, Denied> {
        let (present, new, len) = (wqe.imm.get(), wqe.rkey.get(), wqe.arg0.get());
        let window = self.0.get_mut(&Self::number(present)).ok_or(Denied)?;
        let its_own = window.key == present && window.pdn == poster.pdn;
        let host = window.host.filter(|_| its_own && window.is_open_to(poster));
        let host = host.ok_or(Denied)?;
        // IBTA o10-36.2.2: a type 1 window has addresses.
        let based = window.kind == mw_type::TYPE2 || wqe.aux.get() & access::ZERO_BASED == 0;
        // IBTA o10-37.2.34: a type 2 window is bound from the free state only, and never with length 0.
        let is_free = window.kind == mw_type::TYPE1 || (window.binding.is_none() && len != 0);
        if !is_free || !based {
            return Err(Denied);
        }
        let region = u32::try_from(wqe.arg1.get() & u64::from(u32::MAX)).map_err(|_| Denied)?;
        let shown: Option<HostMr> = if len == 0 {
            None
        } else {
            let mr = mrs.get(&region).filter(|mr| mr.pdn == poster.pdn).ok_or(Denied)?;
            Some(mr.bindable((wqe.remote_addr.get(), len), wqe.aux.get()).ok_or(Denied)?)
        };
        let binding = shown.map(|_| Binding { region, qpn: poster.qpn });
        window.change(poster.at, with_low_byte(present, new), binding);
        Ok(Subject::Window(host, shown))
    }

    /// Frees a window of type 2, as a work request of its QP asks.
    pub(super) fn invalidate(&mut self, poster: Poster, key: u32) -> Result<(), Denied> {
        let window = self.0.get_mut(&Self::number(key)).ok_or(Denied)?;
        let its_own = window.binding.is_some_and(|binding| binding.qpn == poster.qpn);
        let known = window.host.is_some() && window.key == key && window.kind == mw_type::TYPE2;
        if !(its_own && known && window.is_open_to(poster)) {
            return Err(Denied);
        }
        window.change(poster.at, key, None);
        Ok(())
    }

    /// A peer has freed a window of type 2.
    pub(super) fn freed_by_peer(&mut self, key: u32) {
        let found = self.0.get_mut(&Self::number(key));
        let Some(window) = found.filter(|window| window.kind == mw_type::TYPE2) else { return };
        if window.key == key {
            window.binding = None;
        }
        for change in window.under_way.iter_mut().filter(|change| change.key == key) {
            change.binding = None;
        }
    }

    /// A change was executed.
    pub(super) fn done(&mut self, number: u32, at: At) {
        if let Some(window) = self.0.get_mut(&number) {
            window.under_way.retain(|change| change.at != at);
        }
    }

    /// A change was not made, and none of those behind it: they are on the same QP.
    pub(super) fn failed(&mut self, number: u32, at: At) {
        let Some(window) = self.0.get_mut(&number) else { return };
        let Some(first) = window.under_way.iter().position(|change| change.at == at) else {
            return;
        };
        if let Some(before) = window.under_way.get(first).copied() {
            window.key = before.key;
            window.binding = before.binding;
        }
        window.under_way.truncate(first);
    }

    /// Takes windows from the hardware; the caller frees them.
    fn take(&mut self, chosen: impl Fn(&Window) -> bool) -> Vec<HostMw> {
        let chosen = self.0.values_mut().filter(|window| chosen(window));
        chosen
            .filter_map(|window| {
                window.under_way.clear();
                window.host.take()
            })
            .collect()
    }
}

impl Nic {
    pub(super) fn allocate_window(
        &mut self,
        ctx: u32,
        pdn: u32,
        kind: u32,
    ) -> Result<Reply, Status> {
        let pd = self.host_pd(ctx, pdn)?;
        let offered = match kind {
            mw_type::TYPE1 => self.host.limits().windows_1,
            mw_type::TYPE2 => self.host.limits().windows_2,
            _ => return Err(self.no_such_window()),
        };
        if !offered {
            return Err(Status::NOTSUPP);
        }
        if self.windows.0.len() >= self.max_windows() as usize {
            return Err(Status::NOMEM);
        }
        self.kept.place(Kind::Window, self.windows.0.len())?;
        let mut vain = Vec::new();
        let mut found = Err(Status::NOMEM);
        for _ in 0..TRIES {
            match self.host.alloc_mw(pd, kind) {
                Ok((host, key)) if self.windows.0.contains_key(&Windows::number(key)) => {
                    vain.push(host);
                }
                Ok(made) => {
                    found = Ok(made);
                    break;
                }
                Err(error) => {
                    found = Err(self.refused(error));
                    break;
                }
            }
        }
        self.free_windows(vain);
        let (host, key) = found?;
        let window =
            Window { ctx, pdn, kind, key, host: Some(host), binding: None, under_way: Vec::new() };
        self.windows.0.insert(Windows::number(key), window);
        self.windows.1.insert(Windows::number(key));
        self.join_pd(pdn);
        Ok(Reply::Object(key))
    }

    /// A device without windows does not know their types either.
    fn no_such_window(&self) -> Status {
        let limits = self.host.limits();
        if limits.windows_1 || limits.windows_2 { Status::INVAL } else { Status::NOTSUPP }
    }

    pub(super) fn max_windows(&self) -> u32 {
        let ours = self.settings.limits.max_mrs.saturating_mul(WINDOWS_PER_MR);
        ours.min(self.host.limits().max_mw)
    }

    pub(super) fn deallocate_window(&mut self, ctx: u32, key: u32) -> Result<Reply, Status> {
        let number = Windows::number(key);
        self.windows.0.get(&number).filter(|window| window.ctx == ctx).ok_or(Status::NOENT)?;
        self.remove_window(number);
        Ok(Reply::Done)
    }

    pub(super) fn remove_window(&mut self, number: u32) {
        if let Some(window) = self.windows.0.remove(&number) {
            self.windows.1.remove(number);
            self.leave_pd(window.pdn);
            self.free_windows(window.host.into_iter().collect());
        }
    }

    fn free_windows(&mut self, windows: Vec<HostMw>) {
        windows.into_iter().for_each(|window| self.forgo(|nic| nic.host.dealloc_mw(window)));
    }

    /// A life of a QP is over: what its work requests did to windows stays unknown. If the QP itself goes, its windows of type 2 go
    /// too, because rdma_rxe frees no QP that has some (rxe_mw.c, rxe_do_bind_mw: each holds a reference).
    pub(super) fn windows_lose_qp(&mut self, serial: u32, gone: Option<u32>) {
        let lost = self.windows.take(|window| {
            let belongs = window.kind == mw_type::TYPE2
                && window.states().any(|binding| Some(binding.qpn) == gone);
            belongs || window.under_way.iter().any(|change| change.at.serial == serial)
        });
        self.free_windows(lost);
    }

    /// Takes a window from the hardware.
    pub(super) fn free_window(&mut self, number: u32) {
        let Some(window) = self.windows.0.get_mut(&number) else { return };
        window.under_way.clear();
        if let Some(host) = window.host.take() {
            self.free_windows(vec![host]);
        }
    }
}
