//! The kernel's part of a driver, and the monitor's: from the socket to commands and events.
//!
//! All virtqueues share one interrupt line (DRV-VQ-1): an eventfd that tells nothing but that there
//! is something to look at. Every wait is bounded (DRV-CTRL-1), and sends KEEPALIVE when it is due
//! (DRV-LIM-1). A device that once did not answer is never asked again (5.6).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::layout::{
    ABI_VERSION, FATAL_EVENTS, GID_ROCE_V2, MAGIC, PAGE_SIZE, PORT_ACTIVE, Record, STATUS_ALIVE,
    cmd,
};
use crate::memory::Memory;
use crate::vhost_user::Connection;
use crate::virtqueue::{EventQueue, Virtqueue};

/// Entries of every virtqueue: "64 is enough for any queue" (2.1).
const QUEUE_SIZE: u16 = 64;
/// More than queues, rings and pages take without buffers and their lists.
const OWN_MEMORY: u64 = 4 << 20;
/// A driver that waits less takes a slow host for a dead one (5.1).
const LEAST_WAIT: Duration = Duration::from_secs(5);
/// Where the response lies behind the request.
const RESPONSE: u64 = 2048;

pub(crate) struct Device {
    connection: Connection,
    pub(crate) memory: Rc<Memory>,
    line: OwnedFd,
    control: Virtqueue,
    requests: u64,
    events: EventQueue<16>,
    completions: Vec<EventQueue<8>>,
    kicks: Vec<Virtqueue>,
    pub(crate) status_page: u64,
    nonce: u64,
    next_keepalive: Instant,
    timeout: Duration,
    lost: bool,
    pub(crate) mac: [u8; 6],
    /// What QUERY_DEVICE and QUERY_PORT answered.
    pub(crate) facts: Record<168>,
    pub(crate) port: Record<32>,
}

impl Device {
    /// Probes the NIC behind a socket, in the order of 5.2. Memory has room for `buffers` bytes.
    pub(crate) fn start(socket: &Path, buffers: u64, timeout: Duration) -> Result<Self> {
        let timeout = timeout.max(LEAST_WAIT);
        let connection = Connection::open(socket, timeout)?;
        let config = connection.config()?;
        let (vectors, kicks) = (config.get16(8), config.get16(10));
        let count = 2 + u64::from(vectors) + u64::from(kicks);
        let fits = vectors > 0 && kicks > 0 && count <= connection.queues()?.min(64);
        if config.get32(0) != MAGIC || !fits {
            return Err(Error::Device("its configuration space is none".to_owned()));
        }
        // Each 512 pages need a list page, and those lists again.
        let memory = Rc::new(Memory::new(buffers + buffers / 256 + OWN_MEMORY)?);
        connection.set_memory(&memory)?;
        let queue = |index| Virtqueue::new(&memory, index, QUEUE_SIZE);
        let vector = |index| EventQueue::new(&memory, index, QUEUE_SIZE);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut this = Self {
            line: eventfd(0, flags).map_err(Error::host("an eventfd"))?,
            control: queue(0)?,
            requests: memory.alloc(PAGE_SIZE)?,
            events: EventQueue::new(&memory, 1, QUEUE_SIZE)?,
            completions: (2..2 + vectors).map(vector).collect::<Result<_>>()?,
            kicks: (2 + vectors..2 + vectors + kicks).map(queue).collect::<Result<_>>()?,
            status_page: memory.alloc(PAGE_SIZE)?,
            // Its low half is not 0.
            nonce: random()? | 1,
            next_keepalive: Instant::now(),
            lost: false,
            mac: config.get(12),
            facts: Record::ZERO,
            port: Record::ZERO,
            connection,
            memory,
            timeout,
        };
        let start = |queue| this.connection.start(queue, &this.memory, this.line.as_fd());
        this.queues().try_for_each(start)?;
        this.events.stock()?;
        this.completions.iter_mut().try_for_each(EventQueue::stock)?;
        this.init()?;
        Ok(this)
    }

    fn queues(&self) -> impl Iterator<Item = &Virtqueue> {
        let events = self.completions.iter().map(|events| &events.queue);
        [&self.control, &self.events.queue].into_iter().chain(events).chain(&self.kicks)
    }

    fn init(&mut self) -> Result<()> {
        self.set_alive(self.nonce.to_le_bytes())?;
        let request = Record::<32>::ZERO.u32(0, ABI_VERSION).u64(8, self.nonce);
        // The base of the response is 8 bytes (5.9). No capability in the rest is one we accept.
        let body = request.u64(16, self.status_page).0;
        let answer: Record<16> = self.request(cmd::INIT, 0, &body, 8)?;
        if answer.get32(0) != ABI_VERSION {
            return Err(Error::Device("INIT answers another version".to_owned()));
        }
        self.facts = self.command(cmd::QUERY_DEVICE, 0, &[])?;
        self.port = self.command(cmd::QUERY_PORT, 0, &[])?;
        if self.port.get8(20) != PORT_ACTIVE {
            return Err(Error::Argument("the port is not active".to_owned()));
        }
        Ok(())
    }

    pub(crate) fn set_gid(&mut self, index: u16, gid: [u8; 16]) -> Result<()> {
        let request = Record::<24>::ZERO.u16(0, index).u8(2, GID_ROCE_V2).bytes(8, &gid);
        self.command::<0>(cmd::GID_SET, 0, &request.0).map(drop)
    }

