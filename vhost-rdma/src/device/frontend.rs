//! The vhost-user messages of one connection.
//!
//! `vhost` parses them; what they mean is decided here. The crate above it, which would do that as
//! well, maps every file that a VMM sends before it asks anybody, and loses track of mappings that
//! it cannot unmap; so it is used for its queues only. Here a file is examined, then mapped
//! (`memory`), then the engine has taken it over, and only then is the message answered.
//!
//! What is refused ends the connection: the VMM has broken the protocol or has asked for what
//! cannot be had, and no VMM goes on after a refusal. Nothing but that connection notices.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;

use super::journal::{Change, Journal, Piece, Place};
use super::kicks::Kicks;
use super::memory::{self, Offer, SLOTS};
use super::session::{QUEUE_SIZE, Session};
use super::vring::{Parts, Vring};

/// Where the VMM itself has a region: ring addresses are given as its own.
#[derive(Debug)]
struct Address {
    vmm: u64,
    guest: u64,
    len: u64,
}

/// See the module.
pub(super) struct Frontend {
    session: Arc<Session>,
    kicks: Arc<Kicks>,
    vrings: Arc<[Vring]>,
    owned: bool,
    features: u64,
    addresses: Vec<Address>,
    journal: Arc<dyn Journal>,
}

fn unsupported<T>() -> Result<T> {
    Err(Error::InvalidOperation("not supported"))
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::ReqHandlerError(io::Error::other(error))
}

impl Frontend {
    /// The messages of `session`, whose queues are kicked by `kicks`.
    pub(super) fn new(
        session: Arc<Session>,
        kicks: Arc<Kicks>,
        vrings: Arc<[Vring]>,
        journal: Arc<dyn Journal>,
    ) -> Self {
        let addresses = Vec::new();
        Self { session, kicks, vrings, owned: false, features: 0, addresses, journal }
    }

    /// Tells `journal` from now on.
    pub(super) fn tell(&mut self, journal: Arc<dyn Journal>) {
        self.journal = journal;
    }

    fn note(&self, change: Change) {
        self.journal.changed(change, &[]);
    }

    /// A queue has this descriptor now, or none.
    fn note_file(&self, change: Change, file: Option<&File>) {
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        self.journal.changed(change, &files);
    }

    /// Takes a region in, if the guest then has at most `most` bytes.
    pub(super) fn plug(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        most: u64,
    ) -> Result<()> {
        let (start, len) = (region.guest_phys_addr, region.memory_size);
        let offer = Offer { start, len, file, offset: region.mmap_offset, loose: false };
        self.session.change_memory(|old| memory::plug(old, offer, most)).map_err(failed)?;
        self.addresses.push(Address { vmm: region.user_addr, guest: start, len });
        let piece = Piece { start, len, vmm: region.user_addr, offset: region.mmap_offset };
        self.note_memory(vec![piece], |_| Change::Plugged(piece));
        Ok(())
    }

    /// The memory at these places is the guest's now, by files that have been looked at.
    fn note_memory(&self, pieces: Vec<Piece>, change: impl FnOnce(Vec<Piece>) -> Change) {
        let space = self.session.memory();
        let files: Option<Vec<BorrowedFd<'_>>> =
            pieces.iter().map(|piece| Some(space.region_at(piece.start)?.file()?.0)).collect();
        self.journal.changed(change(pieces), &files.unwrap_or_default());
    }

    pub(super) fn vring(&self, index: u32) -> Result<&Vring> {
        self.vrings.get(index as usize).ok_or(Error::InvalidParam)
    }

    /// The guest physical address of one of the VMM's.
    fn guest_address(&self, vmm: u64) -> Result<u64> {
        self.addresses
            .iter()
            .find_map(|region| {
                let offset = vmm.checked_sub(region.vmm).filter(|offset| *offset < region.len)?;
                region.guest.checked_add(offset)
            })
            .ok_or(Error::InvalidParam)
    }

    /// A queue that runs has its kicks listened to, and no other.
    pub(super) fn listen(&self, index: u32) -> Result<()> {
        let vring = self.vring(index)?;
        let kick = vring.kick().filter(|_| vring.runs());
        self.kicks.listen(index, kick).map_err(Error::ReqHandlerError)
    }

    /// A queue runs from its first notification descriptor on.
    fn begin(&self, index: u32) -> Result<()> {
        let vring = self.vring(index)?;
        if vring.kick().is_some() {
            vring.lock().queue().set_ready(true);
        }
        self.listen(index)
    }

    fn every_vring(&self, enabled: bool) -> Result<()> {
        for (index, vring) in (0..).zip(self.vrings.iter()) {
            vring.lock().set_enabled(enabled);
            self.listen(index)?;
        }
        Ok(())
    }
}

