//! A guest: the connection to a NIC's vhost-user socket, its memory and its virtqueues.
//!
//! The order of messages is the one that QEMU's generic vhost-user device was seen to use:
//! features, protocol features, queue count and configuration space at connection; memory and rings
//! when the driver sets DRIVER_OK. Every message asks for an acknowledgement, so that a refusal is
//! an error at the call that caused it.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::{SealFlags, fcntl_add_seals};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::events::EventQueue;
use crate::pages::Buf;
use crate::process::Process;
use crate::ram::{Pages, Ram, Region, View, lock};
use crate::spec::{self, Take};
use crate::virtq::Virtq;

const F_VERSION_1: u64 = 1 << 32;
const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// What can go wrong between a driver and its device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The vhost-user connection failed or the daemon refused a message.
    #[error("vhost-user: {0}")]
    Vhost(#[from] vhost::Error),
    /// The host failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The device did not answer a control command in time.
    #[error("command {0:#x} timed out")]
    Timeout(u16),
    /// The device answered with a status other than OK.
    #[error("command {opcode:#x} failed with status {status}")]
    Status {
        /// The command.
        opcode: u16,
        /// One of [`spec::err`].
        status: u32,
    },
    /// The device broke the specification.
    #[error("device broke the specification: {0}")]
    Broken(String),
    /// The guest's connection was closed before.
    #[error("the guest is disconnected")]
    Disconnected,
}

impl Error {
    /// The status, if the device answered with one.
    pub fn status(&self) -> Option<u32> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// Results of driver operations.
pub type Result<T> = std::result::Result<T, Error>;

/// How a guest is built.
#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Guest-physical address of the first region.
    pub ram_base: u64,
    /// Bytes of the first region.
    pub ram_bytes: u64,
    /// All memory is in huge pages of 2 MiB, which the host must have.
    pub huge_pages: bool,
    /// Entries of each virtqueue.
    pub queue_size: u16,
    /// Buffers that the driver puts in each event queue at start.
    pub event_buffers: u16,
    /// Negotiate `VIRTIO_F_EVENT_IDX`.
    pub event_idx: bool,
    /// Send one memory table instead of one message per region.
    pub memory_table: bool,
    /// How long a control command may take.
    pub timeout: Duration,
}

impl Default for GuestConfig {
    fn default() -> Self {
        Self {
            ram_base: 0x4000_0000,
            ram_bytes: 32 << 20,
            huge_pages: false,
            queue_size: 64,
            event_buffers: 48,
            event_idx: true,
            memory_table: true,
            timeout: Duration::from_secs(5),
        }
    }
}

/// The configuration space, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceConfig {
    /// `VIRTIO_RDMA_MAGIC`.
    pub magic: u32,
    /// The device's ABI version.
    pub abi_version: u32,
    /// Completion vectors.
    pub comp_vectors: usize,
    /// Kick queues.
    pub kick_queues: usize,
    /// The NIC's MAC address.
    pub mac: [u8; 6],
}

#[derive(Debug)]
pub(crate) struct ControlQueue {
    pub(crate) vq: Virtq,
    pub(crate) request: Pages,
    pub(crate) response: Pages,
}

pub(crate) struct Inner {
    pub(crate) config: GuestConfig,
    front: Mutex<Option<Frontend>>,
    /// The connection under it, of a VM's guest.
    line: Option<Line>,
    pub(crate) ram: Arc<Ram>,
    pub(crate) device: DeviceConfig,
    pub(crate) control: Mutex<ControlQueue>,
    pub(crate) events: Vec<Mutex<EventQueue>>,
    kicks: Vec<Mutex<Virtq>>,
    pub(crate) status: Pages,
    pub(crate) status_view: View,
    pub(crate) nonce: Mutex<u64>,
    pub(crate) gid: Mutex<[u8; 16]>,
    /// It is a process, and this is its socket.
    pub(crate) process: Option<Process>,
    /// Rings and doorbell pages that the device works on, whoever forgot them here.
    held: Mutex<Vec<(u32, Arc<Buf>)>>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest").field("device", &self.device).finish_non_exhaustive()
    }
}

/// A connection that ends for the other side as soon as this side lets go of it. To close it is not
/// enough: a child that another thread has just forked holds a copy until it executes its program.
struct Line(UnixStream);