    /// Notifies a kick queue by its index.
    pub(crate) fn kick(&self, index: u32) -> Result<()> {
        let queue = self.kicks.iter().find(|queue| u32::from(queue.index) == index);
        queue.ok_or_else(|| Error::Device(format!("{index} is no kick queue")))?.notify()
    }

    /// Carries a command out whose response has `N` bytes.
    pub(crate) fn command<const N: usize>(
        &mut self,
        opcode: u16,
        ctx: u32,
        body: &[u8],
    ) -> Result<Record<N>> {
        self.request(opcode, ctx, body, N)
    }

    fn request<const N: usize>(
        &mut self,
        opcode: u16,
        ctx: u32,
        body: &[u8],
        base: usize,
    ) -> Result<Record<N>> {
        if self.lost {
            return Err(Error::Lost);
        }
        let request = [&Record::<16>::ZERO.u16(0, opcode).u32(4, ctx).0, body].concat();
        let (answer, mut status, mut response) =
            (self.requests + RESPONSE, Record::<8>::ZERO, Record::ZERO);
        self.memory.write(self.requests, &request)?;
        // What the device does not write of a response is zero (DRV-EXT-1).
        self.memory.write(answer, &status.0)?;
        self.memory.write(answer + 8, &response.0)?;
        let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let parts = [(self.requests, length(request.len()), false), (answer, length(8 + N), true)];
        self.control.add(0, &parts)?;
        let written = self.answered()? as usize;
        self.memory.read(answer, &mut status.0)?;
        self.memory.read(answer + 8, &mut response.0)?;
        match status.get32(0) {
            0 if (8 + base..=8 + N).contains(&written) => Ok(response),
            status if status != 0 && written >= 8 => Err(Error::Refused(opcode, status)),
            _ => Err(Error::Device(format!("{written} bytes answer command {opcode:#x}"))),
        }
    }

    /// Waits until the command under way is answered: how many bytes were written.
    fn answered(&mut self) -> Result<u32> {
        let deadline = Instant::now() + self.timeout;
        loop {
            match self.control.pop()? {
                Some((0, written)) => return Ok(written),
                Some(_) => return Err(Error::Device("it answers no command".to_owned())),
                None if self.sleep(deadline)? => {}
                None => {
                    self.lost = true;
                    self.set_alive([0; 8])?;
                    return Err(Error::Lost);
                }
            }
        }
    }

    /// Sends KEEPALIVE if it is due: when the next one is.
    pub(crate) fn keep_alive(&mut self) -> Result<Instant> {
        let interval = match self.facts.get32(156) {
            0 => Duration::from_secs(3600),
            interval => Duration::from_millis(u64::from(interval)),
        };
        if Instant::now() >= self.next_keepalive {
            self.command::<0>(cmd::KEEPALIVE, 0, &self.nonce.to_le_bytes())?;
            self.next_keepalive = Instant::now() + interval;
        }
        Ok(self.next_keepalive)
    }

    /// Waits for a completion event of the CQ, of vector 0, and for no other sign.
    pub(crate) fn wait_for(&mut self, cqn: u32, deadline: Instant) -> Result<()> {
        loop {
            while let Some(event) = self.events.take()? {
                // The driver has one QP and one CQ, so it knows whose the event is.
                if FATAL_EVENTS.contains(&event.get32(0)) {
                    return Err(Error::Device(format!("it raises event {}", event.get32(0))));
                }
            }
            while let Some(event) = self.completions[0].take()? {
                if event.get32(0) == cqn {
                    return Ok(());
                }
            }
            let until = deadline.min(self.keep_alive()?);
            if !self.sleep(until)? && Instant::now() >= deadline {
                return Err(Error::Timeout("completion event"));
            }
        }
    }

    /// Sleeps until an interrupt: true. At the deadline: false.
    fn sleep(&self, deadline: Instant) -> Result<bool> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Error::Timeout("end of a wait"))?;
        match poll(&mut [PollFd::new(&self.line, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(false),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Error::host("a wait")(error)),
        }
        // The line is cleared before the rings are looked at; what comes later rings again.
        match rustix::io::read(&self.line, &mut [0_u8; 8][..]) {
            Ok(_) | Err(Errno::AGAIN) => Ok(true),
            Err(error) => Err(Error::host("the interrupt line")(error)),
        }
    }

    fn set_alive(&self, nonce: [u8; 8]) -> Result<()> {
        let word = u32::from_ne_bytes(Record(nonce).get(0));
        self.memory.store(word, self.status_page + STATUS_ALIVE)
    }

    /// Whether the status page still says that the device lives (DRV-LOSS-2).
    pub(crate) fn is_alive(&self) -> Result<bool> {
        let word: u32 = self.memory.load(self.status_page + STATUS_ALIVE, Ordering::Acquire)?;
        Ok(word.to_ne_bytes() == Record(self.nonce.to_le_bytes()).get(0))
    }

    /// SHUTDOWN, then the virtio reset (DRV-LIFE-1). Memory is the driver's again afterwards.
    pub(crate) fn shutdown(&mut self) -> Result<()> {
        let answer = self.command::<0>(cmd::SHUTDOWN, 0, &[]).map(drop);
        self.queues().try_for_each(|queue| self.connection.stop(queue))?;
        answer
    }
}

pub(crate) fn random() -> Result<u64> {
    getrandom::u64().map_err(|error| Error::Argument(format!("no random numbers: {error}")))
}
