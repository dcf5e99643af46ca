//! The null device: a vhost-user device whose one queue gives every chain back at once.
//!
//! It is what a control command or an event costs when the device does nothing: kick, wake-up of a
//! worker in another process, used entry, call, wake-up of the driver. It runs as a process of its
//! own (this program, started again), as the daemon does.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, Listener, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vhost_user_backend::{VhostUserBackendMut, VhostUserDaemon, VringRwLock, VringT};
use virtio_queue::QueueT;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use super::cores::Cores;
use super::latency::median;
use crate::ram::{Pages, Ram};
use crate::virtq::Virtq;

const F_VERSION_1: u64 = 1 << 32;
const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;

#[derive(Debug)]
struct Null {
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
}

impl VhostUserBackendMut for Null {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        1
    }

    fn max_queue_size(&self) -> usize {
        256
    }

    fn features(&self) -> u64 {
        F_VERSION_1 | F_EVENT_IDX | F_PROTOCOL_FEATURES
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&mut self, _enabled: bool) {}

    fn update_memory(&mut self, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> std::io::Result<()> {
        self.memory = memory;
        Ok(())
    }

    fn handle_event(
        &mut self,
        _device_event: u16,
        _set: EventSet,
        vrings: &[VringRwLock],
        _thread: usize,
    ) -> std::io::Result<()> {
        let memory = self.memory.memory();
        let mut vring = vrings[0].get_mut();
        loop {
            vring.get_queue_mut().disable_notification(&*memory).map_err(std::io::Error::other)?;
            while let Some(chain) = vring.get_queue_mut().pop_descriptor_chain(memory.clone()) {
                let head = chain.head_index();
                vring.add_used(head, 8).map_err(std::io::Error::other)?;
            }
            if vring.needs_notification().map_err(std::io::Error::other)? {
                vring.signal_used_queue()?;
            }
            let more = vring.get_queue_mut().enable_notification(&*memory);
            if !more.map_err(std::io::Error::other)? {
                return Ok(());
            }
        }
    }
}

/// Serves one connection on `socket`.
pub fn serve(socket: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
    let null = Arc::new(Mutex::new(Null { memory: memory.clone() }));
    let mut daemon =
        VhostUserDaemon::new("null-echo".into(), null, memory).map_err(|e| e.to_string())?;
    let mut listener = Listener::new(socket, true)?;
    daemon.start(&mut listener).map_err(|e| e.to_string())?;
    // A driver that goes is the normal end, and a process that ends needs no joins.
    let _disconnected = daemon.wait();
    std::process::exit(0)
}

/// A driver of the null device.
#[derive(Debug)]
pub(super) struct Echo {
    vq: Virtq,
    buffers: Pages,
    child: Child,
    _ram: Arc<Ram>,
    _dir: tempfile::TempDir,
    _front: Kept,
}

struct Kept(#[allow(dead_code, reason = "it is the open connection")] Frontend);

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Frontend")
    }
}

fn connect(
    socket: &Path,
    ram: &Arc<Ram>,
    vq: &Virtq,
) -> Result<Frontend, Box<dyn std::error::Error>> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(e) if Instant::now() > deadline => return Err(e.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut front = Frontend::from_stream(stream, 1);
    front.get_features()?;
    front.set_owner()?;
    front.get_protocol_features()?;
    let protocol = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
    front.set_protocol_features(protocol)?;
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    front.set_features(F_VERSION_1 | F_EVENT_IDX | F_PROTOCOL_FEATURES)?;
    let region = &ram.regions()[0];
    front.set_mem_table(&[VhostUserMemoryRegionInfo {
        guest_phys_addr: region.gpa(),
        memory_size: region.size(),
        userspace_addr: region.host_addr(),
        mmap_offset: 0,
        mmap_handle: region.raw_fd(),
    }])?;
    let host = |gpa: u64| region.host_addr() + (gpa - region.gpa());
    let (desc, avail, used) = vq.addresses();
    front.set_vring_num(0, vq.size())?;
    front.set_vring_base(0, 0)?;
    front.set_vring_addr(
        0,
        &VringConfigData {
            queue_max_size: vq.size(),
            queue_size: vq.size(),
            flags: 0,
            desc_table_addr: host(desc),
            avail_ring_addr: host(avail),
            used_ring_addr: host(used),
            log_addr: None,
        },
    )?;
    front.set_vring_call(0, &vq.call)?;
    front.set_vring_kick(0, &vq.kick)?;
    front.set_vring_enable(0, true)?;
    Ok(front)
}

impl Echo {
    /// Starts the device and connects to it.
    pub(super) fn start() -> Result<Self, Box<dyn std::error::Error>> {
        let dir = tempfile::Builder::new().prefix("vrdma-echo-").tempdir()?;
        let socket = dir.path().join("echo.sock");
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(std::env::current_exe()?)
            .arg("--echo-device")
            .arg(&socket)
            .stdin(Stdio::null())
            .spawn()?;
        let ram = Ram::new(0x4000_0000, 1 << 20)?;
        let vq = Virtq::new(&ram, 64, true)?;
        let buffers = ram.alloc(1);
        let front = connect(&socket, &ram, &vq)?;
        Cores::get().device_process(&[child.id()]);
        Ok(Self { vq, buffers, child, _ram: ram, _dir: dir, _front: Kept(front) })
    }

    /// The device's process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// One chain there and back, waiting as a driver's control command does.
    pub(super) fn round_trip(&mut self) {
        let (request, response) = (self.buffers.gpa(0), self.buffers.gpa(2048));
        self.vq.add(&[(request, 24)], &[(response, 16)]).expect("an empty queue");
        self.vq.kick().expect("an eventfd");
        let used = self.vq.wait(Duration::from_secs(5)).expect("an epoll");
        assert!(used.is_some(), "the null device does not answer");
    }

    /// The time of a round trip, in microseconds.
    pub(super) fn trip(&mut self, slice: Duration) -> f64 {
        median(slice, || self.round_trip())
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}