impl Line {
    fn hang_up(&self) {
        let _gone_already = self.0.shutdown(Shutdown::Both);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// A guest with its virtio RDMA device. Clones are handles to the same guest.
#[derive(Debug, Clone)]
pub struct Guest(pub(crate) Arc<Inner>);

fn negotiate(front: &mut Frontend, config: &GuestConfig) -> Result<DeviceConfig> {
    let offered = front.get_features()?;
    front.set_owner()?;
    let wanted = F_VERSION_1 | F_PROTOCOL_FEATURES | if config.event_idx { F_EVENT_IDX } else { 0 };
    if offered & wanted != wanted {
        return Err(Error::Broken(format!("features {offered:#x} lack some of {wanted:#x}")));
    }
    let protocol = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    let offered = front.get_protocol_features()?;
    if !offered.contains(protocol) {
        return Err(Error::Broken(format!(
            "protocol features {offered:?} lack some of {protocol:?}"
        )));
    }
    front.set_protocol_features(protocol)?;
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let zeroes = [0; spec::CONFIG_SIZE as usize];
    let (_, bytes) =
        front.get_config(0, spec::CONFIG_SIZE, VhostUserConfigFlags::empty(), &zeroes)?;
    let device = DeviceConfig {
        magic: bytes.u32_at(0),
        abi_version: bytes.u32_at(4),
        comp_vectors: usize::from(bytes.u16_at(8)),
        kick_queues: usize::from(bytes.u16_at(10)),
        mac: [bytes[12], bytes[13], bytes[14], bytes[15], bytes[16], bytes[17]],
    };
    if device.magic != spec::MAGIC || device.comp_vectors == 0 || device.kick_queues == 0 {
        return Err(Error::Broken(format!("configuration space {device:?}")));
    }
    let queues = front.get_queue_num()?;
    let needed = (spec::VQ_COMP + device.comp_vectors + device.kick_queues) as u64;
    if queues < needed {
        return Err(Error::Broken(format!("{queues} queues, {needed} needed")));
    }
    front.set_features(wanted)?;
    Ok(device)
}

fn region_info(region: &Region) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: region.gpa(),
        memory_size: region.size(),
        userspace_addr: region.host_addr(),
        mmap_offset: 0,
        mmap_handle: region.raw_fd(),
    }
}

impl Guest {
    /// Connects to the socket at `path` and starts all virtqueues; the driver has not sent INIT
    /// yet.
    pub fn connect(path: &Path, config: GuestConfig) -> Result<Self> {
        let stream = UnixStream::connect(path)?;
        Self::attach(stream, config)
    }

    /// As [`Self::connect`], over a socket that is connected already.
    pub fn attach(stream: UnixStream, config: GuestConfig) -> Result<Self> {
        let line = Line(stream.try_clone()?);
        let mut front = Frontend::from_stream(stream, 64);
        let device = negotiate(&mut front, &config)?;
        let ram = if config.huge_pages {
            Ram::in_huge_pages(config.ram_base, config.ram_bytes)?
        } else {
            Ram::new(config.ram_base, config.ram_bytes)?
        };
        let queue = || Virtq::new(&ram, config.queue_size, config.event_idx);
        let control = ControlQueue { vq: queue()?, request: ram.alloc(4), response: ram.alloc(4) };
        let mut events = vec![Mutex::new(EventQueue::new(&ram, queue()?, 16))];
        for _ in 0..device.comp_vectors {
            events.push(Mutex::new(EventQueue::new(&ram, queue()?, 8)));
        }
        let kicks = (0..device.kick_queues)
            .map(|_| queue().map(Mutex::new))
            .collect::<std::io::Result<_>>()?;
        let status = ram.alloc(1);
        let status_view = status.view(0, spec::PAGE);
        let guest = Self(Arc::new(Inner {
            config,
            front: Mutex::new(Some(front)),
            line: Some(line),
            ram,
            device,
            control: Mutex::new(control),
            events,
            kicks,
            status,
            status_view,
            nonce: Mutex::new(0),
            gid: Mutex::new([0; 16]),
            process: None,
            held: Mutex::new(Vec::new()),
        }));
        guest.send_memory()?;
        guest.start_rings()?;
        Ok(guest)
    }

    /// A process at the socket of a NIC for processes (docs/virtio-rdma-process.md): the same
    /// driver, whose commands go by the socket. It has no virtqueues, no kernel and no life of its
    /// own.
    pub fn of_process(path: &Path) -> Result<Self> {
        Self::of_process_with(path, GuestConfig::default())
    }