impl VhostUserBackendReqHandlerMut for Frontend {
    fn set_owner(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.owned, true) {
            return Err(Error::InvalidOperation("already claimed"));
        }
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.owned = false;
        self.features = 0;
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.features = 0;
        self.every_vring(false)?;
        self.note(Change::Reset);
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(Session::FEATURES)
    }

    /// Without protocol features there is no message that enables queues: they are enabled at once
    /// (vhost-user, "Ring states").
    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !Session::FEATURES != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            self.every_vring(true)?;
        }
        let event_idx = features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        self.vrings.iter().for_each(|vring| vring.lock().queue().set_event_idx(event_idx));
        self.note(Change::Features(features));
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        // As many files as regions: `vhost` looked.
        let offers = regions.iter().zip(files).map(|(region, file)| Offer {
            start: region.guest_phys_addr,
            len: region.memory_size,
            file,
            offset: region.mmap_offset,
            loose: false,
        });
        let offers = offers.collect();
        let most = self.session.max_guest_bytes();
        self.session.change_memory(|old| memory::table(old, offers, most)).map_err(failed)?;
        self.addresses = regions
            .iter()
            .map(|region| Address {
                vmm: region.user_addr,
                guest: region.guest_phys_addr,
                len: region.memory_size,
            })
            .collect();
        let pieces = regions.iter().map(|region| Piece {
            start: region.guest_phys_addr,
            len: region.memory_size,
            vmm: region.user_addr,
            offset: region.mmap_offset,
        });
        self.note_memory(pieces.collect(), Change::Memory);
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let most = self.session.max_guest_bytes();
        self.plug(region, file, most).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (start, len) = (region.guest_phys_addr, region.memory_size);
        self.session.change_memory(|old| Ok(old.unplug(start, len)?)).map_err(failed)?;
        self.addresses.retain(|address| address.guest != start);
        self.note(Change::Unplugged(start));
        Ok(())
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).ok().filter(|size| (1..=QUEUE_SIZE).contains(size));
        self.vring(index)?.lock().queue().set_size(size.ok_or(Error::InvalidParam)?);
        self.note(Change::Size(index, num));
        Ok(())
    }

    /// The used ring goes on where the guest's memory says: no message tells.
    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let vring = self.vring(index)?;
        let place = Place { descriptors: descriptor, used, available };
        let [descriptors, available, used] =
            [descriptor, available, used].map(|address| self.guest_address(address));
        let parts = Parts { descriptors: descriptors?, available: available?, used: used? };
        // Not under the queue's lock: a page of the guest's may take its time to come.
        let used = self.session.used_index(parts.used).map_err(|_| Error::InvalidParam)?;
        vring.lock().set_parts(parts, used).map_err(|_| Error::InvalidParam)?;
        self.note(Change::Place(index, place));
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let next = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.vring(index)?.lock().queue().set_next_avail(next);
        self.note(Change::Base(index, base));
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index)?;
        vring.lock().queue().set_ready(false);
        self.listen(index)?;
        self.session.stop_vring(index).map_err(Error::ReqHandlerError)?;
        let next = vring.lock().queue().next_avail();
        vring.set_kick(None);
        vring.set_call(None);
        self.note(Change::Stopped(index, next.into()));
        Ok(VhostUserVringState::new(index, next.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let vring = self.vring(index.into())?;
        vring.set_kick(file);
        self.note_file(Change::Kick(index.into()), vring.kick().as_deref());
        self.begin(index.into())
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let vring = self.vring(index.into())?;
        vring.set_call(file);
        self.note_file(Change::Call(index.into()), vring.call().as_deref());
        self.begin(index.into())
    }

    /// The descriptor is closed, whatever it is: no error is ever signalled, each is in the log.
    fn set_vring_err(&mut self, index: u8, _file: Option<File>) -> Result<()> {
        self.vring(index.into()).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(Session::PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        if features & !Session::PROTOCOL_FEATURES.bits() != 0 {
            return Err(Error::InvalidParam);
        }
        self.note(Change::ProtocolFeatures(features));
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES;
        if self.features & protocol.bits() == 0 {
            return Err(Error::InactiveFeature(protocol));
        }
        self.vring(index)?.lock().set_enabled(enable);
        self.listen(index)?;
        self.note(Change::Enabled(index, enable));
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        Ok(self.session.config(offset, size))
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _buf: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        unsupported()
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        unsupported()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        unsupported()
    }

    fn get_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        unsupported()
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        unsupported()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        unsupported()
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported()
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        unsupported()
    }
}
