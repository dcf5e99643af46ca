//! What a NIC's table of keys does with memory windows: it makes them, binds and frees them, and
//! finds what a peer's access through one names.

use virtio_rdma_abi::access;

use super::mr::{Access, Denied, Keyed, MrTable};
use super::numbers::Random;
use super::window::{Bind, Binding, Window, WindowKind, with_low_byte};
use crate::memory::Borrowed;
use crate::nic::Status;

/// Rights that a window may give.
const RIGHTS: u32 = access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::ZERO_BASED
    | access::OPTIONAL_MASK;

impl MrTable {
    /// Makes an unbound window; its key opens nothing yet.
    pub(super) fn allocate_window(
        &mut self,
        owner: (u32, u32),
        kind: WindowKind,
        random: &mut dyn Random,
    ) -> Result<u32, Status> {
        let key = self.new_key(random)?;
        let (ctx, pdn) = owner;
        self.join(key >> 8, owner);
        let since = self.change();
        let window = Window { ctx, pdn, key, kind, binding: None, since };
        self.by_number.insert(key >> 8, Keyed::Window(window));
        Ok(key)
    }

    /// The window of a key.
    pub(super) fn window(&self, key: u32) -> Option<&Window> {
        match self.by_number.get(&(key >> 8)) {
            Some(Keyed::Window(window)) if window.key == key => Some(window),
            _ => None,
        }
    }

    /// Takes note that a window shows its region no longer.
    pub(super) fn unbound(&mut self, window: &Window) {
        if let Some(binding) = window.binding
            && let Some(mr) = self.get_mut(binding.region)
        {
            mr.windows -= 1;
        }
    }

    /// Binds a window, or unbinds one of type 1 (length 0).
    pub(super) fn bind(&mut self, bind: &Bind) -> Result<(), Denied> {
        let window =
            self.window(bind.present).filter(|window| window.pdn == bind.pdn).ok_or(Denied)?;
        let bound = window.binding.is_some();
        // IBTA o10-37.2.34: a type 2 window is bound from the free state only, and never with
        // length 0.
        if window.kind == WindowKind::Two && (bound || bind.len == 0) {
            return Err(Denied);
        }
        let binding = if bind.len == 0 { None } else { Some(self.check_binding(bind)?) };
        self.rebind(bind.present, with_low_byte(bind.present, bind.new), binding);
        Ok(())
    }

    fn check_binding(&self, bind: &Bind) -> Result<Binding, Denied> {
        let mr = self.get(bind.region).ok_or(Denied)?;
        let writes = bind.access & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        // IBTA C10-75: what the window lets peers write, the region must let its owner write.
        let rights_ok = bind.access & !RIGHTS == 0
            && mr.access & access::MW_BIND != 0
            && mr.access & access::ZERO_BASED == 0
            && (!writes || mr.access & access::LOCAL_WRITE != 0);
        let inside = mr.map.is_some() && mr.offset(bind.addr, bind.len).is_some();
        if mr.pdn != bind.pdn || !rights_ok || !inside {
            return Err(Denied);
        }
        let Bind { region, addr, len, access, qpn, .. } = *bind;
        Ok(Binding { region, addr, len, access, qpn })
    }

    fn rebind(&mut self, present: u32, new: u32, binding: Option<Binding>) {
        let since = self.change();
        let Some(Keyed::Window(window)) = self.by_number.get_mut(&(present >> 8)) else { return };
        let old = std::mem::replace(&mut window.binding, binding);
        window.key = new;
        window.since = since;
        for (change, released) in [(old, true), (binding, false)] {
            let Some(mr) = change.and_then(|binding| self.get_mut(binding.region)) else {
                continue;
            };
            if released { mr.windows -= 1 } else { mr.windows += 1 }
        }
    }

    /// Frees a type 2 window for a work request of `qpn`, or for a peer that sent with invalidate
    /// to it.
    pub(super) fn invalidate_window(&mut self, key: u32, qpn: u32) -> Result<(), Denied> {
        let window = self.window(key).ok_or(Denied)?;
        let its_own = window.binding.is_some_and(|binding| binding.qpn == qpn);
        if window.kind != WindowKind::Two || !its_own {
            return Err(Denied);
        }
        self.rebind(key, key, None);
        Ok(())
    }

    /// The memory that a peer's access through a window names.
    pub(super) fn window_segment(
        &self,
        window: &Window,
        access: &Access,
    ) -> Result<Borrowed<'_>, Denied> {
        let binding =
            window.binding.filter(|_| window.key == access.key && access.qpn != 0).ok_or(Denied)?;
        let owner_ok = match window.kind {
            WindowKind::One => window.pdn == access.pdn,
            WindowKind::Two => binding.qpn == access.qpn && window.pdn == access.pdn,
        };
        if !owner_ok || access.rights & !binding.access != 0 {
            return Err(Denied);
        }
        let base = if binding.access & access::ZERO_BASED == 0 { binding.addr } else { 0 };
        let offset = access.addr.checked_sub(base).ok_or(Denied)?;
        if offset > binding.len || u64::from(access.len) > binding.len - offset {
            return Err(Denied);
        }
        self.get(binding.region).ok_or(Denied)?.segment(binding.addr + offset, access.len)
    }
}