    /// As [`Self::of_process`], with as much memory as `config` says.
    pub fn of_process_with(path: &Path, config: GuestConfig) -> Result<Self> {
        let (process, welcome) = Process::connect(path)?;
        let ram = Ram::sealed(config.ram_base, config.ram_bytes)?;
        for region in ram.regions() {
            process.add_memory((region.gpa(), region.size(), 0), region.fd())?;
        }
        let queue = || Virtq::new(&ram, config.queue_size, config.event_idx);
        let control = ControlQueue { vq: queue()?, request: ram.alloc(4), response: ram.alloc(4) };
        let mut kick = queue()?;
        kick.kick = welcome.kick;
        let status = ram.alloc(1);
        Ok(Self(Arc::new(Inner {
            config,
            front: Mutex::new(None),
            line: None,
            device: DeviceConfig {
                magic: spec::MAGIC,
                abi_version: spec::ABI_VERSION,
                comp_vectors: welcome.comp_vectors,
                kick_queues: 1,
                mac: welcome.mac,
            },
            control: Mutex::new(control),
            events: Vec::new(),
            kicks: vec![Mutex::new(kick)],
            status_view: welcome.status,
            status,
            nonce: Mutex::new(u64::from(welcome.alive)),
            gid: Mutex::new([0; 16]),
            process: Some(process),
            held: Mutex::new(Vec::new()),
            ram,
        })))
    }

    /// The socket of a process.
    pub fn process(&self) -> &Process {
        self.0.process.as_ref().expect("a process")
    }

    /// Runs `f` on the vhost-user connection.
    pub fn front<T>(&self, f: impl FnOnce(&mut Frontend) -> vhost::Result<T>) -> Result<T> {
        let mut front = lock(&self.0.front);
        Ok(f(front.as_mut().ok_or(Error::Disconnected)?)?)
    }

    /// The configuration space as it was at connection.
    pub fn device(&self) -> DeviceConfig {
        self.0.device
    }

