//! What is made on other threads, registrations and address handles, and what these keep alive:
//! their protection domain, and the context that this is in.
//!
//! These end by counts, not by the order of calls: a registration may end on another thread after
//! the NIC has let go of its domain.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use ibverbs_sys as ffi;
use vhost_rdma_memory::ContiguousMapping;
use virtio_rdma_abi as abi;

use super::{check, convert, made};
use crate::verbs::{HostDomain, HostError, HostPart, Keeps, MadeAh, Registered, Result};

/// An opened device, closed with the last of what is in it.
#[derive(Debug)]
pub(super) struct Context(*mut ffi::ibv_context);

// SAFETY: libibverbs is thread-safe (ibv_open_device(3) and rdma-core's libibverbs/README), and the
// context is closed by its last holder alone.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) const fn new(raw: *mut ffi::ibv_context) -> Self {
        Self(raw)
    }

    /// Where it is: no other has that address, as all that was made in it keeps it open.
    pub(super) fn address(&self) -> usize {
        self.0.addr()
    }

    /// What libibverbs knows a registration of this context by, while that is in its table.
    pub(super) fn region(&self, made: &Registered) -> Option<*mut ffi::ibv_mr> {
        made.host.address_in(self.address()).map(ptr::with_exposed_provenance_mut)
    }

    /// The same of an address handle.
    pub(super) fn handle(&self, made: &MadeAh) -> Option<*mut ffi::ibv_ah> {
        made.host.address_in(self.address()).map(ptr::with_exposed_provenance_mut)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: whoever has anything in it holds it.
        let _ = unsafe { ffi::ibv_close_device(self.0) };
    }
}

/// A protection domain, freed with the last of what was made in it here.
#[derive(Debug)]
pub(super) struct Domain {
    raw: *mut ffi::ibv_pd,
    context: Arc<Context>,
}

// SAFETY: the pointer is handed to libibverbs only, which is thread-safe, and freed by its last
// holder alone.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) const fn new(raw: *mut ffi::ibv_pd, context: Arc<Context>) -> Self {
        Self { raw, context }
    }

    pub(super) const fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw
    }

    /// An object of libibverbs' that was made here, and what ends it.
    fn part<T>(&self, raw: *mut T, keeps: impl Keeps + 'static) -> HostPart {
        HostPart::new((self.context.address(), raw.expose_provenance()), keeps)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: QPs and SRQs of it were destroyed before it left the table, and registrations and
        // AHs hold it.
        if let Err(error) = check(unsafe { ffi::ibv_dealloc_pd(self.raw) }) {
            tracing::debug!(%error, "a protection domain of the RNIC goes with its context");
        }
    }
}

/// A registration, and the memory that it must not outlive.
#[derive(Debug)]
struct Region {
    raw: *mut ffi::ibv_mr,
    mapping: Option<Arc<ContiguousMapping>>,
    _domain: Arc<Domain>,
}

// SAFETY: as for the domain; only the last holder deregisters.
unsafe impl Send for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_reg_mr_iova`, and ended here alone.
        if let Err(error) = check(unsafe { ffi::ibv_dereg_mr(self.raw) }) {
            // A device that is gone has none left. Any other may still use the memory: it stays
            // mapped.
            if !matches!(error.0, libc::EIO | libc::ENODEV) {
                tracing::warn!(%error, "a registration of the RNIC cannot be ended");
                std::mem::forget(self.mapping.take());
            }
        }
    }
}

/// An address handle.
#[derive(Debug)]
struct Handle {
    raw: *mut ffi::ibv_ah,
    _domain: Arc<Domain>,
}

// SAFETY: as for the domain; only its holder destroys it.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_create_ah`, and ended here alone; no post is under way in its
        // context, whose thread this is or which never knew it.
        if let Err(error) = check(unsafe { ffi::ibv_destroy_ah(self.raw) }) {
            tracing::debug!(%error, "an address handle of the RNIC goes with its context");
        }
    }
}

impl HostDomain for Arc<Domain> {
    fn register(
        &self,
        mapping: Arc<ContiguousMapping>,
        iova: u64,
        access: u32,
    ) -> Result<Registered> {
        let addr = ptr::with_exposed_provenance_mut(mapping.addr());
        let len = usize::try_from(mapping.len()).map_err(|_| HostError(libc::EINVAL))?;
        let access = c_int::try_from(access).map_err(|_| HostError(libc::EINVAL))?;
        // SAFETY: it is mapped at these addresses for as long as the registration holds it, and the
        // domain lives.
        let raw = made(unsafe { ffi::ibv_reg_mr_iova(self.raw, addr, len, iova, access) })?;
        // SAFETY: a registration that was just made, and that nobody changes.
        let ffi::ibv_mr { lkey, rkey, .. } = *unsafe { &*raw };
        let region = Region { raw, mapping: Some(mapping), _domain: self.clone() };
        Ok(Registered { lkey, rkey, host: self.part(raw, region) })
    }

    fn create_ah(&self, av: &abi::Av) -> Result<MadeAh> {
        let mut attr = convert::address(av)?;
        // SAFETY: the domain lives, `attr` lives through the call.
        let raw = made(unsafe { ffi::ibv_create_ah(self.raw, &raw mut attr) })?;
        let handle = Handle { raw, _domain: self.clone() };
        Ok(MadeAh { destination: av.dgid, host: self.part(raw, handle) })
    }
}