    /// The guest's memory.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.0.ram
    }

    /// The GID at index 0, as the driver set it.
    pub fn gid(&self) -> [u8; 16] {
        *lock(&self.0.gid)
    }

    /// The status page.
    pub fn status_page(&self) -> &View {
        &self.0.status_view
    }

    /// Keeps memory that was given to the device until [`Self::release`] or the end of this life,
    /// even if a test drops its object: the device goes on writing to it.
    pub(crate) fn hold(&self, ctx: u32, memory: &Arc<Buf>) {
        lock(&self.0.held).push((ctx, Arc::clone(memory)));
    }

    /// The object that used the memory is destroyed.
    pub(crate) fn release(&self, memory: &Arc<Buf>) {
        lock(&self.0.held).retain(|(_, held)| !Arc::ptr_eq(held, memory));
    }

    /// All objects of a context are destroyed.
    pub(crate) fn release_context(&self, ctx: u32) {
        lock(&self.0.held).retain(|(of, _)| *of != ctx);
    }

    /// All objects are destroyed.
    pub(crate) fn release_all(&self) {
        lock(&self.0.held).clear();
    }

    fn send_memory(&self) -> Result<()> {
        let regions: Vec<_> = self.ram().regions().iter().map(|r| region_info(r)).collect();
        if self.0.config.memory_table {
            self.front(|f| f.set_mem_table(&regions).map(drop))
        } else {
            regions.iter().try_for_each(|r| self.front(|f| f.add_mem_region(r).map(drop)))
        }
    }

    /// Plugs memory in and tells the device.
    pub fn add_memory(&self, gpa: u64, size: u64) -> Result<Arc<Region>> {
        let region = self.ram().add_region(gpa, size)?;
        self.tell_of(&region)?;
        Ok(region)
    }

    fn tell_of(&self, region: &Region) -> Result<()> {
        match &self.0.process {
            Some(process) => {
                process.add_memory((region.gpa(), region.size(), 0), region.fd())?;
            }
            None => self.front(|f| f.add_mem_region(&region_info(region)).map(drop))?,
        }
        Ok(())
    }

    /// Plugs in memory that is a file of the caller's; a process's is sealed if it can be.
    pub fn add_file(&self, gpa: u64, size: u64, file: OwnedFd) -> Result<Arc<Region>> {
        if self.0.process.is_some() {
            // Without seals it is memory for regions all the same.
            let _sealed = fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW);
        }
        let region = self.ram().add_file(gpa, size, file)?;
        self.tell_of(&region)?;
        Ok(region)
    }

    /// Unplugs the region at `gpa`; the device has let go of it when this returns.
    pub fn remove_memory(&self, gpa: u64) -> Result<()> {
        let region = self.ram().remove_region(gpa).ok_or(Error::Disconnected)?;
        match &self.0.process {
            Some(process) => process.remove_memory(region.gpa(), region.size()),
            None => self.front(|f| f.remove_mem_region(&region_info(&region))),
        }
    }

    /// Sends the whole memory table again, which moves every region in the daemon.
    pub fn resend_memory(&self) -> Result<()> {
        let regions: Vec<_> = self.ram().regions().iter().map(|r| region_info(r)).collect();
        self.front(|f| f.set_mem_table(&regions).map(drop))
    }

    fn host_addr(&self, gpa: u64) -> Result<u64> {
        let regions = self.ram().regions();
        let region = regions.iter().find(|r| gpa >= r.gpa() && gpa - r.gpa() < r.size());
        region
            .map(|r| r.host_addr() + (gpa - r.gpa()))
            .ok_or_else(|| Error::Broken(format!("{gpa:#x} is not guest memory")))
    }

    /// Virtqueues of the device, kick queues included.
    pub fn queue_count(&self) -> usize {
        spec::VQ_COMP + self.0.device.comp_vectors + self.0.device.kick_queues
    }

    /// Virtqueue index of the first kick queue.
    pub fn first_kick_queue(&self) -> usize {
        spec::VQ_COMP + self.0.device.comp_vectors
    }

    /// Runs `f` on virtqueue `index`.
    pub fn with_queue<T>(&self, index: usize, f: impl FnOnce(&mut Virtq) -> T) -> T {
        if index == spec::VQ_CONTROL {
            f(&mut lock(&self.0.control).vq)
        } else if index < self.first_kick_queue() {
            f(&mut lock(&self.0.events[index - spec::VQ_EVENT]).vq)
        } else {
            f(&mut lock(&self.0.kicks[index - self.first_kick_queue()]))
        }
    }

    /// All that the device can be kicked by.
    pub fn kick_fds(&self) -> Result<Vec<EventFd>> {
        let first = if self.0.process.is_some() { self.first_kick_queue() } else { 0 };
        (first..self.queue_count()).map(|index| self.kick_fd(index)).collect()
    }

    /// The eventfd that kicks virtqueue `index`.
    pub fn kick_fd(&self, index: usize) -> Result<EventFd> {
        Ok(self.with_queue(index, |q| q.kick.try_clone())?)
    }

    /// Starts virtqueue `index` at ring index `base`.
    pub fn start_ring(&self, index: usize, base: u16) -> Result<()> {
        let (size, addresses, kick, call) = self.with_queue(index, |q| {
            (q.size(), q.addresses(), q.kick.try_clone(), q.call.try_clone())
        });
        let (kick, call) = (kick?, call?);
        let data = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: self.host_addr(addresses.0)?,
            avail_ring_addr: self.host_addr(addresses.1)?,
            used_ring_addr: self.host_addr(addresses.2)?,
            log_addr: None,
        };
        self.front(|f| {
            f.set_vring_num(index, size)?;
            f.set_vring_base(index, base)?;
            f.set_vring_addr(index, &data)?;
            f.set_vring_call(index, &call)?;
            f.set_vring_kick(index, &kick)?;
            f.set_vring_enable(index, true)
        })
    }

    /// Stops virtqueue `index` and answers the ring index at which the device stopped.
    pub fn stop_ring(&self, index: usize) -> Result<u16> {
        let base = self.front(|f| f.get_vring_base(index))?;
        u16::try_from(base).map_err(|_| Error::Broken(format!("ring {index} stopped at {base}")))
    }

    /// Stops all virtqueues, the control queue first as QEMU does; their indices.
    pub fn stop_rings(&self) -> Result<Vec<u16>> {
        (0..self.queue_count()).map(|i| self.stop_ring(i)).collect()
    }

    /// Starts all virtqueues as a new driver does: empty, at index 0, event queues stocked.
    pub fn start_rings(&self) -> Result<()> {
        for index in 0..self.queue_count() {
            self.with_queue(index, Virtq::reset);
            let events = index.checked_sub(spec::VQ_EVENT).and_then(|i| self.0.events.get(i));
            if let Some(queue) = events {
                lock(queue).stock(usize::from(self.0.config.event_buffers));
            }
            self.start_ring(index, 0)?;
        }
        Ok(())
    }

    /// What a virtual machine monitor does with a paused machine: everything stops, nothing is
    /// lost.
    pub fn pause_and_continue(&self) -> Result<()> {
        let bases = self.stop_rings()?;
        for (index, base) in bases.into_iter().enumerate() {
            self.start_ring(index, base)?;
        }
        Ok(())
    }

    /// What a reset of the machine looks like to the device: rings stop and start again at index 0.
    pub fn reset(&self) -> Result<()> {
        self.stop_rings()?;
        self.release_all();
        self.start_rings()
    }

    /// Closes the connection as a killed monitor would, with whatever is in progress.
    pub fn disconnect(&self) {
        if let Some(process) = &self.0.process {
            process.hang_up();
        }
        if let Some(line) = &self.0.line {
            line.hang_up();
        }
        *lock(&self.0.front) = None;
    }

    /// Does the device want a kick?
    pub fn need_kick(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.status_view.load32(spec::STATUS_NEED_KICK, Ordering::Acquire) != 0
    }
}
